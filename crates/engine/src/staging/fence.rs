//! The order with the caller's own work: a batch starts behind what is on a stream, and what comes
//! on the stream later may wait for the batch.
#![expect(unsafe_code, reason = "calls into the GPU library, on streams that callers vouch for")]

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use tensorferry_gpu::{
    Context, DeviceId, Entered, Event, GpuError, GpuRuntime, StreamHandle, Thread,
};

use crate::error::{Error, Result};
use crate::staging::{Devices, Fault, Stager};
use crate::sync::locked;
use crate::transfer::{BatchInner, Cause, Stop, UserStream};

/// An event of ours on a caller's stream, until it is dropped.
struct Mark {
    event: Event,
    runtime: Arc<dyn GpuRuntime>,
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: ours, and given up by its only user.
        if let Err(error) = unsafe { self.runtime.destroy_event(self.event) } {
            tracing::debug!("{error}");
        }
    }
}

/// A batch that waits for a stream.
pub(crate) struct Gate {
    batch: Arc<BatchInner>,
    /// Taken out by the worker, the only one to ask about it.
    mark: Mutex<Option<Mark>>,
    /// Somebody has begun the batch, or given it up.
    decided: AtomicBool,
    begin: Box<dyn Fn(Arc<BatchInner>) + Send + Sync>,
}

/// The order of one batch, before there is the batch.
pub(crate) struct Pending {
    stager: Arc<Stager>,
    mark: Mark,
    /// What later work on the stream waits for.
    pub(crate) word: Option<Word>,
    /// Later work on this stream is to wait in a host function, for want of anything better.
    host_function: Option<StreamHandle>,
}

/// A word of pinned memory that a stream waits for.
pub(crate) struct Word {
    place: Place,
    of: Known,
}

/// Whose word it is: the library's, by the address of its table, and the device's.
type Known = (usize, DeviceId);

/// Where a word is, and the last value that was waited for there.
#[derive(Clone, core::marker::Copy)]
struct Place {
    addr: u64,
    value: u32,
}

/// How long later work may be held beyond its batch's deadline by a host function.
const LATE: Duration = Duration::from_secs(1);
const PAGE: usize = 4096;
/// Words on cache lines of their own.
const STRIDE: usize = 64;

