//! A schedule: machines, links, and what happens to them one step after the other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tensorferry_wire::{Notification, Op, Version};

use crate::core::Core;
use crate::error::Error;
use crate::io::Command;
use crate::memory::OwnedRequest;
use crate::sim::guard::Guards;
use crate::sim::machine::{Process, Registered, Use, name};
use crate::sim::memory::{Arena, CANARY, POISON, SHARE};
use crate::sim::net::{
    self, CALLER, CONTROL_PORT, CallFaults, EndId, MOST_ROOM, Net, Phase, Pipe, ThreadId,
};
use crate::sim::plan::{Plan, Sizes};
use crate::sim::rng::Rng;
use crate::transfer::{Batch, BatchState, OnFull, Owner, Stop, SubmitOptions};

pub(super) type Outcome<T = ()> = Result<T, String>;

pub(super) struct World<'a> {
    pub(super) plan: Plan,
    pub(super) rng: Rng,
    pub(super) arena: &'a Arena,
    /// The process that runs on each machine.
    pub(super) machines: Vec<Machine>,
    pub(super) processes: Vec<Process>,
    pub(super) sent: Vec<Sent>,
    /// Notifications that were taken, by text, and how often.
    pub(super) notified: BTreeMap<String, usize>,
    requests: u64,
    healed: bool,
}

pub(super) struct Machine {
    pub(super) process: usize,
    /// What is free of its share: for buffers, and for local memory of requests.
    next_buffer: u64,
    next_local: u64,
}

/// A batch that was submitted.
pub(super) struct Sent {
    pub(super) batch: Batch,
    pub(super) process: usize,
    /// The machine that it is for.
    pub(super) target: usize,
    pub(super) asked: Vec<Asked>,
    pub(super) deadline: Instant,
    pub(super) notification: Option<String>,
    pub(super) cancelled: bool,
    /// It was seen to be final.
    pub(super) over: bool,
}

/// A request, and what there is to know of it.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub(super) op: Op,
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) len: u64,
    /// What it writes.
    pub(super) number: u64,
    pub(super) kind: Kind,
    /// The process and the buffer that it is for.
    pub(super) place: (usize, usize),
    /// The process and the buffer that its local memory is in, if it is in one.
    pub(super) home: Option<(usize, usize)>,
    pub(super) ending: Ending,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Good,
    /// No bytes.
    Empty,
    /// In no buffer of the peer's.
    Stray,
    /// The local memory is not there.
    Unmapped,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ending {
    Unknown,
    Done,
    /// Failed, and it was said that no byte of it had left.
    Unsent,
    Failed,
}

/// A process that waits longer than this for pins has whoever holds them let go.
const PATIENCE: Duration = Duration::from_millis(500);
/// So much is in no buffer, behind those of each machine.
const STRAY: u64 = 64 << 10;
/// What takes time at all takes so long.
const MOMENT: Duration = Duration::from_micros(1);
/// Where nothing is mapped, and how much of that there is.
const NOWHERE: u64 = 4096;
const NOWHERE_LEN: u64 = 32 << 10;

impl<'a> World<'a> {
    pub(super) fn new(seed: u64, plan: Plan, arena: &'a Arena) -> Self {
        Net::start(seed, Guards::new(arena.range()));
        let faults = CallFaults {
            interrupted: plan.faults.interrupted,
            unconnectable: plan.faults.unconnectable,
        };
        net::with(|net| {
            (net.faults, net.honest) = (faults, plan.faults.corrupt == 0);
            net.least_room = if plan.sizes == Sizes::Big { 1 << 14 } else { 1 };
        });
        let mut world = Self {
            rng: Rng::new(seed ^ 0x5eed),
            arena,
            machines: Vec::new(),
            processes: Vec::new(),
            sent: Vec::new(),
            notified: BTreeMap::new(),
            requests: 0,
            healed: false,
            plan,
        };
        for machine in 0..world.plan.machines {
            let begin = world.arena.share(machine);
            let (next_buffer, next_local) = (begin, begin + SHARE / 2);
            world.machines.push(Machine { process: machine, next_buffer, next_local });
            world.boot(machine, 8000);
        }
        world
    }

    pub(super) fn now(&self) -> Instant {
        net::with(|net| net.now)
    }

    // Machines.

