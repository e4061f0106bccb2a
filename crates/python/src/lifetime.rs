//! The ends of engines: when the interpreter ends, and when the process forks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry::Engine;

use crate::logging;

/// A running engine, of which there is one owner.
pub(crate) struct Running {
    pub(crate) engine: Engine,
}

/// Every engine that may be running. Locked with the interpreter lock held, and never across a call into
/// Python, so that a fork finds it unlocked.
static ENGINES: Mutex<Vec<Weak<Running>>> = Mutex::new(Vec::new());

/// Keeps an eye on `engine`: it is closed when the interpreter ends, if it has not been until then.
pub(crate) fn watch(py: Python<'_>, engine: Engine) -> PyResult<Arc<Running>> {
    static HOOKS: AtomicBool = AtomicBool::new(false);
    let running = Arc::new(Running { engine });
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|engine| engine.strong_count() > 0);
    engines.push(Arc::downgrade(&running));
    drop(engines);
    if !HOOKS.swap(true, Ordering::Relaxed) {
        let at_exit = wrap_pyfunction!(at_exit, py)?;
        py.import("atexit")?.call_method1("register", (at_exit,))?;
        let hooks = PyDict::new(py);
        hooks.set_item("after_in_child", wrap_pyfunction!(after_fork, py)?)?;
        py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    }
    Ok(running)
}

impl Running {
    /// Ends the engine. Waits for its threads, which may be in the middle of a copy.
    pub(crate) fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.close());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The last owner is a Python object whose reference count became zero, so this thread is attached;
        // unless the interpreter is gone, when nobody is kept waiting.
        if Python::try_attach(|py| self.close(py)).is_none() {
            self.engine.close();
        }
    }
}

#[pyfunction]
fn at_exit(py: Python<'_>) -> PyResult<()> {
    let engines = std::mem::take(&mut *ENGINES.lock().unwrap_or_else(PoisonError::into_inner));
    for running in engines.iter().filter_map(Weak::upgrade) {
        running.close(py);
    }
    logging::stop(py)
}

#[pyfunction]
fn after_fork() {
    logging::after_in_child();
    // The parent's engines are the parent's to close.
    ENGINES.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
