//! One request to a peer's control port, and whoever waits for the answer.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use tensorferry_metadata::SegmentName;
use tensorferry_wire::{CONTROL_PREFIX_LEN, Frame, WireError, encode_frame};

use crate::clock;
use crate::error::{Error, Result};
use crate::sync::{Mutex, locked};

type Answer = Box<dyn FnOnce(Result<Frame>) + Send>;

/// A request, until it is answered. It is answered once: by a frame, by what went wrong, or, if it is dropped, by
/// [`Error::Closed`].
pub(crate) struct Question {
    peer: Arc<str>,
    pub(crate) name: SegmentName,
    what: &'static str,
    pub(crate) request: Vec<u8>,
    pub(crate) deadline: Instant,
    began: Instant,
    repeatable: bool,
    stop: Box<dyn Fn() -> bool + Send + Sync>,
    answer: Mutex<Option<Answer>>,
}

/// How far a question had come when it failed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Finding,
    Connecting(SocketAddr),
    Sending(SocketAddr),
    Waiting(SocketAddr),
}

/// Why a question failed.
pub(crate) enum Failure {
    TimedOut,
    Stopped,
    Io(std::io::Error),
}

impl Question {
    pub(crate) fn new(
        (peer, name): (&Arc<str>, &SegmentName),
        what: &'static str,
        request: Vec<u8>,
        deadline: Instant,
        stop: impl Fn() -> bool + Send + Sync + 'static,
        answer: impl FnOnce(Result<Frame>) + Send + 'static,
    ) -> Self {
        Self {
            peer: Arc::clone(peer),
            name: name.clone(),
            what,
            request,
            deadline,
            began: clock::now(),
            repeatable: false,
            stop: Box::new(stop),
            answer: Mutex::new(Some(Box::new(answer))),
        }
    }

    /// It changes nothing at the peer, so that it may be asked twice.
    pub(crate) fn repeatable(mut self) -> Self {
        self.repeatable = true;
        self
    }

    pub(crate) fn may_be_repeated(&self) -> bool {
        self.repeatable
    }

    /// Whether nobody wants the answer any more, or it would come too late.
    pub(crate) fn is_over(&self, now: Instant) -> Option<Failure> {
        if now >= self.deadline {
            Some(Failure::TimedOut)
        } else {
            (self.stop)().then_some(Failure::Stopped)
        }
    }

    /// Whether it was answered.
    pub(crate) fn is_answered(&self) -> bool {
        locked(&self.answer).is_none()
    }

    /// Answers it, unless somebody did.
    pub(crate) fn settle(&self, result: Result<Frame>) {
        let answer = locked(&self.answer).take();
        if let Some(answer) = answer {
            answer(result);
        }
    }

    pub(crate) fn fail(&self, step: Step, why: Failure) {
        let (doing, at) = match step {
            Step::Finding => ("finding", None),
            Step::Connecting(at) => ("connecting to", Some(at)),
            Step::Sending(at) => ("sending to", Some(at)),
            Step::Waiting(at) => ("waiting for", Some(at)),
        };
        let at = at.map(|at| format!(" at {at}")).unwrap_or_default();
        let what = format!("{doing} its control port{at} {why}");
        let after = clock::since(self.began);
        self.settle(Err(Error::PeerUnreachable {
            subject: None,
            peer: Arc::clone(&self.peer),
            what,
            after,
        }));
    }

    /// A frame has come: the answer, if it is of the kind that was asked with.
    pub(crate) fn hear(&self, frame: Frame) {
        let kind = |frame: &[u8]| frame.get(CONTROL_PREFIX_LEN).copied();
        if kind(&encode_frame(frame.kind, b"")) == kind(&self.request) {
            self.settle(Ok(frame));
        } else {
            self.misunderstand(WireError::OtherKind { got: frame.kind });
        }
    }

    /// The answer is not one.
    pub(crate) fn misunderstand(&self, fault: WireError) {
        self.settle(Err(Error::BadAnswer {
            subject: None,
            peer: Arc::clone(&self.peer),
            what: self.what,
            fault,
        }));
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.settle(Err(Error::Closed));
    }
}

impl Failure {
    /// Whether the peer's machine said that nobody listens.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Io(e) if e.kind() == std::io::ErrorKind::ConnectionRefused)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("took too long"),
            Self::Stopped => f.write_str("was given up"),
            Self::Io(e) => write!(f, "failed ({e})"),
        }
    }
}
