//! Event loops: what has ended is told to them, by one eventfd for each loop, however many transfers it awaits; and
//! nothing waits in their threads.
#![expect(unsafe_code, reason = "a descriptor from Python")]

use std::collections::HashMap;
use std::fs::File;
use std::future::{Future, IntoFuture};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry::Completion;

use crate::face::raise;
use crate::face::transfer::Transfer;

/// Tells an event loop which of the transfers that it waits for have ended. For `await`; not for use by programs.
#[pyclass(frozen, module = "tensorferry._native")]
pub(crate) struct Wakeups {
    shared: Arc<Shared>,
    /// Locked with the interpreter lock held, and never across a call into Python.
    waiting: Mutex<Waiting>,
    pid: u32,
}

#[derive(Default)]
struct Waiting {
    last: u64,
    completions: HashMap<u64, Completion>,
}

struct Shared {
    event: File,
    /// Tickets of those that have ended. A thread of the engine holds this lock for a push.
    ended: Mutex<Vec<u64>>,
}

struct Ticket {
    shared: Arc<Shared>,
    number: u64,
}

impl Wake for Ticket {
    fn wake(self: Arc<Self>) {
        let first = {
            let mut ended = locked(&self.shared.ended);
            ended.push(self.number);
            ended.len() == 1
        };
        if first {
            // It fails only where the count is at its end, and then the loop is woken anyway.
            let _ = (&self.shared.event).write(&1_u64.to_ne_bytes());
        }
    }
}

#[pymethods]
impl Wakeups {
    /// Takes over `event`, a non-blocking eventfd.
    #[new]
    #[pyo3(signature = (event, /))]
    fn new(event: i32) -> Self {
        // SAFETY: the one caller, `_loops`, has just made the descriptor, and gives it away.
        let event = unsafe { File::from_raw_fd(event) };
        let shared = Arc::new(Shared { event, ended: Mutex::default() });
        Self { shared, waiting: Mutex::default(), pid: std::process::id() }
    }

    /// The descriptor that is readable when something has ended.
    fn fileno(&self) -> i32 {
        self.shared.event.as_raw_fd()
    }

    /// Waits for the end of a transfer: the ticket by which `take` knows it, or None if it has ended.
    #[pyo3(signature = (transfer, /))]
    fn watch(&self, py: Python<'_>, transfer: PyRef<'_, Transfer>) -> PyResult<Option<u64>> {
        raise(py, || {
            let mut completion = transfer.batch()?.into_future();
            let mut waiting = locked(&self.waiting);
            waiting.last += 1;
            let number = waiting.last;
            let waker = Arc::new(Ticket { shared: Arc::clone(&self.shared), number }).into();
            if Pin::new(&mut completion).poll(&mut Context::from_waker(&waker)).is_ready() {
                return Ok(None);
            }
            waiting.completions.insert(number, completion);
            Ok(Some(number))
        })
    }

    /// Does not wait for it any more.
    #[pyo3(signature = (ticket, /))]
    fn forget(&self, ticket: u64) {
        let completion = locked(&self.waiting).completions.remove(&ticket);
        if self.is_forked() {
            std::mem::forget(completion);
        }
    }

    /// The tickets of those that have ended since the last call.
    fn take(&self) -> Vec<u64> {
        // Read before the list is taken: what comes in between is in the list, what comes later writes again.
        let _ = (&self.shared.event).read(&mut [0; 8]);
        let ended = std::mem::take(&mut *locked(&self.shared.ended));
        let mut waiting = locked(&self.waiting);
        ended.into_iter().filter(|ticket| waiting.completions.remove(ticket).is_some()).collect()
    }
}

impl Wakeups {
    /// Then the batches are the parent's, and may have been in change at the fork: they are not looked at again.
    fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }
}

impl Drop for Wakeups {
    fn drop(&mut self) {
        if self.is_forked() {
            let waiting = std::mem::take(&mut *locked(&self.waiting));
            std::mem::forget((waiting.completions, Arc::clone(&self.shared)));
        }
    }
}

/// Whether an event loop of asyncio runs in this thread, which must not be held up.
pub(crate) fn is_running(py: Python<'_>) -> PyResult<bool> {
    // Who has not imported asyncio has no loop, and need not import it for this.
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
    let Some(asyncio) = modules.get_item("asyncio")? else { return Ok(false) };
    let Some(ask) = asyncio.getattr_opt("_get_running_loop")? else { return Ok(false) };
    Ok(!ask.call0()?.is_none())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