    fn boot(&mut self, machine: usize, data_port: u16) {
        let number = self.processes.len();
        self.machines[machine].process = number;
        self.processes.push(Process::start(&self.plan, machine, number, data_port));
        for _ in 0..self.rng.between(1, 3) {
            self.publish(machine);
        }
        let len = self.buffer_len();
        if self.rng.flip()
            && let Some(range) = self.take_local(machine, len)
        {
            self.processes[number].register(range, true);
        }
    }

    fn buffer_len(&mut self) -> u64 {
        let most = if self.plan.sizes == Sizes::Big { 6 << 20 } else { 128 << 10 };
        self.rng.spread(256, most) as u64 * 2
    }

    /// Registers another buffer for peers.
    fn publish(&mut self, machine: usize) {
        let len = self.buffer_len();
        let place = &mut self.machines[machine];
        let end = self.arena.share(machine) + SHARE / 2;
        let (addr, gap) = (place.next_buffer, self.rng.between(1, 64) as u64);
        if addr + len > end - STRAY {
            return;
        }
        // Nobody could be told of it earlier, not even in a process that has just begun.
        net::with(|net| net.now += MOMENT);
        place.next_buffer = addr + len + gap;
        self.arena.write_readable((addr, len / 2));
        self.arena.fill((addr + len / 2, len / 2), POISON);
        let number = place.process;
        self.processes[number].register((addr, len), false);
        net::with(|net| net.guards.register((addr, len), number));
    }

    fn take_local(&mut self, machine: usize, len: u64) -> Option<(u64, u64)> {
        let place = &mut self.machines[machine];
        let addr = place.next_local;
        let end = self.arena.share(machine) + SHARE;
        // A byte between two ranges belongs to nobody.
        (addr + len < end).then(|| {
            place.next_local = addr + len + 1;
            (addr, len)
        })
    }

    fn kill(&mut self, machine: usize) {
        let number = self.machines[machine].process;
        net::with(|net| {
            net.note(|| format!("machine {machine} loses its process {number}"));
            net.kill(number);
            net.guards.forget(number);
        });
        self.processes[number].vanish();
        for sent in self.sent.iter_mut().filter(|sent| sent.process == number) {
            sent.over = true;
        }
        let data_port = if self.rng.flip() { 8000 } else { 8000 + self.processes.len() as u16 };
        self.boot(machine, data_port);
    }

    fn close_engine(&mut self, machine: usize) {
        let process = &mut self.processes[self.machines[machine].process];
        if process.alive {
            net::with(|net| net.note(|| format!("the engine of machine {machine} is closed")));
            process.alive = false;
            process.core.begin_close();
            process.core.broadcast(|| Command::Stop);
        }
    }

    // Buffers that are taken out of use.

    fn unregister_one(&mut self, machine: usize) {
        let number = self.machines[machine].process;
        let process = &mut self.processes[number];
        let open = |b: &&mut Registered| matches!(b.state, Use::Open);
        let count = process.buffers.iter_mut().filter(open).count();
        if !process.alive || count == 0 {
            return;
        }
        let at = self.rng.below(count);
        let buffer = process.buffers.iter_mut().filter(open).nth(at).expect("counted");
        let closed = process.core.registry.close(&[buffer.addr]).unwrap().remove(0);
        let addr = buffer.addr - self.arena.range().0;
        net::with(|net| net.note(|| format!("the buffer at {addr:#x} is being unregistered")));
        let since = net::with(|net| net.now);
        buffer.state = Use::Leaving { since, buffer: closed, revoked: false };
        if !buffer.local && self.rng.flip() {
            self.publish(machine);
        }
    }

    /// Goes on with what `unregister` waits for, as its callers' threads would.
    fn mind_leaving(&mut self) {
        let now = self.now();
        for (number, process) in self.processes.iter_mut().enumerate().filter(|(_, p)| p.alive) {
            for registered in &mut process.buffers {
                let Use::Leaving { since, buffer, revoked } = &mut registered.state else {
                    continue;
                };
                if buffer.is_quiet() {
                    process.core.registry.remove(buffer);
                    registered.state = Use::Gone;
                    let range = (registered.addr, registered.len);
                    net::with(|net| net.guards.unregister(registered.addr));
                    self.arena.fill(range, CANARY);
                } else if now >= *since + PATIENCE && !std::mem::replace(revoked, true) {
                    let info = buffer.info();
                    process.core.broadcast(|| Command::Revoke(info));
                    net::with(|net| net.note(|| format!("process {number} revokes a buffer")));
                }
            }
        }
    }

