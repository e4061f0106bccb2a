//! The send half of a lane: requests that have not left yet.
//!
//! It has one owner at a time, who has it locked: the lane's IO thread, or a submitting thread to which an idle lane
//! was offered. All that a sender needs is here; what it launched is taken over by the receive half, which belongs to
//! the IO thread alone.

use std::collections::VecDeque;
use std::sync::Arc;

use tensorferry_wire::{HEADER_LEN, Header, Op, Version};

use crate::memory::Span;
use crate::staging::{Ahead, Bell, Fault, Keep, Outlet, Payload, Stager};
use crate::tcp::{MAX_CALL_BYTES, MAX_CALL_SPANS};
use crate::transfer::{BatchInner, Hold, Request, Slice};

/// Requests in the order in which they leave.
pub(crate) struct SendHalf {
    version: Version,
    queue: VecDeque<Outgoing>,
    /// Slices whose answers are awaited, and that the receive half does not know of yet.
    pub(super) launched: Vec<(u64, Slice)>,
    next_seq: u64,
    open: bool,
    outlet: Outlet,
    /// Payloads of the queue that come from a device, in its order.
    staged: VecDeque<Staged>,
    /// What a submitting thread works with.
    pub(crate) slices: Vec<Slice>,
    pub(crate) spans: Vec<Span>,
}

struct Outgoing {
    seq: u64,
    header: [u8; HEADER_LEN],
    local: u64,
    /// Its payload comes from a device: the next of those that do.
    staged: bool,
    /// Payload bytes: none for a READ.
    payload: u64,
    /// Bytes of header and payload that a socket has taken.
    sent: u64,
}

/// A payload that is copied from a device before it can be sent.
struct Staged {
    seq: u64,
    payload: Payload,
    /// What a copy of it has to keep from being settled.
    batch: Arc<BatchInner>,
    entry: u32,
}

const HEADER: u64 = HEADER_LEN as u64;

impl SendHalf {
    pub(crate) fn new(version: Version) -> Self {
        Self {
            version,
            queue: VecDeque::new(),
            launched: Vec::new(),
            next_seq: 0,
            open: true,
            outlet: Outlet::default(),
            staged: VecDeque::new(),
            slices: Vec::new(),
            spans: Vec::new(),
        }
    }

    /// Takes a slice on: it will be sent behind all others.
    #[inline]
    pub(crate) fn launch(&mut self, slice: Slice) {
        let Request { op, local, remote, len } = slice.request();
        let header = Header { op, version: self.version, addr: remote, len };
        let payload = if op == Op::Write { len } else { 0 };
        let device = slice.device().filter(|_| payload > 0);
        let staged = device.is_some();
        if let Some(device) = device {
            self.staged.push_back(Staged::of(self.next_seq, &slice, device));
        }
        self.queue.push_back(Outgoing {
            seq: self.next_seq,
            header: header.encode(),
            local,
            staged,
            payload,
            sent: 0,
        });
        self.launched.push((self.next_seq, slice));
        self.next_seq += 1;
    }

    /// Whether something is left to send.
    pub(crate) fn wants(&self) -> bool {
        self.open && !self.queue.is_empty()
    }

    /// Whether something that is left comes from a device.
    pub(crate) fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Has devices copy what will be sent next. `Starved`: for want of a slot; the bell will ring.
    pub(crate) fn ask(&mut self, bell: &Arc<dyn Bell>) -> Ahead {
        let mut ahead = Ahead::All;
        for Staged { payload, batch, entry, .. } in &mut self.staged {
            ahead = self.outlet.ask(payload, bell, || Keep::Hold(Hold::on(batch, *entry)));
            if ahead != Ahead::All {
                break;
            }
        }
        self.outlet.flush(bell);
        ahead
    }

    /// Gives back the staging slots of what waits for the socket.
    pub(crate) fn relinquish(&mut self) {
        let front = self.queue.front().map(|item| (item.seq, item.sent.saturating_sub(HEADER)));
        let sent = |seq| front.filter(|(front, _)| *front == seq).map_or(0, |(_, sent)| sent);
        let staged = self.staged.iter_mut().map(|one| (&mut one.payload, sent(one.seq)));
        self.outlet.relinquish(staged);
    }

    /// Why the payload that is to be sent next will not come.
    pub(crate) fn fault(&self) -> Option<Fault> {
        let front = self.queue.front().filter(|item| item.staged)?;
        self.staged.front().filter(|staged| staged.seq == front.seq)?.payload.fault()
    }

