//! What must hold at every moment, and at the end.

use std::time::{Duration, Instant};

use tensorferry_wire::Op;

use crate::error::Error;
use crate::peer::Census;
use crate::sim::machine::{Process, Use};
use crate::sim::memory::{CANARY, POISON};
use crate::sim::net;
use crate::sim::world::{Asked, Ending, Kind, Outcome, Sent, World};
use crate::transfer::BatchState;

/// A batch is final so long after its deadline at the latest: timers are rounded up.
const TICK: Duration = Duration::from_millis(1);
/// Longer than any question, connecting or silence is borne.
const REST: Duration = Duration::from_secs(120);
/// Longer than silence is borne where an answer is owed.
const LONG_SILENCE: Duration = Duration::from_secs(15);
/// Requests of a peer are cut into slices of this length, each of which has its own fate.
const SLICE: u64 = 1 << 20;

impl World<'_> {
    /// Looks at batches that have become final.
    pub(super) fn look(&mut self) -> Outcome {
        for index in 0..self.sent.len() {
            let sent = &self.sent[index];
            if !sent.over && sent.batch.poll() != BatchState::Running {
                self.look_at(index).map_err(|why| format!("batch {index}: {why}"))?;
            }
        }
        Ok(())
    }

    fn look_at(&mut self, index: usize) -> Outcome {
        let honest = self.plan.faults.corrupt == 0;
        let sent = &mut self.sent[index];
        sent.over = true;
        let state = sent.batch.poll();
        net::with(|net| net.note(|| format!("batch {index} is {state:?}")));
        let failures = sent.batch.failures();
        for (at, _) in &failures {
            sent.asked[*at].ending = Ending::Failed;
        }
        let mut asked = std::mem::take(&mut sent.asked);
        let mut errors = failures.iter();
        for (i, request) in asked.iter_mut().enumerate() {
            let error = match request.ending {
                Ending::Failed => failures.iter().find(|(at, _)| *at == i).map(|(_, e)| e),
                _ => None,
            };
            self.look_at_request(request, error, honest).map_err(|why| {
                format!("request {i} ({:?}, {:?}): {why}", request.op, request.kind)
            })?;
        }
        if errors.any(|(at, _)| *at >= asked.len()) {
            return Err("a failure names no entry".to_owned());
        }
        let whole = failures.is_empty();
        let sent = &mut self.sent[index];
        sent.asked = asked;
        self.look_at_state(index, state, whole)
    }

    fn look_at_state(&mut self, index: usize, state: BatchState, whole: bool) -> Outcome {
        let sent = &self.sent[index];
        let told = sent.notification.as_ref().map(|text| self.notified.get(text).copied());
        match (state, whole, told) {
            (BatchState::Completed, true, None | Some(Some(1))) => Ok(()),
            // Its process may have gone with what nobody had taken.
            (BatchState::Completed, true, Some(None)) if self.has_changed(sent) => Ok(()),
            (BatchState::Failed, true, Some(_)) if !self.plan.calm => Ok(()),
            (BatchState::Failed | BatchState::TimedOut | BatchState::Cancelled, false, _) => Ok(()),
            _ => Err(format!("it is {state:?}, whole: {whole}, notified: {told:?}")),
        }
    }

    /// Whether another process runs on the target than at the beginning.
    fn has_changed(&self, sent: &Sent) -> bool {
        self.processes.iter().any(|p| p.machine == sent.target && !p.alive)
    }

    fn look_at_request(&self, request: &mut Asked, error: Option<&Error>, honest: bool) -> Outcome {
        let Asked { op, local, remote, len, number, kind, .. } = *request;
        let here = (local, len);
        let there = (remote, len);
        match error {
            None => {
                request.ending = Ending::Done;
                if honest && !matches!(kind, Kind::Good | Kind::Empty) {
                    return Err("it is complete".to_owned());
                }
                let right = match op {
                    _ if !honest || len == 0 => true,
                    // It was unregistered while a notification was on its way, and is its owner's again.
                    Op::Read if request.home.is_some_and(|at| !self.is_buffer_open(at)) => true,
                    Op::Read => self.arena.has_readable(here, remote),
                    Op::Write if !self.is_buffer_open(request.place) => true,
                    Op::Write => self.arena.has_content(there, number),
                };
                if !right {
                    return Err("it is complete, but its bytes are not in place".to_owned());
                }
            }
            Some(error) => {
                if kind == Kind::Empty {
                    return Err(format!("it has no bytes, and failed: {error}"));
                }
                let late = matches!(error, Error::TimedOut { .. });
                if self.plan.calm && (kind == Kind::Good || late) {
                    return Err(format!("nothing was wrong, and it failed: {error}"));
                }
                if matches!(error, Error::OutcomeUnknown { why, .. } if op == Op::Read || why.contains("bug"))
                {
                    return Err(format!("somebody has dropped it: {error}"));
                }
                let unsent = is_unsent(error) && len <= SLICE;
                request.ending = if unsent { Ending::Unsent } else { Ending::Failed };
                if honest && op == Op::Write && kind == Kind::Good {
                    self.look_at_destination(request, error)?;
                }
            }
        }
        if kind != Kind::Unmapped {
            self.arena.fill(here, CANARY);
        }
        Ok(())
    }

    fn look_at_destination(&self, request: &Asked, error: &Error) -> Outcome {
        let there = (request.remote, request.len);
        if !self.is_buffer_open(request.place) {
            return Ok(());
        }
        if request.ending == Ending::Unsent && !self.arena.is_filled(there, POISON) {
            return Err(format!("its destination was changed, and it is said that not: {error}"));
        }
        if !self.arena.is_partly(there, request.number) {
            return Err("its destination has bytes that are neither old nor its own".to_owned());
        }
        Ok(())
    }

    /// All threads sleep: nobody may wait for what has come, and nobody past a deadline.
    pub(super) fn check_rest(&self) -> Outcome {
        let now = self.now();
        for (index, sent) in self.sent.iter().enumerate().filter(|(_, s)| World::is_running(s)) {
            let process = &self.processes[sent.process];
            if sent.cancelled || !process.alive {
                return Err(format!("batch {index} was told to stop, and nobody does anything"));
            }
            let wake = process.wakes().min();
            if now > sent.deadline + TICK || wake.is_none_or(|at| at > sent.deadline + TICK) {
                return Err(format!("batch {index} is running, and nobody keeps its deadline"));
            }
        }
        if let Some(end) = net::with(|net| net.owed_in_silence(LONG_SILENCE)) {
            return Err(format!("{end} waits for an answer, and nobody is at the other end"));
        }
        for process in self.processes.iter().filter(|p| p.alive) {
            process.check_lanes(now, self.plan.progress_timeout)?;
            for registered in &process.buffers {
                if let Use::Leaving { buffer, revoked: true, .. } = &registered.state
                    && !buffer.is_quiet()
                {
                    return Err("a buffer was revoked, and nobody lets go of it".to_owned());
                }
            }
        }
        Ok(())
    }

    /// The links are well: everything ends, and what is asked now is done.
    pub(super) fn check_recovery(&mut self) -> Outcome {
        let ended = self.drive(|world| !world.sent.iter().any(World::is_running))?;
        if !ended {
            return Err("batches are running, and nothing happens any more".to_owned());
        }
        if self.rng.flip() {
            // What is left of earlier faults comes to its end.
            self.come_to_rest()?;
        }
        for from in 0..self.plan.initiators {
            let targets = (0..self.plan.machines).filter(|m| *m != from).collect::<Vec<_>>();
            for target in targets {
                let alive = |m: usize| self.processes[self.machines[m].process].alive;
                if alive(from) && alive(target) {
                    self.check_pair(from, target)?;
                }
            }
        }
        Ok(())
    }

    /// Whatever has an end comes to it; connections that are idle are looked at for ever.
    fn come_to_rest(&mut self) -> Outcome {
        let until = self.now() + REST;
        self.drive(|world| world.now() >= until).map(drop)
    }

    fn check_pair(&mut self, from: usize, target: usize) -> Outcome {
        // What was begun with a connection that is lost ends with it, or when it is not answered in time: at most one
        // request for each lane, one for a lane that was being connected, and one for a question.
        let mut tries = if self.plan.calm { 1 } else { self.plan.lanes + 3 };
        loop {
            let Some(index) = self.submit_plain(from, target)? else { return Ok(()) };
            self.drive(|world| !World::is_running(&world.sent[index]))?;
            let state = self.sent[index].batch.poll();
            tries -= 1;
            if state == BatchState::Completed {
                return Ok(());
            }
            let late = state == BatchState::TimedOut && !net::with(|net| net.is_any_silent());
            if tries == 0 || late {
                let why = self.sent[index].batch.result();
                return Err(format!("the links are well, and batch {index} is not done: {why:?}"));
            }
        }
    }

    /// Nothing is left of what was done, but its effects.
    pub(super) fn check_books(&mut self) -> Outcome {
        // Lanes that were being connected for nobody come to their end first.
        self.come_to_rest()?;
        if let Some(end) = net::with(|net| net.kept_in_silence(REST)) {
            return Err(format!("{end} is kept, at whose other end nobody has been for long"));
        }
        for process in self.processes.iter().filter(|p| p.alive) {
            if process.core.reserved() != 0 {
                return Err(format!("{} bytes of a queue are reserved", process.core.reserved()));
            }
            for peer in process.engine.known() {
                let lanes = process.lanes_to(peer.number);
                let wanted = Census { waiting: 0, lanes, connecting: 0, reserved: 0 };
                if peer.census() != wanted {
                    let has = peer.census();
                    return Err(format!("a peer has {has:?}, and should have {wanted:?}"));
                }
            }
        }
        Ok(())
    }

    /// After all engines are closed.
    pub(super) fn check_end(&self) -> Outcome {
        for (index, sent) in self.sent.iter().enumerate() {
            for (i, request) in sent.asked.iter().enumerate() {
                self.check_quiet(sent, request)
                    .map_err(|why| format!("batch {index}, request {i}: {why}"))?;
            }
            if sent.batch.poll() == BatchState::Running {
                return Err(format!("batch {index} is running, and its engine is closed"));
            }
        }
        self.check_counters()?;
        let open = net::with(|net| net.open_ends());
        if open > 0 { Err(format!("{open} sockets are left open")) } else { Ok(()) }
    }

    fn check_quiet(&self, sent: &Sent, request: &Asked) -> Outcome {
        let Asked { op, local, remote, len, number, kind, ending, place, .. } = *request;
        let seen = ending != Ending::Unknown && !self.processes[sent.process].killed;
        if seen && kind != Kind::Unmapped && !self.arena.is_filled((local, len), CANARY) {
            return Err("its local memory was touched after its end".to_owned());
        }
        if op == Op::Read || self.plan.faults.corrupt > 0 || kind != Kind::Good {
            return Ok(());
        }
        if !self.is_buffer_open(place) {
            return Ok(());
        }
        let right = match ending {
            Ending::Done => self.arena.has_content((remote, len), number),
            Ending::Unsent => self.arena.is_filled((remote, len), POISON),
            Ending::Failed | Ending::Unknown => self.arena.is_partly((remote, len), number),
        };
        if right { Ok(()) } else { Err(format!("{ending:?}, and its destination is wrong")) }
    }

    fn check_counters(&self) -> Outcome {
        for (number, process) in self.processes.iter().enumerate().filter(|(_, p)| !p.killed) {
            let stats = process.engine.stats();
            let mine = || self.sent.iter().filter(|s| s.process == number);
            let requests = || mine().flat_map(|s| &s.asked);
            let done = |op| {
                let done = requests().filter(|r| r.ending == Ending::Done && r.op == op);
                done.map(|r| r.len).sum::<u64>()
            };
            let failed = requests().filter(|r| r.ending != Ending::Done).count() as u64;
            let completed = mine().filter(|s| s.batch.poll() == BatchState::Completed).count();
            let batches = mine().count() as u64;
            let all = requests().count() as u64;
            let wanted = [
                (stats.batches_submitted, batches),
                (stats.batches_completed, completed as u64),
                (stats.batches_failed, batches - completed as u64),
                (stats.requests_failed, failed),
                (stats.requests_completed, all - failed),
                (stats.bytes_read, done(Op::Read)),
                (stats.bytes_written, done(Op::Write)),
            ];
            if wanted.iter().any(|(is, should)| is != should) {
                return Err(format!("process {number} has counted {wanted:?} (is, should be)"));
            }
        }
        Ok(())
    }
}

impl Process {
    /// Nobody waits for a lane that is free, and none is kept that does not move.
    fn check_lanes(&self, now: Instant, limit: Option<Duration>) -> Outcome {
        let threads = || self.threads.iter().filter_map(|t| t.reactor.as_ref());
        let since = limit.and_then(|limit| now.checked_sub(limit + TICK));
        if since.is_some_and(|since| threads().any(|t| t.has_stuck_lane(since))) {
            return Err("a lane does not move, and is kept".to_owned());
        }
        for peer in self.engine.known().iter().filter(|peer| peer.wants_hands()) {
            if threads().any(|t| t.free_lanes_to(peer.number) > 0) {
                return Err("a request waits, and a lane is free".to_owned());
            }
        }
        Ok(())
    }
}

/// Whether it is said that no byte of the request has left.
fn is_unsent(error: &Error) -> bool {
    match error {
        Error::TimedOut { sent, .. } | Error::Cancelled { sent, .. } => !sent,
        Error::Refused(_)
        | Error::RangeNotPublished(_)
        | Error::ConnectionLost { .. }
        | Error::PeerUnreachable { .. }
        | Error::BadAnswer { .. } => true,
        _ => false,
    }
}
