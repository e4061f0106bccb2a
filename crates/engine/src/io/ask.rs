//! Driving a connection to a peer's control port: one question, one answer.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tensorferry_metadata::{resolve, resolve_literal};
use tensorferry_wire::FrameReader;

use crate::control::{Failure, Question, Step};
use crate::error::{Error, Result};
use crate::io::mailbox::Command;
use crate::io::thread::{Conn, Fate, Reactor};
use crate::memory::Span;

/// How many questions a thread asks at the same time; more wait.
const MAX_ASKING: usize = 256;

pub(crate) struct AskConn {
    question: Arc<Question>,
    /// Where the peer may be, and which of them this connection goes to.
    addrs: Vec<SocketAddr>,
    at: usize,
    phase: Phase,
}

enum Phase {
    Connecting { until: Instant },
    Sending { sent: usize },
    Receiving(FrameReader),
}

impl Reactor {
    /// Finds where the peer is; a name is looked up by the pool, which may take long.
    pub(super) fn ask(&mut self, question: Arc<Question>) {
        let (host, port) = (question.name.host.clone(), question.name.port);
        self.sweep_by(question.deadline);
        self.questions.push(Arc::clone(&question));
        if let Some(found) = resolve_literal(&host, port) {
            return self.found(question, found.map_err(Error::from));
        }
        let mailbox = Arc::clone(self.mailbox());
        let asked = Arc::clone(&question);
        let look_up = move || {
            let found = resolve(&host, port).map_err(Error::from);
            mailbox.post(Command::Found(asked, found));
        };
        if !self.core.pool.run(look_up) {
            question.settle(Err(Error::Closed));
        }
    }

    /// The peer was looked up: connects to it, as soon as that is not one connection too many.
    pub(super) fn found(&mut self, question: Arc<Question>, found: Result<Vec<SocketAddr>>) {
        match found {
            Err(error) => {
                question.settle(Err(error));
                self.forget_answered();
            }
            Ok(addrs) if self.asking < MAX_ASKING => self.call(question, addrs, 0),
            Ok(addrs) => self.to_call.push_back((question, addrs)),
        }
    }

    fn forget_answered(&mut self) {
        self.questions.retain(|question| !question.is_answered());
    }

    fn call(&mut self, question: Arc<Question>, addrs: Vec<SocketAddr>, mut at: usize) {
        let mut failure = (Step::Finding, Failure::Stopped);
        while let Some(&addr) = addrs.get(at).filter(|_| !question.is_answered()) {
            let until = question.deadline.min(self.now + self.core.config.connect_timeout);
            let added = self.connect_to(addr).and_then(|socket| {
                let phase = Phase::Connecting { until };
                let addrs = addrs.clone();
                let conn = AskConn { question: Arc::clone(&question), addrs, at, phase };
                self.add_ask(socket, conn, until).ok_or(io::ErrorKind::OutOfMemory.into())
            });
            match added {
                Ok(_) => {
                    self.asking += 1;
                    return;
                }
                Err(error) => failure = (Step::Connecting(addr), Failure::Io(error)),
            }
            at += 1;
        }
        question.fail(failure.0, failure.1);
        self.forget_answered();
    }

    /// A connection of a question is closed: the next of those that wait can be made.
    pub(super) fn ask_gone(&mut self) {
        self.asking -= 1;
        self.forget_answered();
        if let Some((question, addrs)) = self.to_call.pop_front() {
            self.call(question, addrs, 0);
        }
    }

    /// Ends the questions that are past their deadline, or that nobody wants answered; returns the next deadline.
    pub(super) fn sweep_questions(&mut self) -> Option<Instant> {
        for question in &self.questions {
            if let Some(why) = question.is_over(self.now) {
                // What was reached of it says more, if there is a connection.
                self.over.push((Arc::clone(question), why));
            }
        }
        for (question, why) in std::mem::take(&mut self.over) {
            match self.ask_token(&question) {
                Some(token) => {
                    let step = self.conn(token).map_or(Step::Finding, |conn| conn.ask().step());
                    question.fail(step, why);
                    self.make_ready(token);
                }
                None => question.fail(Step::Finding, why),
            }
        }
        self.forget_answered();
        self.to_call.retain(|(question, _)| !question.is_answered());
        self.questions.iter().map(|question| question.deadline).min()
    }

    pub(super) fn drive_ask(&mut self, conn: &mut Conn) -> Fate {
        if conn.ask().question.is_answered() {
            return Fate::Close;
        }
        match self.ask_steps(conn) {
            Ok(()) => Fate::Close,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.look_at_connecting(conn),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Fate::Again,
            Err(e) => self.ask_failed(conn, Failure::Io(e)),
        }
    }

    fn look_at_connecting(&mut self, conn: &mut Conn) -> Fate {
        match conn.ask().phase {
            Phase::Connecting { until } if until <= self.now => {
                self.ask_failed(conn, Failure::TimedOut)
            }
            _ => Fate::Wait,
        }
    }

    /// Tries the next address, if it was the connecting that failed; else that is the answer.
    fn ask_failed(&mut self, conn: &mut Conn, why: Failure) -> Fate {
        let AskConn { question, addrs, at, phase } = conn.ask();
        let more = *at + 1 < addrs.len() && matches!(phase, Phase::Connecting { .. });
        if more && question.is_over(self.now).is_none() {
            let (question, addrs, at) = (Arc::clone(question), std::mem::take(addrs), *at + 1);
            self.call(question, addrs, at);
        } else {
            let step = conn.ask().step();
            conn.ask().question.fail(step, why);
        }
        Fate::Close
    }

    /// Goes on until the question is answered, or as far as the socket goes (`WouldBlock`).
    fn ask_steps(&mut self, conn: &mut Conn) -> io::Result<()> {
        let socket = conn.socket.clone();
        loop {
            let AskConn { question, phase, .. } = conn.ask();
            match phase {
                Phase::Connecting { .. } => {
                    if !socket.connected()? {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    *phase = Phase::Sending { sent: 0 };
                    // From here on the question's own deadline counts.
                    conn.set_due(None);
                }
                Phase::Sending { sent } if *sent < question.request.len() => {
                    *sent += socket.send(&[Span::of(&question.request[*sent..])])?;
                }
                Phase::Sending { .. } => {
                    let limit = self.core.config.control_accept_limit;
                    *phase = Phase::Receiving(FrameReader::new(limit));
                }
                Phase::Receiving(reader) => {
                    let n = socket.receive_bytes(&mut self.scratch.receive)?;
                    if n == 0 {
                        let text = "it closed the connection without an answer";
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
                    }
                    match reader.feed(&self.scratch.receive[..n]) {
                        Ok((_, None)) => {}
                        Ok((_, Some(frame))) => question.settle(Ok(frame)),
                        Err(fault) => question.misunderstand(fault),
                    }
                    if question.is_answered() {
                        return Ok(());
                    }
                }
            }
        }
    }
}

impl AskConn {
    pub(super) fn is_of(&self, question: &Arc<Question>) -> bool {
        Arc::ptr_eq(&self.question, question)
    }

    fn step(&self) -> Step {
        let addr = self.addrs.get(self.at).copied().unwrap_or_else(|| ([0, 0, 0, 0], 0).into());
        match self.phase {
            Phase::Connecting { .. } => Step::Connecting(addr),
            Phase::Sending { .. } => Step::Sending(addr),
            Phase::Receiving(_) => Step::Waiting(addr),
        }
    }
}
