//! What can go wrong: to what, what happened, what to do next.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tensorferry_gpu::{DeviceId, GpuError};
use tensorferry_metadata::{MetadataError, PortRange};
use tensorferry_wire::{Op, WireError};

use crate::config::ConfigError;

/// The result of anything the engine is asked to do.
pub type Result<T> = std::result::Result<T, Error>;

/// Which request an error is about.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Subject {
    /// The segment name of the peer.
    pub peer: Arc<str>,
    /// READ or WRITE.
    pub op: Op,
    /// The local address of the request.
    pub local: u64,
    /// The address in the peer's segment.
    pub remote: u64,
    /// The length of the request in bytes.
    pub len: u64,
    /// How long after its submission the request failed.
    pub elapsed: Duration,
}

impl Subject {
    /// What an end in between leaves, if bytes of the request had been given to a socket.
    fn left_behind(&self, sent: bool) -> &'static str {
        match self.op {
            _ if !sent => "",
            Op::Read => "; the local buffer's content is undefined",
            Op::Write => "; bytes had been sent, so the remote range may still be written",
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (op, way) = match self.op {
            Op::Read => ("READ", "from"),
            Op::Write => ("WRITE", "to"),
        };
        write!(
            f,
            "{op} of {} bytes {way} {:#x} at {} (local {:#x}, {:.1} ms after submission)",
            self.len,
            self.remote,
            self.peer,
            self.local,
            self.elapsed.as_secs_f64() * 1e3
        )
    }
}

