//! Whose memory the initiator reads and writes: it obeys orders, and checks what arrived there.

use std::io::{BufRead, Write};

use anyhow::Result;

use super::link::{read_line, write_line};
use super::orders::{Answer, Order};
use crate::cpu;
use crate::memory::Buffer;
use crate::pattern::Pattern;

/// Says that it is `ready`, and answers orders until there are no more.
///
/// # Errors
/// Orders cannot be read, answers not be written.
pub(crate) fn obey(
    memory: &Buffer,
    ready: Answer,
    orders: &mut dyn BufRead,
    answers: &mut dyn Write,
) -> Result<()> {
    write_line(answers, &ready)?;
    while let Some(line) = read_line(orders)? {
        let answer = match serde_json::from_str(&line) {
            Ok(order) => carry_out(memory, order),
            Err(why) => Answer::Refused { why: format!("this is no order: {why}") },
        };
        write_line(answers, &answer)?;
    }
    Ok(())
}

fn carry_out(memory: &Buffer, order: Order) -> Answer {
    match order {
        Order::Fill { len_bytes, .. } | Order::Check { len_bytes, .. }
            if len_bytes > memory.len() =>
        {
            Answer::Refused { why: format!("there are {} bytes, not {len_bytes}", memory.len()) }
        }
        Order::Fill { pattern, len_bytes } => match pattern.fill(memory, len_bytes) {
            Ok(()) => Answer::Filled,
            Err(error) => Answer::Refused { why: error.to_string() },
        },
        Order::Check { pattern, len_bytes } => compare(memory, pattern, 0, len_bytes),
        Order::CheckPart { pattern, offset_bytes, len_bytes } => {
            let end = offset_bytes.checked_add(len_bytes);
            if offset_bytes % 8 != 0 || end.is_none_or(|end| end > memory.len()) {
                let there = memory.len();
                let why = format!("[{offset_bytes}, +{len_bytes}) is no part of {there} bytes");
                return Answer::Refused { why };
            }
            compare(memory, pattern, offset_bytes, len_bytes)
        }
        Order::Cost => {
            let cpu_ns = u64::try_from(cpu::process_time().as_nanos()).unwrap_or(u64::MAX);
            Answer::Cost { cpu_ns }
        }
    }
}

fn compare(memory: &Buffer, pattern: Pattern, offset: usize, len: usize) -> Answer {
    match pattern.check_part(memory, offset, len) {
        Ok(mismatch) => Answer::Checked { mismatch },
        Err(error) => Answer::Refused { why: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use tensorferry::HostBuffer;

    use super::*;

    const LEN: usize = 5000;

    fn zeroed(len: usize) -> Buffer {
        Buffer::Host(HostBuffer::zeroed(len).unwrap())
    }

    fn told(memory: &Buffer, orders: &str) -> Vec<Answer> {
        let ready =
            Answer::Ready { segment: "127.0.0.1:15000".into(), addr: memory.addr(), device: None };
        let mut answers = Vec::new();
        obey(memory, ready, &mut orders.as_bytes(), &mut answers).unwrap();
        let lines = String::from_utf8(answers).unwrap();
        lines.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_target_whose_memory_is_corrupt_says_so() {
        let memory = zeroed(LEN);
        let pattern = Pattern::of_round(1, 1);
        let fill = serde_json::to_string(&Order::Fill { pattern, len_bytes: LEN }).unwrap();
        let check = serde_json::to_string(&Order::Check { pattern, len_bytes: LEN }).unwrap();
        let answers = told(&memory, &format!("{fill}\n{check}\n"));
        assert_eq!(answers, [Answer::Filled, Answer::Checked { mismatch: None }]);

        let mut byte = [0];
        memory.read_into(4321, &mut byte).unwrap();
        memory.write(4321, &[!byte[0]]).unwrap();
        let [Answer::Checked { mismatch: Some(mismatch) }] = told(&memory, &check)[..] else {
            panic!("a flipped byte was not found")
        };
        assert_eq!((mismatch.first_offset_bytes, mismatch.wrong_bytes), (4321, 1));
    }

    #[test]
    fn orders_that_make_no_sense_are_refused_and_the_next_one_is_obeyed() {
        let memory = zeroed(LEN);
        let pattern = Pattern::of_round(1, 1);
        let long = serde_json::to_string(&Order::Fill { pattern, len_bytes: LEN + 1 }).unwrap();
        let answers = told(&memory, &format!("{{\n\n{long}\n{{\"order\":\"cost\"}}\n"));
        assert!(
            matches!(
                &answers[..],
                [
                    Answer::Refused { .. },
                    Answer::Refused { .. },
                    Answer::Refused { .. },
                    Answer::Cost { cpu_ns: 1.. }
                ]
            ),
            "{answers:?}"
        );
    }
    #[test]
    fn a_part_is_compared_by_itself_and_has_to_be_one() {
        let memory = zeroed(LEN);
        let pattern = Pattern::of_round(1, 1);
        let part = |offset_bytes, len_bytes| {
            let order = Order::CheckPart { pattern, offset_bytes, len_bytes };
            told(&memory, &serde_json::to_string(&order).unwrap()).remove(0)
        };
        pattern.fill(&memory, LEN).unwrap();
        memory.write(100, &[0, 1, 2, 3]).unwrap();
        assert_eq!(part(104, LEN - 104), Answer::Checked { mismatch: None });
        let Answer::Checked { mismatch: Some(mismatch) } = part(96, 16) else {
            panic!("wrong bytes were not found")
        };
        assert!((100..104).contains(&mismatch.first_offset_bytes) && mismatch.checked_bytes == 16);
        for (offset, len) in [(4, 8), (0, LEN + 1), (8, LEN), (usize::MAX & !7, 16)] {
            let answer = part(offset, len);
            assert!(
                matches!(&answer, Answer::Refused { why } if why.contains("is no part of 5000")),
                "{answer:?}"
            );
        }
    }
}
