//! The connections of an IO thread: by token, with what is due on each.

use std::cmp::Reverse;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use mio::unix::SourceFd;
use mio::{Interest, Token};

use crate::control::Question;
use crate::io::Socket;
use crate::io::accept::FIRST_CONN;
use crate::io::ask::AskConn;
use crate::io::control::ControlConn;
use crate::io::lane::LaneConn;
use crate::io::mailbox::ConnBell;
use crate::io::serve::ServeConn;
use crate::io::thread::Reactor;
use crate::log::Kind as Line;
use crate::staging::Bell;

pub(super) struct Place {
    pub(super) generation: u32,
    pub(super) conn: Option<Box<Conn>>,
}

pub(crate) struct Conn {
    pub(super) token: Token,
    pub(super) socket: Socket,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer has ended the stream. No event will say so again, so it is read to its end.
    pub(super) read_closed: bool,
    /// The connection is gone in both directions, which nothing but reading or sending would tell.
    pub(super) gone: bool,
    pub(super) queued: bool,
    /// As [`crate::io::wait::Waits`] counts it.
    pub(super) flowing: bool,
    /// When it is to be looked at again at the latest.
    pub(super) due: Option<Instant>,
    /// Whether a timer for `due` is running.
    timed: bool,
    /// Wakes it when a staging slot or a copy that it waits for is there.
    pub(super) bell: Arc<dyn Bell>,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    Lane(LaneConn),
    Serve(ServeConn),
    Control(ControlConn),
    Ask(AskConn),
}

/// What a connection said when it was driven.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// It waits for its socket.
    Wait,
    /// Its budget is spent, and it has more to do.
    Again,
    /// It is to be closed.
    Close,
}

/// What a poller says about a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) token: Token,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    pub(crate) read_closed: bool,
    pub(crate) write_closed: bool,
    pub(crate) error: bool,
}

impl Reactor {
    pub(super) fn register(&self, fd: i32, token: Token, interest: Interest) -> io::Result<()> {
        #[cfg(test)]
        if crate::sim::watch(fd, token) {
            return Ok(());
        }
        self.poll.registry().register(&mut SourceFd(&fd), token, interest)
    }

    pub(super) fn add_lane(
        &mut self,
        socket: Socket,
        lane: LaneConn,
        due: Instant,
    ) -> Option<Token> {
        self.add(socket, Kind::Lane(lane), false, Some(due))
    }

    pub(super) fn add_ask(&mut self, socket: Socket, ask: AskConn, due: Instant) -> Option<Token> {
        self.add(socket, Kind::Ask(ask), false, Some(due))
    }

    /// The connections of a question.
    pub(super) fn ask_tokens(&self, question: &Arc<Question>) -> Vec<Token> {
        let of = |conn: &&Conn| matches!(&conn.kind, Kind::Ask(ask) if ask.is_of(question));
        self.each().filter(of).map(|conn| conn.token).collect()
    }

    /// The connections of questions that are answered.
    pub(super) fn answered_asks(&self) -> Vec<Token> {
        let answered = |conn: &&Conn| matches!(&conn.kind, Kind::Ask(ask) if ask.is_answered());
        self.each().filter(answered).map(|conn| conn.token).collect()
    }

    /// What is known of the connections of questions, but for the one that is being driven.
    pub(super) fn asks(&self) -> impl Iterator<Item = &AskConn> {
        self.each().filter_map(|conn| match &conn.kind {
            Kind::Ask(ask) => Some(ask),
            _ => None,
        })
    }

    /// Takes a connection on. A new one is driven at once, since what has arrived already makes no event.
    pub(super) fn add(
        &mut self,
        socket: Socket,
        kind: Kind,
        open: bool,
        due: Option<Instant>,
    ) -> Option<Token> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.conns.push(Place { generation: 0, conn: None });
            self.conns.len() - 1
        });
        let token = join(index, self.conns[index].generation);
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(e) = self.register(socket.as_raw_fd(), token, interest) {
            self.core.log.warn(Line::Accepting, "", || {
                format!("watching a connection failed: {e}; it is closed")
            });
            self.free.push(index);
            return None;
        }
        let conn = Conn {
            token,
            socket,
            readable: open,
            writable: open,
            read_closed: false,
            gone: false,
            queued: false,
            flowing: false,
            due,
            timed: false,
            bell: ConnBell::of(self.mailbox(), token),
            kind,
        };
        self.core.descriptors.note(conn.socket.as_raw_fd());
        self.put_back(Box::new(conn));
        self.make_ready(token);
        Some(token)
    }

    pub(super) fn conn(&mut self, token: Token) -> Option<&mut Conn> {
        let (index, generation) = split(token);
        let place = self.conns.get_mut(index).filter(|p| p.generation == generation)?;
        place.conn.as_deref_mut()
    }

    pub(super) fn take(&mut self, token: Token) -> Option<Box<Conn>> {
        let (index, generation) = split(token);
        self.conns.get_mut(index).filter(|p| p.generation == generation)?.conn.take()
    }

    pub(super) fn put_back(&mut self, mut conn: Box<Conn>) {
        let (index, _) = split(conn.token);
        if let Some(due) = conn.due.filter(|_| !conn.timed) {
            conn.timed = true;
            self.timers.push(Reverse((due, conn.token)));
        }
        self.conns[index].conn = Some(conn);
    }

    pub(super) fn each(&self) -> impl Iterator<Item = &Conn> {
        self.conns.iter().filter_map(|p| p.conn.as_deref())
    }

    pub(super) fn make_ready(&mut self, token: Token) {
        if let Some(conn) = self.conn(token)
            && !std::mem::replace(&mut conn.queued, true)
        {
            self.ready.push_back(token);
        }
    }
}

impl From<&mio::event::Event> for Event {
    fn from(event: &mio::event::Event) -> Self {
        Self {
            token: event.token(),
            readable: event.is_readable(),
            writable: event.is_writable(),
            read_closed: event.is_read_closed(),
            write_closed: event.is_write_closed(),
            error: event.is_error(),
        }
    }
}

impl Conn {
    pub(super) fn lane(&mut self) -> &mut LaneConn {
        match &mut self.kind {
            Kind::Lane(lane) => lane,
            _ => unreachable!("driven by its kind"),
        }
    }

    pub(super) fn serve(&mut self) -> &mut ServeConn {
        match &mut self.kind {
            Kind::Serve(serve) => serve,
            _ => unreachable!("driven by its kind"),
        }
    }

    pub(super) fn control(&mut self) -> &mut ControlConn {
        match &mut self.kind {
            Kind::Control(control) => control,
            _ => unreachable!("driven by its kind"),
        }
    }

    pub(super) fn ask(&mut self) -> &mut AskConn {
        match &mut self.kind {
            Kind::Ask(ask) => ask,
            _ => unreachable!("driven by its kind"),
        }
    }

    pub(super) fn set_due(&mut self, at: Option<Instant>) {
        if self.due != at {
            (self.due, self.timed) = (at, false);
        }
    }

    pub(super) fn has_due(&self) -> bool {
        self.due.is_some()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }
}

const INDEX_BITS: u32 = 32;

fn join(index: usize, generation: u32) -> Token {
    Token(((generation as usize) << INDEX_BITS) | (index + FIRST_CONN))
}

pub(super) fn split(token: Token) -> (usize, u32) {
    let index = (token.0 & ((1 << INDEX_BITS) - 1)) - FIRST_CONN;
    (index, (token.0 >> INDEX_BITS) as u32)
}
