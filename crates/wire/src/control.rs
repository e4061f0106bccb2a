//! The frames of the control port.
//!
//! ```text
//! typed    len u64 | type u8 | JSON, len - 1 bytes
//! legacy   len u64 | JSON, len bytes
//! ```

use crate::WireError;

/// Length of what precedes the counted bytes of a control frame.
pub const CONTROL_PREFIX_LEN: usize = 8;
/// The longest frame that every released peer accepts, counted with its type byte.
pub const DEFAULT_SEND_LIMIT: u64 = 1 << 20;
/// The longest frame that is accepted here by default, counted with its type byte.
pub const DEFAULT_ACCEPT_LIMIT: u64 = 16 << 20;

const TYPE_LEN: usize = 1;
/// The least and the most room that is reserved ahead of what has arrived. The bound keeps an
/// announced length from costing memory; the growth keeps small reads from costing copies.
const RESERVE_MIN: usize = 256;
const RESERVE_MAX: usize = 256 << 10;

/// What a typed control frame asks for, or answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MessageType {
    /// An RDMA handshake; TCP initiators never send one.
    Connection,
    /// A request for the segment descriptor.
    Metadata,
    /// A notification.
    Notify,
    /// A sign of life.
    Probe,
}

impl MessageType {
    fn byte(self) -> u8 {
        match self {
            Self::Connection => 0,
            Self::Metadata => 1,
            Self::Notify => 2,
            Self::Probe => 3,
        }
    }
}

/// How a control frame is labelled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FrameKind {
    /// With a type byte before the JSON.
    Typed(MessageType),
    /// Of the protocol before type bytes: the whole body is JSON.
    ///
    /// It is a connection handshake, and is answered in the same form.
    Legacy,
}

impl FrameKind {
    /// Tells the kind by the first counted byte.
    fn of(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            0 => Self::Typed(MessageType::Connection),
            1 => Self::Typed(MessageType::Metadata),
            2 => Self::Typed(MessageType::Notify),
            3 => Self::Typed(MessageType::Probe),
            4..=0x7f => Self::Legacy,
            _ => return Err(WireError::UnknownMessage { byte }),
        })
    }

    fn type_len(self) -> usize {
        match self {
            Self::Typed(_) => TYPE_LEN,
            Self::Legacy => 0,
        }
    }
}

/// A control frame that has arrived whole.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frame {
    /// How it is labelled.
    pub kind: FrameKind,
    /// The bytes in the place of its JSON; not looked at yet.
    pub body: Vec<u8>,
}

/// Lays a control frame out for sending.
#[must_use]
pub fn encode_frame(kind: FrameKind, json: &[u8]) -> Vec<u8> {
    let counted = kind.type_len() + json.len();
    let mut bytes = Vec::with_capacity(CONTROL_PREFIX_LEN + counted);
    bytes.extend_from_slice(&(counted as u64).to_le_bytes());
    if let FrameKind::Typed(message) = kind {
        bytes.push(message.byte());
    }
    bytes.extend_from_slice(json);
    bytes
}

/// Reads control frames from a stream that may be cut anywhere.
///
/// It holds no more than what was fed and a constant, whatever length a peer announces. After an
/// error the connection has no defined continuation, and the reader is of no more use.
#[derive(Debug)]
pub struct FrameReader {
    accept_limit: u64,
    prefix: [u8; CONTROL_PREFIX_LEN],
    have: usize,
    kind: Option<FrameKind>,
    body: Vec<u8>,
}

impl FrameReader {
    /// Accepts frames of up to `accept_limit` bytes, counted with their type byte.
    #[must_use]
    pub fn new(accept_limit: u64) -> Self {
        Self {
            accept_limit,
            prefix: [0; CONTROL_PREFIX_LEN],
            have: 0,
            kind: None,
            body: Vec::new(),
        }
    }

    /// Consumes a part of `input`; returns how much, and a frame if one is complete.
    ///
    /// # Errors
    /// [`WireError::FrameLength`] as soon as the length is known, and
    /// [`WireError::UnknownMessage`] as soon as the type is.
    pub fn feed(&mut self, input: &[u8]) -> Result<(usize, Option<Frame>), WireError> {
        let mut taken = input.len().min(CONTROL_PREFIX_LEN - self.have);
        self.prefix[self.have..][..taken].copy_from_slice(&input[..taken]);
        self.have += taken;
        if self.have < CONTROL_PREFIX_LEN {
            return Ok((taken, None));
        }
        let counted = self.counted_len()?;
        let Some(&next) = input.get(taken) else {
            return Ok((taken, None));
        };
        let kind = match self.kind {
            Some(kind) => kind,
            None => {
                let kind = FrameKind::of(next)?;
                self.kind = Some(kind);
                taken += kind.type_len();
                kind
            }
        };
        let missing = counted - kind.type_len() - self.body.len();
        let bytes = &input[taken..][..missing.min(input.len() - taken)];
        self.append(bytes, missing);
        taken += bytes.len();
        if bytes.len() < missing {
            return Ok((taken, None));
        }
        (self.have, self.kind) = (0, None);
        Ok((taken, Some(Frame { kind, body: std::mem::take(&mut self.body) })))
    }

