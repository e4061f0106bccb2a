use crate::{HEADER_LEN, Header, Op, WireError};

/// Reads the requests that arrive at a target.
///
/// The stream may be cut anywhere. While the payload of a WRITE is owed there are two ways to take
/// it: [`feed`](Self::feed) hands out what is in a receive buffer, and
/// [`advance_payload`](Self::advance_payload) reports bytes that were received straight into place.
/// Both may be mixed within one payload.
///
/// After an error the connection has no defined continuation, and the reader is of no more use.
#[derive(Debug, Default)]
pub struct RequestReader {
    head: [u8; HEADER_LEN],
    have: usize,
    /// Of the current WRITE; both are zero when a header is next.
    payload_len: u64,
    payload_done: u64,
}

/// What [`RequestReader::feed`] found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Inbound<'a> {
    /// A header is complete.
    Request(Header),
    /// Bytes of the payload of the last WRITE request.
    Payload {
        /// Where in the payload they belong.
        offset: u64,
        /// The bytes, as they lie in the input.
        bytes: &'a [u8],
        /// Whether they complete the payload.
        last: bool,
    },
}

impl RequestReader {
    /// Starts at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Consumes a part of `input`; returns how much, and at most one event.
    ///
    /// Call it again with the rest until the rest is empty. A WRITE of length zero has no payload
    /// event.
    ///
    /// # Errors
    /// What [`Header::parse`] refuses.
    // Once per request in a loop of the engine: a call costs it a twelfth more instructions, and without this it depends on
    // how the crates are cut into units whether there is one.
    #[inline(always)]
    pub fn feed<'a>(&mut self, input: &'a [u8]) -> Result<(usize, Option<Inbound<'a>>), WireError> {
        if input.is_empty() {
            return Ok((0, None));
        }
        if self.payload_left() > 0 {
            let bytes = &input[..at_most(input.len(), self.payload_left())];
            let offset = self.payload_done;
            let last = self.advance_payload(bytes.len() as u64);
            return Ok((bytes.len(), Some(Inbound::Payload { offset, bytes, last })));
        }
        let taken = input.len().min(HEADER_LEN - self.have);
        self.head[self.have..][..taken].copy_from_slice(&input[..taken]);
        self.have += taken;
        if self.have < HEADER_LEN {
            return Ok((taken, None));
        }
        let header = Header::parse(&self.head)?;
        self.have = 0;
        if header.op == Op::Write {
            self.payload_len = header.len;
        }
        Ok((taken, Some(Inbound::Request(header))))
    }

    /// Payload bytes of the current WRITE that have not arrived; zero when a header is next.
    #[must_use]
    pub fn payload_left(&self) -> u64 {
        self.payload_len - self.payload_done
    }

    /// Where the next payload byte belongs; zero when a header is next.
    #[must_use]
    pub fn payload_offset(&self) -> u64 {
        self.payload_done
    }

    /// Reports `n` payload bytes that were received in place; true if they complete the payload.
    ///
    /// # Panics
    /// If `n` is more than [`payload_left`](Self::payload_left).
    pub fn advance_payload(&mut self, n: u64) -> bool {
        assert!(n <= self.payload_left(), "more payload was received than the request has");
        self.payload_done += n;
        let last = n > 0 && self.payload_left() == 0;
        if last {
            (self.payload_len, self.payload_done) = (0, 0);
        }
        last
    }

    /// Whether a header has begun to arrive and is incomplete.
    #[must_use]
    pub fn header_pending(&self) -> bool {
        (1..HEADER_LEN).contains(&self.have)
    }
}

fn at_most(len: usize, limit: u64) -> usize {
    usize::try_from(limit).map_or(len, |limit| len.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Version;

    fn write(len: u64) -> Header {
        Header { op: Op::Write, version: Version::V2, addr: 0x1000, len }
    }

    #[test]
    fn a_payload_may_be_fed_and_received_in_place_by_turns() {
        let mut reader = RequestReader::new();
        assert_eq!(
            reader.feed(&write(6).encode()),
            Ok((HEADER_LEN, Some(Inbound::Request(write(6)))))
        );
        assert!(!reader.advance_payload(2));
        assert_eq!((reader.payload_offset(), reader.payload_left()), (2, 4));
        let fed = Inbound::Payload { offset: 2, bytes: b"c", last: false };
        assert_eq!(reader.feed(b"c"), Ok((1, Some(fed))));
        assert!(!reader.advance_payload(0));
        assert!(reader.advance_payload(3));
        assert_eq!((reader.payload_offset(), reader.payload_left()), (0, 0));
    }

    #[test]
    fn a_payload_ends_where_the_next_header_starts() {
        let mut reader = RequestReader::new();
        reader.feed(&write(2).encode()).unwrap();
        let fed = Inbound::Payload { offset: 0, bytes: b"ab", last: true };
        assert_eq!(reader.feed(b"abc"), Ok((2, Some(fed))));
        assert!(!reader.header_pending());
        assert_eq!(reader.feed(b"c"), Ok((1, None)));
        assert!(reader.header_pending());
    }

    #[test]
    fn no_payload_is_expected_of_a_read_or_of_an_empty_write() {
        let read = Header { op: Op::Read, ..write(9) };
        let mut reader = RequestReader::new();
        for header in [read, write(0)] {
            let event = Some(Inbound::Request(header));
            assert_eq!(reader.feed(&header.encode()), Ok((HEADER_LEN, event)));
            assert_eq!(reader.payload_left(), 0);
        }
    }

    #[test]
    fn a_payload_of_any_length_is_only_counted() {
        let mut reader = RequestReader::new();
        reader.feed(&write(u64::MAX).encode()).unwrap();
        assert!(!reader.advance_payload(u64::MAX - 1));
        assert!(reader.advance_payload(1));
    }

    #[test]
    fn an_error_stays() {
        let mut reader = RequestReader::new();
        let error = Err(WireError::UnknownOpcode { byte: 0xff });
        assert_eq!(reader.feed(&[0xff; HEADER_LEN]), error);
        assert_eq!(reader.feed(b"more"), error);
        assert!(!reader.header_pending());
    }

    #[test]
    #[should_panic(expected = "more payload was received than the request has")]
    fn advancing_past_the_payload_is_a_bug_of_the_caller() {
        RequestReader::new().advance_payload(1);
    }
}
