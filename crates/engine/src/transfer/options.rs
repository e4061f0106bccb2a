//! How requests and options are made.

use std::time::Duration;

use tensorferry_wire::{Notification, Op};

use crate::transfer::{OnFull, Request, SubmitOptions, UserStream};

impl Request {
    /// A READ of `len` bytes at `remote` in the peer's process, to `local` in this one.
    #[must_use]
    pub const fn read(local: u64, remote: u64, len: u64) -> Self {
        Self { op: Op::Read, local, remote, len }
    }

    /// A WRITE of `len` bytes at `local` in this process, to `remote` in the peer's.
    #[must_use]
    pub const fn write(local: u64, remote: u64, len: u64) -> Self {
        Self { op: Op::Write, local, remote, len }
    }
}

impl SubmitOptions {
    /// The same with a time until the batch must be final, counted from the submission.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// The same with a notification, which the peer gets when every byte of the batch is applied.
    #[must_use]
    pub fn with_notification(self, notification: Notification) -> Self {
        Self { notification: Some(notification), ..self }
    }

    /// The same with another way to meet a full queue.
    #[must_use]
    pub fn with_on_full(self, on_full: OnFull) -> Self {
        Self { on_full, ..self }
    }

    /// The same behind the work that is on a stream of the caller's.
    #[must_use]
    pub fn with_stream(self, stream: UserStream) -> Self {
        Self { stream: Some(stream), ..self }
    }
}
