//! Driving a lane: the initiator's end of a data connection.
#![expect(unsafe_code, reason = "receiving into memory that users have lent")]

use std::collections::btree_map::Entry;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mio::Token;
use tensorferry_wire::WireError;

use crate::clock;
use crate::core::Core;
use crate::io::Socket;
use crate::io::conns::{Conn, Fate};
use crate::io::look::Watch;
use crate::io::thread::{Reactor, STARVED};
use crate::log::Kind as Line;
use crate::memory::Span;
use crate::peer::{LaneStats, Parting, Peer, Route};
use crate::staging::{Ahead, Bell};
use crate::sync::locked;
use crate::tcp::{Cost, Ending, Lane, LaneFault, MAX_CALL_SPANS, SendHalf};
use crate::transfer::{Cause, Slice, Stop};

pub(crate) struct LaneConn {
    pub(super) peer: Arc<Peer>,
    pub(super) lane: Lane,
    /// Whoever has it is the one that sends.
    pub(super) half: Arc<Mutex<SendHalf>>,
    phase: Phase,
    /// The last time anything moved.
    pub(super) active: Instant,
    /// Submitting threads were told that they may send on it.
    pub(super) offered: bool,
    pub(super) watch: Watch,
    /// Our side of the stream has ended.
    half_closed: bool,
    /// Sending failed; what has arrived is still read.
    broken: Option<String>,
    /// How it ended, once it is to be closed.
    pub(super) end: End,
}

enum Phase {
    Connecting { route: Arc<Route>, at: usize, since: Instant },
    Open,
}

pub(super) enum End {
    /// It was not needed any more.
    Unneeded,
    Refused,
    Lost(String),
    Violation(Arc<WireError>),
    /// It never was open.
    Unconnected(String),
}

/// A lane that owes something and does not move.
pub(super) struct Stuck;

/// How many rounds of sending and receiving a lane has before others get their turn.
const ROUNDS: usize = 8;

enum Step {
    Progress,
    Blocked,
    Over,
}

impl Reactor {
    /// Begins to connect a lane to the first address of the route from `at` on that can be tried.
    pub(super) fn connect(&mut self, peer: Arc<Peer>, route: Arc<Route>, at: usize) {
        let (mut at, mut why) = (at, String::new());
        while let Some(&addr) = route.addrs.get(at) {
            match self.connect_to(addr) {
                Ok(socket) => {
                    let until = self.now + self.core.config.connect_timeout;
                    let lane = LaneConn::new(Arc::clone(&peer), Arc::clone(&route), at, self.now);
                    match self.add_lane(socket, lane, until) {
                        Some(token) => {
                            self.lanes.entry(peer.number).or_default().push(token);
                            return;
                        }
                        None => why = "it cannot be watched".to_owned(),
                    }
                }
                Err(e) => why = e.to_string(),
            }
            at += 1;
        }
        self.unconnected(&peer, &route, &why, self.now);
    }

    fn unconnected(&mut self, peer: &Arc<Peer>, route: &Route, why: &str, since: Instant) {
        let addr = route.addrs.last().copied().unwrap_or_else(|| ([0, 0, 0, 0], 0).into());
        peer.lane_failed(addr, why, clock::since(since));
    }

