//! How calls fail in this face: with an exception that has what the engine's error has.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry::{Error, Op};

use crate::failure::{Failure, guarded};

/// Runs the body of a method; what fails is raised.
pub(crate) fn raise<T>(py: Python<'_>, body: impl FnOnce() -> Result<T, Failure>) -> PyResult<T> {
    guarded(body).map_err(|failure| raised(py, failure))
}

/// The exception for a failure.
pub(crate) fn raised(py: Python<'_>, failure: Failure) -> PyErr {
    match failure {
        Failure::Raised(error) => error,
        Failure::Answered { error: Some(error), text, .. } => exception(py, &error, &text),
        Failure::Answered { error: None, text, .. } => {
            let error = Error::BadArgument { what: text.clone() };
            exception(py, &error, &text)
        }
    }
}

/// The exception for an error of the engine.
pub(crate) fn of(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, error, &error.to_string())
}

fn exception(py: Python<'_>, error: &Error, text: &str) -> PyErr {
    make(py, error, text).unwrap_or_else(|failed| {
        // Nothing but a lack of memory, or a package that is not whole.
        let fallback = PyRuntimeError::new_err(text.to_owned());
        fallback.set_cause(py, Some(failed));
        fallback
    })
}

fn make(py: Python<'_>, error: &Error, text: &str) -> PyResult<PyErr> {
    let exception = py.import("tensorferry._errors")?.getattr(class(error))?.call1((text,))?;
    let fields = PyDict::new(py);
    fields.set_item("code", error.code())?;
    fields.set_item("kind", error.name())?;
    fields.set_item("retryable", error.is_retryable())?;
    fields.set_item("peer", error.peer())?;
    fields.set_item("sent", sent(error))?;
    if let Some(subject) = error.subject() {
        let op = match subject.op {
            Op::Read => "read",
            Op::Write => "write",
        };
        fields.set_item("op", op)?;
        fields.set_item("local", subject.local)?;
        fields.set_item("remote", subject.remote)?;
        fields.set_item("length", subject.len)?;
        fields.set_item("elapsed", subject.elapsed.as_secs_f64())?;
    }
    exception.getattr("__dict__")?.call_method1("update", (fields,))?;
    Ok(PyErr::from_value(exception))
}

/// The class of the exception. One for all errors that a program treats alike; `kind` has the error's own name.
fn class(error: &Error) -> &'static str {
    match error {
        Error::Config(_) => "ConfigError",
        Error::Name(_) => "BadName",
        Error::BadArgument { .. } | Error::NotifyTooLarge { .. } | Error::WrongLocation { .. } => {
            "BadArgument"
        }
        Error::Refused(_) | Error::RangeNotPublished(_) => "Refused",
        Error::BadLocalAddress { .. } | Error::Unmapped { .. } => "BadLocalAddress",
        Error::Protocol { .. } | Error::BadAnswer { .. } => "ProtocolError",
        Error::Gpu(_)
        | Error::DeviceCopy { .. }
        | Error::DeviceStuck { .. }
        | Error::NoDeviceAnswer { .. }
        | Error::Reallocated { .. }
        | Error::StreamCaptured { .. } => "DeviceError",
        Error::Overlap { .. }
        | Error::NotRegistered { .. }
        | Error::StillInUse { .. }
        | Error::PeerUnreachable { .. }
        | Error::ConnectionLost { .. }
        | Error::OutcomeUnknown { .. }
        | Error::TimedOut { .. }
        | Error::Cancelled { .. }
        | Error::Unregistered(_)
        | Error::NotifyFailed { .. }
        | Error::Busy { .. }
        | Error::PortsExhausted { .. }
        | Error::Closed
        | Error::ForkedProcess { .. } => error.name(),
        _ => "Error",
    }
}

/// Whether bytes of a request that failed had been given to a socket, where that is known.
fn sent(error: &Error) -> Option<bool> {
    match error {
        Error::TimedOut { sent, .. } | Error::Cancelled { sent, .. } => Some(*sent),
        Error::OutcomeUnknown { .. } => Some(true),
        _ => None,
    }
}
