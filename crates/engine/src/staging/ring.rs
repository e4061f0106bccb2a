//! Slots of pinned memory, lent one at a time and in the order in which they were asked for.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::staging::{Bell, Fault};
use crate::sync::locked;

/// The slots of one device for one direction.
pub(crate) struct Ring {
    slot_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: Vec<u64>,
    /// In the order in which they came.
    waiting: VecDeque<(u64, Arc<dyn Bell>)>,
    /// Slots that were given to waiters which have not come for them.
    granted: HashMap<u64, u64>,
    next: u64,
    /// Since when somebody waits and no slot has come back.
    starving_since: Option<Instant>,
    opened: Opened,
}

#[derive(Clone, Default)]
enum Opened {
    /// Nobody has needed it.
    #[default]
    No,
    /// Its memory is being pinned, or is there.
    Yes,
    /// There are no slots, since then. `None`: and there will be none.
    Failed(Fault, Option<Instant>),
}

/// How long a refused attempt to pin memory is believed.
const BELIEVED: Duration = Duration::from_secs(1);

/// A slot, until the last clone of its `Arc` is gone.
pub(crate) struct Loan {
    ring: Arc<Ring>,
    addr: u64,
    /// How many slots its borrower has.
    count: Option<Arc<AtomicUsize>>,
}

/// A place in the line for a slot; dropped, it is given up.
pub(crate) struct Turn {
    ring: Arc<Ring>,
    number: u64,
}

/// What came of asking for a slot.
pub(crate) enum Taken {
    Slot(Loan),
    /// The bell rings when there is one.
    Wait,
}

