//! A lane as its initiator sees it: which requests are in flight, and what the answers mean.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_gpu::DeviceId;
use tensorferry_wire::{
    Expected, Op, ReplyEvent, ReplyReader, ReplyWant, STATUS_LEN, Version, WireError,
};

use crate::memory::Span;
use crate::peer::{LaneState, LaneStats};
use crate::staging::{Bell, Inlet, Keep, Room as SlotRoom};
use crate::tcp::{MAX_CALL_BYTES, MAX_CALL_SPANS, SendHalf};
use crate::transfer::{Cause, Slice, Stop};

/// How many requests a lane has in flight at most.
const WINDOW_REQUESTS: usize = 1024;
/// How many payload bytes a lane has in flight at most.
const WINDOW_BYTES: u64 = 8 << 20;
/// Where status frames land: as many as one call can bring.
const SCRATCH: usize = 512 * STATUS_LEN;
/// Bytes of cancelled READs that a lane swallows before it is given up instead.
const MAX_DISCARD: u64 = 16 << 20;
/// How often a slice is sent again after a lost connection.
const MAX_TRIES: u8 = 1;
/// How often a slice is sent again that stood behind a refused one, or of which nothing had left.
const MAX_UNTOUCHED_TRIES: u8 = 64;

/// The receive half of a lane, and what it decides. Everything but sending.
pub(crate) struct Lane {
    version: Version,
    peer_addr: SocketAddr,
    /// In the order of their answers.
    flights: VecDeque<Flight>,
    /// Bytes of the requests that it took, without those that were taken back, and of those that are answered.
    taken_bytes: u64,
    done_bytes: u64,
    reader: ReplyReader,
    scratch: Box<[u8; SCRATCH]>,
    /// The only request in flight must not be followed by another.
    alone: bool,
    /// Why the lane takes no more requests.
    closing: Option<&'static str>,
    /// It does not move, and takes no more requests until it does.
    held: bool,
    /// A request that had left, at least in part, was not answered by its deadline.
    timed_out: bool,
    /// Requests taken so far, and those of them that were taken back unsent.
    taken: u64,
    taken_back: u64,
    /// Where READ payloads for device memory land.
    inlet: Inlet,
    /// Some READ in flight is for device memory.
    stages: bool,
}

/// What a receive call is to bring.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Planned {
    /// Some of it goes to memory of the user's, which the kernel may refuse to touch.
    pub(crate) users: bool,
    /// More could be received if there were a staging slot; the bell will ring.
    pub(crate) starved: bool,
}

/// A request that has no answer yet.
struct Flight {
    seq: u64,
    op: Op,
    len: u64,
    /// `None`: settled already; its answer is received and dropped.
    slice: Option<Slice>,
    /// Its payload lands in a staging slot.
    staged: bool,
}

/// What a lane can take on now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Room {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
    /// Nothing is in flight, so a request that needs the lane for itself can have it.
    pub(crate) empty: bool,
}

/// Why a lane cannot go on.
#[derive(Debug)]
pub(crate) enum LaneFault {
    /// The peer refused a request and closes; what followed it was not applied.
    Refused,
    /// The peer sent something that it must not.
    Wire(WireError),
}

/// How a connection ended.
pub(crate) enum Ending<'a> {
    /// The peer refused a request: nothing behind it was applied.
    Refusal,
    /// The stream ended or broke.
    Lost(&'a str),
    /// The peer broke the protocol.
    Violation(&'a Arc<WireError>),
}

/// What the end of a connection cost, in slices.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Cost {
    pub(crate) sent_again: usize,
    pub(crate) failed: usize,
}

impl Lane {
    pub(crate) fn new(version: Version, peer_addr: SocketAddr) -> Self {
        Self {
            version,
            peer_addr,
            flights: VecDeque::new(),
            taken_bytes: 0,
            done_bytes: 0,
            reader: ReplyReader::default(),
            scratch: Box::new([0; SCRATCH]),
            alone: false,
            closing: None,
            held: false,
            timed_out: false,
            taken: 0,
            taken_back: 0,
            inlet: Inlet::default(),
            stages: false,
        }
    }

