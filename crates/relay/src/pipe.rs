//! One way of a connection, without a socket and without a clock.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::rule::{End, Rule};

/// How much one way of a connection holds.
pub(crate) const HELD: usize = 64 << 10;
/// How much it holds more where bytes arrive late: what is under way on a long line.
pub(crate) const UNDER_WAY: usize = 4 << 20;

/// How the stream of the sender has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ended {
    Closed,
    Reset,
}

/// What can be done for the receiver now.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Next {
    /// So many bytes of [`Pipe::front`] may leave.
    Send(usize),
    /// Nothing before this.
    Wait(Instant),
    /// Nothing before more comes.
    Nothing,
    /// The sender has ended, and all it has sent has been passed on.
    Over(Ended),
    /// The rule's own end has been reached.
    Reached(End),
}

pub(crate) struct Pipe {
    rule: Rule,
    chunks: VecDeque<Chunk>,
    held: usize,
    /// Bytes taken from the sender.
    taken: u64,
    /// Bytes given to the receiver.
    given: u64,
    spoilt: u64,
    ended: Option<Ended>,
    purse: Option<Purse>,
    shut: bool,
    /// Nothing is read or given until another rule comes.
    stopped: bool,
}

/// What may be given at a rate. It holds a hundredth of a second's worth, so that a pause is not made up for.
struct Purse {
    credit: u128,
    at: Instant,
}

/// What a byte costs. At a rate of one byte a second a nanosecond earns one.
const A_BYTE: u128 = 1_000_000_000;

impl Purse {
    fn fill(&mut self, now: Instant, rate: u64) {
        let earned = now.duration_since(self.at).as_nanos() * u128::from(rate);
        let most = u128::from((rate / 100).max(1)) * A_BYTE;
        (self.credit, self.at) = ((self.credit + earned).min(most), self.at.max(now));
    }
}

struct Chunk {
    due: Instant,
    bytes: Vec<u8>,
    at: usize,
}

impl Pipe {
    pub(crate) fn new(rule: Rule) -> Self {
        Self {
            rule,
            chunks: VecDeque::new(),
            held: 0,
            taken: 0,
            given: 0,
            spoilt: 0,
            ended: None,
            purse: None,
            shut: false,
            stopped: false,
        }
    }

    pub(crate) fn set_rule(&mut self, rule: Rule) {
        if rule.rate != self.rule.rate {
            self.purse = None;
        }
        self.rule = rule;
        self.stopped = false;
    }

    /// How much may be read from the sender.
    pub(crate) fn room(&self) -> usize {
        if self.ended.is_some() || self.rule.stall || self.stopped {
            return 0;
        }
        if self.shut {
            return HELD;
        }
        let under_way = if self.rule.delay_ms > 0 { UNDER_WAY } else { 0 };
        (HELD + under_way).saturating_sub(self.held).min(HELD)
    }

    /// Takes what was read from the sender.
    pub(crate) fn take(&mut self, now: Instant, bytes: &[u8]) {
        if self.shut || bytes.is_empty() {
            return;
        }
        let mut bytes = bytes.to_vec();
        if let Some(corrupt) = &self.rule.corrupt {
            self.spoilt += corrupt.apply(self.taken, &mut bytes);
        }
        self.taken += bytes.len() as u64;
        self.held += bytes.len();
        let due = now + Duration::from_millis(self.rule.delay_ms);
        self.chunks.push_back(Chunk { due, bytes, at: 0 });
    }

    /// The sender has ended.
    pub(crate) fn end(&mut self, ended: Ended) {
        self.ended.get_or_insert(ended);
    }

    /// Nothing more is given; what comes is thrown away.
    pub(crate) fn shut(&mut self) {
        self.shut = true;
        self.chunks.clear();
        self.held = 0;
    }

    pub(crate) fn is_shut(&self) -> bool {
        self.shut
    }

    /// The sender has ended, and nothing is left to be given.
    pub(crate) fn is_done(&self) -> bool {
        self.shut && self.ended.is_some()
    }

