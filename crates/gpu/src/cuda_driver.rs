//! CUDA through the driver's own library: it comes with the driver, its interface does not change
//! with the toolkit, and it answers questions about addresses without making a context.
#![expect(unsafe_code, reason = "calls into the driver")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;

use crate::constants::{
    CAPTURE_MODE_RELAXED, CAPTURE_STATUS_NONE, DEVICE_ATTRIBUTE_INTEGRATED, EVENT_DISABLE_TIMING,
    HOST_ALLOC_MAPPED, HOST_ALLOC_PORTABLE, HOST_ALLOC_WRITE_COMBINED, STREAM_NON_BLOCKING,
    WAIT_VALUE_GEQ, code, pointer_attribute,
};
use crate::device::{Api, DeviceId, Vendor};
use crate::discovery::{Awake, Backend, Refusal};
use crate::error::{Failure, GpuError, Result};
use crate::interface::{
    Context, DeviceInfo, Entered, Event, GpuRuntime, HostFn, Pinned, RelaxedCapture, Stream,
    StreamHandle, Thread,
};
use crate::library::Library;
use crate::memory::Memory;
use crate::queries::{self, Answer, Look, PointerQueries};
use crate::state::{Version, Versions};
use crate::symbols::symbols;

type Ptr = *mut c_void;

symbols! {
    /// The functions of `libcuda.so.1` that we call (`cuda.h`). Where two names exist, the older is
    /// another interface with 32-bit addresses: only the `_v2` names are bound.
    Table {
        required {
            init = "Init": fn(u32) -> c_int;
            driver_get_version = "DriverGetVersion": fn(*mut c_int) -> c_int;
            device_get_count = "DeviceGetCount": fn(*mut c_int) -> c_int;
            device_get = "DeviceGet": fn(*mut c_int, c_int) -> c_int;
            primary_ctx_get_state = "DevicePrimaryCtxGetState": fn(c_int, *mut u32, *mut c_int) -> c_int;
            primary_ctx_retain = "DevicePrimaryCtxRetain": fn(*mut Ptr, c_int) -> c_int;
            primary_ctx_release = "DevicePrimaryCtxRelease_v2": fn(c_int) -> c_int;
            ctx_push = "CtxPushCurrent_v2": fn(Ptr) -> c_int;
            ctx_pop = "CtxPopCurrent_v2": fn(*mut Ptr) -> c_int;
            pointer_get_attribute = "PointerGetAttribute": fn(Ptr, c_int, u64) -> c_int;
            mem_host_alloc = "MemHostAlloc": fn(*mut Ptr, usize, u32) -> c_int;
            mem_free_host = "MemFreeHost": fn(Ptr) -> c_int;
            memcpy_dtoh_async = "MemcpyDtoHAsync_v2": fn(Ptr, u64, usize, Ptr) -> c_int;
            memcpy_htod_async = "MemcpyHtoDAsync_v2": fn(u64, Ptr, usize, Ptr) -> c_int;
            memcpy_async = "MemcpyAsync": fn(u64, u64, usize, Ptr) -> c_int;
            stream_create = "StreamCreate": fn(*mut Ptr, u32) -> c_int;
            stream_destroy = "StreamDestroy_v2": fn(Ptr) -> c_int;
            stream_synchronize = "StreamSynchronize": fn(Ptr) -> c_int;
            stream_wait_event = "StreamWaitEvent": fn(Ptr, Ptr, u32) -> c_int;
            event_create = "EventCreate": fn(*mut Ptr, u32) -> c_int;
            event_destroy = "EventDestroy_v2": fn(Ptr) -> c_int;
            event_record = "EventRecord": fn(Ptr, Ptr) -> c_int;
            event_query = "EventQuery": fn(Ptr) -> c_int;
            event_synchronize = "EventSynchronize": fn(Ptr) -> c_int;
        }
        optional {
            ctx_get_device = "CtxGetDevice": fn(*mut c_int) -> c_int;
            get_error_name = "GetErrorName": fn(c_int, *mut *const c_char) -> c_int;
            get_error_string = "GetErrorString": fn(c_int, *mut *const c_char) -> c_int;
            device_get_name = "DeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
            device_get_pci_bus_id = "DeviceGetPCIBusId": fn(*mut c_char, c_int, c_int) -> c_int;
            device_get_uuid_v2 = "DeviceGetUuid_v2": fn(*mut u8, c_int) -> c_int;
            device_get_uuid = "DeviceGetUuid": fn(*mut u8, c_int) -> c_int;
            device_get_attribute = "DeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
            device_total_mem = "DeviceTotalMem_v2": fn(*mut usize, c_int) -> c_int;
            pointer_get_attributes = "PointerGetAttributes": fn(u32, *mut c_int, *mut Ptr, u64) -> c_int;
            mem_host_get_flags = "MemHostGetFlags": fn(*mut u32, Ptr) -> c_int;
            mem_alloc = "MemAlloc_v2": fn(*mut u64, usize) -> c_int;
            mem_free = "MemFree_v2": fn(u64) -> c_int;
            thread_exchange_capture_mode = "ThreadExchangeStreamCaptureMode": fn(*mut c_int) -> c_int;
            stream_is_capturing = "StreamIsCapturing": fn(Ptr, *mut c_int) -> c_int;
            stream_wait_value = "StreamWaitValue32_v2": fn(Ptr, u64, u32, u32) -> c_int;
            launch_host_func = "LaunchHostFunc": fn(Ptr, HostFn, Ptr) -> c_int;
        }
    }
}

