//! Waiting in a way that Ctrl-C gets through.
//!
//! Python runs its signal handlers in the main thread, and only where that is asked for. So whatever may take
//! long is done in steps of [`SIGNALS`] with the interpreter lock released, and in between is asked.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

use crate::failure::Failure;

/// How long a wait may last before it looks whether Ctrl-C was pressed.
pub(crate) const SIGNALS: Duration = Duration::from_millis(100);

/// Runs `call`, which blocks for a bounded time and cannot be interrupted, on a thread of its own, and waits
/// for it. If a signal raises, the thread is left to end by itself. `check` fails where waiting is in vain.
pub(crate) fn aside<T: Send + 'static>(
    py: Python<'_>,
    check: impl Fn() -> Result<(), Failure>,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (tell, mut told) = sync_channel(1);
    let work = Arc::new(Mutex::new(Some(call)));
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let theirs = Arc::clone(&work);
    let run = move || {
        if let Some(call) = take(&theirs) {
            // Nobody listens any more if a signal came first.
            let _ = tell.send(catch_unwind(AssertUnwindSafe(call)));
        }
    };
    let started = thread::Builder::new().name("tensorferry-call".to_owned()).spawn(run);
    if started.is_err()
        && let Some(call) = take(&work)
    {
        // No thread to be had: better without Ctrl-C than not at all.
        return Ok(py.detach(call));
    }
    loop {
        let (heard, listener) = py.detach(move || (told.recv_timeout(SIGNALS), told));
        told = listener;
        match heard {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("a thread ended before its work was done"));
            }
            Err(RecvTimeoutError::Timeout) => {
                let raised = py.check_signals();
                if let Err(failure) = check() {
                    // The handler forked, and this is the child, where the thread is not.
                    std::mem::forget(told);
                    raised?;
                    return Err(failure);
                }
                raised?;
            }
        }
    }
}
