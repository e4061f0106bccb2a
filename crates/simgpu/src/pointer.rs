//! What a pointer is: the driver's attributes, one by one, and the runtimes' struct.

use crate::code::{Done, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED};
use crate::core::{Core, State, variant};
use crate::memory::{Allocation, Kind};
use crate::sys::Pointer;
use crate::variant::{Family, Variant};

/// One attribute of a known allocation, as the bytes that the driver writes.
fn attribute(found: &Allocation, addr: u64, which: i32) -> Result<Vec<u8>, i32> {
    let wide = |value: u64| Ok(value.to_le_bytes().to_vec());
    let narrow = |value: u32| Ok(value.to_le_bytes().to_vec());
    let host_visible = found.kind.is_host() || found.kind == Kind::Managed;
    match which {
        1 if variant().family() == Family::Hip => Err(NOT_SUPPORTED),
        1 => wide(found.context),
        2 if variant().family() == Family::Hip => narrow(hip_type(found).cast_unsigned()),
        2 => narrow(if found.kind.is_host() { 1 } else { 2 }),
        3 => wide(addr),
        4 if host_visible => wide(addr),
        4 => Err(INVALID_VALUE),
        6 => narrow(0),
        // HIP writes half of what the others write here, and so cuts the length of a large range.
        7 | 12 if variant().family() == Family::Hip => {
            narrow((if which == 7 { found.id } else { found.range.1 }) as u32)
        }
        7 => wide(found.id),
        8 => narrow(u32::from(found.kind == Kind::Managed)),
        9 => narrow(found.device as u32),
        10 => narrow(u32::from(found.kind == Kind::Device)),
        11 => wide(found.range.0),
        12 => wide(found.range.1),
        13 => narrow(1),
        14 => wide(0),
        15 => narrow(0),
        16 => narrow(3),
        17 => wide(if found.kind == Kind::Pool { POOL + found.device as u64 } else { 0 }),
        18 => wide(found.len),
        19 => wide(found.start),
        20 => wide(found.id),
        _ => Err(INVALID_VALUE),
    }
}

/// The handle of each device's only pool, less the device.
pub(crate) const POOL: u64 = 0x51_0000;

/// `PointerGetAttribute` of the drivers and of HIP.
pub(crate) fn one(core: &'static Core, out: Pointer<u8>, which: i32, addr: u64) -> Done {
    let mut state = core.lock();
    state.add("pointer_queries", 1);
    let current = state.current(core).is_ok();
    if !current && (which == 3 || state.config.query_needs_context) {
        return Err(INVALID_CONTEXT);
    }
    let found = state.space.find(addr).ok_or(INVALID_VALUE)?;
    let bytes = attribute(found, addr, which)?;
    drop(state);
    out.put_bytes(&bytes)
}

/// `PointerGetAttributes`: CUDA and HIP answer zeros for what they do not know, MUSA stops there.
pub(crate) fn several(
    core: &'static Core,
    count: u32,
    which: Pointer<i32>,
    outs: Pointer<Pointer<u8>>,
    addr: u64,
) -> Done {
    let mut state = core.lock();
    state.add("pointer_queries", 1);
    let found = state.space.find(addr).cloned();
    drop(state);
    for index in 0..count as usize {
        let (which, out) = (which.get_at(index)?, outs.get_at(index)?);
        let bytes = match &found {
            Some(found) => attribute(found, addr, which),
            None => Err(INVALID_VALUE),
        };
        match bytes {
            Ok(bytes) => out.put_bytes(&bytes)?,
            Err(code) if variant().family() == Family::Musa => return Err(code),
            Err(_) => out.put_bytes(&vec![0; width(which)])?,
        }
    }
    Ok(())
}

fn width(which: i32) -> usize {
    if matches!(which, 1 | 3 | 4 | 7 | 11 | 12 | 14 | 17..=20) { 8 } else { 4 }
}

/// The memory types of HIP: those of 5 are other numbers than those from 6 on.
fn hip_type(found: &Allocation) -> i32 {
    let old = variant() == Variant::Hip5;
    match found.kind {
        Kind::Pinned | Kind::Registered => i32::from(!old),
        // 5.2 has no number for it: fine-grained memory, told by isManaged.
        Kind::Managed => {
            if old {
                0
            } else {
                3
            }
        }
        Kind::Device | Kind::Mapped | Kind::Pool => {
            if old {
                1
            } else {
                2
            }
        }
    }
}

/// The bytes of a runtime's attribute struct.
fn record(state: &State, addr: u64) -> Result<Vec<u8>, i32> {
    let variant = variant();
    let mut bytes = vec![0; variant.attribute_bytes()];
    let mut put = |at: usize, value: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + value.len()) {
            place.copy_from_slice(value);
        }
    };
    let found = state.space.find(addr);
    let (kind, device) = match found {
        None => match variant {
            Variant::Hip5 | Variant::MusaRuntime4 => return Err(INVALID_VALUE),
            _ => (0, -2),
        },
        Some(found) => {
            let kind = match (variant.family(), found.kind) {
                (Family::Hip, _) => hip_type(found),
                (_, Kind::Pinned | Kind::Registered) => 1,
                (_, Kind::Managed) => 3,
                (_, Kind::Device | Kind::Mapped | Kind::Pool) => 2,
            };
            (kind, found.device as i32)
        }
    };
    put(0, &kind.to_le_bytes());
    put(4, &device.to_le_bytes());
    let on_host = found.is_none_or(|found| found.kind.is_host() || found.kind == Kind::Managed);
    put(8, &if found.is_some() { addr } else { 0 }.to_le_bytes());
    put(16, &if on_host { addr } else { 0 }.to_le_bytes());
    if variant.family() == Family::Hip {
        let managed = found.is_some_and(|found| found.kind == Kind::Managed);
        put(24, &u32::from(managed).to_le_bytes());
        put(28, &found.map_or(0, |found| found.flags).to_le_bytes());
    }
    Ok(bytes)
}

/// `PointerGetAttributes` of the runtimes. Those of CUDA and MUSA make a context for it.
pub(crate) fn of_runtime(core: &'static Core, out: Pointer<u8>, addr: u64) -> Done {
    let mut state = core.lock();
    state.add("pointer_queries", 1);
    if addr == 0 && variant().family() == Family::Hip {
        return Err(INVALID_VALUE);
    }
    if variant().family() != Family::Hip {
        state.current_or_made(core)?;
    }
    let bytes = record(&state, addr)?;
    drop(state);
    out.put_bytes(&bytes)
}
