//! A data connection as its target sees it: requests come in, answers go out, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use tensorferry_wire::{
    Header, Inbound, Op, RequestReader, STATUS_LEN, Status, Version, WireError,
};

use crate::memory::{CopyMode, Span, copy_in};
use crate::registry::{Pin, Registry, Seen};
use crate::staging::{Ahead, Bell, Fault, Inlet, Keep, Outlet, Payload, Room};
use crate::tcp::{MAX_CALL_BYTES, MAX_CALL_SPANS};

/// Payloads from this length on are received in place instead of by way of the receive buffer, of which one call brings
/// many shorter ones.
pub(crate) const DIRECT_FROM: u64 = 32 << 10;
/// How many answers may wait to be sent before no more requests are read.
const MAX_ANSWERS: usize = 1024;
/// Room for so many is kept when they have left.
const MAX_KEPT_ANSWERS: usize = 4 * MAX_ANSWERS;
/// How many bytes of a refused sender are swallowed, so that a reset does not destroy the refusal.
const MAX_DRAIN: u64 = 64 << 20;

/// What a connection from a peer is doing.
pub(crate) struct Serve {
    reader: RequestReader,
    /// The WRITE whose payload is arriving.
    incoming: Option<Incoming>,
    answers: VecDeque<Answer>,
    /// Bytes of the first answer that have left.
    sent: u64,
    /// The buffer that was used last: requests tend to stay in it.
    last: Option<Seen>,
    /// A refusal is on its way; so many bytes are still swallowed.
    draining: Option<u64>,
    /// The last request that was refused, until somebody has asked about it.
    refusal: Option<Refusal>,
    direct: bool,
    v1: bool,
    /// Where payloads for device memory land, and where those from there come from.
    inlet: Inlet,
    outlet: Outlet,
    /// How far the inlet's copies have come.
    landed: u64,
    /// Payloads of answers that come from a device, in their order.
    staged: VecDeque<Payload>,
    /// What has arrived and cannot be taken in for want of a staging slot.
    stash: Vec<u8>,
    /// The bell will ring when there is a slot.
    starved: bool,
}

/// Where the rest of a payload is to be received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Direct {
    /// With whatever else comes.
    Not,
    At(Span),
    /// Nowhere, before there is a staging slot.
    Starved,
}

struct Incoming {
    header: Header,
    pin: Pin,
}

enum Answer {
    /// So many WRITEs are applied, when the inlet has come to the mark.
    Applied {
        n: u32,
        mark: u64,
    },
    Refused,
    /// A v2 READ is served.
    Status {
        /// Its payload is copied from a device.
        staged: bool,
    },
    Payload {
        pin: Pin,
        addr: u64,
        len: u64,
    },
}

/// What a connection from a peer works with.
pub(crate) struct Rules<'a> {
    pub(crate) registry: &'a Registry,
    pub(crate) mode: CopyMode,
    pub(crate) bell: &'a Arc<dyn Bell>,
}

/// What was done for peers since the last look.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Served {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) refusals: u64,
}

/// A request of a peer that was refused, and why.
pub(crate) enum Refusal {
    /// The range is in no buffer that may be used so.
    Range(Header),
    /// The device that it is on failed.
    Device(Fault),
}

/// Why a connection from a peer cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeFault {
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error(
        "a registered buffer cannot be written: {0}; its owner must not unmap it before unregister"
    )]
    Copy(#[from] std::io::Error),
    #[error("{0}")]
    Device(Fault),
    /// The end of the stream is the acknowledgement of a v1 WRITE, so a refusal must be a reset.
    #[error("a v1 request was refused")]
    RefusedV1,
    #[error("refused, and more was sent than is worth swallowing")]
    Drained,
}

const APPLIED_RUN: usize = 128;
/// Status frames of applied WRITEs, as many as leave in one piece.
static APPLIED: [u8; APPLIED_RUN * STATUS_LEN] = applied_run();
static REJECTED: [u8; STATUS_LEN] = Status::Rejected.encode();

/// The status frames that a span of an answer lies in, if it does.
#[cfg(any(test, fuzzing))]
pub(crate) fn status_frame(span: Span) -> Option<&'static [u8]> {
    let inside = |frames: &'static [u8]| {
        let at = span.addr.checked_sub(Span::of(frames).addr)? as usize;
        frames.get(at..at.checked_add(span.len)?)
    };
    inside(&APPLIED).or_else(|| inside(&REJECTED))
}