    /// A lane was closed: what it owed goes back to the queue or is settled.
    pub(super) fn lane_gone(&mut self, token: Token, conn: LaneConn) {
        let LaneConn { peer, mut lane, half, phase, end, watch, .. } = conn;
        if let Entry::Occupied(mut tokens) = self.lanes.entry(peer.number) {
            tokens.get_mut().retain(|t| *t != token);
            if tokens.get().is_empty() {
                tokens.remove();
            }
        }
        let mut half = locked(&half);
        let ending = match &end {
            End::Refused => Ending::Refusal,
            End::Violation(e) => Ending::Violation(e),
            End::Lost(why) | End::Unconnected(why) => Ending::Lost(why),
            End::Unneeded => Ending::Lost("the lane was given up"),
        };
        let parting = Parting {
            sidelined: watch.is_sidelined(),
            silent: watch.is_silent(&lane),
            spent: lane.is_for_one(),
        };
        let cost = lane.lost(&mut half, &ending, &mut self.scratch.requeue);
        peer.requeue(&mut self.scratch.requeue);
        match (phase, end) {
            (Phase::Connecting { route, at, since }, End::Unconnected(why)) => {
                if at + 1 < route.addrs.len() {
                    return self.connect(peer, route, at + 1);
                }
                self.unconnected(&peer, &route, &why, since);
            }
            (Phase::Connecting { .. }, _) => peer.lane_given_up(),
            (Phase::Open, end) => {
                peer.lane_closed(parting);
                match end {
                    End::Refused => {
                        peer.account.metrics.refusals.add(1);
                        peer.distrust();
                    }
                    End::Lost(why) => {
                        peer.account.metrics.lanes_lost.add(1);
                        say_lost(&self.core, &peer, &why, cost);
                    }
                    End::Violation(e) => {
                        peer.account.metrics.lanes_lost.add(1);
                        say_violation(&self.core, &peer, &e, cost);
                    }
                    End::Unneeded | End::Unconnected(_) => {}
                }
            }
        }
        peer.kick();
    }

    pub(super) fn drive_lane(&mut self, conn: &mut Conn) -> Fate {
        self.claim(conn);
        if matches!(conn.lane().phase, Phase::Connecting { .. }) {
            match self.check_connected(conn) {
                Fate::Again => {}
                fate => return fate,
            }
        }
        if self.is_worn_out(conn) {
            return Fate::Close;
        }
        for _ in 0..ROUNDS {
            // What has come before anything was asked answers nothing that is asked now.
            if conn.lane().lane.is_idle() {
                conn.readable |= conn.lane().peer.has_work();
                if matches!(self.receive(conn), Step::Over) {
                    return Fate::Close;
                }
            }
            let pulled = self.pull(conn.lane());
            let sent = self.send(conn);
            let received = self.receive(conn);
            let peer = Arc::clone(&conn.lane().peer);
            peer.requeue(&mut self.scratch.requeue);
            match (sent, received) {
                (_, Step::Over) | (Step::Over, _) => return Fate::Close,
                (Step::Blocked, Step::Blocked) if !pulled => {
                    self.offer(conn);
                    return Fate::Wait;
                }
                (_, Step::Progress) if conn.lane().watch.is_expectant() => self.lane_answers(conn),
                _ => {}
            }
            conn.lane().active = self.now;
            if conn.lane().lane.is_done() {
                return Fate::Close;
            }
        }
        Fate::Again
    }

    /// `Again`: it is connected. Else what `drive` returns.
    fn check_connected(&mut self, conn: &mut Conn) -> Fate {
        let why = match conn.socket.connected() {
            Ok(true) => {
                let lane = conn.lane();
                lane.phase = Phase::Open;
                lane.active = self.now;
                lane.peer.lane_opened();
                // What this lane cannot take is worth another.
                lane.peer.kick();
                conn.set_due(None);
                self.look_soon();
                (conn.readable, conn.writable) = (true, true);
                return Fate::Again;
            }
            Ok(false) if !conn.is_due(self.now) => return Fate::Wait,
            Ok(false) => {
                let after = self.core.config.connect_timeout;
                format!("no answer in {after:?} (TENSORFERRY_CONNECT_TIMEOUT)")
            }
            Err(e) => e.to_string(),
        };
        conn.lane().end = End::Unconnected(why);
        Fate::Close
    }

    /// An idle lane that has nothing in flight may be dead without a sign. If work waits for it, a new
    /// one is made instead.
    fn is_worn_out(&self, conn: &mut Conn) -> bool {
        let lane = conn.lane();
        let idle = self.now.saturating_duration_since(lane.active);
        if lane.lane.is_idle() && idle > self.core.config.lane_idle_probe && lane.peer.has_work() {
            lane.lane.retire("it was idle for too long to be trusted");
        }
        lane.lane.is_done()
    }

