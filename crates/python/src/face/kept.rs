//! Objects whose memory is lent to transfers, and who lets go of them.
//!
//! A thread of the engine never takes the interpreter lock, so it cannot. Whoever sees the end of a transfer does:
//! the thread that waits for it, asks or awaits. For a transfer that nobody holds any more, the thread that hands over
//! log records does; and if it failed, that thread has something to log.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake};

use pyo3::prelude::*;
use tensorferry::{Batch, BatchState, Completion, Error};

use crate::logging;

/// Objects that must not go away yet.
pub(crate) type Objects = Vec<Py<PyAny>>;

/// A transfer that nobody holds any more.
struct Kept {
    batch: Batch,
    objects: Objects,
    is_seen: bool,
    /// Has the thread woken when the batch is final.
    _completion: Completion,
}

/// Locked with the interpreter lock held, and never across a call into Python, so that a fork finds it unlocked.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Lets go of what was lent to a transfer that has ended.
pub(crate) fn let_go(batch: &Batch, objects: Objects) {
    debug_assert!(batch.poll() != BatchState::Running);
    if objects.is_empty() || batch.poll() == BatchState::Completed {
        return;
    }
    let stuck = |(_, error): &(usize, Error)| matches!(error, Error::DeviceStuck { .. });
    if batch.failures().iter().any(stuck) {
        // A device may still read or write the memory, and nobody knows until when.
        objects.into_iter().for_each(std::mem::forget);
    }
}

/// Ends what is known of a transfer that has ended and that nobody holds. If nobody has seen that it failed, that is
/// said.
pub(crate) fn end(batch: &Batch, objects: Objects, is_seen: bool) {
    if !is_seen
        && batch.poll() != BatchState::Cancelled
        && let Some(Err(error)) = batch.result()
        && !matches!(error, Error::Closed)
    {
        logging::unseen(&error);
    }
    let_go(batch, objects);
}

/// Keeps what was lent to a transfer that nobody holds until it has ended.
pub(crate) fn keep(batch: &Batch, objects: Objects, is_seen: bool) {
    if objects.is_empty() && is_seen {
        return;
    }
    let mut completion = batch.into_future();
    let waker = Arc::new(Sweeper).into();
    if Pin::new(&mut completion).poll(&mut Context::from_waker(&waker)).is_ready() {
        return end(batch, objects, is_seen);
    }
    lock().push(Kept { batch: batch.clone(), objects, is_seen, _completion: completion });
}

/// Lets go of what has ended.
pub(crate) fn sweep(_py: Python<'_>) {
    let has_ended = |kept: &mut Kept| kept.batch.poll() != BatchState::Running;
    // Objects run Python code when they go, so none goes while the lock is held.
    let ended: Vec<Kept> = lock().extract_if(.., has_ended).collect();
    ended.into_iter().for_each(|kept| end(&kept.batch, kept.objects, kept.is_seen));
}

/// In a forked child: the transfers are the parent's, and never end here.
pub(crate) fn forget() {
    std::mem::take(&mut *lock()).into_iter().for_each(std::mem::forget);
}

fn lock() -> MutexGuard<'static, Vec<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Sweeper;

impl Wake for Sweeper {
    fn wake(self: Arc<Self>) {
        logging::sweep();
    }
}
