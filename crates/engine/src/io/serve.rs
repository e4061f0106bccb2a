//! Driving a data connection from a peer.
#![expect(unsafe_code, reason = "receiving into memory that users have registered")]

use std::io;
use std::time::Duration;

use crate::io::thread::{Conn, Fate, Reactor};
use crate::memory::Span;
use crate::metrics::Metrics;
use crate::tcp::{Serve, ServeFault, Served};

pub(crate) struct ServeConn {
    serve: Serve,
    /// Our side of the stream has ended, behind a refusal.
    half_closed: bool,
    /// The peer's side has ended.
    ended: bool,
}

/// How many calls a connection has before others get their turn.
const ROUNDS: usize = 16;
/// How much is read ahead behind a payload that is received in place: the next header, and a little.
const AHEAD: usize = 4 << 10;
/// How long the rest of a header may take, and a refused peer to go away.
const PATIENCE: Duration = Duration::from_secs(5);

impl Reactor {
    pub(super) fn drive_serve(&mut self, conn: &mut Conn) -> Fate {
        let mut served = Served::default();
        let fate = self.serve_rounds(conn, &mut served);
        count(&served, &self.core.metrics);
        if served != Served::default() {
            // The clock runs over one header, or one refusal, not over a busy connection.
            conn.set_due(None);
        }
        self.time(conn);
        // What has arrived was looked at first: a process that was stopped does not throw it away.
        if fate == Fate::Wait && conn.is_due(self.now) {
            let why =
                if conn.serve().half_closed { "a refused peer stayed" } else { "half a header" };
            tracing::debug!("{why} for {PATIENCE:?}: the connection is closed");
            return Fate::Close;
        }
        fate
    }

    fn serve_rounds(&mut self, conn: &mut Conn, served: &mut Served) -> Fate {
        for _ in 0..ROUNDS {
            // Answers of one pass leave together, so sending comes when nothing more is to be read now.
            let input = conn.readable && conn.serve().serve.wants_input();
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

    fn end_serving(&mut self, conn: &mut Conn, fault: &Fault) -> Fate {
        match fault {
            Fault::End => {}
            Fault::Serve(ServeFault::RefusedV1) => conn.socket.reset_on_close(),
            Fault::Serve(e) => {
                tracing::info!("a connection from a peer is closed: {e}");
                // What was applied before is acknowledged, as far as the socket takes it.
                let _ = self.serve_output(conn);
            }
            Fault::Io(e) => tracing::debug!("a connection from a peer is lost: {e}"),
        }
        Fate::Close
    }

    /// One receive call. False is never returned: either something moved, or the socket is empty now.
    fn serve_input(&mut self, conn: &mut Conn, served: &mut Served) -> Result<bool, Fault> {
        let buffer = &mut self.scratch.receive;
        let serve = &conn.serve().serve;
        let direct = serve.direct_span();
        let ahead = if direct.is_some() || serve.expects_direct() { AHEAD } else { buffer.len() };
        let spans =
            [direct.unwrap_or(Span { addr: 0, len: 0 }), Span::of_mut(&mut buffer[..ahead])];
        let spans = if direct.is_some() { &spans[..] } else { &spans[1..] };
        // SAFETY: the first span is registered memory that `Serve` holds a pin on, the other the thread's
        // receive buffer.
        let n = match unsafe { conn.socket.receive(spans) } {
            Ok(0) => return self.serve_end(conn),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                conn.readable = false;
                return Ok(true);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(e) => return Err(Fault::Io(e)),
        };
        let in_place = direct.map_or(0, |span| n.min(span.len));
        let wanted = spans.iter().map(|s| s.len).sum::<usize>();
        let serve = &mut conn.serve().serve;
        serve.received_direct(in_place as u64, served);
        let (registry, mode) = (&self.core.registry, self.core.copy_mode);
        serve.received(&buffer[..n - in_place], registry, mode, served).map_err(Fault::Serve)?;
        // A short count means that the socket is empty, but for the end of the stream, or for a hole in the
        // buffer, which the next call reports.
        let cut_short = direct.is_some_and(|span| n < span.len);
        conn.readable = n == wanted || conn.read_closed || cut_short;
        Ok(true)
    }

    /// The peer will send nothing more; what it asked for before is still answered.
    fn serve_end(&mut self, conn: &mut Conn) -> Result<bool, Fault> {
        conn.readable = false;
        conn.serve().ended = true;
        if conn.serve().serve.wants_output() { Ok(true) } else { Err(Fault::End) }
    }

    /// Sends until the socket is full or nothing is left; false if there is nothing to do until an event.
    fn serve_output(&mut self, conn: &mut Conn) -> Result<bool, Fault> {
        let mut moved = false;
        while conn.serve().serve.wants_output() {
            if !conn.writable {
                return Ok(false);
            }
            self.scratch.spans.clear();
            conn.serve().serve.plan(&mut self.scratch.spans);
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
        let ServeConn { serve, half_closed, ended } = conn.serve();
        if *ended {
            return Err(Fault::End);
        }
        if serve.is_refusing() && !std::mem::replace(half_closed, true) {
            conn.socket.half_close();
        }
        // Input that was held back because too many answers waited is welcome again.
        Ok(moved && conn.readable)
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
    pub(super) fn new() -> Self {
        Self { serve: Serve::new(), half_closed: false, ended: false }
    }

    pub(super) fn uses(&self, addr: u64) -> bool {
        self.serve.uses(addr)
    }
}
