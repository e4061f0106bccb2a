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

    /// Awaits the answers of what was launched since the last call.
    pub(crate) fn take_over(&mut self, half: &mut SendHalf) {
        self.stages &= !self.flights.is_empty();
        for (seq, slice) in half.launched.drain(..) {
            self.taken += 1;
            self.taken_bytes += slice.len;
            let (op, len) = (slice.op(), slice.len);
            let staged = op == Op::Read && slice.device().is_some();
            self.stages |= staged;
            self.flights.push_back(Flight { seq, op, len, slice: Some(slice), staged });
        }
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
        let mut landing = Landing::default();
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
            if room == 0 || spans.len() + 2 > max_spans.min(MAX_CALL_SPANS) {
                break;
            }
        }
        if spans.is_empty() && !planned.starved {
            // Nothing is owed, so the end of the stream is all that may come.
            spans.push(Span::of_mut(&mut self.scratch[..1]));
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
mod tests {
    use super::*;
    use crate::memory::HostBuffer;
    use crate::staging::Alarm;
    use crate::transfer::{Batch, BatchState, Request, batch_of};
    use proptest::prelude::*;
    use tensorferry_wire::{HEADER_LEN, Status};

    const REMOTE: u64 = 1 << 40;
    const DISCARD: usize = 10_000;

    /// One request, each a batch of its own with memory of its own.
    struct Asked {
        op: Op,
        len: u64,
        local: HostBuffer,
        batch: Batch,
        /// What its memory was when it was final and that must not change.
        quiet: Option<Vec<u8>>,
    }

    /// A lane, and a peer that is exactly as good as a test wants.
    struct World {
        lane: Lane,
        half: SendHalf,
        asked: Vec<Asked>,
        /// Requests in the order in which they were given to the lane, and that were not taken back unsent.
        order: Vec<usize>,
        /// Bytes that have left.
        sent: u64,
        /// Answers that the peer has given.
        answered: usize,
        /// What the peer has sent and the lane has not received.
        arriving: VecDeque<u8>,
        discard: Vec<u8>,
        requeued: Vec<Slice>,
        over: bool,
    }

    fn content(i: usize, len: u64) -> Vec<u8> {
        (0..len).map(|k| (k as usize * 7 + i * 13 + 1) as u8).collect()
    }

    impl World {
        fn new() -> Self {
            let peer = ([127, 0, 0, 1], 1).into();
            Self {
                lane: Lane::new(Version::V2, peer),
                half: SendHalf::new(Version::V2),
                asked: Vec::new(),
                order: Vec::new(),
                sent: 0,
                answered: 0,
                arriving: VecDeque::new(),
                discard: vec![0; DISCARD],
                requeued: Vec::new(),
                over: false,
            }
        }

        fn launch(&mut self, op: Op, len: u64) {
            let room = self.lane.room();
            if room.requests == 0 || room.bytes == 0 || self.over {
                return;
            }
            let i = self.asked.len();
            let local = HostBuffer::zeroed(len as usize).unwrap();
            let request = Request { op, local: local.addr(), remote: REMOTE + i as u64, len };
            let batch = batch_of(vec![request]);
            self.half.launch(Slice::new(&batch.inner, 0, 0, len));
            self.asked.push(Asked { op, len, local, batch, quiet: None });
            self.order.push(i);
        }

        fn wire_len(&self, i: usize) -> u64 {
            let Asked { op, len, .. } = self.asked[i];
            HEADER_LEN as u64 + if op == Op::Write { len } else { 0 }
        }

        /// How many requests have left whole, and how many have begun to.
        fn left(&self) -> (usize, usize) {
            let (mut at, mut whole, mut begun) = (0, 0, 0);
            for &i in &self.order {
                begun += usize::from(at < self.sent);
                at += self.wire_len(i);
                whole += usize::from(at <= self.sent);
            }
            (whole, begun)
        }

        /// A send call of which the socket takes `most` bytes.
        fn send(&mut self, most: usize) {
            if self.over || !self.half.wants() {
                return;
            }
            let mut spans = Vec::new();
            self.half.plan(MAX_CALL_SPANS, &mut spans);
            assert!(!spans.is_empty() && spans.len() <= MAX_CALL_SPANS);
            assert!(spans.iter().all(|s| s.len > 0));
            let planned = spans.iter().map(|s| s.len).sum::<usize>();
            let total: u64 = self.order.iter().map(|&i| self.wire_len(i)).sum();
            assert!(planned as u64 <= total - self.sent);
            let n = most.min(planned);
            self.half.sent(n);
            self.sent += n as u64;
            self.lane.take_over(&mut self.half);
        }

        /// The peer answers what has arrived at it, up to `count` requests.
        fn answer(&mut self, count: usize) {
            for _ in 0..count {
                if self.answered >= self.left().0 {
                    return;
                }
                let i = self.order[self.answered];
                self.arriving.extend(Status::Applied.encode());
                if self.asked[i].op == Op::Read {
                    self.arriving.extend(content(i, self.asked[i].len));
                }
                self.answered += 1;
            }
        }

        /// A receive call that brings `most` bytes of what is there.
        fn receive(&mut self, most: usize, max_spans: usize) -> Option<LaneFault> {
            if self.over {
                return None;
            }
            self.lane.take_over(&mut self.half);
            let discard = Span::of_mut(&mut self.discard);
            let mut spans = Vec::new();
            self.lane.plan(discard, max_spans, &mut spans, &Alarm::here());
            assert!(!spans.is_empty() && spans.len() <= max_spans);
            let planned = spans.iter().map(|s| s.len).sum::<usize>();
            let n = most.min(planned).min(self.arriving.len());
            let bytes: Vec<u8> = self.arriving.drain(..n).collect();
            let mut rest = &bytes[..];
            for span in spans {
                let (now, later) = rest.split_at(rest.len().min(span.len));
                self.put(span, now);
                rest = later;
            }
            let fault = self.lane.received(n, &self.half, &Alarm::here()).err();
            self.look();
            fault
        }

        fn put(&mut self, span: Span, bytes: &[u8]) {
            // Nobody looks at what is discarded.
            if self.lane.put_scratch(span, bytes) || span.is_inside(Span::of(&self.discard)) {
                return;
            }
            let of = |a: &Asked| Span { addr: a.local.addr(), len: a.len as usize };
            let found = self.asked.iter().find(|a| span.is_inside(of(a)));
            let asked = found.expect("scratch, discard or local memory");
            assert_eq!((asked.op, asked.batch.poll()), (Op::Read, BatchState::Running));
            asked.local.write((span.addr - asked.local.addr()) as usize, bytes);
        }

        /// Takes note of what is final now.
        fn look(&mut self) {
            let owed: u64 = self.lane.flights.iter().map(|f| f.len).sum();
            assert_eq!(self.lane.bytes_in_flight(), owed);
            for asked in &mut self.asked {
                if asked.quiet.is_none() && asked.batch.poll() != BatchState::Running {
                    asked.quiet = Some(asked.local.read(0, asked.len as usize));
                }
            }
        }

        fn cancel(&mut self, i: usize, stop: Stop) {
            let Some(asked) = self.asked.get(i) else { return };
            if self.over || asked.batch.poll() != BatchState::Running {
                return;
            }
            asked.batch.inner.request_stop(stop);
            // What was taken back unsent is not on its way to the peer.
            self.lane.take_over(&mut self.half);
            let begun = self.left().1;
            self.lane.sweep(&mut self.half, Instant::now(), &mut self.requeued);
            let asked = &self.asked;
            let mut at = 0;
            let is_shut = self.half.is_shut();
            self.order.retain(|&o| {
                at += 1;
                at <= begun || (o != i && !is_shut)
            });
            assert!(asked[i].batch.poll() != BatchState::Running || self.comes_back(i));
            self.look();
        }

        fn comes_back(&self, i: usize) -> bool {
            self.requeued.iter().any(|s| s.remote() == REMOTE + i as u64)
        }

        fn lose(&mut self, ending: &Ending<'_>) {
            self.over = true;
            self.lane.lost(&mut self.half, ending, &mut self.requeued);
            self.look();
        }

        /// The end of all: no request is lost, none is settled twice (which `Batch` checks), and each is what
        /// it ought to be.
        fn check(mut self) {
            self.look();
            let again: Vec<usize> =
                self.requeued.iter().map(|s| (s.remote() - REMOTE) as usize).collect();
            for (i, asked) in self.asked.iter().enumerate() {
                let times = again.iter().filter(|n| **n == i).count();
                let running = asked.batch.poll() == BatchState::Running;
                assert_eq!(times, usize::from(running), "request {i} is lost or doubled");
                if running {
                    continue;
                }
                let bytes = asked.local.read(0, asked.len as usize);
                assert!(asked.quiet.as_ref() == Some(&bytes), "request {i} was touched at rest");
                if asked.batch.poll() == BatchState::Completed {
                    let place = self.order.iter().position(|o| *o == i);
                    assert!(place.is_some_and(|p| p < self.answered), "request {i} had no answer");
                    if asked.op == Op::Read {
                        assert!(bytes == content(i, asked.len), "request {i} has another's bytes");
                    }
                }
            }
            for slice in self.requeued.drain(..) {
                slice.settle(Ok(()));
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Launch(Op, u64),
        Send(usize),
        Answer(usize),
        Receive(usize, usize),
        Cancel(usize, Stop),
        BadSource,
        BadDestination,
    }

    fn step() -> impl Strategy<Value = Step> {
        let len = prop_oneof![3 => 1..100_u64, 1 => 1..100_000_u64];
        let amount = || prop_oneof![1..30_usize, 1..3000_usize, Just(usize::MAX)];
        let spans = prop_oneof![Just(1_usize), 1..8_usize, Just(MAX_CALL_SPANS)];
        let stop = prop_oneof![Just(Stop::Cancelled), Just(Stop::TimedOut)];
        let op = any::<bool>().prop_map(|write| if write { Op::Write } else { Op::Read });
        prop_oneof![
            6 => (op, len).prop_map(|(op, len)| Step::Launch(op, len)),
            6 => amount().prop_map(Step::Send),
            4 => (1..6_usize).prop_map(Step::Answer),
            8 => (amount(), spans).prop_map(|(n, spans)| Step::Receive(n, spans)),
            1 => (0..30_usize, stop).prop_map(|(i, stop)| Step::Cancel(i, stop)),
            // Rare: each ends the lane for what is behind it.
            1 => prop_oneof![19 => Just(Step::Answer(1)), 1 => Just(Step::BadSource), 2 => Just(Step::BadDestination)],
        ]
    }

    fn run(steps: &[Step]) -> World {
        let mut world = World::new();
        for step in steps {
            match *step {
                Step::Launch(op, len) => world.launch(op, len),
                Step::Send(n) => world.send(n),
                Step::Answer(n) => world.answer(n),
                Step::Receive(n, spans) => {
                    let fault = world.receive(n, spans);
                    assert!(fault.is_none(), "{fault:?}");
                }
                Step::Cancel(i, stop) => world.cancel(i, stop),
                Step::BadSource => bad_source(&mut world),
                Step::BadDestination => bad_destination(&mut world),
            }
        }
        world
    }

    fn bad_source(world: &mut World) {
        let (whole, begun) = world.left();
        let Some(&i) = world.order.get(whole).filter(|_| !world.over && world.half.wants()) else {
            return;
        };
        if world.asked[i].op == Op::Read {
            return;
        }
        world.lane.cannot_send(Cause::BadAddress("".into()), &mut world.half, &mut world.requeued);
        let keep = if world.half.is_shut() { begun } else { world.order.len() };
        world.order.truncate(keep);
        if begun == whole {
            world.order.retain(|o| *o != i);
        }
        world.look();
    }

    fn bad_destination(world: &mut World) {
        world.lane.take_over(&mut world.half);
        let want =
            world.lane.flights.front().map(|f| world.lane.reader.want(&f.expected(Version::V2)));
        if matches!(want, Some(ReplyWant::Payload { .. })) {
            world.lane.cannot_receive(Cause::BadAddress("".into()));
            world.look();
        }
    }

    /// The peer answers all that has left, and the lane receives it.
    fn drain(world: &mut World) {
        while world.half.wants() {
            world.send(usize::MAX);
        }
        world.answer(world.order.len());
        while !world.arriving.is_empty() {
            assert!(world.receive(usize::MAX, MAX_CALL_SPANS).is_none());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

        /// Whatever is cancelled when, answers stay with their requests, and every request ends once.
        #[test]
        fn answers_stay_with_their_requests(steps in prop::collection::vec(step(), 1..120)) {
            let mut world = run(&steps);
            drain(&mut world);
            let left = world.left().0;
            for (n, &i) in world.order.iter().enumerate() {
                let state = world.asked[i].batch.poll();
                prop_assert!(state != BatchState::Running || n >= left, "request {} of {}", i, left);
            }
            world.lose(&Ending::Lost("the end"));
            world.check();
        }

        /// Wherever the connection ends: what had left is unknown, what had not and every READ comes back.
        #[test]
        fn a_lost_lane_gives_back_what_may_be_sent_again(
            steps in prop::collection::vec(step(), 1..120),
            refused in any::<bool>(),
        ) {
            let mut world = run(&steps);
            let begun: Vec<usize> = world.order[..world.left().1].to_vec();
            let running: Vec<usize> = (0..world.asked.len())
                .filter(|&i| world.asked[i].batch.poll() == BatchState::Running && !world.comes_back(i))
                .collect();
            world.lose(if refused { &Ending::Refusal } else { &Ending::Lost("cut") });
            for i in running {
                let asked = &world.asked[i];
                let unknown = asked.op == Op::Write && begun.contains(&i) && !refused;
                prop_assert_eq!(world.comes_back(i), !unknown);
                if unknown {
                    prop_assert_eq!(asked.batch.wait().unwrap_err().code(), 11);
                }
            }
            world.check();
        }

        /// The same answers, cut otherwise, settle the same requests.
        #[test]
        fn answers_may_be_cut_anywhere(
            asks in prop::collection::vec((any::<bool>(), 1..3000_u64), 1..40),
            cuts in prop::collection::vec((prop_oneof![1..10_usize, 1..5000_usize], 1..6_usize), 1..30),
            refused in any::<bool>(),
        ) {
            let mut world = World::new();
            for &(write, len) in &asks {
                world.launch(if write { Op::Write } else { Op::Read }, len);
            }
            while world.half.wants() {
                world.send(usize::MAX);
            }
            let good = if refused { asks.len() / 2 } else { asks.len() };
            world.answer(good);
            if refused {
                world.arriving.extend(Status::Rejected.encode());
            }
            let mut fault = None;
            for (n, spans) in cuts.iter().cycle() {
                if fault.is_some() || world.arriving.is_empty() {
                    break;
                }
                fault = world.receive(*n, *spans);
            }
            prop_assert_eq!(matches!(fault, Some(LaneFault::Refused)), refused);
            for i in 0..good {
                prop_assert_eq!(world.asked[i].batch.poll(), BatchState::Completed);
            }
            if refused {
                prop_assert_eq!(world.asked[good].batch.wait().unwrap_err().code(), 8);
                world.lose(&Ending::Refusal);
                prop_assert_eq!(world.requeued.len(), asks.len() - good - 1);
            }
            world.check();
        }
    }

    #[test]
    fn an_answer_to_what_has_not_left_is_a_violation() {
        for sent in [HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 99] {
            let mut world = World::new();
            world.launch(Op::Write, 100);
            world.send(sent);
            world.arriving.extend(Status::Applied.encode());
            let fault = world.receive(usize::MAX, MAX_CALL_SPANS);
            assert!(matches!(fault, Some(LaneFault::Wire(WireError::TooEarly))), "{fault:?}");
            world.lose(&Ending::Violation(&Arc::new(WireError::TooEarly)));
            assert_eq!(world.asked[0].batch.wait().unwrap_err().code(), 16);
        }
    }

    #[test]
    fn a_refusal_may_come_before_the_payload_has_left() {
        let mut world = World::new();
        world.launch(Op::Write, 100);
        world.launch(Op::Read, 5);
        world.send(HEADER_LEN + 3);
        world.arriving.extend(Status::Rejected.encode());
        assert!(matches!(world.receive(8, 1), Some(LaneFault::Refused)));
        world.lose(&Ending::Refusal);
        assert_eq!(world.asked[0].batch.wait().unwrap_err().code(), 8);
        assert!(world.comes_back(1));
        world.check();
    }

    #[test]
    fn a_slice_is_not_sent_again_for_ever() {
        let batch = batch_of(vec![Request { op: Op::Read, local: 8, remote: 8, len: 8 }]);
        let mut slice = Slice::new(&batch.inner, 0, 0, 8);
        for tries in 0.. {
            let mut lane = Lane::new(Version::V2, ([127, 0, 0, 1], 1).into());
            let (mut half, mut back) = (SendHalf::new(Version::V2), Vec::new());
            half.launch(slice);
            lane.lost(&mut half, &Ending::Lost("nothing left"), &mut back);
            match back.pop() {
                Some(again) => slice = again,
                None => {
                    assert_eq!(tries, usize::from(MAX_UNTOUCHED_TRIES));
                    break;
                }
            }
        }
        assert_eq!(batch.wait().unwrap_err().code(), 10);
    }
}