    /// What the lane can take on now.
    pub(crate) fn room(&self) -> Room {
        let spent = self.version == Version::V1 && self.taken > 0;
        if self.closing.is_some() || self.held || self.alone || spent {
            return Room::default();
        }
        let requests = if self.version == Version::V1 { 1 } else { WINDOW_REQUESTS };
        Room {
            requests: requests.saturating_sub(self.flights.len()),
            bytes: WINDOW_BYTES.saturating_sub(self.bytes_in_flight()),
            empty: self.flights.is_empty(),
        }
    }

    /// Awaits the answers of what was launched since the last call; returns the first of their deadlines.
    pub(crate) fn take_over(&mut self, half: &mut SendHalf) -> Option<Instant> {
        let mut next = None;
        self.stages &= !self.flights.is_empty();
        for (seq, slice) in half.launched.drain(..) {
            self.taken += 1;
            self.taken_bytes += slice.len;
            let deadline = slice.batch.deadline;
            next = Some(next.map_or(deadline, |n: Instant| n.min(deadline)));
            let (op, len) = (slice.op(), slice.len);
            let staged = op == Op::Read && slice.device().is_some();
            self.stages |= staged;
            self.flights.push_back(Flight { seq, op, len, slice: Some(slice), staged });
        }
        next
    }

    /// The next request is the only one until it is answered.
    pub(crate) fn set_alone(&mut self) {
        self.alone = true;
    }

    /// Takes no more requests.
    pub(crate) fn retire(&mut self, why: &'static str) {
        self.closing.get_or_insert(why);
    }

    /// Whether it takes no more requests for good.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// Whether a request was not answered by its deadline.
    pub(crate) fn has_timed_out(&self) -> bool {
        self.timed_out
    }

    /// How many bytes were given to the socket behind the request that is to be answered first; `None`: the peer owes
    /// no answer.
    pub(crate) fn sent_behind_owed(&mut self, half: &mut SendHalf) -> Option<u64> {
        self.take_over(half);
        let mut left = self.flights.iter().map(|flight| {
            let payload = if flight.op == Op::Write { flight.len } else { 0 };
            half.sent_of(flight.seq, payload)
        });
        left.next().filter(|first| *first > 0)?;
        Some(left.take_while(|sent| *sent > 0).sum())
    }

    /// Whether somebody waits for an answer here.
    pub(crate) fn has_live(&self) -> bool {
        self.flights.iter().any(|flight| flight.slice.is_some())
    }

    /// Takes no more requests until [`Lane::go_on`], and gives back those of which nothing has left.
    pub(crate) fn hold(&mut self, half: &mut SendHalf, requeue: &mut Vec<Slice>) {
        self.take_over(half);
        self.held = true;
        let Some(front) = half.front() else { return };
        let unsent = self.position(front) + usize::from(half.touched(front));
        for flight in self.flights.drain(unsent..) {
            self.taken_bytes -= flight.len;
            self.taken_back += 1;
            self.alone = false;
            requeue.extend(flight.slice);
        }
        half.take_back_untouched();
        if !self.flights.iter().any(|f| f.staged && f.slice.is_some()) {
            self.inlet.give_up_turn();
        }
    }

    /// It moves again.
    pub(crate) fn go_on(&mut self) {
        self.held = false;
    }

    fn bytes_in_flight(&self) -> u64 {
        self.taken_bytes - self.done_bytes
    }

    /// How it looks to operators, apart from what its connection knows.
    pub(crate) fn stats(&self, is_open: bool, io_thread: usize, quiet_for: Duration) -> LaneStats {
        let in_flight = self.flights.len() as u64;
        LaneStats {
            address: self.peer_addr,
            version: self.version,
            state: LaneState::of(is_open, self.held, in_flight),
            closing: self.closing,
            io_thread,
            slices_in_flight: in_flight,
            bytes_in_flight: self.bytes_in_flight(),
            slices_done: self.taken - self.taken_back - in_flight,
            bytes_done: self.done_bytes,
            quiet_for,
        }
    }

    /// Whether each of its connections is for one request only.
    pub(crate) fn is_for_one(&self) -> bool {
        self.version == Version::V1
    }

