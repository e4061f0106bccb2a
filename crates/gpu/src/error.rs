//! What a GPU library refused, in its own words, and what to do next.

use std::fmt;

use crate::constants::code;
use crate::device::{DeviceId, Vendor};
use crate::state::State;

/// The result of asking a GPU library for something.
pub type Result<T> = std::result::Result<T, GpuError>;

/// One refused call: which, and what the library said.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// Whose library.
    pub vendor: Vendor,
    /// The function, as the library spells it.
    pub call: String,
    /// The number it gave.
    pub code: i32,
    /// The library's name for that number; empty if it has none.
    pub name: String,
    /// The library's text for that number; empty if it has none.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {}", self.call, self.code)?;
        if !self.name.is_empty() {
            write!(f, " {}", self.name)?;
        }
        // Some versions give the name again for a text.
        if !self.text.is_empty() && self.text != self.name {
            write!(f, " ({})", self.text)?;
        }
        Ok(())
    }
}

/// What the numbers of all vendors mean.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Meaning {
    InvalidValue,
    OutOfMemory,
    NotInitialised,
    Unloading,
    Stub,
    InsufficientDriver,
    NoDevice,
    NotReady,
    NoContext,
    Sticky,
    Other,
}

/// MUSA's numbers are not published; its names are those of CUDA with another prefix.
const MUSA_NAMES: [(&str, Meaning); 14] = [
    ("invalidvalue", Meaning::InvalidValue),
    ("memoryallocation", Meaning::OutOfMemory),
    ("outofmemory", Meaning::OutOfMemory),
    ("initializationerror", Meaning::NotInitialised),
    ("notinitialized", Meaning::NotInitialised),
    ("musartunloading", Meaning::Unloading),
    ("deinitialized", Meaning::Unloading),
    ("stublibrary", Meaning::Stub),
    ("insufficientdriver", Meaning::InsufficientDriver),
    ("nodevice", Meaning::NoDevice),
    ("notready", Meaning::NotReady),
    ("invalidcontext", Meaning::NoContext),
    ("deviceuninitialized", Meaning::NoContext),
    ("illegaladdress", Meaning::Sticky),
];

impl Failure {
    pub(crate) fn meaning(&self) -> Meaning {
        if self.vendor == Vendor::Musa {
            let plain: String = self
                .name
                .chars()
                .filter(char::is_ascii_alphanumeric)
                .map(|c| c.to_ascii_lowercase())
                .collect();
            let plain = plain.strip_prefix("musaerror").unwrap_or(&plain);
            if let Some((_, meaning)) = MUSA_NAMES.iter().find(|(name, _)| *name == plain) {
                return *meaning;
            }
        }
        match self.code {
            code::INVALID_VALUE => Meaning::InvalidValue,
            code::OUT_OF_MEMORY => Meaning::OutOfMemory,
            code::NOT_INITIALIZED => Meaning::NotInitialised,
            code::DEINITIALIZED => Meaning::Unloading,
            code::STUB_LIBRARY => Meaning::Stub,
            code::INSUFFICIENT_DRIVER => Meaning::InsufficientDriver,
            code::NO_DEVICE => Meaning::NoDevice,
            code::NOT_READY => Meaning::NotReady,
            code::INVALID_CONTEXT => Meaning::NoContext,
            sticky if code::is_sticky(sticky) => Meaning::Sticky,
            _ => Meaning::Other,
        }
    }