    /// Takes on what the lane has room for; true if that was anything.
    fn pull(&mut self, conn: &mut LaneConn) -> bool {
        let room = conn.lane.room();
        if room.requests == 0 || room.bytes == 0 {
            return false;
        }
        let slices = &mut self.scratch.slices;
        let pulled = conn.peer.pull(room, self.now, slices);
        if slices.is_empty() {
            return pulled.more;
        }
        let Ok(mut half) = conn.half.try_lock() else {
            conn.peer.requeue(slices);
            return false;
        };
        slices.drain(..).for_each(|slice| half.launch(slice));
        let next = conn.lane.take_over(&mut half);
        if pulled.alone {
            conn.lane.set_alone();
        }
        drop(half);
        self.taken_over(next);
        true
    }

    /// A lane has taken requests on; `next`: the first of those deadlines that nobody keeps yet.
    pub(super) fn taken_over(&mut self, next: Option<Instant>) {
        next.into_iter().for_each(|at| self.sweep_by(at));
        if let Some(limit) = self.core.config.progress_timeout {
            self.sweep_by(self.now + limit);
        }
        self.look_soon();
    }

    /// Sends until the socket is full or nothing is left.
    fn send(&mut self, conn: &mut Conn) -> Step {
        let (writable, bell, socket) = (conn.writable, conn.bell.clone(), conn.socket.clone());
        let lane = conn.lane();
        let half = Arc::clone(&lane.half);
        let Ok(mut half) = half.try_lock() else { return Step::Blocked };
        let mut step = Step::Blocked;
        let mut max_spans = MAX_CALL_SPANS;
        let mut full = !writable;
        while half.wants() && !full && lane.broken.is_none() {
            if half.ask(&bell) == Ahead::Starved {
                self.sweep_by(self.now + STARVED);
            }
            if let Some(why) = half.fault() {
                let requeue = &mut self.scratch.requeue;
                lane.lane.cannot_send(Cause::Device(why), &mut half, requeue);
                step = Step::Progress;
                continue;
            }
            self.scratch.spans.clear();
            half.plan(max_spans, &mut self.scratch.spans);
            if self.scratch.spans.is_empty() {
                // Copies from a device have to come first; their bell will ring.
                break;
            }
            match socket.send(&self.scratch.spans) {
                Ok(n) => {
                    half.sent(n);
                    (step, max_spans) = (Step::Progress, MAX_CALL_SPANS);
                }
                Err(e) => match (e.kind(), e.raw_os_error()) {
                    (io::ErrorKind::WouldBlock, _) => full = true,
                    (io::ErrorKind::Interrupted, _) => {}
                    // One of many pieces is bad; alone it shows itself.
                    (_, Some(libc::EFAULT)) if max_spans > 1 => max_spans = 1,
                    (_, Some(libc::EFAULT)) => {
                        let why = bad_address(&self.core);
                        lane.lane.cannot_send(why, &mut half, &mut self.scratch.requeue);
                        (step, max_spans) = (Step::Progress, MAX_CALL_SPANS);
                    }
                    // What the peer said before it hung up is still to be read.
                    _ => lane.broken = Some(e.to_string()),
                },
            }
        }
        if !lane.half_closed && (half.is_shut() || lane.lane.wants_half_close(&half)) {
            half.end();
            socket.half_close();
            lane.half_closed = true;
        }
        let broken = lane.broken.is_some();
        drop(half);
        conn.writable = !full;
        conn.readable |= broken;
        step
    }

    /// Receives until nothing is there or nothing is owed.
    fn receive(&mut self, conn: &mut Conn) -> Step {
        if !conn.readable {
            return Step::Blocked;
        }
        let step = self.receive_some(conn);
        if !conn.readable {
            let bell = conn.bell.clone();
            conn.lane().lane.rest(&bell);
        }
        step
    }

