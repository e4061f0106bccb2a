//! What a simulated device says about itself, and memory calls that all faces share.

use std::ffi::c_char;

use crate::code::{Done, INVALID_VALUE};
use crate::core::{Core, Guard, variant};
use crate::memory::Kind;
use crate::stream;
use crate::sys::Pointer;
use crate::variant::Family;

pub(crate) fn attribute(core: &'static Core, out: Pointer<i32>, which: i32, ordinal: i32) -> Done {
    let device = core.lock().device(ordinal)?;
    if variant().family() == Family::Hip {
        // HIP numbers its attributes in another way; none of them matters here.
        return out.put(0);
    }
    out.put(match which {
        33 => bus(device),
        40 => 2,
        41 | 83 | 89 | 102 | 115 => 1,
        75 => 9,
        134 => 0,
        _ => 0,
    })
}

fn bus(device: usize) -> i32 {
    0x10 + device as i32
}

pub(crate) fn bus_id(core: &'static Core, out: Pointer<c_char>, len: i32, ordinal: i32) -> Done {
    let device = core.lock().device(ordinal)?;
    let text = format!("0000:{:02X}:00.0", bus(device));
    let len = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    if out.is_null() || len <= text.len() {
        return Err(INVALID_VALUE);
    }
    out.put_text(len, &text);
    Ok(())
}

pub(crate) fn name(core: &'static Core, out: Pointer<c_char>, len: i32, ordinal: i32) -> Done {
    let device = core.lock().device(ordinal)?;
    let family = variant().family();
    let len = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    out.put_text(len, &format!("simgpu {family:?} {device}"));
    Ok(())
}

pub(crate) fn uuid(core: &'static Core, out: Pointer<u8>, ordinal: i32) -> Done {
    let device = core.lock().device(ordinal)?;
    let mut bytes = *b"simgpu-?-0000000";
    bytes[7] = match variant().family() {
        Family::Cuda => b'c',
        Family::Musa => b'm',
        Family::Hip => b'h',
    };
    bytes[15] = b'0' + device as u8;
    out.put_bytes(&bytes)
}

pub(crate) fn total(core: &'static Core, out: Pointer<usize>, ordinal: i32) -> Done {
    let state = core.lock();
    state.device(ordinal)?;
    out.put(state.space.size() as usize)
}

pub(crate) fn room(
    state: &Guard,
    device: usize,
    free: Pointer<usize>,
    total: Pointer<usize>,
) -> Done {
    let size = state.space.size();
    free.put((size - state.space.used(device)) as usize)?;
    total.put(size as usize)
}

/// Frees memory after all that the streams of its device still do, as the real calls wait.
pub(crate) fn free(core: &'static Core, state: Guard, addr: u64, kinds: &[Kind]) -> Done {
    if addr == 0 {
        return Ok(());
    }
    let found = state.space.allocations.get(&addr).filter(|found| kinds.contains(&found.kind));
    let device = found.map(|found| found.device).ok_or(INVALID_VALUE)?;
    let (mut state, waited) = stream::wait_idle(core, state, |stream| stream.device == device);
    waited?;
    if kinds.contains(&Kind::Pinned) { state.unpin(addr) } else { state.space.free(addr, kinds) }
}

pub(crate) fn unregister(core: &'static Core, addr: u64) -> Done {
    let state = core.lock();
    let (mut state, waited) = stream::wait_idle(core, state, |_| true);
    waited?;
    state.unregister(addr)
}

/// The allocation around `addr`.
pub(crate) fn range(
    core: &'static Core,
    base: Pointer<u64>,
    len: Pointer<usize>,
    addr: u64,
) -> Done {
    let state = core.lock();
    state.current(core)?;
    let found = state.space.find(addr).ok_or(INVALID_VALUE)?;
    if found.kind == Kind::Managed {
        return Err(INVALID_VALUE);
    }
    base.offer(found.start);
    len.offer(found.len as usize);
    Ok(())
}

pub(crate) fn host_flags(core: &'static Core, out: Pointer<u32>, addr: u64) -> Done {
    let state = core.lock();
    let found = state.space.find(addr).filter(|found| found.kind.is_host());
    out.put(found.ok_or(INVALID_VALUE)?.flags)
}

pub(crate) fn host_device_pointer(core: &'static Core, out: Pointer<u64>, addr: u64) -> Done {
    let state = core.lock();
    state.space.find(addr).filter(|found| found.kind.is_host()).ok_or(INVALID_VALUE)?;
    out.put(addr)
}

/// What a call that the simulator knows by name only answers.
pub(crate) fn unsupported() -> Done {
    Err(crate::code::NOT_SUPPORTED)
}
