//! Bytes that cannot be right by accident.
//!
//! Every round has a seed of its own, and no eight aligned bytes occur twice in a run. Before a
//! round the memory that is to receive is filled with the complement of what is to arrive, so a
//! byte that is not moved is wrong with certainty, not with probability 255/256.

use serde::{Deserialize, Serialize};
use tensorferry::Result;

use crate::memory::{Buffer, HOST_PIECE};

/// The content of a buffer in one round.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Pattern {
    seed: u64,
    complement: bool,
}

/// Bytes that are not what they should be.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Mismatch {
    /// How many bytes are wrong.
    pub(crate) wrong_bytes: u64,
    /// How many were looked at.
    pub(crate) checked_bytes: u64,
    /// Where the first wrong one is, from the start of the buffer.
    pub(crate) first_offset_bytes: u64,
    /// What it should be.
    pub(crate) expected: u8,
    /// What it is.
    pub(crate) found: u8,
}

/// Odd, so that multiplying by it maps no two words to one.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Further apart than any buffer has words, so that no two rounds share an index.
const ROUNDS_APART: u64 = 1 << 40;

impl Pattern {
    /// The pattern of round `round` of the run that drew `run`.
    pub(crate) fn of_round(run: u64, round: u64) -> Self {
        Self { seed: run.wrapping_add(round.wrapping_mul(ROUNDS_APART)), complement: false }
    }

    /// Differs from this one in every byte.
    pub(crate) fn complement(self) -> Self {
        Self { complement: !self.complement, ..self }
    }

    /// Fills the first `len` bytes of `buffer`.
    ///
    /// # Errors
    /// The memory's device refused.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub(crate) fn fill(self, buffer: &Buffer, len: usize) -> Result<()> {
        let most = buffer.piece();
        let mut piece = vec![0; most.min(len)];
        for at in (0..len).step_by(most) {
            let piece = &mut piece[..most.min(len - at)];
            self.make(at, piece);
            buffer.write(at, piece)?;
        }
        Ok(())
    }

    /// Compares the first `len` bytes of `buffer`, each of them.
    ///
    /// # Errors
    /// The memory's device refused.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub(crate) fn check(self, buffer: &Buffer, len: usize) -> Result<Option<Mismatch>> {
        self.check_part(buffer, 0, len)
    }

    /// Compares `len` bytes of `buffer` from `offset`, a multiple of eight, on.
    ///
    /// # Errors
    /// The memory's device refused.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub(crate) fn check_part(
        self,
        buffer: &Buffer,
        offset: usize,
        len: usize,
    ) -> Result<Option<Mismatch>> {
        let most = buffer.piece();
        let (mut expected, mut found) = (vec![0; most.min(len)], vec![0; most.min(len)]);
        let mut mismatch = None;
        for at in (offset..offset + len).step_by(most) {
            let found = &mut found[..most.min(offset + len - at)];
            buffer.read_into(at, found)?;
            self.compare(at, found, &mut expected, &mut mismatch);
        }
        Ok(mismatch.map(|m| Mismatch { checked_bytes: len as u64, ..m }))
    }

    /// Compares `bytes`, each of them, with the first ones.
    pub(crate) fn check_bytes(self, bytes: &[u8]) -> Option<Mismatch> {
        let most = HOST_PIECE.min(bytes.len());
        let (mut expected, mut mismatch) = (vec![0; most], None);
        for (n, found) in bytes.chunks(HOST_PIECE).enumerate() {
            self.compare(n * HOST_PIECE, found, &mut expected, &mut mismatch);
        }
        mismatch.map(|m| Mismatch { checked_bytes: bytes.len() as u64, ..m })
    }

    /// Compares what was found at `at`. `expected` is room for as much.
    fn compare(
        self,
        at: usize,
        found: &[u8],
        expected: &mut [u8],
        mismatch: &mut Option<Mismatch>,
    ) {
        let expected = &mut expected[..found.len()];
        self.make(at, expected);
        if expected != found {
            note(mismatch, at, expected, found);
        }
    }

    /// The bytes from `at`, a multiple of eight, on.
    pub(crate) fn make(self, at: usize, bytes: &mut [u8]) {
        let flip = if self.complement { u64::MAX } else { 0 };
        let mut index = self.seed.wrapping_add(at as u64 / 8);
        let (words, rest) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = (spread(index) ^ flip).to_le_bytes();
            index = index.wrapping_add(1);
        }
        let last = (spread(index) ^ flip).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// A different word for each index, with every byte of it depending on the round and on the place.
fn spread(index: u64) -> u64 {
    // The round goes to the low end: a product's low bits depend on low bits only.
    let word = index.rotate_left(24).wrapping_mul(SPREAD);
    word ^ (word >> 32)
}