/// Has the work that is on the stream now come before a batch, whose local memory is on `devices` among others;
/// and what comes later behind it, if that is wished.
///
/// # Errors
/// The stream is being captured; what the library refused.
pub(crate) fn order(
    devices: &Devices,
    stream: UserStream,
    local: &[Arc<Stager>],
) -> Result<Pending> {
    let runtime = devices.gpus().require(stream.vendor).map_err(Error::from)?;
    let on = |ordinal| DeviceId::new(stream.vendor, ordinal);
    let current = runtime.current_device().map(on);
    let known = local.iter().map(|s| s.device()).filter(|d| d.vendor == stream.vendor);
    let all = (0..runtime.device_count().map_err(Error::from)?).map(on);
    // A default stream belongs to the device that the thread is on. Any other belongs to one device, which is the only
    // one to take it.
    let certain = current.filter(|_| stream.is_default());
    let candidates = certain.is_none().then(|| known.chain(current).chain(all));
    let mut refused = None;
    for device in certain.into_iter().chain(candidates.into_iter().flatten()) {
        match record(&runtime, device, stream) {
            Ok((mark, word)) => {
                let stager = devices.stager(device, Context::InUse)?;
                let held = stream.holds_later_work && word.is_none();
                let host_function = held.then_some(stream.handle);
                return Ok(Pending { stager, mark, word, host_function });
            }
            Err(error @ Error::StreamCaptured { .. }) => return Err(error),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused
        .unwrap_or_else(|| Error::bad_argument("there is no device that a stream could be on")))
}

/// Marks the present end of the stream, and has what comes later wait for a word if that is wished and possible.
fn record(
    runtime: &Arc<dyn GpuRuntime>,
    device: DeviceId,
    stream: UserStream,
) -> Result<(Mark, Option<Word>)> {
    let handle = stream.handle;
    let _relaxed = runtime.relax_capture()?;
    let inside = runtime.enter(device.ordinal, Context::InUse, Thread::Callers)?;
    // SAFETY: `UserStream::new`'s caller promised that the stream lives.
    if unsafe { runtime.is_capturing(handle) }? {
        return Err(Error::StreamCaptured { stream: handle.raw(), device });
    }
    let mark = Mark { event: runtime.create_event(&inside)?, runtime: Arc::clone(runtime) };
    // SAFETY: the event is ours, the stream lives and is not being captured.
    unsafe { runtime.record_event(mark.event, handle) }?;
    let word = if stream.holds_later_work { hold(&**runtime, &inside, handle) } else { None };
    Ok((mark, word))
}

/// Has later work on the stream wait for a word; `None` where the library or the device cannot.
fn hold(runtime: &dyn GpuRuntime, inside: &Entered<'_>, stream: StreamHandle) -> Option<Word> {
    if !runtime.can_wait_value() {
        return None;
    }
    let word = Word::take(runtime, inside).map_err(|error| tracing::debug!("{error}")).ok()?;
    let Place { addr, value } = word.place;
    // SAFETY: the stream lives; the word is in pinned memory that is never freed; we are in the stream's context.
    match unsafe { runtime.stream_wait_value(stream, addr, value) } {
        Ok(()) => Some(word),
        Err(error) => {
            tracing::debug!("{error}");
            None
        }
    }
}

impl Pending {
    /// Begins the batch when the stream has come to it.
    ///
    /// # Errors
    /// Later work on the stream cannot be made to wait; the batch has failed.
    pub(crate) fn start(
        self,
        batch: &Arc<BatchInner>,
        begin: impl Fn(Arc<BatchInner>) + Send + Sync + 'static,
    ) -> Result<()> {
        if let Some(stream) = self.host_function
            && let Err(error) = self.hold_by_function(stream, batch)
        {
            batch.fail_unbegun(&Cause::Whole(Arc::new(error.clone())));
            return Err(error);
        }
        self.stager.watch(Arc::new(Gate {
            batch: Arc::clone(batch),
            mark: Mutex::new(Some(self.mark)),
            decided: AtomicBool::new(false),
            begin: Box::new(begin),
        }));
        Ok(())
    }

    fn hold_by_function(&self, stream: StreamHandle, batch: &Arc<BatchInner>) -> Result<()> {
        let (runtime, ordinal) = (self.stager.runtime(), self.stager.device().ordinal);
        let _relaxed = runtime.relax_capture()?;
        let _inside = runtime.enter(ordinal, Context::InUse, Thread::Callers)?;
        let user = Arc::into_raw(Arc::clone(batch)).cast_mut().cast::<c_void>();
        // SAFETY: the stream lives; the function owns `user`, which is called once at most, and calls no library.
        let launched = unsafe { runtime.launch_host_fn(stream, wait_until_final, user) };
        if launched.is_err() {
            // SAFETY: from `into_raw` above; the function was not launched, so it is still ours.
            drop(unsafe { Arc::from_raw(user.cast_const().cast::<BatchInner>()) });
        }
        Ok(launched?)
    }
}

/// Holds a stream until a batch is final; on a thread of the driver.
unsafe extern "C" fn wait_until_final(user: *mut c_void) {
    // SAFETY: `hold_by_function` passed one count of the batch, for one call.
    let batch = unsafe { Arc::from_raw(user.cast_const().cast::<BatchInner>()) };
    batch.sleep(batch.deadline + LATE);
}

impl Gate {
    /// Begins the batch if the stream has come to it; true if there is nothing more to watch.
    pub(super) fn look(&self) -> bool {
        let mut mark = locked(&self.mark);
        let Some(Mark { event, runtime }) = &*mark else { return true };
        // SAFETY: the event is ours, and destroyed only below.
        let verdict = match unsafe { runtime.query_event(*event) } {
            Ok(false) => return false,
            Ok(true) => Ok(()),
            Err(error) => Err(error),
        };
        *mark = None;
        drop(mark);
        match verdict {
            Ok(()) if self.decide() => (self.begin)(Arc::clone(&self.batch)),
            Ok(()) => {}
            Err(error) => self.fail(&Arc::new(error.into())),
        }
        true
    }

    pub(super) fn fail(&self, why: &Fault) {
        if self.decide() {
            self.batch.fail_unbegun(&Cause::Device(Arc::clone(why)));
        }
    }

    /// Gives the batch up if it is to stop; else returns its deadline.
    pub(super) fn sweep(&self, now: Instant) -> Option<Instant> {
        let Some(stop) = self.batch.stop_at(now) else {
            let waits = !self.decided.load(Ordering::Relaxed);
            return waits.then_some(self.batch.deadline);
        };
        if self.decide() {
            let stage = "it waited for the work before it on the caller's stream";
            self.batch.fail_unbegun(&Cause::Stopped { stop, stage, sent: false });
        }
        None
    }

    pub(super) fn revoke(&self, addr: u64) {
        if self.batch.pins_buffer(addr) {
            self.batch.request_stop(Stop::Unregistered);
        }
    }

    fn decide(&self) -> bool {
        !self.decided.swap(true, Ordering::AcqRel)
    }
}

/// Words that nobody waits for any more, by device. They outlive engines: a stream may look at a word a moment after
/// its batch is final, and nobody can tell when it has.
fn free_words() -> MutexGuard<'static, HashMap<Known, Vec<Place>>> {
    static FREE: OnceLock<Mutex<HashMap<Known, Vec<Place>>>> = OnceLock::new();
    locked(FREE.get_or_init(Mutex::default))
}

impl Word {
    fn take(runtime: &dyn GpuRuntime, inside: &Entered<'_>) -> std::result::Result<Self, GpuError> {
        let of = (ptr::from_ref(runtime).addr(), inside.device());
        let known = free_words().get_mut(&of).and_then(Vec::pop);
        let place = match known {
            Some(place) => place,
            None => {
                let page = runtime.alloc_pinned(inside, PAGE)?;
                // SAFETY: `PAGE` bytes of our own that nobody knows of yet.
                unsafe { page.as_ptr().write_bytes(0, PAGE) };
                let addrs = (0..PAGE / STRIDE).map(|i| page.addr() + (i * STRIDE) as u64);
                let mut words = free_words();
                let words = words.entry(of).or_default();
                words.extend(addrs.map(|addr| Place { addr, value: 0 }));
                words.pop().expect("a page has words")
            }
        };
        // Whoever waited here before waits for less, so that the next value lets it pass as well.
        let place = Place { value: place.value.wrapping_add(1), ..place };
        Ok(Self { place, of })
    }

    /// Lets the stream go on.
    pub(crate) fn release(&self) {
        let at = ptr::with_exposed_provenance_mut::<u32>(self.place.addr as usize);
        // SAFETY: aligned, in pinned memory of ours that is never freed, and used by atomic access only.
        let word = unsafe { AtomicU32::from_ptr(at) };
        // Release: a device that sees the value sees the bytes of the batch.
        word.store(self.place.value, Ordering::Release);
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // A batch that never was, or is final: nobody may be left waiting.
        self.release();
        free_words().entry(self.of).or_default().push(self.place);
    }
}
