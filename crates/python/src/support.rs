//! Which vendors' GPUs this process could use, for programs that ask before they do.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorferry::Config;
use tensorferry::gpu::{Discovery, Vendor};

use crate::args::Text;
use crate::logging;

/// Whether the library of `vendor` ("cuda", "musa", "hip") is loaded in this process, or can be, and has what is
/// needed.
///
/// Nothing is initialised, so this says nothing about devices. TENSORFERRY_GPU and TENSORFERRY_*_LIBRARY count;
/// where a setting is malformed, so that no engine can be made, the answer is False and the log says why.
#[pyfunction]
#[pyo3(signature = (vendor, /))]
pub(crate) fn supports(py: Python<'_>, vendor: Text) -> PyResult<bool> {
    let vendor: Vendor = vendor.0.parse().map_err(|e| PyValueError::new_err(format!("{e}")))?;
    // Read with the interpreter lock held, under which Python changes it.
    match Config::from_env() {
        Ok(config) => Ok(py.detach(|| Discovery::new(config.gpu).supports(vendor))),
        Err(error) => {
            logging::warn_once(py, format!("SUPPORT_*: {error}"))?;
            Ok(false)
        }
    }
}
