//! The simulated kernel: a clock, listeners, and connections with bounded buffers, in which nothing moves unless the
//! schedule says so.
//!
//! It keeps to what a kernel promises: a call takes or brings as much as there is room or bytes for, events are
//! edges, an end that is closed with unread bytes resets the other, a byte that was taken into the buffer of the
//! other end is acknowledged. All else is the schedule's to decide.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use mio::Token;

use crate::io::{Event, Pulse};
use crate::memory::{Span, copy_from, copy_to};
use crate::sim::guard::Guards;
use crate::sim::rng::Rng;
use crate::sim::tap::{Asked, Tap};
use crate::sim::trace::Trace;

mod schedule;

thread_local! {
    static NET: RefCell<Option<Net>> = const { RefCell::new(None) };
}

/// The kernel of all machines of one schedule.
pub(super) struct Net {
    pub(super) now: Instant,
    /// When the schedule began.
    pub(super) begin: Instant,
    pub(super) rng: Rng,
    pub(super) conns: Vec<Conn>,
    /// Those of them at whose ends something can still happen.
    pub(super) live: Vec<usize>,
    listeners: Vec<Listening>,
    /// The thread that is running.
    pub(super) running: ThreadId,
    pub(super) guards: Guards,
    pub(super) trace: Trace,
    /// Counts what was moved by calls, so that a thread that only spins shows itself.
    pub(super) moved: u64,
    pub(super) faults: CallFaults,
    /// The smallest buffers that new connections have.
    pub(super) least_room: usize,
    /// No byte is changed on its way.
    pub(super) honest: bool,
    /// Where the WRITE of a remote range was sent last, and as which of its connection's requests.
    written: BTreeMap<(u64, u64), (usize, usize)>,
    /// The first thing that must not have happened.
    pub(super) wrong: Option<String>,
}

/// What goes wrong with system calls, in 1000 of them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallFaults {
    pub(super) interrupted: u32,
    pub(super) unconnectable: u32,
}

/// A thread of a process.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct ThreadId {
    pub(super) process: usize,
    pub(super) thread: usize,
}

/// The thread that submits.
pub(super) const CALLER: usize = usize::MAX;

/// One end of a connection: 0 is the one that connected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct EndId {
    pub(super) conn: usize,
    pub(super) side: usize,
}

pub(super) struct Conn {
    pub(super) to: SocketAddr,
    pub(super) phase: Phase,
    pub(super) ends: [End; 2],
    /// `pipes[side]` leads away from that side.
    pub(super) pipes: [Pipe; 2],
    pub(super) tap: Tap,
    silent_since: Option<Instant>,
    /// When its initiator has sent something last.
    asked_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Phase {
    Connecting,
    /// The other end waits to be accepted.
    Established,
    Failed,
}

#[derive(Default)]
pub(super) struct End {
    pub(super) owner: ThreadId,
    token: Option<Token>,
    /// Something has happened since the thread was told last.
    edge: bool,
    pub(super) open: bool,
    accepted: bool,
    linger_off: bool,
    shut: bool,
    error: Option<i32>,
    /// The connection is no more, as far as this end knows.
    pub(super) reset: bool,
}

pub(super) struct Pipe {
    /// Taken from the sender and not acknowledged.
    pub(super) sent: VecDeque<u8>,
    room_sent: usize,
    pub(super) arrived: VecDeque<u8>,
    room_arrived: usize,
    pub(super) end: StreamEnd,
    /// Bytes that came to an end that is closed: nobody acknowledges them.
    lost: usize,
    /// Bytes that have arrived so far.
    moved: u64,
    /// The sender was told that there is no room.
    full: bool,
    /// Nothing moves for now.
    pub(super) stalled: bool,
    /// Nothing moves any more, and nobody is told.
    pub(super) silent: bool,
    /// Something between the two ends hangs up after so many more bytes, and takes the others in for nobody.
    cut: Option<usize>,
}

/// The end of the bytes of a pipe.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum StreamEnd {
    Open,
    Fin,
    Reset,
    FinArrived,
}

struct Listening {
    addr: SocketAddr,
    owner: ThreadId,
    token: Option<Token>,
    edge: bool,
    open: bool,
    waiting: VecDeque<usize>,
}

