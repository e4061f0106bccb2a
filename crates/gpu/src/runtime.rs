//! The interface that CUDA's runtime, MUSA and HIP share: the same functions under three prefixes,
//! with one struct whose size and numbers differ between versions.
#![expect(unsafe_code, reason = "calls into the runtime")]

mod contexts;
mod pointers;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::constants::{
    CAPTURE_MODE_RELAXED, CAPTURE_STATUS_NONE, DEVICE_ATTRIBUTE_INTEGRATED, EVENT_DISABLE_TIMING,
    HOST_ALLOC_MAPPED, HOST_ALLOC_PORTABLE, STREAM_NON_BLOCKING, WAIT_VALUE_GEQ, code, copy_kind,
    pointer_attribute,
};
use crate::cuda_driver::read_text;
use crate::device::{Api, DeviceId};
use crate::discovery::{Awake, Backend, Refusal};
use crate::error::{Failure, GpuError, Meaning, Result};
use crate::interface::{
    Context, DeviceInfo, Entered, Event, GpuRuntime, HostFn, Pinned, RelaxedCapture, Stream,
    StreamHandle, Thread,
};
use crate::library::{self, Library};
use crate::memory::Memory;
use crate::queries::{self, PointerQueries};
use crate::state::{Version, Versions};
use crate::symbols::symbols;
use contexts::ContextCalls;

type Ptr = *mut c_void;

symbols! {
    /// The functions of a runtime that we call (`cuda_runtime_api.h`, `hip_runtime_api.h`). None of
    /// them has another type in another version; the twins with `_ptsz` and `_ptds` are not bound.
    Table {
        required {
            get_device_count = "GetDeviceCount": fn(*mut c_int) -> c_int;
            get_device = "GetDevice": fn(*mut c_int) -> c_int;
            set_device = "SetDevice": fn(c_int) -> c_int;
            pointer_get_attributes = "PointerGetAttributes": fn(Ptr, Ptr) -> c_int;
            host_alloc = "HostAlloc": fn(*mut Ptr, usize, u32) -> c_int;
            free_host = "FreeHost": fn(Ptr) -> c_int;
            memcpy_async = "MemcpyAsync": fn(Ptr, Ptr, usize, c_int, Ptr) -> c_int;
            stream_create = "StreamCreateWithFlags": fn(*mut Ptr, u32) -> c_int;
            stream_destroy = "StreamDestroy": fn(Ptr) -> c_int;
            stream_synchronize = "StreamSynchronize": fn(Ptr) -> c_int;
            stream_wait_event = "StreamWaitEvent": fn(Ptr, Ptr, u32) -> c_int;
            event_create = "EventCreateWithFlags": fn(*mut Ptr, u32) -> c_int;
            event_destroy = "EventDestroy": fn(Ptr) -> c_int;
            event_record = "EventRecord": fn(Ptr, Ptr) -> c_int;
            event_query = "EventQuery": fn(Ptr) -> c_int;
            event_synchronize = "EventSynchronize": fn(Ptr) -> c_int;
            get_last_error = "GetLastError": fn() -> c_int;
        }
        optional {
            peek_at_last_error = "PeekAtLastError": fn() -> c_int;
            get_error_name = "GetErrorName": fn(c_int) -> *const c_char;
            get_error_string = "GetErrorString": fn(c_int) -> *const c_char;
            runtime_get_version = "RuntimeGetVersion": fn(*mut c_int) -> c_int;
            driver_get_version = "DriverGetVersion": fn(*mut c_int) -> c_int;
            device_get_attribute = "DeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
            device_get_pci_bus_id = "DeviceGetPCIBusId": fn(*mut c_char, c_int, c_int) -> c_int;
            host_get_flags = "HostGetFlags": fn(*mut u32, Ptr) -> c_int;
            malloc = "Malloc": fn(*mut Ptr, usize) -> c_int;
            free = "Free": fn(Ptr) -> c_int;
            thread_exchange_capture_mode = "ThreadExchangeStreamCaptureMode": fn(*mut c_int) -> c_int;
            stream_is_capturing = "StreamIsCapturing": fn(Ptr, *mut c_int) -> c_int;
            launch_host_func = "LaunchHostFunc": fn(Ptr, HostFn, Ptr) -> c_int;
        }
    }
}

