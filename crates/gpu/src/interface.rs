//! What every vendor's library is asked to do: one trait, and the handles it deals in.
#![expect(unsafe_code, reason = "says what callers owe; calls nothing")]

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use crate::device::{Api, DeviceId, Vendor};
use crate::error::Result;
use crate::memory::Memory;
use crate::state::Versions;

/// One device, as its library describes it.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device, as this process numbers it.
    pub id: DeviceId,
    /// Its name; `None` where the interface has no call for it.
    pub name: Option<String>,
    /// Its memory in bytes; `None` where that could not be asked without making a context.
    pub memory_bytes: Option<u64>,
    /// Its PCI address in lower case, `0000:3b:00.0`, as the kernel writes it. Instances of a
    /// divided device share it.
    pub pci_address: Option<String>,
    /// What tells it from all others, and from its siblings in a divided device.
    pub uuid: Option<[u8; 16]>,
    /// It uses the host's memory.
    pub integrated: bool,
}

/// A stream of ours: non-blocking, so the legacy default stream never waits for it, nor it for that
/// one.
///
/// A plain handle: nothing is destroyed when it is dropped, since at the end of a process the
/// library may be gone before us.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stream(pub(crate) StreamHandle);

impl Stream {
    /// The stream as the library knows it.
    #[must_use]
    pub fn handle(self) -> StreamHandle {
        self.0
    }
}

/// Any stream, a caller's too, by the value of the library's own pointer (0 to 2 are default
/// streams).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StreamHandle(u64);

impl StreamHandle {
    /// A stream of the caller's.
    #[must_use]
    pub fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The value of the library's pointer.
    #[must_use]
    pub fn raw(self) -> u64 {
        self.0
    }

    pub(crate) fn pointer(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }

    pub(crate) fn of(pointer: *mut c_void) -> Self {
        Self(pointer.expose_provenance() as u64)
    }
}

/// An event without a time stamp. A plain handle, as [`Stream`] is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Event(u64);

impl Event {
    pub(crate) fn pointer(self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }

    pub(crate) fn of(pointer: *mut c_void) -> Self {
        Self(pointer.expose_provenance() as u64)
    }
}

/// Pinned host memory of ours. A plain handle, as [`Stream`] is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pinned {
    addr: u64,
    len: usize,
}

impl Pinned {
    pub(crate) fn of(pointer: *mut c_void, len: usize) -> Self {
        Self { addr: pointer.expose_provenance() as u64, len }
    }

    /// Its first byte.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr as usize)
    }

    /// Its first address.
    #[must_use]
    pub fn addr(self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nothing is allocated with no bytes")]
    pub fn len(self) -> usize {
        self.len
    }
}

/// Which context of a device is entered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Context {
    /// The device's primary context, if the process uses it already. None is made.
    InUse,
    /// As [`Context::InUse`]; where there is none, the context of the allocation at this address.
    OfMemory(u64),
    /// The device's primary context, made if needed: hundreds of MiB of its memory. Only for a
    /// program that allocates there itself.
    Made,
}

/// Whose thread enters a context.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Thread {
    /// One that does nothing else. Nothing has to be found out and restored, which for a runtime
    /// interface can itself make a context on device 0; so there the device stays the thread's
    /// after the guard is dropped.
    Ours,
    /// A caller's: its current device and context are restored when the guard is dropped.
    Callers,
}

/// This thread is in a context of a device, until the guard is dropped.
#[must_use = "the context is left when this is dropped"]
pub struct Entered<'a> {
    device: DeviceId,
    leave: Option<Box<dyn FnOnce() + 'a>>,
    /// Bound to its thread.
    _thread: PhantomData<*mut ()>,
}

impl<'a> Entered<'a> {
    pub(crate) fn new(device: DeviceId, leave: Option<Box<dyn FnOnce() + 'a>>) -> Self {
        Self { device, leave, _thread: PhantomData }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entered").field(&self.device).finish()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            leave();
        }
    }
}

/// This thread's calls neither fail because of another thread's graph capture nor spoil it, until
/// the guard is dropped.
#[must_use = "the thread's old mode returns when this is dropped"]
pub struct RelaxedCapture<'a> {
    restore: Option<Box<dyn FnOnce() + 'a>>,
    _thread: PhantomData<*mut ()>,
}

