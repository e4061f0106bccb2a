//! The class `Registration`.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use crate::face::engine::Engine;
use crate::face::raise;

/// Memory that peers can reach: what `Engine.register` returns.
///
/// The engine keeps the object whose memory it is until `unregister()`, or until the engine is closed; also when
/// this object is dropped. As a context manager it unregisters at the end.
#[pyclass(frozen, weakref, module = "tensorferry")]
pub(crate) struct Registration {
    pub(crate) engine: Py<Engine>,
    /// By which the engine knows it.
    pub(crate) number: u64,
    /// The address of the first byte.
    #[pyo3(get)]
    pub(crate) addr: u64,
    /// The length in bytes.
    #[pyo3(get)]
    pub(crate) nbytes: u64,
    /// Where the memory is: "cpu", or a device such as "cuda:0".
    #[pyo3(get)]
    pub(crate) device: String,
}

#[pymethods]
impl Registration {
    /// Ends what `register` began. When this returns, no peer and no transfer touches the memory.
    ///
    /// Does nothing if it was done before, or if the engine is closed. Raises StillInUse if something holds on to the
    /// memory; then it stays registered.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        raise(py, || self.engine.get().unregister(py, self.number, self.addr))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        // A forked child leaves the block of its parent.
        if self.engine.get().is_forked() { Ok(()) } else { self.unregister(py) }
    }

    fn __repr__(&self) -> String {
        let Self { addr, nbytes, device, .. } = self;
        format!("<Registration of {nbytes} bytes at {addr:#x} on {device}>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.engine)
    }
}
