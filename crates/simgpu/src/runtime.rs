//! The runtime API, under the names of CUDA, MUSA and HIP.

use std::ffi::c_char;
use std::time::Duration;

use crate::call::{api, initialise};
use crate::code::{self, INVALID_VALUE, NOT_SUPPORTED, Style};
use crate::core::{Core, variant};
use crate::device;
use crate::memory::Kind;
use crate::pointer;
use crate::stream::{self, Operation};
use crate::sys::{HostFunction, Pointer, StreamCallback};

/// A copy as the runtimes take it: the kind says what the caller thinks of the two ends.
fn copy(
    core: &'static Core,
    range: (u64, u64, usize),
    kind: i32,
    stream: u64,
    wait: bool,
) -> code::Done {
    let (to, from, len) = range;
    let mut state = core.lock();
    let (context, _) = state.current_or_made(core)?;
    state.check_kind(to, from, kind)?;
    let stream = state.stream(core, stream, context)?;
    stream::copy(core, state, stream, (to, from, len as u64), wait)
}

fn allocate(core: &'static Core, out: Pointer<u64>, len: usize, kind: Kind) -> code::Done {
    let mut state = core.lock();
    let (context, device) = state.current_or_made(core)?;
    out.put(state.space.allocate(device, len as u64, kind, context)?)
}

fn pin(core: &'static Core, out: Pointer<u64>, len: usize, flags: u32) -> code::Done {
    let mut state = core.lock();
    let (context, device) = state.current_or_made(core)?;
    out.put(state.pin(device, context, len as u64, flags)?)
}

fn make_stream(core: &'static Core, out: Pointer<u64>, flags: u32) -> code::Done {
    let mut state = core.lock();
    let (context, _) = state.current_or_made(core)?;
    out.put(state.create_stream(context, flags, false)?)
}

fn make_event(core: &'static Core, out: Pointer<u64>, flags: u32) -> code::Done {
    let mut state = core.lock();
    let (_, device) = state.current_or_made(core)?;
    out.put(state.create_event(device, flags)?)
}

/// The stream that `handle` is; only the default ones need a context for that.
fn resolve(core: &'static Core, handle: u64) -> Result<(crate::core::Guard, u64), i32> {
    let mut state = core.lock();
    let context = if handle <= 2 { state.current_or_made(core)?.0 } else { 0 };
    let stream = state.stream(core, handle, context)?;
    Ok((state, stream))
}

