//! How long whoever waits spins before it sleeps: a thread of the user's, or an IO thread.

// Not modelled by loom: a static one cannot be, and nothing is read because of it.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicIsize, AtomicU32 as Pid};
use std::time::{Duration, Instant};

use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// What those who wait for something know of how long they wait. Spinning saves the time that it takes to be woken, which
/// is of no use for what takes much longer, or while others want the processor.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// How long waits usually are, in nanoseconds.
    usual: AtomicU32,
    spinning: AtomicUsize,
    places: &'static Places,
    born: Instant,
    /// Nanoseconds from then until when nobody spins, since others want the processor.
    avoided: AtomicU64,
}

/// How many threads of a process may spin at the same time, however many engines it has: with more of them than cores,
/// each takes the processor from another one's work.
#[derive(Debug)]
struct Places {
    all: isize,
    taken: AtomicIsize,
}

/// More of them than idle cores would take the processors from the threads that they wait for.
const MOST_SPINNING: usize = 1;
/// Spinning is of use if waits are at most so many times as long as the limit: being woken takes about as long as a
/// small transfer.
const WORTH: u32 = 2;
/// A new wait counts for one part of so many in what is usual.
const MEMORY: u32 = 8;
/// Who spins lets others have the processor at each look: whoever is waited for may need this very one. If they want it
/// for so long, they have it.
const WANTED: Duration = Duration::from_micros(15);
/// Who has it for so long computes, and whoever lets him have it may lose as much each time. So that little is lost by
/// trying, nobody spins for so many times as long.
const COMPUTES: Duration = Duration::from_millis(1);
const CAUTION: u32 = 20;

/// Why somebody spins no longer.
enum Spun {
    /// It is done.
    Done,
    /// It took longer than the limit.
    InVain,
    /// Others have wanted the processor, and had it for so long.
    Wanted(Duration),
}

impl Spin {
    /// Waiters spin for at most `limit`; not at all if it is zero.
    pub(crate) fn new(limit: Duration) -> Self {
        Self::among(limit, Places::of_process())
    }

    fn among(limit: Duration, places: &'static Places) -> Self {
        Self {
            limit,
            usual: AtomicU32::new(0),
            spinning: AtomicUsize::new(0),
            places,
            born: Instant::now(),
            avoided: AtomicU64::new(0),
        }
    }

    /// Spins from `begin` until `done`, at most for `timeout` and as long as it is of use.
    pub(crate) fn wait(&self, begin: Instant, timeout: Duration, done: impl FnMut() -> bool) {
        if !self.is_worth_it() || self.is_avoided(begin) {
            return;
        }
        let first = self.spinning.fetch_add(1, Ordering::Relaxed) < MOST_SPINNING;
        let spin = || spin(begin, timeout.min(self.limit), done);
        let spun = if first { self.places.lend(spin) } else { None };
        self.spinning.fetch_sub(1, Ordering::Relaxed);
        match spun {
            // However soon after the limit it comes: who spins for what takes a little longer burns all of the time for
            // nothing.
            Some(Spun::InVain) if timeout >= self.limit => self.learn(Duration::MAX),
            Some(Spun::Wanted(lost)) if lost >= COMPUTES => self.avoid(begin + lost, lost),
            _ => {}
        }
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

    /// Others have had the processor for a time until `now`.
    #[cold]
    fn avoid(&self, now: Instant, lost: Duration) {
        let until = (now - self.born).saturating_add(lost.saturating_mul(CAUTION));
        let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
        self.avoided.store(until, Ordering::Relaxed);
    }

    fn is_avoided(&self, now: Instant) -> bool {
        (now - self.born).as_nanos() < self.avoided.load(Ordering::Relaxed).into()
    }

    fn is_worth_it(&self) -> bool {
        let worth = nanoseconds(self.limit).saturating_mul(WORTH);
        !self.limit.is_zero() && self.usual.load(Ordering::Relaxed) <= worth
    }
}

impl Places {
    fn of_process() -> &'static Self {
        static PLACES: OnceLock<Places> = OnceLock::new();
        static PROCESS: Pid = Pid::new(0);
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let places = PLACES.get_or_init(|| Self::new(cores()));
        let process = std::process::id();
        if PROCESS.swap(process, Ordering::Relaxed) != process {
            // After a fork the child has the count, and none of the threads that are counted.
            places.taken.store(0, Ordering::Relaxed);
        }
        places
    }

