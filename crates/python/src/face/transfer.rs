//! The class `Transfer`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use tensorferry::{Batch, BatchState};

use crate::face::engine::Engine;
use crate::face::kept::{self, Objects};
use crate::face::options::seconds;
use crate::face::{error, raise};
use crate::failure::Failure;
use crate::waiting::SIGNALS;

/// A running or ended transfer, of one range or of many: what `read_async`, `write_async` and `submit` return.
///
/// `await` it in asyncio, or `wait()`, or `result()`. Each of them raises why it failed; ask at least one of them. It
/// ends by its deadline, whether anybody looks or not, and dropping this object does not stop it. If it fails, nobody
/// has asked, and nobody holds this object, that is a WARNING of the logger `tensorferry.transfer`. The objects whose
/// memory it uses are kept until it has ended and somebody has seen that, or nobody holds this object.
#[pyclass(frozen, weakref, module = "tensorferry")]
pub(crate) struct Transfer {
    engine: Py<Engine>,
    batch: Batch,
    /// Locked with the interpreter lock held, and never across a call into Python.
    objects: Mutex<Objects>,
    /// Whether somebody knows how it ends: has been told, or has cancelled it.
    is_seen: AtomicBool,
}

#[pymethods]
impl Transfer {
    /// Whether it has ended. From then on the engine does not touch its local memory.
    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        raise(py, || self.has_ended())
    }

    /// "running", "completed", "failed", "timed_out" or "cancelled".
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        raise(py, || {
            if self.has_ended()? {
                self.see();
            }
            Ok(match self.batch.poll() {
                BatchState::Running => "running",
                BatchState::Completed => "completed",
                BatchState::TimedOut => "timed_out",
                BatchState::Cancelled => "cancelled",
                _ => "failed",
            })
        })
    }

    /// Waits until it has ended, at most for `timeout` seconds. Returns True if every byte is in place, False if it is
    /// still running, and raises why it failed.
    ///
    /// Ctrl-C, and whatever else a signal handler raises meanwhile, cancels it.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        raise(py, || self.wait_for(py, timeout))
    }

    /// As `wait`, but raises TimeoutError (not an Error) if it is still running, and returns None.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        raise(py, || {
            if self.wait_for(py, timeout)? {
                return Ok(());
            }
            let said = "the transfer is still running; it goes on";
            Err(Failure::Raised(PyTimeoutError::new_err(said)))
        })
    }

    /// Stops it, and waits until the engine does not touch its local memory any more, which is soon. Unsent entries
    /// are not sent; bytes of a WRITE that had left can still arrive. Does nothing if it has ended.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        raise(py, || {
            self.engine.get().check()?;
            self.see();
            py.detach(|| self.batch.cancel());
            self.has_ended()?;
            Ok(())
        })
    }

    /// `cancel`, without the wait. For `await`, which may be left in a forked child, too.
    fn _request_cancel(&self, py: Python<'_>) {
        self.see();
        if !self.engine.get().is_forked() {
            py.detach(|| self.batch.request_cancel());
        }
    }

    /// The entries that have failed so far: pairs of their place in the lists, from 0, and an Error.
    fn failures<'py>(&self, py: Python<'py>) -> PyResult<Vec<(usize, Bound<'py, PyAny>)>> {
        raise(py, || {
            if self.has_ended()? {
                self.see();
            }
            let failures = self.batch.failures();
            let exception = |error| error::of(py, error).into_value(py).into_bound(py).into_any();
            Ok(failures.iter().map(|(at, error)| (*at, exception(error))).collect())
        })
    }

    /// The number of entries.
    fn __len__(&self) -> usize {
        self.batch.len()
    }

    /// There are transfers of no entries, and they are something all the same.
    fn __bool__(&self) -> bool {
        true
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("tensorferry._loops")?.getattr("ended")?.call1((slf,))
    }

    fn __repr__(&self) -> String {
        let state = if self.engine.get().is_forked() {
            "of the parent process".to_owned()
        } else {
            format!("{:?}", self.batch.poll()).to_lowercase()
        };
        format!("<Transfer of {} entries, {state}>", self.batch.len())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.engine)?;
        // What the collector finds in a cycle it empties in any order, so it must not find memory that is in use. It
        // may be, too, if a copy on a device does not end.
        if self.batch.poll() != BatchState::Completed {
            return Ok(());
        }
        let Ok(objects) = self.objects.try_lock() else { return Ok(()) };
        objects.iter().try_for_each(|object| visit.call(object))
    }

    fn __clear__(&self) {
        self.give_up();
    }
}

impl Transfer {
    pub(crate) fn new(engine: Py<Engine>, batch: Batch, objects: Objects) -> Self {
        Self { engine, batch, objects: Mutex::new(objects), is_seen: AtomicBool::new(false) }
    }

    /// Somebody knows how it ends: nobody else has to be told.
    fn see(&self) {
        self.is_seen.store(true, Ordering::Relaxed);
    }

    /// The batch, for whoever waits for it in another way.
    pub(crate) fn batch(&self) -> Result<&Batch, Failure> {
        self.engine.get().check()?;
        Ok(&self.batch)
    }

    /// Whether it has ended; then what was lent to it is let go.
    fn has_ended(&self) -> Result<bool, Failure> {
        let ended = self.batch()?.poll() != BatchState::Running;
        if ended {
            kept::let_go(&self.batch, self.take());
        }
        Ok(ended)
    }

    fn wait_for(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool, Failure> {
        let batch = self.batch()?;
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let ready = self.engine.get().ready();
        while !self.has_ended()? {
            let left =
                until.map_or(SIGNALS, |until| until.saturating_duration_since(Instant::now()));
            if py.detach(|| batch.wait_timeout(left.min(SIGNALS))).is_some() {
                continue;
            }
            ready.look_for_signals(py, std::slice::from_ref(batch))?;
            if left <= SIGNALS && until.is_some() {
                return Ok(false);
            }
        }
        self.see();
        match batch.result() {
            Some(result) => result.map(|()| true).map_err(Failure::from),
            None => Ok(false),
        }
    }

    fn take(&self) -> Objects {
        std::mem::take(&mut *self.lock())
    }

    /// Leaves what was lent, and what there may be to say, to whoever sees the end.
    fn give_up(&self) {
        let objects = self.take();
        let is_seen = self.is_seen.swap(true, Ordering::Relaxed);
        if self.engine.get().is_forked() {
            // What the parent's threads do with the memory, they do with the parent's.
            std::mem::forget(self.batch.clone());
        } else if self.batch.poll() == BatchState::Running {
            kept::keep(&self.batch, objects, is_seen);
        } else {
            kept::end(&self.batch, objects, is_seen);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.give_up();
    }
}