    fn receive_some(&mut self, conn: &mut Conn) -> Step {
        let (socket, bell) = (conn.socket.clone(), conn.bell.clone());
        let discard = Span::of_mut(&mut self.scratch.receive);
        let mut step = Step::Blocked;
        let mut max_spans = MAX_CALL_SPANS;
        for _ in 0..ROUNDS {
            self.scratch.spans.clear();
            let lane = conn.lane();
            let spans = &mut self.scratch.spans;
            let planned = lane.lane.plan(discard, max_spans, spans, &bell);
            let wanted: usize = spans.iter().map(|s| s.len).sum();
            if planned.starved {
                self.sweep_by(self.now + STARVED);
            }
            if wanted == 0 {
                return step;
            }
            match receive_planned(&socket, &self.scratch.spans) {
                Ok(0) => return ended(conn),
                Ok(n) => {
                    step = Step::Progress;
                    max_spans = MAX_CALL_SPANS;
                    // Not `try_lock`: what has arrived must be accounted for.
                    let fault = lane.lane.received(n, &locked(&lane.half), &bell).err();
                    if let Some(fault) = fault {
                        lane.end = match fault {
                            LaneFault::Refused => End::Refused,
                            LaneFault::Wire(e) => End::Violation(Arc::new(e)),
                        };
                        return Step::Over;
                    }
                    // A short count means that the socket is empty, unless a bad address cut it short.
                    if n < wanted && !planned.users && !conn.read_closed {
                        conn.readable = false;
                        return step;
                    }
                }
                Err(e) => match (e.kind(), e.raw_os_error()) {
                    (io::ErrorKind::WouldBlock, _) => {
                        conn.readable = false;
                        return step;
                    }
                    (io::ErrorKind::Interrupted, _) => {}
                    (_, Some(libc::EFAULT)) if max_spans > 1 => max_spans = 1,
                    (_, Some(libc::EFAULT)) => {
                        lane.lane.cannot_receive(bad_address(&self.core));
                        (step, max_spans) = (Step::Progress, MAX_CALL_SPANS);
                    }
                    _ => {
                        lane.end = End::Lost(lane.broken.take().unwrap_or_else(|| e.to_string()));
                        return Step::Over;
                    }
                },
            }
        }
        step
    }
}

#[cold]
fn bad_address(core: &Core) -> Cause {
    Cause::BadAddress(core.devices.report().into())
}

fn receive_planned(socket: &Socket, spans: &[Span]) -> io::Result<usize> {
    // SAFETY: `Lane::plan` names the lane's scratch, the thread's receive buffer, and the local memory of
    // READs that are not settled, which `Segment::submit`'s caller has lent until the batch is final.
    unsafe { socket.receive(spans) }
}

/// The stream has ended: for a v1 WRITE that is the answer.
fn ended(conn: &mut Conn) -> Step {
    let settled = conn.socket.take_error().is_none()
        && conn.socket.unacknowledged().is_ok_and(|bytes| bytes <= 1);
    let lane = conn.lane();
    let complete = lane.lane.ended(&locked(&lane.half), settled);
    lane.end = match lane.broken.take() {
        _ if complete => End::Unneeded,
        Some(why) => End::Lost(why),
        None => End::Lost("the peer closed the connection".to_owned()),
    };
    Step::Over
}

/// A lane was lost. What fails by it is said with its batch, and a lane without requests is no loss.
#[cold]
fn say_lost(core: &Core, peer: &Peer, why: &str, Cost { sent_again, failed }: Cost) {
    let name = peer.name();
    let text =
        || format!("a connection to {name} was lost ({why}): {sent_again} requests are sent again");
    if sent_again > 0 && failed == 0 {
        core.log.info(Line::LaneLost, name, text);
    } else {
        tracing::debug!("{}, {failed} fail", text());
    }
}

