//! How calls fail in this face: with an integer, and with a text that is kept for whoever asks.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use tensorferry::{ConfigError, Error, MetadataError};

use crate::{last_error, logging};

/// What existing engines answer to an argument that makes no sense, and to everything without a number of its own.
pub(crate) const FAILED: i32 = -1;
pub(crate) const TIMED_OUT: i32 = -2;
const NOT_REGISTERED: i32 = -3;
const OVERLAP: i32 = -7;

/// Why a call failed.
pub(crate) enum Failure {
    /// It answers an integer, and the text is kept.
    Answered {
        /// What calls that return a code return.
        code: i32,
        /// What happened, and what to do.
        text: String,
        /// What the engine said, if it was the engine.
        error: Option<Box<Error>>,
    },
    /// It raises.
    Raised(PyErr),
}

impl Failure {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self::Answered { code: FAILED, text: text.into(), error: None }
    }

    /// Whether it is that the queue to a peer is full.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Answered { error: Some(error), .. } if matches!(**error, Error::Busy { .. }))
    }

    pub(crate) fn with_code(self, new: i32) -> Self {
        match self {
            Self::Answered { text, error, .. } => Self::Answered { code: new, text, error },
            raised @ Self::Raised(_) => raised,
        }
    }
}

impl Failure {
    pub(crate) fn with_text(self, new: String) -> Self {
        match self {
            Self::Answered { code, error, .. } => Self::Answered { code, text: new, error },
            raised @ Self::Raised(_) => raised,
        }
    }
}

impl Failure {
    /// The same with `what` in front of its text, which says where it is wrong.
    pub(crate) fn before(self, py: Python<'_>, what: &str) -> Self {
        match self {
            Self::Answered { code, text, error } => {
                Self::Answered { code, text: format!("{what}{text}"), error }
            }
            Self::Raised(raised) if raised.is_instance_of::<PyTypeError>(py) => {
                let said = format!("{what}{}", raised.value(py));
                let new = PyTypeError::new_err(said);
                new.set_cause(py, Some(raised));
                Self::Raised(new)
            }
            raised @ Self::Raised(_) => raised,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error {
            Error::NotRegistered { .. } => NOT_REGISTERED,
            Error::Overlap { .. } => OVERLAP,
            _ => FAILED,
        };
        Self::Answered { code, text: error.to_string(), error: Some(Box::new(error)) }
    }
}

impl From<MetadataError> for Failure {
    fn from(error: MetadataError) -> Self {
        Error::from(error).into()
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Error::from(error).into()
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self::Raised(error)
    }
}

/// Runs the body of a method: a failure is kept, logged and turned into what `answer` makes of its code.
pub(crate) fn settle<T>(
    py: Python<'_>,
    method: &'static str,
    answer: impl FnOnce(i32) -> T,
    body: impl FnOnce() -> Result<T, Failure>,
) -> PyResult<T> {
    match guarded(body) {
        Ok(value) => {
            last_error::clear();
            Ok(value)
        }
        Err(Failure::Answered { code, text, error }) => {
            let peer = error.as_deref().and_then(Error::peer);
            let logged = logging::failed(py, method, peer, &text);
            // Set last: whoever handles the record may have called engines, too.
            last_error::set(text);
            logged.map(|()| answer(code))
        }
        Err(Failure::Raised(error)) => Err(error),
    }
}

/// As [`settle`], for methods whose results have no room for a failure: those raise.
pub(crate) fn raise<T>(body: impl FnOnce() -> Result<T, Failure>) -> PyResult<T> {
    match guarded(body) {
        Ok(value) => {
            last_error::clear();
            Ok(value)
        }
        Err(Failure::Answered { text, .. }) => {
            last_error::set(text.clone());
            Err(PyRuntimeError::new_err(text))
        }
        Err(Failure::Raised(error)) => Err(error),
    }
}

/// A panic is a bug of ours, and no reason for Python code to see an exception that `except Exception` misses.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text =
            format!("a bug in tensorferry: {}; please report it", panic_text(panic.as_ref()));
        last_error::set(text.clone());
        Err(Failure::Raised(PyRuntimeError::new_err(text)))
    })
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("it panicked")
}