symbols! {
    /// What HIP has in its runtime, and the others in their drivers.
    HipTable {
        required {}
        optional {
            device_get_name = "DeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
            device_total_mem = "DeviceTotalMem": fn(*mut usize, c_int) -> c_int;
            device_get_uuid = "DeviceGetUuid": fn(*mut u8, c_int) -> c_int;
            pointer_get_attribute = "PointerGetAttribute": fn(Ptr, c_int, u64) -> c_int;
            pointer_get_attributes = "DrvPointerGetAttributes": fn(u32, *mut c_int, *mut Ptr, u64) -> c_int;
            stream_wait_value = "StreamWaitValue32": fn(Ptr, Ptr, u32, u32, u32) -> c_int;
        }
    }
}

symbols! {
    /// The driver beneath a CUDA or MUSA runtime, for the questions that the runtime answers only
    /// from within a context.
    DriverTable {
        required {
            device_get_count = "DeviceGetCount": fn(*mut c_int) -> c_int;
            pointer_get_attribute = "PointerGetAttribute": fn(Ptr, c_int, u64) -> c_int;
        }
        optional {
            get_error_name = "GetErrorName": fn(c_int, *mut *const c_char) -> c_int;
            ctx_get_device = "CtxGetDevice": fn(*mut c_int) -> c_int;
            pointer_get_attributes = "PointerGetAttributes": fn(u32, *mut c_int, *mut Ptr, u64) -> c_int;
            mem_host_get_flags = "MemHostGetFlags": fn(*mut u32, Ptr) -> c_int;
            device_get_name = "DeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
            device_total_mem = "DeviceTotalMem_v2": fn(*mut usize, c_int) -> c_int;
            device_get_uuid_v2 = "DeviceGetUuid_v2": fn(*mut u8, c_int) -> c_int;
            device_get_uuid = "DeviceGetUuid": fn(*mut u8, c_int) -> c_int;
            primary_ctx_get_state = "DevicePrimaryCtxGetState": fn(c_int, *mut u32, *mut c_int) -> c_int;
            primary_ctx_retain = "DevicePrimaryCtxRetain": fn(*mut Ptr, c_int) -> c_int;
            primary_ctx_release = "DevicePrimaryCtxRelease_v2": fn(c_int) -> c_int;
            ctx_push = "CtxPushCurrent_v2": fn(Ptr) -> c_int;
            ctx_pop = "CtxPopCurrent_v2": fn(*mut Ptr) -> c_int;
            thread_exchange_capture_mode = "ThreadExchangeStreamCaptureMode": fn(*mut c_int) -> c_int;
            stream_wait_value = "StreamWaitValue32_v2": fn(Ptr, u64, u32, u32) -> c_int;
        }
    }
}

/// A library with the runtime interface.
pub(crate) struct Runtime {
    api: Api,
    library: &'static Library,
    table: Table,
    hip: Option<HipTable>,
    /// Looked for at first need: CUDA's runtime opens it with its own first call.
    driver: OnceLock<Option<DriverTable>>,
    /// The HIP major version, which decides what the memory types mean.
    hip_major: OnceLock<i32>,
    initialised: AtomicBool,
    /// The process that opened it.
    pid: u32,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Runtime").field(&self.api).field(&self.library.file()).finish()
    }
}

/// How a vendor spells a function.
fn spell(api: Api, name: &str) -> String {
    let name = match (api, name) {
        (Api::HipRuntime, "HostAlloc") => "HostMalloc",
        (Api::HipRuntime, "FreeHost") => "HostFree",
        (_, name) => name,
    };
    format!("{}{name}", api.prefix())
}