impl<'a> RelaxedCapture<'a> {
    pub(crate) fn new(restore: Option<Box<dyn FnOnce() + 'a>>) -> Self {
        Self { restore, _thread: PhantomData }
    }

    /// Whether the library has such a mode. Where it has none, it has no such captures either, or
    /// no way around them.
    #[must_use]
    pub fn is_supported(&self) -> bool {
        self.restore.is_some()
    }
}

impl fmt::Debug for RelaxedCapture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelaxedCapture").field("supported", &self.is_supported()).finish()
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        if let Some(restore) = self.restore.take() {
            restore();
        }
    }
}

/// A function that a driver's thread runs. It must not call the GPU library, and must not unwind.
pub type HostFn = unsafe extern "C" fn(user: *mut c_void);

/// A vendor's library, loaded and ready to be asked.
///
/// Everything may be called from any thread. Calls cost micro-seconds or less, except where a doc
/// says that they wait. None of them uses the legacy default stream, or makes a context unless it
/// was told to ([`Context::Made`]). An error leaves outputs and the runtime's "last error" as they
/// were, as far as the interface allows.
pub trait GpuRuntime: Send + Sync + fmt::Debug {
    /// How the library is spoken to.
    fn api(&self) -> Api;

    /// Whose library it is.
    fn vendor(&self) -> Vendor {
        self.api().vendor()
    }

    /// The library's file.
    fn file(&self) -> &Path;

    /// Functions that other versions have and this one lacks.
    fn absent(&self) -> Vec<String>;

    /// What the library says its versions are; asked anew each time.
    fn versions(&self) -> Versions;

    /// How many devices the process sees.
    fn device_count(&self) -> Result<u32>;

    /// What the library says about a device.
    fn device(&self, ordinal: u32) -> Result<DeviceInfo>;

    /// What the `len` bytes at `addr` are. Made for registration: at most two questions about host,
    /// pinned, device and managed memory (four about virtual memory of a MUSA driver). Both ends
    /// are looked at where the allocation's own range does not answer for the second.
    ///
    /// `named` is the device that the caller says the memory is on: where an interface cannot
    /// answer without a context, it is asked there and nowhere else.
    fn classify(&self, addr: u64, len: u64, named: Option<u32>) -> Result<Memory>;

    /// The number of the allocation at `addr` now; `None` where the interface has no such number.
    /// To be compared with [`Memory::buffer_id`]: another number means that the memory was freed
    /// and the address given out again.
    fn buffer_id(&self, addr: u64) -> Result<Option<u64>>;

    /// The device that this thread is on, which its default streams are of; `None`: none yet, or it cannot be asked
    /// without making a context.
    fn current_device(&self) -> Option<u32>;

    /// Enters a context of a device.
    fn enter(&self, ordinal: u32, context: Context, thread: Thread) -> Result<Entered<'_>>;

    /// Sets this thread's capture mode to relaxed. Every thread of ours does it once, before its
    /// first other call; on a caller's thread the guard ends with the call.
    fn relax_capture(&self) -> Result<RelaxedCapture<'_>>;

