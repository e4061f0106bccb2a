//! Driving a connection to our control port: one request, one answer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tensorferry_wire::{FrameReader, WireError};

use crate::control::reply;
use crate::core::Core;
use crate::io::conns::{Conn, Fate};
use crate::io::thread::Reactor;
use crate::log::Kind;
use crate::memory::Span;

/// How many steps a connection has before others get their turn.
const STEPS: usize = 64;

/// How many bytes of requests all connections together may hold in part.
const MAX_KEPT: usize = 64 << 20;

pub(crate) struct ControlConn {
    phase: Phase,
}

enum Phase {
    Asking(FrameReader),
    Answering {
        frame: Arc<[u8]>,
        sent: usize,
    },
    /// Answered; the peer hangs up first, so that the answer cannot be destroyed by a reset.
    Parting,
}

impl ControlConn {
    /// How long an exchange may take.
    pub(super) const PATIENCE: Duration = Duration::from_secs(5);

    pub(super) fn new(core: &Core) -> Self {
        Self { phase: Phase::Asking(FrameReader::new(core.config.control_accept_limit)) }
    }

    /// Bytes of its request that are held.
    pub(super) fn kept(&self) -> usize {
        match &self.phase {
            Phase::Asking(reader) => reader.kept(),
            Phase::Answering { .. } | Phase::Parting => 0,
        }
    }
}

impl Reactor {
    pub(super) fn drive_control(&mut self, conn: &mut Conn) -> Fate {
        match self.control_steps(conn) {
            Ok(()) => Fate::Again,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && conn.is_due(self.now) => Fate::Close,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Fate::Wait,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                let socket = &conn.socket;
                self.core.log.info(Kind::ControlRequest, &socket.peer_host(), || {
                    format!("the control connection from {} is closed: {e}", socket.peer_text())
                });
                Fate::Close
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Fate::Again,
            Err(e) => {
                tracing::debug!("a control connection ends: {e}");
                Fate::Close
            }
        }
    }

    /// So many steps, or as many as the socket has bytes for (`WouldBlock`).
    fn control_steps(&mut self, conn: &mut Conn) -> io::Result<()> {
        let socket = conn.socket.clone();
        for _ in 0..STEPS {
            match &mut conn.control().phase {
                Phase::Asking(reader) => {
                    let n = more(socket.receive_bytes(&mut self.scratch.receive)?)?;
                    let before = reader.kept();
                    let fed = reader.feed(&self.scratch.receive[..n]).map_err(malformed)?;
                    self.control_bytes = self.control_bytes - before + reader.kept();
                    if self.control_bytes > MAX_KEPT {
                        return Err(io::Error::other("control connections hold too much already"));
                    }
                    if let (_, Some(frame)) = fed {
                        let refused = || io::Error::other("the request is refused");
                        let frame =
                            reply(&self.core, &socket.peer_host(), &frame).ok_or_else(refused)?;
                        conn.control().phase = Phase::Answering { frame, sent: 0 };
                    }
                }
                Phase::Answering { frame, sent } if *sent < frame.len() => {
                    *sent += socket.send(&[Span::of(&frame[*sent..])])?;
                }
                Phase::Answering { .. } => {
                    socket.half_close();
                    conn.control().phase = Phase::Parting;
                }
                Phase::Parting => {
                    more(socket.receive_bytes(&mut self.scratch.receive)?)?;
                }
            }
        }
        Ok(())
    }
}

fn malformed(fault: WireError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, fault)
}

fn more(n: usize) -> io::Result<usize> {
    if n == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(n) }
}