    fn new(all: usize) -> Self {
        Self { all: all.try_into().unwrap_or(isize::MAX), taken: AtomicIsize::new(0) }
    }

    /// What `spin` returns, if there is a place to do it in.
    fn lend<T>(&self, spin: impl FnOnce() -> T) -> Option<T> {
        let free = self.taken.fetch_add(1, Ordering::Relaxed) < self.all;
        let spun = free.then(spin);
        self.taken.fetch_sub(1, Ordering::Relaxed);
        spun
    }
}

fn nanoseconds(time: Duration) -> u32 {
    // A quarter of what fits, so that sums do.
    time.as_nanos().min(u128::from(u32::MAX / 4)) as u32
}

fn spin(begin: Instant, limit: Duration, mut done: impl FnMut() -> bool) -> Spun {
    let mut spun = begin.elapsed();
    while !done() {
        if spun >= limit {
            return Spun::InVain;
        }
        std::thread::yield_now();
        let now = begin.elapsed();
        if now - spun > WANTED {
            return Spun::Wanted(now - spun);
        }
        spun = now;
    }
    Spun::Done
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    /// Apart from the engines of other tests.
    fn places(all: usize) -> &'static Places {
        Box::leak(Box::new(Places::new(all)))
    }

    fn apart(limit: Duration) -> Spin {
        Spin::among(limit, places(usize::MAX))
    }

    fn spins(spin: &Spin) -> bool {
        // It is done at the first look, so that nobody else is let have the processor.
        let mut looked = false;
        spin.wait(Instant::now(), LIMIT, || {
            looked = true;
            true
        });
        looked
    }

    #[test]
    fn waiters_spin_while_waits_are_short() {
        let spin = apart(LIMIT);
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

    /// Waits that take a little longer than the limit are usually short enough.
    #[test]
    fn waiters_who_have_spun_in_vain_spin_less_often() {
        let (spin, waits) = (apart(LIMIT), 100);
        let spun = (0..waits).filter(|_| {
            let spun = std::cell::Cell::new(false);
            // What it began so long ago, it has spun for already.
            let begin = Instant::now().checked_sub(LIMIT).expect("the machine runs for longer");
            spin.wait(begin, Duration::MAX, || {
                spun.set(true);
                false
            });
            spin.learn(LIMIT + LIMIT / 2);
            spun.get()
        });
        let spun = spun.count();
        assert!((5..=waits / 2).contains(&spun), "{spun} of {waits}");
    }

    #[test]
    fn one_spins_at_a_time_and_none_without_a_limit() {
        let spin = apart(LIMIT);
        spin.wait(Instant::now(), LIMIT, || {
            assert!(!spins(&spin));
            true
        });
        assert!(spins(&spin));
        assert!(!spins(&apart(Duration::ZERO)));
    }

    #[test]
    fn no_more_spin_at_once_than_there_are_places_whatever_they_wait_for() {
        let two = places(2);
        let [one, other, third] = [(); 3].map(|()| Spin::among(LIMIT, two));
        one.wait(Instant::now(), LIMIT, || {
            other.wait(Instant::now(), LIMIT, || {
                assert!(!spins(&third));
                true
            });
            assert!(spins(&third), "there is one again");
            true
        });
        assert_eq!(two.taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn spinning_ends() {
        let spin = apart(LIMIT);
        let begin = Instant::now();
        spin.wait(begin, Duration::MAX, || false);
        assert!(begin.elapsed() >= WANTED);
    }

    #[test]
    fn a_processor_that_others_compute_on_is_left_to_them_for_a_while() {
        let spin = apart(LIMIT);
        let (now, lost) = (Instant::now(), Duration::from_millis(3));
        let spins_at = |after: Duration| {
            let mut looked = false;
            spin.wait(now + after, LIMIT, || {
                looked = true;
                true
            });
            looked
        };
        spin.avoid(now, lost);
        assert!(!spins_at(Duration::ZERO) && !spins_at(lost * (CAUTION - 1)));
        assert!(spins_at(lost * (CAUTION + 1)));
        spin.avoid(now, Duration::MAX);
        assert!(!spins_at(Duration::from_secs(3600)), "of any length");
    }

    #[test]
    fn any_limit_will_do() {
        let spin = apart(Duration::MAX);
        for _ in 0..100 {
            spin.learn(Duration::MAX);
        }
        spin.learn(Duration::ZERO);
    }
}
