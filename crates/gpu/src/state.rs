//! What became of looking for a vendor's library: a state with its reason.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::constants::{CUDA_VERSION_MAJOR, HIP_VERSION_MAJOR, MUSA_VERSION_MAJOR};
use crate::device::{Api, Vendor};
use crate::error::Failure;
use crate::interface::DeviceInfo;
use crate::settings::Choice;

/// One attempt to find a vendor's library.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Tried {
    /// The name or path that was tried.
    pub name: PathBuf,
    /// What the loader said, or what the library lacks; `opened` or `loaded already` of the one that
    /// was taken.
    pub answer: String,
    /// There is such a file.
    pub found: bool,
}

/// A version as a library gives it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Version {
    /// 12 of 12.4.
    pub major: i32,
    /// 4 of 12.4.
    pub minor: i32,
    /// 0 where the vendor does not count them.
    pub patch: i32,
}

impl Version {
    pub(crate) fn new(vendor: Vendor, number: i32) -> Self {
        match vendor {
            Vendor::Hip => Self {
                major: number / HIP_VERSION_MAJOR,
                minor: number % HIP_VERSION_MAJOR / 100_000,
                patch: number % 100_000,
            },
            Vendor::Cuda => Self {
                major: number / CUDA_VERSION_MAJOR,
                minor: number % CUDA_VERSION_MAJOR / 10,
                patch: number % 10,
            },
            Vendor::Musa => Self {
                major: number / MUSA_VERSION_MAJOR,
                minor: number % MUSA_VERSION_MAJOR / 100,
                patch: number % 100,
            },
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.patch != 0 {
            write!(f, ".{}", self.patch)?;
        }
        Ok(())
    }
}

/// The versions that a library tells.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Versions {
    /// Of the driver, or what the runtime thinks the driver can do; `None` without a driver.
    pub driver: Option<Version>,
    /// Of the runtime; `None` for a driver interface.
    pub runtime: Option<Version>,
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.driver, self.runtime) {
            (Some(driver), Some(runtime)) => write!(f, "driver {driver}, runtime {runtime}"),
            (Some(driver), None) => write!(f, "driver {driver}"),
            (None, Some(runtime)) => write!(f, "no driver, runtime {runtime}"),
            (None, None) => f.write_str("version unknown"),
        }
    }
}

/// A library that works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Found {
    /// Its file.
    pub file: PathBuf,
    /// How it is spoken to.
    pub api: Api,
    /// Its versions.
    pub versions: Versions,
    /// The devices it shows to this process.
    pub devices: Vec<DeviceInfo>,
    /// Functions that other versions have and this one lacks.
    pub absent: Vec<String>,
}

/// What is known about one vendor in this process, and why it is so.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum State {
    /// Nobody has asked for it, or it may not be looked for.
    NotLookedFor {
        /// Which vendor.
        vendor: Vendor,
        /// What `TENSORFERRY_GPU` says.
        choice: Choice,
    },
    /// None of the library's names could be found.
    Missing {
        /// Which vendor.
        vendor: Vendor,
        /// What was tried, and what the loader said.
        tried: Vec<Tried>,
    },
    /// There is a file, but it is not a library that can be used.
    Unusable {
        /// Which vendor.
        vendor: Vendor,
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
        /// The function that it lacks, if that is what is wrong.
        missing: Option<String>,
    },
    /// The process has mapped the library, and nobody has initialised it: there is no device memory
    /// yet.
    Mapped {
        /// Its file.
        file: PathBuf,
        /// How it would be spoken to.
        api: Api,
    },
    /// A runtime was found, but no driver beneath it.
    NoDriver {
        /// The runtime's file.
        file: PathBuf,
        /// How it is spoken to.
        api: Api,
        /// Its versions.
        versions: Versions,
        /// What it said.
        failure: Failure,
    },
    /// The driver is older than the runtime needs.
    DriverTooOld {
        /// The library's file.
        file: PathBuf,
        /// How it is spoken to.
        api: Api,
        /// Its versions.
        versions: Versions,
        /// What it said.
        failure: Failure,
    },
    /// The library works, and shows no device to this process.
    NoDevice {
        /// Its file.
        file: PathBuf,
        /// How it is spoken to.
        api: Api,
        /// Its versions.
        versions: Versions,
        /// What it said; `None`: it counted zero devices.
        failure: Option<Failure>,
    },
    /// The library was found, and its first call failed.
    InitFailed {
        /// Its file.
        file: PathBuf,
        /// How it is spoken to.
        api: Api,
        /// Its versions.
        versions: Versions,
        /// What it said.
        failure: Failure,
    },
    /// The library has neither worked nor refused, and may never do: opening it, or its first call,
    /// goes on.
    NoAnswer {
        /// Which vendor.
        vendor: Vendor,
        /// The library's file; `None`: it is not open yet.
        file: Option<PathBuf>,
        /// How long it was waited for.
        after: Duration,
    },
    /// A parent of this process initialised the library; no child can use it.
    Forked {
        /// Which vendor.
        vendor: Vendor,
        /// The process that initialised it.
        parent: u32,
    },
    /// Devices can be used.
    Ready(Arc<Found>),
}