    /// Whether no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Whether the lane has nothing left to do and can be closed.
    pub(crate) fn is_done(&self) -> bool {
        let spent = self.version == Version::V1 && self.taken > 0;
        (self.closing.is_some() || spent) && !self.has_live()
    }

    /// A v1 WRITE in flight has its end of the stream as its only answer, so ours must come first.
    pub(crate) fn wants_half_close(&self, half: &SendHalf) -> bool {
        self.awaits_end() && !half.wants() && !half.is_shut()
    }

    fn awaits_end(&self) -> bool {
        let front = self.flights.front();
        self.version == Version::V1 && front.is_some_and(|f| f.op == Op::Write)
    }

    /// What the next receive call receives into, at most `max_spans` pieces. Payload that nobody wants any more goes
    /// to `discard`. No pieces: a staging slot has to come first.
    pub(crate) fn plan(
        &mut self,
        discard: Span,
        max_spans: usize,
        spans: &mut Vec<Span>,
        bell: &Arc<dyn Bell>,
    ) -> Planned {
        // Made twice, so that the path of host memory has no trace of staging.
        if self.stages {
            self.plan_as::<true>(discard, max_spans, spans, bell)
        } else {
            self.plan_as::<false>(discard, max_spans, spans, bell)
        }
    }

    fn plan_as<const STAGES: bool>(
        &mut self,
        discard: Span,
        max_spans: usize,
        spans: &mut Vec<Span>,
        bell: &Arc<dyn Bell>,
    ) -> Planned {
        let (mut room, mut at, mut planned) = (MAX_CALL_BYTES, 0, Planned::default());
        let mut want = self.flights.front().map(|f| self.reader.want(&f.expected(self.version)));
        let (mut landing, mut covered) = (Landing::default(), 0);
        for flight in &mut self.flights {
            let (missing, mut offset) = match want.take() {
                Some(ReplyWant::Status { missing }) => (missing, 0),
                Some(ReplyWant::Payload { offset, .. }) => (0, offset),
                Some(ReplyWant::Nothing) => break,
                None => (STATUS_LEN, 0),
            };
            if missing > 0 {
                if at + missing > SCRATCH {
                    break;
                }
                push_or_extend(spans, Span::of_mut(&mut self.scratch[at..at + missing]));
                at += missing;
            }
            if flight.op == Op::Read {
                let (addr, most) = match &flight.slice {
                    Some(slice) if !(STAGES && flight.staged) => (slice.local() + offset, room),
                    Some(_) => match landing.place(flight, &mut self.inlet, bell, discard) {
                        Some((addr, most)) => (addr, room.min(most)),
                        None => {
                            planned.starved = true;
                            break;
                        }
                    },
                    None => (discard.addr, room.min(discard.len as u64)),
                };
                let take = (flight.len - offset).min(most);
                if STAGES && flight.staged {
                    landing.taken(addr, take);
                } else {
                    planned.users |= flight.slice.is_some();
                }
                spans.push(Span { addr, len: take as usize });
                (room, offset) = (room - take, offset + take);
                if offset < flight.len {
                    break;
                }
            }
            covered += 1;
            if room == 0 || spans.len() + 2 > max_spans.min(MAX_CALL_SPANS) {
                break;
            }
        }
        let nothing = spans.is_empty() && !planned.starved;
        if nothing || covered == self.flights.len() && !planned.users && at < SCRATCH {
            // Nothing more is owed, so the end of the stream is all that may come. To ask for it with the last answers
            // saves a call: a short count says that the socket is empty.
            push_or_extend(spans, Span::of_mut(&mut self.scratch[at..=at]));
        }
        spans.truncate(max_spans);
        planned
    }

    /// `n` bytes have arrived where [`Lane::plan`] said.
    pub(crate) fn received(
        &mut self,
        n: usize,
        half: &SendHalf,
        bell: &Arc<dyn Bell>,
    ) -> std::result::Result<(), LaneFault> {
        if !self.stages {
            return self.take_in::<false>(n, half);
        }
        let before = self.flights.len();
        let result = self.take_in::<true>(n, half);
        if self.flights.len() < before {
            // A READ that is complete waits for these copies.
            self.inlet.flush(bell);
        } else {
            self.inlet.flush_much(bell);
        }
        result
    }