    /// Allocates pinned host memory for the entered device, readable by all. Slow (1 to 2 GB/s):
    /// once, not per transfer.
    fn alloc_pinned(&self, inside: &Entered<'_>, len: usize) -> Result<Pinned>;

    /// Frees pinned host memory.
    ///
    /// # Safety
    /// `pinned` is from this runtime, freed once, and neither a copy nor anything else uses it any
    /// more.
    unsafe fn free_pinned(&self, inside: &Entered<'_>, pinned: Pinned) -> Result<()>;

    /// Allocates device memory on the entered device: for programs that move memory of their own
    /// (demonstrations, tests).
    fn alloc_device(&self, inside: &Entered<'_>, len: usize) -> Result<u64>;

    /// Frees device memory. Waits for the device.
    ///
    /// # Safety
    /// `addr` is from this runtime's [`GpuRuntime::alloc_device`], freed once, and nothing uses it
    /// any more.
    unsafe fn free_device(&self, inside: &Entered<'_>, addr: u64) -> Result<()>;

    /// Makes a non-blocking stream on the entered device.
    fn create_stream(&self, inside: &Entered<'_>) -> Result<Stream>;

    /// Destroys a stream; work on it still runs to its end.
    ///
    /// # Safety
    /// `stream` is from this runtime, and not used after this.
    unsafe fn destroy_stream(&self, stream: Stream) -> Result<()>;

    /// Waits for everything on the stream.
    ///
    /// # Safety
    /// `stream` is from this runtime, and not destroyed.
    unsafe fn sync_stream(&self, stream: Stream) -> Result<()>;

    /// Makes an event without a time stamp on the entered device.
    fn create_event(&self, inside: &Entered<'_>) -> Result<Event>;

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` is from this runtime, and not used after this.
    unsafe fn destroy_event(&self, event: Event) -> Result<()>;

    /// Records the event at the present end of a stream; the stream's device is the event's.
    ///
    /// # Safety
    /// `event` is from this runtime and not destroyed; `stream` is a stream of this library and
    /// lives. A caller's stream is not being captured ([`GpuRuntime::is_capturing`]).
    unsafe fn record_event(&self, event: Event, stream: StreamHandle) -> Result<()>;

    /// Whether everything before the event's record is complete; does not wait. An event that was
    /// never recorded is.
    ///
    /// # Safety
    /// `event` is from this runtime, and not destroyed.
    unsafe fn query_event(&self, event: Event) -> Result<bool>;

    /// Waits until everything before the event's record is complete.
    ///
    /// # Safety
    /// `event` is from this runtime, and not destroyed.
    unsafe fn sync_event(&self, event: Event) -> Result<()>;

    /// Copies from pinned host memory to device memory, asynchronously.
    ///
    /// # Safety
    /// `stream` is from this runtime and not destroyed. `host` and `device` begin `len` bytes of
    /// pinned host memory and of device memory (or managed memory); both stay allocated, the host's
    /// bytes unchanged, until the stream has passed this copy. The stream is of the device that
    /// owns the memory.
    unsafe fn copy_to_device(
        &self,
        device: u64,
        host: u64,
        len: usize,
        stream: Stream,
    ) -> Result<()>;

    /// Copies from device memory to pinned host memory, asynchronously.
    ///
    /// # Safety
    /// As for [`GpuRuntime::copy_to_device`]; the host's bytes are neither read nor written until
    /// the stream has passed this copy.
    unsafe fn copy_to_host(&self, host: u64, device: u64, len: usize, stream: Stream)
    -> Result<()>;

    /// Copies between device memory of this vendor, asynchronously; the two may be on two devices.
    ///
    /// # Safety
    /// As for [`GpuRuntime::copy_to_device`], for both sides; the ranges do not overlap.
    unsafe fn copy_on_device(&self, to: u64, from: u64, len: usize, stream: Stream) -> Result<()>;

    /// Whether a graph capture is recording this stream; `false` where the library cannot tell.
    ///
    /// # Safety
    /// `stream` is a stream of this library, and lives.
    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool>;

    /// Later work on the stream waits for the event.
    ///
    /// # Safety
    /// `stream` is a stream of this library and lives; `event` is from this runtime and not
    /// destroyed.
    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: Event) -> Result<()>;

    /// Whether [`GpuRuntime::stream_wait_value`] is there.
    fn can_wait_value(&self) -> bool;

    /// Later work on the stream waits until the word at `addr` is at least `value` (in wrapping
    /// order).
    ///
    /// # Safety
    /// `stream` is a stream of this library and lives; `addr` is a 4-byte aligned word in pinned
    /// memory of this runtime that stays until the stream has passed this wait. The calling thread
    /// is in the stream's context.
    unsafe fn stream_wait_value(&self, stream: StreamHandle, addr: u64, value: u32) -> Result<()>;

    /// Whether [`GpuRuntime::launch_host_fn`] is there.
    fn can_launch_host_fn(&self) -> bool;

    /// Later work on the stream waits until `function` has run on a thread of the driver. It is
    /// never run if the context is in error.
    ///
    /// # Safety
    /// `stream` is a stream of this library and lives. `function` may be called with `user` once,
    /// at any time until the stream is destroyed, from another thread; it calls nothing of this
    /// library.
    unsafe fn launch_host_fn(
        &self,
        stream: StreamHandle,
        function: HostFn,
        user: *mut c_void,
    ) -> Result<()>;

    /// The library's name for a code.
    fn error_name(&self, code: i32) -> Option<String>;

    /// The library's text for a code.
    fn error_text(&self, code: i32) -> Option<String>;
}
