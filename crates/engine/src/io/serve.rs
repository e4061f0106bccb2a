//! Driving a data connection from a peer.
#![expect(unsafe_code, reason = "receiving into memory that users have registered")]

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_wire::{Header, Op};

use crate::io::Socket;
use crate::io::conns::{Conn, Fate};
use crate::io::thread::{Reactor, STARVED};
use crate::log::Kind;
use crate::memory::Span;
use crate::metrics::Metrics;
use crate::staging::{Ahead, Bell};
use crate::tcp::{Direct, Refusal, Rules, Serve, ServeFault, Served};

pub(crate) struct ServeConn {
    serve: Serve,
    /// Our side of the stream has ended, behind a refusal.
    half_closed: bool,
    /// The peer's side has ended.
    ended: bool,
    /// When it was accepted, and when the last request was served.
    accepted: Instant,
    used: Option<Instant>,
}

/// How many calls a connection has before others get their turn.
const ROUNDS: usize = 16;
/// How much is read ahead behind a payload that is received in place: the next header, and a little.
const AHEAD: usize = 4 << 10;
/// When so many bytes wait for staging slots on a thread, only a little is read of any connection at once.
const MAX_STASHED: usize = 8 << 20;
/// How long the rest of a header may take, and a refused peer to go away.
const PATIENCE: Duration = Duration::from_secs(5);

impl Reactor {
    pub(super) fn drive_serve(&mut self, conn: &mut Conn) -> Fate {
        let mut served = Served::default();
        let before = conn.serve().serve.stashed();
        let answers = conn.serve().serve.answers();
        let fate = self.serve_rounds(conn, &mut served);
        self.stashed = self.stashed + conn.serve().serve.stashed() - before;
        self.answers = self.answers + conn.serve().serve.answers() - answers;
        count(&served, &self.core.metrics);
        if let Some(refusal) = conn.serve().serve.take_refusal() {
            self.say_refused(conn, &refusal);
        }
        if conn.serve().serve.is_starved() {
            if conn.gone {
                // Nobody waits for it, and reading would not tell before there is a slot.
                tracing::debug!("a connection from a peer ends while it waits for a staging slot");
                return Fate::Close;
            }
            self.sweep_by(self.now + STARVED);
        }
        if served != Served::default() {
            // The clock runs over one header, or one refusal, not over a busy connection.
            conn.set_due(None);
            conn.serve().used = Some(self.now);
        }
        self.time(conn);
        // What has arrived was looked at first: a process that was stopped does not throw it away.
        if fate == Fate::Wait && conn.is_due(self.now) {
            let why =
                if conn.serve().half_closed { "a refused peer stayed" } else { "half a header" };
            let text = || format!("{why} for {PATIENCE:?}");
            self.complain(Kind::Stranger, conn, text);
            return Fate::Close;
        }
        fate
    }

    fn serve_rounds(&mut self, conn: &mut Conn, served: &mut Served) -> Fate {
        if conn.serve().serve.is_starved() {
            let bell = conn.bell.clone();
            let resumed = conn.serve().serve.resume(&self.rules(&bell), served);
            if let Err(fault) = resumed {
                return self.end_serving(conn, &Fault::Serve(fault));
            }
        }
        for _ in 0..ROUNDS {
            // Answers of one pass leave together, so sending comes when nothing more is to be read now.
            let input = conn.readable && self.wants_input(&conn.serve().serve);
            let result =
                if input { self.serve_input(conn, served) } else { self.serve_output(conn) };
            match result {
                Ok(true) => {}
                Ok(false) => return Fate::Wait,
                Err(fault) => return self.end_serving(conn, &fault),
            }
        }
        if let Err(fault) = self.serve_output(conn) {
            return self.end_serving(conn, &fault);
        }
        Fate::Again
    }

    /// Whether more requests of a connection are welcome.
    fn wants_input(&self, serve: &Serve) -> bool {
        serve.wants_input() && (self.answers < self.most_answers || !serve.wants_output())
    }

