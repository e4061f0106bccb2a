use crate::{Op, STATUS_LEN, Status, Version, WireError};

/// The request that is answered next, as the initiator remembers it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Expected {
    /// What was asked for.
    pub op: Op,
    /// The framing that was asked for.
    pub version: Version,
    /// Payload length in bytes.
    pub len: u64,
}

/// What an initiator has to receive next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReplyWant {
    /// Bytes of a status frame, for [`ReplyReader::status_bytes`].
    Status {
        /// How many are missing.
        missing: usize,
    },
    /// Bytes of a READ payload, to be received in place and reported with
    /// [`ReplyReader::advance_payload`].
    Payload {
        /// Where in the payload the next byte belongs.
        offset: u64,
        /// How many are missing.
        len: u64,
    },
    /// No answer comes: the request is a v1 WRITE, or a v1 READ of nothing.
    Nothing,
}

/// What arrived bytes mean for the request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReplyEvent {
    /// The answer is not complete.
    NeedMore,
    /// The WRITE was applied, or the READ's payload is complete.
    Applied,
    /// The target refused the request and closes the connection.
    Rejected,
    /// The READ is served: its payload follows.
    PayloadNext,
}

/// Reads the answers that arrive at an initiator.
///
/// Answers carry no ids and come in the order of the requests, so each call names the request
/// whose answer is next. Hand in the same one until its event is [`ReplyEvent::Applied`] or
/// [`ReplyEvent::Rejected`]; the reader is then ready for the answer after it.
#[derive(Debug, Default)]
pub struct ReplyReader {
    status: [u8; STATUS_LEN],
    have: usize,
    /// An OK arrived, and the payload is owed.
    served: bool,
    payload_done: u64,
}

impl ReplyReader {
    /// Starts at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says what has to be received next for `expected`.
    #[must_use]
    pub fn want(&self, expected: &Expected) -> ReplyWant {
        match (expected.version, expected.op) {
            (Version::V2, _) if !self.served => {
                ReplyWant::Status { missing: STATUS_LEN - self.have }
            }
            (_, Op::Read) if expected.len > self.payload_done => ReplyWant::Payload {
                offset: self.payload_done,
                len: expected.len - self.payload_done,
            },
            _ => ReplyWant::Nothing,
        }
    }

    /// Whether the payload of a READ is arriving.
    #[must_use]
    pub fn is_in_payload(&self) -> bool {
        self.served || self.payload_done > 0
    }

    /// Consumes at most the missing bytes of the status frame; returns how many, and their meaning.
    ///
    /// # Errors
    /// What [`Status::parse`] refuses; the stream has then no defined continuation.
    ///
    /// # Panics
    /// If [`want`](Self::want) does not ask for a status.
    pub fn status_bytes(
        &mut self,
        expected: &Expected,
        input: &[u8],
    ) -> Result<(usize, ReplyEvent), WireError> {
        let ReplyWant::Status { missing } = self.want(expected) else {
            panic!("status bytes were offered where none are due");
        };
        let taken = input.len().min(missing);
        self.status[self.have..][..taken].copy_from_slice(&input[..taken]);
        self.have += taken;
        if self.have < STATUS_LEN {
            return Ok((taken, ReplyEvent::NeedMore));
        }
        let event = match (Status::parse(&self.status)?, expected.op) {
            (Status::Applied, Op::Read) if expected.len > 0 => ReplyEvent::PayloadNext,
            (Status::Applied, _) => ReplyEvent::Applied,
            (Status::Rejected, _) => ReplyEvent::Rejected,
        };
        self.reset();
        self.served = event == ReplyEvent::PayloadNext;
        Ok((taken, event))
    }

    /// Reports `n` payload bytes that were received in place.
    ///
    /// # Panics
    /// If [`want`](Self::want) does not ask for that many payload bytes.
    pub fn advance_payload(&mut self, expected: &Expected, n: u64) -> ReplyEvent {
        let ReplyWant::Payload { len, .. } = self.want(expected) else {
            panic!("payload bytes were reported where none are due");
        };
        assert!(n <= len, "more payload was received than was asked for");
        if n < len {
            self.payload_done += n;
            return ReplyEvent::NeedMore;
        }
        self.reset();
        ReplyEvent::Applied
    }

    /// Whether nothing of the next answer has arrived.
    #[must_use]
    pub fn idle(&self) -> bool {
        self.have == 0 && !self.served && self.payload_done == 0
    }

    fn reset(&mut self) {
        (self.have, self.served, self.payload_done) = (0, false, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Expected = Expected { op: Op::Read, version: Version::V2, len: 5 };
    const WRITE: Expected = Expected { op: Op::Write, version: Version::V2, len: 5 };

    #[test]
    fn a_read_takes_a_status_and_then_its_payload() {
        let mut reader = ReplyReader::new();
        let (first, rest) = (&Status::Applied.encode()[..3], &Status::Applied.encode()[3..]);
        assert_eq!(reader.status_bytes(&READ, first), Ok((3, ReplyEvent::NeedMore)));
        assert!(!reader.idle());
        assert_eq!(reader.want(&READ), ReplyWant::Status { missing: 5 });
        assert_eq!(reader.status_bytes(&READ, rest), Ok((5, ReplyEvent::PayloadNext)));
        assert!(!reader.idle());
        assert_eq!(reader.advance_payload(&READ, 2), ReplyEvent::NeedMore);
        assert_eq!(reader.want(&READ), ReplyWant::Payload { offset: 2, len: 3 });
        assert_eq!(reader.advance_payload(&READ, 3), ReplyEvent::Applied);
        assert!(reader.idle());
    }

    #[test]
    fn a_status_leaves_the_bytes_behind_it() {
        let mut reader = ReplyReader::new();
        let two = [Status::Applied.encode(), Status::Rejected.encode()].concat();
        assert_eq!(reader.status_bytes(&WRITE, &two), Ok((STATUS_LEN, ReplyEvent::Applied)));
        let second = reader.status_bytes(&READ, &two[STATUS_LEN..]);
        assert_eq!(second, Ok((STATUS_LEN, ReplyEvent::Rejected)));
        assert!(reader.idle());
    }

    #[test]
    fn v1_has_no_status_and_a_v1_write_no_answer() {
        let mut reader = ReplyReader::new();
        let read = Expected { version: Version::V1, ..READ };
        assert_eq!(reader.want(&read), ReplyWant::Payload { offset: 0, len: 5 });
        assert_eq!(reader.advance_payload(&read, 5), ReplyEvent::Applied);
        let write = Expected { version: Version::V1, ..WRITE };
        assert_eq!(reader.want(&write), ReplyWant::Nothing);
    }

    #[test]
    fn a_read_of_nothing_is_complete_with_its_status() {
        let mut reader = ReplyReader::new();
        let read = Expected { len: 0, ..READ };
        let event = reader.status_bytes(&read, &Status::Applied.encode());
        assert_eq!(event, Ok((STATUS_LEN, ReplyEvent::Applied)));
        let v1 = Expected { version: Version::V1, ..read };
        assert_eq!(reader.want(&v1), ReplyWant::Nothing);
    }

    #[test]
    fn a_peer_without_v2_is_told_by_its_first_eight_bytes() {
        let mut reader = ReplyReader::new();
        assert_eq!(reader.status_bytes(&READ, b"HTTP/1.1"), Err(WireError::NotAStatus));
    }
}
