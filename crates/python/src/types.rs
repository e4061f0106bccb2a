//! The small classes beside the engine.

use pyo3::basic::CompareOp;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};
use tensorferry::{Error, Notification, Op};

use crate::args::{Message, owned};
use crate::failure::Failure;

/// Whether bytes come from the peer (`Read`, 0) or go there (`Write`, 1).
///
/// Members:
///
///   Read
///
///   Write
#[pyclass(frozen, module = "tensorferry.mooncake")]
#[derive(Clone, Copy)]
pub(crate) struct TransferOpcode {
    value: i64,
}

const NAMES: [&str; 2] = ["Read", "Write"];

impl TransferOpcode {
    pub(crate) const READ: Self = Self { value: 0 };
    pub(crate) const WRITE: Self = Self { value: 1 };

    /// What it means; `None` for a number that was made up.
    pub(crate) fn op(self) -> Option<Op> {
        match self.value {
            0 => Some(Op::Read),
            1 => Some(Op::Write),
            _ => None,
        }
    }
}

#[pymethods]
impl TransferOpcode {
    #[new]
    #[pyo3(signature = (value))]
    fn new(value: i64) -> Self {
        Self { value }
    }

    /// From the peer's memory to local memory.
    #[classattr]
    #[pyo3(name = "Read")]
    fn read() -> Self {
        Self::READ
    }

    /// From local memory to the peer's.
    #[classattr]
    #[pyo3(name = "Write")]
    fn write() -> Self {
        Self::WRITE
    }

    /// The members by name.
    #[classattr]
    #[pyo3(name = "__members__")]
    fn members(py: Python<'_>) -> PyResult<Py<PyDict>> {
        let members = PyDict::new(py);
        members.set_item("Read", Self::READ)?;
        members.set_item("Write", Self::WRITE)?;
        Ok(members.unbind())
    }

    /// `"Read"` or `"Write"`.
    #[getter]
    fn name(&self) -> &'static str {
        usize::try_from(self.value).ok().and_then(|at| NAMES.get(at)).copied().unwrap_or("???")
    }

    /// 0 or 1.
    #[getter]
    fn value(&self) -> i64 {
        self.value
    }

    fn __int__(&self) -> i64 {
        self.value
    }

    fn __index__(&self) -> i64 {
        self.value
    }

    fn __hash__(&self) -> isize {
        self.value as isize
    }

    fn __richcmp__(&self, other: PyRef<'_, Self>, op: CompareOp) -> bool {
        op.matches(self.value.cmp(&other.value))
    }

    fn __repr__(&self) -> String {
        format!("<TransferOpcode.{}: {}>", self.name(), self.value)
    }

    fn __str__(&self) -> String {
        format!("TransferOpcode.{}", self.name())
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, (i64,)) {
        (slf.get_type(), (slf.get().value,))
    }
}

/// The engine refuses longer frames, and the texts are not all of a frame.
const LONGEST_FRAME: u64 = 1 << 20;

/// A message to a peer: two texts, free for any use. The peer finds it in `get_notifies()`.
#[pyclass(module = "tensorferry.mooncake")]
pub(crate) struct TransferNotify {
    inner: Notification,
}

#[pymethods]
impl TransferNotify {
    #[new]
    #[pyo3(
        signature = (name=Message::default(), msg=Message::default()),
        text_signature = "(name='', msg='')"
    )]
    fn new(name: Message, msg: Message) -> Self {
        Self { inner: Notification { name: name.0, message: msg.0 } }
    }

    /// Free text; peers use it to tell what the message is about.
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        PyString::from_bytes(py, self.inner.name.as_bytes())
    }

    #[setter]
    fn set_name(&mut self, name: Message) {
        self.inner.name = name.0;
    }

    /// Free text.
    #[getter]
    fn msg<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        PyString::from_bytes(py, self.inner.message.as_bytes())
    }

    #[setter]
    fn set_msg(&mut self, msg: Message) {
        self.inner.message = msg.0;
    }

    fn __repr__(&self) -> String {
        format!("TransferNotify(name={:?}, msg={:?})", self.inner.name, self.inner.message)
    }
}

impl TransferNotify {
    pub(crate) fn of(inner: Notification) -> Self {
        Self { inner }
    }

    /// A copy, of what is not too long to be sent anyway.
    pub(crate) fn notification(&self) -> Result<Notification, Failure> {
        let Notification { name, message } = &self.inner;
        let len = name.len() as u64 + message.len() as u64;
        if len > LONGEST_FRAME {
            return Err(Error::NotifyTooLarge { len, limit: LONGEST_FRAME }.into());
        }
        Ok(Notification { name: owned(name)?, message: owned(message)? })
    }
}

/// Stands for an engine where a native extension asks for one. It has no use: those extensions are
/// built for another engine, and refuse it.
#[pyclass(frozen, module = "tensorferry.mooncake")]
pub(crate) struct InnerTransferEngine {
    pub(crate) name: String,
}

#[pymethods]
impl InnerTransferEngine {
    fn __repr__(&self) -> String {
        format!("<InnerTransferEngine of {}>", self.name)
    }
}
