//! How figures are shown, and where memory is.

use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::measure::row::Format;
use crate::memory::Place;

/// Where the memory of one end is.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Memory {
    /// `cpu`, or a device such as `cuda:0`.
    pub(crate) place: String,
    pub(crate) device_name: Option<String>,
}

impl Memory {
    pub(crate) fn at(place: Place) -> Self {
        Self { place: place.to_string(), device_name: None }
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        match &self.device_name {
            _ if self.place == Place::Host.to_string() => "host memory".to_owned(),
            None => format!("memory of {}", self.place),
            Some(name) => format!("memory of {} ({name})", self.place),
        }
    }
}

/// Prints the document, or the text for people if there is one.
///
/// # Errors
/// Stdout cannot be written.
pub(crate) fn print(document: &impl Serialize, text: Option<String>, format: Format) -> Result<()> {
    let text = match (format, text) {
        (Format::Json, _) => serde_json::to_string_pretty(document)?,
        (Format::Table, Some(text)) => text,
        (Format::Table, None) => return Ok(()),
    };
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("stdout cannot be written")
}

/// Three digits that mean something, and no exponent.
pub(crate) fn three_digits(value: f64) -> String {
    let whole = if value > 0.0 { value.log10().floor() as i32 + 1 } else { 1 };
    let decimals = (3 - whole).clamp(0, 9) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_shown_of_any_number() {
        for (value, shown) in [
            (0.0, "0.00"),
            (0.000_012_345, "0.0000123"),
            (0.5, "0.500"),
            (1.234_5, "1.23"),
            (12.34, "12.3"),
            (1234.5, "1234"),
        ] {
            assert_eq!(three_digits(value), shown);
        }
    }
}