impl Runtime {
    /// The table of a library that has the vendor's functions; the error is one that it lacks.
    pub(crate) fn new(api: Api, library: &'static Library) -> std::result::Result<Self, String> {
        // SAFETY: a library with the vendor's symbol names speaks its interface, and these
        // functions have had these types since CUDA 10, HIP 5 and MUSA 1; a user who names another
        // file vouches for it.
        let table = unsafe { Table::resolve(library, |name| spell(api, name)) }?;
        let hip = if api == Api::HipRuntime {
            // Without the version, what a memory type means would be a guess.
            if table.runtime_get_version.is_none() {
                return Err(spell(api, "RuntimeGetVersion"));
            }
            // SAFETY: as above.
            Some(unsafe { HipTable::resolve(library, |name| spell(api, name)) }?)
        } else {
            None
        };
        Ok(Self {
            api,
            library,
            table,
            hip,
            driver: OnceLock::new(),
            hip_major: OnceLock::new(),
            initialised: AtomicBool::new(false),
            pid: std::process::id(),
        })
    }

    fn failure(&self, call: &str, code: c_int) -> Failure {
        Failure {
            vendor: self.api.vendor(),
            call: spell(self.api, call),
            code,
            name: self.error_name(code).unwrap_or_default(),
            text: self.error_text(code).unwrap_or_default(),
        }
    }

    /// Makes a call, and takes back the "last error" that it leaves for the thread's next user,
    /// unless there was one before, which is somebody else's to find.
    fn quietly(&self, call: impl FnOnce() -> c_int) -> c_int {
        // SAFETY: takes nothing.
        let before = self.table.peek_at_last_error.map_or(0, |peek| unsafe { peek() });
        let code = call();
        if code != 0 && before == 0 {
            self.clear();
        }
        code
    }

    fn clear(&self) {
        // SAFETY: takes nothing.
        let _ = unsafe { (self.table.get_last_error)() };
    }

    fn check(&self, call: &str, code: c_int, doing: impl FnOnce() -> String) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.refused(call, code, doing())) }
    }

    #[cold]
    fn refused(&self, call: &str, code: c_int, doing: String) -> GpuError {
        GpuError::Call { doing, failure: Box::new(self.failure(call, code)) }
    }

    fn unsupported(&self, symbol: String, doing: String) -> GpuError {
        GpuError::Unsupported {
            doing,
            vendor: self.api.vendor(),
            file: self.library.file().display().to_string(),
            symbol,
        }
    }

    fn here(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(GpuError::Forked { vendor: self.api.vendor(), parent: self.pid })
    }

    fn id(&self, ordinal: u32) -> DeviceId {
        DeviceId::new(self.api.vendor(), ordinal)
    }

    /// The driver beneath, if it is mapped: in the library itself, or under its own name. MUSA's is
    /// opened if need be; it is what the runtime opens, too.
    fn driver(&self) -> Option<&DriverTable> {
        let (prefix, stem, name) = match self.api {
            Api::CudaRuntime => ("cu", "libcuda", None),
            Api::MusaRuntime => ("mu", "libmusa", Some("libmusa.so.1")),
            Api::CudaDriver | Api::HipRuntime => return None,
        };
        let search = || {
            let mut mapped = library::mapped(&[stem]);
            // Of several, the one beside the runtime.
            mapped.sort_by_key(|file| file.parent() != self.library.file().parent());
            let opened = std::iter::once(self.library)
                .chain(mapped.iter().filter_map(|file| library::open_mapped(file)))
                .find(|library| library.has(&format!("{prefix}PointerGetAttribute")))
                .or_else(|| library::open(Path::new(name?)).ok())?;
            // SAFETY: as in `new`; MUSA's driver has the shapes of CUDA's.
            let table = unsafe { DriverTable::resolve(opened, |name| format!("{prefix}{name}")) };
            table.ok()
        };
        // Relaxed: a hint. Before the runtime has opened it, its absence is not final.
        if !self.initialised.load(Ordering::Relaxed) && self.driver.get().is_none() {
            let _ = self.driver.set(Some(search()?));
        }
        self.driver.get_or_init(search).as_ref()
    }

    fn driver_queries(&self) -> Option<PointerQueries> {
        let driver = self.driver()?;
        Some(PointerQueries {
            vendor: self.api.vendor(),
            one: driver.pointer_get_attribute,
            many: driver.pointer_get_attributes,
        })
    }

    /// What the driver beneath calls its codes: MUSA's are told apart by name.
    fn driver_failure(&self, call: &str, code: c_int) -> Failure {
        let prefix = if self.api == Api::MusaRuntime { "mu" } else { "cu" };
        let name = self.driver().and_then(|driver| driver.get_error_name).and_then(|lookup| {
            let mut text = ptr::null();
            // SAFETY: writes one pointer, during the call.
            let answer = unsafe { lookup(code, &raw mut text) };
            if answer != 0 {
                return None;
            }
            // SAFETY: the driver's own string for a code.
            unsafe { constant_text(text) }
        });
        Failure {
            vendor: self.api.vendor(),
            call: format!("{prefix}{call}"),
            code,
            name: name.unwrap_or_default(),
            text: String::new(),
        }
    }

    fn number(&self, get: Option<unsafe extern "C" fn(*mut c_int) -> c_int>) -> Option<c_int> {
        let get = get?;
        let mut number = 0;
        // SAFETY: writes one int, during the call.
        let code = self.quietly(|| unsafe { get(&raw mut number) });
        (code == 0 && number > 0).then_some(number)
    }

    fn count(&self) -> std::result::Result<u32, c_int> {
        let mut count = 0;
        // SAFETY: writes one int, during the call.
        let code = self.quietly(|| unsafe { (self.table.get_device_count)(&raw mut count) });
        if code == 0 { Ok(u32::try_from(count).unwrap_or(0)) } else { Err(code) }
    }

    fn set_device(&self, ordinal: u32) -> Result<()> {
        // SAFETY: takes one number; the device is one that a caller named or whose memory was
        // found, never a trial.
        let code = self.quietly(|| unsafe { (self.table.set_device)(ordinal as c_int) });
        self.check("SetDevice", code, || format!("entering {}", self.id(ordinal)))
    }

    /// # Safety
    /// As for [`GpuRuntime::copy_to_device`], for both sides.
    unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        len: usize,
        kind: c_int,
        stream: Stream,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        let to = ptr::with_exposed_provenance_mut(to as usize);
        let from = ptr::with_exposed_provenance_mut(from as usize);
        let stream = stream.handle().pointer();
        // SAFETY: the caller's promise: both ranges stay until the stream has passed this copy.
        let code =
            self.quietly(|| unsafe { (self.table.memcpy_async)(to, from, len, kind, stream) });
        self.check("MemcpyAsync", code, doing)
    }
}

