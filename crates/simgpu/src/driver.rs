//! The driver API, under the names of CUDA and of MUSA.

use std::ffi::{CString, c_char};
use std::time::Duration;

use crate::call::{api, initialise};
use crate::code::{self, INVALID_CONTEXT, INVALID_VALUE, NOT_FOUND, Style};
use crate::core::variant;
use crate::device;
use crate::memory::{GRANULE, Kind};
use crate::pointer;
use crate::stream::{self, Operation};
use crate::sys::{self, HostFunction, Pointer};

/// `CUmemAllocationProp`, as far as it is read: type, handle types, location type, location id.
type Properties = [i32; 8];

macro_rules! driver {
    ($prefix:literal) => { api! { $prefix
        // Starting
        Init init "Init" (flags: u32) => |core| {
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            initialise(core, false)
        };
        Free driver_version "DriverGetVersion" (out: Pointer<i32>) => |core| {
            let own = variant().version();
            out.put(if $prefix == "cu" { core.driver_version } else { own })
        };

        // Devices
        Driver device_count "DeviceGetCount" (out: Pointer<i32>) => |core| {
            out.put(core.lock().devices.len() as i32)
        };
        Driver device_get "DeviceGet" (out: Pointer<i32>, ordinal: i32) => |core| {
            core.lock().device(ordinal)?;
            out.put(ordinal)
        };
        Driver device_name "DeviceGetName" (out: Pointer<c_char>, len: i32, device: i32) =>
            |core| device::name(core, out, len, device);
        Driver device_bus "DeviceGetPCIBusId" (out: Pointer<c_char>, len: i32, device: i32) =>
            |core| device::bus_id(core, out, len, device);
        Driver device_uuid "DeviceGetUuid" (out: Pointer<u8>, device: i32) =>
            |core| device::uuid(core, out, device);
        Driver device_uuid_2 "DeviceGetUuid_v2" (out: Pointer<u8>, device: i32) =>
            |core| device::uuid(core, out, device);
        Driver device_attribute "DeviceGetAttribute" (out: Pointer<i32>, which: i32, device: i32) =>
            |core| device::attribute(core, out, which, device);
        Driver device_total "DeviceTotalMem_v2" (out: Pointer<usize>, device: i32) =>
            |core| device::total(core, out, device);
        Driver device_peer "DeviceCanAccessPeer" (out: Pointer<i32>, device: i32, peer: i32) => |core| {
            let state = core.lock();
            let (device, peer) = (state.device(device)?, state.device(peer)?);
            out.put(i32::from(device != peer))
        };

        // Contexts
        Driver primary_state "DevicePrimaryCtxGetState"
            (device: i32, flags: Pointer<u32>, active: Pointer<i32>) => |core| {
            let state = core.lock();
            let device = state.device(device)?;
            flags.put(0)?;
            active.put(i32::from(state.primary_is_active(device)))
        };
        Driver primary_retain "DevicePrimaryCtxRetain" (out: Pointer<u64>, device: i32) => |core| {
            let mut state = core.lock();
            let device = state.device(device)?;
            if out.is_null() {
                return Err(INVALID_VALUE);
            }
            out.put(state.retain_primary(device))
        };
        Driver primary_release "DevicePrimaryCtxRelease_v2" (device: i32) => |core| {
            let mut state = core.lock();
            let device = state.device(device)?;
            state.release_primary(device)
        };
        DriverUnsafe context_create "CtxCreate_v2" (out: Pointer<u64>, _flags: u32, device: i32) =>
            |core| {
            let mut state = core.lock();
            let device = state.device(device)?;
            let made = state.create_context(device);
            core.thread(|thread| thread.contexts.push(made));
            out.put(made)
        };
        DriverUnsafe context_destroy "CtxDestroy_v2" (context: u64) => |core| {
            core.thread(|thread| thread.contexts.pop_if(|current| *current == context));
            core.lock().destroy_context(context)
        };
        Driver context_push "CtxPushCurrent_v2" (context: u64) => |core| {
            let mut state = core.lock();
            state.living(context)?;
            state.add("context_pushes", 1);
            core.thread(|thread| thread.contexts.push(context));
            Ok(())
        };
        Driver context_pop "CtxPopCurrent_v2" (out: Pointer<u64>) => |core| {
            let popped = core.thread(|thread| thread.contexts.pop()).ok_or(INVALID_CONTEXT)?;
            core.lock().add("context_pops", 1);
            out.offer(popped);
            Ok(())
        };
        Driver context_current "CtxGetCurrent" (out: Pointer<u64>) => |core| {
            out.put(core.thread(|thread| thread.contexts.last().copied()).unwrap_or(0))
        };
        Driver context_set "CtxSetCurrent" (context: u64) => |core| {
            if context != 0 {
                core.lock().living(context)?;
            }
            core.thread(|thread| {
                thread.contexts.pop();
                if context != 0 {
                    thread.contexts.push(context);
                }
            });
            Ok(())
        };
        Driver context_device "CtxGetDevice" (out: Pointer<i32>) => |core| {
            out.put(core.lock().current(core)?.1 as i32)
        };
        DriverUnsafe context_synchronize "CtxSynchronize" () => |core| {
            let state = core.lock();
            let (context, _) = state.current(core)?;
            stream::wait_idle(core, state, |stream| stream.context == context).1
        };
        Driver context_set_flags "CtxSetFlags" (_flags: u32) =>
            |core| core.lock().current(core).map(|_| ());

        // What a pointer is
        Driver pointer_one "PointerGetAttribute" (out: Pointer<u8>, which: i32, addr: u64) =>
            |core| pointer::one(core, out, which, addr);
        Driver pointer_several "PointerGetAttributes"
            (count: u32, which: Pointer<i32>, outs: Pointer<Pointer<u8>>, addr: u64) =>
            |core| pointer::several(core, count, which, outs, addr);
        Driver pointer_set "PointerSetAttribute" (_value: Pointer<u8>, which: i32, addr: u64) =>
            |core| {
            core.lock().space.find(addr).ok_or(INVALID_VALUE)?;
            if which == 6 { Ok(()) } else { Err(INVALID_VALUE) }
        };
        Driver memory_range "MemGetAddressRange_v2"
            (base: Pointer<u64>, len: Pointer<usize>, addr: u64) =>
            |core| device::range(core, base, len, addr);

        // Memory
        Driver memory_info "MemGetInfo_v2" (free: Pointer<usize>, total: Pointer<usize>) => |core| {
            let state = core.lock();
            let (_, device) = state.current(core)?;
            device::room(&state, device, free, total)
        };
        DriverUnsafe memory_allocate "MemAlloc_v2" (out: Pointer<u64>, len: usize) => |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            out.put(state.space.allocate(device, len as u64, Kind::Device, context)?)
        };
        DriverUnsafe memory_managed "MemAllocManaged" (out: Pointer<u64>, len: usize, _flags: u32) =>
            |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            out.put(state.space.allocate(device, len as u64, Kind::Managed, context)?)
        };
        DriverUnsafe memory_free "MemFree_v2" (addr: u64) => |core| {
            let state = core.lock();
            state.current(core)?;
            device::free(core, state, addr, &[Kind::Device, Kind::Managed, Kind::Pool])
        };
        Driver pool_allocate "MemAllocAsync" (out: Pointer<u64>, len: usize, stream: u64) => |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            state.stream(core, stream, context)?;
            out.put(state.space.allocate(device, len as u64, Kind::Pool, 0)?)
        };
        Driver pool_free "MemFreeAsync" (addr: u64, stream: u64) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::submit(core, state, stream, Operation::Free { addr }).map(|_| ())
        };
        DriverUnsafe host_allocate "MemHostAlloc" (out: Pointer<u64>, len: usize, flags: u32) =>
            |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            out.put(state.pin(device, context, len as u64, flags)?)
        };
        DriverUnsafe host_allocate_plain "MemAllocHost_v2" (out: Pointer<u64>, len: usize) => |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            out.put(state.pin(device, context, len as u64, 0)?)
        };
        DriverUnsafe host_free "MemFreeHost" (addr: u64) => |core| {
            device::free(core, core.lock(), addr, &[Kind::Pinned])
        };
        DriverUnsafe host_register "MemHostRegister_v2" (addr: u64, len: usize, flags: u32) => |core| {
            let mut state = core.lock();
            let (context, device) = state.current(core)?;
            state.register(device, context, addr, len as u64, flags)
        };
        DriverUnsafe host_unregister "MemHostUnregister" (addr: u64) =>
            |core| device::unregister(core, addr);
        Driver host_flags "MemHostGetFlags" (out: Pointer<u32>, addr: u64) =>
            |core| device::host_flags(core, out, addr);
        Driver host_device_pointer "MemHostGetDevicePointer_v2"
            (out: Pointer<u64>, addr: u64, _flags: u32) =>
            |core| device::host_device_pointer(core, out, addr);

        // Memory that is mapped
        Driver granularity "MemGetAllocationGranularity"
            (out: Pointer<usize>, _properties: Pointer<Properties>, _option: i32) =>
            |_| out.put(GRANULE as usize);
        Driver reserve "MemAddressReserve"
            (out: Pointer<u64>, len: usize, _alignment: usize, _at: u64, _flags: u64) =>
            |core| out.put(core.lock().space.reserve(len as u64)?);
        Driver unreserve "MemAddressFree" (addr: u64, _len: usize) =>
            |core| core.lock().space.release_reservation(addr);
        DriverUnsafe physical_create "MemCreate"
            (out: Pointer<u64>, len: usize, properties: Pointer<Properties>, _flags: u64) => |core| {
            let mut state = core.lock();
            let device = state.device(properties.get()?[3])?;
            let handle = state.handle();
            state.space.create_physical(handle, device, len as u64)?;
            out.put(handle)
        };
        Driver physical_release "MemRelease" (handle: u64) =>
            |core| core.lock().space.release_physical(handle);
        Driver physical_map "MemMap"
            (addr: u64, len: usize, offset: usize, handle: u64, _flags: u64) => |core| {
            if offset != 0 {
                return Err(INVALID_VALUE);
            }
            core.lock().space.map_physical(addr, len as u64, handle)
        };
        Driver physical_unmap "MemUnmap" (addr: u64, len: usize) => |core| {
            let (mut state, waited) = stream::wait_idle(core, core.lock(), |_| true);
            waited?;
            state.space.unmap_physical(addr, len as u64)
        };
        Driver physical_access "MemSetAccess"
            (addr: u64, _len: usize, _descriptors: Pointer<u8>, _count: usize) =>
            |core| core.lock().space.find(addr).map(|_| ()).ok_or(INVALID_VALUE);
        Driver physical_retain "MemRetainAllocationHandle" (out: Pointer<u64>, addr: u64) =>
            |core| out.put(core.lock().space.retain_physical(addr)?);
        Driver physical_properties "MemGetAllocationPropertiesFromHandle"
            (out: Pointer<Properties>, handle: u64) => |core| {
            let state = core.lock();
            let physical = state.space.physical.get(&handle).ok_or(INVALID_VALUE)?;
            out.put([1, 0, 1, physical.device as i32, 0, 0, 0, 0])
        };

        // Copies
        DriverUnsafe to_host "MemcpyDtoH_v2" (to: u64, from: u64, len: usize) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 2)?;
            let stream = state.stream(core, 0, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), true)
        };
        DriverUnsafe to_device "MemcpyHtoD_v2" (to: u64, from: u64, len: usize) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 1)?;
            let stream = state.stream(core, 0, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), true)
        };
        DriverUnsafe within "MemcpyDtoD_v2" (to: u64, from: u64, len: usize) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 3)?;
            let stream = state.stream(core, 0, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), true)
        };
        DriverUnsafe any "Memcpy" (to: u64, from: u64, len: usize) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, 0, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), true)
        };
        Driver to_host_async "MemcpyDtoHAsync_v2" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 2)?;
            let stream = state.stream(core, stream, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), false)
        };
        Driver to_device_async "MemcpyHtoDAsync_v2" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 1)?;
            let stream = state.stream(core, stream, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), false)
        };
        Driver within_async "MemcpyDtoDAsync_v2" (to: u64, from: u64, len: usize, stream: u64) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.check_kind(to, from, 3)?;
            let stream = state.stream(core, stream, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), false)
        };
        Driver any_async "MemcpyAsync" (to: u64, from: u64, len: usize, stream: u64) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), false)
        };
        Driver peer_async "MemcpyPeerAsync"
            (to: u64, to_context: u64, from: u64, from_context: u64, len: usize, stream: u64) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            state.living(to_context)?;
            state.living(from_context)?;
            state.check_kind(to, from, 3)?;
            let stream = state.stream(core, stream, context)?;
            stream::copy(core, state, stream, (to, from, len as u64), false)
        };
        DriverUnsafe fill "MemsetD8_v2" (to: u64, byte: u8, len: usize) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, 0, context)?;
            stream::fill(core, state, stream, (to, byte, len as u64), Duration::ZERO).map(|_| ())
        };
        Driver fill_async "MemsetD8Async" (to: u64, byte: u8, len: usize, stream: u64) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::fill(core, state, stream, (to, byte, len as u64), Duration::ZERO).map(|_| ())
        };

        // Streams
        Driver stream_create "StreamCreate" (out: Pointer<u64>, flags: u32) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            out.put(state.create_stream(context, flags, false)?)
        };
        Driver stream_create_priority "StreamCreateWithPriority"
            (out: Pointer<u64>, flags: u32, _priority: i32) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            out.put(state.create_stream(context, flags, false)?)
        };
        Driver stream_destroy "StreamDestroy_v2" (stream: u64) =>
            |core| core.lock().close_stream(stream);
        DriverUnsafe stream_synchronize "StreamSynchronize" (stream: u64) => |core| {
            let mut state = core.lock();
            let context = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, context)?;
            if state.capture_status(stream) != 0 {
                state.invalidate_capture_of(stream);
                return Err(code::CAPTURE_UNSUPPORTED);
            }
            stream::wait_stream(core, state, stream)
        };
        DriverUnsafe stream_query "StreamQuery" (stream: u64) => |core| {
            let mut state = core.lock();
            let context = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, context)?;
            state.query_stream(stream)
        };
        Driver stream_wait_event "StreamWaitEvent" (stream: u64, event: u64, _flags: u32) => |core| {
            let mut state = core.lock();
            let context = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, context)?;
            stream::wait_event(core, state, stream, event)
        };
        Driver stream_context "StreamGetCtx" (stream: u64, out: Pointer<u64>) => |core| {
            let mut state = core.lock();
            let current = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, current)?;
            out.put(state.streams[&stream].context)
        };
        Driver stream_is_capturing "StreamIsCapturing" (stream: u64, out: Pointer<i32>) => |core| {
            let mut state = core.lock();
            let context = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, context)?;
            out.put(state.capture_status(stream))
        };
        Driver capture_begin "StreamBeginCapture_v2" (stream: u64, mode: i32) =>
            |core| core.lock().begin_capture(stream, mode);
        Driver capture_end "StreamEndCapture" (stream: u64, graph: Pointer<u64>) => |core| {
            let mut state = core.lock();
            graph.offer(0);
            state.end_capture(stream)?;
            graph.offer(state.handle());
            Ok(())
        };
        Driver graph_destroy "GraphDestroy" (_graph: u64) => |_| Ok(());
        Driver capture_mode "ThreadExchangeStreamCaptureMode" (mode: Pointer<i32>) => |core| {
            let new = mode.get()?;
            if !(0..=2).contains(&new) {
                return Err(INVALID_VALUE);
            }
            mode.put(core.thread(|thread| std::mem::replace(&mut thread.capture_mode, new)))
        };
        Driver host_function "LaunchHostFunc"
            (stream: u64, function: Option<HostFunction>, user: u64) => |core| {
            let mut state = core.lock();
            let context = state.current(core).map_or(0, |current| current.0);
            let stream = state.stream(core, stream, context)?;
            let function = function.ok_or(INVALID_VALUE)?;
            stream::submit(core, state, stream, Operation::Call { function, user }).map(|_| ())
        };
        Driver wait_value "StreamWaitValue32_v2" (stream: u64, addr: u64, value: u32, flags: u32) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::check_word(&state, addr)?;
            let operation = Operation::WaitValue { addr, value, flags, mask: u32::MAX };
            stream::submit(core, state, stream, operation).map(|_| ())
        };
        Driver write_value "StreamWriteValue32_v2" (stream: u64, addr: u64, value: u32, _flags: u32) =>
            |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::check_word(&state, addr)?;
            let operation = Operation::WriteValue { addr, value };
            stream::submit(core, state, stream, operation).map(|_| ())
        };

        // Events
        Driver event_create "EventCreate" (out: Pointer<u64>, flags: u32) => |core| {
            let mut state = core.lock();
            let (_, device) = state.current(core)?;
            out.put(state.create_event(device, flags)?)
        };
        Driver event_destroy "EventDestroy_v2" (event: u64) => |core| {
            core.lock().events.remove(&event).map(|_| ()).ok_or(code::INVALID_HANDLE)
        };
        Driver event_record "EventRecord" (event: u64, stream: u64) => |core| {
            let mut state = core.lock();
            let (context, _) = state.current(core)?;
            let stream = state.stream(core, stream, context)?;
            stream::record(core, state, event, stream)
        };
        DriverUnsafe event_query "EventQuery" (event: u64) =>
            |core| core.lock().query_event(event);
        DriverUnsafe event_synchronize "EventSynchronize" (event: u64) =>
            |core| stream::synchronize_event(core, core.lock(), event);
        Driver event_elapsed "EventElapsedTime" (out: Pointer<f32>, from: u64, to: u64) =>
            |core| out.put(core.lock().elapsed_ms(from, to)?);

        // Texts
        Free error_name "GetErrorName" (error: i32, out: Pointer<u64>) => |_| {
            let text = code::name(error, variant().family(), Style::Driver);
            out.put(text.map_or(0, |text| text.as_ptr().expose_provenance() as u64))?;
            text.map(|_| ()).ok_or(INVALID_VALUE)
        };
        Free error_text "GetErrorString" (error: i32, out: Pointer<u64>) => |_| {
            let text = code::description(error);
            out.put(text.map_or(0, |text| text.as_ptr().expose_provenance() as u64))?;
            text.map(|_| ()).ok_or(INVALID_VALUE)
        };

        // Known by name only
        Driver ipc_export "IpcGetMemHandle" () => |_| device::unsupported();
        Driver ipc_open "IpcOpenMemHandle_v2" () => |_| device::unsupported();
        Driver ipc_close "IpcCloseMemHandle" () => |_| device::unsupported();
        Driver address_handle "MemGetHandleForAddressRange" () => |_| device::unsupported();
    } };
}

