//! Reading device memory ahead of a socket.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::memory::Span;
use crate::staging::ring::Taken;
use crate::staging::{Bell, Copy, Done, Fault, Job, Keep, Loan, Stager, Turn, Way};

/// What a connection reads ahead: pieces of its payloads in the order in which they will be sent.
/// Small ones share a slot.
pub(crate) struct Outlet {
    turn: Option<Turn>,
    open: Option<Open>,
    /// Slots that hold pieces of this connection.
    slots: Arc<AtomicUsize>,
    /// How much is copied at once now; less after a pause, so that sending begins early.
    piece: u64,
}

/// A slot with room left.
struct Open {
    stager: Arc<Stager>,
    /// Bytes that are spoken for.
    used: u64,
    /// Copies that are to be submitted together; the last of `used` bytes.
    copies: Vec<Copy>,
    keep: Vec<Keep>,
    group: Arc<Group>,
    /// Bytes of the group.
    bytes: u64,
}

/// Pieces that are copied together.
struct Group {
    loan: Arc<Loan>,
    /// Set when the copies were submitted.
    done: OnceLock<Arc<Done>>,
}

/// A payload in device memory.
pub(crate) struct Payload {
    stager: Arc<Stager>,
    addr: u64,
    len: u64,
    /// Bytes that were asked of the device.
    asked: u64,
    pieces: VecDeque<Piece>,
    /// Why there will be no more of them.
    refused: Option<Fault>,
}

/// A part of a payload, and where it is in a slot.
struct Piece {
    start: u64,
    len: u64,
    addr: u64,
    group: Arc<Group>,
}

/// How far reading ahead has come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ahead {
    /// All of the payload was asked for.
    All,
    /// Enough for now.
    Enough,
    /// No slot is free; the bell will ring.
    Starved,
}

/// How much is copied at once, after a pause, and at most: enough that the device's overhead does not matter.
const FIRST_PIECE: u64 = 64 << 10;
const PIECE: u64 = 256 << 10;

impl Default for Outlet {
    fn default() -> Self {
        Self { turn: None, open: None, slots: Arc::default(), piece: FIRST_PIECE }
    }
}

impl Payload {
    pub(crate) fn new(stager: &Arc<Stager>, addr: u64, len: u64) -> Self {
        Self {
            stager: Arc::clone(stager),
            addr,
            len,
            asked: 0,
            pieces: VecDeque::new(),
            refused: None,
        }
    }

    /// The bytes from `from` on that are there, at most `room`; returns how many.
    pub(crate) fn spans(&self, from: u64, room: u64, spans: &mut Vec<Span>) -> u64 {
        let mut at = from;
        for piece in self.pieces.iter().skip_while(|piece| piece.end() <= from) {
            let left = room - (at - from);
            if left == 0 || !piece.group.done.get().is_some_and(|done| done.is_complete()) {
                break;
            }
            let take = (piece.end() - at).min(left);
            let addr = piece.addr + (at - piece.start);
            match spans.last_mut() {
                Some(last) if at > from && last.addr + last.len as u64 == addr => {
                    last.len += take as usize;
                }
                _ => spans.push(Span { addr, len: take as usize }),
            }
            at += take;
        }
        at - from
    }

    /// Whether its first bytes are there.
    pub(crate) fn has_begun(&self) -> bool {
        let first = self.pieces.front().filter(|piece| piece.start == 0);
        first.is_some_and(|piece| piece.group.done.get().is_some_and(|done| done.is_complete()))
    }

    /// The first `upto` bytes were sent.
    pub(crate) fn sent(&mut self, upto: u64) {
        while self.pieces.front().is_some_and(|piece| piece.end() <= upto) {
            self.pieces.pop_front();
        }
    }

    /// Why the next bytes will not come.
    pub(crate) fn fault(&self) -> Option<Fault> {
        match self.pieces.front() {
            Some(piece) => piece.group.done.get()?.result()?.err(),
            None => self.refused.clone(),
        }
    }

    /// Gives its slots back; what was not sent is read again.
    fn relinquish(&mut self, sent: u64) {
        self.pieces.clear();
        self.asked = sent;
    }
}