#[cold]
fn note(mismatch: &mut Option<Mismatch>, at: usize, expected: &[u8], found: &[u8]) {
    for (i, (e, f)) in expected.iter().zip(found).enumerate().filter(|(_, (e, f))| e != f) {
        let first = mismatch.get_or_insert(Mismatch {
            wrong_bytes: 0,
            checked_bytes: 0,
            first_offset_bytes: (at + i) as u64,
            expected: *e,
            found: *f,
        });
        first.wrong_bytes += 1;
    }
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {} bytes are wrong; the first one, at offset {}, is {:#04x} instead of {:#04x}",
            self.wrong_bytes,
            self.checked_bytes,
            self.first_offset_bytes,
            self.found,
            self.expected
        )
    }
}

#[cfg(test)]
mod tests {
    use tensorferry::HostBuffer;

    use super::*;
    use crate::memory::tests::on_a_device;

    /// Of host memory.
    const PIECE: usize = 32 << 10;
    const LEN: usize = 2 * PIECE + 13;

    fn filled(pattern: Pattern) -> Buffer {
        let buffer = Buffer::Host(HostBuffer::zeroed(LEN + 1).unwrap());
        pattern.fill(&buffer, LEN).unwrap();
        buffer
    }

    fn read(buffer: &Buffer, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        buffer.read_into(at, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn what_was_filled_is_right() {
        let pattern = Pattern::of_round(7, 1);
        let buffer = filled(pattern);
        assert_eq!(pattern.check(&buffer, LEN).unwrap(), None);
        assert_eq!(read(&buffer, LEN, 1), [0], "nothing is written behind the end");
    }

    #[test]
    fn one_flipped_bit_anywhere_is_found() {
        let pattern = Pattern::of_round(7, 1);
        let buffer = filled(pattern);
        for at in [0, 1, 7, 8, PIECE - 1, PIECE, 2 * PIECE, LEN - 1] {
            let right = read(&buffer, at, 1);
            buffer.write(at, &[right[0] ^ 0x10]).unwrap();
            let mismatch = pattern.check(&buffer, LEN).unwrap().unwrap();
            assert_eq!(
                mismatch,
                Mismatch {
                    wrong_bytes: 1,
                    checked_bytes: LEN as u64,
                    first_offset_bytes: at as u64,
                    expected: right[0],
                    found: right[0] ^ 0x10,
                }
            );
            buffer.write(at, &right).unwrap();
        }
        assert_eq!(pattern.check(&buffer, LEN).unwrap(), None);
    }

    #[test]
    fn stale_bytes_are_wrong_each_of_them() {
        let pattern = Pattern::of_round(7, 2);
        let buffer = filled(pattern.complement());
        let mismatch = pattern.check(&buffer, LEN).unwrap().unwrap();
        assert_eq!(mismatch.wrong_bytes, LEN as u64);
    }

    #[test]
    fn a_flipped_bit_in_device_memory_is_found() {
        let len = 3 * (1 << 20) + 13;
        let Some((_engine, buffer)) = on_a_device("pattern", len) else { return };
        let pattern = Pattern::of_round(7, 1);
        pattern.fill(&buffer, len).unwrap();
        assert_eq!(pattern.check(&buffer, len).unwrap(), None);
        for at in [0, (1 << 20) - 1, 1 << 20, len - 1] {
            let right = read(&buffer, at, 1);
            buffer.write(at, &[!right[0]]).unwrap();
            let mismatch = pattern.check(&buffer, len).unwrap().unwrap();
            assert_eq!((mismatch.wrong_bytes, mismatch.first_offset_bytes), (1, at as u64));
            buffer.write(at, &right).unwrap();
        }
    }

    #[test]
    fn bytes_in_the_wrong_place_or_of_another_round_are_wrong() {
        let pattern = Pattern::of_round(7, 2);
        let buffer = filled(pattern);
        let shifted = read(&buffer, 0, LEN - 8);
        buffer.write(8, &shifted).unwrap();
        assert!(pattern.check(&buffer, LEN).unwrap().unwrap().wrong_bytes > LEN as u64 * 9 / 10);
        let other = filled(Pattern::of_round(7, 1));
        assert!(pattern.check(&other, LEN).unwrap().unwrap().wrong_bytes > LEN as u64 * 9 / 10);
    }

    #[test]
    fn the_text_says_where_and_what() {
        let mismatch = Mismatch {
            wrong_bytes: 2,
            checked_bytes: 100,
            first_offset_bytes: 5,
            expected: 0xab,
            found: 1,
        };
        assert_eq!(
            mismatch.to_string(),
            "2 of 100 bytes are wrong; the first one, at offset 5, is 0x01 instead of 0xab"
        );
    }
}
