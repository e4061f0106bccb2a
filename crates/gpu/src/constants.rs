//! Numbers of the vendors' interfaces, by name.
//!
//! Sources: the public CUDA headers `cuda.h` and `driver_types.h` (11.7 to 13.5), the HIP headers
//! `hip_runtime_api.h` (5.2, 5.7, 6.4, 7.1); MUSA uses CUDA's numbers. A number stands here only if
//! it is the same in all versions named; the one exception has a name per version.

/// `CUpointer_attribute`; MUSA's and HIP's have the same numbers.
pub(crate) mod pointer_attribute {
    /// The context that an allocation belongs to; null for virtual-memory and pool allocations.
    pub(crate) const CONTEXT: i32 = 1;
    /// One of [`super::driver_memory`].
    pub(crate) const MEMORY_TYPE: i32 = 2;
    /// Where the host reads pinned memory.
    pub(crate) const HOST_POINTER: i32 = 4;
    /// Unique per allocation and process.
    pub(crate) const BUFFER_ID: i32 = 7;
    /// Whether it is managed memory.
    pub(crate) const IS_MANAGED: i32 = 8;
    /// Whose memory it is.
    pub(crate) const DEVICE_ORDINAL: i32 = 9;
    /// Start of the allocation, or of the reserved range for virtual memory.
    pub(crate) const RANGE_START_ADDR: i32 = 11;
    /// Length of the allocation, or of the reserved range for virtual memory.
    pub(crate) const RANGE_SIZE: i32 = 12;
}

/// `CUmemorytype` (`cuda.h`).
pub(crate) mod driver_memory {
    /// Pinned or registered host memory.
    pub(crate) const HOST: u32 = 1;
    /// Device memory; managed memory, too.
    pub(crate) const DEVICE: u32 = 2;
    /// An array, which has no addresses.
    pub(crate) const ARRAY: u32 = 3;
    /// Either; documented, not seen for pointers.
    pub(crate) const UNIFIED: u32 = 4;
}

/// `cudaMemoryType` since CUDA 10 (`driver_types.h`), `musaMemoryType`, `hipMemoryType` since ROCm
/// 6.
pub(crate) mod runtime_memory {
    /// Not known to the runtime: host memory.
    pub(crate) const UNREGISTERED: i32 = 0;
    /// Pinned or registered host memory.
    pub(crate) const HOST: i32 = 1;
    /// Device memory.
    pub(crate) const DEVICE: i32 = 2;
    /// Managed memory.
    pub(crate) const MANAGED: i32 = 3;
    /// HIP: an array.
    pub(crate) const HIP_ARRAY: i32 = 10;
    /// HIP: unified memory.
    pub(crate) const HIP_UNIFIED: i32 = 11;
}

/// `hipMemoryType` up to ROCm 5 (`hip_runtime_api.h`): what reads as "host" in 6 is "device" here.
pub(crate) mod hip5_memory {
    /// Pinned or registered host memory.
    pub(crate) const HOST: i32 = 0;
    /// Device memory.
    pub(crate) const DEVICE: i32 = 1;
    /// An array.
    pub(crate) const ARRAY: i32 = 2;
    /// Unified memory.
    pub(crate) const UNIFIED: i32 = 3;
    /// Managed memory; in 5.7, absent in 5.2.
    pub(crate) const MANAGED: i32 = 4;
}

/// `cudaMemcpyKind`, `musaMemcpyKind`, `hipMemcpyKind`.
pub(crate) mod copy_kind {
    /// Host to device.
    pub(crate) const HOST_TO_DEVICE: i32 = 1;
    /// Device to host.
    pub(crate) const DEVICE_TO_HOST: i32 = 2;
    /// Device to device.
    pub(crate) const DEVICE_TO_DEVICE: i32 = 3;
}

