//! A few threads for what can block: name lookup and exchanges with control ports.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::locked;

type Job = Box<dyn FnOnce() + Send>;

/// Threads come with work and leave after [`IDLE`]; so many always stay.
pub(crate) struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    name: &'static str,
    /// Threads that stay, and threads at most.
    threads: std::ops::RangeInclusive<usize>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

const IDLE: Duration = Duration::from_secs(10);
/// The last thread has nothing to look up for.
const UNTIL_CALLED: Duration = Duration::from_secs(3600);

impl Pool {
    pub(crate) fn start(
        name: &'static str,
        threads: std::ops::RangeInclusive<usize>,
    ) -> Result<Self> {
        // What a simulation has to do waits until its schedule runs it.
        #[cfg(test)]
        let threads = if crate::sim::now().is_some() { 0..=0 } else { threads };
        let stay = *threads.start();
        let (state, changed) = (Mutex::default(), Condvar::new());
        let pool = Self { inner: Arc::new(Inner { name, threads, state, changed }) };
        for _ in 0..stay {
            pool.spawn(&mut pool.inner.lock())
                .map_err(|e| Error::io("starting a pool thread", e))?;
        }
        Ok(pool)
    }

    fn spawn(&self, state: &mut State) -> io::Result<()> {
        let inner = Arc::clone(&self.inner);
        let thread = std::thread::Builder::new().name(inner.name.into());
        thread.spawn(move || inner.work())?;
        state.threads += 1;
        Ok(())
    }

    /// Has `job` run soon. False if the pool is closed, or has no thread and can have none: then it never
    /// runs.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.inner.lock();
        if state.closed {
            return false;
        }
        if state.idle <= state.jobs.len() && state.threads < *self.inner.threads.end() {
            // Without another thread the job waits for those that are there.
            let spawned = self.spawn(&mut state);
            if spawned.is_err() && state.threads == 0 {
                return false;
            }
        }
        state.jobs.push_back(Box::new(job));
        drop(state);
        self.inner.changed.notify_all();
        true
    }

    /// Runs a job that waits, here, for a pool without threads; whether there was one.
    #[cfg(test)]
    pub(crate) fn run_one(&self) -> bool {
        let job = self.inner.lock().jobs.pop_front();
        job.map(|job| job()).is_some()
    }

    /// Drops what has not begun, and waits for what has, at most for `timeout`.
    pub(crate) fn close(&self, timeout: Duration) {
        let mut state = self.inner.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.jobs);
        drop(state);
        drop(dropped);
        self.inner.changed.notify_all();
        let until = Instant::now() + timeout;
        let mut state = self.inner.lock();
        while state.threads > 0 {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return };
            let waited = self.inner.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn work(&self) {
        while let Some(job) = self.next() {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a pool job panicked, which is a bug; its request fails");
            }
        }
        self.lock().threads -= 1;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        let until = Instant::now() + IDLE;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let spare = state.threads > *self.threads.start();
            let left = until.saturating_duration_since(Instant::now());
            if state.closed || (spare && left.is_zero()) {
                return None;
            }
            let left = if spare { left } else { UNTIL_CALLED };
            state.idle += 1;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const MAX_THREADS: usize = 8;

    #[test]
    fn jobs_run_at_the_same_time_up_to_the_bound_and_all_run() {
        let pool = Pool::start("test", 1..=MAX_THREADS).unwrap();
        let (sender, receiver) = mpsc::channel();
        let gate = Arc::new(std::sync::Barrier::new(MAX_THREADS));
        for i in 0..MAX_THREADS * 3 {
            let (sender, gate) = (sender.clone(), Arc::clone(&gate));
            assert!(pool.run(move || {
                gate.wait();
                sender.send(i).unwrap();
            }));
        }
        let mut done: Vec<usize> = receiver.iter().take(MAX_THREADS * 3).collect();
        done.sort_unstable();
        assert_eq!(done, (0..MAX_THREADS * 3).collect::<Vec<_>>());
        pool.close(Duration::from_secs(5));
        assert_eq!(pool.inner.lock().threads, 0);
        assert!(!pool.run(|| {}));
    }

    #[test]
    fn a_panicking_job_does_not_take_the_pool_down() {
        let pool = Pool::start("test", 1..=MAX_THREADS).unwrap();
        let (sender, receiver) = mpsc::channel();
        pool.run(|| panic!("on purpose"));
        pool.run(move || sender.send(1).unwrap());
        assert_eq!(receiver.recv(), Ok(1));
        pool.close(Duration::from_secs(5));
    }
}
