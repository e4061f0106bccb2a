//! A lane as its initiator sees it: which requests are in flight, and what the answers mean.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tensorferry_wire::{
    Expected, Op, ReplyEvent, ReplyReader, ReplyWant, STATUS_LEN, Version, WireError,
};

use crate::memory::Span;
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
    in_flight: u64,
    reader: ReplyReader,
    scratch: Box<[u8; SCRATCH]>,
    /// The only request in flight must not be followed by another.
    alone: bool,
    /// Why the lane takes no more requests.
    closing: Option<&'static str>,
    /// Requests taken so far.
    taken: u64,
}

/// A request that has no answer yet.
struct Flight {
    seq: u64,
    op: Op,
    len: u64,
    /// `None`: settled already; its answer is received and dropped.
    slice: Option<Slice>,
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

impl Lane {
    pub(crate) fn new(version: Version, peer_addr: SocketAddr) -> Self {
        Self {
            version,
            peer_addr,
            flights: VecDeque::new(),
            in_flight: 0,
            reader: ReplyReader::default(),
            scratch: Box::new([0; SCRATCH]),
            alone: false,
            closing: None,
            taken: 0,
        }
    }

    /// What the lane can take on now.
    pub(crate) fn room(&self) -> Room {
        let spent = self.version == Version::V1 && self.taken > 0;
        if self.closing.is_some() || self.alone || spent {
            return Room::default();
        }
        let requests = if self.version == Version::V1 { 1 } else { WINDOW_REQUESTS };
        Room {
            requests: requests.saturating_sub(self.flights.len()),
            bytes: WINDOW_BYTES.saturating_sub(self.in_flight),
            empty: self.flights.is_empty(),
        }
    }

    /// Awaits the answers of what was launched since the last call.
    pub(crate) fn take_over(&mut self, half: &mut SendHalf) {
        for (seq, slice) in half.launched.drain(..) {
            self.taken += 1;
            self.in_flight += slice.len;
            let (op, len) = (slice.op(), slice.len);
            self.flights.push_back(Flight { seq, op, len, slice: Some(slice) });
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

    /// Whether no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// Whether the lane has nothing left to do and can be closed.
    pub(crate) fn is_done(&self) -> bool {
        let live = self.flights.iter().any(|f| f.slice.is_some());
        let spent = self.version == Version::V1 && self.taken > 0;
        (self.closing.is_some() || spent) && !live
    }

    /// A v1 WRITE in flight has its end of the stream as its only answer, so ours must come first.
    pub(crate) fn wants_half_close(&self, half: &SendHalf) -> bool {
        self.awaits_end() && !half.wants() && !half.is_shut()
    }

    fn awaits_end(&self) -> bool {
        let front = self.flights.front();
        self.version == Version::V1 && front.is_some_and(|f| f.op == Op::Write)
    }

    /// What the next receive call receives into, at most `max_spans` pieces; whether any of it is the user's memory.
    /// Payload that nobody wants any more goes to `discard`.
    pub(crate) fn plan(&mut self, discard: Span, max_spans: usize, spans: &mut Vec<Span>) -> bool {
        let (mut room, mut at, mut users) = (MAX_CALL_BYTES, 0, false);
        let mut want = self.flights.front().map(|f| self.reader.want(&f.expected(self.version)));
        for flight in &self.flights {
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
                    Some(slice) => (slice.local() + offset, room),
                    None => (discard.addr, room.min(discard.len as u64)),
                };
                let take = (flight.len - offset).min(most);
                users |= flight.slice.is_some();
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
        if spans.is_empty() {
            // Nothing is owed, so the end of the stream is all that may come.
            spans.push(Span::of_mut(&mut self.scratch[..1]));
        }
        spans.truncate(max_spans);
        users
    }

    /// `n` bytes have arrived where [`Lane::plan`] said.
    pub(crate) fn received(
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
                    self.reader.advance_payload(&expected, take)
                }
                ReplyWant::Nothing => return Err(LaneFault::Wire(WireError::Unasked)),
            };
            self.answered(event, half)?;
        }
        Ok(())
    }

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
        self.in_flight -= front.len;
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

    /// The kernel could not read the memory of the request that is leaving. If a part of it has left,
    /// that is the end of the send half.
    pub(crate) fn bad_address_sending(&mut self, half: &mut SendHalf, requeue: &mut Vec<Slice>) {
        self.take_over(half);
        let Some(seq) = half.front() else { return };
        let at = self.position(seq);
        if let Some(slice) = self.flights[at].slice.take() {
            slice.settle(Err(Cause::BadAddress));
        }
        if half.touched(seq) {
            self.break_off(half, requeue);
        } else {
            self.forget(at, half);
        }
    }

    /// The kernel could not write the memory of the READ that is arriving; the rest of its payload
    /// is discarded.
    pub(crate) fn bad_address_receiving(&mut self) {
        if let Some(slice) = self.flights.front_mut().and_then(|f| f.slice.take()) {
            slice.settle(Err(Cause::BadAddress));
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
        let mut next = None;
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
            self.retire("a request on it timed out");
        }
        slice.settle(Err(Cause::Stopped { stop, stage, sent }));
        !sent
    }

    /// Removes an untouched flight.
    fn forget(&mut self, at: usize, half: &mut SendHalf) {
        let flight = self.flights.remove(at).expect("the caller looked");
        self.in_flight -= flight.len;
        self.alone = false;
        half.take_back(flight.seq);
    }

    /// Ends sending in the middle of a request: what is behind it goes to other lanes.
    fn break_off(&mut self, half: &mut SendHalf, requeue: &mut Vec<Slice>) {
        self.retire("a request was broken off");
        let Some(front) = half.front() else { return };
        let behind = self.position(front) + 1;
        for flight in self.flights.drain(behind..) {
            self.in_flight -= flight.len;
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
    ) {
        self.take_over(half);
        self.retire("its connection ended");
        let refusal = matches!(ending, Ending::Refusal);
        for mut flight in self.flights.drain(..) {
            let Some(mut slice) = flight.slice.take() else { continue };
            let unapplied = refusal || !half.touched(flight.seq);
            let most = if unapplied { MAX_UNTOUCHED_TRIES } else { MAX_TRIES };
            let violation = matches!(ending, Ending::Violation(_));
            if (unapplied || flight.op == Op::Read) && slice.tries < most && !violation {
                slice.tries += 1;
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
            slice.settle(Err(cause));
        }
        self.in_flight = 0;
        half.shut();
    }

    /// Has the batches whose local ranges pin the buffer at `addr` stop.
    pub(crate) fn revoke(&self, addr: u64) {
        for slice in self.flights.iter().filter_map(|f| f.slice.as_ref()) {
            if slice.batch.pins_buffer(addr) {
                slice.batch.request_stop(Stop::Unregistered);
            }
        }
    }

    /// Has every batch with a slice here stop.
    pub(crate) fn stop_all(&self, stop: Stop) {
        for slice in self.flights.iter().filter_map(|f| f.slice.as_ref()) {
            slice.batch.request_stop(stop);
        }
    }
}

impl Flight {
    fn expected(&self, version: Version) -> Expected {
        Expected { op: self.op, version, len: self.len }
    }
}

fn push_or_extend(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if last.addr + last.len as u64 == span.addr => last.len += span.len,
        _ => spans.push(span),
    }
}
