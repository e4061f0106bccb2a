//! The parts of an entry by which it is settled: what moves on a lane, and what is copied.

use std::sync::Arc;

use tensorferry_wire::Op;

use crate::memory::Lent;
use crate::registry::Pin;
use crate::staging::Stager;
use crate::transfer::{BatchInner, Cause, Request};

/// A part of a request that moves on one lane. It must be settled; one that is dropped unsettled
/// fails its entry, so that no waiter waits for ever.
pub(crate) struct Slice {
    pub(crate) batch: Arc<BatchInner>,
    pub(crate) entry: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// How often it was sent before.
    pub(crate) tries: u8,
    settled: bool,
}

/// A copy's part in an entry: while it exists, the entry is not settled.
pub(crate) struct Hold {
    batch: Arc<BatchInner>,
    entry: u32,
    settled: bool,
}

impl Slice {
    pub(crate) fn new(batch: &Arc<BatchInner>, entry: u32, offset: u64, len: u64) -> Self {
        Self { batch: Arc::clone(batch), entry, offset, len, tries: 0, settled: false }
    }

    /// All of a request.
    pub(crate) fn whole(batch: &Arc<BatchInner>, entry: u32) -> Self {
        Self::new(batch, entry, 0, batch.request(entry).len)
    }

    /// Leaves the first `len` bytes here; returns the rest, which is settled by itself.
    pub(crate) fn split_off(&mut self, len: u64) -> Self {
        self.batch.add_part(self.entry);
        let mut rest = Self::new(&self.batch, self.entry, self.offset + len, self.len - len);
        rest.tries = self.tries;
        self.len = len;
        rest
    }

    /// The device that its local memory is on; `None`: a socket takes it.
    #[inline]
    pub(crate) fn device(&self) -> Option<&Arc<Stager>> {
        self.batch.device(self.entry)
    }

    /// Keeps the entry from being settled while a copy of it is in progress.
    pub(crate) fn hold(&self) -> Hold {
        Hold::on(&self.batch, self.entry)
    }

    /// What it asks for: the part of its request.
    pub(crate) fn request(&self) -> Request {
        let Request { op, local, remote, .. } = self.batch.request(self.entry);
        Request { op, local: local + self.offset, remote: remote + self.offset, len: self.len }
    }

    pub(crate) fn op(&self) -> Op {
        self.batch.request(self.entry).op
    }

    pub(crate) fn local(&self) -> u64 {
        self.batch.request(self.entry).local + self.offset
    }

    pub(crate) fn remote(&self) -> u64 {
        self.batch.request(self.entry).remote + self.offset
    }

    pub(crate) fn settle(mut self, verdict: std::result::Result<(), Cause>) {
        self.settled = true;
        self.batch.settle(self.entry, verdict);
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        if !self.settled {
            self.batch.settle(self.entry, Err(let_go()));
        }
    }
}

impl Hold {
    /// A part in an entry that is not settled, which some slice of it vouches for.
    pub(crate) fn on(batch: &Arc<BatchInner>, entry: u32) -> Self {
        batch.add_part(entry);
        Self { batch: Arc::clone(batch), entry, settled: false }
    }

    pub(crate) fn batch(&self) -> &BatchInner {
        &self.batch
    }

    /// Pins on what the entry's local range touches, of their own.
    pub(crate) fn pins(&self) -> Vec<Pin> {
        self.batch.pins(self.entry)
    }

    /// The memory that was lent to the entry by value, if it was.
    pub(crate) fn lent(&self) -> Option<Lent> {
        self.batch.lent(self.entry)
    }

    pub(crate) fn settle(mut self, verdict: std::result::Result<(), Cause>) {
        self.settled = true;
        self.batch.settle(self.entry, verdict);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.settled {
            self.batch.settle(self.entry, Err(let_go()));
        }
    }
}

#[cold]
fn let_go() -> Cause {
    Cause::Unknown("the engine let go of it, which is a bug in it".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::BatchState;
    use crate::transfer::batch::tests::batch;

    #[test]
    fn the_last_slice_of_the_last_entry_ends_the_batch() {
        let b = batch(&[10, 0, 20]);
        let mut first = Slice::whole(&b.inner, 2);
        let second = first.split_off(10);
        assert_eq!((first.len, second.offset, second.len), (10, 10, 10));
        first.settle(Ok(()));
        Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
        assert_eq!(b.poll(), BatchState::Running);
        assert!(b.entry(0).unwrap().is_ok());
        assert!(b.entry(1).unwrap().is_ok());
        assert!(b.entry(2).is_none());
        second.settle(Ok(()));
        assert_eq!(b.poll(), BatchState::Completed);
        assert!(b.wait().is_ok());
    }

    #[test]
    fn a_dropped_slice_fails_its_entry() {
        let b = batch(&[10]);
        drop(Slice::new(&b.inner, 0, 0, 10));
        assert_eq!(b.poll(), BatchState::Failed);
    }
}
