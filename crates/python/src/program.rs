//! The program `tensorferry`, as the wheel installs it.

use std::ffi::OsString;
use std::panic::catch_unwind;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::failure::panic_text;

/// Runs the program `tensorferry` with these arguments, which do not begin with its name, and returns
/// its exit code. `rerun` is the command that runs it again, for the processes that it starts.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, args: Vec<OsString>, rerun: Vec<OsString>) -> PyResult<i32> {
    let run = || catch_unwind(|| tensorferry_cli::main(args, rerun));
    py.detach(run).map_err(|panic| {
        let text = panic_text(panic.as_ref()).to_owned();
        PyRuntimeError::new_err(format!("a bug in tensorferry: {text}; please report it"))
    })
}
