//! One interpreter of the process, and no other: the classes, the log and the engines are the process's.
#![expect(unsafe_code, reason = "there is no safe form of the question")]

use std::sync::atomic::{AtomicI64, Ordering};

use pyo3::exceptions::PyImportError;
use pyo3::ffi::{PyInterpreterState_Get, PyInterpreterState_GetID};
use pyo3::prelude::*;

/// Refuses to be imported in a second interpreter.
pub(crate) fn check(_py: Python<'_>) -> PyResult<()> {
    static FIRST: AtomicI64 = AtomicI64::new(-1);
    // SAFETY: this thread is attached to an interpreter, as the token proves; it is that one.
    let this = unsafe { PyInterpreterState_Get() };
    // SAFETY: it exists for as long as a thread is attached to it.
    let this = unsafe { PyInterpreterState_GetID(this) };
    match FIRST.compare_exchange(-1, this, Ordering::Relaxed, Ordering::Relaxed) {
        Err(first) if first != this => Err(PyImportError::new_err(
            "tensorferry is imported in another interpreter of this process, and works in one only; use processes \
             or threads instead of subinterpreters",
        )),
        _ => Ok(()),
    }
}
