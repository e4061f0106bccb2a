//! How a transfer is submitted: what the keyword arguments of reads and writes mean.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use tensorferry::{OnFull, SubmitOptions};

use crate::args::Int;
use crate::face::values::Notification;
use crate::failure::Failure;
use crate::ready::Ready;

/// No time that is asked for is longer.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The options that were chosen.
pub(crate) struct Chosen<'py> {
    pub(crate) options: SubmitOptions,
    /// The object whose stream it is, which has to be there for as long as the transfer is ordered with it.
    pub(crate) stream: Option<Bound<'py, PyAny>>,
}

impl<'py> Chosen<'py> {
    /// By the keyword arguments that were given.
    pub(crate) fn of(ready: &Ready, given: Option<&Bound<'py, PyDict>>) -> Result<Self, Failure> {
        let mut chosen = Self { options: SubmitOptions::default(), stream: None };
        let Some(given) = given else { return Ok(chosen) };
        let mut hold_stream = false;
        for (key, value) in given {
            let options = &mut chosen.options;
            let key = key.cast::<PyString>().map_err(PyErr::from)?.to_str()?.to_owned();
            match &*key {
                "hold_stream" => hold_stream = value.is_truthy()?,
                "on_full" => options.on_full = on_full(&value)?,
                "timeout" | "stream" | "notify" if value.is_none() => {}
                "timeout" => options.timeout = Some(seconds(&key, value.extract()?)?),
                "stream" => chosen.stream = Some(value),
                "notify" => {
                    let notification = value.cast::<Notification>().map_err(PyErr::from)?;
                    options.notification = Some(notification.get().to_send());
                }
                _ => {
                    let said = format!("there is no option {key:?}: only {OPTIONS}");
                    return Err(PyTypeError::new_err(said).into());
                }
            }
        }
        if let Some(object) = &chosen.stream {
            let stream = ready.stream(object.py(), handle(object)?);
            let stream = if hold_stream { stream.hold_later_work() } else { stream };
            chosen.options.stream = Some(stream);
        }
        Ok(chosen)
    }
}

const OPTIONS: &str = "timeout, stream, hold_stream, notify, on_full";

/// A time that was given in seconds.
pub(crate) fn seconds(name: &str, time: f64) -> Result<Duration, Failure> {
    if time.is_nan() || time < 0.0 {
        return Err(Failure::new(format!("{name}={time}: expected seconds, 0 or more")));
    }
    Ok(Duration::try_from_secs_f64(time).unwrap_or(LONGEST).min(LONGEST))
}

/// The pointer that a stream is known by to its library: an integer, or an object that has one.
fn handle(stream: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Some(protocol) = stream.getattr_opt("__cuda_stream__")? {
        let (_version, Int(raw)): (Int, Int) = protocol.call0()?.extract()?;
        return Ok(raw);
    }
    for name in ["cuda_stream", "musa_stream", "ptr"] {
        if let Some(raw) = stream.getattr_opt(name)? {
            return raw.extract::<Int>().map(|raw| raw.0);
        }
    }
    stream.extract::<Int>().map(|raw| raw.0).map_err(|error| {
        let said = "stream: expected a stream (with __cuda_stream__ or cuda_stream), or its handle as an integer";
        let wrong = PyTypeError::new_err(said);
        wrong.set_cause(stream.py(), Some(error));
        wrong
    })
}

fn on_full(given: &Bound<'_, PyAny>) -> Result<OnFull, Failure> {
    if let Ok(text) = given.cast::<PyString>() {
        return match text.to_str()? {
            "wait" => Ok(OnFull::Wait),
            "refuse" => Ok(OnFull::Refuse),
            other => Err(Failure::new(format!(
                "on_full={other:?}: expected \"wait\", \"refuse\", or a number of seconds to wait"
            ))),
        };
    }
    Ok(OnFull::WaitFor(seconds("on_full", given.extract()?)?))
}