/// # Safety
/// `text` is null, or a constant string of a library, which is never closed.
unsafe fn constant_text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl Backend for Runtime {
    fn awake(&self) -> Awake {
        let Some(driver) = self.driver() else { return Awake::Unknown };
        let mut count = 0;
        // SAFETY: writes one int, during the call; answers an error as long as nobody has
        // initialised the driver.
        match unsafe { (driver.device_get_count)(&raw mut count) } {
            0 => Awake::Yes,
            _ => Awake::No,
        }
    }

    fn initialise(&self) -> std::result::Result<u32, Refusal> {
        let count = self.count();
        // Relaxed: a hint, see `look_below`.
        self.initialised.store(count.is_ok(), Ordering::Relaxed);
        count.map_err(|code| Refusal::of(self.failure("GetDeviceCount", code), self.versions()))
    }
}

impl GpuRuntime for Runtime {
    fn api(&self) -> Api {
        self.api
    }

    fn file(&self) -> &Path {
        self.library.file()
    }

    fn absent(&self) -> Vec<String> {
        let mut absent = self.table.absent.clone();
        absent.extend(self.hip.iter().flat_map(|hip| hip.absent.iter().cloned()));
        absent
    }

    fn versions(&self) -> Versions {
        let vendor = self.api.vendor();
        let version = |number| Version::new(vendor, number);
        Versions {
            driver: self.number(self.table.driver_get_version).map(version),
            runtime: self.number(self.table.runtime_get_version).map(version),
        }
    }

    fn device_count(&self) -> Result<u32> {
        self.here()?;
        self.count().map_err(|code| {
            self.refused(
                "GetDeviceCount",
                code,
                format!("counting {} devices", self.vendor().spoken()),
            )
        })
    }

