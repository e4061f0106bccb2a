//! Transfers whose target is this very engine: a copy, not a socket.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_wire::Op;

use crate::core::{Core, REQUEST_BYTES};
use crate::error::{Error, Result};
use crate::io::{Command, Pool};
use crate::memory::{CopyMode, copy_within};
use crate::metrics::PeerCounters;
use crate::peer::{Account, PeerState, PeerStats};
use crate::registry::BufferInfo;
use crate::spin::Spin;
use crate::staging::{DevicePath, PathError};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::locked;
use crate::transfer::{BatchInner, Cause, Owner, Slice, Stop};

/// The engine as its own peer.
pub(crate) struct Local {
    core: Arc<Core>,
    /// Bookkeeping bytes of its batches that are not final.
    queued: AtomicUsize,
    pub(crate) account: Account,
    pool: Pool,
    work: Mutex<Work>,
    /// A copy has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Work {
    waiting: VecDeque<Arc<BatchInner>>,
    /// Being copied by some thread, which looks at each batch's `stop_at` between pieces.
    running: Vec<Arc<BatchInner>>,
    closed: bool,
}

/// Up to so many bytes are copied by the submitting thread; more by a thread of the pool.
const INLINE: u64 = 256 << 10;
/// How much is copied between two looks at the clock and at `cancel`.
const PIECE: u64 = 16 << 20;
const THREADS: usize = 2;

