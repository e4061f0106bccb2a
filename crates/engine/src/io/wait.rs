//! How an IO thread waits for what comes next.

use std::io;
use std::time::{Duration, Instant};

use mio::Events;

use crate::clock;
use crate::io::conns::{Conn, Kind};
use crate::io::thread::Reactor;
use crate::spin::Spin;

/// It spins for a moment before it sleeps, if it usually does not have to wait for long.
pub(super) struct Waits {
    /// Between requests, for which somebody waits.
    between: Spin,
    /// In the middle of payloads. What comes then is not lost by waiting for more of it, so only gaps are bridged which are
    /// so short that the processor has nearly all of its time to move bytes.
    within: Spin,
    /// Connections that are in the middle of a payload, and when the last one of them was driven.
    flowing: usize,
    flowed: Instant,
}

/// By how much gaps within payloads are shorter than those between requests.
const SHORTER: u32 = 5;
/// A payload that has not gone on for so long is not waited for: its peer may be frozen, and others have requests.
const HALTED: Duration = Duration::from_millis(20);

impl Waits {
    pub(super) fn new(limit: Duration) -> Self {
        let (between, within) = (Spin::new(limit), Spin::new(limit / SHORTER));
        Self { between, within, flowing: 0, flowed: clock::now() }
    }

    /// A connection was driven.
    pub(super) fn note(&mut self, conn: &mut Conn, now: Instant) {
        self.forget(conn);
        conn.flowing = conn.flows();
        if conn.flowing {
            self.flowing += 1;
            self.flowed = now;
        }
    }

    /// A connection is closed.
    pub(super) fn forget(&mut self, conn: &mut Conn) {
        self.flowing -= usize::from(std::mem::take(&mut conn.flowing));
    }

    /// How who waits from `begin` on waits.
    fn spin(&self, begin: Instant) -> &Spin {
        let flows = self.flowing > 0 && begin.saturating_duration_since(self.flowed) < HALTED;
        if flows { &self.within } else { &self.between }
    }
}

impl Reactor {
    /// Waits until something has happened, or is due.
    pub(super) fn wait(&mut self, events: &mut Events) -> io::Result<()> {
        let timeout = self.timeout();
        if timeout == Some(Duration::ZERO) {
            return self.poll.poll(events, timeout);
        }
        let Self { waits, poll, .. } = self;
        let begin = clock::now();
        let spin = waits.spin(begin);
        let mut polled = Ok(());
        events.clear();
        spin.wait(begin, timeout.unwrap_or(Duration::MAX), || {
            polled = poll.poll(events, Some(Duration::ZERO));
            polled.is_err() || !events.is_empty()
        });
        if polled.is_ok() && events.is_empty() {
            polled = poll.poll(events, timeout);
        }
        spin.learn(clock::since(begin));
        polled
    }
}

#[cfg(test)]
impl Reactor {
    /// How many connections are in the middle of a payload; `None`: they are not counted right.
    pub(crate) fn flowing(&self) -> Option<usize> {
        let flowing = self.each().filter(|conn| conn.flowing).count();
        (flowing == self.waits.flowing).then_some(flowing)
    }

    /// Whether it waits for more of a payload.
    pub(crate) fn awaits_payload(&self) -> bool {
        std::ptr::eq(self.waits.spin(clock::now()), &raw const self.waits.within)
    }
}

impl Conn {
    /// Whether a payload has arrived, or was sent, in part.
    fn flows(&self) -> bool {
        match &self.kind {
            Kind::Lane(lane) => lane.is_open() && (!self.writable || lane.is_in_payload()),
            Kind::Serve(serve) => !self.writable || !serve.is_idle(),
            Kind::Control(_) | Kind::Ask(_) => false,
        }
    }
}
