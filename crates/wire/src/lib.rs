//! What tensorferry and its peers put on the wire.
//!
//! The protocol is the one of Mooncake's TransferEngine over TCP. Two kinds of stream are laid out
//! and read here: the data plane, which moves payloads ([`Header`], [`RequestReader`] at the
//! target, [`ReplyReader`] at the initiator), and the control port, which exchanges JSON
//! ([`FrameReader`], [`SegmentDescriptor`], [`Notification`]).
//!
//! The crate does no IO and reads no clock. It never holds a payload: readers say where the next
//! bytes belong, and whoever owns the socket puts them there. A stream may be cut anywhere without
//! a difference in what is read from it. Nothing that a peer sends makes it panic, or allocate out
//! of proportion to what was sent.
//!
//! ```
//! use tensorferry_wire::{Header, Inbound, Op, RequestReader, Version};
//!
//! let header = Header { op: Op::Write, version: Version::V2, addr: 0x6000_0000_0000, len: 5 };
//! let stream = [&header.encode()[..], b"hello"].concat();
//!
//! let mut reader = RequestReader::new();
//! let (taken, event) = reader.feed(&stream)?;
//! assert_eq!(event, Some(Inbound::Request(header)));
//! let (_, event) = reader.feed(&stream[taken..])?;
//! assert_eq!(event, Some(Inbound::Payload { offset: 0, bytes: b"hello", last: true }));
//! # Ok::<(), tensorferry_wire::WireError>(())
//! ```
#![forbid(unsafe_code)]

mod control;
mod descriptor;
mod error;
mod header;
mod inbound;
mod json;
mod messages;
mod outbound;

pub use control::{
    CONTROL_PREFIX_LEN, DEFAULT_ACCEPT_LIMIT, DEFAULT_SEND_LIMIT, Frame, FrameKind, FrameReader,
    MessageType, encode_frame,
};
pub use descriptor::{BufferDescriptor, Encoded, FerryKey, SegmentDescriptor};
pub use error::WireError;
pub use header::{HEADER_LEN, Header, Op, STATUS_LEN, Status, Version};
pub use inbound::{Inbound, RequestReader};
pub use messages::{
    Notification, check_connection_request, connection_reply, is_notify_success, is_probe_success,
    notify_reply, probe_reply, probe_request,
};
pub use outbound::{Expected, ReplyEvent, ReplyReader, ReplyWant};
