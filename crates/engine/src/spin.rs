//! How long whoever waits spins before it sleeps: a thread of the user's, or an IO thread.

use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// What those who wait for something know of how long they wait. Spinning saves the time that it takes to be woken, which
/// is of no use for what takes much longer, or while others want the processor.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// How long waits usually are, in nanoseconds.
    usual: AtomicU32,
    spinning: AtomicUsize,
}

/// More of them than idle cores would take the processors from the threads that they wait for.
const MOST_SPINNING: usize = 1;
/// Spinning is of use if waits are at most so many times as long as the limit: being woken takes about as long as a
/// small transfer.
const WORTH: u32 = 2;
/// A new wait counts for one part of so many in what is usual.
const MEMORY: u32 = 8;
/// How often others are let have the processor, and how long they have it if they want it.
const YIELD: Duration = Duration::from_micros(5);
const WANTED: Duration = Duration::from_micros(15);

impl Spin {
    /// Waiters spin for at most `limit`; not at all if it is zero.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, usual: AtomicU32::new(0), spinning: AtomicUsize::new(0) }
    }

    /// Spins from `begin` until `done`, at most for `timeout` and as long as it is of use.
    pub(crate) fn wait(&self, begin: Instant, timeout: Duration, done: impl FnMut() -> bool) {
        if !self.is_worth_it() {
            return;
        }
        if self.spinning.fetch_add(1, Ordering::Relaxed) < MOST_SPINNING {
            spin(begin, timeout.min(self.limit), done);
        }
        self.spinning.fetch_sub(1, Ordering::Relaxed);
    }

    /// A wait took so long.
    pub(crate) fn learn(&self, waited: Duration) {
        // What is longer than this is all the same, and soon forgotten.
        let most = self.limit.saturating_mul(WORTH * WORTH);
        let waited = nanoseconds(waited.min(most));
        // Others who learn meanwhile may be lost, which does no harm.
        let usual = self.usual.load(Ordering::Relaxed);
        self.usual.store(usual - usual / MEMORY + waited / MEMORY, Ordering::Relaxed);
    }

    fn is_worth_it(&self) -> bool {
        let worth = nanoseconds(self.limit).saturating_mul(WORTH);
        !self.limit.is_zero() && self.usual.load(Ordering::Relaxed) <= worth
    }
}

fn nanoseconds(time: Duration) -> u32 {
    // A quarter of what fits, so that sums do.
    time.as_nanos().min(u128::from(u32::MAX / 4)) as u32
}

fn spin(begin: Instant, limit: Duration, mut done: impl FnMut() -> bool) {
    let (mut spun, mut yield_at) = (Duration::ZERO, YIELD);
    while !done() && spun < limit {
        std::hint::spin_loop();
        spun = begin.elapsed();
        if spun >= yield_at {
            std::thread::yield_now();
            let now = begin.elapsed();
            if now - spun > WANTED {
                return;
            }
            (spun, yield_at) = (now, now + YIELD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    fn spins(spin: &Spin) -> bool {
        let looked = std::cell::Cell::new(0);
        spin.wait(Instant::now(), LIMIT, || looked.replace(looked.get() + 1) > 1);
        looked.get() > 0
    }

    #[test]
    fn waiters_spin_while_waits_are_short() {
        let spin = Spin::new(LIMIT);
        assert!(spins(&spin), "before anything is known");
        for _ in 0..20 {
            spin.learn(Duration::from_millis(20));
        }
        assert!(!spins(&spin), "after long waits");
        for _ in 0..20 {
            spin.learn(LIMIT);
        }
        assert!(spins(&spin), "after short ones");
        spin.learn(Duration::MAX);
        assert!(spins(&spin), "one long wait among short ones is an exception");
    }

    #[test]
    fn one_spins_at_a_time_and_none_without_a_limit() {
        let spin = Spin::new(LIMIT);
        spin.wait(Instant::now(), LIMIT, || {
            assert!(!spins(&spin));
            true
        });
        assert!(spins(&spin));
        assert!(!spins(&Spin::new(Duration::ZERO)));
    }

    #[test]
    fn spinning_ends() {
        let spin = Spin::new(LIMIT);
        let begin = Instant::now();
        spin.wait(begin, Duration::MAX, || false);
        assert!(begin.elapsed() >= WANTED);
    }

    #[test]
    fn any_limit_will_do() {
        let spin = Spin::new(Duration::MAX);
        for _ in 0..100 {
            spin.learn(Duration::MAX);
        }
        spin.learn(Duration::ZERO);
    }
}