    fn end_serving(&mut self, conn: &mut Conn, fault: &Fault) -> Fate {
        match fault {
            Fault::End => {}
            Fault::Serve(ServeFault::RefusedV1) => conn.socket.reset_on_close(),
            Fault::Serve(e) => {
                let kind = match e {
                    ServeFault::Device(_) | ServeFault::Copy(_) => Kind::ServingMemory,
                    _ => Kind::Stranger,
                };
                self.complain(kind, conn, || e.to_string());
                if matches!(e, ServeFault::Device(_)) && conn.serve().serve.speaks_v1() {
                    // Its orderly end would say that the WRITE was applied.
                    conn.socket.reset_on_close();
                    return Fate::Close;
                }
                // What was applied before is acknowledged, as far as the socket takes it.
                let _ = self.serve_output(conn);
            }
            Fault::Io(e) => tracing::debug!("a connection from a peer is lost: {e}"),
        }
        Fate::Close
    }

    /// Says why a connection is closed: what a peer sends is its own business, memory that fails is ours.
    #[cold]
    fn complain(&self, kind: Kind, conn: &Conn, why: impl FnOnce() -> String) {
        let (log, socket) = (&self.core.log, &conn.socket);
        let text =
            || format!("the data connection from {} is closed: {}", socket.peer_text(), why());
        match kind {
            Kind::ServingMemory => log.warn(kind, &socket.peer_host(), text),
            _ => log.info(kind, &socket.peer_host(), text),
        }
    }

    #[cold]
    fn say_refused(&self, conn: &Conn, refusal: &Refusal) {
        let (log, socket) = (&self.core.log, &conn.socket);
        match refusal {
            Refusal::Range(Header { op, addr, len, .. }) => {
                log.info(Kind::RangeRefused, &socket.peer_host(), || {
                    let op = if *op == Op::Read { "READ" } else { "WRITE" };
                    let from = socket.peer_text();
                    format!(
                        "a {op} of {len} bytes at {addr:#x} from {from} is refused: the range is in no buffer \
                         that is registered for it"
                    )
                });
            }
            Refusal::Device(why) => {
                log.warn(Kind::ServingMemory, &socket.peer_host(), || {
                    format!("a READ from {} is refused: {why}", socket.peer_text())
                });
            }
        }
    }

    /// One receive call. False: nothing can be received before there is a staging slot.
    fn serve_input(&mut self, conn: &mut Conn, served: &mut Served) -> Result<bool, Fault> {
        let bell = conn.bell.clone();
        let direct = match conn.serve().serve.direct(&bell).map_err(Fault::Serve)? {
            Direct::Not => None,
            Direct::At(span) => Some(span),
            Direct::Starved => return Ok(true),
        };
        let buffer = &mut self.scratch.receive;
        let serve = &conn.serve().serve;
        let much = self.stashed >= MAX_STASHED || self.answers >= self.most_answers;
        let little = direct.is_some() || serve.expects_direct() || much;
        let ahead = if little { AHEAD } else { buffer.len() };
        let spans =
            [direct.unwrap_or(Span { addr: 0, len: 0 }), Span::of_mut(&mut buffer[..ahead])];
        let spans = if direct.is_some() { &spans[..] } else { &spans[1..] };
        // SAFETY: the first span is registered memory that `Serve` holds a pin on, or a staging slot that was lent
        // to it; the other is the thread's receive buffer.
        let n = match unsafe { conn.socket.receive(spans) } {
            Ok(0) => return self.serve_end(conn),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                conn.readable = false;
                conn.serve().serve.rest(&bell);
                return Ok(true);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(Fault::Io(e)),
        };
        let in_place = direct.map_or(0, |span| n.min(span.len));
        let wanted = spans.iter().map(|s| s.len).sum::<usize>();
        conn.serve().serve.received_direct(in_place as u64, served);
        let input = &self.scratch.receive[..n - in_place];
        let taken = conn.serve().serve.received(input, &self.rules(&bell), served);
        taken.map_err(Fault::Serve)?;
        // A short count means that the socket is empty, but for the end of the stream, or for a hole in the
        // buffer, which the next call reports.
        let cut_short = direct.is_some_and(|span| n < span.len);
        conn.readable = n == wanted || conn.read_closed || cut_short;
        if !conn.readable {
            conn.serve().serve.rest(&bell);
        }
        Ok(true)
    }

    /// The peer will send nothing more; what it asked for before is still answered.
    fn serve_end(&mut self, conn: &mut Conn) -> Result<bool, Fault> {
        conn.readable = false;
        let bell = conn.bell.clone();
        let ServeConn { serve, ended, .. } = conn.serve();
        *ended = true;
        // A payload that has stopped in the middle does not go on.
        serve.relinquish_input(&bell);
        if serve.wants_output() || !serve.has_landed() { Ok(true) } else { Err(Fault::End) }
    }

