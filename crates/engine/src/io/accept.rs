//! Taking connections on.

use std::cmp::Reverse;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mio::{Interest, Token};

use crate::error::{Error, Result};
use crate::io::bounds::most_connections;
use crate::io::conns::Kind;
use crate::io::control::ControlConn;
use crate::io::mailbox::Command;
use crate::io::serve::ServeConn;
use crate::io::thread::Reactor;
use crate::io::{Listener, Socket};
use crate::log::Kind as Line;

pub(super) struct Listening {
    listener: Listener,
    role: Role,
    /// It takes nothing on until its timer rings.
    pub(super) resting: bool,
}

#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Role {
    Control,
    Data,
}

const FIRST_LISTENER: usize = 1;
const LISTENERS: usize = 2;
/// Tokens of connections: index in the low half, generation in the high one.
pub(super) const FIRST_CONN: usize = FIRST_LISTENER + LISTENERS;
/// How long a listener rests when the process is out of descriptors.
const REST: Duration = Duration::from_millis(100);
/// How many control connections are served at the same time.
const MAX_CONTROL: usize = 512;

impl Reactor {
    pub(super) fn listen(&mut self, listener: Listener, role: Role) -> Result<()> {
        let token = Token(FIRST_LISTENER + self.listeners.len());
        self.register(listener.as_raw_fd(), token, Interest::READABLE)
            .map_err(|e| Error::io("watching a listener", e))?;
        self.core.descriptors.note(listener.as_raw_fd());
        self.listeners.push(Listening { listener, role, resting: false });
        Ok(())
    }

    pub(super) fn accept(&mut self, token: Token) {
        let at = token.0 - FIRST_LISTENER;
        while !self.listeners[at].resting {
            let role = self.listeners[at].role;
            if role == Role::Data && self.is_crowded() {
                // Whoever comes later is an event.
                if self.listeners[at].listener.is_anyone_waiting() {
                    self.make_room();
                    self.rest(token);
                }
                return;
            }
            match self.listeners[at].listener.accept() {
                Ok((socket, _)) => self.admit(socket, role),
                Err(e) => match e.raw_os_error() {
                    Some(libc::EAGAIN) => return,
                    // Faults of the one connection; the next is a new chance.
                    Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO | libc::EPERM) => {}
                    _ => {
                        self.core.log.warn(Line::Accepting, "", || {
                            format!("accepting a connection failed: {e}; trying again in {REST:?}")
                        });
                        self.core.broadcast(|| Command::Spare);
                        return self.rest(token);
                    }
                },
            }
        }
    }

    /// Who waits to be accepted waits a little longer.
    fn rest(&mut self, token: Token) {
        self.listeners[token.0 - FIRST_LISTENER].resting = true;
        self.timers.push(Reverse((self.now + REST, token)));
    }

    /// Its rest is over.
    pub(super) fn accept_again(&mut self, token: Token) {
        self.listeners[token.0 - FIRST_LISTENER].resting = false;
        self.accept(token);
    }

    fn admit(&mut self, socket: Socket, role: Role) {
        match role {
            Role::Data => {
                self.core.metrics.connections_accepted.add(1);
                self.core.serving.fetch_add(1, Ordering::Relaxed);
                let thread = self.next_thread % self.core.mailboxes.len();
                self.next_thread = self.next_thread.wrapping_add(1);
                if thread == self.index {
                    self.serve(socket);
                } else {
                    self.core.mailboxes[thread].post(Command::Serve(socket));
                }
            }
            Role::Control => {
                let controls = || self.each().filter(|c| matches!(c.kind, Kind::Control(_)));
                let busy = controls().count();
                if busy >= MAX_CONTROL.min(most_connections() / 2) {
                    // An exchange takes milliseconds: who has been here for longest is most likely nobody's client.
                    let oldest = controls().min_by_key(|c| c.due).map(|c| c.token);
                    self.core.log.warn(Line::ControlCrowd, "", || {
                        format!("{busy} control connections are open; the oldest makes room")
                    });
                    if let Some(conn) = oldest.and_then(|token| self.take(token)) {
                        self.close(conn);
                    }
                }
                let due = self.now + ControlConn::PATIENCE;
                let kind = Kind::Control(ControlConn::new(&self.core));
                self.add(socket, kind, true, Some(due));
            }
        }
    }

    pub(super) fn serve(&mut self, socket: Socket) {
        self.watch_over(&socket);
        let kind = Kind::Serve(ServeConn::new(self.now));
        if self.add(socket, kind, true, None).is_none() {
            self.core.serving.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
