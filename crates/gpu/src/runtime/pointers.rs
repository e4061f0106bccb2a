//! What a runtime says an address is: its own struct, whose size and numbers differ between
//! versions, or the driver beneath, which needs no context for an answer.
#![expect(unsafe_code, reason = "calls into the runtime")]

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;
use std::thread;

use super::{HipTable, Ptr, Runtime};
use crate::constants::{
    ATTRIBUTES_DEVICE_AT, ATTRIBUTES_HOST_AT, ATTRIBUTES_TYPE_AT, HIP_ATTRIBUTES_FLAGS_AT,
    HIP_ATTRIBUTES_MANAGED_AT, HOST_ALLOC_WRITE_COMBINED, SCRATCH_LEN, code, hip5_memory,
    pointer_attribute, runtime_memory,
};
use crate::device::{Api, Vendor};
use crate::error::{GpuError, Meaning, Result};
use crate::memory::Memory;
use crate::queries::{self, Look, PointerQueries};
use crate::state::Version;

impl Runtime {
    /// The runtime's own question, from wherever this thread is.
    pub(super) fn look(&self, addr: u64) -> Result<Look> {
        let mut scratch = Scratch([0; SCRATCH_LEN]);
        let pointer = ptr::without_provenance_mut(addr as usize);
        // SAFETY: the runtime writes a struct of its own version's size, 88 bytes at most so far,
        // to 256.
        let code = self.quietly(|| unsafe {
            (self.table.pointer_get_attributes)(scratch.0.as_mut_ptr().cast(), pointer)
        });
        if code != 0 {
            let failure = self.failure("PointerGetAttributes", code);
            // Before CUDA 11, in HIP and in older MUSA, memory that is not known is an error. So it
            // is without a device.
            let nothing = matches!(
                failure.meaning(),
                Meaning::InvalidValue | Meaning::NotInitialised | Meaning::NoDevice
            );
            if nothing || (self.api == Api::HipRuntime && code == code::INVALID_DEVICE) {
                return Ok(Look::host());
            }
            let doing = format!("asking what {addr:#x} is");
            return Err(GpuError::Call { doing, failure: Box::new(failure) });
        }
        self.understand(addr, &scratch).map(Look::of)
    }

    /// What the struct does not tell of pinned memory, except in HIP.
    pub(super) fn with_host_flags(&self, mut memory: Memory) -> Memory {
        if let Memory::PinnedHost { host, write_combined, .. } = &mut memory
            && let Some(ask) = self.table.host_get_flags
        {
            *write_combined = self.is_write_combined(ask, *host);
        }
        memory
    }

    /// What a range of HIP is, in two questions. The struct says of one address all but which
    /// allocation it is in; so it is asked about the last byte, and the first byte is asked for its
    /// allocation, in passing whether it is in the same memory. Where that is not so, or cannot be
    /// told, the struct has to say what the first byte is.
    ///
    /// The allocation's own bounds are not asked for: the runtime gives the length in four bytes,
    /// and the start by way of the device that happens to be the thread's.
    pub(super) fn hip_range(&self, hip: &HipTable, addr: u64, len: u64) -> Result<Memory> {
        let last = addr.saturating_add(len.saturating_sub(1));
        let end = self.look(last)?;
        if let Some(id) = self.hip_allocation(hip, addr, end.memory) {
            let buffer_id = Some(id);
            match end.memory {
                Memory::Device { device, .. } => {
                    return Ok(Memory::Device { device, buffer_id, base: addr, size: len });
                }
                Memory::Managed { device, .. } => return Ok(Memory::Managed { device, buffer_id }),
                Memory::Host | Memory::PinnedHost { .. } => {}
            }
        }
        queries::range(addr, len, |at| if at == last { Ok(end) } else { self.look(at) })
    }

    /// The number of the allocation at `addr`, if that is staged memory of the same device and kind
    /// as `like`.
    fn hip_allocation(&self, hip: &HipTable, addr: u64, like: Memory) -> Option<u64> {
        let device = like.staged_on()?;
        let many = hip.pointer_get_attributes?;
        let wanted = [
            pointer_attribute::BUFFER_ID,
            pointer_attribute::DEVICE_ORDINAL,
            pointer_attribute::IS_MANAGED,
        ];
        let mut told = None;
        // The memory type is not among them: some versions take an address that they do not know
        // for an array's, and read it.
        self.quietly(|| {
            let answer = queries::ask_many(many, &wanted, addr);
            told = answer.ok();
            answer.err().unwrap_or(0)
        });
        let [id, ordinal, managed, ..] = told?;
        let is_managed = matches!(like, Memory::Managed { .. });
        let same = ordinal as u32 == device.ordinal && (managed as u32 != 0) == is_managed;
        (id != 0 && same).then_some(id)
    }