/// Ends and listeners as descriptors: numbers that no kernel gives out.
pub(super) fn end_fd(id: EndId) -> RawFd {
    -(2 + (id.conn * 2 + id.side) as RawFd)
}

pub(super) fn listener_fd(index: usize) -> RawFd {
    -(FIRST_LISTENER + index as RawFd)
}

/// How often a kernel asks another for a sign of life.
const SIGN: Duration = Duration::from_millis(250);
/// The control port of every machine.
pub(super) const CONTROL_PORT: u16 = 7000;
/// The largest buffers that connections have.
pub(super) const MOST_ROOM: usize = 1 << 20;
const FIRST_LISTENER: RawFd = 1 << 24;

/// The simulated time of this thread, if it runs a simulation.
pub(crate) fn now() -> Option<Instant> {
    NET.try_with(|net| net.borrow().as_ref().map(|net| net.now)).ok().flatten()
}

/// A number that the seed decides, in place of one that is different each time.
pub(crate) fn random() -> Option<u64> {
    with_any(|net| net.rng.next())
}

/// Notes by which token a simulated socket is known; false if the descriptor is the kernel's.
pub(crate) fn watch(fd: RawFd, token: Token) -> bool {
    if fd >= 0 {
        return false;
    }
    with(|net| {
        if -fd >= FIRST_LISTENER {
            let listening = &mut net.listeners[(-fd - FIRST_LISTENER) as usize];
            listening.token = Some(token);
            listening.edge = !listening.waiting.is_empty();
            return;
        }
        let (at, running) = ((-fd - 2) as usize, net.running);
        let id = EndId { conn: at / 2, side: at % 2 };
        let end = net.end(id);
        (end.token, end.owner, end.edge) = (Some(token), running, true);
    });
    true
}

/// Works with the simulation of this thread.
pub(super) fn with<T>(work: impl FnOnce(&mut Net) -> T) -> T {
    with_any(work).expect("a simulated socket is used where no simulation runs")
}

/// The same, if there is one.
pub(super) fn with_any<T>(work: impl FnOnce(&mut Net) -> T) -> Option<T> {
    NET.try_with(|net| net.borrow_mut().as_mut().map(work)).ok().flatten()
}

impl Net {
    /// Begins a simulation on this thread.
    pub(super) fn start(seed: u64, guards: Guards) {
        // Far from the true time, so that whoever mixes the two is found out.
        let begin = Instant::now() + Duration::from_secs(1000 * 86_400);
        let net = Self {
            now: begin,
            begin,
            rng: Rng::new(seed ^ 0x6e65_7400),
            conns: Vec::new(),
            live: Vec::new(),
            listeners: Vec::new(),
            running: ThreadId::default(),
            guards,
            trace: Trace::new(),
            moved: 0,
            faults: CallFaults::default(),
            least_room: 1,
            honest: true,
            written: BTreeMap::new(),
            wrong: None,
        };
        NET.with(|place| *place.borrow_mut() = Some(net));
    }

    /// Ends the simulation of this thread.
    pub(super) fn finish() -> Option<Self> {
        NET.with(|place| place.borrow_mut().take())
    }