    /// The socket is empty: a staging slot goes to whoever needs it, unless a payload will go on there.
    pub(crate) fn rest(&mut self, bell: &Arc<dyn Bell>) {
        // Nor is one waited for: it would lie here unused until something arrives.
        self.inlet.give_up_turn();
        if !self.reader.is_in_payload() {
            self.inlet.rest(bell);
        }
    }

    /// Whether a payload has arrived in part.
    pub(crate) fn is_in_payload(&self) -> bool {
        self.reader.is_in_payload()
    }

    /// Lets go of a staging slot that waits for the socket.
    pub(crate) fn relinquish(&mut self, bell: &Arc<dyn Bell>) {
        self.inlet.rest(bell);
    }

    fn take_in<const STAGES: bool>(
        &mut self,
        n: usize,
        half: &SendHalf,
    ) -> std::result::Result<(), LaneFault> {
        let (mut n, mut at) = (n, 0);
        while n > 0 {
            let Some(front) = self.flights.front() else {
                return Err(LaneFault::Wire(WireError::Unasked));
            };
            let expected = front.expected(self.version);
            let event = match self.reader.want(&expected) {
                ReplyWant::Status { missing } => {
                    let take = missing.min(n);
                    let bytes = &self.scratch[at..at + take];
                    (at, n) = (at + take, n - take);
                    self.reader.status_bytes(&expected, bytes).map_err(LaneFault::Wire)?.1
                }
                ReplyWant::Payload { len, .. } => {
                    let take = len.min(n as u64);
                    n -= take as usize;
                    if STAGES && front.staged {
                        front.landed(&mut self.inlet, front.len - len, take);
                    }
                    self.reader.advance_payload(&expected, take)
                }
                ReplyWant::Nothing => return Err(LaneFault::Wire(WireError::Unasked)),
            };
            self.answered(event, half)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn answered(
        &mut self,
        event: ReplyEvent,
        half: &SendHalf,
    ) -> std::result::Result<(), LaneFault> {
        let verdict = match event {
            ReplyEvent::NeedMore | ReplyEvent::PayloadNext => return Ok(()),
            ReplyEvent::Applied => Ok(()),
            ReplyEvent::Rejected => Err(Cause::Refused),
        };
        let front = self.flights.front().expect("an answer is matched with the first request");
        if verdict.is_ok() && !half.gone(front.seq) {
            // The socket still reads the user's memory; nobody can have applied what has not left.
            return Err(LaneFault::Wire(WireError::TooEarly));
        }
        let refused = verdict.is_err();
        self.settle_front(verdict);
        if refused { Err(LaneFault::Refused) } else { Ok(()) }
    }

    fn settle_front(&mut self, verdict: std::result::Result<(), Cause>) {
        let front = self.flights.pop_front().expect("the caller looked");
        self.done_bytes += front.len;
        self.alone = false;
        if let Some(slice) = front.slice {
            slice.settle(verdict);
        }
    }

    /// The stream ended without an error, `settled` if the peer's kernel has acknowledged every byte. For
    /// a v1 WRITE that is the answer; true if it was.
    pub(crate) fn ended(&mut self, half: &SendHalf, settled: bool) -> bool {
        let complete = self.awaits_end() && half.is_shut() && settled;
        if complete {
            self.settle_front(Ok(()));
        }
        complete
    }

    /// The memory of the request that is leaving cannot be read, and why. If a part of it has left, that is the end of
    /// the send half.
    pub(crate) fn cannot_send(
        &mut self,
        why: Cause,
        half: &mut SendHalf,
        requeue: &mut Vec<Slice>,
    ) {
        self.take_over(half);
        let Some(seq) = half.front() else { return };
        let at = self.position(seq);
        if let Some(slice) = self.flights[at].slice.take() {
            slice.settle(Err(why));
        }
        if half.touched(seq) {
            self.break_off(half, requeue);
        } else {
            self.forget(at, half);
        }
    }

    /// The memory of the READ that is arriving cannot be written, and why; the rest of its payload is
    /// discarded.
    pub(crate) fn cannot_receive(&mut self, why: Cause) {
        if let Some(slice) = self.flights.front_mut().and_then(|f| f.slice.take()) {
            slice.settle(Err(why));
        }
        self.limit_discard();
    }

    /// Lets go of every slice whose batch is to stop. What cannot be let go without harm to others is
    /// worked around, as each arm says. Returns the next deadline of what is left.
    pub(crate) fn sweep(
        &mut self,
        half: &mut SendHalf,
        now: Instant,
        requeue: &mut Vec<Slice>,
    ) -> Option<Instant> {
        self.take_over(half);
        let (mut next, mut any) = (None, false);
        let mut at = 0;
        while at < self.flights.len() {
            let Some(slice) = &self.flights[at].slice else {
                at += 1;
                continue;
            };
            let Some(stop) = slice.batch.stop_at(now) else {
                let deadline = slice.batch.deadline;
                next = Some(next.map_or(deadline, |n: Instant| n.min(deadline)));
                at += 1;
                continue;
            };
            at += usize::from(!self.abandon(at, stop, half, requeue));
            any = true;
        }
        if any && !self.flights.iter().any(|f| f.staged && f.slice.is_some()) {
            self.inlet.give_up_turn();
        }
        self.limit_discard();
        next
    }

    /// Settles one flight as stopped; true if it is not in the list any more.
    fn abandon(
        &mut self,
        at: usize,
        stop: Stop,
        half: &mut SendHalf,
        requeue: &mut Vec<Slice>,
    ) -> bool {
        let Flight { seq, op, .. } = self.flights[at];
        if at == 0 {
            // A payload may have stopped arriving in the middle.
            self.inlet.forget();
        }
        let slice = self.flights[at].slice.take().expect("the caller looked");
        let (sent, gone) = (half.touched(seq), half.gone(seq));
        let stage = if sent { "its answer had not come" } else { "it had not been sent" };
        if !sent {
            self.forget(at, half);
        } else if op == Op::Write && !gone {
            // The peer expects more payload than it will get: end the stream, collect what is owed.
            self.break_off(half, requeue);
        }
        if sent && stop == Stop::TimedOut {
            self.timed_out = true;
            self.retire("a request on it timed out");
        }
        slice.settle(Err(Cause::Stopped { stop, stage, sent }));
        !sent
    }

    /// Removes an untouched flight.
    fn forget(&mut self, at: usize, half: &mut SendHalf) {
        let flight = self.flights.remove(at).expect("the caller looked");
        self.taken_bytes -= flight.len;
        self.taken_back += 1;
        self.alone = false;
        half.take_back(flight.seq);
    }

    /// Ends sending in the middle of a request: what is behind it goes to other lanes.
    fn break_off(&mut self, half: &mut SendHalf, requeue: &mut Vec<Slice>) {
        self.retire("a request was broken off");
        let Some(front) = half.front() else { return };
        let behind = self.position(front) + 1;
        for flight in self.flights.drain(behind..) {
            self.taken_bytes -= flight.len;
            self.taken_back += 1;
            requeue.extend(flight.slice);
        }
        half.shut();
    }

    fn position(&self, seq: u64) -> usize {
        self.flights.partition_point(|f| f.seq < seq)
    }

    fn limit_discard(&mut self) {
        let dropped = self.flights.iter().filter(|f| f.slice.is_none() && f.op == Op::Read);
        if dropped.map(|f| f.len).sum::<u64>() > MAX_DISCARD {
            self.retire("more was cancelled on it than is worth receiving");
        }
    }

    /// The connection is gone: every request in flight is settled, or handed back to be sent again.
    pub(crate) fn lost(
        &mut self,
        half: &mut SendHalf,
        ending: &Ending<'_>,
        requeue: &mut Vec<Slice>,
    ) -> Cost {
        self.take_over(half);
        self.inlet.forget();
        self.retire("its connection ended");
        let mut cost = Cost::default();
        let refusal = matches!(ending, Ending::Refusal);
        for mut flight in self.flights.drain(..) {
            let Some(mut slice) = flight.slice.take() else { continue };
            let unapplied = refusal || !half.touched(flight.seq);
            let most = if unapplied { MAX_UNTOUCHED_TRIES } else { MAX_TRIES };
            let violation = matches!(ending, Ending::Violation(_));
            if (unapplied || flight.op == Op::Read) && slice.tries < most && !violation {
                slice.tries += 1;
                cost.sent_again += 1;
                requeue.push(slice);
                continue;
            }
            let cause = match ending {
                Ending::Violation(e) => Cause::Protocol(self.peer_addr, Arc::clone(e)),
                Ending::Refusal => Cause::Lost("the peer refuses too many requests".into()),
                Ending::Lost(why) if flight.op == Op::Read || unapplied => {
                    Cause::Lost((*why).into())
                }
                Ending::Lost(why) => Cause::Unknown((*why).into()),
            };
            cost.failed += 1;
            slice.settle(Err(cause));
        }
        self.taken_bytes = self.done_bytes;
        half.shut();
        cost
    }

    /// Has the batches whose local ranges pin the buffer at `addr` stop.
    pub(crate) fn revoke(&self, addr: u64) {
        for slice in self.flights.iter().filter_map(|f| f.slice.as_ref()) {
            if slice.batch.pins_buffer(addr) {
                slice.batch.request_stop(Stop::Unregistered);
            }
        }
    }

    /// What the kernel does with a span of [`Lane::plan`] that is the lane's own; false if it is not.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn put_scratch(&mut self, span: Span, bytes: &[u8]) -> bool {
        let scratch = Span::of(&self.scratch[..]);
        let own = span.is_inside(scratch);
        if own {
            let at = (span.addr - scratch.addr) as usize;
            self.scratch[at..][..bytes.len()].copy_from_slice(bytes);
        }
        own
    }

    /// Has every batch with a slice here stop.
    pub(crate) fn stop_all(&self, stop: Stop) {
        for slice in self.flights.iter().filter_map(|f| f.slice.as_ref()) {
            slice.batch.request_stop(stop);
        }
    }
}

impl Flight {
    /// `len` bytes of its payload, from `offset` on, have landed in a slot.
    #[cold]
    fn landed(&self, inlet: &mut Inlet, offset: u64, len: u64) {
        if let Some(slice) = &self.slice {
            inlet.landed(slice.local() + offset, len, Keep::Hold(slice.hold()));
        }
    }