/// `CU_MEMHOSTALLOC_PORTABLE`, `cudaHostAllocPortable`, `hipHostMallocPortable`: pinned for all
/// contexts.
pub(crate) const HOST_ALLOC_PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`, `cudaHostAllocMapped`, `hipHostMallocMapped`: a device can read it.
pub(crate) const HOST_ALLOC_MAPPED: u32 = 2;
/// `CU_MEMHOSTALLOC_WRITECOMBINED`, `cudaHostAllocWriteCombined`: the host reads it uncached.
pub(crate) const HOST_ALLOC_WRITE_COMBINED: u32 = 4;
/// `CU_STREAM_NON_BLOCKING`, `cudaStreamNonBlocking`: not joined by the legacy default stream.
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`, `cudaEventDisableTiming`.
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_GEQ`, `hipStreamWaitValueGte`: wait until the word is at least the value.
pub(crate) const WAIT_VALUE_GEQ: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`, `cudaStreamCaptureModeRelaxed`, `hipStreamCaptureModeRelaxed`.
pub(crate) const CAPTURE_MODE_RELAXED: i32 = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`, `cudaStreamCaptureStatusNone`.
pub(crate) const CAPTURE_STATUS_NONE: i32 = 0;
/// `CU_DEVICE_ATTRIBUTE_INTEGRATED`, `cudaDevAttrIntegrated`.
pub(crate) const DEVICE_ATTRIBUTE_INTEGRATED: i32 = 18;

/// Bytes given to a callee that writes an attribute struct of its own version's size (24 to 88 so
/// far).
pub(crate) const SCRATCH_LEN: usize = 256;
/// Offset of `type` in every `…PointerAttributes`.
pub(crate) const ATTRIBUTES_TYPE_AT: usize = 0;
/// Offset of `device`.
pub(crate) const ATTRIBUTES_DEVICE_AT: usize = 4;
/// Offset of `hostPointer`.
pub(crate) const ATTRIBUTES_HOST_AT: usize = 16;
/// Offset of `isManaged`, in HIP only.
pub(crate) const HIP_ATTRIBUTES_MANAGED_AT: usize = 24;
/// Offset of `allocationFlags`, in HIP only.
pub(crate) const HIP_ATTRIBUTES_FLAGS_AT: usize = 28;

/// `hipRuntimeGetVersion` gives major × this + minor × 100,000 + patch.
pub(crate) const HIP_VERSION_MAJOR: i32 = 10_000_000;
/// CUDA's versions are major × this + minor × 10.
pub(crate) const CUDA_VERSION_MAJOR: i32 = 1000;
/// The same in MUSA's, as public sources compare them (40300 is 4.3); not seen on hardware.
pub(crate) const MUSA_VERSION_MAJOR: i32 = 10_000;

/// `CUresult`, `cudaError_t` and `hipError_t`, which agree on these; MUSA's are compared by name.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NOT_INITIALIZED: i32 = 3;
    pub(crate) const DEINITIALIZED: i32 = 4;
    pub(crate) const STUB_LIBRARY: i32 = 34;
    pub(crate) const INSUFFICIENT_DRIVER: i32 = 35;
    pub(crate) const DEVICE_UNAVAILABLE: i32 = 46;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const OPERATING_SYSTEM: i32 = 304;
    pub(crate) const NOT_FOUND: i32 = 500;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
    pub(crate) const NOT_PERMITTED: i32 = 800;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    pub(crate) const SYSTEM_NOT_READY: i32 = 802;
    pub(crate) const SYSTEM_DRIVER_MISMATCH: i32 = 803;
    pub(crate) const COMPAT_NOT_SUPPORTED_ON_DEVICE: i32 = 804;
    /// First of the multi-process service's codes.
    pub(crate) const MPS_FIRST: i32 = 805;
    /// Last of the multi-process service's codes.
    pub(crate) const MPS_LAST: i32 = 810;
    /// First of the codes about stream capture.
    pub(crate) const CAPTURE_FIRST: i32 = 900;
    /// Last of the codes about stream capture.
    pub(crate) const CAPTURE_LAST: i32 = 908;
    pub(crate) const UNKNOWN: i32 = 999;

    /// After one of these every later call in the context repeats it.
    pub(crate) fn is_sticky(code: i32) -> bool {
        matches!(code, 214 | 700 | 702 | 710 | 714..=719 | UNKNOWN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The renumbering that makes a device pointer of one HIP version read as host memory of the
    /// next.
    #[test]
    fn hip_renumbered_its_memory_types() {
        assert_eq!(hip5_memory::DEVICE, runtime_memory::HOST);
        assert_ne!(hip5_memory::HOST, runtime_memory::HOST);
    }

    #[test]
    fn the_scratch_holds_every_known_attribute_struct() {
        const { assert!(SCRATCH_LEN >= 2 * 88) };
        const { assert!(HIP_ATTRIBUTES_FLAGS_AT + 4 <= 32) };
    }

    #[test]
    fn faults_of_kernels_are_sticky_and_refusals_are_not() {
        for sticky in [214, 700, 702, 710, 714, 719, 999] {
            assert!(code::is_sticky(sticky), "{sticky}");
        }
        for passing in [0, 1, 2, 3, 201, 600, 704, 709, 712, 713, 720, 800, 900] {
            assert!(!code::is_sticky(passing), "{passing}");
        }
    }
}
