//! One connection through the relay: its two sockets, and its two ways.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::TcpStream;
use socket2::SockRef;

use crate::answers::Answers;
use crate::pipe::{Ended, HELD, Next, Pipe};
use crate::rule::{End, Port, Rule, Way};

/// How long what comes after a FIN is thrown away before the connection is closed.
const LINGER: Duration = Duration::from_secs(1);
/// How often one way may send and receive before others have their turn.
const TURN: usize = 64;

pub(crate) struct Link {
    pub(crate) copy: usize,
    pub(crate) port: Port,
    /// Whether a rule, and not one of the sides, has ended it.
    pub(crate) ended_by_rule: bool,
    initiator: Side,
    /// `None` if it was accepted to be left alone.
    target: Option<Side>,
    to_target: Pipe,
    to_initiator: Pipe,
    answers: Option<Answers>,
    state: State,
    moved: Instant,
}

struct Side {
    stream: TcpStream,
    readable: bool,
    writable: bool,
    /// It has sent its last byte, or is gone.
    closed: bool,
    reset: bool,
    /// All that it has sent has been read.
    over: bool,
}

#[derive(Clone, Copy)]
enum State {
    Connecting,
    Open,
    /// Until then what comes is thrown away.
    Leaving(Instant),
    Silent,
}

/// What a link came to when it had its turn.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) gone: bool,
    /// It has more to do now.
    pub(crate) again: bool,
    /// It has more to do then.
    pub(crate) wake: Option<Instant>,
}

/// When connections on which nothing moves are ended, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    pub(crate) after: Duration,
    pub(crate) end: End,
}

impl Link {
    pub(crate) fn new(
        (copy, port): (usize, Port),
        now: Instant,
        (initiator, target): (TcpStream, Option<TcpStream>),
        (to_target, to_initiator): (Rule, Rule),
        answers: Option<Answers>,
    ) -> Self {
        let state = if target.is_some() { State::Connecting } else { State::Silent };
        Self {
            copy,
            port,
            ended_by_rule: false,
            initiator: Side::new(initiator),
            target: target.map(Side::new),
            to_target: Pipe::new(to_target),
            to_initiator: Pipe::new(to_initiator),
            answers,
            state,
            moved: now,
        }
    }

    /// The sockets, the initiator's first.
    pub(crate) fn streams(&mut self) -> (&mut TcpStream, Option<&mut TcpStream>) {
        (&mut self.initiator.stream, self.target.as_mut().map(|side| &mut side.stream))
    }

    /// The poller has something to say about a socket.
    pub(crate) fn event(&mut self, of_target: bool, event: &Event) {
        let side = if of_target { self.target.as_mut() } else { Some(&mut self.initiator) };
        let Some(side) = side else { return };
        side.readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        side.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        side.closed |= event.is_read_closed() || event.is_error();
    }

    pub(crate) fn set_rule(&mut self, rule: &Rule) {
        if rule.is_for(Way::ToTarget) {
            self.to_target.set_rule(rule.clone());
        }
        if rule.is_for(Way::ToInitiator) {
            self.to_initiator.set_rule(rule.clone());
        }
    }

    pub(crate) fn to_target(&self) -> &Pipe {
        &self.to_target
    }

    pub(crate) fn to_initiator(&self) -> &Pipe {
        &self.to_initiator
    }

    /// The target's data port, if its descriptor has come this way.
    pub(crate) fn data_port(&self) -> Option<std::net::SocketAddr> {
        self.answers.as_ref().and_then(|answers| answers.data_port)
    }

    pub(crate) fn step(&mut self, now: Instant, idle: Option<Idle>, scratch: &mut [u8]) -> Step {
        match self.state {
            State::Silent => Step { gone: self.all_closed(), ..Step::default() },
            State::Leaving(until) => self.leave(now, until, scratch),
            State::Connecting => match self.connected() {
                Ok(false) => Step::default(),
                Ok(true) => {
                    (self.state, self.moved) = (State::Open, now);
                    self.relay(now, idle, scratch)
                }
                Err(_) => self.end(End::Rst, now),
            },
            State::Open => self.relay(now, idle, scratch),
        }
    }