    fn device(&self, ordinal: u32) -> Result<DeviceInfo> {
        self.here()?;
        let device = ordinal as c_int;
        let driver = self.driver();
        let hip = self.hip.as_ref();
        let name_of = driver
            .and_then(|driver| driver.device_get_name)
            .or_else(|| hip.and_then(|hip| hip.device_get_name));
        let total_of = driver
            .and_then(|driver| driver.device_total_mem)
            .or_else(|| hip.and_then(|hip| hip.device_total_mem));
        let uuid_of = driver
            .and_then(|driver| driver.device_get_uuid_v2.or(driver.device_get_uuid))
            .or_else(|| hip.and_then(|hip| hip.device_get_uuid));
        let name = name_of.and_then(|get| {
            // SAFETY: writes at most `len` bytes to `out`, during the call.
            read_text(|out, len| self.quietly(|| unsafe { get(out, len, device) }))
        });
        let pci_address = self.table.device_get_pci_bus_id.and_then(|get| {
            // SAFETY: writes at most `len` bytes to `out`, during the call.
            read_text(|out, len| self.quietly(|| unsafe { get(out, len, device) }))
        });
        let memory_bytes = total_of.and_then(|get| {
            let mut bytes = 0;
            // SAFETY: writes one size, during the call.
            let code = self.quietly(|| unsafe { get(&raw mut bytes, device) });
            (code == 0).then_some(bytes as u64)
        });
        let uuid = uuid_of.and_then(|get| {
            let mut uuid = [0; 16];
            // SAFETY: writes 16 bytes, during the call.
            let code = self.quietly(|| unsafe { get(uuid.as_mut_ptr(), device) });
            (code == 0).then_some(uuid)
        });
        // HIP numbers its device attributes otherwise, and MUSA's numbers are not known.
        let integrated = self.api == Api::CudaRuntime
            && self.table.device_get_attribute.is_some_and(|get| {
                let mut value = 0;
                // SAFETY: writes one int, during the call.
                let code = self.quietly(|| unsafe {
                    get(&raw mut value, DEVICE_ATTRIBUTE_INTEGRATED, device)
                });
                code == 0 && value != 0
            });
        Ok(DeviceInfo {
            id: self.id(ordinal),
            name,
            memory_bytes,
            pci_address: pci_address.map(|text| text.to_ascii_lowercase()),
            uuid,
            integrated,
        })
    }

    fn classify(&self, addr: u64, len: u64, named: Option<u32>) -> Result<Memory> {
        self.here()?;
        if let Some(queries) = self.driver_queries() {
            let below = queries::range(addr, len, |at| {
                // The error says only that the question has to be asked above.
                let no_answer = GpuError::NoContext { device: self.id(0) };
                self.look_below(queries, at).unwrap_or(Err(no_answer))
            });
            if !matches!(below, Err(GpuError::NoContext { .. })) {
                return below;
            }
        }
        let ask = || match &self.hip {
            Some(hip) => self.hip_range(hip, addr, len),
            None => queries::range(addr, len, |at| self.look(at))
                .map(|memory| self.with_host_flags(memory)),
        };
        match named {
            Some(ordinal) => self.on_device(ordinal, ask),
            None => ask(),
        }
    }

    fn buffer_id(&self, addr: u64) -> Result<Option<u64>> {
        self.here()?;
        if let Some(queries) = self.driver_queries() {
            let refused = match queries.ask_one(pointer_attribute::BUFFER_ID, addr) {
                Ok(id) => return Ok((id != 0).then_some(id)),
                Err(code) => self.driver_failure("PointerGetAttribute", code),
            };
            if matches!(refused.meaning(), Meaning::InvalidValue | Meaning::NotInitialised) {
                return Ok(None);
            }
            let doing = format!("asking which allocation {addr:#x} is in");
            return Err(GpuError::Call { doing, failure: Box::new(refused) });
        }
        let Some(ask) = self.hip.as_ref().and_then(|hip| hip.pointer_get_attribute) else {
            return Ok(None);
        };
        let mut id = 0_u64;
        // SAFETY: writes at most 8 bytes to `id`, during the call; `addr` may be anything.
        let code = self
            .quietly(|| unsafe { ask((&raw mut id).cast(), pointer_attribute::BUFFER_ID, addr) });
        Ok((code == 0 && id != 0).then_some(id))
    }

