//! The descriptors of an engine's sockets, for a forked child: it inherits them, but not the threads
//! that own them, and while it holds them peers do not see the parent die.
#![expect(unsafe_code, reason = "closing what the parent's threads own")]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each descriptor. Without a lock, since a lock could be held by a thread that the child does
/// not have.
pub(crate) struct Descriptors {
    words: Box<[AtomicU64]>,
}

/// More descriptors than a process can have by default; beyond them a child keeps what it inherits.
const MOST: usize = 1 << 16;

impl Descriptors {
    pub(crate) fn new() -> Self {
        Self { words: (0..MOST / 64).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn note(&self, fd: RawFd) {
        if let Some((word, bit)) = self.place(fd) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn forget(&self, fd: RawFd) {
        if let Some((word, bit)) = self.place(fd) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// Closes the child's copies, once; nothing is said to peers. Only for a forked child.
    pub(crate) fn close_inherited(&self) {
        for (index, word) in self.words.iter().enumerate() {
            let bits = word.swap(0, Ordering::Relaxed);
            for bit in (0..64).filter(|bit| bits & (1 << bit) != 0) {
                let fd = (index * 64 + bit) as RawFd;
                // SAFETY: the fork copied it from a thread that does not exist here, so nobody else in this
                // process will use or close it; the parent's own descriptor stays open.
                unsafe { libc::close(fd) };
            }
        }
    }

    fn place(&self, fd: RawFd) -> Option<(&AtomicU64, u64)> {
        let fd = usize::try_from(fd).ok()?;
        Some((self.words.get(fd / 64)?, 1 << (fd % 64)))
    }
}