impl State {
    /// A short word for programs: one per variant, stable.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::NotLookedFor { .. } => "not-looked-for",
            Self::Missing { .. } => "missing",
            Self::Unusable { .. } => "unusable",
            Self::Mapped { .. } => "mapped",
            Self::NoDriver { .. } => "no-driver",
            Self::DriverTooOld { .. } => "driver-too-old",
            Self::NoDevice { .. } => "no-device",
            Self::InitFailed { .. } => "init-failed",
            Self::NoAnswer { .. } => "no-answer",
            Self::Forked { .. } => "forked",
            Self::Ready(_) => "ready",
        }
    }

    /// The library's file, where one was found.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::NotLookedFor { .. } | Self::Missing { .. } | Self::Forked { .. } => None,
            Self::Unusable { file, .. }
            | Self::Mapped { file, .. }
            | Self::NoDriver { file, .. }
            | Self::DriverTooOld { file, .. }
            | Self::NoDevice { file, .. }
            | Self::InitFailed { file, .. } => Some(file),
            Self::NoAnswer { file, .. } => file.as_deref(),
            Self::Ready(found) => Some(&found.file),
        }
    }

    /// What the library said, where it refused.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::NoDriver { failure, .. }
            | Self::DriverTooOld { failure, .. }
            | Self::InitFailed { failure, .. } => Some(failure),
            Self::NoDevice { failure, .. } => failure.as_ref(),
            _ => None,
        }
    }

    /// The working library.
    #[must_use]
    pub fn ready(&self) -> Option<&Found> {
        match self {
            Self::Ready(found) => Some(found),
            _ => None,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLookedFor { vendor, choice } if choice.allows(*vendor) => write!(
                f,
                "{} was not looked for, because nothing in this process uses it and no location \
                 names it",
                vendor.spoken()
            ),
            Self::NotLookedFor { vendor, choice } => write!(
                f,
                "{} was not looked for, because of TENSORFERRY_GPU={choice}; set it to {vendor} \
                 or auto",
                vendor.spoken()
            ),
            Self::Missing { vendor, tried } => {
                write!(f, "no {} library was found (tried", vendor.spoken())?;
                for (at, one) in tried.iter().enumerate() {
                    write!(f, "{} {}", if at == 0 { "" } else { "," }, one.name.display())?;
                }
                if let Some(first) = tried.first() {
                    write!(f, "; the first answered: {}", first.answer)?;
                }
                write!(
                    f,
                    "); install the vendor's driver, or name the file with {}",
                    vendor.library_setting()
                )
            }
            Self::Unusable { vendor, file, why, .. } => write!(
                f,
                "{} is no usable {} library: {why}; install it anew, or name another file with {}",
                file.display(),
                vendor.spoken(),
                vendor.library_setting()
            ),
            Self::Mapped { file, api: api @ Api::CudaRuntime } => write!(
                f,
                "{} is loaded, and is asked about named devices only, because its answers can make \
                 contexts ({api})",
                file.display()
            ),
            Self::Mapped { file, api } => write!(
                f,
                "{} is loaded, and nothing in this process has initialised it ({api})",
                file.display()
            ),
            Self::NoDriver { file, versions, failure, api } => write!(
                f,
                "{} found no driver: {failure} ({api}, {versions}); install the {} driver, and in \
                 a container \
                 hand the devices in",
                file.display(),
                api.vendor().spoken()
            ),
            Self::DriverTooOld { file, versions, failure, .. } => write!(
                f,
                "{} finds the driver too old: {failure} ({versions}); {}",
                file.display(),
                failure.advice()
            ),
            Self::NoDevice { file, versions, failure: Some(failure), .. } => write!(
                f,
                "{} shows no device: {failure} ({versions}); {}",
                file.display(),
                failure.advice()
            ),
            Self::NoDevice { file, versions, failure: None, .. } => write!(
                f,
                "{} counts no devices ({versions}); check which are visible to this process",
                file.display()
            ),
            Self::InitFailed { file, versions, failure, .. } => write!(
                f,
                "{} could not be initialised: {failure} ({versions}); {}",
                file.display(),
                failure.advice()
            ),
            Self::NoAnswer { vendor, file, after } => {
                write!(f, "{} does not answer: ", vendor.spoken())?;
                match file {
                    Some(file) => write!(f, "the first call of {}", file.display())?,
                    None => f.write_str("opening its library, or another one before,")?,
                }
                write!(
                    f,
                    " has not ended within {after:?}; if the vendor's own tools hang, too, restart the \
                     driver or the machine, and until then keep engines from it with \
                     TENSORFERRY_GPU=off"
                )
            }
            Self::Forked { vendor, parent } => write!(
                f,
                "{} was taken into use before a fork, in process {parent}; start this process by \
                 spawn instead of \
                 fork, or use the GPU only in children",
                vendor.spoken()
            ),
            Self::Ready(found) => write!(
                f,
                "{} works ({}, {}, {} device{})",
                found.file.display(),
                found.api,
                found.versions,
                found.devices.len(),
                if found.devices.len() == 1 { "" } else { "s" }
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_each_vendor_writes_them() {
        assert_eq!(Version::new(Vendor::Cuda, 12040).to_string(), "12.4");
        assert_eq!(Version::new(Vendor::Cuda, 13000).to_string(), "13.0");
        assert_eq!(Version::new(Vendor::Musa, 40_300).to_string(), "4.3");
        assert_eq!(Version::new(Vendor::Hip, 50_221_153).to_string(), "5.2.21153");
        assert_eq!(Version::new(Vendor::Hip, 60_443_484).to_string(), "6.4.43484");
    }

    #[test]
    fn a_missing_library_says_what_was_tried_and_what_to_do() {
        let state = State::Missing {
            vendor: Vendor::Hip,
            tried: vec![
                Tried { name: "a.so.1".into(), answer: "a.so.1: no".to_owned(), found: false },
                Tried { name: "a.so".into(), answer: "a.so: no".to_owned(), found: false },
            ],
        };
        assert_eq!(
            state.to_string(),
            "no HIP library was found (tried a.so.1, a.so; the first answered: a.so.1: no); \
             install the vendor's \
             driver, or name the file with TENSORFERRY_HIP_LIBRARY"
        );
        assert_eq!(state.word(), "missing");
    }

    #[test]
    fn what_was_switched_off_names_the_setting() {
        let state = State::NotLookedFor { vendor: Vendor::Cuda, choice: Choice::Off };
        assert_eq!(
            state.to_string(),
            "CUDA was not looked for, because of TENSORFERRY_GPU=off; set it to cuda or auto"
        );
    }
}
