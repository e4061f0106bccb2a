//! An IO thread: its poller, its connections, and what it is told from outside.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Poll, Token};

use crate::clock;
use crate::control::{Failure, Question};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::Listener;
use crate::io::accept::{FIRST_CONN, Listening, Role};
use crate::io::ask::Asked;
use crate::io::conns::{Conn, Event, Fate, Kind, Place, split};
use crate::io::lane::{LaneReport, Stuck};
use crate::io::mailbox::{Command, Mailbox, WAKER};
use crate::io::wait::Waits;
use crate::local::Local;
use crate::log::Kind as Line;
use crate::memory::Span;
use crate::peer::Peer;
use crate::transfer::{Slice, Stop};

/// The thread, as its engine sees it.
pub(crate) struct IoThread {
    join: JoinHandle<()>,
}

/// What the thread works with; moved there, never shared.
pub(crate) struct Reactor {
    pub(super) core: Arc<Core>,
    pub(super) index: usize,
    pub(super) poll: Poll,
    pub(super) conns: Vec<Place>,
    pub(super) free: Vec<usize>,
    pub(super) listeners: Vec<Listening>,
    pub(super) next_thread: usize,
    /// Connections that have something to do now.
    pub(super) ready: VecDeque<Token>,
    pub(super) timers: BinaryHeap<Reverse<(Instant, Token)>>,
    next_sweep: Option<Instant>,
    /// When lanes are looked at, and connections from peers.
    pub(super) next_look: Option<Instant>,
    pub(super) next_serve_look: Option<Instant>,
    /// Copies within the process, once there were some that took long.
    local: Option<Arc<Local>>,
    /// Questions to control ports that are not answered.
    pub(super) questions: Vec<Asked>,
    /// Those that wait until there are fewer connections, and how many there are.
    pub(super) to_call: VecDeque<(Arc<Question>, Vec<SocketAddr>)>,
    pub(super) asking: usize,
    pub(super) over: Vec<(Arc<Question>, Failure)>,
    /// Bytes of answers that have arrived in part.
    pub(super) answer_bytes: usize,
    /// Bytes of requests that have arrived in part on control connections.
    pub(super) control_bytes: usize,
    /// Answers of all connections that wait to be sent; with the most of them, only who takes his own is read from.
    pub(super) answers: usize,
    pub(super) most_answers: usize,
    /// Bytes of WRITEs that have arrived and wait for staging slots.
    pub(super) stashed: usize,
    /// Peers whose queue is looked after here.
    peers: BTreeMap<usize, Arc<Peer>>,
    /// Lanes of each peer that live here.
    pub(super) lanes: BTreeMap<usize, Vec<Token>>,
    pub(super) now: Instant,
    pub(super) scratch: Scratch,
    pub(super) waits: Waits,
    stopping: bool,
}

/// Buffers that every connection of the thread uses in turn.
pub(crate) struct Scratch {
    pub(super) spans: Vec<Span>,
    pub(super) slices: Vec<Slice>,
    pub(super) requeue: Vec<Slice>,
    pub(super) receive: Box<[u8]>,
}

/// How much of what peers send is received at once, when it is not received in place.
const RECEIVE: usize = 256 << 10;

/// How long somebody waits for a staging slot before those are given back that wait for a socket.
pub(super) const STARVED: Duration = Duration::from_millis(50);
/// How many answers of an engine may wait to be sent: some 64 MiB of them.
const MAX_ANSWERS: usize = 1 << 20;
impl IoThread {
    /// Starts thread `index` of the engine; `listeners` are the control and the data listener, for one of
    /// the threads.
    pub(crate) fn start(
        core: &Arc<Core>,
        index: usize,
        poll: Poll,
        listeners: Option<(Listener, Listener)>,
    ) -> Result<Self> {
        let reactor = Reactor::new(Arc::clone(core), index, poll, listeners)?;
        let thread = std::thread::Builder::new().name(format!("ferry-io-{index}"));
        let join = thread
            .spawn(move || reactor.run())
            .map_err(|e| Error::io("starting an IO thread", e))?;
        Ok(Self { join })
    }