const fn applied_run() -> [u8; APPLIED_RUN * STATUS_LEN] {
    let frame = Status::Applied.encode();
    let mut run = [0; APPLIED_RUN * STATUS_LEN];
    let mut at = 0;
    while at < run.len() {
        run[at] = frame[at % STATUS_LEN];
        at += 1;
    }
    run
}

impl Serve {
    pub(crate) fn new() -> Self {
        Self {
            reader: RequestReader::new(),
            incoming: None,
            answers: VecDeque::new(),
            sent: 0,
            last: None,
            draining: None,
            refusal: None,
            direct: false,
            v1: false,
            inlet: Inlet::followed(),
            outlet: Outlet::default(),
            landed: 0,
            staged: VecDeque::new(),
            stash: Vec::new(),
            starved: false,
        }
    }

    /// Whether more input is welcome; if not, answers have to leave first.
    pub(crate) fn wants_input(&self) -> bool {
        self.answers.len() < MAX_ANSWERS && !self.starved
    }

    /// Whether an answer is waiting to leave.
    pub(crate) fn wants_output(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Whether every payload that has arrived is in place.
    pub(crate) fn has_landed(&self) -> bool {
        self.inlet.mark() <= self.landed
    }

    /// Whether the end of our side of the stream would say that a WRITE was applied.
    pub(crate) fn speaks_v1(&self) -> bool {
        self.v1
    }

    /// Whether the end of our side of the stream would say so of a WRITE that is not applied.
    pub(crate) fn owes_v1(&mut self) -> bool {
        self.v1 && (self.incoming.is_some() || self.inlet.reached().ok() < Some(self.inlet.mark()))
    }

    /// How many answers wait to be sent.
    pub(crate) fn answers(&self) -> usize {
        self.answers.len()
    }

    /// Whether it is between two requests, and nothing is left of the first.
    pub(crate) fn is_idle(&self) -> bool {
        self.incoming.is_none() && self.answers.is_empty() && self.stash.is_empty()
    }

    /// Bytes that wait here for a staging slot.
    pub(crate) fn stashed(&self) -> usize {
        self.stash.len()
    }

    /// Whether it waits for a staging slot.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Whether a part of a header has arrived and the rest has not.
    pub(crate) fn header_pending(&self) -> bool {
        self.reader.header_pending()
    }

    /// Whether a refusal is to be sent, or was: after it our side of the stream ends.
    pub(crate) fn is_refusing(&self) -> bool {
        self.draining.is_some()
    }

    /// Where the rest of the payload goes if it is long enough to be received in place.
    pub(crate) fn direct(&mut self, bell: &Arc<dyn Bell>) -> Result<Direct, ServeFault> {
        let Some(incoming) = &self.incoming else { return Ok(Direct::Not) };
        // By its length, not by what is left of it: who reads little ahead because long ones are expected must not read the
        // rest of one bit by bit.
        let left = self.reader.payload_left();
        if incoming.header.len < DIRECT_FROM {
            return Ok(Direct::Not);
        }
        let (addr, room) = match incoming.pin.device() {
            None => (incoming.header.addr + self.reader.payload_offset(), MAX_CALL_BYTES),
            Some(device) => match self.inlet.room(device, bell).map_err(ServeFault::Device)? {
                Room::At(addr, room) => (addr, room.min(MAX_CALL_BYTES)),
                Room::Starved => {
                    self.starved = true;
                    return Ok(Direct::Starved);
                }
            },
        };
        Ok(Direct::At(Span { addr, len: left.min(room) as usize }))
    }

    /// Whether the last payload was long: then the next one is likely to be, and little is read ahead
    /// of its header.
    pub(crate) fn expects_direct(&self) -> bool {
        self.direct
    }

    /// `n` bytes have arrived where [`Serve::direct`] said.
    pub(crate) fn received_direct(&mut self, n: u64, served: &mut Served) {
        if n == 0 {
            return;
        }
        if let Some(incoming) = self.incoming.as_ref().filter(|i| i.pin.device().is_some()) {
            let at = incoming.header.addr + self.reader.payload_offset();
            self.inlet.landed(at, n, Keep::Pin(incoming.pin.again()));
        }
        if self.reader.advance_payload(n) {
            self.applied(served);
        }
    }

    /// Bytes have arrived in the receive buffer.
    pub(crate) fn received(
        &mut self,
        input: &[u8],
        rules: &Rules<'_>,
        served: &mut Served,
    ) -> Result<(), ServeFault> {
        let result = self.take_in(input, rules, served);
        if self.incoming.is_none() || !self.answers.is_empty() {
            // Somebody waits for these copies.
            self.inlet.flush(rules.bell);
        } else {
            self.inlet.flush_much(rules.bell);
        }
        result
    }

    /// Takes in what had to wait for a staging slot, as far as there is one now.
    pub(crate) fn resume(
        &mut self,
        rules: &Rules<'_>,
        served: &mut Served,
    ) -> Result<(), ServeFault> {
        self.starved = false;
        if self.stash.is_empty() {
            return Ok(());
        }
        let stash = std::mem::take(&mut self.stash);
        self.received(&stash, rules, served)
    }

    /// The socket is empty: a staging slot goes to whoever needs it, unless a payload will go on there.
    pub(crate) fn rest(&mut self, bell: &Arc<dyn Bell>) {
        if self.incoming.is_none() {
            self.inlet.rest(bell);
        }
        if self.answers.is_empty() && self.answers.capacity() > MAX_KEPT_ANSWERS {
            self.answers = VecDeque::new();
        }
    }

    fn take_in(
        &mut self,
        mut input: &[u8],
        rules: &Rules<'_>,
        served: &mut Served,
    ) -> Result<(), ServeFault> {
        while !input.is_empty() {
            if let Some(left) = &mut self.draining {
                *left = left.checked_sub(input.len() as u64).ok_or(ServeFault::Drained)?;
                return Ok(());
            }
            if self.incoming.as_ref().is_some_and(|i| i.pin.device().is_some()) {
                let used = self.take_in_staged(input, rules.bell, served)?;
                if used == 0 {
                    self.starved = true;
                    self.stash.extend_from_slice(input);
                    return Ok(());
                }
                input = &input[used..];
                continue;
            }
            let (used, event) = self.reader.feed(input)?;
            match event {
                None => {}
                Some(Inbound::Request(header)) => self.request(header, rules.registry, served)?,
                Some(Inbound::Payload { offset, bytes, last }) => {
                    if let Some(incoming) = &self.incoming {
                        let addr = incoming.header.addr + offset;
                        copy_in(&incoming.pin, addr, bytes, rules.mode)?;
                        if last {
                            self.applied(served);
                        }
                    }
                }
            }
            input = &input[used..];
        }
        Ok(())
    }

    /// Takes payload for device memory to a staging slot; returns how much.
    fn take_in_staged(
        &mut self,
        input: &[u8],
        bell: &Arc<dyn Bell>,
        served: &mut Served,
    ) -> Result<usize, ServeFault> {
        let Some(Incoming { header, pin }) = &self.incoming else { return Ok(0) };
        let Some(device) = pin.device() else { return Ok(0) };
        let most = self.reader.payload_left().min(input.len() as u64) as usize;
        let at = header.addr + self.reader.payload_offset();
        let keep = || Keep::Pin(pin.again());
        let used = self.inlet.put(device, at, &input[..most], bell, keep);
        let used = used.map_err(ServeFault::Device)?;
        if used > 0 && self.reader.advance_payload(used as u64) {
            self.applied(served);
        }
        Ok(used)
    }

    fn request(
        &mut self,
        header: Header,
        registry: &Registry,
        served: &mut Served,
    ) -> Result<(), ServeFault> {
        let Header { op, addr, len, version } = header;
        self.v1 = version == Version::V1;
        let seen = self.last.as_ref().and_then(|seen| seen.pin(op, addr, len));
        let Some(pin) = seen.or_else(|| self.find(registry, header)) else {
            return self.refuse(header, served);
        };
        match op {
            Op::Write => {
                self.direct = len >= DIRECT_FROM;
                self.incoming = Some(Incoming { header, pin });
            }
            Op::Read => {
                self.direct = false;
                served.reads += 1;
                served.bytes_read += len;
                let device = pin.device();
                let staged = device.is_some();
                if let Some(device) = device {
                    self.staged.push_back(Payload::new(device, addr, len));
                }
                if version == Version::V2 {
                    self.answers.push_back(Answer::Status { staged });
                }
                self.answers.push_back(Answer::Payload { pin, addr, len });
            }
        }
        Ok(())
    }

    fn find(&mut self, registry: &Registry, Header { op, addr, len, .. }: Header) -> Option<Pin> {
        let pin = registry.find(op, addr, len)?;
        self.last = Some(pin.seen());
        Some(pin)
    }

    fn refuse(&mut self, header: Header, served: &mut Served) -> Result<(), ServeFault> {
        served.refusals += 1;
        self.refusal = Some(Refusal::Range(header));
        self.last = None;
        if header.version == Version::V1 {
            return Err(ServeFault::RefusedV1);
        }
        self.draining = Some(MAX_DRAIN);
        self.answers.push_back(Answer::Refused);
        Ok(())
    }

    /// The payload is in place: acknowledge it, in v2.
    fn applied(&mut self, served: &mut Served) {
        let Some(Incoming { header, pin }) = self.incoming.take() else { return };
        served.writes += 1;
        served.bytes_written += header.len;
        if header.version == Version::V1 {
            return;
        }
        let staged = pin.device().is_some();
        drop(pin);
        let after = if staged { self.inlet.mark() } else { 0 };
        match self.answers.back_mut() {
            Some(Answer::Applied { n, mark }) if *mark == after => *n += 1,
            _ => self.answers.push_back(Answer::Applied { n: 1, mark: after }),
        }
    }

    /// What was refused since the last call, if anything was.
    pub(crate) fn take_refusal(&mut self) -> Option<Refusal> {
        self.refusal.take()
    }

    /// Looks at what the copies have done, and has devices copy what will be answered next.
    ///
    /// # Errors
    /// A copy failed, and it is too late to refuse what was asked.
    pub(crate) fn ask(&mut self, bell: &Arc<dyn Bell>) -> Result<Ahead, ServeFault> {
        self.landed = self.inlet.reached().map_err(ServeFault::Device)?;
        if self.staged.is_empty() {
            return Ok(Ahead::All);
        }
        let mut ahead = Ahead::All;
        let pins = self.answers.iter().filter_map(Answer::staged_pin);
        for (payload, pin) in self.staged.iter_mut().zip(pins) {
            ahead = self.outlet.ask(payload, bell, || Keep::Pin(pin.again()));
            if ahead != Ahead::All {
                break;
            }
        }
        self.outlet.flush(bell);
        self.look_for_fault()?;
        Ok(ahead)
    }

    fn look_for_fault(&mut self) -> Result<(), ServeFault> {
        let is_next =
            |i| self.answers.get(i).is_some_and(|answer: &Answer| answer.staged_pin().is_some());
        let unanswered =
            self.sent == 0 && matches!(self.answers.front(), Some(Answer::Status { .. }));
        if !is_next(usize::from(unanswered)) {
            return Ok(());
        }
        let Some(why) = self.staged.front().and_then(Payload::fault) else { return Ok(()) };
        if !unanswered {
            return Err(ServeFault::Device(why));
        }
        self.refusal = Some(Refusal::Device(why));
        // What was asked behind it is not answered: a refusal is the last word.
        self.answers.clear();
        self.staged.clear();
        self.outlet.give_up_turn();
        (self.incoming, self.draining) = (None, Some(MAX_DRAIN));
        self.answers.push_back(Answer::Refused);
        Ok(())
    }

    /// Lets go of a staging slot that waits for more of a payload.
    pub(crate) fn relinquish_input(&mut self, bell: &Arc<dyn Bell>) {
        self.inlet.rest(bell);
    }

    /// Gives back the staging slots of what waits for the socket.
    pub(crate) fn relinquish(&mut self) {
        let front = self.answers.front().and_then(Answer::staged_pin);
        let mut sent = front.map_or(0, |_| self.sent);
        let staged = self.staged.iter_mut().map(|payload| (payload, std::mem::take(&mut sent)));
        self.outlet.relinquish(staged);
    }

    /// What the next send call sends; nothing, if copies have to come first.
    pub(crate) fn plan(&self, spans: &mut Vec<Span>) {
        // Made twice, so that the path of host memory has no trace of staging.
        if self.staged.is_empty() && self.has_landed() {
            self.plan_as::<false>(spans);
        } else {
            self.plan_as::<true>(spans);
            // A payload in several slots is as many pieces.
            spans.truncate(MAX_CALL_SPANS);
        }
    }

    fn plan_as<const STAGES: bool>(&self, spans: &mut Vec<Span>) {
        let (mut room, mut skip) = (MAX_CALL_BYTES, self.sent);
        let mut staged = self.staged.iter().peekable();
        for answer in &self.answers {
            if room == 0 || spans.len() >= MAX_CALL_SPANS {
                return;
            }
            let len = answer.len();
            let most = (len - skip).min(room);
            let take = match answer {
                Answer::Applied { mark, .. } if STAGES && *mark > self.landed => return,
                // Once a READ is said to be served it cannot be refused, so its first bytes come before.
                Answer::Status { staged: true }
                    if STAGES && !staged.peek().is_some_and(|p| p.has_begun()) =>
                {
                    return;
                }
                Answer::Payload { pin, .. } if STAGES && pin.device().is_some() => {
                    staged.next().map_or(0, |payload| payload.spans(skip, most, spans))
                }
                answer => answer.spans(skip, most, spans),
            };
            room -= take;
            if skip + take < len {
                return;
            }
            skip = 0;
        }
    }

    /// A socket has taken `n` bytes of what was planned.
    pub(crate) fn sent(&mut self, n: usize) {
        if self.staged.is_empty() {
            self.sent_as::<false>(n);
        } else {
            self.sent_as::<true>(n);
        }
    }

    fn sent_as<const STAGES: bool>(&mut self, n: usize) {
        self.sent += n as u64;
        while let Some(front) = self.answers.front() {
            if self.sent < front.len() {
                break;
            }
            self.sent -= front.len();
            if STAGES && front.staged_pin().is_some() {
                self.staged.pop_front();
            }
            self.answers.pop_front();
        }
        if STAGES
            && let Some(payload) = self.staged.front_mut()
            && self.answers.front().is_some_and(|front| front.staged_pin().is_some())
        {
            payload.sent(self.sent);
        }
    }

    /// Whether the buffer that starts at `addr` is in use here.
    pub(crate) fn uses(&self, addr: u64) -> bool {
        let incoming = self.incoming.iter().map(|i| &i.pin);
        let outgoing = self.answers.iter().filter_map(|a| match a {
            Answer::Payload { pin, .. } => Some(pin),
            _ => None,
        });
        incoming.chain(outgoing).any(|pin| pin.buffer_addr() == addr)
    }
}

impl Answer {
    /// What a payload that is copied from a device pins.
    fn staged_pin(&self) -> Option<&Pin> {
        match self {
            Self::Payload { pin, .. } => Some(pin).filter(|pin| pin.device().is_some()),
            _ => None,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Applied { n, .. } => u64::from(*n) * STATUS_LEN as u64,
            Self::Refused | Self::Status { .. } => STATUS_LEN as u64,
            Self::Payload { len, .. } => *len,
        }
    }

    /// The pieces of at most `take` bytes from `skip` on; returns how many bytes there are.
    #[inline(always)]
    fn spans(&self, skip: u64, take: u64, spans: &mut Vec<Span>) -> u64 {
        let piece = |bytes: &'static [u8]| Span::of(&bytes[skip as usize..(skip + take) as usize]);
        match self {
            Self::Refused => spans.push(piece(&REJECTED)),
            Self::Status { .. } => spans.push(piece(&APPLIED)),
            &Self::Payload { addr, .. } => {
                spans.push(Span { addr: addr + skip, len: take as usize });
            }
            Self::Applied { .. } => {
                let mut skip = skip as usize % STATUS_LEN;
                let mut left = take as usize;
                while left > 0 && spans.len() < MAX_CALL_SPANS {
                    let len = left.min(APPLIED.len() - skip);
                    spans.push(Span::of(&APPLIED[skip..skip + len]));
                    (left, skip) = (left - len, 0);
                }
                return take - left as u64;
            }
        }
        take
    }
}

#[cfg(test)]
mod tests;