/// The CUDA driver's library.
pub(crate) struct CudaDriver {
    library: &'static Library,
    table: Table,
    /// The process that opened it.
    pid: u32,
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDriver").field(&self.library.file()).finish()
    }
}

impl CudaDriver {
    /// The table of a library that has `cuInit`; the error is a function that it lacks.
    pub(crate) fn new(library: &'static Library) -> std::result::Result<Self, String> {
        // SAFETY: a library with NVIDIA's symbol names speaks NVIDIA's interface, whose `_v2` names
        // have had these types since CUDA 4 to 11; a user who names another file vouches for it.
        let table = unsafe { Table::resolve(library, |name| format!("cu{name}")) }?;
        Ok(Self { library, table, pid: std::process::id() })
    }

    fn failure(&self, call: &str, code: c_int) -> Failure {
        Failure {
            vendor: Vendor::Cuda,
            call: format!("cu{call}"),
            code,
            name: self.error_name(code).unwrap_or_default(),
            text: self.error_text(code).unwrap_or_default(),
        }
    }

    fn check(&self, call: &str, code: c_int, doing: impl FnOnce() -> String) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.refused(call, code, doing())) }
    }

    #[cold]
    fn refused(&self, call: &str, code: c_int, doing: String) -> GpuError {
        GpuError::Call { doing, failure: Box::new(self.failure(call, code)) }
    }

    fn unsupported(&self, call: &str, doing: &str) -> GpuError {
        GpuError::Unsupported {
            doing: doing.to_owned(),
            vendor: Vendor::Cuda,
            file: self.library.file().display().to_string(),
            symbol: format!("cu{call}"),
        }
    }

    fn here(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(GpuError::Forked { vendor: Vendor::Cuda, parent: self.pid })
    }

    fn queries(&self) -> PointerQueries {
        PointerQueries {
            vendor: Vendor::Cuda,
            one: self.table.pointer_get_attribute,
            many: self.table.pointer_get_attributes,
        }
    }

    fn count(&self) -> std::result::Result<u32, c_int> {
        let mut count = 0;
        // SAFETY: writes one int, during the call.
        let code = unsafe { (self.table.device_get_count)(&raw mut count) };
        if code == 0 { Ok(u32::try_from(count).unwrap_or(0)) } else { Err(code) }
    }

    fn handle_of(&self, ordinal: u32) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: writes one int, during the call.
        let code = unsafe { (self.table.device_get)(&raw mut device, ordinal as c_int) };
        self.check("DeviceGet", code, || format!("looking at cuda:{ordinal}"))?;
        Ok(device)
    }

    fn primary_is_active(&self, device: c_int) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: writes two ints, during the call; makes no context.
        let code =
            unsafe { (self.table.primary_ctx_get_state)(device, &raw mut flags, &raw mut active) };
        self.check("DevicePrimaryCtxGetState", code, || {
            format!("looking for a context on cuda:{device}")
        })?;
        Ok(active != 0)
    }

    fn push(&self, context: Ptr, id: DeviceId) -> Result<()> {
        // SAFETY: a context of this library: retained by us, or that of an allocation the caller
        // vouches for; the driver answers a destroyed one with an error.
        let code = unsafe { (self.table.ctx_push)(context) };
        self.check("CtxPushCurrent_v2", code, || format!("entering the context of {id}"))
    }

    fn pop(&self) {
        let mut popped = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.table.ctx_pop)(&raw mut popped) };
        if code != 0 {
            tracing::debug!(code, "cuCtxPopCurrent_v2 failed");
        }
    }

    fn release(&self, device: c_int) {
        // SAFETY: pairs with the retain in `enter_primary`.
        let code = unsafe { (self.table.primary_ctx_release)(device) };
        if code != 0 {
            tracing::debug!(code, "cuDevicePrimaryCtxRelease_v2 failed");
        }
    }

    fn enter_primary(&self, device: c_int, id: DeviceId) -> Result<Entered<'_>> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.table.primary_ctx_retain)(&raw mut context, device) };
        self.check("DevicePrimaryCtxRetain", code, || format!("entering the context of {id}"))?;
        if let Err(error) = self.push(context, id) {
            self.release(device);
            return Err(error);
        }
        Ok(Entered::new(
            id,
            Some(Box::new(move || {
                self.pop();
                self.release(device);
            })),
        ))
    }

    /// Asks about an address. A driver that wants a current context gets one that exists already.
    fn ask(&self, addr: u64) -> Result<Answer> {
        let first = match self.queries().ask(addr) {
            Err(code::INVALID_CONTEXT) => self.ask_inside(addr),
            other => other,
        };
        match first {
            Ok(answer) => Ok(answer),
            // Not known to the driver; or nobody has initialised it, so there is no device memory.
            Err(code::INVALID_VALUE | code::NOT_INITIALIZED) => Ok(Answer::default()),
            Err(refused) => Err(self.refused(
                "PointerGetAttributes",
                refused,
                format!("asking what {addr:#x} is"),
            )),
        }
    }

    fn ask_inside(&self, addr: u64) -> std::result::Result<Answer, c_int> {
        for ordinal in 0..self.count()? {
            let Ok(device) = self.handle_of(ordinal) else { continue };
            if !self.primary_is_active(device).unwrap_or(false) {
                continue;
            }
            let id = DeviceId::new(Vendor::Cuda, ordinal);
            if let Ok(_inside) = self.enter_primary(device, id) {
                return self.queries().ask(addr);
            }
        }
        // No context anywhere: this process has no device memory.
        Ok(Answer::default())
    }

    fn look(&self, addr: u64) -> Result<Look> {
        let mut look = self.ask(addr)?.look(Vendor::Cuda, addr)?;
        if let (Memory::PinnedHost { write_combined, host, .. }, Some(get_flags)) =
            (&mut look.memory, self.table.mem_host_get_flags)
        {
            let mut flags = 0;
            // SAFETY: writes one int, during the call; the address may be anything.
            let code =
                unsafe { get_flags(&raw mut flags, ptr::without_provenance_mut(*host as usize)) };
            *write_combined = code == 0 && flags & HOST_ALLOC_WRITE_COMBINED != 0;
        }
        Ok(look)
    }

    fn text(
        lookup: Option<unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int>,
        code: c_int,
    ) -> Option<String> {
        let mut text = ptr::null();
        // SAFETY: writes one pointer, during the call.
        let answer = unsafe { lookup?(code, &raw mut text) };
        if answer != 0 || text.is_null() {
            return None;
        }
        // SAFETY: a constant string of a library that is never closed.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// The text that `write` puts into a buffer; `None` if it fails.
pub(crate) fn read_text(write: impl FnOnce(*mut c_char, c_int) -> c_int) -> Option<String> {
    let mut buffer = [0_u8; 256];
    // One byte is kept back, so that the text ends whatever is written.
    let code = write(buffer.as_mut_ptr().cast(), buffer.len() as c_int - 1);
    let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_string_lossy().trim().to_owned();
    (code == 0 && !text.is_empty()).then_some(text)
}

impl Backend for CudaDriver {
    fn awake(&self) -> Awake {
        match self.count() {
            Ok(_) => Awake::Yes,
            Err(_) => Awake::No,
        }
    }

    fn initialise(&self) -> std::result::Result<u32, Refusal> {
        // Where the framework was first, there is nothing to do.
        if let Ok(count) = self.count() {
            return Ok(count);
        }
        // SAFETY: takes one number.
        let code = unsafe { (self.table.init)(0) };
        if code != 0 {
            return Err(Refusal::of(self.failure("Init", code), self.versions()));
        }
        self.count()
            .map_err(|code| Refusal::of(self.failure("DeviceGetCount", code), self.versions()))
    }
}

impl GpuRuntime for CudaDriver {
    fn api(&self) -> Api {
        Api::CudaDriver
    }

    fn file(&self) -> &Path {
        self.library.file()
    }

    fn absent(&self) -> Vec<String> {
        self.table.absent.clone()
    }

    fn versions(&self) -> Versions {
        let mut number = 0;
        // SAFETY: writes one int, during the call; allowed before `cuInit`.
        let code = unsafe { (self.table.driver_get_version)(&raw mut number) };
        let known = code == 0 && number > 0;
        Versions { driver: known.then(|| Version::new(Vendor::Cuda, number)), runtime: None }
    }

    fn device_count(&self) -> Result<u32> {
        self.here()?;
        self.count().map_err(|code| {
            self.refused("DeviceGetCount", code, "counting CUDA devices".to_owned())
        })
    }

    fn device(&self, ordinal: u32) -> Result<DeviceInfo> {
        self.here()?;
        let device = self.handle_of(ordinal)?;
        let name = self.table.device_get_name.and_then(|get| {
            // SAFETY: writes at most `len` bytes to `out`, during the call.
            read_text(|out, len| unsafe { get(out, len, device) })
        });
        let pci_address = self.table.device_get_pci_bus_id.and_then(|get| {
            // SAFETY: writes at most `len` bytes to `out`, during the call.
            read_text(|out, len| unsafe { get(out, len, device) })
        });
        let memory_bytes = self.table.device_total_mem.and_then(|get| {
            let mut bytes = 0;
            // SAFETY: writes one size, during the call; needs no context.
            (unsafe { get(&raw mut bytes, device) } == 0).then_some(bytes as u64)
        });
        // The second version tells the instances of a divided device apart.
        let uuid = self.table.device_get_uuid_v2.or(self.table.device_get_uuid).and_then(|get| {
            let mut uuid = [0; 16];
            // SAFETY: writes 16 bytes, during the call.
            (unsafe { get(uuid.as_mut_ptr(), device) } == 0).then_some(uuid)
        });
        let integrated = self.table.device_get_attribute.is_some_and(|get| {
            let mut value = 0;
            // SAFETY: writes one int, during the call.
            let code = unsafe { get(&raw mut value, DEVICE_ATTRIBUTE_INTEGRATED, device) };
            code == 0 && value != 0
        });
        Ok(DeviceInfo {
            id: DeviceId::new(Vendor::Cuda, ordinal),
            name,
            memory_bytes,
            pci_address: pci_address.map(|text| text.to_ascii_lowercase()),
            uuid,
            integrated,
        })
    }

    fn classify(&self, addr: u64, len: u64, _named: Option<u32>) -> Result<Memory> {
        self.here()?;
        queries::range(addr, len, |at| self.look(at))
    }

    fn buffer_id(&self, addr: u64) -> Result<Option<u64>> {
        self.here()?;
        match self.queries().ask_one(pointer_attribute::BUFFER_ID, addr) {
            Ok(id) => Ok((id != 0).then_some(id)),
            Err(code::INVALID_VALUE | code::NOT_INITIALIZED) => Ok(None),
            Err(code) => Err(self.refused(
                "PointerGetAttribute",
                code,
                format!("asking which allocation {addr:#x} is in"),
            )),
        }
    }

    fn current_device(&self) -> Option<u32> {
        let ask = self.table.ctx_get_device.filter(|_| self.here().is_ok())?;
        let mut handle = 0;
        // SAFETY: writes one int, during the call; answers an error where there is no context.
        let code = unsafe { ask(&raw mut handle) };
        let found = |&ordinal: &u32| self.handle_of(ordinal).is_ok_and(|known| known == handle);
        (0..self.count().ok().filter(|_| code == 0)?).find(found)
    }

    fn enter(&self, ordinal: u32, context: Context, _thread: Thread) -> Result<Entered<'_>> {
        self.here()?;
        let id = DeviceId::new(Vendor::Cuda, ordinal);
        let device = self.handle_of(ordinal)?;
        if context == Context::Made || self.primary_is_active(device)? {
            return self.enter_primary(device, id);
        }
        let Context::OfMemory(addr) = context else {
            return Err(GpuError::NoContext { device: id });
        };
        match self.queries().ask_one(pointer_attribute::CONTEXT, addr) {
            Ok(0) | Err(_) => Err(GpuError::NoContext { device: id }),
            Ok(own) => {
                self.push(ptr::with_exposed_provenance_mut(own as usize), id)?;
                Ok(Entered::new(id, Some(Box::new(move || self.pop()))))
            }
        }
    }

    fn relax_capture(&self) -> Result<RelaxedCapture<'_>> {
        self.here()?;
        let Some(exchange) = self.table.thread_exchange_capture_mode else {
            return Ok(RelaxedCapture::new(None));
        };
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: reads and writes one int, during the call; the mode is this thread's.
        let code = unsafe { exchange(&raw mut mode) };
        self.check("ThreadExchangeStreamCaptureMode", code, || {
            "keeping clear of graph captures".to_owned()
        })?;
        Ok(RelaxedCapture::new(Some(Box::new(move || {
            let mut old = mode;
            // SAFETY: as above; the guard is bound to its thread.
            let code = unsafe { exchange(&raw mut old) };
            if code != 0 {
                tracing::debug!(code, "cuThreadExchangeStreamCaptureMode failed");
            }
        }))))
    }

    fn alloc_pinned(&self, inside: &Entered<'_>, len: usize) -> Result<Pinned> {
        let mut memory = ptr::null_mut();
        let flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED;
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.table.mem_host_alloc)(&raw mut memory, len, flags) };
        self.check("MemHostAlloc", code, || {
            format!("pinning {len} bytes of host memory for {}", inside.device())
        })?;
        Ok(Pinned::of(memory, len))
    }

    unsafe fn free_pinned(&self, inside: &Entered<'_>, pinned: Pinned) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = unsafe { (self.table.mem_free_host)(pinned.as_ptr().cast()) };
        self.check("MemFreeHost", code, || {
            format!("freeing {} pinned bytes of {}", pinned.len(), inside.device())
        })
    }

    fn alloc_device(&self, inside: &Entered<'_>, len: usize) -> Result<u64> {
        let doing = || format!("allocating {len} bytes on {}", inside.device());
        let alloc =
            self.table.mem_alloc.ok_or_else(|| self.unsupported("MemAlloc_v2", &doing()))?;
        let mut addr = 0;
        // SAFETY: writes one address, during the call.
        let code = unsafe { alloc(&raw mut addr, len) };
        self.check("MemAlloc_v2", code, doing)?;
        Ok(addr)
    }

    unsafe fn free_device(&self, inside: &Entered<'_>, addr: u64) -> Result<()> {
        let doing = || format!("freeing {addr:#x} on {}", inside.device());
        let free = self.table.mem_free.ok_or_else(|| self.unsupported("MemFree_v2", &doing()))?;
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = unsafe { free(addr) };
        self.check("MemFree_v2", code, doing)
    }

    fn create_stream(&self, inside: &Entered<'_>) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.table.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("StreamCreate", code, || format!("making a stream on {}", inside.device()))?;
        Ok(Stream(StreamHandle::of(stream)))
    }

    unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = unsafe { (self.table.stream_destroy)(stream.handle().pointer()) };
        self.check("StreamDestroy_v2", code, || "destroying a stream".to_owned())
    }

    unsafe fn sync_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise: ours, and alive.
        let code = unsafe { (self.table.stream_synchronize)(stream.handle().pointer()) };
        self.check("StreamSynchronize", code, || "waiting for a stream".to_owned())
    }

    fn create_event(&self, inside: &Entered<'_>) -> Result<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = unsafe { (self.table.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check("EventCreate", code, || format!("making an event on {}", inside.device()))?;
        Ok(Event::of(event))
    }

    unsafe fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = unsafe { (self.table.event_destroy)(event.pointer()) };
        self.check("EventDestroy_v2", code, || "destroying an event".to_owned())
    }

    unsafe fn record_event(&self, event: Event, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise: both alive.
        let code = unsafe { (self.table.event_record)(event.pointer(), stream.pointer()) };
        self.check("EventRecord", code, || {
            format!("recording an event on stream {:#x}", stream.raw())
        })
    }

    unsafe fn query_event(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's promise: ours, and alive.
        match unsafe { (self.table.event_query)(event.pointer()) } {
            0 => Ok(true),
            code::NOT_READY => Ok(false),
            code => Err(self.refused(
                "EventQuery",
                code,
                "asking whether a copy is complete".to_owned(),
            )),
        }
    }

    unsafe fn sync_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise: ours, and alive.
        let code = unsafe { (self.table.event_synchronize)(event.pointer()) };
        self.check("EventSynchronize", code, || "waiting for a copy".to_owned())
    }

    unsafe fn copy_to_device(
        &self,
        device: u64,
        host: u64,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let from = ptr::with_exposed_provenance_mut(host as usize);
        // SAFETY: the caller's promise: both ranges stay until the stream has passed this copy.
        let code =
            unsafe { (self.table.memcpy_htod_async)(device, from, len, stream.handle().pointer()) };
        self.check("MemcpyHtoDAsync_v2", code, || format!("copying {len} bytes to {device:#x}"))
    }

    unsafe fn copy_to_host(
        &self,
        host: u64,
        device: u64,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let to = ptr::with_exposed_provenance_mut(host as usize);
        // SAFETY: the caller's promise: both ranges stay until the stream has passed this copy.
        let code =
            unsafe { (self.table.memcpy_dtoh_async)(to, device, len, stream.handle().pointer()) };
        self.check("MemcpyDtoHAsync_v2", code, || format!("copying {len} bytes from {device:#x}"))
    }

    unsafe fn copy_on_device(&self, to: u64, from: u64, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise: both ranges stay until the stream has passed this copy.
        let code = unsafe { (self.table.memcpy_async)(to, from, len, stream.handle().pointer()) };
        self.check("MemcpyAsync", code, || format!("copying {len} bytes from {from:#x} to {to:#x}"))
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let Some(ask) = self.table.stream_is_capturing else { return Ok(false) };
        let mut status = CAPTURE_STATUS_NONE;
        // SAFETY: writes one int, during the call; the stream lives, as the caller promises.
        let code = unsafe { ask(stream.pointer(), &raw mut status) };
        // Asking about the legacy stream while another one is captured is itself an answer.
        if (code::CAPTURE_FIRST..=code::CAPTURE_LAST).contains(&code) {
            return Ok(true);
        }
        self.check("StreamIsCapturing", code, || format!("looking at stream {:#x}", stream.raw()))?;
        Ok(status != CAPTURE_STATUS_NONE)
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: Event) -> Result<()> {
        // SAFETY: the caller's promise: both alive.
        let code = unsafe { (self.table.stream_wait_event)(stream.pointer(), event.pointer(), 0) };
        self.check("StreamWaitEvent", code, || format!("making stream {:#x} wait", stream.raw()))
    }

    fn can_wait_value(&self) -> bool {
        self.table.stream_wait_value.is_some()
    }

    unsafe fn stream_wait_value(&self, stream: StreamHandle, addr: u64, value: u32) -> Result<()> {
        let doing = || format!("making stream {:#x} wait for a value", stream.raw());
        let wait = self
            .table
            .stream_wait_value
            .ok_or_else(|| self.unsupported("StreamWaitValue32_v2", &doing()))?;
        // SAFETY: the caller's promise: the stream lives, the word stays until it is passed.
        let code = unsafe { wait(stream.pointer(), addr, value, WAIT_VALUE_GEQ) };
        self.check("StreamWaitValue32_v2", code, doing)
    }

    fn can_launch_host_fn(&self) -> bool {
        self.table.launch_host_func.is_some()
    }

    unsafe fn launch_host_fn(
        &self,
        stream: StreamHandle,
        function: HostFn,
        user: Ptr,
    ) -> Result<()> {
        let doing = || format!("making stream {:#x} wait for a function", stream.raw());
        let launch = self
            .table
            .launch_host_func
            .ok_or_else(|| self.unsupported("LaunchHostFunc", &doing()))?;
        // SAFETY: the caller's promise: the stream lives, and the function may be called once with
        // `user`.
        let code = unsafe { launch(stream.pointer(), function, user) };
        self.check("LaunchHostFunc", code, doing)
    }

    fn error_name(&self, code: i32) -> Option<String> {
        Self::text(self.table.get_error_name, code)
    }

    fn error_text(&self, code: i32) -> Option<String> {
        Self::text(self.table.get_error_string, code)
    }
}