macro_rules! runtime {
    ($prefix:literal) => {
        api! { $prefix
        Free runtime_version "RuntimeGetVersion" (out: Pointer<i32>) => |_| out.put(variant().version());
        Free driver_version "DriverGetVersion" (out: Pointer<i32>) => |core| {
            out.put(if $prefix == "cuda" { core.driver_version } else { variant().version() })
        };
        Free device_count "GetDeviceCount" (out: Pointer<i32>) => |core| {
            if core.forked() {
                return Err(code::NOT_INITIALIZED);
            }
            if let Err(code) = initialise(core, true) {
                if $prefix == "hip" {
                    out.offer(0);
                }
                core.thread(|thread| thread.last_error = code);
                return Err(code);
            }
            out.put(core.lock().devices.len() as i32)
        };
        Runtime device_get "GetDevice" (out: Pointer<i32>) =>
            |core| out.put(core.lock().chosen_device(core) as i32);
        Runtime device_set "SetDevice" (device: i32) => |core| core.lock().set_device(core, device);
        RuntimeUnsafe device_synchronize "DeviceSynchronize" () => |core| {
            let mut state = core.lock();
            let (_, device) = state.current_or_made(core)?;
            stream::wait_idle(core, state, |stream| stream.device == device).1
        };
        Runtime device_attribute "DeviceGetAttribute" (out: Pointer<i32>, which: i32, device: i32) =>
            |core| device::attribute(core, out, which, device);
        Runtime device_bus "DeviceGetPCIBusId" (out: Pointer<c_char>, len: i32, device: i32) =>
            |core| device::bus_id(core, out, len, device);
        Runtime device_peer "DeviceCanAccessPeer" (out: Pointer<i32>, device: i32, peer: i32) => |core| {
            let state = core.lock();
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            out.put(i32::from(device != peer))
        };
        Runtime device_peer_enable "DeviceEnablePeerAccess" (peer: i32, _flags: u32) =>
            |core| core.lock().device(peer).map(|_| ());

        Runtime pointer_attributes "PointerGetAttributes" (out: Pointer<u8>, addr: u64) =>
            |core| pointer::of_runtime(core, out, addr);

        Runtime memory_info "MemGetInfo" (free: Pointer<usize>, total: Pointer<usize>) => |core| {
            let mut state = core.lock();
            let (_, device) = state.current_or_made(core)?;
            device::room(&state, device, free, total)
        };
        RuntimeUnsafe memory_allocate "Malloc" (out: Pointer<u64>, len: usize) =>
            |core| allocate(core, out, len, Kind::Device);
        RuntimeUnsafe memory_managed "MallocManaged" (out: Pointer<u64>, len: usize, _flags: u32) =>
            |core| allocate(core, out, len, Kind::Managed);
        RuntimeUnsafe memory_free "Free" (addr: u64) => |core| {
            device::free(core, core.lock(), addr, &[Kind::Device, Kind::Managed, Kind::Pool])
        };
        Runtime pool_allocate "MallocAsync" (out: Pointer<u64>, len: usize, _stream: u64) =>
            |core| allocate(core, out, len, Kind::Pool);
        Runtime pool_free "FreeAsync" (addr: u64, stream: u64) => |core| {
            let (state, stream) = resolve(core, stream)?;
            stream::submit(core, state, stream, Operation::Free { addr }).map(|_| ())
        };
        RuntimeUnsafe host_allocate "HostAlloc" (out: Pointer<u64>, len: usize, flags: u32) =>
            |core| pin(core, out, len, flags);
        RuntimeUnsafe host_allocate_plain "MallocHost" (out: Pointer<u64>, len: usize) =>
            |core| pin(core, out, len, 0);
        RuntimeUnsafe host_free "FreeHost" (addr: u64) =>
            |core| device::free(core, core.lock(), addr, &[Kind::Pinned]);
        RuntimeUnsafe host_register "HostRegister" (addr: u64, len: usize, flags: u32) => |core| {
            let mut state = core.lock();
            let (context, device) = state.current_or_made(core)?;
            state.register(device, context, addr, len as u64, flags)
        };
        RuntimeUnsafe host_unregister "HostUnregister" (addr: u64) =>
            |core| device::unregister(core, addr);
        Runtime host_flags "HostGetFlags" (out: Pointer<u32>, addr: u64) =>
            |core| device::host_flags(core, out, addr);
        Runtime host_device_pointer "HostGetDevicePointer" (out: Pointer<u64>, addr: u64, _flags: u32) =>
            |core| device::host_device_pointer(core, out, addr);

        RuntimeUnsafe copy_now "Memcpy" (to: u64, from: u64, len: usize, kind: i32) =>
            |core| copy(core, (to, from, len), kind, 0, true);
        Runtime copy_async "MemcpyAsync" (to: u64, from: u64, len: usize, kind: i32, stream: u64) =>
            |core| copy(core, (to, from, len), kind, stream, false);
        Runtime copy_peer "MemcpyPeerAsync"
            (to: u64, to_device: i32, from: u64, from_device: i32, len: usize, stream: u64) => |core| {
            core.lock().device(to_device)?;
            core.lock().device(from_device)?;
            copy(core, (to, from, len), 3, stream, false)
        };
        RuntimeUnsafe fill_now "Memset" (to: u64, byte: i32, len: usize) => |core| {
            let (state, stream) = resolve(core, 0)?;
            let range = (to, byte as u8, len as u64);
            stream::fill(core, state, stream, range, Duration::ZERO).map(|_| ())
        };
        Runtime fill_async "MemsetAsync" (to: u64, byte: i32, len: usize, stream: u64) => |core| {
            let (state, stream) = resolve(core, stream)?;
            let range = (to, byte as u8, len as u64);
            stream::fill(core, state, stream, range, Duration::ZERO).map(|_| ())
        };

        Runtime stream_create "StreamCreate" (out: Pointer<u64>) => |core| make_stream(core, out, 0);
        Runtime stream_create_flags "StreamCreateWithFlags" (out: Pointer<u64>, flags: u32) =>
            |core| make_stream(core, out, flags);
        Runtime stream_create_priority "StreamCreateWithPriority"
            (out: Pointer<u64>, flags: u32, _priority: i32) => |core| make_stream(core, out, flags);
        Runtime stream_destroy "StreamDestroy" (stream: u64) => |core| core.lock().close_stream(stream);
        RuntimeUnsafe stream_synchronize "StreamSynchronize" (stream: u64) => |core| {
            let (mut state, stream) = resolve(core, stream)?;
            if state.capture_status(stream) != 0 {
                state.invalidate_capture_of(stream);
                return Err(code::CAPTURE_UNSUPPORTED);
            }
            stream::wait_stream(core, state, stream)
        };
        RuntimeUnsafe stream_query "StreamQuery" (stream: u64) => |core| {
            let (state, stream) = resolve(core, stream)?;
            state.query_stream(stream)
        };
        Runtime stream_wait_event "StreamWaitEvent" (stream: u64, event: u64, _flags: u32) => |core| {
            let (state, stream) = resolve(core, stream)?;
            stream::wait_event(core, state, stream, event)
        };
        Runtime stream_is_capturing "StreamIsCapturing" (stream: u64, out: Pointer<i32>) => |core| {
            let (state, stream) = resolve(core, stream)?;
            out.put(state.capture_status(stream))
        };
        Runtime capture_begin "StreamBeginCapture" (stream: u64, mode: i32) =>
            |core| core.lock().begin_capture(stream, mode);
        Runtime capture_end "StreamEndCapture" (stream: u64, graph: Pointer<u64>) => |core| {
            let mut state = core.lock();
            graph.offer(0);
            state.end_capture(stream)?;
            graph.offer(state.handle());
            Ok(())
        };
        Runtime graph_destroy "GraphDestroy" (_graph: u64) => |_| Ok(());
        Runtime capture_mode "ThreadExchangeStreamCaptureMode" (mode: Pointer<i32>) => |core| {
            let new = mode.get()?;
            if !(0..=2).contains(&new) {
                return Err(INVALID_VALUE);
            }
            mode.put(core.thread(|thread| std::mem::replace(&mut thread.capture_mode, new)))
        };
        Runtime host_function "LaunchHostFunc"
            (stream: u64, function: Option<HostFunction>, user: u64) => |core| {
            let (state, stream) = resolve(core, stream)?;
            let function = function.ok_or(INVALID_VALUE)?;
            stream::submit(core, state, stream, Operation::Call { function, user }).map(|_| ())
        };
        Runtime add_callback "StreamAddCallback"
            (stream: u64, function: Option<StreamCallback>, user: u64, _flags: u32) => |core| {
            let given = stream;
            let (state, stream) = resolve(core, stream)?;
            let function = function.ok_or(INVALID_VALUE)?;
            let operation = Operation::Callback { function, user, stream: given };
            stream::submit(core, state, stream, operation).map(|_| ())
        };

        Runtime event_create "EventCreate" (out: Pointer<u64>) => |core| make_event(core, out, 0);
        Runtime event_create_flags "EventCreateWithFlags" (out: Pointer<u64>, flags: u32) =>
            |core| make_event(core, out, flags);
        Runtime event_destroy "EventDestroy" (event: u64) => |core| {
            core.lock().events.remove(&event).map(|_| ()).ok_or(code::INVALID_HANDLE)
        };
        Runtime event_record "EventRecord" (event: u64, stream: u64) => |core| {
            let (state, stream) = resolve(core, stream)?;
            stream::record(core, state, event, stream)
        };
        RuntimeUnsafe event_query "EventQuery" (event: u64) => |core| core.lock().query_event(event);
        RuntimeUnsafe event_synchronize "EventSynchronize" (event: u64) =>
            |core| stream::synchronize_event(core, core.lock(), event);
        Runtime event_elapsed "EventElapsedTime" (out: Pointer<f32>, from: u64, to: u64) =>
            |core| out.put(core.lock().elapsed_ms(from, to)?);

        Runtime ipc_export "IpcGetMemHandle" () => |_| Err(NOT_SUPPORTED);
        Runtime ipc_open "IpcOpenMemHandle" () => |_| Err(NOT_SUPPORTED);
        Runtime ipc_close "IpcCloseMemHandle" () => |_| Err(NOT_SUPPORTED);

        // The last error: a failed initialisation is repeated, everything else is told once.
        Free get_last_error "GetLastError" () => |core| last_error(core, true);
        Free peek_last_error "PeekAtLastError" () => |core| last_error(core, false);
        }

        #[unsafe(export_name = concat!($prefix, "GetErrorName"))]
        extern "C" fn error_name(error: i32) -> *const c_char {
            let unknown = c"unrecognized error code";
            code::name(error, variant().family(), Style::Runtime).unwrap_or(unknown).as_ptr()
        }

        #[unsafe(export_name = concat!($prefix, "GetErrorString"))]
        extern "C" fn error_text(error: i32) -> *const c_char {
            code::description(error).unwrap_or(c"unrecognized error code").as_ptr()
        }
    };
}