impl Outlet {
    /// Asks the device for more of a payload, unless enough was asked for. `keep` is held by each copy.
    pub(crate) fn ask(
        &mut self,
        payload: &mut Payload,
        bell: &Arc<dyn Bell>,
        keep: impl Fn() -> Keep,
    ) -> Ahead {
        while payload.asked < payload.len {
            let fits = |open: &Open| {
                Arc::ptr_eq(&open.stager, &payload.stager) && open.used < open.group.loan.len()
            };
            if !self.open.as_ref().is_some_and(fits) {
                self.flush(bell);
                match self.take(&payload.stager, bell) {
                    // What was refused before can be had now.
                    Ok(None) => payload.refused = None,
                    Ok(Some(less)) => return less,
                    Err(why) => {
                        payload.refused = Some(why);
                        return Ahead::Enough;
                    }
                }
            }
            let open = self.open.as_mut().expect("it fits, or was taken");
            let room = self.piece - open.bytes;
            let piece =
                open.add(payload.addr, payload.asked, room.min(payload.len - payload.asked));
            open.keep.push(keep());
            payload.asked += piece.len;
            payload.pieces.push_back(piece);
            if open.bytes == self.piece {
                open.submit(bell);
                self.piece = (self.piece * 2).min(PIECE);
            }
        }
        Ahead::All
    }

    /// Submits what was collected. The slot is not kept for what may come.
    pub(crate) fn flush(&mut self, bell: &Arc<dyn Bell>) {
        if let Some(mut open) = self.open.take() {
            open.submit(bell);
        }
    }

    /// Nothing is to be read ahead any more: the place in the line for a slot is given up.
    pub(crate) fn give_up_turn(&mut self) {
        self.turn = None;
    }

    /// Gives every slot back that only waits to be sent.
    pub(crate) fn relinquish<'a>(
        &mut self,
        payloads: impl Iterator<Item = (&'a mut Payload, u64)>,
    ) {
        self.turn = None;
        for (payload, sent) in payloads {
            payload.relinquish(sent);
        }
    }

    /// Takes a slot; else says why there is none.
    fn take(&mut self, stager: &Arc<Stager>, bell: &Arc<dyn Bell>) -> Result<Option<Ahead>, Fault> {
        // Half of the ring, so that a connection can fill one part while it sends another.
        if self.slots.load(Ordering::Relaxed) >= (stager.slots() / 2).max(1) {
            self.turn = None;
            return Ok(Some(Ahead::Enough));
        }
        let Taken::Slot(loan) = stager.slot(Way::ToHost, &mut self.turn, bell)? else {
            return Ok(Some(Ahead::Starved));
        };
        if self.slots.load(Ordering::Relaxed) == 0 {
            self.piece = FIRST_PIECE;
        }
        let loan = Arc::new(loan.counted(&self.slots));
        self.open = Some(Open {
            stager: Arc::clone(stager),
            used: 0,
            copies: Vec::new(),
            keep: Vec::new(),
            group: Arc::new(Group { loan, done: OnceLock::new() }),
            bytes: 0,
        });
        Ok(None)
    }
}

impl Piece {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

impl Open {
    /// Adds at most `most` bytes of the payload at `addr`, from `start` on.
    fn add(&mut self, addr: u64, start: u64, most: u64) -> Piece {
        let loan = &self.group.loan;
        let len = (loan.len() - self.used).min(most);
        let (device, other) = (addr + start, loan.addr() + self.used);
        match self.copies.last_mut() {
            // One copy, where both sides go on.
            Some(last) if last.device + last.len as u64 == device => last.len += len as usize,
            _ => self.copies.push(Copy { device, other, len: len as usize }),
        }
        (self.used, self.bytes) = (self.used + len, self.bytes + len);
        Piece { start, len, addr: other, group: Arc::clone(&self.group) }
    }

    fn submit(&mut self, bell: &Arc<dyn Bell>) {
        if self.copies.is_empty() {
            return;
        }
        let loan = Arc::clone(&self.group.loan);
        let mut keep = std::mem::take(&mut self.keep);
        keep.push(Keep::Slot(Arc::clone(&loan)));
        let (way, copies) = (Way::ToHost, std::mem::take(&mut self.copies));
        let done = self.stager.submit(Job { way, copies, keep, bell: Some(Arc::clone(bell)) });
        let next = Arc::new(Group { loan, done: OnceLock::new() });
        let _ = std::mem::replace(&mut self.group, next).done.set(done);
        self.bytes = 0;
    }
}
