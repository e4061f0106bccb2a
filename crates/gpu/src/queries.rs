//! What the memory at an address is, asked of a driver interface: the questions that need and make
//! no context.
#![expect(unsafe_code, reason = "calls into the driver")]

use std::ffi::{c_int, c_void};

use crate::constants::{code, driver_memory, pointer_attribute as attribute};
use crate::device::{DeviceId, Vendor};
use crate::error::{GpuError, Result};
use crate::memory::Memory;

/// One attribute of a pointer.
pub(crate) type One = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;
/// Several.
pub(crate) type Many = unsafe extern "C" fn(u32, *mut c_int, *mut *mut c_void, u64) -> c_int;

/// The attributes that we want, the ones that matter most first.
const ATTRIBUTES: [c_int; 8] = [
    attribute::MEMORY_TYPE,
    attribute::DEVICE_ORDINAL,
    attribute::IS_MANAGED,
    attribute::BUFFER_ID,
    attribute::RANGE_START_ADDR,
    attribute::RANGE_SIZE,
    attribute::CONTEXT,
    attribute::HOST_POINTER,
];

/// The functions of a driver interface that look at pointers.
#[derive(Clone, Copy)]
pub(crate) struct PointerQueries {
    pub(crate) vendor: Vendor,
    pub(crate) one: One,
    pub(crate) many: Option<Many>,
}

/// What a driver says about an address; zeros for host memory that it does not know.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Answer {
    pub(crate) kind: u32,
    pub(crate) ordinal: u32,
    pub(crate) managed: bool,
    pub(crate) buffer_id: u64,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) context: u64,
    pub(crate) host: u64,
}

impl PointerQueries {
    /// Asks about one address; the error is the driver's code. Host memory costs one question, and
    /// so does device memory of CUDA.
    pub(crate) fn ask(&self, addr: u64) -> std::result::Result<Answer, i32> {
        // CUDA's plural form gives zeros for memory that it does not know, where the singular form
        // gives an error, which tools list as the program's mistake. MUSA's stops at the first
        // attribute that fails.
        if let (Vendor::Cuda, Some(many)) = (self.vendor, self.many) {
            match ask_many(many, &ATTRIBUTES, addr) {
                Ok(slots) => return Ok(Answer::from_slots(slots)),
                // An old driver that does not know one of the attributes; or, for interposers, the
                // pointer.
                Err(code::INVALID_VALUE) => {}
                Err(other) => return Err(other),
            }
        }
        let mut slots = [0; ATTRIBUTES.len()];
        slots[0] = self.ask_one(attribute::MEMORY_TYPE, addr)?;
        if slots[0] as u32 == 0 {
            return Ok(Answer::default());
        }
        if let Some(many) = self.many.filter(|_| self.vendor == Vendor::Musa)
            // All but the last, which fails for plain device memory.
            && let Ok(rest) = ask_many(many, &ATTRIBUTES[..7], addr)
        {
            return Ok(Answer::from_slots(rest));
        }
        for (slot, wanted) in slots.iter_mut().zip(ATTRIBUTES).skip(1) {
            // Not every version knows each; zero is "unknown" for all but the ordinal, which every
            // version has.
            match self.ask_one(wanted, addr) {
                Ok(value) => *slot = value,
                Err(refused) if wanted == attribute::DEVICE_ORDINAL => return Err(refused),
                Err(_) => {}
            }
        }
        Ok(Answer::from_slots(slots))
    }

    /// One attribute; the error is the driver's code.
    pub(crate) fn ask_one(&self, wanted: c_int, addr: u64) -> std::result::Result<u64, i32> {
        // Some attributes are 4 bytes wide, one was 8 where its users thought 4: each gets 8,
        // zeroed.
        let mut slot = 0_u64;
        // SAFETY: the driver writes at most 8 bytes to `slot`, during the call; `addr` may be
        // anything.
        let code = unsafe { (self.one)((&raw mut slot).cast(), wanted, addr) };
        if code == 0 { Ok(slot) } else { Err(code) }
    }
}