    // Requests.

    fn submit_some(&mut self) -> Outcome {
        let from = self.rng.below(self.plan.initiators);
        let others: Vec<usize> = (0..self.plan.machines)
            .filter(|m| *m != from && (*m >= self.plan.initiators || self.plan.initiators > 1))
            .collect();
        let target = *self.rng.pick(&others);
        let (number, most) = (self.machines[from].process, self.plan.timeouts);
        if !self.processes[number].alive {
            return Ok(());
        }
        let count = match self.plan.sizes {
            Sizes::Many => self.rng.spread(1, 1500),
            Sizes::Big => self.rng.between(1, 2),
            Sizes::Small | Sizes::Mixed => self.rng.spread(1, 12),
        };
        let asked: Vec<Asked> = (0..count).filter_map(|_| self.ask(from, target)).collect();
        let (low, high) = (most.0.as_micros() as usize, most.1.as_micros() as usize);
        let timeout = Duration::from_micros(self.rng.spread(low, high) as u64);
        let notify = self.rng.permille(100);
        self.submit(number, target, asked, timeout, notify).map(drop)
    }

    fn ask(&mut self, from: usize, target: usize) -> Option<Asked> {
        let (faults, r) = (self.plan.faults, &mut self.rng);
        let most = match self.plan.sizes {
            Sizes::Small => 300,
            Sizes::Mixed => 60_000,
            Sizes::Big => 5 << 20,
            Sizes::Many => 40,
        };
        let kind = match () {
            () if r.permille(20) => Kind::Empty,
            () if r.permille(faults.stray) => Kind::Stray,
            () if r.permille(faults.unmapped) => Kind::Unmapped,
            () => Kind::Good,
        };
        let op = if r.flip() { Op::Read } else { Op::Write };
        let len = r.spread(1, most) as u64;
        self.ask_for(from, target, (op, len, kind))
    }

    /// A request with memory at both ends, if there is any left.
    pub(super) fn ask_for(
        &mut self,
        from: usize,
        target: usize,
        (op, len, kind): (Op, u64, Kind),
    ) -> Option<Asked> {
        let number = self.machines[target].process;
        let process = &mut self.processes[number];
        let open = |(_, b): &(usize, &mut Registered)| !b.local && matches!(b.state, Use::Open);
        let mut buffers: Vec<_> = process.buffers.iter_mut().enumerate().filter(open).collect();
        if buffers.is_empty() {
            return None;
        }
        let (index, buffer) = buffers.swap_remove(self.rng.below(buffers.len()));
        let half = buffer.len / 2;
        let mut len = len.min(half);
        let remote = match op {
            Op::Read => buffer.addr + self.rng.below((half - len + 1) as usize) as u64,
            Op::Write => {
                len = len.min(buffer.addr + buffer.len - buffer.next);
                buffer.next += len;
                buffer.next - len
            }
        };
        let (mut remote, place) = (remote, (number, index));
        if len == 0 {
            return None;
        }
        if kind == Kind::Stray {
            len = len.min(STRAY);
            // Behind all buffers of its machine, or across the end of one.
            remote = if self.rng.flip() {
                self.arena.share(target) + SHARE / 2 - len
            } else {
                buffer.addr + buffer.len - len / 2
            };
        }
        if kind == Kind::Unmapped {
            len = len.min(NOWHERE_LEN);
        }
        let (mut local, home) = self.local_memory(from, len)?;
        self.requests += 1;
        match op {
            Op::Write => self.arena.write_content((local, len), self.requests),
            Op::Read => self.arena.fill((local, len), POISON),
        }
        if kind == Kind::Unmapped {
            local = NOWHERE;
        }
        let len = if kind == Kind::Empty { 0 } else { len };
        let (number, ending) = (self.requests, Ending::Unknown);
        Some(Asked { op, local, remote, len, number, kind, place, home, ending })
    }

