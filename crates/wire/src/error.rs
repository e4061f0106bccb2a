use crate::control::FrameKind;
use crate::header::HEADER_LEN;

/// What is wrong with bytes that a peer sent.
///
/// After one of these a stream has no defined continuation: its connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// A request header carries an operation that does not exist.
    #[error(
        "opcode {byte:#04x} in a {HEADER_LEN}-byte request header, expected READ (0x00, 0x80) or \
         WRITE (0x01, 0x81)"
    )]
    UnknownOpcode {
        /// The byte in the opcode's place.
        byte: u8,
    },
    /// The eight bytes in the place of a status frame are something else.
    #[error(
        "a status frame was expected, but the bytes that arrived lack its magic \"MCTV\"; the peer \
         does not speak protocol v2"
    )]
    NotAStatus,
    /// A status frame carries a code that does not exist.
    #[error("status code {code} arrived, expected 0 (applied) or 1 (rejected)")]
    UnknownStatus {
        /// The low half of the frame.
        code: u32,
    },
    /// Bytes arrived that answer nothing.
    #[error("bytes arrived that no request asked for")]
    Unasked,
    /// A WRITE was acknowledged while its payload was still leaving.
    #[error("a WRITE was acknowledged before all of its payload had been sent")]
    TooEarly,
    /// A control frame announces a length that is not accepted.
    #[error("a control frame announces {len} bytes, expected 1 to {limit}")]
    FrameLength {
        /// The announced length, which counts the type byte.
        len: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// A control frame's type byte is not known.
    #[error(
        "type byte {byte:#04x} in a control frame, expected 0x00 to 0x03, or JSON without a type \
         byte"
    )]
    UnknownMessage {
        /// The byte in the type's place.
        byte: u8,
    },
    /// A control frame is not of the kind that was asked with.
    #[error("a control frame of kind {got:?} arrived, which was not asked for")]
    OtherKind {
        /// Its kind.
        got: FrameKind,
    },
    /// The body of a message is not JSON, or is nested too deeply.
    #[error("expected JSON: {reason}")]
    Json {
        /// What the parser met, and where.
        reason: String,
    },
    /// The body of a message is JSON of another shape.
    #[error("{what}")]
    Shape {
        /// The key, what is there, and what was expected there.
        what: String,
    },
    /// A segment descriptor is of a transport that is not spoken here.
    #[error("the descriptor's protocol is {got:?}, expected \"tcp\"")]
    Protocol {
        /// The first characters of the descriptor's `protocol`; empty if it has none.
        got: String,
    },
}
