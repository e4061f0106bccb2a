//! Following a socket with copies to device memory.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::memory::fill_slot;
use crate::staging::ring::Taken;
use crate::staging::{Bell, Copy, Done, Fault, Job, Keep, Loan, Stager, Turn, Way};

/// Where a connection receives what goes to device memory. Small payloads share a slot.
#[derive(Default)]
pub(crate) struct Inlet {
    turn: Option<Turn>,
    open: Option<Open>,
    /// What was submitted and has not landed, in its order; kept only if somebody asks.
    landings: Option<VecDeque<Arc<Done>>>,
    /// How many of them there were, and how many have landed.
    submitted: u64,
    landed: u64,
}

/// A slot with room left.
struct Open {
    stager: Arc<Stager>,
    loan: Arc<Loan>,
    /// Bytes that have arrived.
    used: u64,
    copies: Vec<Copy>,
    /// How many of them are in `copies`.
    pending: u64,
    keep: Vec<Keep>,
}

/// How much is copied at once while a payload is arriving: enough that the device's overhead does not matter.
const PIECE: u64 = 256 << 10;

/// Where bytes can be received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Room {
    /// So many bytes from this address on.
    At(u64, u64),
    /// Nowhere; the bell will ring.
    Starved,
}

impl Inlet {
    /// One that is asked what has landed.
    pub(crate) fn followed() -> Self {
        Self { landings: Some(VecDeque::new()), ..Self::default() }
    }

    /// The mark that [`Inlet::reached`] comes to when everything has landed that was received so far.
    pub(crate) fn mark(&self) -> u64 {
        let more = self.open.as_ref().is_some_and(|open| !open.copies.is_empty());
        self.submitted + u64::from(more)
    }

    /// How far the copies have come.
    ///
    /// # Errors
    /// One of them failed.
    pub(crate) fn reached(&mut self) -> Result<u64, Fault> {
        let Some(landings) = &mut self.landings else { return Ok(self.landed) };
        while let Some(result) = landings.front().and_then(|done| done.result()) {
            result?;
            landings.pop_front();
            self.landed += 1;
        }
        Ok(self.landed)
    }

    /// Where the next bytes for memory of `stager`'s device are to be received.
    ///
    /// # Errors
    /// There are no slots.
    pub(crate) fn room(
        &mut self,
        stager: &Arc<Stager>,
        bell: &Arc<dyn Bell>,
    ) -> Result<Room, Fault> {
        let fits = |open: &Open| Arc::ptr_eq(&open.stager, stager) && open.used < open.loan.len();
        if !self.open.as_ref().is_some_and(fits) {
            self.rest(bell);
            match stager.slot(Way::ToDevice, &mut self.turn, bell)? {
                Taken::Wait => return Ok(Room::Starved),
                Taken::Slot(loan) => {
                    self.open = Some(Open {
                        stager: Arc::clone(stager),
                        loan: Arc::new(loan),
                        used: 0,
                        copies: Vec::new(),
                        pending: 0,
                        keep: Vec::new(),
                    });
                }
            }
        }
        let open = self.open.as_ref().expect("it is there, or was made");
        Ok(Room::At(open.loan.addr() + open.used, open.loan.len() - open.used))
    }

    /// The next `len` bytes, which belong at `device`, have been received where [`Inlet::room`] said.
    pub(crate) fn landed(&mut self, device: u64, len: u64, keep: Keep) {
        let open = self.open.as_mut().expect("what was received was planned");
        let other = open.loan.addr() + open.used;
        assert!(open.used + len <= open.loan.len(), "no more is received than was planned");
        match open.copies.last_mut() {
            Some(last) if last.device + last.len as u64 == device => last.len += len as usize,
            _ => open.copies.push(Copy { device, other, len: len as usize }),
        }
        (open.used, open.pending) = (open.used + len, open.pending + len);
        open.keep.push(keep);
    }

    /// Bytes that were received elsewhere: as many of them as fit are put in their place.
    ///
    /// # Errors
    /// There are no slots.
    pub(crate) fn put(
        &mut self,
        stager: &Arc<Stager>,
        device: u64,
        bytes: &[u8],
        bell: &Arc<dyn Bell>,
        keep: impl FnOnce() -> Keep,
    ) -> Result<usize, Fault> {
        let Room::At(_, room) = self.room(stager, bell)? else { return Ok(0) };
        let len = bytes.len().min(room as usize);
        let open = self.open.as_ref().expect("it has room");
        fill_slot(&open.loan, open.used, &bytes[..len]);
        self.landed(device, len as u64, keep());
        Ok(len)
    }

    /// Has what was received copied, if it is much.
    pub(crate) fn flush_much(&mut self, bell: &Arc<dyn Bell>) {
        if self.open.as_ref().is_some_and(|open| open.pending >= PIECE) {
            self.flush(bell);
        }
    }

    /// Has what was received copied.
    pub(crate) fn flush(&mut self, bell: &Arc<dyn Bell>) {
        let Some(open) = self.open.as_mut().filter(|open| !open.copies.is_empty()) else { return };
        open.pending = 0;
        let mut keep = std::mem::take(&mut open.keep);
        keep.push(Keep::Slot(Arc::clone(&open.loan)));
        let (way, copies) = (Way::ToDevice, std::mem::take(&mut open.copies));
        let bell = self.landings.is_some().then(|| Arc::clone(bell));
        let done = open.stager.submit(Job { way, copies, keep, bell });
        self.submitted += 1;
        if let Some(landings) = &mut self.landings {
            landings.push_back(done);
        }
    }

    /// Has what was received copied, and lets the slot go to whoever needs it.
    pub(crate) fn rest(&mut self, bell: &Arc<dyn Bell>) {
        self.flush(bell);
        self.open = None;
    }
}