mod cu {
    use super::*;
    driver! { "cu" }

    // Looking symbols up, as some programs do in place of dlsym.
    api! { "cu"
        Free symbol "GetProcAddress_v2"
            (name: Pointer<c_char>, out: Pointer<u64>, _version: i32, _flags: u64, found: Pointer<i32>) =>
            |_| {
            let at = address(name)?;
            found.offer(i32::from(at == 0));
            out.put(at)?;
            if at == 0 { Err(NOT_FOUND) } else { Ok(()) }
        };
        Free symbol_old "GetProcAddress"
            (name: Pointer<c_char>, out: Pointer<u64>, _version: i32, _flags: u64) => |_| {
            let at = address(name)?;
            out.put(at)?;
            if at == 0 { Err(NOT_FOUND) } else { Ok(()) }
        };
        Driver primary_release_old "DevicePrimaryCtxRelease" (device: i32) => |core| {
            let mut state = core.lock();
            let device = state.device(device)?;
            state.release_primary(device)
        };
    }

    fn address(name: Pointer<c_char>) -> Result<u64, i32> {
        let name = name.text().ok_or(INVALID_VALUE)?;
        let path = sys::own_path().ok_or(NOT_FOUND)?;
        let library = sys::Library::open(&path, true).map_err(|_| NOT_FOUND)?;
        let look = |name: String| {
            let name = CString::new(name).unwrap_or_default();
            library.symbol(&name).expose_provenance() as u64
        };
        let newest = look(format!("{name}_v2"));
        Ok(if newest == 0 { look(name) } else { newest })
    }
}

mod mu {
    use super::*;
    driver! { "mu" }
}

/// The old names are still there in the real driver, with 32-bit pointers: whoever binds one of
/// them passes the wrong things.
macro_rules! old {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> i32 {
            eprintln!(
                "simgpu: {0} was called: that is the old ABI with 32-bit pointers; bind {0}_v2",
                stringify!($name)
            );
            std::process::abort()
        }
    )* };
}

mod old {
    old! {
        cuMemAlloc cuMemAllocPitch cuMemFree cuMemGetInfo cuMemGetAddressRange cuMemAllocHost
        cuMemHostGetDevicePointer cuMemHostRegister cuMemcpyDtoH cuMemcpyHtoD cuMemcpyDtoD
        cuMemcpyDtoHAsync cuMemcpyHtoDAsync cuMemcpyDtoDAsync cuMemsetD8 cuDeviceTotalMem
        cuCtxCreate cuCtxDestroy cuCtxPushCurrent cuCtxPopCurrent cuStreamDestroy cuEventDestroy
        cuStreamBeginCapture
    }
}