    fn current_device(&self) -> Option<u32> {
        self.here().ok()?;
        let ask = match &self.hip {
            Some(_) => self.table.get_device,
            // The runtime's own question can make a context on device 0.
            None => self.driver()?.ctx_get_device?,
        };
        let mut device = 0;
        // SAFETY: writes one int, during the call; answers an error where there is no context.
        let code = self.quietly(|| unsafe { ask(&raw mut device) });
        u32::try_from(device).ok().filter(|_| code == 0)
    }

    fn enter(&self, ordinal: u32, context: Context, thread: Thread) -> Result<Entered<'_>> {
        self.here()?;
        let id = self.id(ordinal);
        if thread == Thread::Ours {
            self.set_device(ordinal)?;
            return Ok(Entered::new(id, None));
        }
        // Where there is a driver beneath, no device is chosen, since each choice makes a context.
        if let Some(below) = self.driver().and_then(ContextCalls::of) {
            if context == Context::InUse && !below.is_active(ordinal) {
                return Err(GpuError::NoContext { device: id });
            }
            return below.enter(id, |code| GpuError::Call {
                doing: format!("entering the context of {id}"),
                failure: Box::new(self.driver_failure("DevicePrimaryCtxRetain", code)),
            });
        }
        let mut before = 0;
        // SAFETY: writes one int, during the call.
        let code = self.quietly(|| unsafe { (self.table.get_device)(&raw mut before) });
        self.check("GetDevice", code, || format!("entering {id}"))?;
        if before == ordinal as c_int {
            // Where this only confirms a choice, it makes the choice a context, as the caller's own
            // work would.
            self.set_device(ordinal)?;
            return Ok(Entered::new(id, None));
        }
        self.set_device(ordinal)?;
        Ok(Entered::new(
            id,
            Some(Box::new(move || {
                if let Err(error) = self.set_device(before as u32) {
                    tracing::debug!(%error, "the thread's device could not be restored");
                }
            })),
        ))
    }

    fn relax_capture(&self) -> Result<RelaxedCapture<'_>> {
        self.here()?;
        // The driver's own function, where it can be had: the runtime's makes a context on device
        // 0.
        let below = self.driver().and_then(|driver| driver.thread_exchange_capture_mode);
        let Some(exchange) = below.or(self.table.thread_exchange_capture_mode) else {
            return Ok(RelaxedCapture::new(None));
        };
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: reads and writes one int, during the call; the mode is this thread's.
        let code = self.quietly(|| unsafe { exchange(&raw mut mode) });
        // MUSA has the function in some versions, and answers that it does not support it.
        if code != 0 && self.api == Api::MusaRuntime {
            return Ok(RelaxedCapture::new(None));
        }
        self.check("ThreadExchangeStreamCaptureMode", code, || {
            "keeping clear of graph captures".to_owned()
        })?;
        Ok(RelaxedCapture::new(Some(Box::new(move || {
            let mut old = mode;
            // SAFETY: as above; the guard is bound to its thread.
            let code = self.quietly(|| unsafe { exchange(&raw mut old) });
            if code != 0 {
                tracing::debug!(code, "the thread's capture mode could not be restored");
            }
        }))))
    }

    fn alloc_pinned(&self, inside: &Entered<'_>, len: usize) -> Result<Pinned> {
        let mut memory = ptr::null_mut();
        let flags = HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED;
        // SAFETY: writes one pointer, during the call.
        let code = self.quietly(|| unsafe { (self.table.host_alloc)(&raw mut memory, len, flags) });
        self.check("HostAlloc", code, || {
            format!("pinning {len} bytes of host memory for {}", inside.device())
        })?;
        Ok(Pinned::of(memory, len))
    }

    unsafe fn free_pinned(&self, inside: &Entered<'_>, pinned: Pinned) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = self.quietly(|| unsafe { (self.table.free_host)(pinned.as_ptr().cast()) });
        self.check("FreeHost", code, || {
            format!("freeing {} pinned bytes of {}", pinned.len(), inside.device())
        })
    }

    fn alloc_device(&self, inside: &Entered<'_>, len: usize) -> Result<u64> {
        let doing = || format!("allocating {len} bytes on {}", inside.device());
        let alloc = self
            .table
            .malloc
            .ok_or_else(|| self.unsupported(spell(self.api, "Malloc"), doing()))?;
        let mut memory = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = self.quietly(|| unsafe { alloc(&raw mut memory, len) });
        self.check("Malloc", code, doing)?;
        Ok(memory.expose_provenance() as u64)
    }

    unsafe fn free_device(&self, inside: &Entered<'_>, addr: u64) -> Result<()> {
        let doing = || format!("freeing {addr:#x} on {}", inside.device());
        let free =
            self.table.free.ok_or_else(|| self.unsupported(spell(self.api, "Free"), doing()))?;
        let memory = ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = self.quietly(|| unsafe { free(memory) });
        self.check("Free", code, doing)
    }

    fn create_stream(&self, inside: &Entered<'_>) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = self.quietly(|| unsafe {
            (self.table.stream_create)(&raw mut stream, STREAM_NON_BLOCKING)
        });
        self.check("StreamCreateWithFlags", code, || {
            format!("making a stream on {}", inside.device())
        })?;
        Ok(Stream(StreamHandle::of(stream)))
    }

    unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code =
            self.quietly(|| unsafe { (self.table.stream_destroy)(stream.handle().pointer()) });
        self.check("StreamDestroy", code, || "destroying a stream".to_owned())
    }

    unsafe fn sync_stream(&self, stream: Stream) -> Result<()> {
        let stream = stream.handle().pointer();
        // SAFETY: the caller's promise: ours, and alive.
        let code = self.quietly(|| unsafe { (self.table.stream_synchronize)(stream) });
        self.check("StreamSynchronize", code, || "waiting for a stream".to_owned())
    }

    fn create_event(&self, inside: &Entered<'_>) -> Result<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: writes one pointer, during the call.
        let code = self
            .quietly(|| unsafe { (self.table.event_create)(&raw mut event, EVENT_DISABLE_TIMING) });
        self.check("EventCreateWithFlags", code, || {
            format!("making an event on {}", inside.device())
        })?;
        Ok(Event::of(event))
    }

    unsafe fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise: ours, and not used any more.
        let code = self.quietly(|| unsafe { (self.table.event_destroy)(event.pointer()) });
        self.check("EventDestroy", code, || "destroying an event".to_owned())
    }

    unsafe fn record_event(&self, event: Event, stream: StreamHandle) -> Result<()> {
        let (event, on) = (event.pointer(), stream.pointer());
        // SAFETY: the caller's promise: both alive.
        let code = self.quietly(|| unsafe { (self.table.event_record)(event, on) });
        self.check("EventRecord", code, || {
            format!("recording an event on stream {:#x}", stream.raw())
        })
    }

    unsafe fn query_event(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's promise: ours, and alive.
        let code = self.quietly(|| unsafe { (self.table.event_query)(event.pointer()) });
        if code == 0 {
            return Ok(true);
        }
        // The usual answer of a copy under way, for which no text is made.
        if code == code::NOT_READY && self.api != Api::MusaRuntime {
            return Ok(false);
        }
        let failure = self.failure("EventQuery", code);
        if failure.meaning() == Meaning::NotReady {
            return Ok(false);
        }
        let doing = "asking whether a copy is complete".to_owned();
        Err(GpuError::Call { doing, failure: Box::new(failure) })
    }

    unsafe fn sync_event(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise: ours, and alive.
        let code = self.quietly(|| unsafe { (self.table.event_synchronize)(event.pointer()) });
        self.check("EventSynchronize", code, || "waiting for a copy".to_owned())
    }

    unsafe fn copy_to_device(
        &self,
        device: u64,
        host: u64,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let kind = copy_kind::HOST_TO_DEVICE;
        let doing = || format!("copying {len} bytes to {device:#x}");
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy(device, host, len, kind, stream, doing) }
    }

    unsafe fn copy_to_host(
        &self,
        host: u64,
        device: u64,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        let kind = copy_kind::DEVICE_TO_HOST;
        let doing = || format!("copying {len} bytes from {device:#x}");
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy(host, device, len, kind, stream, doing) }
    }

    unsafe fn copy_on_device(&self, to: u64, from: u64, len: usize, stream: Stream) -> Result<()> {
        let kind = copy_kind::DEVICE_TO_DEVICE;
        let doing = || format!("copying {len} bytes from {from:#x} to {to:#x}");
        // SAFETY: the caller's promise is the same.
        unsafe { self.copy(to, from, len, kind, stream, doing) }
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let Some(ask) = self.table.stream_is_capturing else { return Ok(false) };
        let mut status = CAPTURE_STATUS_NONE;
        // SAFETY: writes one int, during the call; the stream lives, as the caller promises.
        let code = self.quietly(|| unsafe { ask(stream.pointer(), &raw mut status) });
        // Asking about the legacy stream while another one is captured is itself an answer.
        if (code::CAPTURE_FIRST..=code::CAPTURE_LAST).contains(&code) {
            return Ok(true);
        }
        self.check("StreamIsCapturing", code, || format!("looking at stream {:#x}", stream.raw()))?;
        Ok(status != CAPTURE_STATUS_NONE)
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: Event) -> Result<()> {
        let (on, event) = (stream.pointer(), event.pointer());
        // SAFETY: the caller's promise: both alive.
        let code = self.quietly(|| unsafe { (self.table.stream_wait_event)(on, event, 0) });
        self.check("StreamWaitEvent", code, || format!("making stream {:#x} wait", stream.raw()))
    }

    fn can_wait_value(&self) -> bool {
        match &self.hip {
            Some(hip) => hip.stream_wait_value.is_some(),
            None => self.driver().is_some_and(|driver| driver.stream_wait_value.is_some()),
        }
    }

    unsafe fn stream_wait_value(&self, stream: StreamHandle, addr: u64, value: u32) -> Result<()> {
        let doing = || format!("making stream {:#x} wait for a value", stream.raw());
        let on = stream.pointer();
        if let Some(hip) = &self.hip {
            let name = "StreamWaitValue32";
            let wait = hip
                .stream_wait_value
                .ok_or_else(|| self.unsupported(spell(self.api, name), doing()))?;
            let word = ptr::with_exposed_provenance_mut(addr as usize);
            // SAFETY: the caller's promise: the stream lives, the word stays until it is passed.
            let code = self.quietly(|| unsafe { wait(on, word, value, WAIT_VALUE_GEQ, u32::MAX) });
            return self.check(name, code, doing);
        }
        let name = if self.api == Api::MusaRuntime { "mu" } else { "cu" };
        let name = format!("{name}StreamWaitValue32_v2");
        let wait = self
            .driver()
            .and_then(|driver| driver.stream_wait_value)
            .ok_or_else(|| self.unsupported(name.clone(), doing()))?;
        // SAFETY: the caller's promise: the stream lives, the word stays until it is passed.
        let code = unsafe { wait(on, addr, value, WAIT_VALUE_GEQ) };
        if code == 0 {
            return Ok(());
        }
        let failure = Failure { call: name, ..self.driver_failure("PointerGetAttribute", code) };
        Err(GpuError::Call { doing: doing(), failure: Box::new(failure) })
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
            .ok_or_else(|| self.unsupported(spell(self.api, "LaunchHostFunc"), doing()))?;
        // SAFETY: the caller's promise: the stream lives, and the function may be called once with
        // `user`.
        let code = self.quietly(|| unsafe { launch(stream.pointer(), function, user) });
        self.check("LaunchHostFunc", code, doing)
    }

    fn error_name(&self, code: i32) -> Option<String> {
        let lookup = self.table.get_error_name?;
        // SAFETY: takes a number.
        let text = unsafe { lookup(code) };
        // SAFETY: the runtime's own string for a code.
        unsafe { constant_text(text) }
    }

    fn error_text(&self, code: i32) -> Option<String> {
        let lookup = self.table.get_error_string?;
        // SAFETY: takes a number.
        let text = unsafe { lookup(code) };
        // SAFETY: the runtime's own string for a code.
        unsafe { constant_text(text) }
    }
}
