//! What operators see of a peer.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensorferry_wire::Version;

use crate::clock;
use crate::core::REQUEST_BYTES;
use crate::error::Error;
use crate::log::{Kind, Log};
use crate::metrics::{PeerCounters, PeerMetrics};
use crate::peer::Peer;
use crate::sync::locked;
use crate::transfer::FailedBatch;

/// Where an engine stands with one peer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerStats {
    /// Its segment name.
    pub name: Arc<str>,
    /// How it can be reached.
    pub state: PeerState,
    /// The connections that carry requests to it.
    pub lanes: Vec<LaneStats>,
    /// False: some IO thread did not answer in time, and its lanes are missing.
    pub lanes_known: bool,
    /// Requests that are not final: those that wait, and those that are in flight.
    pub requests_running: u64,
    /// Batches of which something waits for a lane.
    pub batches_queued: u64,
    /// Requests, or parts of them, that wait for a lane.
    pub requests_queued: u64,
    /// Bytes that wait for a lane.
    pub bytes_queued: u64,
    /// Notifications that wait for earlier ones to be delivered.
    pub notifications_queued: u64,
    /// How long ago its descriptor was asked for that is in use; `None`: none is known.
    pub descriptor_age: Option<Duration>,
    /// In how long another lane is tried, since the last could not be made, or was not answered on; `None`: nothing is
    /// held back.
    pub next_lane_in: Option<Duration>,
    /// The last failure that a caller was told of, apart from cancelling and closing.
    pub last_error: Option<LastError>,
    /// What was done with it.
    pub counters: PeerCounters,
}

/// How a peer can be reached.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PeerState {
    /// Nobody has asked it for anything yet.
    Unknown,
    /// Its control port is being asked for its descriptor, and none is known.
    Resolving,
    /// Its descriptor is known, and there is no lane, since none is needed.
    Idle,
    /// A lane is being made, and none is open.
    Connecting,
    /// At least one lane is open.
    Connected,
    /// The last attempt to reach it failed. The next transfer tries again.
    Unreachable,
    /// It is the engine itself.
    Local,
}

/// One connection to a peer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaneStats {
    /// The peer's end.
    pub address: SocketAddr,
    /// The version of the protocol that is spoken on it.
    pub version: Version,
    /// What it is doing.
    pub state: LaneState,
    /// Why it takes no more requests; it is closed when those that it has are done.
    pub closing: Option<&'static str>,
    /// The IO thread that owns it, from 0.
    pub io_thread: usize,
    /// Slices that have no answer yet.
    pub slices_in_flight: u64,
    /// Their bytes.
    pub bytes_in_flight: u64,
    /// Slices that were answered, whatever the answer.
    pub slices_done: u64,
    /// Their bytes.
    pub bytes_done: u64,
    /// How long ago anything moved on it.
    pub quiet_for: Duration,
}

/// What a lane is doing.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum LaneState {
    /// It is being connected.
    Connecting,
    /// It is open, and nothing is in flight.
    Idle,
    /// Requests are in flight.
    Busy,
    /// Requests are in flight, and nothing has moved for a second; it takes nothing on until something does.
    Stalled,
}

/// A failure that a caller was told of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LastError {
    /// As [`Error::code`].
    pub code: u32,
    /// As the caller was told.
    pub text: String,
    /// How long ago.
    pub age: Duration,
}

impl LaneState {
    pub(crate) fn of(is_open: bool, held: bool, in_flight: u64) -> Self {
        match () {
            () if !is_open => Self::Connecting,
            () if in_flight == 0 => Self::Idle,
            () if held => Self::Stalled,
            () => Self::Busy,
        }
    }

    /// As programs read it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Stalled => "stalled",
        }
    }
}

impl PeerState {
    /// As programs read it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Resolving => "resolving",
            Self::Idle => "idle",
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Unreachable => "unreachable",
            Self::Local => "local",
        }
    }
}

/// What was done with a peer, and what went wrong last.
#[derive(Default)]
pub(crate) struct Account {
    pub(crate) metrics: PeerMetrics,
    failed: Mutex<Option<(Instant, u32, String)>>,
}

impl Account {
    /// Somebody is told that what he asked of the peer failed.
    #[cold]
    pub(crate) fn told(&self, log: &Log, peer: &str, error: &Error) {
        self.note(log, peer, error, error.to_string());
    }

    /// A batch for the peer has failed.
    #[cold]
    pub(crate) fn batch_failed(&self, log: &Log, peer: &str, failed: &FailedBatch) {
        if failed.is_wanted() {
            return tracing::debug!("{failed}");
        }
        self.note(log, peer, &failed.first, failed.to_string());
    }

    fn note(&self, log: &Log, peer: &str, error: &Error, line: String) {
        *locked(&self.failed) = Some((clock::now(), error.code(), error.to_string()));
        log.warn(Kind::Failure(error.code()), peer, || line);
    }

    /// All that is known of a peer of which nothing else is.
    pub(crate) fn stats(&self, name: &Arc<str>, state: PeerState) -> PeerStats {
        let last = locked(&self.failed).clone();
        PeerStats {
            name: Arc::clone(name),
            state,
            lanes: Vec::new(),
            lanes_known: true,
            requests_running: 0,
            batches_queued: 0,
            requests_queued: 0,
            bytes_queued: 0,
            notifications_queued: 0,
            descriptor_age: None,
            next_lane_in: None,
            last_error: last.map(|(at, code, text)| LastError {
                code,
                text,
                age: clock::since(at),
            }),
            counters: self.metrics.counters(),
        }
    }
}

impl Peer {
    pub(crate) fn counters(&self) -> PeerCounters {
        self.account.metrics.counters()
    }

    /// All but its lanes, which IO threads own.
    pub(crate) fn stats(&self) -> PeerStats {
        let mut stats = self.account.stats(&self.name, PeerState::Unknown);
        let now = clock::now();
        let state = self.lock();
        stats.state = state.seen();
        stats.descriptor_age = state.route.as_ref().map(|r| now.saturating_duration_since(r.asked));
        stats.next_lane_in =
            state.dialling.rests_until().and_then(|at| at.checked_duration_since(now));
        let waiting = state.queue.waiting();
        drop(state);
        // Counted without the lock: a queue can be long.
        (stats.batches_queued, stats.requests_queued, stats.bytes_queued) = waiting.count();
        stats.requests_running = (self.queued.load(Ordering::Relaxed) / REQUEST_BYTES) as u64;
        stats.notifications_queued = locked(&self.notifications).waiting() as u64;
        stats
    }
}
