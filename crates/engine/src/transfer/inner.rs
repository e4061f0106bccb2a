//! A batch as the engine works on it: its entries, how much of them is settled, and who waits for that.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use tensorferry_wire::{Notification, Op};

use crate::clock;
use crate::error::{Error, Result, Subject};
use crate::memory::Lent;
use crate::metrics::PeerMetrics;
use crate::registry::Pin;
use crate::spin::Spin;
use crate::staging::{Stager, Word};
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering, fence};
use crate::sync::{Condvar, Mutex, locked};
use crate::transfer::cause::{Cause, FailedBatch, Stop};
use crate::transfer::{BatchState, Request, Slice};

/// Who made a batch, and is told how it goes.
pub(crate) trait Owner: Send + Sync {
    /// The segment name of the peer.
    fn peer(&self) -> &Arc<str>;
    /// Every entry of `batch` is complete: deliver its notification, then `finish` it.
    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>);
    /// `batch` was told to stop: have everyone who holds a slice of it settle that.
    fn stopped(&self, batch: &Arc<BatchInner>);
    /// `batch` is final.
    fn finished(&self, batch: &BatchInner);
    /// What waiters of this engine know.
    fn spin(&self) -> &Spin;
}

/// What a batch keeps alive until it is final.
#[derive(Default)]
pub(crate) struct Held {
    /// Pins on the registered buffers that its local ranges lie in.
    pub(crate) pins: Vec<Pin>,
    /// Buffers lent by value, by request; none if none is.
    pub(crate) buffers: Vec<Lent>,
}

/// Where the local memory of a batch's requests is.
#[derive(Default)]
pub(crate) struct Places {
    devices: Vec<Arc<Stager>>,
    /// By request, 0 for the host's; those that are not said are the host's.
    of: Vec<u8>,
}

/// What a batch is made of.
pub(crate) struct Order {
    pub(crate) requests: Vec<Request>,
    pub(crate) held: Held,
    pub(crate) places: Places,
    pub(crate) notification: Option<Notification>,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    /// What a stream of the caller waits for.
    pub(crate) word: Option<Word>,
}

pub(crate) struct BatchInner {
    owner: Arc<dyn Owner>,
    entries: Box<[Entry]>,
    devices: Vec<Arc<Stager>>,
    word: Option<Word>,
    /// Entries that are not settled.
    unsettled: AtomicUsize,
    failures: Mutex<Vec<Failure>>,
    notify_error: Mutex<Option<Error>>,
    pub(crate) started: Instant,
    pub(crate) deadline: Instant,
    pub(crate) notification: Option<Notification>,
    /// A [`Stop`], or 0.
    stop: AtomicU8,
    held: Mutex<Held>,
    /// A [`BatchState`] as [`code`] numbers it. On a cache line of its own, since waiters spin on it
    /// while `unsettled` is counted down.
    state: Padded<AtomicU32>,
    /// Threads that sleep until it is final, and wakers.
    sleepers: AtomicUsize,
    wakers: Mutex<Wakers>,
    is_final: Condvar,
}

/// Who is to be woken when a batch is final, besides threads that sleep; each by a key.
#[derive(Default)]
struct Wakers {
    next_key: u64,
    waiting: Vec<(u64, Waker)>,
}

#[repr(align(128))]
struct Padded<T>(T);

/// A request and what is left of it: 32 bytes.
struct Entry {
    local: u64,
    remote: u64,
    len: u64,
    /// Slices that are not settled and copies that have not ended (at least 1 while the entry is not settled), and
    /// [`ENTRY_FAILED`].
    left: AtomicU32,
    op: Op,
    /// Where its local memory is: 0 is the host, else one more than the place of a device in `devices`.
    place: u8,
}

const ENTRY_FAILED: u32 = 1 << 31;

struct Failure {
    entry: u32,
    cause: Cause,
    elapsed: Duration,
}

impl BatchInner {
    pub(crate) fn new(owner: Arc<dyn Owner>, order: Order) -> Arc<Self> {
        let Order { requests, held, places, notification, started, deadline, word } = order;
        let mut entries: Box<[Entry]> = requests.into_iter().map(Entry::new).collect();
        for (entry, place) in entries.iter_mut().zip(places.of) {
            entry.place = place;
        }
        let unsettled = entries.iter().filter(|e| e.len > 0).count();
        Arc::new(Self {
            owner,
            unsettled: AtomicUsize::new(unsettled),
            entries,
            devices: places.devices,
            word,
            failures: Mutex::default(),
            notify_error: Mutex::default(),
            started,
            deadline,
            notification,
            stop: AtomicU8::new(0),
            held: Mutex::new(held),
            state: Padded(AtomicU32::new(code(BatchState::Running))),
            sleepers: AtomicUsize::new(0),
            wakers: Mutex::default(),
            is_final: Condvar::new(),
        })
    }

