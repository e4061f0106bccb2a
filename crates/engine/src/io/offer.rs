//! Lanes that are idle are offered to the threads that submit: whoever takes one sends a small batch by itself, and no
//! IO thread has to be woken for it.
//!
//! The lane stays its IO thread's. That one takes the offer back before it does anything with the lane
//! ([`Reactor::claim`]), and takes on what was sent meanwhile: at the latest when the offer ends, so that nobody has to
//! wake it for the deadline of a batch that lasts longer. What a sender cannot send it leaves in the send half.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use mio::Token;

use crate::io::Socket;
use crate::io::conns::{Conn, Kind};
use crate::io::look::LOOK;
use crate::io::mailbox::{Command, Mailbox};
use crate::io::thread::Reactor;
use crate::sync::locked;
use crate::tcp::{MAX_CALL_SPANS, Room, SendHalf};
use crate::transfer::FOREVER;

/// An idle lane, for one sender.
pub(crate) struct Offer {
    /// Whoever takes the offer has it locked before the IO thread can find the offer taken.
    pub(crate) half: Arc<Mutex<SendHalf>>,
    socket: Socket,
    mailbox: Arc<Mailbox>,
    token: Token,
    /// Its IO thread looks at the lane by then.
    until: Instant,
}

impl Offer {
    /// What may be sent so: not more than is copied in a moment.
    pub(crate) const ROOM: Room = Room { requests: 128, bytes: 512 << 10, empty: false };

    /// Whether a batch that is submitted `now` may be sent so.
    pub(crate) fn is_good_for(&self, now: Instant, deadline: Instant) -> bool {
        now < self.until && self.until <= deadline
    }

    /// Whether the peer has said nothing since the lane was offered. What has come before anything was asked answers
    /// nothing that is asked now; and where the stream has ended, nothing is sent.
    pub(crate) fn is_quiet(&self) -> bool {
        self.socket.is_quiet()
    }

    /// Sends what the lane's send half has, until the socket is full. The IO thread does the rest, and keeps the deadlines:
    /// it is woken for those that are due before it looks at the lane, of which `next` is the first. (Batches of others
    /// were in the queue.)
    pub(crate) fn send(&self, half: &mut SendHalf, next: Option<Instant>) {
        let mut spans = std::mem::take(&mut half.spans);
        let mut end = None;
        while half.wants() && !half.has_staged() && end.is_none() {
            spans.clear();
            half.plan(MAX_CALL_SPANS, &mut spans);
            match self.socket.send(&spans) {
                Ok(n) => half.sent(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => end = Some(e.kind()),
            }
        }
        half.spans = spans;
        // When there is room in the socket again, its IO thread hears of it from the kernel; of all else from here.
        let stuck = half.wants() && end != Some(io::ErrorKind::WouldBlock);
        if stuck || next.is_some_and(|at| at < self.until) {
            self.mailbox.post(Command::Ring(self.token));
        }
    }

    fn is_of(&self, mailbox: &Arc<Mailbox>, token: Token) -> bool {
        self.token == token && Arc::ptr_eq(&self.mailbox, mailbox)
    }
}

impl Reactor {
    /// Offers the lane, if it is idle and was in use a moment ago.
    pub(super) fn offer(&mut self, conn: &mut Conn) {
        let (mailbox, token, now) = (Arc::clone(self.mailbox()), conn.token, self.now);
        let socket = conn.socket.clone();
        let sound = !conn.read_closed && !conn.gone;
        let Kind::Lane(lane) = &mut conn.kind else { return };
        let trusted = lane.active + self.core.config.lane_idle_probe.min(FOREVER);
        if !sound || now >= trusted || !lane.is_offerable() {
            return;
        }
        // What is sent on it is looked after from the next look on, as if the IO thread had sent it.
        let until = trusted.min(now + LOOK);
        let half = Arc::clone(&lane.half);
        lane.offered = lane.peer.offer(Offer { half, socket, mailbox, token, until });
        if lane.offered {
            self.look_by(until);
        }
    }

    /// Takes the lane back, and takes on what somebody sent on it.
    pub(super) fn claim(&mut self, conn: &mut Conn) {
        let Kind::Lane(lane) = &mut conn.kind else { return };
        if !std::mem::take(&mut lane.offered) {
            return;
        }
        let mailbox = &self.core.mailboxes[self.index];
        let token = conn.token;
        if lane.peer.withdraw(|offer| offer.is_of(mailbox, token)) {
            return;
        }
        // The sender has the lock since before the offer was gone: what it launches is there when the lock is free.
        let next = lane.lane.take_over(&mut locked(&lane.half));
        lane.active = self.now;
        // A sweep may have taken it over before.
        if !lane.lane.is_idle() {
            self.taken_over(next);
        }
    }

    /// The same for every lane of this thread.
    pub(super) fn claim_all(&mut self) {
        for token in self.lane_tokens() {
            if let Some(mut conn) = self.take(token) {
                self.claim(&mut conn);
                self.put_back(conn);
            }
        }
    }
}