    /// Waits for the end of a thread that was told to stop. Not of the caller's own: a waker may have the last handle.
    pub(crate) fn join(self) {
        if self.join.thread().id() != std::thread::current().id() {
            let _ = self.join.join();
        }
    }
}

impl Reactor {
    pub(crate) fn new(
        core: Arc<Core>,
        index: usize,
        poll: Poll,
        listeners: Option<(Listener, Listener)>,
    ) -> Result<Self> {
        let most_answers = MAX_ANSWERS / core.mailboxes.len();
        let waits = Waits::new(core.config.spin);
        let mut reactor = Self {
            core,
            index,
            poll,
            conns: Vec::new(),
            free: Vec::new(),
            listeners: Vec::new(),
            next_thread: 0,
            ready: VecDeque::new(),
            timers: BinaryHeap::new(),
            next_sweep: None,
            next_look: None,
            next_serve_look: None,
            local: None,
            questions: Vec::new(),
            to_call: VecDeque::new(),
            asking: 0,
            over: Vec::new(),
            answer_bytes: 0,
            control_bytes: 0,
            answers: 0,
            most_answers,
            stashed: 0,
            peers: BTreeMap::new(),
            lanes: BTreeMap::new(),
            now: clock::now(),
            scratch: Scratch {
                spans: Vec::with_capacity(crate::tcp::MAX_CALL_SPANS),
                slices: Vec::new(),
                requeue: Vec::new(),
                receive: vec![0; RECEIVE].into_boxed_slice(),
            },
            waits,
            stopping: false,
        };
        if let Some((control, data)) = listeners {
            reactor.listen(control, Role::Control)?;
            reactor.listen(data, Role::Data)?;
        }
        Ok(reactor)
    }