/// A peer broke the protocol. What fails by it is said with its batch.
#[cold]
fn say_violation(core: &Core, peer: &Peer, fault: &WireError, cost: Cost) {
    let name = peer.name();
    let text = || format!("{name} broke the protocol: {fault}; its connection is closed");
    if cost.failed == 0 {
        core.log.warn(Line::Violation, name, text);
    } else {
        tracing::debug!("{}", text());
    }
}

/// A lane, for operators.
pub(crate) struct LaneReport {
    /// The number of its peer.
    pub(crate) peer: usize,
    pub(crate) stats: LaneStats,
}

impl LaneConn {
    pub(super) fn report(&self, io_thread: usize) -> LaneReport {
        let is_open = matches!(self.phase, Phase::Open);
        let stats = self.lane.stats(is_open, io_thread, clock::since(self.active));
        LaneReport { peer: self.peer.number, stats }
    }

    fn new(peer: Arc<Peer>, route: Arc<Route>, at: usize, now: Instant) -> Self {
        let (version, addr) = (route.version, route.addrs[at]);
        Self {
            peer,
            lane: Lane::new(version, addr),
            half: Arc::new(Mutex::new(SendHalf::new(version))),
            phase: Phase::Connecting { route, at, since: now },
            active: now,
            offered: false,
            watch: Watch::default(),
            half_closed: false,
            broken: None,
            end: End::Unneeded,
        }
    }

    pub(super) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Whether a submitting thread may send on it.
    pub(super) fn is_offerable(&self) -> bool {
        let room = self.lane.room();
        let free = self.is_open() && room.empty && room.requests > 0 && !self.lane.is_for_one();
        free && !self.watch.is_expectant() && !self.half_closed && self.broken.is_none()
    }

    /// Since when nothing was asked of it, and everything is answered.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.is_open() && self.lane.is_idle()).then_some(self.active)
    }

    /// Whether a payload has arrived in part.
    pub(super) fn is_in_payload(&self) -> bool {
        self.lane.is_in_payload()
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    /// Whether the lane owes us something and has not moved for `limit`; it is to be closed then. Else when to
    /// look again.
    pub(super) fn is_stuck(
        &mut self,
        now: Instant,
        limit: Duration,
    ) -> Result<Option<Instant>, Stuck> {
        if self.lane.is_idle() {
            return Ok(None);
        }
        let due = self.active + limit;
        if now < due {
            return Ok(Some(due));
        }
        self.end = End::Lost(format!("no progress in {limit:?} (MC_TCP_PROGRESS_TIMEOUT_SEC)"));
        Err(Stuck)
    }

    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        self.is_open() && self.lane.room().requests > 0 && self.lane.is_idle()
    }

    #[cfg(test)]
    pub(super) fn is_stuck_since(&self, since: Instant) -> bool {
        self.is_open() && !self.lane.is_idle() && self.active < since
    }

    /// Lets go of what is to stop; returns the next deadline of what is left.
    pub(super) fn sweep(&mut self, now: Instant, requeue: &mut Vec<Slice>) -> Option<Instant> {
        let mut half = locked(&self.half);
        self.lane.sweep(&mut half, now, requeue)
    }

    pub(super) fn revoke(&self, addr: u64) {
        self.lane.revoke(addr);
    }

    /// Gives back the staging slots of what waits to be received, or to be sent.
    pub(super) fn relinquish(&mut self, input: bool, output: bool, bell: &Arc<dyn Bell>) {
        if input {
            self.lane.relinquish(bell);
        }
        if output {
            locked(&self.half).relinquish();
        }
    }

    /// Settles everything in flight, for the end of the engine.
    pub(super) fn stop_all(&mut self, now: Instant) {
        self.lane.stop_all(Stop::Closed);
        let mut unsent = Vec::new();
        self.sweep(now, &mut unsent);
        for slice in unsent {
            let stage = "it had not been sent";
            slice.settle(Err(Cause::Stopped { stop: Stop::Closed, stage, sent: false }));
        }
    }
}