    /// Whether every later call in the same context will answer the same: a kernel of the process
    /// failed earlier, and only a new process gets rid of it.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.meaning() == Meaning::Sticky
    }

    /// Whether the library is being unloaded because the process ends; nothing is lost then.
    #[must_use]
    pub fn is_unloading(&self) -> bool {
        self.meaning() == Meaning::Unloading || self.code == code::CONTEXT_IS_DESTROYED
    }

    /// What a user can do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match (self.meaning(), self.code) {
            (Meaning::InvalidValue, _) => {
                "check that the memory is still allocated, and the address and length"
            }
            (Meaning::OutOfMemory, _) => {
                "free device or pinned host memory, or use fewer or smaller staging buffers"
            }
            (Meaning::NotInitialised, _) => {
                "if a parent of this process used the GPU before it forked, start this process by \
                 spawn instead of fork"
            }
            (Meaning::Unloading | Meaning::Other, code::CONTEXT_IS_DESTROYED)
            | (Meaning::Unloading, _) => {
                "the process is ending; close the engine before its last line"
            }
            (Meaning::Stub, _) => {
                "this is the toolkit's stand-in for linking, not a driver: install the driver, or \
                 take the \
                 folder `stubs` out of the library path"
            }
            (Meaning::InsufficientDriver, _) => {
                "install a newer driver, or put an older runtime in the library path"
            }
            (Meaning::NoDevice, _) => {
                "check that the device is visible here (nvidia-smi, mthreads-gmi, rocminfo; \
                 CUDA_VISIBLE_DEVICES, MUSA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES; the container's \
                 device options)"
            }
            (Meaning::NotReady, _) => "ask again later",
            (Meaning::NoContext, _) => {
                "allocate the memory in this process before it is named, and do not reset the \
                 device"
            }
            (Meaning::Sticky, _) => {
                "a kernel of this process failed earlier and the device refuses all work until \
                 the process \
                 ends: look for that failure, and start the process anew; host memory still moves"
            }
            (Meaning::Other, code::OPERATING_SYSTEM) => {
                "if a parent of this process used the GPU before it forked, start this process by \
                 spawn \
                 instead of fork; otherwise check the permissions of the device files"
            }
            (Meaning::Other, code::DEVICE_UNAVAILABLE) => {
                "another process has the device to itself: check its compute mode"
            }
            (Meaning::Other, code::INVALID_DEVICE) => {
                "check the ordinal, and which devices are visible to this process"
            }
            (Meaning::Other, code::NOT_FOUND) => "check that the memory is still allocated",
            (Meaning::Other, code::NOT_PERMITTED) => {
                "check the permissions of this process and its container"
            }
            (Meaning::Other, code::NOT_SUPPORTED) => "this device or driver cannot do it",
            (Meaning::Other, code::SYSTEM_NOT_READY) => {
                "the system is not ready: check that the fabric manager runs"
            }
            (Meaning::Other, code::SYSTEM_DRIVER_MISMATCH) => {
                "the driver was updated while its old kernel module is loaded: reload the module \
                 or restart the machine"
            }
            (Meaning::Other, code::COMPAT_NOT_SUPPORTED_ON_DEVICE) => {
                "take the forward-compatibility library (cuda/compat) out of the library path, or \
                 update the driver"
            }
            (Meaning::Other, code::MPS_FIRST..=code::MPS_LAST) => {
                "check the multi-process service (nvidia-cuda-mps-control) of this machine"
            }
            (Meaning::Other, code::CAPTURE_FIRST..=code::CAPTURE_LAST) => {
                "a graph capture is in progress: submit the transfer before or after it"
            }
            (Meaning::Other, _) => "look the number up in the vendor's documentation",
        }
    }
}

