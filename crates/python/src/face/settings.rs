//! Settings as keyword arguments: they win over the environment, and are read as its variables are.

use std::collections::BTreeMap;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyString, PyTuple};
use tensorferry::{Config, ConfigError, Error};

use crate::failure::Failure;

/// The settings in force: the environment's, and those that are given here, by their names as arguments.
pub(crate) fn config(given: &[(&str, Option<Bound<'_, PyAny>>)]) -> Result<Config, Failure> {
    // The environment is read with the interpreter lock held, under which Python changes it.
    let mut vars: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        })
        .collect();
    for (name, value) in given {
        if let Some(value) = value {
            vars.insert(variable(name), text(name, value)?);
        }
    }
    Config::from_vars(vars).map_err(|error| {
        let is_it = |name: &&(&str, Option<_>)| name.1.is_some() && variable(name.0) == error.name;
        match given.iter().find(is_it) {
            None => error.into(),
            Some((name, _)) => {
                let ConfigError { value, expected, .. } = &error;
                let said = format!("{name}={value}: expected {expected}");
                Failure::from(Error::from(error.clone())).with_text(said)
            }
        }
    })
}

fn variable(name: &str) -> String {
    format!("TENSORFERRY_{}", name.to_ascii_uppercase())
}

/// The value as the variable would have it. Times are in seconds, sizes in bytes.
fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(on) = value.cast::<PyBool>() {
        return Ok(if on.is_true() { "1" } else { "0" }.to_owned());
    }
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyInt>() {
        return Ok(value.str()?.to_string());
    }
    if let Ok(seconds) = value.cast::<PyFloat>() {
        // As plain digits; Python would write small ones with an exponent, too, which is read as well.
        return Ok(seconds.value().to_string());
    }
    if let Ok(range) = value.cast::<PyTuple>()
        && let Ok((first, last)) = range.extract::<(u32, u32)>()
    {
        return Ok(format!("{first}-{last}"));
    }
    let what = value.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "{name}: expected a number, a text, a bool, or for ports a pair of numbers, not {what}"
    )))
}