    /// Nothing more is read or given, until another rule comes.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
    }

    pub(crate) fn next(&mut self, now: Instant) -> Next {
        if self.shut || self.stopped {
            return Next::Nothing;
        }
        let mut most = self.front().len();
        if let Some(after) = self.rule.after {
            let left = after.bytes.saturating_sub(self.given);
            if left == 0 {
                return Next::Reached(after.end);
            }
            most = most.min(usize::try_from(left).unwrap_or(usize::MAX));
        }
        let Some(front) = self.chunks.front() else {
            return self.ended.map_or(Next::Nothing, Next::Over);
        };
        if front.due > now {
            return Next::Wait(front.due);
        }
        if self.rule.single_bytes {
            most = 1;
        }
        match self.rule.rate {
            Some(rate) => self.paced(now, rate.max(1), most),
            None => Next::Send(most),
        }
    }

    /// As many of `most` bytes as the rate allows.
    fn paced(&mut self, now: Instant, rate: u64, most: usize) -> Next {
        let purse = self.purse.get_or_insert(Purse { credit: A_BYTE, at: now });
        purse.fill(now, rate);
        match usize::try_from(purse.credit / A_BYTE).unwrap_or(usize::MAX) {
            0 => {
                let nanos = (A_BYTE - purse.credit).div_ceil(u128::from(rate));
                Next::Wait(now + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
            }
            credit => Next::Send(most.min(credit)),
        }
    }

    /// The bytes that leave next.
    pub(crate) fn front(&self) -> &[u8] {
        self.chunks.front().map_or(&[], |chunk| &chunk.bytes[chunk.at..])
    }

    /// So many of them have left.
    pub(crate) fn sent(&mut self, n: usize) {
        let Some(front) = self.chunks.front_mut() else { return };
        front.at += n;
        if front.at == front.bytes.len() {
            self.chunks.pop_front();
        }
        self.held -= n;
        self.given += n as u64;
        if let Some(purse) = &mut self.purse {
            purse.credit = purse.credit.saturating_sub(n as u128 * A_BYTE);
        }
    }

    pub(crate) fn given(&self) -> u64 {
        self.given
    }

    pub(crate) fn spoilt(&self) -> u64 {
        self.spoilt
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Way;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// How many bytes leave by the end of so many milliseconds, if the receiver takes all it is given.
    fn given_by(pipe: &mut Pipe, from: Instant, until: u64) -> u64 {
        let mut now = from;
        loop {
            match pipe.next(now) {
                Next::Send(n) => pipe.sent(n),
                Next::Wait(at) if at <= from + ms(until) => now = at,
                _ => return pipe.given(),
            }
        }
    }

    #[test]
    fn a_rate_holds_from_the_first_byte_on_and_after_a_pause() {
        for rate in [1, 3, 1000, 1_000_000] {
            let from = Instant::now();
            let mut pipe = Pipe::new(Rule::new(Way::Both).rate(rate));
            pipe.take(from, &vec![7; 3_000_000]);
            // The first byte is free, and a hundredth of a second's worth may be in hand.
            let most = |ms: u64| 1 + rate * ms / 1000 + (rate / 100).max(1);
            let least = |ms: u64| rate * ms / 1000;
            for until in [0, 999, 1000, 2000] {
                let given = given_by(&mut pipe, from, until);
                assert!(
                    (least(until)..=most(until)).contains(&given),
                    "{rate}: {given} by {until}"
                );
            }
            // For three seconds nobody asks: that is not made up for.
            let before = pipe.given();
            let Next::Send(n) = pipe.next(from + ms(5000)) else { panic!("it is time") };
            pipe.sent(n);
            assert!(pipe.given() - before <= (rate / 100).max(1));
        }
    }

    #[test]
    fn bytes_leave_when_they_are_due_and_in_order() {
        let from = Instant::now();
        let mut pipe = Pipe::new(Rule::new(Way::Both).delay(ms(20)));
        pipe.take(from, b"ab");
        pipe.take(from + ms(5), b"c");
        assert_eq!(pipe.next(from + ms(19)), Next::Wait(from + ms(20)));
        assert_eq!(pipe.next(from + ms(20)), Next::Send(2));
        pipe.sent(2);
        assert_eq!(pipe.next(from + ms(20)), Next::Wait(from + ms(25)));
        pipe.end(Ended::Closed);
        assert_eq!(pipe.next(from + ms(24)), Next::Wait(from + ms(25)));
        pipe.sent(1);
        assert_eq!(pipe.next(from + ms(25)), Next::Over(Ended::Closed));
    }

    #[test]
    fn what_is_held_has_a_bound() {
        for (rule, bound) in
            [(Rule::default(), HELD), (Rule::default().delay(ms(1)), HELD + UNDER_WAY)]
        {
            let mut pipe = Pipe::new(rule);
            let mut held = 0;
            while pipe.room() > 0 {
                let room = pipe.room();
                pipe.take(Instant::now(), &vec![0; room]);
                held += room;
            }
            assert_eq!(held, bound);
        }
    }

    #[test]
    fn an_end_comes_after_its_bytes_and_what_is_behind_them_does_not_leave() {
        let now = Instant::now();
        let mut pipe = Pipe::new(Rule::new(Way::Both).after(3, End::Fin));
        pipe.take(now, b"abcdef");
        assert_eq!(pipe.next(now), Next::Send(3));
        pipe.sent(2);
        assert_eq!(pipe.next(now), Next::Send(1));
        pipe.sent(1);
        assert_eq!(pipe.next(now), Next::Reached(End::Fin));
        pipe.stop();
        assert_eq!((pipe.next(now), pipe.room()), (Next::Nothing, 0));
        pipe.set_rule(Rule::default());
        assert_eq!(pipe.next(now), Next::Send(3));
    }
}
