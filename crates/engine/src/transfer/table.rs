//! Batches by number, for callers that cannot hold a value: a number that is not of this table, or
//! not any more, finds nothing.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::transfer::batch::Batch;

/// The number of a batch: never 0, below 2^63, and not used again while it could be remembered.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BatchId(u64);

impl BatchId {
    /// Reads a number that a caller hands back. Any number is allowed; the table decides.
    #[must_use]
    pub fn from_raw(id: u64) -> Self {
        Self(id)
    }

    /// The number as callers hold it.
    #[must_use]
    pub fn as_raw(self) -> u64 {
        self.0
    }

    fn new(slot: usize, generation: u32) -> Self {
        Self((u64::from(generation) << SLOT_BITS) | slot as u64)
    }

    fn parts(self) -> (usize, u64) {
        ((self.0 & ((1 << SLOT_BITS) - 1)) as usize, self.0 >> SLOT_BITS)
    }
}

/// Slots take the low half; 31 bits of generation above keep the sign of a signed reader positive.
const SLOT_BITS: u32 = 32;
const LAST_GENERATION: u32 = i32::MAX as u32;
/// How many batches that are final, and that nobody asked about, are kept.
const KEPT: usize = 65_536;

/// Batches by number. A number ends with [`BatchTable::take`]; of the batches that are final and never asked about, the
/// newest 65,536 are kept.
///
/// ```
/// use tensorferry::{BatchId, Config, Engine, Error, HostBuffer, Op, RegisterOptions, SubmitOptions};
///
/// # fn main() -> tensorferry::Result<()> {
/// # let engine = Engine::new("127.0.0.1", Config::default())?;
/// # let (local, remote) = (HostBuffer::zeroed(4096)?, HostBuffer::zeroed(4096)?);
/// # engine.register_buffer(&remote, &RegisterOptions::default())?;
/// # let segment = engine.open(engine.name())?;
/// let request = local.request(Op::Write, 0, remote.addr(), 4096)?;
/// let batch = segment.submit_owned(&[request], SubmitOptions::default())?;
/// // A caller that can hold nothing but an integer holds this.
/// let number: u64 = engine.batches().insert(batch).as_raw();
/// engine.batches().take(BatchId::from_raw(number))?.wait()?;
/// // A number that is not known, or not any more, finds nothing.
/// let again = engine.batches().take(BatchId::from_raw(number));
/// assert!(matches!(again, Err(Error::UnknownBatch { .. })));
/// # Ok(())
/// # }
/// ```
// Slots with a generation each; `take` frees one.
#[derive(Default)]
pub struct BatchTable {
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    all: Vec<Slot>,
    free: Vec<usize>,
    /// Ids in the order of insertion; some may have been taken since.
    order: VecDeque<BatchId>,
    used: usize,
}

struct Slot {
    generation: u32,
    batch: Option<Batch>,
}

impl BatchTable {
    /// Gives `batch` a number.
    #[must_use = "nothing else finds the batch again"]
    pub fn insert(&self, batch: Batch) -> BatchId {
        let mut slots = self.lock();
        slots.evict();
        let slot = slots.free.pop().unwrap_or_else(|| {
            // Begun anywhere, so that a number of another engine is no number here.
            let generation = crate::core::random() as u32 & LAST_GENERATION;
            slots.all.push(Slot { generation, batch: None });
            slots.all.len() - 1
        });
        let place = &mut slots.all[slot];
        place.generation =
            if place.generation == LAST_GENERATION { 1 } else { place.generation + 1 };
        place.batch = Some(batch);
        let id = BatchId::new(slot, place.generation);
        slots.used += 1;
        slots.order.push_back(id);
        id
    }

    /// The batch with this number.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn get(&self, id: BatchId) -> Result<Batch> {
        let slots = self.lock();
        slots.find(id).and_then(|slot| slots.all[slot].batch.clone()).ok_or_else(|| unknown(id))
    }

    /// The batch with this number, which ends the number.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn take(&self, id: BatchId) -> Result<Batch> {
        let mut slots = self.lock();
        slots.take(id).ok_or_else(|| unknown(id))
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots {
    fn find(&self, id: BatchId) -> Option<usize> {
        let (slot, generation) = id.parts();
        self.all
            .get(slot)
            .filter(|s| u64::from(s.generation) == generation && s.batch.is_some())?;
        Some(slot)
    }

    fn take(&mut self, id: BatchId) -> Option<Batch> {
        let slot = self.find(id)?;
        let batch = self.all[slot].batch.take();
        self.free.push(slot);
        self.used -= 1;
        batch
    }

    /// Forgets the oldest numbers: taken ones always, final ones while too many are in use. A
    /// running batch at the front goes to the back, so that the work stays constant per insertion.
    fn evict(&mut self) {
        if self.order.len() > 2 * self.used + KEPT {
            let order = std::mem::take(&mut self.order);
            self.order = order.into_iter().filter(|&id| self.find(id).is_some()).collect();
        }
        for _ in 0..2 {
            let Some(&oldest) = self.order.front() else { return };
            let running = match self.find(oldest).and_then(|slot| self.all[slot].batch.as_ref()) {
                None => false,
                Some(_) if self.used < KEPT => return,
                Some(batch) => batch.poll() == crate::transfer::BatchState::Running,
            };
            self.order.pop_front();
            if running {
                self.order.push_back(oldest);
            } else {
                self.take(oldest);
            }
        }
    }
}

fn unknown(id: BatchId) -> Error {
    Error::UnknownBatch { id: id.as_raw() }
}

impl fmt::Debug for BatchTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchTable").field("used", &self.lock().used).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::batch::tests::{batch, complete};

    #[test]
    fn an_id_is_positive_and_valid_until_it_is_taken() {
        let table = BatchTable::default();
        let id = table.insert(batch(&[1]));
        assert!(id.as_raw() > 0 && id.as_raw() < 1 << 63);
        assert!(table.get(id).is_ok());
        assert!(table.take(id).is_ok());
        assert!(matches!(table.get(id), Err(Error::UnknownBatch { .. })));
        assert!(matches!(table.take(id), Err(Error::UnknownBatch { .. })));
        let next = table.insert(batch(&[1]));
        assert_ne!(id, next, "the slot is used again, the number is not");
        assert!(table.get(id).is_err());
    }

    #[test]
    fn made_up_ids_find_nothing() {
        let table = BatchTable::default();
        let _ = table.insert(batch(&[1]));
        for raw in [0, 1, 2, 12345, 1 << 32, u64::MAX, 1 << 63, (2 << 32), 3] {
            assert!(table.get(BatchId::from_raw(raw)).is_err(), "{raw}");
        }
    }

    #[test]
    fn the_newest_final_batches_are_kept_and_running_ones_always() {
        let table = BatchTable::default();
        let running = table.insert(batch(&[1]));
        let done = batch(&[0]);
        complete(&done);
        let first = table.insert(done.clone());
        let ids: Vec<BatchId> = (0..KEPT + 10).map(|_| table.insert(done.clone())).collect();
        assert!(table.get(running).is_ok());
        assert!(table.get(first).is_err());
        assert!(ids[100..].iter().all(|&id| table.get(id).is_ok()));
        assert!(table.lock().used <= KEPT + 1);
    }

    #[test]
    fn taken_ids_do_not_pile_up_behind_a_running_batch() {
        let table = BatchTable::default();
        let _ = table.insert(batch(&[1]));
        for _ in 0..4 * KEPT {
            let id = table.insert(batch(&[0]));
            drop(table.take(id).unwrap());
        }
        assert!(table.lock().order.len() <= KEPT + 3);
    }
}
