//! The small classes beside the engine.

use pyo3::prelude::*;
use tensorferry::BufferInfo;

/// A registered range: where it is in its owner's process, and how long it is in bytes.
#[pyclass(frozen, eq, hash, get_all, module = "tensorferry")]
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub(crate) struct Buffer {
    /// The address of the first byte, in its owner's process.
    addr: u64,
    /// The length in bytes.
    nbytes: u64,
}

#[pymethods]
impl Buffer {
    fn __repr__(&self) -> String {
        format!("Buffer(addr={:#x}, nbytes={})", self.addr, self.nbytes)
    }
}

impl From<BufferInfo> for Buffer {
    fn from(info: BufferInfo) -> Self {
        Self { addr: info.addr, nbytes: info.len }
    }
}

/// A message between engines: two texts, free for any use.
#[pyclass(frozen, eq, hash, get_all, module = "tensorferry")]
#[derive(Clone, Eq, Hash, PartialEq)]
pub(crate) struct Notification {
    /// What the message is about.
    name: String,
    /// The message.
    message: String,
}

#[pymethods]
impl Notification {
    #[new]
    #[pyo3(signature = (name="", message=""))]
    fn new(name: &str, message: &str) -> Self {
        Self { name: name.to_owned(), message: message.to_owned() }
    }

    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("name", "message")
    }

    fn __repr__(&self) -> String {
        format!("Notification(name={:?}, message={:?})", self.name, self.message)
    }
}

impl Notification {
    pub(crate) fn to_send(&self) -> tensorferry::Notification {
        tensorferry::Notification { name: self.name.clone(), message: self.message.clone() }
    }

    /// One that has arrived; a peer may have sent bytes that are no text.
    pub(crate) fn arrived(from: tensorferry::Notification) -> Self {
        Self { name: from.name, message: from.message }
    }
}