/// The attributes `wanted` of one address, in that order, zeros behind them; the error is the
/// library's code.
pub(crate) fn ask_many(
    many: Many,
    wanted: &[c_int],
    addr: u64,
) -> std::result::Result<[u64; ATTRIBUTES.len()], i32> {
    let mut names = ATTRIBUTES;
    let mut slots = [0_u64; ATTRIBUTES.len()];
    let mut outputs = [std::ptr::null_mut::<c_void>(); ATTRIBUTES.len()];
    for (output, slot) in outputs.iter_mut().zip(&mut slots) {
        *output = std::ptr::from_mut(slot).cast();
    }
    let count = wanted.len().min(names.len());
    names[..count].copy_from_slice(&wanted[..count]);
    // SAFETY: `count` names and outputs, each output an 8-byte slot that outlives the call; `addr`
    // may be anything.
    let code = unsafe { many(count as u32, names.as_mut_ptr(), outputs.as_mut_ptr(), addr) };
    if code == 0 { Ok(slots) } else { Err(code) }
}

impl Answer {
    fn from_slots(slots: [u64; ATTRIBUTES.len()]) -> Self {
        let [kind, ordinal, managed, buffer_id, start, size, context, host] = slots;
        Self {
            // Four bytes were written to the front of a zeroed slot; our machines are
            // little-endian.
            kind: kind as u32,
            ordinal: ordinal as u32,
            managed: managed as u32 != 0,
            buffer_id,
            start,
            size,
            context,
            host,
        }
    }

    /// What the address is.
    pub(crate) fn look(self, vendor: Vendor, addr: u64) -> Result<Look> {
        let device = DeviceId::new(vendor, self.ordinal);
        let buffer_id = (self.buffer_id != 0).then_some(self.buffer_id);
        let fits = self.size != 0 && addr >= self.start && addr - self.start < self.size;
        let extent = fits.then_some((self.start, self.size));
        match self.kind {
            0 => Ok(Look::host()),
            driver_memory::HOST => Ok(Look {
                memory: Memory::PinnedHost {
                    device,
                    host: if self.host == 0 { addr } else { self.host },
                    write_combined: false,
                },
                extent,
                has_holes: false,
            }),
            driver_memory::DEVICE | driver_memory::UNIFIED
                if self.managed || self.kind == driver_memory::UNIFIED =>
            {
                let memory = Memory::Managed { device, buffer_id };
                Ok(Look { memory, extent, has_holes: false })
            }
            driver_memory::DEVICE => Ok(Look {
                memory: Memory::Device { device, buffer_id, base: addr, size: 0 },
                extent,
                // Virtual memory and pools have no context.
                has_holes: self.context == 0,
            }),
            driver_memory::ARRAY => {
                Err(GpuError::UnknownKind { addr, vendor, kind: "an array".to_owned() })
            }
            other => {
                Err(GpuError::UnknownKind { addr, vendor, kind: format!("memory of type {other}") })
            }
        }
    }
}

/// What one address is, and how far that is known to hold.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Look {
    pub(crate) memory: Memory,
    /// Start and length of the allocation, or of the reservation that it is in, where the
    /// interface tells.
    pub(crate) extent: Option<(u64, u64)>,
    /// The extent may be a reservation of which only parts are mapped.
    pub(crate) has_holes: bool,
}

impl Look {
    pub(crate) fn host() -> Self {
        Self::of(Memory::Host)
    }

    /// An answer that holds for the one address.
    pub(crate) fn of(memory: Memory) -> Self {
        Self { memory, extent: None, has_holes: false }
    }
}

