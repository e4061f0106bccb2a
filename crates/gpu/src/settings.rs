//! What a user can choose. The values come from the engine's configuration; nothing here reads the
//! environment.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::device::{ParseError, Vendor};

/// Which vendors may be looked for: the setting `TENSORFERRY_GPU`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Choice {
    /// Whatever the process turns out to use; a library is initialised only for a device that was
    /// named.
    #[default]
    Auto,
    /// None: no GPU library is looked for, opened or asked.
    Off,
    /// This vendor only; it may be initialised at the first question.
    Only(Vendor),
}

impl Choice {
    /// Whether `vendor` may be looked for.
    #[must_use]
    pub fn allows(self, vendor: Vendor) -> bool {
        match self {
            Self::Auto => true,
            Self::Off => false,
            Self::Only(only) => only == vendor,
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Only(vendor) => vendor.fmt(f),
        }
    }
}

impl FromStr for Choice {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => text.parse().map(Self::Only).map_err(|_| ParseError {
                got: text.to_owned(),
                expected: "auto, off, cuda, musa or hip",
            }),
        }
    }
}

/// Which vendors to look for, and which files to take.
///
/// ```
/// use tensorferry_gpu::{Choice, Settings, Vendor};
///
/// let settings = Settings::default()
///     .with_choice(Choice::Only(Vendor::Cuda))
///     .with_library(Vendor::Cuda, "/opt/driver/libcuda.so.1");
/// assert!(settings.library(Vendor::Cuda).is_some());
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// `TENSORFERRY_GPU`.
    pub choice: Choice,
    /// `TENSORFERRY_CUDA_LIBRARY`: the CUDA driver's library or a CUDA runtime; its symbols decide.
    pub cuda_library: Option<PathBuf>,
    /// `TENSORFERRY_MUSA_LIBRARY`: a MUSA runtime.
    pub musa_library: Option<PathBuf>,
    /// `TENSORFERRY_HIP_LIBRARY`: a HIP runtime.
    pub hip_library: Option<PathBuf>,
}

impl Settings {
    /// The same with other vendors to look for.
    #[must_use]
    pub fn with_choice(self, choice: Choice) -> Self {
        Self { choice, ..self }
    }

    /// The same with the one library file to take for `vendor`.
    #[must_use]
    pub fn with_library(mut self, vendor: Vendor, file: impl Into<PathBuf>) -> Self {
        let chosen = match vendor {
            Vendor::Cuda => &mut self.cuda_library,
            Vendor::Musa => &mut self.musa_library,
            Vendor::Hip => &mut self.hip_library,
        };
        *chosen = Some(file.into());
        self
    }

    /// The file that was chosen for `vendor`.
    #[must_use]
    pub fn library(&self, vendor: Vendor) -> Option<&Path> {
        match vendor {
            Vendor::Cuda => self.cuda_library.as_deref(),
            Vendor::Musa => self.musa_library.as_deref(),
            Vendor::Hip => self.hip_library.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        for text in ["auto", "off", "cuda", "musa", "hip"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert_eq!(
            "on".parse::<Choice>().unwrap_err().to_string(),
            "\"on\" is not auto, off, cuda, musa or hip"
        );
    }

    #[test]
    fn one_vendor_leaves_the_others_out() {
        assert!(Choice::Only(Vendor::Hip).allows(Vendor::Hip));
        assert!(!Choice::Only(Vendor::Hip).allows(Vendor::Cuda));
        assert!(Choice::Auto.allows(Vendor::Musa));
        assert!(!Choice::Off.allows(Vendor::Musa));
    }
}