    fn expected(&self, version: Version) -> Expected {
        Expected { op: self.op, version, len: self.len }
    }
}

/// Where payloads land in the open slot while a receive call is planned: one behind the other.
#[derive(Default)]
struct Landing {
    /// The next free byte of the slot, and how many there are; `None`: none was planned yet.
    next: Option<(u64, u64)>,
    device: Option<DeviceId>,
}

impl Landing {
    /// Where a payload lands that belongs in memory of a device, and how much of it; `None`: nowhere yet. If there is no
    /// slot to be had, its request fails and it goes to `discard`.
    #[cold]
    fn place(
        &mut self,
        flight: &mut Flight,
        inlet: &mut Inlet,
        bell: &Arc<dyn Bell>,
        discard: Span,
    ) -> Option<(u64, u64)> {
        let device = flight.slice.as_ref()?.device()?;
        if self.next.is_some() && self.device != Some(device.device()) {
            // What was planned before lands in the slot of another device.
            return None;
        }
        if self.next.is_none() {
            match inlet.room(device, bell) {
                Ok(SlotRoom::At(addr, room)) => self.next = Some((addr, room)),
                Ok(SlotRoom::Starved) => return None,
                Err(why) => {
                    flight.slice.take()?.settle(Err(Cause::Device(why)));
                    return Some((discard.addr, discard.len as u64));
                }
            }
            self.device = Some(device.device());
        }
        self.next.filter(|(_, room)| *room > 0)
    }

    /// `len` bytes at `addr` are spoken for, if that is in the slot.
    fn taken(&mut self, addr: u64, len: u64) {
        if let Some((next, room)) = &mut self.next
            && *next == addr
        {
            (*next, *room) = (*next + len, *room - len);
        }
    }
}

fn push_or_extend(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.addr + last.len as u64 == span.addr => last.len += span.len,
        _ => spans.push(span),
    }
}

#[cfg(test)]
mod tests;