/// What a range is, by looking at its first byte and, where that does not answer for all of it, at
/// its last.
pub(crate) fn range(addr: u64, len: u64, look: impl Fn(u64) -> Result<Look>) -> Result<Memory> {
    let straddles = |first: Memory, last: &str| GpuError::Straddles {
        addr,
        len,
        first: spoken(first),
        last: last.to_owned(),
    };
    let first = look(addr)?;
    let Some(last) = addr.checked_add(len.saturating_sub(1)) else {
        return Err(straddles(first.memory, "no address at all"));
    };
    let inside = first.extent.is_some_and(|(start, size)| last - start < size);
    if last != addr && (!inside || first.has_holes) {
        let end = look(last)?;
        if !first.memory.continues_as(end.memory) {
            return Err(straddles(first.memory, &spoken(end.memory)));
        }
        // Two allocations that happen to lie side by side are not one.
        if !inside && first.extent.is_some() && first.memory.staged_on().is_some() {
            return Err(straddles(first.memory, "another allocation there"));
        }
    }
    Ok(match first.memory {
        Memory::Device { device, buffer_id, .. } => {
            let whole = first.extent.filter(|_| !first.has_holes);
            let (base, size) = whole.unwrap_or((addr, len));
            Memory::Device { device, buffer_id, base, size }
        }
        other => other,
    })
}

fn spoken(memory: Memory) -> String {
    match memory {
        Memory::Host => "host memory".to_owned(),
        Memory::PinnedHost { .. } => "pinned host memory".to_owned(),
        Memory::Device { device, .. } => format!("memory of {device}"),
        Memory::Managed { device, .. } => format!("managed memory of {device}"),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const DEVICE: DeviceId = DeviceId { vendor: Vendor::Cuda, ordinal: 2 };

    fn device_memory(addr: u64, extent: Option<(u64, u64)>) -> Look {
        Look {
            memory: Memory::Device { device: DEVICE, buffer_id: Some(5), base: addr, size: 0 },
            extent,
            has_holes: false,
        }
    }

    #[test]
    fn one_look_is_enough_inside_an_allocation() {
        let looks = Cell::new(0);
        let memory = range(0x1100, 0x100, |addr| {
            looks.set(looks.get() + 1);
            Ok(device_memory(addr, Some((0x1000, 0x1000))))
        });
        assert_eq!(
            memory.unwrap(),
            Memory::Device { device: DEVICE, buffer_id: Some(5), base: 0x1000, size: 0x1000 }
        );
        assert_eq!(looks.get(), 1);
    }

    #[test]
    fn virtual_memory_is_looked_at_from_both_ends_and_not_widened() {
        let reserved = Some((0x1000, 1 << 40));
        let looks = Cell::new(0);
        let look = |addr| {
            looks.set(looks.get() + 1);
            Ok(Look { has_holes: true, ..device_memory(addr, reserved) })
        };
        assert_eq!(
            range(0x1100, 0x9000, look).unwrap(),
            Memory::Device { device: DEVICE, buffer_id: Some(5), base: 0x1100, size: 0x9000 }
        );
        assert_eq!(looks.get(), 2);
        assert!(range(0x1100, 1 << 41, look).is_err());
    }

    #[test]
    fn a_range_that_leaves_its_allocation_is_refused() {
        let look = |addr: u64| {
            Ok(if addr < 0x2000 {
                device_memory(addr, Some((0x1000, 0x1000)))
            } else if addr < 0x3000 {
                device_memory(addr, Some((0x2000, 0x1000)))
            } else {
                Look::host()
            })
        };
        assert!(range(0x1000, 0x1000, look).is_ok());
        assert_eq!(
            range(0x1000, 0x1001, look).unwrap_err().to_string(),
            "[0x1000, +4097) begins in memory of cuda:2 and ends in another allocation there; a \
             range lies in one \
             allocation: check the address and length"
        );
        assert!(
            range(0x1000, 0x3000, look).unwrap_err().to_string().contains("ends in host memory")
        );
        assert!(range(0x9000, 0, look).is_ok());
        assert!(range(u64::MAX, 2, look).unwrap_err().to_string().contains("no address at all"));
    }

    #[test]
    fn a_driver_reports_managed_memory_as_device_memory_with_a_flag() {
        let answer =
            Answer { kind: driver_memory::DEVICE, managed: true, ordinal: 2, ..Answer::default() };
        let look = answer.look(Vendor::Cuda, 0x1000).unwrap();
        assert_eq!(look.memory, Memory::Managed { device: DEVICE, buffer_id: None });
        let array = Answer { kind: driver_memory::ARRAY, ..Answer::default() };
        assert!(array.look(Vendor::Cuda, 0x1000).unwrap_err().to_string().contains("an array"));
    }
}