    /// What the next send call sends, at most `max_spans` pieces.
    pub(crate) fn plan(&self, max_spans: usize, spans: &mut Vec<Span>) {
        // Made twice, so that the path of host memory has no trace of staging.
        if self.staged.is_empty() {
            self.plan_as::<false>(max_spans, spans);
        } else {
            self.plan_as::<true>(max_spans, spans);
        }
    }

    #[inline]
    fn plan_as<const STAGES: bool>(&self, max_spans: usize, spans: &mut Vec<Span>) {
        let (mut room, mut staged) = (MAX_CALL_BYTES, self.staged.iter());
        for item in &self.queue {
            if spans.len() + 2 > max_spans.clamp(2, MAX_CALL_SPANS) || room == 0 {
                break;
            }
            let before = spans.len();
            if item.sent < HEADER {
                spans.push(Span::of(&item.header[item.sent as usize..]));
            }
            let offset = item.sent.saturating_sub(HEADER);
            let mut take = (item.payload - offset).min(room);
            if STAGES && item.staged {
                let payload = staged.next().map(|staged| &staged.payload);
                take = payload.map_or(0, |payload| payload.spans(offset, take, spans));
                if take == 0 {
                    // No header goes ahead of its payload's first bytes, or nobody could take it back.
                    spans.truncate(before);
                    break;
                }
            } else if take > 0 {
                spans.push(Span { addr: item.local + offset, len: take as usize });
            }
            room -= take;
            if offset + take < item.payload {
                break;
            }
        }
        spans.truncate(max_spans);
    }

    /// A socket has taken `n` bytes of what was planned.
    pub(crate) fn sent(&mut self, n: usize) {
        if self.staged.is_empty() {
            self.sent_as::<false>(n);
        } else {
            self.sent_as::<true>(n);
        }
    }

    #[inline]
    fn sent_as<const STAGES: bool>(&mut self, n: usize) {
        let mut n = n as u64;
        while n > 0 {
            let front = self.queue.front_mut().expect("no more is taken than was planned");
            let take = n.min(HEADER + front.payload - front.sent);
            front.sent += take;
            n -= take;
            if STAGES
                && front.staged
                && let Some(staged) = self.staged.front_mut()
            {
                staged.payload.sent(front.sent.saturating_sub(HEADER));
            }
            if front.sent == HEADER + front.payload {
                if STAGES && front.staged {
                    self.staged.pop_front();
                }
                self.queue.pop_front();
            }
        }
    }

    /// The request that leaves next, or is leaving.
    pub(super) fn front(&self) -> Option<u64> {
        self.queue.front().map(|item| item.seq)
    }

    /// Whether any byte of the request was given to a socket.
    pub(super) fn touched(&self, seq: u64) -> bool {
        match self.queue.front() {
            None => true,
            Some(front) => seq < front.seq || (seq == front.seq && front.sent > 0),
        }
    }

    /// Whether all of the request was given to a socket.
    pub(super) fn gone(&self, seq: u64) -> bool {
        self.front().is_none_or(|front| seq < front)
    }

    /// How much of the request, whose payload has so many bytes, was given to a socket.
    pub(super) fn sent_of(&self, seq: u64, payload: u64) -> u64 {
        match self.queue.front() {
            Some(front) if seq == front.seq => front.sent,
            Some(front) if seq > front.seq => 0,
            _ => HEADER + payload,
        }
    }

    /// Takes an untouched request back.
    pub(super) fn take_back(&mut self, seq: u64) {
        self.queue.retain(|item| item.seq != seq);
        self.staged.retain(|staged| staged.seq != seq);
        if self.staged.is_empty() {
            self.outlet.give_up_turn();
        }
    }

    /// Takes every untouched request back.
    pub(super) fn take_back_untouched(&mut self) {
        let touched = usize::from(self.queue.front().is_some_and(|item| item.sent > 0));
        self.queue.truncate(touched);
        let staged = self.queue.iter().filter(|item| item.staged).count();
        self.staged.truncate(staged);
        if self.staged.is_empty() {
            self.outlet.give_up_turn();
        }
    }

    /// Nothing more will be sent; what was not sent is forgotten here.
    pub(super) fn shut(&mut self) {
        self.open = false;
        self.queue.clear();
        self.staged.clear();
        self.outlet.give_up_turn();
    }

    /// All was sent, and nothing will follow.
    pub(crate) fn end(&mut self) {
        self.open = false;
    }

    /// Whether it was shut.
    pub(crate) fn is_shut(&self) -> bool {
        !self.open
    }
}

impl Staged {
    #[cold]
    fn of(seq: u64, slice: &Slice, device: &Arc<Stager>) -> Self {
        let payload = Payload::new(device, slice.local(), slice.len);
        Self { seq, payload, batch: Arc::clone(&slice.batch), entry: slice.entry }
    }
}
