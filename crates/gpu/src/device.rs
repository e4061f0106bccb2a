//! Vendors, devices and locations, and how they are written.

use std::fmt;
use std::str::FromStr;

/// Who made the device, and so whose library moves its memory.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Vendor {
    /// NVIDIA, and what is compatible with it.
    Cuda,
    /// Moore Threads.
    Musa,
    /// AMD, and what is compatible with it.
    Hip,
}

impl Vendor {
    /// All vendors, in the order in which they are asked. Iterate over it: there may be more one day.
    pub const ALL: [Self; 3] = [Self::Cuda, Self::Musa, Self::Hip];

    /// The vendor's name in locations and settings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Musa => "musa",
            Self::Hip => "hip",
        }
    }

    /// The setting that names the vendor's library file.
    #[must_use]
    pub fn library_setting(self) -> &'static str {
        match self {
            Self::Cuda => "TENSORFERRY_CUDA_LIBRARY",
            Self::Musa => "TENSORFERRY_MUSA_LIBRARY",
            Self::Hip => "TENSORFERRY_HIP_LIBRARY",
        }
    }

    /// The vendor's name as people write it.
    #[must_use]
    pub fn spoken(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA",
            Self::Musa => "MUSA",
            Self::Hip => "HIP",
        }
    }

    pub(crate) fn index(self) -> usize {
        match self {
            Self::Cuda => 0,
            Self::Musa => 1,
            Self::Hip => 2,
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Vendor {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::ALL
            .into_iter()
            .find(|vendor| vendor.name() == text)
            .ok_or_else(|| ParseError { got: text.to_owned(), expected: "cuda, musa or hip" })
    }
}

/// Which interface of a vendor is spoken.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Api {
    /// `cu…`, from the driver's own library.
    CudaDriver,
    /// `cuda…`, from the CUDA runtime.
    CudaRuntime,
    /// `musa…`, from the MUSA runtime.
    MusaRuntime,
    /// `hip…`, from the HIP runtime.
    HipRuntime,
}

impl Api {
    /// Whose interface it is.
    #[must_use]
    pub fn vendor(self) -> Vendor {
        match self {
            Self::CudaDriver | Self::CudaRuntime => Vendor::Cuda,
            Self::MusaRuntime => Vendor::Musa,
            Self::HipRuntime => Vendor::Hip,
        }
    }

    /// What every symbol of the interface begins with.
    pub(crate) fn prefix(self) -> &'static str {
        match self {
            Self::CudaDriver => "cu",
            Self::CudaRuntime => "cuda",
            Self::MusaRuntime => "musa",
            Self::HipRuntime => "hip",
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CudaDriver => "CUDA driver",
            Self::CudaRuntime => "CUDA runtime",
            Self::MusaRuntime => "MUSA runtime",
            Self::HipRuntime => "HIP runtime",
        })
    }
}

/// One device, as this process numbers it: `cuda:0`.
///
/// Ordinals follow the process's own `CUDA_VISIBLE_DEVICES` and the like, so they mean nothing to
/// another process; [`DeviceInfo`](crate::DeviceInfo) has what does.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct DeviceId {
    /// Whose device it is.
    pub vendor: Vendor,
    /// Which one of them, from 0.
    pub ordinal: u32,
}

impl DeviceId {
    /// The device `ordinal` of `vendor`.
    #[must_use]
    pub fn new(vendor: Vendor, ordinal: u32) -> Self {
        Self { vendor, ordinal }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.vendor, self.ordinal)
    }
}

impl FromStr for DeviceId {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parsed = text.split_once(':').and_then(|(vendor, ordinal)| {
            // `u32::from_str` takes "+1", which nobody means.
            let plain = ordinal.bytes().all(|byte| byte.is_ascii_digit());
            // Drivers count in i32.
            let ordinal = ordinal.parse::<u32>().ok().filter(|n| plain && *n <= i32::MAX as u32)?;
            Some(Self { vendor: vendor.parse().ok()?, ordinal })
        });
        parsed.ok_or_else(|| ParseError {
            got: text.to_owned(),
            expected: "a device such as cuda:0, musa:0 or hip:0",
        })
    }
}

/// Where a caller says that memory is.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Location {
    /// `*`: the caller does not say, find out.
    #[default]
    Any,
    /// `cpu`: host memory; no GPU library is asked.
    Cpu,
    /// `cuda:N`, `musa:N`, `hip:N`: memory of this device.
    Device(DeviceId),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Cpu => f.write_str("cpu"),
            Self::Device(device) => device.fmt(f),
        }
    }
}

impl FromStr for Location {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        match text {
            "*" => Ok(Self::Any),
            "cpu" => Ok(Self::Cpu),
            _ => text.parse().map(Self::Device).map_err(|_| ParseError {
                got: text.to_owned(),
                expected: "cpu, * (find out), or a device such as cuda:0, musa:0 or hip:0",
            }),
        }
    }
}

/// A text that is not what it should be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{got:?} is not {expected}")]
pub struct ParseError {
    pub(crate) got: String,
    pub(crate) expected: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["cuda:0", "musa:7", "hip:12"] {
            assert_eq!(text.parse::<DeviceId>().unwrap().to_string(), text);
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
        for text in ["cpu", "*"] {
            assert_eq!(text.parse::<Location>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_device_is_refused_with_an_example() {
        for text in [
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:0x1",
            "CUDA:0",
            "npu:0",
            "cuda:4294967295",
        ] {
            assert!(text.parse::<DeviceId>().is_err(), "{text}");
            assert!(text.parse::<Location>().is_err(), "{text}");
        }
        assert_eq!(
            "gpu:0".parse::<Location>().unwrap_err().to_string(),
            "\"gpu:0\" is not cpu, * (find out), or a device such as cuda:0, musa:0 or hip:0"
        );
    }
}
