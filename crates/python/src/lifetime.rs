//! The ends of engines: when the interpreter ends, and when the process forks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::face;
use crate::logging;
use crate::ready::Ready;

/// Every engine that may be running. Locked with the interpreter lock held, and never across a call into
/// Python, so that a fork finds it unlocked.
static ENGINES: Mutex<Vec<Weak<Ready>>> = Mutex::new(Vec::new());

/// Keeps an eye on `ready`: it is closed when the interpreter ends, if it has not been until then.
pub(crate) fn watch(py: Python<'_>, ready: &Arc<Ready>) -> PyResult<()> {
    static HOOKS: AtomicBool = AtomicBool::new(false);
    let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
    engines.retain(|engine| engine.strong_count() > 0);
    engines.push(Arc::downgrade(ready));
    drop(engines);
    if HOOKS.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    // Once more after Ctrl-C in here does no harm.
    add_hooks(py).inspect_err(|_| HOOKS.store(false, Ordering::Relaxed))
}

fn add_hooks(py: Python<'_>) -> PyResult<()> {
    let at_exit = wrap_pyfunction!(at_exit, py)?;
    py.import("atexit")?.call_method1("register", (at_exit,))?;
    let hooks = PyDict::new(py);
    hooks.set_item("after_in_child", wrap_pyfunction!(after_in_child, py)?)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}

#[pyfunction]
fn at_exit(py: Python<'_>) -> PyResult<()> {
    let engines = std::mem::take(&mut *ENGINES.lock().unwrap_or_else(PoisonError::into_inner));
    for ready in engines.iter().filter_map(Weak::upgrade) {
        ready.close(py);
    }
    face::sweep_kept(py);
    logging::stop(py)
}

#[pyfunction]
fn after_in_child() {
    logging::after_in_child();
    face::forget_kept();
    let engines = std::mem::take(&mut *ENGINES.lock().unwrap_or_else(PoisonError::into_inner));
    // The parent's engines are the parent's to close. Their memory here is a copy that was made while other
    // threads may have been changing it, under locks that nobody will ever let go: it is never looked at
    // again, not even to be freed. Only the copies of their sockets are closed, so that peers see the parent's
    // end and not the child's.
    for ready in engines.iter().filter_map(Weak::upgrade) {
        ready.engine().close_inherited();
        std::mem::forget(ready);
    }
}