/// Every way in which talking to a GPU fails. The texts are for people.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The library refused a call.
    #[error("{doing}: {failure}; {}", failure.advice())]
    Call {
        /// What was to be done, and to what.
        doing: String,
        /// What the library said.
        failure: Box<Failure>,
    },
    /// The library lacks a function that not every version has.
    #[error(
        "{doing}: {file} has no {symbol}; a newer version of the {} library has it",
        vendor.spoken()
    )]
    Unsupported {
        /// What was to be done.
        doing: String,
        /// Whose library.
        vendor: Vendor,
        /// The library's file.
        file: String,
        /// The function, as the library would spell it.
        symbol: String,
    },
    /// No device of this vendor can be used, and why.
    #[error("{wanted} cannot be used: {state}")]
    Unavailable {
        /// The device or the vendor that was asked for.
        wanted: String,
        /// What was found instead.
        state: Box<State>,
    },
    /// The vendor has devices, but not this one.
    #[error(
        "there is no {device}: {file} shows {count} {} device{}; check the ordinal, and which \
         devices are \
         visible to this process", device.vendor.spoken(), if *count == 1 { "" } else { "s" }
    )]
    NoSuchDevice {
        /// The device that was asked for.
        device: DeviceId,
        /// The library's file.
        file: String,
        /// How many there are.
        count: u32,
    },
    /// The process has no context on the device, and none is made on its behalf.
    #[error(
        "{device} is not in use by this process (it has no context there); allocate the memory \
         before it is \
         registered, and do not reset the device while it is"
    )]
    NoContext {
        /// The device.
        device: DeviceId,
    },
    /// The two ends of a range are not in the same memory.
    #[error(
        "[{addr:#x}, +{len}) begins in {first} and ends in {last}; a range lies in one \
         allocation: check the \
         address and length"
    )]
    Straddles {
        /// Start of the range.
        addr: u64,
        /// Its length in bytes.
        len: u64,
        /// What the first byte is in.
        first: String,
        /// What the last byte is in.
        last: String,
    },
    /// The address is memory that has no bytes in a row.
    #[error(
        "{addr:#x} is in {kind} according to {}; only host, device and managed memory can be moved",
        vendor.spoken()
    )]
    UnknownKind {
        /// The address.
        addr: u64,
        /// Whose library says so.
        vendor: Vendor,
        /// What it says.
        kind: String,
    },
    /// A parent of this process had opened the library.
    #[error(
        "{} was opened before a fork, in process {parent}, and cannot be used in this one; start \
         this process by \
         spawn instead of fork, or use the GPU only in children", vendor.spoken()
    )]
    Forked {
        /// Whose library.
        vendor: Vendor,
        /// The process that opened it.
        parent: u32,
    },
}

impl GpuError {
    /// What the library said, if it was a library that refused.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Call { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Whether every later call will fail as well; see [`Failure::is_sticky`].
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.failure().is_some_and(Failure::is_sticky)
    }

    /// Whether the library was being unloaded; see [`Failure::is_unloading`].
    #[must_use]
    pub fn is_unloading(&self) -> bool {
        self.failure().is_some_and(Failure::is_unloading)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(vendor: Vendor, code: i32, name: &str, text: &str) -> Failure {
        Failure {
            vendor,
            call: "cuMemHostAlloc".to_owned(),
            code,
            name: name.to_owned(),
            text: text.to_owned(),
        }
    }

    #[test]
    fn a_refusal_says_what_who_and_what_to_do() {
        let error = GpuError::Call {
            doing: "pinning 1048576 bytes for cuda:0".to_owned(),
            failure: Box::new(failure(
                Vendor::Cuda,
                2,
                "CUDA_ERROR_OUT_OF_MEMORY",
                "out of memory",
            )),
        };
        assert_eq!(
            error.to_string(),
            "pinning 1048576 bytes for cuda:0: cuMemHostAlloc answered 2 CUDA_ERROR_OUT_OF_MEMORY \
             (out of memory); \
             free device or pinned host memory, or use fewer or smaller staging buffers"
        );
    }

    #[test]
    fn what_a_library_does_not_say_is_left_out() {
        assert_eq!(
            failure(Vendor::Cuda, 12345, "", "").to_string(),
            "cuMemHostAlloc answered 12345"
        );
        assert_eq!(
            failure(Vendor::Hip, 100, "hipErrorNoDevice", "hipErrorNoDevice").to_string(),
            "cuMemHostAlloc answered 100 hipErrorNoDevice"
        );
    }

    #[test]
    fn musa_is_understood_by_name() {
        let odd = failure(Vendor::Musa, 77, "musaErrorNoDevice", "");
        assert_eq!(odd.meaning(), Meaning::NoDevice);
        assert_eq!(
            failure(Vendor::Musa, 77, "MUSA_ERROR_NO_DEVICE", "").meaning(),
            Meaning::NoDevice
        );
        assert_eq!(failure(Vendor::Cuda, 77, "cudaErrorNoDevice", "").meaning(), Meaning::Other);
    }

    #[test]
    fn no_advice_is_to_rebuild() {
        for code in -1..1000 {
            let advice = failure(Vendor::Cuda, code, "", "").advice();
            assert!(!advice.contains("build") && !advice.contains("compile"), "{code}: {advice}");
        }
    }
}
