//! The memory of all machines: one mapping, used by one schedule after the other.

use std::sync::OnceLock;

use crate::memory::HostBuffer;
use crate::sim::rng::Rng;

/// Aligned to its own length: a flipped bit of an address leads to another place of it that is the same in every
/// process, or out of it.
pub(super) struct Arena {
    buffer: HostBuffer,
    base: u64,
}

/// How much each machine has.
pub(super) const SHARE: u64 = 16 << 20;
const LEN: u64 = 4 * SHARE;
/// What memory is before anybody has moved anything there.
pub(super) const POISON: u8 = 0xa5;
/// What memory is when nobody may touch it any more.
pub(super) const CANARY: u8 = 0xc7;

impl Arena {
    pub(super) fn new() -> Self {
        let buffer = HostBuffer::zeroed(2 * LEN as usize).unwrap();
        let base = buffer.addr().next_multiple_of(LEN);
        Self { buffer, base }
    }

    pub(super) fn range(&self) -> (u64, u64) {
        (self.base, LEN)
    }

    pub(super) fn buffer(&self) -> &HostBuffer {
        &self.buffer
    }

    /// The first address of a machine's share.
    pub(super) fn share(&self, machine: usize) -> u64 {
        self.base + machine as u64 * SHARE
    }

    fn offset(&self, addr: u64) -> usize {
        (addr - self.buffer.addr()) as usize
    }

    pub(super) fn fill(&self, (addr, len): (u64, u64), byte: u8) {
        let bytes = vec![byte; len as usize];
        self.buffer.write(self.offset(addr), &bytes);
    }

    pub(super) fn is_filled(&self, (addr, len): (u64, u64), byte: u8) -> bool {
        self.bytes((addr, len)) == vec![byte; len as usize]
    }

    /// Lays out what a request of this number writes.
    pub(super) fn write_content(&self, (addr, len): (u64, u64), number: u64) {
        self.buffer.write(self.offset(addr), &content(number, len));
    }

    /// Lays out what can be READ at these addresses.
    pub(super) fn write_readable(&self, (addr, len): (u64, u64)) {
        self.buffer.write(self.offset(addr), &content(self.place(addr), len));
    }

    pub(super) fn has_content(&self, range: (u64, u64), number: u64) -> bool {
        self.bytes(range) == content(number, range.1)
    }

    /// Whether `range` holds what can be READ at `remote`.
    pub(super) fn has_readable(&self, range: (u64, u64), remote: u64) -> bool {
        self.bytes(range) == content(self.place(remote), range.1)
    }

    /// Whether each byte is as it was, or as the request of this number would have it.
    pub(super) fn is_partly(&self, range: (u64, u64), number: u64) -> bool {
        let (bytes, own) = (self.bytes(range), content(number, range.1));
        bytes == own || bytes.iter().zip(own).all(|(is, own)| *is == POISON || *is == own)
    }

    /// The same for the same place in the arena, wherever that is mapped.
    fn place(&self, addr: u64) -> u64 {
        addr - self.base
    }

    fn bytes(&self, (addr, len): (u64, u64)) -> Vec<u8> {
        self.buffer.read(self.offset(addr), len as usize)
    }
}

/// A prime number of bytes, none of which is poison or a canary.
const TABLE: u64 = 65_521;

/// `len` bytes from place `from` of an endless stream on. Streams of neighbours are the same, moved by a byte, so a byte
/// that is off by one is wrong.
fn content(from: u64, len: u64) -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let table = BYTES.get_or_init(|| {
        let mut rng = Rng::new(1);
        (0..TABLE).map(|_| (rng.next() & 0x7f) as u8).collect()
    });
    let mut bytes = Vec::with_capacity(len as usize);
    let mut at = from % TABLE;
    while (bytes.len() as u64) < len {
        let take = (TABLE - at).min(len - bytes.len() as u64);
        bytes.extend_from_slice(&table[at as usize..(at + take) as usize]);
        at = 0;
    }
    bytes
}