    /// Ends it, or one way of it, as `kill` and idle connections do: whatever is held is lost.
    pub(crate) fn end(&mut self, end: End, now: Instant) -> Step {
        self.ended_by_rule = true;
        match end {
            End::Rst => {
                self.initiator.set_to_reset();
                self.target.iter().for_each(Side::set_to_reset);
                return Step { gone: true, ..Step::default() };
            }
            End::Fin | End::HalfClose => {
                self.close_way(Way::ToTarget);
                self.close_way(Way::ToInitiator);
                let until = now + LINGER;
                self.state = State::Leaving(until);
                return Step { again: true, ..Step::default() };
            }
            End::Silence => self.state = State::Silent,
            End::Stall => {
                self.to_target.stop();
                self.to_initiator.stop();
            }
        }
        Step::default()
    }

    /// An end that a rule has for one way.
    fn end_way(&mut self, way: Way, end: End, now: Instant) -> Step {
        match end {
            End::Fin | End::Rst | End::Silence => return self.end(end, now),
            End::HalfClose => self.close_way(way),
            End::Stall if way == Way::ToTarget => self.to_target.stop(),
            End::Stall => self.to_initiator.stop(),
        }
        self.ended_by_rule = true;
        Step { again: true, ..Step::default() }
    }

    /// The receiver of this way is told that no more will come.
    fn close_way(&mut self, way: Way) {
        let (pipe, receiver) = match way {
            Way::ToTarget => (&mut self.to_target, self.target.as_ref()),
            _ => (&mut self.to_initiator, Some(&self.initiator)),
        };
        pipe.shut();
        if let Some(side) = receiver {
            side.shut();
        }
    }

