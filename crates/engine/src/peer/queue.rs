//! What waits for a peer: batches that are being cut into slices, and slices that came back.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::transfer::{BatchInner, Cause, Slice, Stop};

/// In the order in which it will be sent.
#[derive(Default)]
pub(super) struct Queue {
    /// Outside of what the route says; a newer one decides, and is being asked for.
    parked: VecDeque<Slice>,
    /// To be sent again, before anything else.
    requeued: VecDeque<Slice>,
    cursors: VecDeque<Cursor>,
    /// The earliest deadline of what has come since it was last asked for.
    new_deadline: Option<Instant>,
}

/// A batch, and the first of its entries that nobody has taken.
struct Cursor {
    batch: Arc<BatchInner>,
    entry: u32,
}

/// What was taken out of the queue to be failed, without a lock held.
#[derive(Default)]
pub(super) struct Work {
    slices: Vec<Slice>,
    cursors: Vec<Cursor>,
}

impl Queue {
    pub(super) fn push(&mut self, batch: Arc<BatchInner>) {
        self.note(batch.deadline);
        self.cursors.push_back(Cursor { batch, entry: 0 });
    }

    /// The slice is the next to be sent.
    pub(super) fn push_front(&mut self, slice: Slice) {
        self.note(slice.batch.deadline);
        self.requeued.push_front(slice);
    }

    /// Sets a slice aside until a newer route decides about it.
    pub(super) fn park(&mut self, slice: Slice) {
        self.parked.push_back(slice);
    }

    /// What waited for a newer route is looked at again, before anything else.
    pub(super) fn unpark(&mut self) {
        for slice in self.parked.drain(..).rev() {
            self.requeued.push_front(slice);
        }
    }

    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether nothing waits for a lane.
    pub(super) fn is_empty(&self) -> bool {
        self.requeued.is_empty() && self.cursors.is_empty()
    }

    /// At least so many slices wait for a lane, as far as that is known without cutting.
    pub(super) fn at_least(&self) -> usize {
        self.requeued.len() + self.cursors.len()
    }

    pub(super) fn note(&mut self, deadline: Instant) {
        self.new_deadline = Some(self.new_deadline.map_or(deadline, |d| d.min(deadline)));
    }

    /// The earliest deadline of what has come since the last call.
    pub(super) fn take_deadline(&mut self) -> Option<Instant> {
        self.new_deadline.take()
    }

    /// What is next in line: a request that nobody has looked at, or what was left or came back of one. It is
    /// not cut yet, so that whatever is decided about it is decided once.
    pub(super) fn next(&mut self) -> Option<Slice> {
        if let Some(slice) = self.requeued.pop_front() {
            return Some(slice);
        }
        while let Some(cursor) = self.cursors.front_mut() {
            match cursor.next() {
                Some(slice) => return Some(slice),
                None => drop(self.cursors.pop_front()),
            }
        }
        None
    }

    /// Cuts a slice of at most `len` bytes off what was next; the rest is next again.
    pub(super) fn cut(&mut self, mut slice: Slice, len: u64) -> Slice {
        if slice.len > len {
            self.requeued.push_front(slice.split_off(len));
        }
        slice
    }

    pub(super) fn take_all(&mut self) -> Work {
        let slices = self.parked.drain(..).chain(self.requeued.drain(..)).collect();
        Work { slices, cursors: self.cursors.drain(..).collect() }
    }

    /// Takes what is to stop.
    pub(super) fn take_stopped(&mut self, now: Instant) -> Work {
        let go_on = |batch: &Arc<BatchInner>| batch.stop_at(now).is_none();
        let mut slices = Vec::new();
        for waiting in [&mut self.parked, &mut self.requeued] {
            let (left, stopped) = divide(waiting, |s| go_on(&s.batch));
            *waiting = left;
            slices.extend(stopped);
        }
        let (left, cursors) = divide(&mut self.cursors, |c| go_on(&c.batch));
        self.cursors = left;
        Work { slices, cursors }
    }

    /// What waits, to be counted without a lock on the queue.
    pub(super) fn waiting(&self) -> Waiting {
        let slices = self.parked.iter().chain(&self.requeued);
        Waiting {
            slices: slices.map(|s| (Arc::clone(&s.batch), s.len)).collect(),
            cursors: self.cursors.iter().map(|c| (Arc::clone(&c.batch), c.entry)).collect(),
        }
    }

    /// The batches of all that waits; one may come several times.
    pub(super) fn batches(&self) -> impl Iterator<Item = &Arc<BatchInner>> {
        let slices = self.parked.iter().chain(&self.requeued);
        self.cursors.iter().map(|c| &c.batch).chain(slices.map(|s| &s.batch))
    }
}

/// What waits in a queue.
pub(super) struct Waiting {
    slices: Vec<(Arc<BatchInner>, u64)>,
    /// Batches, and the first of their entries that nobody has taken.
    cursors: Vec<(Arc<BatchInner>, u32)>,
}