    fn understand(&self, addr: u64, scratch: &Scratch) -> Result<Memory> {
        let kind = scratch.i32_at(ATTRIBUTES_TYPE_AT);
        let device = self.id(scratch.i32_at(ATTRIBUTES_DEVICE_AT) as u32);
        let pinned = || {
            let host = scratch.u64_at(ATTRIBUTES_HOST_AT);
            let flags = scratch.i32_at(HIP_ATTRIBUTES_FLAGS_AT) as u32;
            Memory::PinnedHost {
                device,
                host: if host == 0 { addr } else { host },
                write_combined: self.hip.is_some() && flags & HOST_ALLOC_WRITE_COMBINED != 0,
            }
        };
        let plain = Memory::Device { device, buffer_id: None, base: addr, size: 0 };
        let managed = Memory::Managed { device, buffer_id: None };
        let unknown =
            |kind: String| Err(GpuError::UnknownKind { addr, vendor: self.api.vendor(), kind });
        if self.hip.is_some() {
            if scratch.i32_at(HIP_ATTRIBUTES_MANAGED_AT) != 0 {
                return Ok(managed);
            }
            if self.hip_major() < 6 {
                return match kind {
                    hip5_memory::HOST => Ok(pinned()),
                    hip5_memory::DEVICE => Ok(plain),
                    hip5_memory::UNIFIED | hip5_memory::MANAGED => Ok(managed),
                    hip5_memory::ARRAY => unknown("an array".to_owned()),
                    other => unknown(format!("memory of type {other}")),
                };
            }
        }
        match kind {
            runtime_memory::UNREGISTERED => Ok(Memory::Host),
            runtime_memory::HOST => Ok(pinned()),
            runtime_memory::DEVICE => Ok(plain),
            runtime_memory::MANAGED => Ok(managed),
            runtime_memory::HIP_UNIFIED if self.hip.is_some() => Ok(managed),
            runtime_memory::HIP_ARRAY if self.hip.is_some() => unknown("an array".to_owned()),
            other => unknown(format!("memory of type {other}")),
        }
    }

    fn hip_major(&self) -> i32 {
        *self.hip_major.get_or_init(|| {
            let number = self.number(self.table.runtime_get_version);
            number.map_or(0, |number| Version::new(Vendor::Hip, number).major)
        })
    }

    fn is_write_combined(
        &self,
        ask: unsafe extern "C" fn(*mut u32, Ptr) -> c_int,
        host: u64,
    ) -> bool {
        let mut flags = 0;
        let pointer = ptr::without_provenance_mut(host as usize);
        // SAFETY: writes one int, during the call; the address may be anything.
        let code = self.quietly(|| unsafe { ask(&raw mut flags, pointer) });
        code == 0 && flags & HOST_ALLOC_WRITE_COMBINED != 0
    }

    /// What the driver beneath says about an address; `None`: it cannot be asked.
    pub(super) fn look_below(&self, queries: PointerQueries, addr: u64) -> Option<Result<Look>> {
        let vendor = self.api.vendor();
        match queries.ask(addr) {
            Ok(answer) => Some(answer.look(vendor, addr).map(|mut look| {
                if let Memory::PinnedHost { host, write_combined, .. } = &mut look.memory {
                    let ask = self.driver().and_then(|driver| driver.mem_host_get_flags);
                    *write_combined = ask.is_some_and(|ask| self.is_write_combined(ask, *host));
                }
                look
            })),
            Err(code) => {
                let failure = self.driver_failure("PointerGetAttribute", code);
                match failure.meaning() {
                    Meaning::InvalidValue => Some(Ok(Look::host())),
                    // Relaxed: only a hint; both readings are handled.
                    Meaning::NotInitialised if !self.initialised.load(Ordering::Relaxed) => {
                        Some(Ok(Look::host()))
                    }
                    // Another driver than the runtime's, or one that wants a context.
                    Meaning::NotInitialised | Meaning::NoContext => None,
                    _ => Some(Err(GpuError::Call {
                        doing: format!("asking what {addr:#x} is"),
                        failure: Box::new(failure),
                    })),
                }
            }
        }
    }

    /// Runs `ask` on a thread of its own that is on `named`: the caller's thread stays where it is,
    /// and the question makes no context anywhere else.
    pub(super) fn on_device<T: Send>(
        &self,
        named: u32,
        ask: impl Fn() -> Result<T> + Sync,
    ) -> Result<T> {
        thread::scope(|scope| {
            let asked =
                thread::Builder::new().name("gpu-query".to_owned()).spawn_scoped(scope, || {
                    self.set_device(named)?;
                    ask()
                });
            match asked.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(answer)) => answer,
                // No thread to be had: better a context too many than no answer.
                Ok(Err(_)) | Err(_) => ask(),
            }
        })
    }
}

/// Room for an attribute struct of any version.
#[repr(C, align(16))]
struct Scratch([u8; SCRATCH_LEN]);

impl Scratch {
    fn i32_at(&self, at: usize) -> i32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..at + 4]);
        i32::from_le_bytes(bytes)
    }

    fn u64_at(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(bytes)
    }
}