    /// Local memory in a registered buffer, or outside of all.
    fn local_memory(&mut self, machine: usize, len: u64) -> Option<(u64, Option<(usize, usize)>)> {
        let number = self.machines[machine].process;
        let fits = |(_, b): &(usize, &mut Registered)| {
            b.local && matches!(b.state, Use::Open) && b.next + len < b.addr + b.len
        };
        let registered = self.processes[number].buffers.iter_mut().enumerate().find(fits);
        if let Some((index, buffer)) = registered
            && self.rng.flip()
        {
            buffer.next += len + 1;
            return Some((buffer.next - len - 1, Some((number, index))));
        }
        Some((self.take_local(machine, len)?.0, None))
    }

    pub(super) fn submit(
        &mut self,
        number: usize,
        target: usize,
        asked: Vec<Asked>,
        timeout: Duration,
        notify: bool,
    ) -> Outcome<Option<usize>> {
        let buffer = self.arena.buffer();
        let owned = |a: &Asked| OwnedRequest::new(a.op, a.local, a.remote, a.len, buffer.clone());
        let requests: Vec<OwnedRequest> = asked.iter().map(owned).collect();
        let text = notify.then(|| format!("batch {}", self.sent.len()));
        let notification =
            text.clone().map(|message| Notification { name: "sim".to_owned(), message });
        let (timeout, on_full) = (Some(timeout), OnFull::Refuse);
        let options = SubmitOptions { timeout, notification, on_full, stream: None };
        let process = &self.processes[number];
        let segment = process.engine.segment(&name(target)).map_err(|e| e.to_string())?;
        // The submitting thread may send at once.
        let lent = || asked.iter().filter(|a| a.kind != Kind::Unmapped && a.len > 0);
        net::with(|net| lent().for_each(|a| net.guards.lend((a.local, a.len), number, a.op)));
        let caller = ThreadId { process: number, thread: CALLER };
        net::with(|net| net.running = caller);
        let submitted = segment.submit_owned(&requests, options);
        net::with(|net| lent().for_each(|a| net.guards.lent(a.local, submitted.as_ref().ok())));
        let batch = match submitted {
            Ok(batch) => batch,
            Err(Error::Busy { .. }) => return Ok(None),
            Err(error) => return Err(format!("a batch is refused: {error}")),
        };
        let deadline = self.now() + timeout.expect("given above");
        let index = self.sent.len();
        let n = asked.len();
        net::with(|net| net.note(|| format!("process {number} submits batch {index} of {n}")));
        self.sent.push(Sent {
            batch,
            process: number,
            target,
            asked,
            deadline,
            notification: text,
            cancelled: false,
            over: false,
        });
        Ok(Some(index))
    }

    /// A request of each kind for a connection that works.
    pub(super) fn submit_plain(&mut self, from: usize, target: usize) -> Outcome<Option<usize>> {
        let mut asked = Vec::new();
        for op in [Op::Write, Op::Read] {
            asked.extend(self.ask_for(from, target, (op, 100, Kind::Good)));
        }
        if asked.is_empty() {
            return Ok(None);
        }
        let number = self.machines[from].process;
        self.submit(number, target, asked, Duration::from_secs(30), false)
    }

    fn cancel_one(&mut self) {
        let running: Vec<usize> = (0..self.sent.len()).filter(|i| !self.sent[*i].over).collect();
        if running.is_empty() {
            return;
        }
        let index = *self.rng.pick(&running);
        self.cancel(index);
    }

    pub(super) fn cancel(&mut self, index: usize) {
        let sent = &mut self.sent[index];
        net::with(|net| net.note(|| format!("batch {index} is cancelled")));
        sent.cancelled = true;
        // What `cancel` does before it waits.
        sent.batch.inner.request_stop(Stop::Cancelled);
        let process = &self.processes[sent.process];
        if let Some(peer) = process.engine.known().iter().find(|p| **p.name() == *name(sent.target))
        {
            peer.stopped(&sent.batch.inner);
        }
    }

    // Steps.

    /// All that the plan has.
    pub(super) fn run(&mut self) -> Outcome {
        let batches = self.plan.batches;
        let mut submitted = 0;
        for step in 0..self.plan.steps {
            let due = (step + 1) * batches / self.plan.steps;
            if submitted < due.max(1) {
                submitted += 1;
                self.submit_some()?;
            }
            self.go_wrong()?;
            self.step()?;
        }
        Ok(())
    }

