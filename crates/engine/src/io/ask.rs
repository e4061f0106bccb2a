//! Driving connections to a peer's control port: one question, one answer.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_metadata::resolve_literal;
use tensorferry_wire::FrameReader;

use crate::control::{Failure, Question, Step};
use crate::error::{Error, Result};
use crate::io::conns::{Conn, Fate};
use crate::io::mailbox::Command;
use crate::io::thread::Reactor;
use crate::memory::Span;

/// How many questions a thread asks at the same time; more wait.
const MAX_ASKING: usize = 256;
/// How many bytes of answers that are not complete a thread holds.
const MAX_KEPT: usize = 128 << 20;
/// How long an answer is waited for before the peer is asked once more, over another connection: it may have been out of
/// reach and be back, with nothing left there of the connection before. The first one stays, since a peer may also be
/// slow, and answer one after the other; further ones take the place of each other.
const ASK_AGAIN: Duration = Duration::from_millis(500);

/// A question that is not answered.
pub(crate) struct Asked {
    question: Arc<Question>,
    /// Where the peer may be; none before that is known.
    addrs: Vec<SocketAddr>,
    /// How often it was asked.
    calls: u32,
    /// When it is asked again.
    again: Option<Instant>,
}

pub(crate) struct AskConn {
    question: Arc<Question>,
    /// Which time of asking it is, from 1.
    call: u32,
    /// Another one has taken its place.
    replaced: bool,
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
        if let Some(why) = question.is_over(self.now) {
            // It was given up on its way here, where no sweep sees it.
            question.fail(Step::Finding, why);
            return;
        }
        let (host, port) = (question.name.host.clone(), question.name.port);
        self.sweep_by(question.deadline);
        self.questions.push(Asked::new(&question));
        if let Some(found) = resolve_literal(&host, port) {
            return self.found(question, found.map_err(Error::from));
        }
        let mailbox = Arc::clone(self.mailbox());
        let asked = Arc::clone(&question);
        self.core.names.find(&host, port, move |found| {
            mailbox.post(Command::Found(asked, found));
        });
    }

    /// The peer was looked up: connects to it, as soon as that is not one connection too many.
    pub(super) fn found(&mut self, question: Arc<Question>, found: Result<Vec<SocketAddr>>) {
        match found {
            Err(error) => {
                question.settle(Err(error));
                self.forget_answered();
            }
            Ok(addrs) if self.asking < MAX_ASKING => self.call_first(question, addrs),
            Ok(addrs) => self.to_call.push_back((question, addrs)),
        }
    }

    fn forget_answered(&mut self) {
        self.questions.retain(|asked| !asked.question.is_answered());
    }

    fn call_first(&mut self, question: Arc<Question>, addrs: Vec<SocketAddr>) {
        let again = question.may_be_repeated().then_some(self.now + ASK_AGAIN);
        if let Some(asked) = self.questions.iter_mut().find(|asked| asked.is_of(&question)) {
            asked.addrs.clone_from(&addrs);
            asked.again = again;
        }
        again.into_iter().for_each(|at| self.sweep_by(at));
        self.call(question, addrs, 0, 1);
    }

    /// Asks again where no answer has come for a while.
    fn call_again(&mut self) {
        // Peers that answer come first.
        let room = MAX_ASKING / 2;
        let mut due = Vec::new();
        for asked in &mut self.questions {
            if asked.again.is_some_and(|at| at <= self.now) {
                asked.again = Some(self.now + ASK_AGAIN);
                if self.asking + due.len() < room {
                    asked.calls += 1;
                    due.push((Arc::clone(&asked.question), asked.addrs.clone(), asked.calls));
                }
            }
        }
        for (question, addrs, call) in due {
            for token in self.ask_tokens(&question) {
                let Some(conn) = self.conn(token) else { continue };
                conn.ask().replaced = conn.ask().call > 1;
                self.make_ready(token);
            }
            self.call(question, addrs, 0, call);
        }
    }

    fn call(&mut self, question: Arc<Question>, addrs: Vec<SocketAddr>, mut at: usize, call: u32) {
        let mut failure = (Step::Finding, Failure::Stopped);
        while let Some(&addr) = addrs.get(at).filter(|_| !question.is_answered()) {
            let until = question.deadline.min(self.now + self.core.config.connect_timeout);
            let added = self.connect_to(addr).and_then(|socket| {
                let phase = Phase::Connecting { until };
                let addrs = addrs.clone();
                let (question, replaced) = (Arc::clone(&question), false);
                let conn = AskConn { question, call, replaced, addrs, at, phase };
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
        if call == 1 || failure.1.is_refusal() {
            question.fail(failure.0, failure.1);
            self.wake_answered();
        }
    }

    /// What still asks a question that is answered has nothing left to do.
    fn wake_answered(&mut self) {
        self.forget_answered();
        for token in self.answered_asks() {
            self.make_ready(token);
        }
    }

    /// A connection of a question is closed: the next of those that wait can be made.
    pub(super) fn ask_gone(&mut self, ask: &AskConn) {
        self.asking -= 1;
        self.answer_bytes -= ask.kept();
        self.wake_answered();
        if let Some((question, addrs)) = self.to_call.pop_front() {
            self.call_first(question, addrs);
        }
    }

    /// Ends the questions that are past their deadline, or that nobody wants answered; returns the next deadline.
    pub(super) fn sweep_questions(&mut self) -> Option<Instant> {
        for asked in &self.questions {
            if let Some(why) = asked.question.is_over(self.now) {
                self.over.push((Arc::clone(&asked.question), why));
            }
        }
        for (question, why) in std::mem::take(&mut self.over) {
            // What was reached of it says more, if there is a connection.
            let first = self.ask_tokens(&question).into_iter().next();
            let step = first.and_then(|token| self.conn(token)).map(|conn| conn.ask().step());
            question.fail(step.unwrap_or(Step::Finding), why);
        }
        self.wake_answered();
        self.to_call.retain(|(question, _)| !question.is_answered());
        self.call_again();
        let times = |asked: &Asked| asked.again.into_iter().chain([asked.question.deadline]);
        self.questions.iter().flat_map(times).min()
    }

    pub(super) fn drive_ask(&mut self, conn: &mut Conn) -> Fate {
        if conn.ask().question.is_answered() || conn.ask().replaced {
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
        let AskConn { question, addrs, at, phase, call, .. } = conn.ask();
        let more = *at + 1 < addrs.len() && matches!(phase, Phase::Connecting { .. });
        if more && question.is_over(self.now).is_none() {
            let (question, addrs, at) = (Arc::clone(question), std::mem::take(addrs), *at + 1);
            self.call(question, addrs, at, *call);
        } else if self.is_decisive(conn.ask(), &why) {
            let step = conn.ask().step();
            conn.ask().question.fail(step, why);
        }
        Fate::Close
    }

    /// Whether the end of one connection is an answer to its question, though it may be asked over another as well.
    fn is_decisive(&self, ask: &AskConn, why: &Failure) -> bool {
        let newest = self
            .questions
            .iter()
            .all(|asked| !asked.is_of(&ask.question) || asked.calls == ask.call);
        let mut others = self.asks().filter(|other| other.is_of(&ask.question) && !other.replaced);
        match ask.phase {
            // Nobody is there now, whoever was before.
            Phase::Connecting { .. } if why.is_refusal() => newest,
            Phase::Connecting { .. } => {
                ask.call == 1 && others.all(|other| matches!(other.phase, Phase::Connecting { .. }))
            }
            Phase::Sending { .. } | Phase::Receiving(_) => others.next().is_none(),
        }
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
                    let before = reader.kept();
                    let fed = reader.feed(&self.scratch.receive[..n]);
                    self.answer_bytes = self.answer_bytes - before + reader.kept();
                    match fed {
                        Ok((_, None)) if self.answer_bytes > MAX_KEPT => {
                            let text = "unfinished answers take up all the memory for them; try again later";
                            return Err(io::Error::other(text));
                        }
                        Ok((_, None)) => {}
                        Ok((_, Some(frame))) => question.hear(frame),
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

impl Asked {
    fn new(question: &Arc<Question>) -> Self {
        Self { question: Arc::clone(question), addrs: Vec::new(), calls: 1, again: None }
    }

    fn is_of(&self, question: &Arc<Question>) -> bool {
        Arc::ptr_eq(&self.question, question)
    }

    pub(super) fn close(self) {
        self.question.settle(Err(Error::Closed));
    }
}

impl AskConn {
    pub(super) fn is_answered(&self) -> bool {
        self.question.is_answered()
    }

    pub(super) fn is_of(&self, question: &Arc<Question>) -> bool {
        Arc::ptr_eq(&self.question, question)
    }

    /// Bytes of its answer that are held.
    fn kept(&self) -> usize {
        match &self.phase {
            Phase::Receiving(reader) => reader.kept(),
            Phase::Connecting { .. } | Phase::Sending { .. } => 0,
        }
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