    fn connected(&mut self) -> std::io::Result<bool> {
        let Some(target) = &mut self.target else { return Ok(false) };
        if !target.writable {
            return Ok(false);
        }
        if let Some(error) = target.stream.take_error()? {
            return Err(error);
        }
        match target.stream.peer_addr() {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotConnected => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn relay(&mut self, now: Instant, idle: Option<Idle>, scratch: &mut [u8]) -> Step {
        let Some(target) = &mut self.target else { return Step::default() };
        let before = self.to_target.given() + self.to_initiator.given();
        let there = flow(&mut self.initiator, target, &mut self.to_target, None, now, scratch);
        let answers = self.answers.as_mut();
        let back = flow(target, &mut self.initiator, &mut self.to_initiator, answers, now, scratch);
        if self.to_target.given() + self.to_initiator.given() > before {
            self.moved = now;
        }
        for (way, flowed) in [(Way::ToTarget, &there), (Way::ToInitiator, &back)] {
            match flowed.came_to {
                Some(CameTo::Reset) => {
                    let step = self.end(End::Rst, now);
                    self.ended_by_rule = false;
                    return step;
                }
                Some(CameTo::Reached(end)) => return self.end_way(way, end, now),
                None => {}
            }
        }
        let mut step = Step {
            gone: self.to_target.is_done() && self.to_initiator.is_done(),
            again: there.again || back.again,
            wake: there.wake.into_iter().chain(back.wake).min(),
        };
        if let Some(idle) = idle {
            let due = self.moved + idle.after;
            if due <= now {
                return self.end(idle.end, now);
            }
            step.wake = Some(step.wake.map_or(due, |wake| wake.min(due)));
        }
        step
    }

    fn leave(&mut self, now: Instant, until: Instant, scratch: &mut [u8]) -> Step {
        let initiator = self.initiator.drain(scratch);
        let target = self.target.as_mut().is_none_or(|side| side.drain(scratch));
        Step { gone: initiator && target || now >= until, again: false, wake: Some(until) }
    }

    fn all_closed(&self) -> bool {
        self.initiator.closed && self.target.as_ref().is_none_or(|side| side.closed)
    }
}

impl Side {
    fn new(stream: TcpStream) -> Self {
        // Without it small pieces would wait for each other; a socket that is gone says so when it is used.
        let _ = stream.set_nodelay(true);
        Self { stream, readable: false, writable: false, closed: false, reset: false, over: false }
    }

    /// Closing it sends a RST from now on.
    fn set_to_reset(&self) {
        let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
    }

    fn shut(&self) {
        // Fails if it is gone, which it then shows when it is read.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Throws away what has come; returns whether it has ended.
    fn drain(&mut self, scratch: &mut [u8]) -> bool {
        while self.readable && !self.over {
            self.receive(scratch);
        }
        self.over
    }

    fn receive(&mut self, into: &mut [u8]) -> Received {
        loop {
            match self.stream.read(into) {
                Ok(0) => {}
                Ok(n) => return Received::Bytes(n),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.readable = false;
                    return Received::Nothing;
                }
                Err(_) => self.reset = true,
            }
            self.over = true;
            return Received::Ended(if self.reset { Ended::Reset } else { Ended::Closed });
        }
    }

    /// Sends what it takes; `None` if the other end is gone.
    fn send(&mut self, bytes: &[u8]) -> Option<usize> {
        match self.stream.write(bytes) {
            Ok(n) => Some(n),
            Err(e) if e.kind() == ErrorKind::Interrupted => Some(0),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                Some(0)
            }
            Err(_) => {
                self.reset = true;
                None
            }
        }
    }
}

enum Received {
    Bytes(usize),
    Nothing,
    Ended(Ended),
}

#[derive(Default)]
struct Flowed {
    came_to: Option<CameTo>,
    again: bool,
    wake: Option<Instant>,
}

enum CameTo {
    Reset,
    Reached(End),
}

/// Moves what can be moved one way.
fn flow(
    from: &mut Side,
    to: &mut Side,
    pipe: &mut Pipe,
    mut answers: Option<&mut Answers>,
    now: Instant,
    scratch: &mut [u8],
) -> Flowed {
    for _ in 0..TURN {
        let mut wake = None;
        let mut moved = false;
        match pipe.next(now) {
            Next::Send(n) if to.writable => match to.send(&pipe.front()[..n]) {
                Some(n) => {
                    pipe.sent(n);
                    moved = to.writable;
                }
                // What it has said before it went is still to be read, on the other way.
                None => {
                    pipe.shut();
                    to.readable = true;
                    moved = true;
                }
            },
            Next::Send(_) | Next::Nothing => {}
            Next::Wait(until) => wake = Some(until),
            Next::Over(Ended::Reset) => return came_to(CameTo::Reset),
            Next::Over(Ended::Closed) => {
                to.shut();
                pipe.shut();
            }
            Next::Reached(end) => return came_to(CameTo::Reached(end)),
        }
        let room = pipe.room().min(scratch.len());
        if from.readable && room > 0 {
            moved = true;
            match from.receive(&mut scratch[..room]) {
                Received::Bytes(n) => match answers.as_deref_mut() {
                    Some(answers) => pipe.take(now, &answers.pass(&scratch[..n])),
                    None => pipe.take(now, &scratch[..n]),
                },
                Received::Nothing => {}
                Received::Ended(ended) => {
                    let rest = answers.as_deref_mut().map(Answers::rest).unwrap_or_default();
                    pipe.take(now, &rest);
                    pipe.end(ended);
                    if pipe.is_shut() && ended == Ended::Reset {
                        return came_to(CameTo::Reset);
                    }
                }
            }
        }
        if !moved {
            return Flowed { came_to: None, again: false, wake };
        }
    }
    Flowed { came_to: None, again: true, wake: None }
}

fn came_to(what: CameTo) -> Flowed {
    Flowed { came_to: Some(what), again: false, wake: None }
}

/// A buffer that is large enough for what a link reads at once.
pub(crate) fn scratch() -> Vec<u8> {
    vec![0; HELD]
}
