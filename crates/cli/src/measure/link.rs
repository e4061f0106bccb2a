//! Orders out, answers in, a line each: the initiator's end of whatever carries them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use serde::Serialize;

use super::orders::{Answer, Order};
use super::rounds::{Part, Remote};
use crate::pattern::{Mismatch, Pattern};

/// Where orders go to, and where answers come from.
pub(crate) struct Link {
    /// `None` once there are to be no more orders.
    orders: Option<Box<dyn Write>>,
    answers: Receiver<io::Result<String>>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Lost {
    /// It was told that there are no more orders.
    Finished,
    /// It takes no orders any more; why, if the system said so.
    Gone(Option<io::Error>),
    /// It has said nothing for so long.
    Silent(Duration),
    /// What it says cannot be read.
    Unreadable(io::Error),
    /// It said something else.
    Garbled { line: String, why: serde_json::Error },
    /// It does not do that.
    Refused { why: String },
}

/// Bytes of the longest line, its end included.
pub(crate) const LONGEST_LINE: u64 = 64 << 10;
/// Lines that wait to be looked at. There is one answer to an order, and one order at a time.
const LINES: usize = 4;

impl Link {
    /// Reads `answers` on a thread of its own, so that waiting for one can be bounded. The thread ends with them.
    pub(crate) fn new(orders: impl Write + 'static, answers: impl Read + Send + 'static) -> Self {
        Self { orders: Some(Box::new(orders)), answers: listen(answers) }
    }

    /// Gives an order.
    pub(crate) fn order(&mut self, order: &Order) -> Result<(), Lost> {
        let to = self.orders.as_mut().ok_or(Lost::Finished)?;
        write_line(to, order).map_err(|error| Lost::Gone(Some(error)))
    }

    /// Waits for an answer for as long as `patience`.
    pub(crate) fn answer(&mut self, patience: Duration) -> Result<Answer, Lost> {
        let line = match self.answers.recv_timeout(patience) {
            Ok(line) => line.map_err(Lost::Unreadable)?,
            Err(RecvTimeoutError::Timeout) => return Err(Lost::Silent(patience)),
            Err(RecvTimeoutError::Disconnected) => return Err(Lost::Gone(None)),
        };
        match serde_json::from_str(&line) {
            Ok(Answer::Refused { why }) => Err(Lost::Refused { why }),
            Ok(answer) => Ok(answer),
            Err(why) => Err(Lost::Garbled { line, why }),
        }
    }

    /// Says that there are no more orders.
    pub(crate) fn finish(&mut self) {
        self.orders = None;
    }
}

/// Who obeys orders, and can say who it is if it does not.
pub(crate) trait Obedient {
    /// # Errors
    /// It takes no orders.
    fn order(&mut self, order: Order) -> Result<()>;

    /// # Errors
    /// It refused the last order, or is not there to answer it. `len_bytes` is what the order was about.
    fn answer(&mut self, len_bytes: usize) -> Result<Answer>;
}

impl<T: Obedient> Remote for T {
    fn fill(&mut self, pattern: Pattern, len_bytes: usize) -> Result<()> {
        self.order(Order::Fill { pattern, len_bytes })
    }

    fn filled(&mut self, len_bytes: usize) -> Result<()> {
        match self.answer(len_bytes)? {
            Answer::Filled => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn check(&mut self, pattern: Pattern, part: Part) -> Result<Option<Mismatch>> {
        let Part { offset, len } = part;
        self.order(match offset {
            0 => Order::Check { pattern, len_bytes: len },
            offset => Order::CheckPart { pattern, offset_bytes: offset, len_bytes: len },
        })?;
        match self.answer(part.len)? {
            Answer::Checked { mismatch } => Ok(mismatch),
            other => Err(unexpected(&other)),
        }
    }

    fn process_time(&mut self) -> Result<Option<Duration>> {
        self.order(Order::Cost)?;
        match self.answer(0)? {
            Answer::Cost { cpu_ns } => Ok(Some(Duration::from_nanos(cpu_ns))),
            other => Err(unexpected(&other)),
        }
    }
}

/// The error of an answer to another order.
pub(crate) fn unexpected(answer: &Answer) -> anyhow::Error {
    anyhow!("the target answered another order than was given: {answer:?}; is it the same version?")
}

/// The next line, without its end; `None` if there is no more.
///
/// # Errors
/// It cannot be read, is longer than [`LONGEST_LINE`], or no text.
pub(crate) fn read_line<R: BufRead + ?Sized>(from: &mut R) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    from.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
    match line.last() {
        None => return Ok(None),
        Some(b'\n') => _ = line.pop(),
        Some(_) if line.len() as u64 == LONGEST_LINE => {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of more than 64 KiB"));
        }
        // The stream has ended in its midst.
        Some(_) => {}
    }
    let text = String::from_utf8(line);
    text.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Writes a line.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write_line<W: Write + ?Sized>(to: &mut W, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

fn listen(answers: impl Read + Send + 'static) -> Receiver<io::Result<String>> {
    let (sender, lines) = mpsc::sync_channel(LINES);
    thread::spawn(move || {
        let mut answers = BufReader::new(answers);
        while let Some(line) = read_line(&mut answers).transpose() {
            let failed = line.is_err();
            if sender.send(line).is_err() || failed {
                break;
            }
        }
    });
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn answer(said: &'static str) -> Result<Answer, Lost> {
        Link::new(io::sink(), said.as_bytes()).answer(SOON)
    }

    #[test]
    fn answers_are_read_one_after_the_other() {
        let said = "{\"answer\":\"filled\"}\n{\"answer\":\"cost\",\"cpu_ns\":7}\n";
        let mut link = Link::new(io::sink(), said.as_bytes());
        assert_eq!(link.answer(SOON).unwrap(), Answer::Filled);
        assert_eq!(link.answer(SOON).unwrap(), Answer::Cost { cpu_ns: 7 });
        assert!(matches!(link.answer(SOON), Err(Lost::Gone(None))));
        link.order(&Order::Cost).unwrap();
        link.finish();
        assert!(matches!(link.order(&Order::Cost), Err(Lost::Finished)));
    }

    #[test]
    fn what_is_no_answer_is_told_apart() {
        assert!(matches!(answer("hello\n"), Err(Lost::Garbled { line, .. }) if line == "hello"));
        let refused = answer("{\"answer\":\"refused\",\"why\":\"no\"}\n");
        assert!(matches!(refused, Err(Lost::Refused { why }) if why == "no"));
        assert!(matches!(answer(""), Err(Lost::Gone(None))));
        let (silent, _kept) = io::pipe().unwrap();
        let shortly = Duration::from_millis(10);
        let lost = Link::new(io::sink(), silent).answer(shortly);
        assert!(matches!(lost, Err(Lost::Silent(after)) if after == shortly));
    }

    #[test]
    fn a_line_is_bounded() {
        let longest = LONGEST_LINE as usize;
        let mut fits = vec![b'a'; longest - 1];
        fits.push(b'\n');
        assert_eq!(read_line(&mut &fits[..]).unwrap().unwrap().len(), longest - 1);
        let error = read_line(&mut &vec![b'a'; longest + 1][..]).unwrap_err();
        assert_eq!(error.to_string(), "a line of more than 64 KiB");
        assert_eq!(read_line(&mut &b"cut"[..]).unwrap().unwrap(), "cut");
        assert!(read_line(&mut &b"\xff\n"[..]).is_err());
        assert_eq!(read_line(&mut &b""[..]).unwrap(), None);
    }
}