impl Ring {
    pub(crate) fn new(slot_bytes: usize) -> Arc<Self> {
        Arc::new(Self { slot_bytes, state: Mutex::default() })
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// True for the one who is to have the memory pinned, now.
    pub(crate) fn begin_opening(&self) -> bool {
        let mut state = self.lock();
        let due = match &state.opened {
            Opened::No => true,
            Opened::Yes | Opened::Failed(_, None) => false,
            Opened::Failed(_, Some(since)) => since.elapsed() > BELIEVED,
        };
        if due {
            state.opened = Opened::Yes;
        }
        due
    }

    /// Takes pinned memory into use.
    pub(crate) fn add(self: &Arc<Self>, slots: impl Iterator<Item = u64>) {
        for addr in slots {
            self.put_back(addr);
        }
    }

    /// There are no slots. `for_good`: and nobody is to try again.
    pub(crate) fn fail(&self, why: &Fault, for_good: bool) {
        let mut state = self.lock();
        state.opened = Opened::Failed(Arc::clone(why), (!for_good).then(Instant::now));
        let waiting = std::mem::take(&mut state.waiting);
        state.starving_since = None;
        drop(state);
        for (_, bell) in waiting {
            bell.ring();
        }
    }

    /// Why there is no slot at all.
    pub(crate) fn failure(&self) -> Option<Fault> {
        match &self.lock().opened {
            Opened::Failed(why, _) => Some(Arc::clone(why)),
            Opened::No | Opened::Yes => None,
        }
    }

    /// How many slots nobody has.
    pub(crate) fn free(&self) -> usize {
        self.lock().free.len()
    }

    /// A slot, or a place in the line for one.
    ///
    /// # Errors
    /// There are none, for this reason.
    pub(crate) fn take(
        self: &Arc<Self>,
        turn: &mut Option<Turn>,
        bell: &Arc<dyn Bell>,
    ) -> Result<Taken, Fault> {
        let mut state = self.lock();
        let mine = turn.as_ref().filter(|turn| Arc::ptr_eq(&turn.ring, self)).map(|t| t.number);
        if let Some(addr) = mine.and_then(|number| state.granted.remove(&number)) {
            drop(state);
            *turn = None;
            return Ok(Taken::Slot(self.loan(addr)));
        }
        if let Opened::Failed(why, _) = &state.opened {
            return Err(Arc::clone(why));
        }
        let queued = mine.is_some_and(|mine| state.waiting.iter().any(|(n, _)| *n == mine));
        if queued {
            return Ok(Taken::Wait);
        }
        if state.waiting.is_empty()
            && let Some(addr) = state.free.pop()
        {
            drop(state);
            *turn = None;
            return Ok(Taken::Slot(self.loan(addr)));
        }
        let number = state.next;
        state.next += 1;
        state.waiting.push_back((number, Arc::clone(bell)));
        state.starving_since.get_or_insert_with(Instant::now);
        drop(state);
        *turn = Some(Turn { ring: Arc::clone(self), number });
        Ok(Taken::Wait)
    }

    /// Whether somebody has waited for `limit` while no slot came back.
    pub(crate) fn is_starving(&self, now: Instant, limit: Duration) -> bool {
        let since = self.lock().starving_since;
        since.is_some_and(|since| now.saturating_duration_since(since) >= limit)
    }

    fn loan(self: &Arc<Self>, addr: u64) -> Loan {
        Loan { ring: Arc::clone(self), addr, count: None }
    }

    fn put_back(&self, addr: u64) {
        let mut state = self.lock();
        let Some((number, bell)) = state.waiting.pop_front() else {
            state.free.push(addr);
            return;
        };
        state.granted.insert(number, addr);
        state.starving_since = (!state.waiting.is_empty()).then(Instant::now);
        drop(state);
        bell.ring();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

impl Loan {
    /// The address of the slot's first byte.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// The slot's length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.ring.slot_bytes as u64
    }

    /// Adds it to a borrower's count, until it goes back.
    pub(crate) fn counted(mut self, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        self.count = Some(Arc::clone(count));
        self
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(count) = &self.count {
            count.fetch_sub(1, Ordering::Relaxed);
        }
        self.ring.put_back(self.addr);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.ring.lock();
        match state.granted.remove(&self.number) {
            None => {
                state.waiting.retain(|(number, _)| *number != self.number);
                if state.waiting.is_empty() {
                    state.starving_since = None;
                }
            }
            // It came too late; the next in the line gets it.
            Some(addr) => {
                drop(state);
                self.ring.put_back(addr);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Bell for Count {
        fn ring(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn rung(bell: &Arc<Count>) -> usize {
        bell.0.load(Ordering::Relaxed)
    }

    fn ring(slots: u64) -> Arc<Ring> {
        let ring = Ring::new(4096);
        assert!(ring.begin_opening() && !ring.begin_opening());
        ring.add((0..slots).map(|i| 0x1000 * (i + 1)));
        ring
    }

    fn take(ring: &Arc<Ring>, turn: &mut Option<Turn>, bell: &Arc<Count>) -> Option<Loan> {
        let bell: Arc<dyn Bell> = Arc::clone(bell) as _;
        match ring.take(turn, &bell).unwrap() {
            Taken::Slot(loan) => Some(loan),
            Taken::Wait => None,
        }
    }

    #[test]
    fn slots_go_to_those_who_wait_in_their_order() {
        let ring = ring(1);
        let (mut none, bells) = (None, [Arc::new(Count::default()), Arc::new(Count::default())]);
        let first = take(&ring, &mut none, &bells[0]).unwrap();
        let (mut a, mut b) = (None, None);
        assert!(take(&ring, &mut a, &bells[0]).is_none());
        assert!(take(&ring, &mut b, &bells[1]).is_none());
        drop(first);
        assert_eq!((rung(&bells[0]), rung(&bells[1])), (1, 0));
        // Nobody overtakes: the slot is granted.
        assert!(take(&ring, &mut b, &bells[1]).is_none());
        let got = take(&ring, &mut a, &bells[0]).unwrap();
        assert!(a.is_none());
        drop(got);
        assert!(take(&ring, &mut b, &bells[1]).is_some());
    }

    #[test]
    fn who_gives_up_passes_the_slot_on() {
        let ring = ring(1);
        let bells = [Arc::new(Count::default()), Arc::new(Count::default())];
        let loan = take(&ring, &mut None, &bells[0]).unwrap();
        let (mut a, mut b, mut c) = (None, None, None);
        assert!(take(&ring, &mut a, &bells[0]).is_none());
        assert!(take(&ring, &mut b, &bells[0]).is_none());
        assert!(take(&ring, &mut c, &bells[1]).is_none());
        drop(b); // It waits.
        drop(loan);
        drop(a); // It was granted one.
        assert_eq!(rung(&bells[1]), 1);
        assert!(take(&ring, &mut c, &bells[1]).is_some());
        assert_eq!(ring.lock().free.len(), 1);
    }

    #[test]
    fn a_ring_that_cannot_be_had_tells_everybody() {
        let ring = Ring::new(4096);
        let bell = Arc::new(Count::default());
        let mut turn = None;
        assert!(take(&ring, &mut turn, &bell).is_none());
        ring.fail(&Arc::new(crate::Error::Closed), true);
        assert_eq!(rung(&bell), 1);
        let bell: Arc<dyn Bell> = bell;
        assert!(ring.take(&mut turn, &bell).is_err());
    }

    #[test]
    fn a_slot_is_counted_until_its_last_user_has_let_go() {
        let ring = ring(2);
        let (bell, count) = (Arc::new(Count::default()), Arc::new(AtomicUsize::new(0)));
        let loan = Arc::new(take(&ring, &mut None, &bell).unwrap().counted(&count));
        let copy = Arc::clone(&loan);
        drop(loan);
        assert_eq!((count.load(Ordering::Relaxed), ring.lock().free.len()), (1, 1));
        drop(copy);
        assert_eq!((count.load(Ordering::Relaxed), ring.lock().free.len()), (0, 2));
    }
}
