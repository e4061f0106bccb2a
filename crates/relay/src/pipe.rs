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
        (self.credit, self.at) = ((self.credit + earned).min(most), now);
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