    fn run(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            tracing::error!("an IO thread panicked, which is a bug; the engine is closed");
            self.core.begin_close();
        }
        self.fail_everything();
    }

    fn work(&mut self) {
        let mut events = Events::with_capacity(256);
        while !self.stopping {
            match self.wait(&mut events) {
                Ok(()) => {}
                // A process that was stopped and goes on comes by here: sockets first, then deadlines.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::error!("epoll_wait failed: {e}; the engine is closed");
                    self.core.begin_close();
                    return;
                }
            }
            self.turn(events.iter().map(Event::from));
        }
    }

    /// What the thread does between two polls.
    pub(crate) fn turn(&mut self, events: impl IntoIterator<Item = Event>) {
        self.mailbox().awake.store(true, Ordering::SeqCst);
        self.now = clock::now();
        for event in events {
            self.note(event);
        }
        self.obey();
        self.drive_ready();
        // Readable sockets were served before deadlines are looked at: a process that was stopped does
        // not fail what had arrived.
        self.ring();
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.core.mailboxes[self.index]
    }

    /// How long the next poll may last at most.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        if !self.ready.is_empty() || !self.mailbox().sleep() {
            return Some(Duration::ZERO);
        }
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        let looks = self.next_look.into_iter().chain(self.next_serve_look);
        let next = timer.into_iter().chain(self.next_sweep).chain(looks).min()?;
        // Rounded up: a poll that ends a moment early would only go round once more.
        Some(next.saturating_duration_since(clock::now()) + Duration::from_micros(500))
    }

    fn note(&mut self, event: Event) {
        let token = event.token;
        if token == WAKER {
            return;
        }
        if token.0 < FIRST_CONN {
            self.accept(token);
            return;
        }
        let closed = event.error || event.read_closed && event.write_closed;
        if let Some(conn) = self.conn(token) {
            conn.readable |= event.readable || event.read_closed || closed;
            conn.read_closed |= event.read_closed || closed;
            conn.writable |= event.writable || closed;
            conn.gone |= closed;
            self.make_ready(token);
        }
    }

    fn obey(&mut self) {
        for command in self.mailbox().take() {
            match command {
                Command::Kick(peer) => {
                    peer.answer_kick();
                    self.peers.entry(peer.number).or_insert_with(|| Arc::clone(&peer));
                    self.look_at(&peer);
                }
                Command::Report(to) => {
                    // Whoever asked may have given up waiting.
                    let _ = to.try_send(self.report());
                }
                Command::Help(peer) => {
                    peer.answer_tell(self.index);
                    let _ = self.drive_lanes(&peer);
                }
                Command::Dial(peer) => self.dial(&peer),
                Command::Ask(question) => self.ask(question),
                Command::Found(question, found) => self.found(question, found),
                Command::Fetch(peer) => self.ask(peer.question()),
                Command::Serve(socket) => self.serve(socket),
                Command::Sweep => self.sweep(),
                Command::Revoke(buffer) => self.revoke(buffer.addr),
                Command::Ring(token) => {
                    if let Some(conn) = self.conn(token) {
                        conn.bell.heard();
                        self.drive(token);
                    }
                }
                Command::Relinquish => self.relinquish(),
                Command::Spare => self.spare(),
                Command::Watch(local) => {
                    let next = local.sweep(self.now);
                    next.into_iter().for_each(|at| self.sweep_by(at));
                    self.local = Some(local);
                }
                Command::Stop => self.stopping = true,
            }
        }
    }

    /// Gives a peer's queue to its lanes here, and makes another lane if they cannot take it all.
    pub(super) fn look_at(&mut self, peer: &Arc<Peer>) {
        let any = self.drive_lanes(peer);
        if let Some(at) = peer.next_deadline() {
            self.sweep_by(at);
        }
        self.spread(peer);
        // What is left may be taken by lanes of other threads, which have nothing that would wake them.
        if self.core.mailboxes.len() > 1 && peer.wants_hands() {
            for (index, mailbox) in self.core.mailboxes.iter().enumerate() {
                if index != self.index && peer.tell(index) {
                    mailbox.post(Command::Help(Arc::clone(peer)));
                }
            }
        }
        if !any && peer.is_at_rest() {
            // Whatever comes for it kicks again.
            self.peers.remove(&peer.number);
        }
    }

    /// Lets the lanes of a peer do what they can; whether there are any.
    fn drive_lanes(&mut self, peer: &Arc<Peer>) -> bool {
        let lanes = self.lanes.get(&peer.number).cloned().unwrap_or_default();
        for token in &lanes {
            self.drive(*token);
        }
        !lanes.is_empty()
    }

    /// How the lanes of this thread are.
    fn report(&mut self) -> Vec<LaneReport> {
        self.claim_all();
        let lane = |conn: &Conn| match &conn.kind {
            Kind::Lane(lane) => Some(lane.report(self.index)),
            _ => None,
        };
        self.each().filter_map(lane).collect()
    }

    /// Makes another lane if what is queued needs one.
    pub(super) fn spread(&mut self, peer: &Arc<Peer>) {
        while let Some((route, number)) = peer.wants_lane() {
            let thread = (peer.home + number) % self.core.mailboxes.len();
            if thread == self.index {
                self.connect(Arc::clone(peer), route, 0);
            } else {
                self.core.mailboxes[thread].post(Command::Dial(Arc::clone(peer)));
            }
        }
        if let Some(at) = peer.next_dial() {
            self.sweep_by(at);
        }
    }

    fn dial(&mut self, peer: &Arc<Peer>) {
        match peer.route() {
            Some(route) => self.connect(Arc::clone(peer), route, 0),
            None => peer.lane_given_up(),
        }
    }

    fn drive_ready(&mut self) {
        // Only those that are ready now: what they make ready comes after the next poll.
        for _ in 0..self.ready.len() {
            let Some(token) = self.ready.pop_front() else { return };
            if let Some(conn) = self.conn(token) {
                conn.queued = false;
                self.drive(token);
            }
        }
    }

    /// Lets a connection do what it can.
    pub(super) fn drive(&mut self, token: Token) {
        let Some(mut conn) = self.take(token) else { return };
        let fate = match &mut conn.kind {
            Kind::Lane(_) => self.drive_lane(&mut conn),
            Kind::Serve(_) => self.drive_serve(&mut conn),
            Kind::Control(_) => self.drive_control(&mut conn),
            Kind::Ask(_) => self.drive_ask(&mut conn),
        };
        self.waits.note(&mut conn, self.now);
        match fate {
            Fate::Close => self.close(conn),
            Fate::Wait => self.put_back(conn),
            Fate::Again => {
                self.put_back(conn);
                self.make_ready(token);
            }
        }
    }

    pub(super) fn close(&mut self, mut conn: Box<Conn>) {
        self.claim(&mut conn);
        self.waits.forget(&mut conn);
        let (index, _) = split(conn.token);
        let _ = self.poll.registry().deregister(&mut SourceFd(&conn.socket.as_raw_fd()));
        self.conns[index].generation = self.conns[index].generation.wrapping_add(1);
        self.free.push(index);
        self.core.descriptors.forget(conn.socket.as_raw_fd());
        match conn.kind {
            Kind::Lane(lane) => self.lane_gone(conn.token, lane),
            Kind::Control(control) => self.control_bytes -= control.kept(),
            Kind::Ask(ask) => self.ask_gone(&ask),
            Kind::Serve(mut serve) => {
                self.stashed -= serve.stashed();
                self.answers -= serve.answers();
                self.core.serving.fetch_sub(1, Ordering::Relaxed);
                serve.end(&conn.socket);
            }
        }
    }

    /// Does what is due.
    fn ring(&mut self) {
        while let Some(&Reverse((at, token))) = self.timers.peek() {
            if at > self.now {
                break;
            }
            self.timers.pop();
            if token.0 < FIRST_CONN {
                self.accept_again(token);
            } else if self.conn(token).is_some_and(|c| c.is_due(at)) {
                self.drive(token);
            }
        }
        if self.next_sweep.is_some_and(|at| at <= self.now) {
            self.sweep();
        }
        if self.next_look.is_some_and(|at| at <= self.now) {
            self.look_at_lanes();
        }
        if self.next_serve_look.is_some_and(|at| at <= self.now) {
            self.look_at_serving();
        }
    }

    pub(super) fn sweep_by(&mut self, at: Instant) {
        self.next_sweep = Some(self.next_sweep.map_or(at, |next| next.min(at)));
    }

    /// Settles what is past its deadline or was told to stop, in queues and on lanes.
    fn sweep(&mut self) {
        self.next_sweep = None;
        if let Some(at) = self.local.as_ref().and_then(|local| local.sweep(self.now)) {
            self.sweep_by(at);
        }
        if let Some(at) = self.sweep_questions() {
            self.sweep_by(at);
        }
        if let Some(at) = self.core.devices.sweep(self.now) {
            self.sweep_by(at);
        }
        if let Some(since) = self.core.devices.starving_since() {
            // A slot may have come back since this sweep was thought of, and have gone to somebody else.
            let due = since + STARVED <= self.now;
            if due {
                self.core.broadcast(|| Command::Relinquish);
            }
            self.sweep_by(if due { self.now } else { since } + STARVED);
        }
        let peers: Vec<_> = self.peers.values().cloned().collect();
        for peer in &peers {
            if let Some(at) = peer.sweep(self.now) {
                self.sweep_by(at);
            }
        }
        for token in self.lane_tokens() {
            let Some(mut conn) = self.take(token) else { continue };
            self.claim(&mut conn);
            let Kind::Lane(lane) = &mut conn.kind else { unreachable!("listed as a lane") };
            let next = lane.sweep(self.now, &mut self.scratch.requeue);
            let peer = Arc::clone(lane.peer());
            let limit = self.core.config.progress_timeout;
            let stuck = limit.map_or(Ok(None), |limit| lane.is_stuck(self.now, limit));
            peer.requeue(&mut self.scratch.requeue);
            match stuck {
                Err(Stuck) => self.close(conn),
                Ok(look_again) => {
                    self.put_back(conn);
                    self.make_ready(token);
                    next.into_iter().chain(look_again).for_each(|at| self.sweep_by(at));
                }
            }
        }
        for peer in &peers {
            self.spread(peer);
            if peer.is_at_rest() {
                // Lanes are looked through for themselves; whatever comes for its queue kicks again.
                self.peers.remove(&peer.number);
            }
        }
    }

    pub(super) fn lane_tokens(&self) -> Vec<Token> {
        self.lanes.values().flatten().copied().collect()
    }

    /// Lets go of a buffer that its owner wants back, whatever that costs.
    fn revoke(&mut self, addr: u64) {
        let users: Vec<Token> = self
            .each()
            .filter(|c| matches!(&c.kind, Kind::Serve(serve) if serve.uses(addr)))
            .map(|c| c.token)
            .collect();
        for token in users {
            if let Some(conn) = self.take(token) {
                let text = || {
                    let from = conn.socket.peer_text();
                    format!(
                        "{addr:#x} is unregistered while {from} moves it: its connection is closed"
                    )
                };
                self.core.log.warn(Line::Revoked, &conn.socket.peer_host(), text);
                conn.socket.reset_on_close();
                self.close(conn);
            }
        }
        for peer in self.peers.values() {
            peer.revoke(addr);
        }
        self.claim_all();
        for conn in self.each() {
            if let Kind::Lane(lane) = &conn.kind {
                lane.revoke(addr);
            }
        }
        self.sweep();
    }

    /// Gives back staging slots that wait for a socket: one that takes nothing, or brings nothing.
    fn relinquish(&mut self) {
        for conn in self.conns.iter_mut().filter_map(|place| place.conn.as_deref_mut()) {
            let (readable, writable, bell) = (conn.readable, conn.writable, Arc::clone(&conn.bell));
            match &mut conn.kind {
                Kind::Lane(lane) => lane.relinquish(!readable, !writable, &bell),
                Kind::Serve(serve) => serve.relinquish(!readable, !writable, &bell),
                Kind::Control(_) | Kind::Ask(_) => {}
            }
        }
    }

    /// Whether the thread was told to end.
    #[cfg(test)]
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// How many lanes to peer `number` live here.
    #[cfg(test)]
    pub(crate) fn lanes_to(&self, number: usize) -> usize {
        self.lanes.get(&number).map_or(0, Vec::len)
    }

    /// How many of them could take any request now.
    #[cfg(test)]
    pub(crate) fn free_lanes_to(&self, number: usize) -> usize {
        let is_free = |conn: &&Conn| match &conn.kind {
            Kind::Lane(lane) => lane.peer().number == number && lane.is_free(),
            _ => false,
        };
        self.each().filter(is_free).count()
    }

    /// Whether a lane should have been closed for not moving.
    #[cfg(test)]
    pub(crate) fn has_stuck_lane(&self, since: Instant) -> bool {
        self.each().any(|conn| matches!(&conn.kind, Kind::Lane(lane) if lane.is_stuck_since(since)))
    }

    /// The end: nothing that this thread held is touched after it.
    pub(crate) fn fail_everything(&mut self) {
        for peer in self.peers.values() {
            peer.stop_all(Stop::Closed);
        }
        // The pool may hold one as well, for as long as a resolver takes.
        for asked in std::mem::take(&mut self.questions) {
            asked.close();
        }
        self.now = clock::now();
        self.claim_all();
        for place in &mut self.conns {
            let Some(mut conn) = place.conn.take() else { continue };
            match &mut conn.kind {
                Kind::Lane(lane) => lane.stop_all(self.now),
                Kind::Serve(serve) => serve.end(&conn.socket),
                Kind::Control(_) | Kind::Ask(_) => {}
            }
        }
        for command in self.mailbox().shut() {
            if let Command::Kick(peer) = command {
                peer.stop_all(Stop::Closed);
            }
        }
    }
}
