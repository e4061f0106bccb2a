//! The order between a transfer and the caller's own work on a GPU.
#![expect(unsafe_code, reason = "says what callers owe; calls nothing")]

use tensorferry_gpu::{StreamHandle, Vendor};

/// A stream of the caller's that a batch is ordered with: it starts when the work is done that was on
/// the stream when it was submitted.
///
/// ```no_run
/// use tensorferry::gpu::Vendor;
/// use tensorferry::{Batch, Request, Result, Segment, SubmitOptions, UserStream};
///
/// /// Sends what a kernel on `stream` writes, and has later kernels there wait until it is sent.
/// ///
/// /// # Safety
/// /// The stream is not destroyed, nor the memory freed, before the batch is final and the stream has gone on.
/// unsafe fn send(segment: &Segment, request: Request, stream: u64) -> Result<Batch> {
///     // SAFETY: what `UserStream::new` asks for is what this function asks for.
///     let stream = unsafe { UserStream::new(Vendor::Cuda, stream) }.hold_later_work();
///     // SAFETY: as is what `submit` asks for.
///     unsafe { segment.submit(vec![request], SubmitOptions::default().with_stream(stream)) }
/// }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UserStream {
    pub(crate) vendor: Vendor,
    pub(crate) handle: StreamHandle,
    pub(crate) holds_later_work: bool,
}

impl UserStream {
    /// The stream that `vendor`'s library knows by the pointer `raw`; 0 to 2 are its default streams, of the
    /// device that the submitting thread is on, or, if it is on none, of one that the local memory is on.
    ///
    /// # Safety
    /// The stream is one of that library and is not destroyed until the batch is final, and with
    /// [`UserStream::hold_later_work`] until the stream has gone on after that.
    #[must_use]
    pub unsafe fn new(vendor: Vendor, raw: u64) -> Self {
        Self { vendor, handle: StreamHandle::from_raw(raw), holds_later_work: false }
    }

    /// Whether it is a default stream of the device that the thread is on.
    pub(crate) fn is_default(self) -> bool {
        self.handle.raw() <= 2
    }

    /// Work that is put on the stream after the submission waits until the batch is final, whether it
    /// completed or failed.
    #[must_use]
    pub fn hold_later_work(self) -> Self {
        Self { holds_later_work: true, ..self }
    }
}