/// Every way in which the engine says no. The texts are for people, [`Error::code`] is for programs.
///
/// A text says to what, what happened, and what to do next. `docs/errors.md` has all of them. Match variants that have
/// fields with `..`: there may be more one day.
///
/// ```
/// use tensorferry::{Config, Engine, Error};
///
/// # fn main() -> tensorferry::Result<()> {
/// let engine = Engine::new("127.0.0.1", Config::default())?;
/// match engine.unregister(4096) {
///     Err(error @ Error::NotRegistered { .. }) => assert_eq!(error.code(), 5),
///     Err(error) if error.is_retryable() => println!("later, perhaps: {error}"),
///     other => other?,
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting could not be understood.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A segment name or a metadata server could not be understood or found.
    #[error(transparent)]
    Name(#[from] MetadataError),
    /// An argument makes no sense; nothing was done.
    #[error("{what}")]
    BadArgument {
        /// What is wrong, and what would be right.
        what: String,
    },
    /// A registration overlaps an earlier one.
    #[error(
        "[{addr:#x}, +{len}) overlaps the registered buffer [{other_addr:#x}, +{other_len}); \
         unregister that one first, or register a range that leaves it out"
    )]
    Overlap {
        /// Start of the refused range.
        addr: u64,
        /// Length of the refused range in bytes.
        len: u64,
        /// Start of the buffer that is in the way.
        other_addr: u64,
        /// Length of the buffer that is in the way.
        other_len: u64,
    },
    /// Memory that this process cannot reach was to be registered.
    #[error(
        "[{addr:#x}, +{len}) cannot be registered: the byte at {at:#x} is not {}{}",
        if *readable { "writable (register it with Access::ReadOnly)" } else { "mapped for the CPU" },
        Advice(gpus)
    )]
    Unmapped {
        /// Start of the range.
        addr: u64,
        /// Length of the range in bytes.
        len: u64,
        /// The first byte looked at that is not accessible. (First and last are looked at.)
        at: u64,
        /// The range can be read, but not written.
        readable: bool,
        /// Which GPU libraries were looked for, and what each answered; empty if that does not matter.
        gpus: String,
    },
    /// Registered memory was freed, and its address belongs to another allocation now.
    #[error(
        "the registered buffer [{addr:#x}, +{len}) was freed, and another allocation of the device has its address; \
         unregister it, then register the new memory"
    )]
    Reallocated {
        /// Start of the registered buffer.
        addr: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Memory is not where the caller said it is.
    #[error(
        "[{addr:#x}, +{len}) was said to be on {named}, and is {found}; name that, or let the engine find out \
         (Location::Any, \"*\")"
    )]
    WrongLocation {
        /// Start of the range.
        addr: u64,
        /// Length of the range in bytes.
        len: u64,
        /// What the caller said.
        named: String,
        /// What it is.
        found: String,
    },
    /// A GPU library refused something.
    #[error(transparent)]
    Gpu(#[from] Box<GpuError>),
    /// A copy from or to device memory failed.
    #[error("{subject}: {why}; the content of the destination is undefined")]
    DeviceCopy {
        /// Which request.
        subject: Box<Subject>,
        /// What the library said, and what to do.
        why: String,
    },
    /// A copy on a device does not end.
    #[error(
        "{}a copy on {device} does not end; its buffers stay registered, and may be read or written until it does; \
         look for a kernel or a driver that hangs, and end the process",
        Of(subject.as_deref())
    )]
    DeviceStuck {
        /// Which request, if it was one.
        subject: Option<Box<Subject>>,
        /// The device.
        device: DeviceId,
    },
    /// The driver of a device did not answer in time.
    #[error("the driver of {device} does not answer; look for what keeps it busy, and try again")]
    NoDeviceAnswer {
        /// The device.
        device: DeviceId,
    },
    /// A graph capture is recording the stream that a transfer was to be ordered with.
    #[error(
        "stream {stream:#x} of {device} is being captured into a graph, which cannot hold a transfer; submit it \
         before or after the capture"
    )]
    StreamCaptured {
        /// The stream, as the library knows it.
        stream: u64,
        /// Its device.
        device: DeviceId,
    },
    /// No buffer is registered at exactly this address.
    #[error(
        "no buffer is registered at {addr:#x}; unregister takes the exact address that was registered"
    )]
    NotRegistered {
        /// The address that was asked for.
        addr: u64,
    },
    /// A buffer could not be taken out of use: something still moves its bytes.
    #[error(
        "the buffer [{addr:#x}, +{len}) is still in use after {waited:?}; keep its memory mapped and \
         call unregister again"
    )]
    StillInUse {
        /// Start of the buffer.
        addr: u64,
        /// Length of the buffer in bytes.
        len: u64,
        /// How long was waited.
        waited: Duration,
    },
    /// No connection to the peer could be made.
    #[error(
        "{}{peer} cannot be reached: {what}; is it running, and is the address right? ({:.1} ms)",
        Of(subject.as_deref()), after.as_secs_f64() * 1e3
    )]
    PeerUnreachable {
        /// Which request, if it was one.
        subject: Option<Box<Subject>>,
        /// The segment name of the peer.
        peer: Arc<str>,
        /// Which step failed, and how.
        what: String,
        /// How long was tried.
        after: Duration,
    },
    /// The peer answered that the range is not one of its registered buffers.
    #[error(
        "{0}: the peer refused the range; it must lie in one buffer that is registered there now"
    )]
    Refused(Box<Subject>),
    /// The peer's descriptor, fetched anew, does not list the range; nothing was sent.
    #[error(
        "{0}: the range is in no buffer that the peer has registered; register it there, or check the offset"
    )]
    RangeNotPublished(Box<Subject>),
    /// The connection was lost before a READ was complete, or before a WRITE had begun, too often.
    #[error(
        "{subject}: the connection was lost ({why}); the local buffer's content is undefined; try again"
    )]
    ConnectionLost {
        /// Which request.
        subject: Box<Subject>,
        /// What the socket said.
        why: String,
    },
    /// The connection was lost when some bytes of a WRITE had left and its answer had not come.
    #[error(
        "{subject}: no answer came ({why}); whether the bytes arrived is unknown, and until the peer has \
         unregistered the range it may still be written; write it again if that is harmless"
    )]
    OutcomeUnknown {
        /// Which request.
        subject: Box<Subject>,
        /// What happened instead.
        why: String,
    },
    /// The kernel could not touch the local memory of the request.
    #[error(
        "{subject}: bad local address (EFAULT): {:#x} is not mapped for this process's CPU, wholly or in \
         part{}", subject.local, Advice(gpus)
    )]
    BadLocalAddress {
        /// Which request.
        subject: Box<Subject>,
        /// Which GPU libraries were looked for, and what each answered.
        gpus: String,
    },
    /// The deadline passed.
    #[error(
        "{subject}: not complete at its deadline ({stage}){}; is the peer alive? else give it more time \
         (TENSORFERRY_TRANSFER_TIMEOUT, MC_TRANSFER_TIMEOUT)",
        subject.left_behind(*sent)
    )]
    TimedOut {
        /// Which request.
        subject: Box<Subject>,
        /// What it was waiting for.
        stage: &'static str,
        /// Whether any of its bytes had been given to a socket.
        sent: bool,
    },
    /// The caller cancelled.
    #[error("{subject}: cancelled{}", subject.left_behind(*sent))]
    Cancelled {
        /// Which request.
        subject: Box<Subject>,
        /// Whether any of its bytes had been given to a socket.
        sent: bool,
    },
    /// A local buffer of the request was unregistered while it was in flight.
    #[error(
        "{0}: its local buffer was unregistered in mid-transfer; unregister after the transfer's end"
    )]
    Unregistered(Box<Subject>),
    /// The peer broke the protocol.
    #[error(
        "{subject}: {peer_addr} broke the protocol: {fault}; is that port a transfer engine's?"
    )]
    Protocol {
        /// Which request.
        subject: Box<Subject>,
        /// The data address of the peer.
        peer_addr: SocketAddr,
        /// What it sent.
        fault: WireError,
    },
    /// The peer's control port answered something that cannot be understood.
    #[error(
        "{}{peer}: the answer to a {what} request is not understood: {fault}; is that port a transfer engine's control port?",
        Of(subject.as_deref())
    )]
    BadAnswer {
        /// Which request, if it was one.
        subject: Option<Box<Subject>>,
        /// The segment name of the peer.
        peer: Arc<str>,
        /// Which exchange.
        what: &'static str,
        /// What was wrong.
        fault: WireError,
    },
    /// All bytes were applied, but the notification was not delivered.
    #[error(
        "all bytes are applied at {peer}, but the notification was not delivered: {why}; send it again with Segment::notify"
    )]
    NotifyFailed {
        /// The segment name of the peer.
        peer: Arc<str>,
        /// Why not.
        why: String,
    },
    /// A notification does not fit a control frame; nothing was sent.
    #[error("the notification makes a frame of {len} bytes, and peers accept {limit}; send less")]
    NotifyTooLarge {
        /// Bytes of the frame.
        len: u64,
        /// Bytes that peers accept.
        limit: u64,
    },
    /// The peer's queue is full, and the caller asked not to wait.
    #[error(
        "the queue to {peer} is full ({queued} of {limit} bytes of bookkeeping); wait for a batch to end, or submit with OnFull::Wait"
    )]
    Busy {
        /// The segment name of the peer.
        peer: Arc<str>,
        /// Bytes in the queue.
        queued: usize,
        /// The bound.
        limit: usize,
    },
    /// No port of the range could be bound.
    #[error(
        "no free port in {range} on {address}: {why}; widen it with TENSORFERRY_PORTS=first-last"
    )]
    PortsExhausted {
        /// The range that was tried.
        range: PortRange,
        /// The address that was to be bound.
        address: String,
        /// What the last attempt said.
        why: String,
    },
    /// No batch has this id, or not any more.
    #[error("batch id {id} is unknown: it was never given out, or its result was taken already")]
    UnknownBatch {
        /// The id that was asked for.
        id: u64,
    },
    /// The engine was closed.
    #[error("the engine is closed; make a new one")]
    Closed,
    /// The engine was made by a parent of this process.
    #[error(
        "this engine was made before a fork, in process {parent}; make a new one in this process"
    )]
    ForkedProcess {
        /// The process that made it.
        parent: u32,
    },
    /// The operating system said no.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        error: Arc<io::Error>,
    },
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        Self::Gpu(Box::new(error))
    }
}

