//! The fixed-size frames of the data plane.
//!
//! ```text
//! request   len u64 | addr u64 | opcode u8 | padding, 7 bytes
//! status    code u32 | magic "VTCM", which is "MCTV" read as a little-endian u32
//! ```
//!
//! All integers are little-endian. The padding is part of what is sent.

use crate::WireError;

/// Length of a request header, padding included.
pub const HEADER_LEN: usize = 24;
/// Length of a status frame.
pub const STATUS_LEN: usize = 8;

const OPCODE_AT: usize = 16;
const READ: u8 = 0x00;
const WRITE: u8 = 0x01;
const V2: u8 = 0x80;
const READ_V2: u8 = READ | V2;
const WRITE_V2: u8 = WRITE | V2;

const STATUS_MAGIC: u32 = u32::from_be_bytes(*b"MCTV");
const APPLIED: u32 = 0;
const REJECTED: u32 = 1;

/// Which way the payload goes, seen from the initiator.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Hash)]
pub enum Op {
    /// From the target's memory to the initiator.
    Read,
    /// From the initiator to the target's memory.
    Write,
}

/// Which framing a request asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Ord, PartialOrd, Hash)]
pub enum Version {
    /// Without status frames: a WRITE is not answered at all, a READ only with its payload.
    V1,
    /// Each request is answered with a status frame.
    V2,
}

/// The header that starts each request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Header {
    /// What is asked for.
    pub op: Op,
    /// How it is answered.
    pub version: Version,
    /// An address in the target's process.
    pub addr: u64,
    /// Payload length in bytes.
    pub len: u64,
}

impl Header {
    /// Lays the header out for sending; the padding is zero.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..OPCODE_AT].copy_from_slice(&self.addr.to_le_bytes());
        bytes[OPCODE_AT] = opcode(self.op, self.version);
        bytes
    }

    /// Reads a header; whatever is in the padding is ignored.
    ///
    /// A length of zero and a range that wraps are not errors here: they are well framed, and the
    /// target answers them with [`Status::Rejected`].
    ///
    /// # Errors
    /// [`WireError::UnknownOpcode`]. Released peers serve unknown operations as READ; answering
    /// with memory what was never asked for is not copied.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let (op, version) = match bytes[OPCODE_AT] {
            READ => (Op::Read, Version::V1),
            WRITE => (Op::Write, Version::V1),
            READ_V2 => (Op::Read, Version::V2),
            WRITE_V2 => (Op::Write, Version::V2),
            byte => return Err(WireError::UnknownOpcode { byte }),
        };
        Ok(Self { op, version, addr: u64_at(bytes, 8), len: u64_at(bytes, 0) })
    }
}

/// The target's answer to a v2 request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Status {
    /// WRITE: the whole payload is in place. READ: the payload follows.
    Applied,
    /// The range is not served; the connection is closed after this frame.
    Rejected,
}

impl Status {
    /// Lays the status frame out for sending.
    #[must_use]
    pub const fn encode(self) -> [u8; STATUS_LEN] {
        let code = match self {
            Self::Applied => APPLIED,
            Self::Rejected => REJECTED,
        };
        ((STATUS_MAGIC as u64) << u32::BITS | code as u64).to_le_bytes()
    }

    /// Reads a status frame.
    ///
    /// # Errors
    /// [`WireError::NotAStatus`] without the magic, [`WireError::UnknownStatus`] for a code that
    /// does not exist.
    pub fn parse(bytes: &[u8; STATUS_LEN]) -> Result<Self, WireError> {
        let [c0, c1, c2, c3, magic @ ..] = *bytes;
        if u32::from_le_bytes(magic) != STATUS_MAGIC {
            return Err(WireError::NotAStatus);
        }
        match u32::from_le_bytes([c0, c1, c2, c3]) {
            APPLIED => Ok(Self::Applied),
            REJECTED => Ok(Self::Rejected),
            code => Err(WireError::UnknownStatus { code }),
        }
    }
}

fn opcode(op: Op, version: Version) -> u8 {
    match (op, version) {
        (Op::Read, Version::V1) => READ,
        (Op::Write, Version::V1) => WRITE,
        (Op::Read, Version::V2) => READ_V2,
        (Op::Write, Version::V2) => WRITE_V2,
    }
}

fn u64_at(bytes: &[u8; HEADER_LEN], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header =
        Header { op: Op::Write, version: Version::V2, addr: 0x6000_0000_0007, len: 1 };

    #[test]
    fn padding_is_sent_as_zeros_and_ignored_on_arrival() {
        let mut bytes = HEADER.encode();
        assert_eq!(bytes[OPCODE_AT + 1..], [0; 7]);
        bytes[OPCODE_AT + 1..].fill(0xff);
        assert_eq!(Header::parse(&bytes), Ok(HEADER));
    }

    #[test]
    fn every_opcode_is_known_or_refused() {
        for byte in 0..=u8::MAX {
            let mut bytes = HEADER.encode();
            bytes[OPCODE_AT] = byte;
            match Header::parse(&bytes) {
                Ok(header) => assert_eq!(header.encode(), bytes),
                Err(error) => assert_eq!(error, WireError::UnknownOpcode { byte }),
            }
        }
        assert_eq!(
            WireError::UnknownOpcode { byte: 0xff }.to_string(),
            "opcode 0xff in a 24-byte request header, expected READ (0x00, 0x80) or WRITE (0x01, \
             0x81)"
        );
    }

    #[test]
    fn zero_length_and_wrapping_ranges_are_left_to_the_target() {
        for (addr, len) in [(1, 0), (u64::MAX, u64::MAX)] {
            let header = Header { addr, len, ..HEADER };
            assert_eq!(Header::parse(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn a_status_frame_is_checked_in_both_halves() {
        for status in [Status::Applied, Status::Rejected] {
            assert_eq!(Status::parse(&status.encode()), Ok(status));
        }
        assert_eq!(Status::parse(&[0; STATUS_LEN]), Err(WireError::NotAStatus));
        assert_eq!(Status::parse(b"\x02\0\0\0VTCM"), Err(WireError::UnknownStatus { code: 2 }));
    }
}