    #[inline]
    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        let at = self.now - self.begin;
        self.trace.note(at, text);
    }

    fn blame(&mut self, text: String) {
        self.wrong.get_or_insert(text);
    }

    fn end_ref(&self, id: EndId) -> &End {
        &self.conns[id.conn].ends[id.side]
    }

    fn end(&mut self, id: EndId) -> &mut End {
        &mut self.conns[id.conn].ends[id.side]
    }

    pub(super) fn pipe(&mut self, from: EndId) -> &mut Pipe {
        &mut self.conns[from.conn].pipes[from.side]
    }

    pub(super) fn listen(&mut self, addr: SocketAddr, owner: ThreadId) -> usize {
        let (token, edge, open, waiting) = (None, false, true, VecDeque::new());
        self.listeners.push(Listening { addr, owner, token, edge, open, waiting });
        self.listeners.len() - 1
    }

    // System calls.

    pub(super) fn connect(&mut self, to: SocketAddr) -> io::Result<EndId> {
        if self.rng.permille(self.faults.unconnectable) {
            return Err(io::Error::from_raw_os_error(libc::ENETUNREACH));
        }
        let owner = self.running;
        let end = || End { owner, open: true, ..End::default() };
        let pipes = [0, 1].map(|_| Pipe::new(&mut self.rng, self.least_room));
        let other = End { open: true, ..End::default() };
        self.conns.push(Conn {
            to,
            phase: Phase::Connecting,
            ends: [end(), other],
            pipes,
            tap: Tap::default(),
            silent_since: None,
            asked_at: None,
        });
        self.moved += 1;
        self.live.push(self.conns.len() - 1);
        Ok(EndId { conn: self.conns.len() - 1, side: 0 })
    }

    pub(super) fn connected(&mut self, id: EndId) -> io::Result<bool> {
        if let Some(error) = self.take_error(id) {
            return Err(error);
        }
        match self.conns[id.conn].phase {
            Phase::Connecting => Ok(false),
            Phase::Established => Ok(true),
            Phase::Failed => Err(io::Error::from_raw_os_error(libc::ECONNREFUSED)),
        }
    }

    pub(super) fn accept(&mut self, index: usize) -> io::Result<EndId> {
        let Some(conn) = self.listeners[index].waiting.pop_front() else {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        };
        self.moved += 1;
        let id = EndId { conn, side: 1 };
        let owner = self.running;
        let end = self.end(id);
        (end.owner, end.accepted) = (owner, true);
        Ok(id)
    }

    pub(super) fn is_anyone_waiting(&self, index: usize) -> bool {
        !self.listeners[index].waiting.is_empty()
    }

    pub(super) fn send(&mut self, id: EndId, spans: &[Span]) -> io::Result<usize> {
        // A submitting thread may send where the lane was offered to it, and do nothing else.
        let (owner, running) = (self.end_ref(id).owner, self.running);
        if (running.process, running.thread) != (owner.process, CALLER) {
            self.check_owner(id);
        }
        if let Some(error) = self.take_error(id) {
            return Err(error);
        }
        if self.end_ref(id).reset || self.end_ref(id).shut {
            return Err(io::Error::from_raw_os_error(libc::EPIPE));
        }
        if self.rng.permille(self.faults.interrupted) {
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        let process = self.running.process;
        let conn = &mut self.conns[id.conn];
        let pipe = &mut conn.pipes[id.side];
        let mut room = pipe.room_sent.saturating_sub(pipe.sent.len());
        if room == 0 {
            pipe.full = true;
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let (mut taken, mut bad) = (Vec::new(), false);
        for span in spans {
            let take = span.len.min(room);
            if let Err(text) = self.guards.may_read(process, span.addr, take) {
                self.wrong.get_or_insert(text);
            }
            bad = !copy_from(Span { len: take, ..*span }, &mut taken);
            room -= if bad { 0 } else { take };
            if bad || room == 0 {
                break;
            }
        }
        if taken.is_empty() && bad {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        pipe.full = room == 0;
        pipe.sent.extend(&taken);
        if id.side == 0 && conn.to.port() != CONTROL_PORT {
            conn.asked_at = Some(self.now);
            let begun = conn.tap.asked(&taken);
            self.look_at_writes(id.conn, begun);
        }
        self.moved += 1;
        let n = taken.len();
        self.note(|| format!("{id} sends {n}"));
        Ok(n)
    }

    pub(super) fn receive(&mut self, id: EndId, spans: &[Span]) -> io::Result<usize> {
        self.check_owner(id);
        if self.rng.permille(self.faults.interrupted) {
            return Err(io::Error::from_raw_os_error(libc::EINTR));
        }
        let process = self.running.process;
        let conn = &mut self.conns[id.conn];
        let pipe = &mut conn.pipes[1 - id.side];
        if pipe.arrived.is_empty() {
            let end = pipe.end;
            return match self.take_error(id) {
                Some(error) => Err(error),
                None if end == StreamEnd::FinArrived || self.end_ref(id).reset => Ok(0),
                None => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            };
        }
        let (mut n, mut bad) = (0, false);
        for span in spans {
            let take = span.len.min(pipe.arrived.len());
            let bytes = first(&pipe.arrived, take);
            if let Err(text) = self.guards.may_write(process, span.addr, take) {
                self.wrong.get_or_insert(text);
            }
            bad = !copy_to(*span, &bytes);
            if bad {
                break;
            }
            pipe.arrived.drain(..take);
            n += take;
            if id.side == 0 {
                conn.tap.answered(&bytes);
            }
            if pipe.arrived.is_empty() {
                break;
            }
        }
        if n == 0 && bad {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        self.moved += 1;
        self.note(|| format!("{id} receives {n}"));
        Ok(n)
    }

    pub(super) fn is_quiet(&self, id: EndId) -> bool {
        let (arriving, end) = (&self.conns[id.conn].pipes[1 - id.side], self.end_ref(id));
        let over = arriving.end == StreamEnd::FinArrived || end.reset || end.error.is_some();
        arriving.arrived.is_empty() && !over
    }

    pub(super) fn half_close(&mut self, id: EndId) {
        self.end(id).shut = true;
        let pipe = self.pipe(id);
        if pipe.end == StreamEnd::Open {
            pipe.end = StreamEnd::Fin;
        }
        self.note(|| format!("{id} ends its side"));
    }

    pub(super) fn reset_on_close(&mut self, id: EndId) {
        self.end(id).linger_off = true;
    }

    pub(super) fn take_error(&mut self, id: EndId) -> Option<io::Error> {
        self.end(id).error.take().map(io::Error::from_raw_os_error)
    }

    pub(super) fn unacknowledged(&mut self, id: EndId) -> u32 {
        let pipe = self.pipe(id);
        (pipe.sent.len() + pipe.lost) as u32 + u32::from(pipe.end == StreamEnd::Fin)
    }

    /// What the kernels say to each other, also where nobody reads or sends.
    pub(super) fn pulse(&mut self, id: EndId) -> Pulse {
        let conn = &self.conns[id.conn];
        let silent = conn.silent_since.map_or(Duration::ZERO, |since| self.now - since);
        let unanswered = (silent.as_secs_f64() / SIGN.as_secs_f64()) as u8;
        let (out, back) = (&conn.pipes[id.side], &conn.pipes[1 - id.side]);
        let over = conn.ends[id.side].reset;
        let (acknowledged, received) = (out.moved, back.moved);
        let sent_again = unanswered.into();
        Pulse { acknowledged, received, unanswered, sent_again, silent, over }
    }

    /// The last handle of an end is gone.
    pub(super) fn close(&mut self, id: EndId) {
        let conn = &mut self.conns[id.conn];
        let unread = !conn.pipes[1 - id.side].arrived.is_empty();
        let end = &mut conn.ends[id.side];
        if !std::mem::replace(&mut end.open, false) {
            return;
        }
        (end.edge, end.shut) = (false, true);
        // Of a connection that is no more nothing is left that could end in order: who asks for it is told so.
        let resets = unread || end.linger_off || end.reset;
        conn.pipes[1 - id.side].arrived.clear();
        let pipe = &mut conn.pipes[id.side];
        if resets {
            // What was on its way already may arrive, or not.
            let most = pipe.sent.len();
            pipe.sent.truncate(self.rng.below(most + 1));
            pipe.end = StreamEnd::Reset;
        } else if pipe.end == StreamEnd::Open {
            pipe.end = StreamEnd::Fin;
        }
        self.moved += 1;
        self.note(|| format!("{id} is closed{}", if resets { " with a reset" } else { "" }));
    }

    /// WRITEs of which a socket has taken bytes: none of them is sent a second time, but behind a refusal.
    fn look_at_writes(&mut self, conn: usize, begun: Vec<Asked>) {
        for asked in begun {
            let before = self.written.insert((asked.addr, asked.len), (conn, asked.index));
            let Some((other, index)) = before.filter(|_| self.honest) else { continue };
            if self.conns[other].tap.refused().is_none_or(|refused| refused >= index) {
                let text = format!("a WRITE that had begun on {other}< is sent again on {conn}<");
                self.blame(text);
            }
        }
    }

    fn check_owner(&mut self, id: EndId) {
        let (owner, running) = (self.end_ref(id).owner, self.running);
        if owner != running {
            self.blame(format!("{running:?} uses a socket of {owner:?}"));
        }
    }

    /// Ends and listeners of `thread` with news, told once: some of them, in any order.
    pub(super) fn poll(&mut self, thread: ThreadId) -> Vec<Event> {
        let mut events = Vec::new();
        for at in 0..self.listeners.len() {
            let l = &mut self.listeners[at];
            if l.owner == thread && l.open && std::mem::take(&mut l.edge) {
                events.extend(l.token.map(Event::readable));
            }
        }
        let conns = &self.conns;
        self.live.retain(|conn| !conns[*conn].is_over());
        for at in 0..self.live.len() {
            for side in 0..2 {
                let id = EndId { conn: self.live[at], side };
                let end = self.end_ref(id);
                if !end.edge || end.owner != thread || end.token.is_none() {
                    continue;
                }
                // A call that takes few events brings the others next time.
                if !events.is_empty() && self.rng.permille(200) {
                    continue;
                }
                self.end(id).edge = false;
                events.extend(self.event(id));
            }
        }
        for at in (1..events.len()).rev() {
            events.swap(at, self.rng.below(at + 1));
        }
        events
    }

    /// Whether `poll` would say something.
    pub(super) fn has_news(&self, thread: ThreadId) -> bool {
        let listener = |l: &Listening| l.owner == thread && l.open && l.edge && l.token.is_some();
        let end = |end: &End| end.edge && end.owner == thread && end.token.is_some();
        self.listeners.iter().any(listener)
            || self.live.iter().any(|conn| self.conns[*conn].ends.iter().any(end))
    }

    fn event(&self, id: EndId) -> Option<Event> {
        let conn = &self.conns[id.conn];
        let (end, out) = (&conn.ends[id.side], &conn.pipes[id.side]);
        let arriving = &conn.pipes[1 - id.side];
        if conn.phase == Phase::Connecting {
            return None;
        }
        let ended = arriving.end == StreamEnd::FinArrived || end.reset;
        let hung_up = end.reset || (ended && end.shut);
        let event = Event {
            token: end.token?,
            readable: !arriving.arrived.is_empty() || ended,
            writable: hung_up || out.sent.len() * 3 <= out.room_sent * 2,
            read_closed: ended,
            write_closed: hung_up,
            error: end.error.is_some(),
        };
        (event.readable || event.writable || event.error).then_some(event)
    }
}

/// The first `n` bytes of a queue.
fn first(queue: &VecDeque<u8>, n: usize) -> Vec<u8> {
    let (front, back) = queue.as_slices();
    let some = front.len().min(n);
    [&front[..some], &back[..n - some]].concat()
}

impl Event {
    fn readable(token: Token) -> Self {
        let (readable, writable, read_closed) = (true, false, false);
        Self { token, readable, writable, read_closed, write_closed: false, error: false }
    }
}

impl Conn {
    /// Whether something of it could still happen at one of its ends.
    pub(super) fn is_over(&self) -> bool {
        self.ends.iter().all(|end| !end.open || (end.reset && !end.edge))
    }
}

impl Pipe {
    fn new(rng: &mut Rng, least: usize) -> Self {
        let room = |rng: &mut Rng| rng.spread(least, MOST_ROOM);
        Self {
            sent: VecDeque::new(),
            room_sent: room(rng),
            arrived: VecDeque::new(),
            room_arrived: room(rng),
            end: StreamEnd::Open,
            lost: 0,
            moved: 0,
            full: false,
            stalled: false,
            silent: false,
            cut: None,
        }
    }

    /// All is well: it takes as much as any.
    pub(super) fn heal(&mut self) {
        (self.stalled, self.room_sent, self.room_arrived) = (false, MOST_ROOM, MOST_ROOM);
    }

    /// Whether bytes, or their end, can arrive now.
    pub(super) fn can_deliver(&self) -> bool {
        let room = self.arrived.len() < self.room_arrived;
        let can = if self.cut == Some(0) {
            !self.sent.is_empty() || self.end != StreamEnd::FinArrived
        } else if self.sent.is_empty() {
            matches!(self.end, StreamEnd::Fin | StreamEnd::Reset)
        } else {
            room
        };
        can && !self.stalled && !self.silent
    }
}

impl std::fmt::Display for EndId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.conn, if self.side == 0 { "<" } else { ">" })
    }
}
