//! What goes over one data connection, as far as it is needed to say which WRITEs may be sent again.

use std::collections::VecDeque;

use tensorferry_wire::{HEADER_LEN, Header, Op, STATUS_LEN, Status, Version};

/// Reads both directions of a connection as they pass.
#[derive(Default)]
pub(super) struct Tap {
    header: Vec<u8>,
    /// Payload of the last WRITE that has not passed.
    payload: u64,
    requests: usize,
    /// Requests without an answer, and the place of the first of them.
    unanswered: VecDeque<Header>,
    answered: usize,
    status: Vec<u8>,
    /// Payload of the READ that is being answered.
    reading: u64,
    refused: Option<usize>,
}

/// A WRITE that has begun.
pub(super) struct Asked {
    pub(super) addr: u64,
    pub(super) len: u64,
    /// Which of the connection's requests it is.
    pub(super) index: usize,
}

impl Tap {
    /// Bytes were taken from the initiator; returns the WRITEs that begin in them.
    pub(super) fn asked(&mut self, mut bytes: &[u8]) -> Vec<Asked> {
        let mut begun = Vec::new();
        while !bytes.is_empty() {
            if self.payload > 0 {
                let n = self.payload.min(bytes.len() as u64);
                (self.payload, bytes) = (self.payload - n, &bytes[n as usize..]);
                continue;
            }
            let n = (HEADER_LEN - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.header.len() < HEADER_LEN {
                continue;
            }
            let whole = std::mem::take(&mut self.header).try_into().expect("of this length");
            let Ok(header) = Header::parse(&whole) else { continue };
            if header.op == Op::Write {
                self.payload = header.len;
                let Header { addr, len, .. } = header;
                begun.push(Asked { addr, len, index: self.requests });
            }
            self.requests += 1;
            self.unanswered.push_back(header);
        }
        begun
    }

    /// The initiator has received bytes.
    pub(super) fn answered(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.refused.is_none() {
            if self.reading > 0 {
                let n = self.reading.min(bytes.len() as u64);
                (self.reading, bytes) = (self.reading - n, &bytes[n as usize..]);
                continue;
            }
            let Some(front) = self.unanswered.front().filter(|h| h.version == Version::V2) else {
                return;
            };
            let n = (STATUS_LEN - self.status.len()).min(bytes.len());
            self.status.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.status.len() < STATUS_LEN {
                continue;
            }
            if std::mem::take(&mut self.status) == Status::Rejected.encode() {
                self.refused = Some(self.answered);
            }
            self.reading = if front.op == Op::Read { front.len } else { 0 };
            self.answered += 1;
            self.unanswered.pop_front();
        }
    }

    /// Whether a request has no answer.
    pub(super) fn owes(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// The place of the request that was refused.
    pub(super) fn refused(&self) -> Option<usize> {
        self.refused
    }
}
