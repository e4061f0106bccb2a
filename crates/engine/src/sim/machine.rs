//! Processes: engines whose IO threads the schedule runs.

use std::sync::Arc;
use std::time::Instant;

use tensorferry_gpu as gpu;

use crate::config::Config;
use crate::core::{Addresses, Core};
use crate::engine::Engine;
use crate::io::{Reactor, prepare};
use crate::registry::{Access, Buffer, BufferInfo, Range};
use crate::sim::net::{self, CONTROL_PORT, ThreadId};
use crate::sim::plan::Plan;
use crate::sim::socket::Listener;

/// One engine, as long as it lives; a machine that is started again has another.
pub(super) struct Process {
    pub(super) machine: usize,
    pub(super) engine: Engine,
    pub(super) core: Arc<Core>,
    pub(super) threads: Vec<Thread>,
    /// It was neither killed nor closed.
    pub(super) alive: bool,
    pub(super) killed: bool,
    pub(super) buffers: Vec<Registered>,
}

/// An IO thread between two of its turns.
pub(super) struct Thread {
    pub(super) reactor: Option<Reactor>,
    /// When its poll ends at the latest.
    wake: Option<Instant>,
    /// Turns in which nothing moved anywhere, nor had since the one before, and what had moved by then.
    idle: u32,
    moved: u64,
    /// When the last turn was.
    ran: Option<Instant>,
}

/// A buffer, and what has become of it.
pub(super) struct Registered {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) local: bool,
    /// Where the next WRITE goes; behind it nobody has been told to write. The first half is for READs.
    pub(super) next: u64,
    pub(super) state: Use,
}

pub(super) enum Use {
    Open,
    /// `unregister` waits.
    Leaving {
        since: Instant,
        buffer: Arc<Buffer>,
        revoked: bool,
    },
    Gone,
}

/// A thread that has had so many turns without effect is in a loop.
const MOST_IDLE: u32 = 40;

pub(super) fn address(machine: usize) -> [u8; 4] {
    [10, 0, 0, machine as u8 + 1]
}

pub(super) fn name(machine: usize) -> String {
    let [a, b, c, d] = address(machine);
    format!("{a}.{b}.{c}.{d}:{CONTROL_PORT}")
}

impl Process {
    pub(super) fn start(plan: &Plan, machine: usize, process: usize, data_port: u16) -> Self {
        let config = Config {
            io_threads: plan.threads,
            lanes_per_peer: plan.lanes,
            newest_version: plan.version,
            queue_bytes: plan.queue_bytes,
            progress_timeout: plan.progress_timeout,
            lane_idle_probe: plan.probe,
            gpu: gpu::Settings::default().with_choice(gpu::Choice::Off),
            ..Config::default()
        };
        let parts = (0..plan.threads).map(|_| prepare().unwrap());
        let (polls, mailboxes): (Vec<_>, Vec<_>) = parts.unzip();
        let [a, b, c, d] = address(machine);
        let addresses = Addresses {
            name: name(machine),
            data_host: format!("{a}.{b}.{c}.{d}"),
            control_port: CONTROL_PORT,
            data_port,
        };
        let core = Arc::new(Core::new(config, addresses, mailboxes).unwrap());
        let listen = |port| {
            let owner = ThreadId { process, thread: 0 };
            let addr = (address(machine), port).into();
            Listener::Simulated(net::with(|net| net.listen(addr, owner)))
        };
        let mut listeners = Some((listen(CONTROL_PORT), listen(data_port)));
        let start = |(thread, poll)| {
            net::with(|net| net.running = ThreadId { process, thread });
            let reactor = Reactor::new(Arc::clone(&core), thread, poll, listeners.take()).unwrap();
            Thread { reactor: Some(reactor), wake: None, idle: 0, moved: 0, ran: None }
        };
        let threads = polls.into_iter().enumerate().map(start).collect();
        let engine = Engine::simulated(Arc::clone(&core)).unwrap();
        let buffers = Vec::new();
        Self { machine, engine, core, threads, alive: true, killed: false, buffers }
    }

    pub(super) fn register(&mut self, (addr, len): (u64, u64), local: bool) {
        let access = if local { Access::Local } else { Access::ReadWrite };
        let range = Range::host(BufferInfo { addr, len }, access);
        self.core.registry.register(vec![range], Default::default(), None).unwrap();
        let next = if local { addr } else { addr + len / 2 };
        self.buffers.push(Registered { addr, len, local, next, state: Use::Open });
    }

    /// Whether thread `index` has something to do now.
    pub(super) fn is_runnable(&self, process: usize, index: usize, now: Instant) -> bool {
        let thread = &self.threads[index];
        thread.reactor.is_some()
            && (self.core.mailboxes[index].is_awake()
                || thread.wake.is_some_and(|at| at <= now)
                || net::with(|net| net.has_news(ThreadId { process, thread: index })))
    }

    /// When thread `index` wakes up by itself.
    pub(super) fn wakes(&self) -> impl Iterator<Item = Instant> {
        self.threads.iter().filter(|t| t.reactor.is_some()).filter_map(|t| t.wake)
    }

    /// How many connections of thread `index` are in the middle of a payload.
    pub(super) fn flowing(&self, index: usize) -> Option<usize> {
        self.threads[index].reactor.as_ref()?.flowing()
    }

    /// Whether thread `index` waits for more of a payload.
    pub(super) fn awaits_payload(&self, index: usize) -> bool {
        self.threads[index].reactor.as_ref().is_some_and(Reactor::awaits_payload)
    }

    /// Thread `index` does what it does between two polls; `Err`: it does the same for ever.
    pub(super) fn turn(&mut self, process: usize, index: usize) -> Result<(), String> {
        let thread = &mut self.threads[index];
        let Some(reactor) = &mut thread.reactor else { return Ok(()) };
        let id = ThreadId { process, thread: index };
        let (events, now) = net::with(|net| {
            net.running = id;
            (net.poll(id), net.now)
        });
        let passed = thread.ran.replace(now) != Some(now);
        let told = !events.is_empty();
        net::with(|net| net.note(|| format!("{id:?} runs with {} events", events.len())));
        reactor.turn(events);
        if reactor.flowing().is_none() {
            return Err(format!("{id:?} counts wrong what is in the middle of a payload"));
        }
        if reactor.is_stopping() {
            reactor.fail_everything();
            thread.reactor = None;
            return Ok(());
        }
        thread.wake = reactor.timeout().map(|left| now + left);
        let before = std::mem::replace(&mut thread.moved, net::with(|net| net.moved));
        let effect = told || passed || thread.moved != before;
        thread.idle = if effect { 0 } else { thread.idle + 1 };
        if thread.idle > MOST_IDLE {
            return Err(format!("{id:?} had {} turns without any effect", thread.idle));
        }
        Ok(())
    }

    /// Whether none of its threads is left.
    pub(super) fn has_ended(&self) -> bool {
        self.threads.iter().all(|thread| thread.reactor.is_none())
    }

    /// Lanes to peer `number` that its threads have.
    pub(super) fn lanes_to(&self, number: usize) -> usize {
        self.threads.iter().filter_map(|t| t.reactor.as_ref()).map(|r| r.lanes_to(number)).sum()
    }

    /// Ends its threads without a word to anybody, as a kill does.
    pub(super) fn vanish(&mut self) {
        (self.alive, self.killed) = (false, true);
        self.core.begin_close();
        for thread in &mut self.threads {
            // Settles what refers to the rest, so that nothing is leaked; its sockets are closed already.
            if let Some(mut reactor) = thread.reactor.take() {
                reactor.fail_everything();
            }
        }
    }
}