    pub(crate) fn owner(&self) -> &dyn Owner {
        &*self.owner
    }

    /// Number of entries, the zero-length ones among them.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn request(&self, entry: u32) -> Request {
        let e = &self.entries[entry as usize];
        Request { op: e.op, local: e.local, remote: e.remote, len: e.len }
    }

    /// Whether it has at most so many entries and bytes, all of them in the host's memory.
    pub(crate) fn fits(&self, entries: usize, bytes: u64) -> bool {
        let all = || self.entries.iter().map(|entry| entry.len).sum::<u64>();
        self.entries.len() <= entries && self.devices.is_empty() && all() <= bytes
    }

    /// The device that the local memory of `entry` is on; `None`: a socket takes it.
    #[inline]
    pub(crate) fn device(&self, entry: u32) -> Option<&Arc<Stager>> {
        if self.devices.is_empty() {
            return None;
        }
        match self.entries[entry as usize].place {
            0 => None,
            place => Some(&self.devices[usize::from(place) - 1]),
        }
    }

    /// Whether nothing is left to move.
    pub(crate) fn is_settled(&self) -> bool {
        self.unsettled.load(Ordering::Acquire) == 0
    }

    /// Whether `entry` has failed already, so that its other slices need not be sent.
    pub(crate) fn has_failed(&self, entry: u32) -> bool {
        self.entries[entry as usize].left.load(Ordering::Relaxed) & ENTRY_FAILED != 0
    }

    /// One more part of `entry` is to be settled. Another part, which is not, vouches for the entry meanwhile.
    pub(crate) fn add_part(&self, entry: u32) {
        // Relaxed: that part keeps the count from falling to nothing, and parts are handed to other threads by locks.
        self.entries[entry as usize].left.fetch_add(1, Ordering::Relaxed);
    }

    /// Settles a part of `entry`; the last one of the last entry ends the batch.
    pub(crate) fn settle(self: &Arc<Self>, entry: u32, verdict: std::result::Result<(), Cause>) {
        let left = &self.entries[entry as usize].left;
        if let Err(cause) = verdict {
            self.note_failure(entry, cause);
        }
        // AcqRel: each part releases its bytes, and the last part acquires those of all others.
        let before = left.fetch_sub(1, Ordering::AcqRel) & !ENTRY_FAILED;
        debug_assert!(before > 0, "a slice is settled once");
        if before == 1 {
            self.entry_settled();
        }
    }

    #[cold]
    fn note_failure(&self, entry: u32, cause: Cause) {
        let failure = Failure { entry, cause, elapsed: clock::since(self.started) };
        let mut failures = locked(&self.failures);
        let left = &self.entries[entry as usize].left;
        if left.fetch_or(ENTRY_FAILED, Ordering::Relaxed) & ENTRY_FAILED == 0 {
            failures.push(failure);
        } else if let Cause::DeviceStuck(_) = failure.cause
            && let Some(known) = failures.iter_mut().find(|known| known.entry == entry)
        {
            // Whatever was told before: the caller has to know that the memory may still be touched.
            *known = failure;
        }
    }

    fn entry_settled(self: &Arc<Self>) {
        // AcqRel: as in `settle`, one level up.
        if self.unsettled.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.all_settled();
        }
    }

    /// Called once, when nothing is left to move.
    pub(crate) fn all_settled(self: &Arc<Self>) {
        // A notification needs no local memory, however long it takes.
        *locked(&self.held) = Held::default();
        if self.notification.is_some() && locked(&self.failures).is_empty() {
            Arc::clone(&self.owner).deliver(self);
        } else {
            self.finish(None);
        }
    }

    /// Makes the batch final. After this nothing of the engine touches its local memory.
    pub(crate) fn finish(&self, notify_error: Option<Error>) {
        let state = match (self.failed_state(), &notify_error) {
            (None, None) => BatchState::Completed,
            (None, Some(_)) => BatchState::Failed,
            (Some(state), _) => state,
        };
        *locked(&self.notify_error) = notify_error;
        self.owner.finished(self);
        // Release: pairs with the Acquire in `state`; publishes the batch's bytes and failures.
        self.state.0.store(code(state), Ordering::Release);
        // SeqCst fences here and where `sleepers` grows: either this sees the sleeper, or it sees the state.
        fence(Ordering::SeqCst);
        let mut wakers = Vec::new();
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            wakers = std::mem::take(&mut locked(&self.wakers).waiting);
            self.is_final.notify_all();
        }
        if let Some(word) = &self.word {
            word.release();
        }
        // Last, since what they do is not ours; one that panics must not end a thread of the engine, or others' wakes.
        for (_, waker) in wakers {
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!(
                    "a waker of a batch panicked; whoever awaits the batch may not learn of its end"
                );
            }
        }
    }

    /// Fails every entry of a batch of which nobody has taken a slice.
    pub(crate) fn fail_unbegun(self: &Arc<Self>, cause: &Cause) {
        for entry in 0..self.len() as u32 {
            if self.request(entry).len > 0 {
                Slice::whole(self, entry).settle(Err(cause.clone()));
            }
        }
    }

    fn failed_state(&self) -> Option<BatchState> {
        let failures = locked(&self.failures);
        let any = |wanted: fn(&Cause) -> bool| failures.iter().any(|f| wanted(&f.cause));
        if failures.is_empty() {
            None
        } else if any(|c| matches!(c, Cause::Stopped { stop: Stop::Cancelled, .. })) {
            Some(BatchState::Cancelled)
        } else if any(|c| matches!(c, Cause::Stopped { stop: Stop::TimedOut, .. })) {
            Some(BatchState::TimedOut)
        } else {
            Some(BatchState::Failed)
        }
    }

    pub(crate) fn state(&self) -> BatchState {
        // Acquire: pairs with the Release in `finish`.
        match self.state.0.load(Ordering::Acquire) {
            0 => BatchState::Running,
            1 => BatchState::Completed,
            2 => BatchState::Failed,
            3 => BatchState::TimedOut,
            _ => BatchState::Cancelled,
        }
    }

    pub(crate) fn is_final(&self) -> bool {
        self.state() != BatchState::Running
    }

    /// Tells the batch to stop, unless it was told before. Whoever holds slices settles them at
    /// the next look.
    pub(crate) fn request_stop(&self, stop: Stop) {
        // Relaxed: only the code itself is read; nothing is published by it.
        let _ = self.stop.compare_exchange(0, stop as u8, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Why the batch is to stop, if it is. `now` past its deadline stops it.
    pub(crate) fn stop_at(&self, now: Instant) -> Option<Stop> {
        if now >= self.deadline {
            self.request_stop(Stop::TimedOut);
        }
        Stop::from_code(self.stop.load(Ordering::Relaxed))
    }

    /// Adds what became of the batch to the counters; what there is to say of it, if it failed.
    pub(crate) fn count(&self, metrics: &PeerMetrics) -> Option<FailedBatch> {
        let failures = locked(&self.failures);
        let failed = failures.len() as u64;
        let completed = self.entries.len() as u64 - failed;
        metrics.requests_completed.add(completed);
        metrics.requests_failed.add(failed);
        let (mut read, mut written) = (0, 0);
        let good = self.entries.iter().filter(|e| e.left.load(Ordering::Relaxed) == 0);
        for entry in good {
            match entry.op {
                Op::Read => read += entry.len,
                Op::Write => written += entry.len,
            }
        }
        metrics.bytes_read.add(read);
        metrics.bytes_written.add(written);
        if failed == 0 && locked(&self.notify_error).is_none() {
            metrics.batches_completed.add(1);
            return None;
        }
        metrics.batches_failed.add(1);
        Some(self.describe(&failures))
    }

    /// The result of one entry, or `None` while it is not known.
    pub(crate) fn outcome(&self, index: usize) -> Option<Result<()>> {
        let entry = self.entries.get(index)?;
        let failures = locked(&self.failures);
        if let Some(failure) = failures.iter().find(|f| f.entry as usize == index) {
            return Some(Err(self.error(failure)));
        }
        let settled = entry.len == 0 || entry.left.load(Ordering::Acquire) == 0;
        settled.then_some(Ok(()))
    }

    /// The entries that have failed so far, by index, and why.
    pub(crate) fn failed_entries(&self) -> Vec<(usize, Error)> {
        let failures = locked(&self.failures);
        failures.iter().map(|f| (f.entry as usize, self.error(f))).collect()
    }

    /// Of a batch that failed.
    pub(crate) fn first_error(&self) -> Error {
        self.describe(&locked(&self.failures)).first
    }

    #[cold]
    fn describe(&self, failures: &[Failure]) -> FailedBatch {
        let first = match failures.first() {
            Some(failure) => self.error(failure),
            None => locked(&self.notify_error).clone().unwrap_or(Error::Closed),
        };
        FailedBatch { failed: failures.len(), of: self.len(), first }
    }

    /// Pins on what the local range of `entry` touches, of their own.
    pub(crate) fn pins(&self, entry: u32) -> Vec<Pin> {
        let Request { local, len, .. } = self.request(entry);
        let held = locked(&self.held);
        held.pins.iter().filter(|pin| pin.touches(local, len)).map(Pin::again).collect()
    }

    /// The memory that was lent to `entry` by value, if it was.
    pub(crate) fn lent(&self, entry: u32) -> Option<Lent> {
        locked(&self.held).buffers.get(entry as usize).cloned()
    }

    /// Whether a pin of the batch is on the buffer that starts at `addr`.
    pub(crate) fn pins_buffer(&self, addr: u64) -> bool {
        locked(&self.held).pins.iter().any(|pin| pin.buffer_addr() == addr)
    }

    /// Whether one pin of the batch covers the range, and user space may read it, or write it. `hint` remembers which:
    /// pins are in the order of the requests, and a batch may have as many.
    pub(crate) fn pins_range(&self, addr: u64, len: u64, write: bool, hint: &mut usize) -> bool {
        let covers = |pin: &Pin| pin.contains(addr, len) && (!write || pin.is_writable());
        let held = locked(&self.held);
        let from = (*hint).min(held.pins.len());
        let (before, after) = held.pins.split_at(from);
        let found = after.iter().chain(before).position(covers);
        *hint = found.map_or(from, |at| (from + at) % held.pins.len());
        found.is_some()
    }

    /// Sleeps until the batch is final, at most until `until`; whether it is.
    pub(crate) fn sleep(&self, until: Instant) -> bool {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = locked(&self.wakers);
        while !self.is_final() {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            let waited = self.is_final.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        self.is_final()
    }

    /// Has `waker` woken when the batch is final, in the place of the one that is known by `key`. Whether it is final
    /// already; then it may be that nobody is woken.
    pub(crate) fn wake(&self, waker: &Waker, key: &mut Option<u64>) -> bool {
        let waker = waker.clone();
        let replaced = {
            let mut wakers = locked(&self.wakers);
            match wakers.waiting.iter_mut().find(|(known, _)| Some(*known) == *key) {
                Some((_, before)) => Some(std::mem::replace(before, waker)),
                None => {
                    let new = wakers.next_key;
                    wakers.next_key += 1;
                    wakers.waiting.push((new, waker));
                    *key = Some(new);
                    self.sleepers.fetch_add(1, Ordering::Relaxed);
                    None
                }
            }
        };
        // Not under the lock: what goes with a waker is not ours, and may be another future of this batch.
        drop(replaced);
        fence(Ordering::SeqCst);
        self.is_final()
    }

    /// Nobody is to be woken by `key` any more.
    pub(crate) fn forget_waker(&self, key: u64) {
        let mut wakers = locked(&self.wakers);
        if let Some(at) = wakers.waiting.iter().position(|(known, _)| *known == key) {
            let gone = wakers.waiting.swap_remove(at);
            self.sleepers.fetch_sub(1, Ordering::Relaxed);
            drop(wakers);
            drop(gone);
        }
    }

    fn error(&self, failure: &Failure) -> Error {
        let Request { op, local, remote, len } = self.request(failure.entry);
        let peer = Arc::clone(self.owner.peer());
        failure.cause.describe(Subject { peer, op, local, remote, len, elapsed: failure.elapsed })
    }
}

impl Entry {
    fn new(request: Request) -> Self {
        let Request { op, local, remote, len } = request;
        Self { local, remote, len, left: AtomicU32::new(u32::from(len > 0)), op, place: 0 }
    }
}

impl Places {
    /// The memory of request `at` is on `device`; all before it have been said.
    pub(crate) fn set(&mut self, at: usize, device: &Arc<Stager>) -> Result<()> {
        let known = self.devices.iter().position(|known| Arc::ptr_eq(known, device));
        let index = known.unwrap_or_else(|| {
            self.devices.push(Arc::clone(device));
            self.devices.len() - 1
        });
        let place = u8::try_from(index + 1).map_err(|_| {
            Error::bad_argument("a batch spans at most 255 devices; submit several")
        })?;
        self.of.resize(at, 0);
        self.of.push(place);
        Ok(())
    }

    pub(crate) fn devices(&self) -> &[Arc<Stager>] {
        &self.devices
    }
}

const fn code(state: BatchState) -> u32 {
    match state {
        BatchState::Running => 0,
        BatchState::Completed => 1,
        BatchState::Failed => 2,
        BatchState::TimedOut => 3,
        BatchState::Cancelled => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::batch::tests::batch;

    #[test]
    fn an_entry_is_32_bytes() {
        assert_eq!(std::mem::size_of::<Entry>(), 32);
    }

    #[test]
    fn a_waiter_that_sleeps_is_woken() {
        let b = batch(&[10]);
        let waiter = {
            let b = b.clone();
            std::thread::spawn(move || b.wait())
        };
        while b.inner.sleepers.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        Slice::whole(&b.inner, 0).settle(Ok(()));
        assert!(waiter.join().unwrap().is_ok());
        assert!(b.wait_timeout(Duration::ZERO).unwrap().is_ok());
    }
}