    fn go_wrong(&mut self) -> Outcome {
        let f = self.plan.faults;
        let machine = self.rng.below(self.plan.machines);
        if self.rng.permille(f.cancel) {
            self.cancel_one();
        }
        if self.rng.permille(f.unregister) {
            self.unregister_one(machine);
        }
        if self.rng.permille(f.kill) && self.processes.len() < 12 {
            self.kill(machine);
        }
        if self.rng.permille(f.close) && machine < self.plan.initiators {
            self.close_engine(machine);
        }
        if self.rng.permille(f.leap) {
            let leap = Duration::from_millis(self.rng.spread(10, 20_000) as u64);
            self.pass(leap);
        }
        self.hurt_links();
        self.check_wrong()
    }

    fn hurt_links(&mut self) {
        let f = self.plan.faults;
        let v1 = self.plan.version == Version::V1;
        let r = &mut self.rng;
        net::with(|net| {
            if net.conns.is_empty() {
                return;
            }
            // The newest connections are those that are used.
            let newest = net.conns.len().min(8);
            let id = EndId { conn: net.conns.len() - 1 - r.below(newest), side: r.below(2) };
            if net.conns[id.conn].is_over() || net.conns[id.conn].phase != Phase::Established {
                return;
            }
            let is_data = net.conns[id.conn].to.port() != CONTROL_PORT;
            if r.permille(f.reset) {
                net.reset(id, libc::ECONNRESET);
                if r.flip() {
                    net.reset(EndId { side: 1 - id.side, ..id }, libc::ETIMEDOUT);
                }
            }
            // To a v1 initiator an orderly end that its target has not caused is a lie that it cannot see through.
            if r.permille(f.fin) && !(v1 && is_data) {
                net.cut(id, r);
            }
            if r.permille(f.silence) {
                net.silence(id.conn);
            }
            if r.permille(f.stall) {
                let stalled = &mut net.pipe(id).stalled;
                *stalled = !*stalled;
            }
            if r.permille(f.corrupt) && is_data {
                net.corrupt(id, r);
            }
        });
    }

    /// One of the things that can happen now does.
    pub(super) fn step(&mut self) -> Outcome {
        let what = self.rng.below(100);
        match what {
            0..42 => self.run_some()?,
            42..80 => drop(self.deliver_some()),
            80..88 => drop(self.establish_some()),
            88..92 => drop(self.run_job()),
            _ => {
                let least = self.rng.spread(1, 2000) as u64;
                self.pass(Duration::from_micros(least));
            }
        }
        self.settle()
    }

    /// Looks whether all is well, and lets time pass if nothing else can happen.
    fn settle(&mut self) -> Outcome {
        self.mind_leaving();
        if self.runnable().is_empty() {
            self.check_rest()?;
            if !self.can_move() && !self.run_job() {
                self.pass_to_next();
            }
        }
        self.check_wrong()
    }

    /// Everything goes on, as fast as it can, until `done` or until nothing changes any more.
    pub(super) fn drive(&mut self, mut done: impl FnMut(&Self) -> bool) -> Outcome<bool> {
        for _ in 0..MOST_STEPS {
            if done(self) {
                return Ok(true);
            }
            let runnable = self.runnable();
            if !runnable.is_empty() {
                self.run_some()?;
            } else if !self.deliver_some() && !self.establish_some() && !self.run_job() {
                self.mind_leaving();
                if self.runnable().is_empty() {
                    self.check_rest()?;
                    if !self.pass_to_next() {
                        return Ok(done(self));
                    }
                }
            }
            self.mind_leaving();
            self.check_wrong()?;
        }
        Err("the schedule does not come to an end".to_owned())
    }

    pub(super) fn runnable(&self) -> Vec<(usize, usize)> {
        let now = self.now();
        let mut all = Vec::new();
        for (number, process) in self.processes.iter().enumerate() {
            for index in 0..process.threads.len() {
                if process.is_runnable(number, index, now) {
                    all.push((number, index));
                }
            }
        }
        all
    }

    fn run_some(&mut self) -> Outcome {
        let runnable = self.runnable();
        if runnable.is_empty() {
            return Ok(());
        }
        let (number, index) = *self.rng.pick(&runnable);
        self.processes[number].turn(number, index)?;
        self.take_notifications();
        self.look()
    }