impl Waiting {
    /// How many batches, requests and bytes. A request of which a part is in flight counts with the rest of it.
    pub(super) fn count(&self) -> (u64, u64, u64) {
        let mut batches: HashSet<*const BatchInner> = HashSet::new();
        let (mut requests, mut bytes) = (0, 0_u64);
        for (batch, len) in &self.slices {
            batches.insert(Arc::as_ptr(batch));
            requests += 1;
            bytes = bytes.saturating_add(*len);
        }
        for (batch, first) in &self.cursors {
            batches.insert(Arc::as_ptr(batch));
            let lens = (*first..batch.len() as u32).map(|entry| batch.request(entry).len);
            for len in lens.filter(|len| *len > 0) {
                requests += 1;
                bytes = bytes.saturating_add(len);
            }
        }
        (batches.len() as u64, requests, bytes)
    }
}

/// Takes everything out; what `stays` comes first.
fn divide<T>(all: &mut VecDeque<T>, stays: impl Fn(&T) -> bool) -> (VecDeque<T>, Vec<T>) {
    let (mut left, mut out) = (VecDeque::new(), Vec::new());
    for item in all.drain(..) {
        if stays(&item) {
            left.push_back(item);
        } else {
            out.push(item);
        }
    }
    (left, out)
}

impl Cursor {
    fn next(&mut self) -> Option<Slice> {
        while (self.entry as usize) < self.batch.len() {
            let entry = self.entry;
            self.entry += 1;
            // An entry of length 0 was settled when the batch was made.
            if self.batch.request(entry).len > 0 {
                return Some(Slice::whole(&self.batch, entry));
            }
        }
        None
    }

    /// Fails all that nobody has taken.
    fn fail(mut self, cause: &Cause) {
        while let Some(slice) = self.next() {
            slice.settle(Err(cause.clone()));
        }
    }
}

impl Work {
    pub(super) fn is_empty(&self) -> bool {
        self.slices.is_empty() && self.cursors.is_empty()
    }

    pub(super) fn fail(self, cause: &Cause) {
        for slice in self.slices {
            slice.settle(Err(cause.clone()));
        }
        for cursor in self.cursors {
            cursor.fail(cause);
        }
    }

    pub(super) fn fail_stopped(self, now: Instant, stage: &'static str) {
        let cause = |batch: &BatchInner| {
            let stop = batch.stop_at(now).unwrap_or(Stop::Cancelled);
            Cause::Stopped { stop, stage, sent: false }
        };
        for slice in self.slices {
            let cause = cause(&slice.batch);
            slice.settle(Err(cause));
        }
        for cursor in self.cursors {
            let cause = cause(&cursor.batch);
            cursor.fail(&cause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::route::SLICE;
    use crate::transfer::{BatchState, Request, batch_of};
    use proptest::prelude::*;
    use tensorferry_wire::Op;

    proptest! {
        /// However a batch is cut, and wherever it is given up: each byte is in one slice or is failed, and the
        /// batch is final after the last of them.
        #[test]
        fn a_batch_is_cut_without_gaps_and_can_be_given_up_anywhere(
            lens in prop::collection::vec(prop_oneof![Just(0_u64), 1..100_u64, 1..5 * SLICE], 0..20),
            taken in 0..60_usize,
            slice_lens in prop::collection::vec(prop_oneof![Just(SLICE), Just(u64::MAX), Just(1000_u64 << 6)], 1..5),
        ) {
            let request = |&len: &u64| Request { op: Op::Write, local: 1 << 20, remote: 1 << 40, len };
            let batch = batch_of(lens.iter().map(request).collect());
            let mut queue = Queue::default();
            queue.push(Arc::clone(&batch.inner));
            let mut ends = vec![0; lens.len()];
            let mut slices = Vec::new();
            for slice_len in slice_lens.iter().cycle().take(taken) {
                let Some(slice) = queue.next() else { break };
                let slice = queue.cut(slice, *slice_len);
                let end = &mut ends[slice.entry as usize];
                prop_assert!(slice.len > 0 && slice.len <= *slice_len && slice.offset == *end);
                *end += slice.len;
                slices.push(slice);
            }
            let whole: Vec<bool> = ends.iter().zip(&lens).map(|(end, len)| end == len).collect();
            if lens.iter().all(|len| *len == 0) {
                prop_assert!(slices.is_empty() && batch.inner.is_settled());
                return Ok(());
            }
            queue.take_all().fail(&Cause::Refused);
            prop_assert!(slices.is_empty() || batch.poll() == BatchState::Running);
            for slice in slices {
                slice.settle(Ok(()));
            }
            prop_assert!(batch.poll() != BatchState::Running);
            for (i, whole) in whole.iter().enumerate() {
                prop_assert_eq!(batch.entry(i).unwrap().is_ok(), *whole, "entry {}", i);
            }
        }
    }
}