    fn rules<'a>(&'a self, bell: &'a Arc<dyn Bell>) -> Rules<'a> {
        Rules { registry: &self.core.registry, mode: self.core.copy_mode, bell }
    }

    /// Sends until the socket is full or nothing is left; false if there is nothing to do until an event.
    fn serve_output(&mut self, conn: &mut Conn) -> Result<bool, Fault> {
        let (bell, mut moved) = (conn.bell.clone(), false);
        loop {
            if conn.writable || conn.serve().ended {
                self.serve_ask(conn, &bell)?;
            }
            if !conn.serve().serve.wants_output() {
                break;
            }
            if !conn.writable {
                return Ok(false);
            }
            self.scratch.spans.clear();
            conn.serve().serve.plan(&mut self.scratch.spans);
            if self.scratch.spans.is_empty() {
                // Copies have to come first; their bell will ring.
                return Ok(moved && conn.readable && conn.serve().serve.wants_input());
            }
            match conn.socket.send(&self.scratch.spans) {
                Ok(n) => {
                    conn.serve().serve.sent(n);
                    moved = true;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => conn.writable = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Fault::Io(e)),
            }
        }
        let ServeConn { serve, half_closed, ended, .. } = conn.serve();
        if *ended {
            return if serve.has_landed() { Err(Fault::End) } else { Ok(false) };
        }
        if serve.is_refusing() && !std::mem::replace(half_closed, true) {
            conn.socket.half_close();
        }
        // Input that was held back because too many answers waited is welcome again.
        Ok(moved && conn.readable)
    }

    /// Has devices copy what is to be sent next.
    fn serve_ask(&mut self, conn: &mut Conn, bell: &Arc<dyn Bell>) -> Result<(), Fault> {
        if conn.serve().serve.ask(bell).map_err(Fault::Serve)? == Ahead::Starved {
            self.sweep_by(self.now + STARVED);
        }
        Ok(())
    }

    /// Starts or stops the clock over half a header and over a refused peer.
    fn time(&self, conn: &mut Conn) {
        let ServeConn { serve, half_closed, .. } = conn.serve();
        let timed = serve.header_pending() || (*half_closed && serve.is_refusing());
        if !timed {
            conn.set_due(None);
        } else if !conn.has_due() {
            conn.set_due(Some(self.now + PATIENCE));
        }
    }
}

enum Fault {
    /// The peer has ended the stream and everything is answered.
    End,
    Serve(ServeFault),
    Io(io::Error),
}

fn count(served: &Served, metrics: &Metrics) {
    if *served == Served::default() {
        return;
    }
    metrics.served_reads.add(served.reads);
    metrics.served_writes.add(served.writes);
    metrics.served_bytes_read.add(served.bytes_read);
    metrics.served_bytes_written.add(served.bytes_written);
    metrics.served_refusals.add(served.refusals);
}

impl ServeConn {
    pub(super) fn new(now: Instant) -> Self {
        Self { serve: Serve::new(), half_closed: false, ended: false, accepted: now, used: None }
    }

    /// Answers that wait to be sent.
    pub(super) fn answers(&self) -> usize {
        self.serve.answers()
    }

    /// Since when no whole request has come, if none ever has.
    pub(super) fn unused_since(&self) -> Option<Instant> {
        (self.used.is_none() && self.serve.is_idle()).then_some(self.accepted)
    }

    /// Since when nothing is going on, if something ever was.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.used.filter(|_| self.serve.is_idle())
    }

    /// Gives back the staging slots of what waits to be received, or to be sent.
    pub(super) fn relinquish(&mut self, input: bool, output: bool, bell: &Arc<dyn Bell>) {
        if input {
            self.serve.relinquish_input(bell);
        }
        if output {
            self.serve.relinquish();
        }
    }

    /// Whether it is between two requests.
    pub(super) fn is_idle(&self) -> bool {
        self.serve.is_idle()
    }

    /// Bytes that wait here for a staging slot.
    pub(super) fn stashed(&self) -> usize {
        self.serve.stashed()
    }

    /// Has the peer see a reset if an orderly end would tell it that a WRITE is applied which is not.
    pub(super) fn end(&mut self, socket: &Socket) {
        if self.serve.owes_v1() {
            socket.reset_on_close();
        }
    }

    pub(super) fn uses(&self, addr: u64) -> bool {
        self.serve.uses(addr)
    }
}