    fn take_notifications(&mut self) {
        for process in self.processes.iter().filter(|p| p.alive) {
            for notification in process.core.take_notifications() {
                *self.notified.entry(notification.message).or_default() += 1;
            }
        }
    }

    /// Pipes that something can come out of.
    fn deliverable(&self) -> Vec<EndId> {
        net::with(|net| {
            let mut all = Vec::new();
            for &conn in &net.live {
                let c = &net.conns[conn];
                for side in 0..2 {
                    if c.phase == Phase::Established && c.pipes[side].can_deliver() {
                        all.push(EndId { conn, side });
                    }
                }
            }
            all
        })
    }

    pub(super) fn deliver_some(&mut self) -> bool {
        let all = self.deliverable();
        if all.is_empty() {
            return false;
        }
        let from = *self.rng.pick(&all);
        let most = self.rng.spread(1, self.plan.chunk);
        net::with(|net| net.deliver(from, most))
    }

    fn connecting(&self) -> Vec<usize> {
        net::with(|net| {
            let is_connecting = |c: &&usize| {
                let conn = &net.conns[**c];
                conn.phase == Phase::Connecting && !conn.pipes[0].silent
            };
            net.live.iter().filter(is_connecting).copied().collect()
        })
    }

    fn establish_some(&mut self) -> bool {
        let all = self.connecting();
        if all.is_empty() {
            return false;
        }
        let conn = *self.rng.pick(&all);
        let refused = !self.healed && self.rng.permille(self.plan.faults.refused);
        let how = self.rng.below(3);
        net::with(|net| match how {
            _ if !refused => net.establish(conn),
            0 => net.silence(conn),
            1 => net.fail_connect(conn, libc::ECONNREFUSED),
            _ => net.fail_connect(conn, libc::EHOSTUNREACH),
        });
        true
    }

    fn run_job(&mut self) -> bool {
        let processes = &self.processes;
        let first = self.rng.below(processes.len());
        let run = |core: &Core| {
            core.readers.run_one() || core.names.run_one() || core.strangers.run_one()
        };
        (0..processes.len()).any(|i| run(&processes[(first + i) % processes.len()].core))
    }

    fn can_move(&self) -> bool {
        !self.deliverable().is_empty() || !self.connecting().is_empty()
    }

    fn pass(&mut self, time: Duration) {
        net::with(|net| net.now += time);
    }

    /// To the next moment at which somebody wakes up; false if nobody ever does.
    fn pass_to_next(&mut self) -> bool {
        let now = self.now();
        let alive = self.processes.iter().filter(|p| !p.has_ended());
        let leaving = self.processes.iter().filter(|p| p.alive).flat_map(|p| &p.buffers);
        let leaving = leaving.filter_map(|b| match &b.state {
            Use::Leaving { since, revoked: false, .. } => Some(*since + PATIENCE),
            _ => None,
        });
        let next = alive.flat_map(Process::wakes).chain(leaving).min();
        let Some(next) = next else { return false };
        self.pass(next.saturating_duration_since(now));
        true
    }

    /// Nothing goes wrong from now on, but that what is silent stays so.
    pub(super) fn heal(&mut self) {
        self.healed = true;
        self.plan.chunk = MOST_ROOM;
        net::with(|net| {
            net.note(|| "all links are well from now on".to_owned());
            net.faults = CallFaults::default();
            net.least_room = MOST_ROOM;
            net.conns.iter_mut().flat_map(|conn| &mut conn.pipes).for_each(Pipe::heal);
        });
    }

    /// The engines that are left are closed, and nothing is left of them.
    pub(super) fn close_all(&mut self) -> Outcome {
        for machine in 0..self.machines.len() {
            self.close_engine(machine);
        }
        self.drive(|world| world.processes.iter().all(Process::has_ended)).map(drop)
    }

    pub(super) fn is_running(sent: &Sent) -> bool {
        !sent.over && sent.batch.poll() == BatchState::Running
    }

    pub(super) fn is_buffer_open(&self, (process, buffer): (usize, usize)) -> bool {
        matches!(self.processes[process].buffers[buffer].state, Use::Open)
    }

    pub(super) fn check_wrong(&self) -> Outcome {
        net::with(|net| net.wrong.take()).map_or(Ok(()), Err)
    }
}

/// No schedule takes so many.
const MOST_STEPS: usize = 400_000;
