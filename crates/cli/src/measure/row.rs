//! What is measured: an operation, a block size, a batch size.

use tensorferry::Op;

use crate::args::{Count, Size, size_text};

/// One line of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Row {
    pub(crate) op: Op,
    /// Bytes of one request.
    pub(crate) block: u64,
    /// Requests of one batch.
    pub(crate) batch: u64,
}

/// How the result is shown.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    Table,
    Json,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Block and batch: one small request, KV blocks, bulk.
pub(crate) const USUAL: [(u64, u64); 5] =
    [(4 * KIB, 1), (4 * KIB, 128), (64 * KIB, 64), (MIB, 16), (64 * MIB, 1)];
pub(crate) const SIZES: [u64; 3] = [4 * KIB, 64 * KIB, MIB];
pub(crate) const BATCHES: [u64; 2] = [1, 16];
/// Both processes hold a batch in memory.
const LONGEST_BATCH: u64 = 4 << 30;
pub(crate) const MOST_REQUESTS: u64 = 1 << 20;
/// Where the memory of each thread begins: they share no page.
pub(crate) const PART_ALIGNMENT: u64 = 4096;

impl Row {
    /// A round walks at most so many bytes, so that blocks come from memory and not only from a cache...
    const ROUND_BYTES: u64 = 64 * MIB;
    /// ...and at most so many requests, which are made before the clock starts.
    const ROUND_REQUESTS: u64 = 1 << 17;
    const ROUND_BATCHES: u64 = 1 << 10;
    /// Threads together walk at most so many, as longer pauses between rounds let connections grow cold.
    const ROUND_BYTES_OF_ALL: u64 = 256 * MIB;

    pub(crate) fn batch_bytes(&self) -> u64 {
        self.block * self.batch
    }

    /// Each batch of a round has its own place in memory, so that every one of them is checked.
    pub(crate) fn round_batches(&self) -> usize {
        self.batches_within(Self::ROUND_BYTES, Self::ROUND_REQUESTS)
    }

    /// How many batches each of `threads` threads moves in a round, if there are `bytes` of memory for all of them;
    /// `None` if they do not fit.
    pub(crate) fn batches_of_thread(&self, threads: usize, bytes: u64) -> Option<usize> {
        let threads = threads as u64;
        let own = match threads {
            1 => bytes,
            _ => bytes / threads / PART_ALIGNMENT * PART_ALIGNMENT,
        };
        let fit = own / self.batch_bytes();
        let share = own.min(Self::ROUND_BYTES).min(Self::ROUND_BYTES_OF_ALL / threads);
        let batches = self.batches_within(share, Self::ROUND_REQUESTS / threads);
        (fit > 0).then(|| batches.min(fit as usize))
    }

    fn batches_within(&self, bytes: u64, requests: u64) -> usize {
        let batches =
            (bytes / self.batch_bytes()).min(requests / self.batch).clamp(1, Self::ROUND_BATCHES);
        batches as usize
    }

    pub(crate) fn round_bytes(&self) -> usize {
        self.round_batches() * self.batch_bytes() as usize
    }

    /// Batches before the clock starts: connections are made and caches filled.
    pub(crate) fn warm_up_batches(&self) -> usize {
        self.round_batches().min(3)
    }

    pub(crate) fn operation(&self) -> &'static str {
        match self.op {
            Op::Read => "read",
            Op::Write => "write",
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:5} {} x {}", self.operation(), size_text(self.block), self.batch)
    }
}

/// The block and batch sizes of a run's rows, for what was asked for, or the usual ones.
pub(crate) fn pairs(sizes: &[Size], batches: &[Count]) -> Vec<(u64, u64)> {
    // What nobody asked for is left out where it does not fit. What was asked for stays, to be refused.
    let stays = |size: u64, batch: u64| match (sizes.is_empty(), batches.is_empty()) {
        (false, true) => batch == BATCHES[0] || fits(size, batch),
        (true, false) => size == SIZES[0] || fits(size, batch),
        _ => true,
    };
    if sizes.is_empty() && batches.is_empty() {
        return USUAL.to_vec();
    }
    let or = |given: Vec<u64>, usual: &[u64]| if given.is_empty() { usual.to_vec() } else { given };
    let all_sizes = or(sizes.iter().map(|s| s.bytes()).collect(), &SIZES);
    let all_batches = or(batches.iter().map(|b| b.get()).collect(), &BATCHES);
    let pairs =
        all_sizes.iter().flat_map(|size| all_batches.iter().map(move |batch| (*size, *batch)));
    pairs.filter(|(size, batch)| stays(*size, *batch)).collect()
}

/// Whether such a batch can be moved at all.
pub(crate) fn fits(block: u64, batch: u64) -> bool {
    batch <= MOST_REQUESTS && block <= LONGEST_BATCH / batch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_bounded_but_never_empty() {
        for (block, batch) in [(1, 1), (1, 1 << 20), (4 << 30, 1), (4096, 128), (64 << 20, 1)] {
            let row = Row { op: Op::Read, block, batch };
            assert!((1..=1024).contains(&row.round_batches()));
            assert!(row.round_bytes() as u64 <= row.batch_bytes().max(64 << 20));
            assert!((1..=3).contains(&row.warm_up_batches()));
        }
    }

    #[test]
    fn threads_share_what_memory_there_is() {
        let row = |block, batch| Row { op: Op::Write, block, batch };
        let batches = |row: Row, threads, bytes| row.batches_of_thread(threads, bytes);
        assert_eq!(batches(row(1 << 20, 1), 1, 256 << 20), Some(64));
        assert_eq!(batches(row(1 << 20, 1), 4, 256 << 20), Some(64));
        assert_eq!(batches(row(1 << 20, 1), 8, 256 << 20), Some(32));
        assert_eq!(batches(row(64 << 20, 1), 4, 256 << 20), Some(1));
        assert_eq!(batches(row(64 << 20, 1), 5, 256 << 20), None);
        assert_eq!(batches(row(4096, 1), 1, 4096), Some(1));
        assert_eq!(batches(row(4097, 1), 1, 4096), None);
        assert_eq!(batches(row(100, 1), 2, 8191), None, "each has whole pages");
        for (block, batch, threads) in [(1, 1, 64), (1, 1 << 20, 3), (4095, 7, 2), (8192, 2, 64)] {
            let row = row(block, batch);
            let batches = row.batches_of_thread(threads, 8 << 20).unwrap() as u64;
            let part = (batches * row.batch_bytes()).next_multiple_of(PART_ALIGNMENT);
            assert!((threads as u64) * part <= 8 << 20, "{row}");
        }
    }
}
