//! The simulator's own C functions, `simgpu_*`, described in docs/simgpu.md.

use std::ffi::c_char;
use std::time::Duration;

use crate::call::initialise;
use crate::code::{Done, INVALID_VALUE, NOT_FOUND};
use crate::core::{Core, Fault, core, variant};
use crate::memory::Kind;
use crate::stream;
use crate::sys::{self, Library, Pointer};

fn code(result: Done) -> i32 {
    result.err().unwrap_or(0)
}

/// Everything that two copies must agree on before they share memory.
const BUILD: &std::ffi::CStr =
    match std::ffi::CStr::from_bytes_with_nul(concat!(env!("SIMGPU_BUILD"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the build stamp is a number"),
    };

/// The state of this copy for another of the same build; 0 for any other.
#[unsafe(no_mangle)]
extern "C" fn simgpu_core(build: Pointer<c_char>) -> u64 {
    if build.text().as_deref() != BUILD.to_str().ok() {
        return 0;
    }
    std::ptr::from_ref(core()).expose_provenance() as u64
}

/// The state of another copy, if it is of this build.
pub(crate) fn core_of(library: Library) -> Option<&'static Core> {
    sys::shared_core(library.symbol(c"simgpu_core"), BUILD)
}

/// All counters as JSON: writes what fits into `len` bytes, returns the length of the whole.
#[unsafe(no_mangle)]
extern "C" fn simgpu_counters(out: Pointer<c_char>, len: usize) -> usize {
    let text = core().lock().report(variant());
    if !out.is_null() {
        out.put_text(len, &text);
    }
    text.len()
}

/// One counter by its name; `UINT64_MAX` if there is none of that name.
#[unsafe(no_mangle)]
extern "C" fn simgpu_count(name: Pointer<c_char>) -> u64 {
    let name = name.text().unwrap_or_default();
    let own = core().thread(|thread| match &name[..] {
        "thread.contexts" => Some(thread.contexts.len() as u64),
        "thread.context" => Some(thread.contexts.last().copied().unwrap_or(0)),
        "thread.last_error" => Some(u64::from(thread.last_error.cast_unsigned())),
        _ => None,
    });
    own.or_else(|| core().lock().count(&name)).unwrap_or(u64::MAX)
}

/// Sets the counters to zero, except those that say how much there is.
#[unsafe(no_mangle)]
extern "C" fn simgpu_reset() {
    core().lock().reset_counters();
}

/// Changes a setting. 1: there is none of that name.
#[unsafe(no_mangle)]
extern "C" fn simgpu_set(name: Pointer<c_char>, value: u64) -> i32 {
    let core = core();
    let mut state = core.lock();
    let known = state.config.set(&name.text().unwrap_or_default(), value);
    core.progress.notify_all();
    i32::from(!known)
}

/// Makes calls of `name` fail with `code`: `times` of them (0: all) after the next `nth - 1`.
#[unsafe(no_mangle)]
extern "C" fn simgpu_inject(name: Pointer<c_char>, nth: u64, times: u64, code: i32) -> i32 {
    let Some(call) = name.text() else { return INVALID_VALUE };
    let fail = if times == 0 { u64::MAX } else { times };
    let fault = Fault { call, pass: nth.saturating_sub(1), fail, code };
    core().lock().faults.push(fault);
    0
}

/// Ends injected failures, the hang and the sticky error.
#[unsafe(no_mangle)]
extern "C" fn simgpu_heal() {
    let core = core();
    let mut state = core.lock();
    state.faults.clear();
    state.config.sticky = 0;
    state.config.hang = false;
    state.config.hang_after = u64::MAX;
    core.progress.notify_all();
}

/// Memory as a framework would have made it, uncounted; 0 if there is none. What `kind` means is
/// in docs/simgpu.md.
#[unsafe(no_mangle)]
extern "C" fn simgpu_alloc(device: i32, len: u64, kind: i32) -> u64 {
    allocate(device, len, kind).unwrap_or(0)
}

fn allocate(device: i32, len: u64, kind: i32) -> Result<u64, i32> {
    let core = core();
    initialise(core, true)?;
    let mut state = core.lock();
    let device = state.device(device)?;
    if !state.primary_is_active(device) {
        state.retain_primary(device);
    }
    let context = state.devices[device].primary;
    match kind {
        0 => state.space.allocate(device, len, Kind::Device, context),
        1 => state.space.allocate(device, len, Kind::Managed, context),
        2 => {
            let mut handles = Vec::new();
            for _ in 0..len.div_ceil(crate::memory::GRANULE) {
                handles.push(state.handle());
            }
            state.space.allocate_mapped(device, len, || handles.pop().unwrap_or_default())
        }
        3 => state.space.allocate(device, len, Kind::Pool, 0),
        4 => state.pin(device, context, len, 1),
        5 => state.pin(device, context, len, 4),
        _ => Err(INVALID_VALUE),
    }
}

/// Frees what `simgpu_alloc` returned, when the streams have passed it.
#[unsafe(no_mangle)]
extern "C" fn simgpu_free(addr: u64) -> i32 {
    let core = core();
    let (mut state, _) = stream::wait_idle(core, core.lock(), |_| true);
    code(match state.space.find(addr).map(|found| found.kind) {
        Some(Kind::Mapped) => state.space.free_mapped(addr),
        Some(Kind::Pinned) => state.unpin(addr),
        Some(kind) => state.space.free(addr, &[kind]),
        None => Err(INVALID_VALUE),
    })
}

/// Reads memory of any kind at once, past all streams, uncounted.
#[unsafe(no_mangle)]
extern "C" fn simgpu_read(addr: u64, to: Pointer<u8>, len: u64) -> i32 {
    code(peek(to.address(), addr, len))
}

/// Writes memory of any kind at once, past all streams, uncounted.
#[unsafe(no_mangle)]
extern "C" fn simgpu_write(addr: u64, from: Pointer<u8>, len: u64) -> i32 {
    code(peek(addr, from.address(), len))
}

fn peek(to: u64, from: u64, len: u64) -> Done {
    let state = core().lock();
    for (to, from, len) in state.space.pairs(to, from, len)? {
        sys::copy(to, from, len);
    }
    Ok(())
}

/// A stream on `device`, as a framework would have made it; 0 if there is none. `flags` as the
/// vendor's: 0 waits for the legacy stream, 1 does not.
#[unsafe(no_mangle)]
extern "C" fn simgpu_stream(device: i32, flags: u32) -> u64 {
    make_stream(device, flags).unwrap_or(0)
}

fn make_stream(device: i32, flags: u32) -> Result<u64, i32> {
    let core = core();
    initialise(core, true)?;
    let mut state = core.lock();
    let device = state.device(device)?;
    if !state.primary_is_active(device) {
        state.retain_primary(device);
    }
    let context = state.devices[device].primary;
    state.create_stream(context, flags, false)
}

/// Waits for everything on a stream.
#[unsafe(no_mangle)]
extern "C" fn simgpu_stream_wait(stream: u64) -> i32 {
    let core = core();
    let state = core.lock();
    if !state.streams.contains_key(&stream) {
        return NOT_FOUND;
    }
    code(stream::wait_stream(core, state, stream))
}

/// A kernel that writes bytes some time after it was launched.
#[unsafe(no_mangle)]
extern "C" fn simgpu_fill_later(stream: u64, addr: u64, byte: u8, len: u64, delay_ns: u64) -> i32 {
    let core = core();
    let delay = Duration::from_nanos(delay_ns);
    code(stream::fill(core, core.lock(), stream, (addr, byte, len), delay).map(|_| ()))
}

/// Begins a capture on a stream: mode 0 global, 1 of this thread, 2 relaxed.
#[unsafe(no_mangle)]
extern "C" fn simgpu_capture_begin(stream: u64, mode: i32) -> i32 {
    code(core().lock().begin_capture(stream, mode))
}

/// Ends it: 0, or 901 if a call invalidated it.
#[unsafe(no_mangle)]
extern "C" fn simgpu_capture_end(stream: u64) -> i32 {
    code(core().lock().end_capture(stream))
}