    /// How many bytes of a body have arrived and are kept.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.body.len()
    }

    /// Whether a frame has begun to arrive and is incomplete.
    #[must_use]
    pub fn started(&self) -> bool {
        self.have > 0
    }

    fn counted_len(&self) -> Result<usize, WireError> {
        let len = u64::from_le_bytes(self.prefix);
        let refused = WireError::FrameLength { len, limit: self.accept_limit };
        if len == 0 || len > self.accept_limit {
            return Err(refused);
        }
        usize::try_from(len).map_err(|_| refused)
    }

    fn append(&mut self, bytes: &[u8], missing: usize) {
        if self.body.capacity() - self.body.len() < bytes.len() {
            let ahead = (self.body.len() + bytes.len()).clamp(RESERVE_MIN, RESERVE_MAX);
            self.body.reserve_exact(missing.min(bytes.len() + ahead));
        }
        self.body.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PROBE: FrameKind = FrameKind::Typed(MessageType::Probe);

    fn reader() -> FrameReader {
        FrameReader::new(DEFAULT_ACCEPT_LIMIT)
    }

    #[test]
    fn the_length_counts_the_type_byte_and_is_bounded_on_both_sides() {
        let mut reader = FrameReader::new(4);
        let frame = encode_frame(PROBE, b"{}\n");
        assert_eq!(frame[..CONTROL_PREFIX_LEN], 4u64.to_le_bytes());
        let expected = Frame { kind: PROBE, body: b"{}\n".to_vec() };
        assert_eq!(reader.feed(&frame), Ok((frame.len(), Some(expected))));
        assert!(!reader.started());
        for len in [0, 5, u64::MAX] {
            let error = WireError::FrameLength { len, limit: 4 };
            assert_eq!(FrameReader::new(4).feed(&len.to_le_bytes()), Err(error));
        }
    }

    #[test]
    fn the_first_counted_byte_tells_the_kind() {
        for byte in 0..=u8::MAX {
            let mut bytes = 2u64.to_le_bytes().to_vec();
            bytes.extend([byte, b'x']);
            let got = reader().feed(&bytes);
            match byte {
                0..=3 => {
                    let frame = got.unwrap().1.unwrap();
                    assert_eq!(frame.body, b"x");
                    assert_eq!(encode_frame(frame.kind, &frame.body), bytes);
                }
                4..=0x7f => {
                    let body = vec![byte, b'x'];
                    assert_eq!(got.unwrap().1, Some(Frame { kind: FrameKind::Legacy, body }));
                }
                _ => assert_eq!(got, Err(WireError::UnknownMessage { byte })),
            }
        }
    }

    #[test]
    fn a_type_byte_alone_is_a_frame_with_an_empty_body() {
        let bytes = encode_frame(PROBE, b"");
        let frame = Frame { kind: PROBE, body: Vec::new() };
        assert_eq!(reader().feed(&bytes), Ok((CONTROL_PREFIX_LEN + 1, Some(frame))));
    }

    #[test]
    fn a_frame_is_left_where_the_next_one_starts() {
        let mut reader = reader();
        let two = [encode_frame(PROBE, b"{}"), encode_frame(PROBE, b"[]")].concat();
        let (taken, first) = reader.feed(&two).unwrap();
        assert_eq!((taken, first.unwrap().body), (two.len() / 2, b"{}".to_vec()));
        let (_, second) = reader.feed(&two[taken..]).unwrap();
        assert_eq!(second.unwrap().body, b"[]");
    }

    proptest! {
        #[test]
        fn memory_follows_what_arrived_not_what_was_announced(
            announced in 1..=DEFAULT_ACCEPT_LIMIT,
            parts in prop::collection::vec(1..100_000usize, 0..40),
        ) {
            let mut reader = reader();
            reader.feed(&announced.to_le_bytes()).unwrap();
            let mut fed = 0;
            for part in parts {
                let (taken, frame) = reader.feed(&vec![0; part]).unwrap();
                fed += taken;
                if frame.is_some() {
                    break;
                }
                prop_assert!(reader.body.capacity() <= fed + RESERVE_MAX);
            }
        }
    }
}
