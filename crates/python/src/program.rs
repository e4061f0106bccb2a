//! The program `tensorferry`, as the wheel installs it.

use std::ffi::OsString;
use std::panic::{UnwindSafe, catch_unwind};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::failure::panic_text;

/// Runs the program `tensorferry` with these arguments, which do not begin with its name, and returns
/// its exit code. `rerun` is the command that runs it again, for the processes that it starts.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, args: Vec<OsString>, rerun: Vec<OsString>) -> PyResult<i32> {
    caught(py, || tensorferry_cli::main(args, rerun))
}

/// The document of `tensorferry doctor --json` about this very process, as a text.
#[pyfunction]
pub(crate) fn doctor(py: Python<'_>, require: Vec<String>, r#move: bool) -> PyResult<String> {
    caught(py, || tensorferry_cli::doctor(&require, r#move))?.map_err(PyValueError::new_err)
}

/// Without the interpreter lock, and with a panic as an error.
fn caught<T: Send>(py: Python<'_>, run: impl FnOnce() -> T + Send + UnwindSafe) -> PyResult<T> {
    py.detach(|| catch_unwind(run)).map_err(|panic| {
        let text = panic_text(panic.as_ref()).to_owned();
        PyRuntimeError::new_err(format!("a bug in tensorferry: {text}; please report it"))
    })
}
