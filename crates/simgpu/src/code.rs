//! The numbers that calls answer with, and their names. CUDA, MUSA and HIP share the numbers.

use crate::variant::Family;

/// What a call of the simulator comes to: nothing, or the vendor's number.
pub(crate) type Done = Result<(), i32>;

pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const INVALID_COPY_DIRECTION: i32 = 21;
pub(crate) const INSUFFICIENT_DRIVER: i32 = 35;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const OPERATING_SYSTEM: i32 = 304;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const CONTEXT_DESTROYED: i32 = 709;
pub(crate) const ALREADY_REGISTERED: i32 = 712;
pub(crate) const NOT_REGISTERED: i32 = 713;
pub(crate) const NOT_PERMITTED: i32 = 800;
pub(crate) const NOT_SUPPORTED: i32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;
pub(crate) const CAPTURE_UNMATCHED: i32 = 903;
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;
pub(crate) const CAPTURED_EVENT: i32 = 907;
pub(crate) const CAPTURE_WRONG_THREAD: i32 = 908;

/// Which library's names for the numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    Driver,
    Runtime,
}

macro_rules! table {
    ($($code:literal $upper:literal $camel:literal $text:literal;)*) => {
        /// The name of `code`, terminated for C.
        pub(crate) fn name(code: i32, family: Family, style: Style) -> Option<&'static std::ffi::CStr> {
            let text = match (family, style) {
                (Family::Cuda, Style::Driver) => match code {
                    0 => "CUDA_SUCCESS\0", $($code => concat!("CUDA_ERROR_", $upper, "\0"),)* _ => return None,
                },
                (Family::Musa, Style::Driver) => match code {
                    0 => "MUSA_SUCCESS\0", $($code => concat!("MUSA_ERROR_", $upper, "\0"),)* _ => return None,
                },
                (Family::Cuda, Style::Runtime) => match code {
                    0 => "cudaSuccess\0", $($code => concat!("cudaError", $camel, "\0"),)* _ => return None,
                },
                (Family::Musa, Style::Runtime) => match code {
                    0 => "musaSuccess\0", $($code => concat!("musaError", $camel, "\0"),)* _ => return None,
                },
                (Family::Hip, _) => match code {
                    0 => "hipSuccess\0", $($code => concat!("hipError", $camel, "\0"),)* _ => return None,
                },
            };
            std::ffi::CStr::from_bytes_with_nul(text.as_bytes()).ok()
        }

        /// A sentence about `code`, terminated for C.
        pub(crate) fn description(code: i32) -> Option<&'static std::ffi::CStr> {
            let text = match code { 0 => "no error\0", $($code => concat!($text, "\0"),)* _ => return None };
            std::ffi::CStr::from_bytes_with_nul(text.as_bytes()).ok()
        }
    };
}

table! {
    1 "INVALID_VALUE" "InvalidValue" "invalid argument";
    2 "OUT_OF_MEMORY" "MemoryAllocation" "out of memory";
    3 "NOT_INITIALIZED" "InitializationError" "initialization error";
    4 "DEINITIALIZED" "CudartUnloading" "driver shutting down";
    21 "INVALID_MEMCPY_DIRECTION" "InvalidMemcpyDirection" "invalid copy direction for memcpy";
    34 "STUB_LIBRARY" "StubLibrary" "the loaded library is a stub";
    35 "INSUFFICIENT_DRIVER" "InsufficientDriver" "the driver is too old for this runtime";
    46 "DEVICE_UNAVAILABLE" "DevicesUnavailable" "the device is busy or unavailable";
    100 "NO_DEVICE" "NoDevice" "no capable device is detected";
    101 "INVALID_DEVICE" "InvalidDevice" "invalid device ordinal";
    201 "INVALID_CONTEXT" "DeviceUninitialized" "invalid device context";
    214 "ECC_UNCORRECTABLE" "ECCUncorrectable" "uncorrectable memory error";
    304 "OPERATING_SYSTEM" "OperatingSystem" "an operating system call failed";
    400 "INVALID_HANDLE" "InvalidResourceHandle" "invalid resource handle";
    500 "NOT_FOUND" "SymbolNotFound" "named symbol not found";
    600 "NOT_READY" "NotReady" "device not ready";
    700 "ILLEGAL_ADDRESS" "IllegalAddress" "an illegal memory access was encountered";
    709 "CONTEXT_IS_DESTROYED" "ContextIsDestroyed" "the context is destroyed";
    710 "ASSERT" "Assert" "device-side assert triggered";
    712 "HOST_MEMORY_ALREADY_REGISTERED" "HostMemoryAlreadyRegistered" "host memory is already registered";
    713 "HOST_MEMORY_NOT_REGISTERED" "HostMemoryNotRegistered" "host memory is not registered";
    719 "LAUNCH_FAILED" "LaunchFailure" "unspecified launch failure";
    800 "NOT_PERMITTED" "NotPermitted" "operation not permitted";
    801 "NOT_SUPPORTED" "NotSupported" "operation not supported";
    802 "SYSTEM_NOT_READY" "SystemNotReady" "system not yet initialized";
    803 "SYSTEM_DRIVER_MISMATCH" "SystemDriverMismatch" "driver and runtime components do not match";
    900 "STREAM_CAPTURE_UNSUPPORTED" "StreamCaptureUnsupported" "not permitted while a stream is capturing";
    901 "STREAM_CAPTURE_INVALIDATED" "StreamCaptureInvalidated" "a previous error invalidated the capture";
    903 "STREAM_CAPTURE_UNMATCHED" "StreamCaptureUnmatched" "the capture was not begun on this stream";
    906 "STREAM_CAPTURE_IMPLICIT" "StreamCaptureImplicit" "the legacy stream would depend on a capture";
    907 "CAPTURED_EVENT" "CapturedEvent" "not permitted on an event last recorded in a capture";
    908 "STREAM_CAPTURE_WRONG_THREAD" "StreamCaptureWrongThread" "a capture must end on the thread that began it";
    999 "UNKNOWN" "Unknown" "unknown error";
}