impl Local {
    pub(crate) fn new(core: Arc<Core>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            core,
            queued: AtomicUsize::new(0),
            account: Account::default(),
            pool: Pool::start("ferry-copy", 0..=THREADS)?,
            work: Mutex::default(),
            ended: Condvar::new(),
        }))
    }

    /// Reserves room for a batch of so many requests.
    pub(crate) fn reserve(&self, requests: usize, wait_until: Option<Instant>) -> Result<()> {
        self.core.reserve(&self.core.name, &self.queued, requests, wait_until)
    }

    /// Gives back what was reserved.
    pub(crate) fn release(&self, requests: usize) {
        self.core.release(&self.queued, requests);
    }

    pub(crate) fn submit(self: &Arc<Self>, batch: Arc<BatchInner>) {
        let entries = 0..batch.len() as u32;
        let bytes = entries.map(|e| batch.request(e).len).fold(0, u64::saturating_add);
        if bytes <= INLINE || !self.submit_aside(&batch) {
            locked(&self.work).waiting.push_back(Arc::clone(&batch));
            self.copy_next(Some(&batch));
        }
    }

    /// Has the batch copied by a thread of the pool; false: there is none.
    pub(crate) fn submit_aside(self: &Arc<Self>, batch: &Arc<BatchInner>) -> bool {
        locked(&self.work).waiting.push_back(Arc::clone(batch));
        let local = Arc::clone(self);
        if self.pool.run(move || local.copy_next(None)) {
            // The first IO thread sees to it that deadlines are kept while others are copied.
            self.core.mailboxes[0].post(Command::Watch(Arc::clone(self)));
            return true;
        }
        let mut work = locked(&self.work);
        let before = work.waiting.len();
        work.waiting.retain(|waiting| !Arc::ptr_eq(waiting, batch));
        // What is not there any more, somebody has taken.
        work.waiting.len() == before
    }

    /// Copies `this` batch, or the one that has waited longest, unless somebody else has taken it.
    fn copy_next(&self, this: Option<&Arc<BatchInner>>) {
        let mut work = locked(&self.work);
        let at = match this {
            None => 0,
            Some(this) => {
                work.waiting.iter().position(|b| Arc::ptr_eq(b, this)).unwrap_or(usize::MAX)
            }
        };
        let Some(batch) = work.waiting.remove(at) else { return };
        if work.closed {
            batch.request_stop(Stop::Closed);
        }
        work.running.push(Arc::clone(&batch));
        drop(work);
        let mut hint = 0;
        for entry in 0..batch.len() as u32 {
            if batch.request(entry).len > 0 {
                let slice = Slice::whole(&batch, entry);
                let verdict = self.copy(&slice, &mut hint);
                let stopped = matches!(verdict, Err(Cause::Stopped { .. }));
                slice.settle(verdict);
                if stopped {
                    // A device may still be copying; an IO thread gives that up if it does not end.
                    self.core.mailboxes[0].post(Command::Sweep);
                }
            }
        }
        locked(&self.work).running.retain(|b| !Arc::ptr_eq(b, &batch));
        self.ended.notify_all();
    }

    fn copy(&self, slice: &Slice, hint: &mut usize) -> std::result::Result<(), Cause> {
        let (op, local, remote, len) = (slice.op(), slice.local(), slice.remote(), slice.len);
        let pin = self.core.registry.find(op, remote, len).ok_or(Cause::NotPublished)?;
        let by_hand = slice.batch.pins_range(local, len, op == Op::Read, hint);
        let mode = if by_hand { self.core.copy_mode } else { CopyMode::Kernel };
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        let devices = DevicePath::of(slice, &pin, (from, to), [mode, self.core.copy_mode]);
        let most = devices.as_ref().map_or(PIECE, DevicePath::most);
        let pieces = len.div_ceil(most);
        for i in 0..pieces {
            if let Some(stop) = slice.batch.stop_at(Instant::now()) {
                return Err(Cause::Stopped { stop, stage: COPYING, sent: i > 0 });
            }
            // Back to front if the destination is behind the source, so that overlap does no harm.
            let at = if to > from { pieces - 1 - i } else { i } * most;
            let piece = most.min(len - at);
            match &devices {
                Some(path) => path.copy(at, piece).map_err(|error| self.why(error, i > 0))?,
                None => copy_within(&pin, (from + at, to + at, piece), mode)
                    .map_err(|error| self.why(PathError::Host(error), i > 0))?,
            }
        }
        self.account.metrics.bytes_copied_locally.add(len);
        Ok(())
    }

    #[cold]
    fn why(&self, error: PathError, sent: bool) -> Cause {
        match error {
            PathError::Host(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                Cause::BadAddress(self.core.devices.report().into())
            }
            PathError::Host(error) => {
                let what = "copying memory that is not registered (process_vm_writev); register it";
                Cause::Whole(Arc::new(Error::io(what, error)))
            }
            PathError::Device(why) => Cause::Device(why),
            PathError::Stopped(stop) => Cause::Stopped { stop, stage: COPYING, sent },
        }
    }

    /// The engine as one of its peers; `None`: nothing was asked of it.
    pub(crate) fn stats(&self) -> Option<PeerStats> {
        let mut stats = self.account.stats(&self.core.name, PeerState::Local);
        stats.requests_running = (self.queued.load(Ordering::Relaxed) / REQUEST_BYTES) as u64;
        (stats.counters != PeerCounters::default()).then_some(stats)
    }

    /// Settles what waits and is to stop; returns the next deadline of what is left.
    pub(crate) fn sweep(&self, now: Instant) -> Option<Instant> {
        let mut work = locked(&self.work);
        let all = std::mem::take(&mut work.waiting);
        let (stopped, waiting): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|b| b.stop_at(now).is_some());
        let next = waiting.iter().map(|b| b.deadline).min();
        work.waiting = waiting.into();
        drop(work);
        stopped.iter().for_each(give_up);
        next
    }

    /// Has the batches stop that touch a buffer which its owner wants back.
    pub(crate) fn revoke(&self, buffer: BufferInfo) {
        let work = locked(&self.work);
        for batch in work.waiting.iter().chain(&work.running) {
            let mut requests = (0..batch.len() as u32).map(|e| batch.request(e));
            let inside = |remote: u64| remote >= buffer.addr && remote - buffer.addr < buffer.len;
            if batch.pins_buffer(buffer.addr) || requests.any(|r| inside(r.remote)) {
                batch.request_stop(Stop::Unregistered);
            }
        }
        drop(work);
        self.sweep(Instant::now());
    }

    /// Ends everything; when this returns nothing is copied any more.
    pub(crate) fn close(&self) {
        let mut work = locked(&self.work);
        work.closed = true;
        for batch in work.waiting.iter().chain(&work.running) {
            batch.request_stop(Stop::Closed);
        }
        let waiting = std::mem::take(&mut work.waiting);
        drop(work);
        waiting.iter().for_each(give_up);
        let mut work = locked(&self.work);
        // A piece is short, so this ends soon; returning before would break the promise of quiet.
        while !work.running.is_empty() {
            work = self.ended.wait(work).unwrap_or_else(PoisonError::into_inner);
        }
        drop(work);
        self.pool.close(Duration::from_secs(1));
    }
}

const COPYING: &str = "it was being copied within the process";

/// Settles every entry of a batch that nobody has begun and that was told to stop.
fn give_up(batch: &Arc<BatchInner>) {
    let stop = batch.stop_at(Instant::now()).unwrap_or(Stop::Closed);
    for entry in 0..batch.len() as u32 {
        if batch.request(entry).len > 0 {
            let stage = "it waited to be copied within the process";
            Slice::whole(batch, entry).settle(Err(Cause::Stopped { stop, stage, sent: false }));
        }
    }
}

impl Owner for Local {
    fn peer(&self) -> &Arc<str> {
        &self.core.name
    }

    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
        let kept = batch.notification.clone().map_or(Ok(()), |n| self.core.take_in(n));
        let failed = |why| Error::NotifyFailed { peer: Arc::clone(&self.core.name), why };
        batch.finish(kept.err().map(failed));
    }

    fn stopped(&self, _: &Arc<BatchInner>) {
        self.sweep(Instant::now());
    }

    fn finished(&self, batch: &BatchInner) {
        self.release(batch.len());
        if let Some(failed) = batch.count(&self.account.metrics) {
            self.account.batch_failed(&self.core.log, &self.core.name, &failed);
        }
    }

    fn spin(&self) -> &Spin {
        &self.core.spin
    }
}
