//! What is asked for, and how.

use std::time::Duration;

use tensorferry_wire::{Notification, Op};

use crate::transfer::UserStream;

/// One copy between local memory and a peer's segment. It is these four fields, and stays so.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Request {
    /// READ: from the peer to here. WRITE: from here to the peer.
    pub op: Op,
    /// The local address.
    pub local: u64,
    /// The address in the peer's process.
    pub remote: u64,
    /// How many bytes. Zero is allowed and complete at once.
    pub len: u64,
}

/// How a batch is submitted. [`SubmitOptions::default`] suits most; what differs is said by the methods.
///
/// ```
/// # use std::time::Duration;
/// use tensorferry::{Notification, SubmitOptions};
///
/// let options = SubmitOptions::default()
///     .with_timeout(Duration::from_secs(5))
///     .with_notification(Notification::new("kv-cache", "request 17"));
/// assert_eq!(options.timeout, Some(Duration::from_secs(5)));
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct SubmitOptions {
    /// The time until the batch must be final, counted from the submission. `None`:
    /// [`crate::Config::default_timeout`].
    pub timeout: Option<Duration>,
    /// Sent to the peer when every byte of the batch is applied.
    pub notification: Option<Notification>,
    /// What to do when the queue to the peer is full.
    pub on_full: OnFull,
    /// A stream of the caller's to start behind. `None`: the local memory is ready now.
    pub stream: Option<UserStream>,
}

/// What to do when the queue to a peer is full.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum OnFull {
    /// Wait for room, at most until the batch's deadline.
    #[default]
    Wait,
    /// Wait for room for so long, and no longer than until the deadline; then as `Refuse`.
    WaitFor(Duration),
    /// Refuse the batch with [`crate::Error::Busy`].
    Refuse,
}

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