/// The request that an error is about, in front of what happened.
struct Of<'a>(Option<&'a Subject>);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |subject| write!(f, "{subject}: "))
    }
}

/// What to do about an address that the CPU cannot touch.
struct Advice<'a>(&'a str);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("; check the address and length")?;
        if self.0.is_empty() {
            Ok(())
        } else {
            write!(f, ", or, if it is memory of a GPU: {}", self.0)
        }
    }
}

impl Error {
    /// A number for programs, C and metric labels; a number is never used twice. `docs/errors.md` has all of them.
    #[must_use]
    pub fn code(&self) -> u32 {
        self.code_and_name().0
    }

    /// Its name, such as `TimedOut`, for logs and metric labels.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.code_and_name().1
    }

    fn code_and_name(&self) -> (u32, &'static str) {
        match self {
            Self::Config(_) => (1, "Config"),
            Self::Name(_) => (2, "Name"),
            Self::BadArgument { .. } => (3, "BadArgument"),
            Self::Overlap { .. } => (4, "Overlap"),
            Self::NotRegistered { .. } => (5, "NotRegistered"),
            Self::StillInUse { .. } => (6, "StillInUse"),
            Self::PeerUnreachable { .. } => (7, "PeerUnreachable"),
            Self::Refused(_) => (8, "Refused"),
            Self::RangeNotPublished(_) => (9, "RangeNotPublished"),
            Self::ConnectionLost { .. } => (10, "ConnectionLost"),
            Self::OutcomeUnknown { .. } => (11, "OutcomeUnknown"),
            Self::BadLocalAddress { .. } => (12, "BadLocalAddress"),
            Self::TimedOut { .. } => (13, "TimedOut"),
            Self::Cancelled { .. } => (14, "Cancelled"),
            Self::Unregistered(_) => (15, "Unregistered"),
            Self::Protocol { .. } => (16, "Protocol"),
            Self::BadAnswer { .. } => (17, "BadAnswer"),
            Self::NotifyFailed { .. } => (18, "NotifyFailed"),
            Self::NotifyTooLarge { .. } => (19, "NotifyTooLarge"),
            Self::Busy { .. } => (20, "Busy"),
            Self::PortsExhausted { .. } => (21, "PortsExhausted"),
            Self::UnknownBatch { .. } => (22, "UnknownBatch"),
            Self::Closed => (23, "Closed"),
            Self::ForkedProcess { .. } => (24, "ForkedProcess"),
            Self::Io { .. } => (25, "Io"),
            Self::Unmapped { .. } => (26, "Unmapped"),
            Self::Gpu(_) => (27, "Gpu"),
            Self::DeviceCopy { .. } => (28, "DeviceCopy"),
            Self::DeviceStuck { .. } => (29, "DeviceStuck"),
            Self::NoDeviceAnswer { .. } => (30, "NoDeviceAnswer"),
            Self::WrongLocation { .. } => (31, "WrongLocation"),
            Self::Reallocated { .. } => (32, "Reallocated"),
            Self::StreamCaptured { .. } => (33, "StreamCaptured"),
        }
    }

    /// Whether the same call can succeed later with no change on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::PeerUnreachable { .. }
                | Self::ConnectionLost { .. }
                | Self::OutcomeUnknown { .. }
                | Self::TimedOut { .. }
                | Self::NotifyFailed { .. }
                | Self::Busy { .. }
                | Self::StillInUse { .. }
                | Self::NoDeviceAnswer { .. }
        )
    }

    /// Which request it is about, if it is about one.
    #[must_use]
    pub fn subject(&self) -> Option<&Subject> {
        match self {
            Self::Refused(subject)
            | Self::RangeNotPublished(subject)
            | Self::Unregistered(subject)
            | Self::DeviceCopy { subject, .. }
            | Self::ConnectionLost { subject, .. }
            | Self::OutcomeUnknown { subject, .. }
            | Self::BadLocalAddress { subject, .. }
            | Self::TimedOut { subject, .. }
            | Self::Cancelled { subject, .. }
            | Self::Protocol { subject, .. } => Some(subject),
            Self::DeviceStuck { subject, .. }
            | Self::PeerUnreachable { subject, .. }
            | Self::BadAnswer { subject, .. } => subject.as_deref(),
            _ => None,
        }
    }

    /// The segment name of the peer that it is about, if it is about one.
    #[must_use]
    pub fn peer(&self) -> Option<&str> {
        match self {
            Self::PeerUnreachable { peer, .. }
            | Self::BadAnswer { peer, .. }
            | Self::NotifyFailed { peer, .. }
            | Self::Busy { peer, .. } => Some(peer),
            error => error.subject().map(|subject| &*subject.peer),
        }
    }

    /// The same about one request, if it was about a peer only.
    pub(crate) fn about(mut self, request: Box<Subject>) -> Self {
        if let Self::PeerUnreachable { subject, .. } | Self::BadAnswer { subject, .. } = &mut self {
            *subject = Some(request);
        }
        self
    }

    pub(crate) fn bad_argument(what: impl Into<String>) -> Self {
        Self::BadArgument { what: what.into() }
    }

    pub(crate) fn io(what: impl Into<String>, error: io::Error) -> Self {
        Self::Io { what: what.into(), error: Arc::new(error) }
    }
}

#[cfg(test)]
mod tests;