fn last_error(core: &'static Core, clear: bool) -> code::Done {
    if !core.forked() && !core.initialised() {
        let state = core.lock();
        if state.init_failed {
            return Err(state.config.init_error.max(if state.devices.is_empty() {
                100
            } else {
                0
            }));
        }
    }
    let code = core.thread(|thread| {
        let code = thread.last_error;
        if clear {
            thread.last_error = 0;
        }
        code
    });
    if code == 0 { Ok(()) } else { Err(code) }
}

mod cuda {
    use super::*;
    runtime! { "cuda" }
}

mod musa {
    use super::*;
    runtime! { "musa" }
}

mod hip {
    use super::*;
    runtime! { "hip" }

    // What only HIP has, or calls by another name.
    api! { "hip"
        Init init "Init" (_flags: u32) => |core| initialise(core, false);
        Runtime device_of "DeviceGet" (out: Pointer<i32>, ordinal: i32) => |core| {
            core.lock().device(ordinal)?;
            out.put(ordinal)
        };
        Runtime device_name "DeviceGetName" (out: Pointer<c_char>, len: i32, device: i32) =>
            |core| device::name(core, out, len, device);
        Runtime device_uuid "DeviceGetUuid" (out: Pointer<u8>, device: i32) =>
            |core| device::uuid(core, out, device);
        Runtime device_total "DeviceTotalMem" (out: Pointer<usize>, device: i32) =>
            |core| device::total(core, out, device);
        Runtime primary_state "DevicePrimaryCtxGetState"
            (device: i32, flags: Pointer<u32>, active: Pointer<i32>) => |core| {
            let state = core.lock();
            let device = state.device(device)?;
            flags.put(0)?;
            active.put(i32::from(state.primary_is_active(device)))
        };
        Runtime pointer_one "PointerGetAttribute" (out: Pointer<u8>, which: i32, addr: u64) =>
            |core| pointer::one(core, out, which, addr);
        Runtime pointer_several "DrvPointerGetAttributes"
            (count: u32, which: Pointer<i32>, outs: Pointer<Pointer<u8>>, addr: u64) =>
            |core| pointer::several(core, count, which, outs, addr);
        RuntimeUnsafe host_malloc "HostMalloc" (out: Pointer<u64>, len: usize, flags: u32) =>
            |core| pin(core, out, len, flags);
        RuntimeUnsafe host_release "HostFree" (addr: u64) =>
            |core| device::free(core, core.lock(), addr, &[Kind::Pinned]);
        Runtime memory_range "MemGetAddressRange"
            (base: Pointer<u64>, len: Pointer<usize>, addr: u64) => |core| {
            core.lock().current_or_made(core)?;
            device::range(core, base, len, addr)
        };
        Runtime retain_handle "MemRetainAllocationHandle" (out: Pointer<u64>, addr: u64) =>
            |core| out.put(core.lock().space.retain_physical(addr)?);
        Runtime release_handle "MemRelease" (handle: u64) =>
            |core| core.lock().space.release_physical(handle);
        RuntimeUnsafe to_host "MemcpyDtoH" (to: u64, from: u64, len: usize) =>
            |core| copy(core, (to, from, len), 2, 0, true);
        RuntimeUnsafe to_device "MemcpyHtoD" (to: u64, from: u64, len: usize) =>
            |core| copy(core, (to, from, len), 1, 0, true);
        Runtime to_host_async "MemcpyDtoHAsync" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| copy(core, (to, from, len), 2, stream, false);
        Runtime to_device_async "MemcpyHtoDAsync" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| copy(core, (to, from, len), 1, stream, false);
        Runtime within_async "MemcpyDtoDAsync" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| copy(core, (to, from, len), 3, stream, false);
        Runtime wait_value "StreamWaitValue32"
            (stream: u64, addr: u64, value: u32, flags: u32, mask: u32) => |core| {
            let (state, stream) = resolve(core, stream)?;
            stream::check_word(&state, addr)?;
            let operation = Operation::WaitValue { addr, value, flags, mask };
            stream::submit(core, state, stream, operation).map(|_| ())
        };
        Runtime write_value "StreamWriteValue32" (stream: u64, addr: u64, value: u32, _flags: u32) =>
            |core| {
            let (state, stream) = resolve(core, stream)?;
            stream::check_word(&state, addr)?;
            let operation = Operation::WriteValue { addr, value };
            stream::submit(core, state, stream, operation).map(|_| ())
        };
        Free ext_last_error "ExtGetLastError" () => |core| last_error(core, true);
    }
}
