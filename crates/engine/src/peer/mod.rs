//! One remote segment: what is known of it, what waits for it, and which lanes go there.

mod backoff;
mod notify;
mod queue;
mod route;
mod stats;
mod submit;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_metadata::SegmentName;
use tensorferry_wire::{Frame, SegmentDescriptor, Version};

use crate::clock;
use crate::control::{self, Question};
use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::{Command, Offer};
use crate::log::Kind;
use crate::peer::backoff::Backoff;
use crate::peer::notify::Notifications;
use crate::peer::queue::{Queue, Work};
use crate::registry::BufferInfo;
use crate::spin::Spin;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Call, locked};
use crate::tcp::Room;
use crate::transfer::{BatchInner, Cause, Owner, Slice, Stop};

pub(crate) use route::Route;
pub(crate) use stats::Account;
pub use stats::{LaneState, LaneStats, LastError, PeerState, PeerStats};

pub(crate) struct Peer {
    name: Arc<str>,
    address: SegmentName,
    core: Arc<Core>,
    pub(crate) account: Account,
    /// Tells the peers of an engine apart.
    pub(crate) number: usize,
    /// The IO thread that looks after the queue.
    pub(crate) home: usize,
    state: Mutex<State>,
    /// The route changed, or the asking for it failed.
    asked: Condvar,
    /// Bookkeeping bytes of its batches that are not final.
    queued: AtomicUsize,
    /// A look at the queue is on its way to the home thread.
    kicked: Call,
    /// Other IO threads that have been told to look, as bits; there are at most 64.
    told: AtomicU64,
    notifications: Mutex<Notifications>,
    /// An idle lane on which a submitting thread may send.
    offered: Mutex<Option<Offer>>,
}

struct State {
    route: Option<Arc<Route>>,
    fetching: bool,
    /// Callers that wait for the answer.
    askers: usize,
    /// The peer has refused what the route lists.
    doubted: bool,
    fetch_error: Option<(Instant, Error)>,
    queue: Queue,
    /// The descriptor is not asked for anew while it rests: it was, and nothing had changed.
    asking: Backoff,
    /// When it will be, then.
    ask_at: Option<Instant>,
    /// Lanes open or connecting.
    lanes: usize,
    connecting: usize,
    /// Open lanes that take nothing on: they do not move, or are about to end.
    sidelined: usize,
    /// Connecting has failed since the last lane was open.
    redialled: bool,
    /// No lane is made while it rests: connecting failed while others were open, or lanes were made and nobody
    /// answered there.
    dialling: Backoff,
    /// Lanes that have closed and in whose place none was opened yet.
    closed: usize,
    /// Since when somebody was told that it cannot be reached; the next open lane says otherwise.
    unreachable_since: Option<Instant>,
}

/// How a lane has ended, for what is to come after it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Parting {
    /// It took nothing on any more.
    pub(crate) sidelined: bool,
    /// Whoever is at the other end left requests without an answer.
    pub(crate) silent: bool,
    /// It was for one request only, which is the way of v1.
    pub(crate) spent: bool,
}

/// What a look at the queue brought.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Pulled {
    /// The one request that was pulled needs the lane for itself.
    pub(crate) alone: bool,
    /// Enough was looked at for one time, but not all.
    pub(crate) more: bool,
    /// Something waits that was not taken: for a lane, or for a newer descriptor.
    pub(crate) left: bool,
}

/// How many requests one look settles or sets aside at most: it is done on an IO thread, under a lock.
const MAX_LOOKS: usize = 4096;
/// How often a slice shares a lane with others after it was behind a refused one.
const SHARED_TRIES: u8 = 4;
/// How long whoever waits for a descriptor waits at most.
const RESOLVED_AT_MOST: Duration = Duration::from_secs(15);
/// How long no lane is tried after one that was of no use, at first and at most. A peer that was frozen or unreachable
/// is back in use within a second.
const FIRST_REST: Duration = Duration::from_millis(25);
const LONGEST_REST: Duration = Duration::from_millis(800);
/// How long a descriptor is not asked for anew after it had not changed. A buffer that was registered a moment ago is
/// found within a tenth of a second.
const FIRST_ASK_REST: Duration = Duration::from_millis(5);
const LONGEST_ASK_REST: Duration = Duration::from_millis(40);
/// How many lanes there may be, in lanes that can be used: those that do not move are not closed while their peer may
/// only be frozen, and must not be all there is.
const WITH_SIDELINED: usize = 2;

impl Peer {
    pub(crate) fn new(core: Arc<Core>, address: SegmentName, number: usize) -> Arc<Self> {
        let home = number % core.mailboxes.len();
        Arc::new(Self {
            name: address.to_string().into(),
            address,
            core,
            account: Account::default(),
            number,
            home,
            state: Mutex::new(State::new()),
            asked: Condvar::new(),
            queued: AtomicUsize::new(0),
            kicked: Call::new(),
            told: AtomicU64::new(0),
            notifications: Mutex::default(),
            offered: Mutex::default(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn address(&self) -> &SegmentName {
        &self.address
    }

    /// Reserves room for a batch of so many requests.
    pub(crate) fn reserve(&self, requests: usize, wait_until: Option<Instant>) -> Result<()> {
        self.core.reserve(&self.name, &self.queued, requests, wait_until)
    }

    /// Gives back what was reserved.
    pub(crate) fn release(&self, requests: usize) {
        self.core.release(&self.queued, requests);
    }

    /// Has the home thread look at the queue.
    pub(crate) fn kick(self: &Arc<Self>) {
        if self.kicked.make() {
            self.core.mailboxes[self.home].post(Command::Kick(Arc::clone(self)));
        }
    }

    /// The home thread looks now; what comes after this kicks again.
    pub(crate) fn answer_kick(&self) {
        self.kicked.answer();
    }

    /// Waits until the descriptor is known. `anew`: until it was asked for after this call began.
    pub(crate) fn resolved(self: &Arc<Self>, anew: bool) -> Result<Arc<Route>> {
        let begin = clock::now();
        let mut state = self.lock();
        loop {
            self.core.check_usable()?;
            if let Some(route) = state.route.as_ref().filter(|r| !anew || r.asked >= begin) {
                return Ok(Arc::clone(route));
            }
            if let Some((_, error)) = state.fetch_error.as_ref().filter(|(at, _)| *at >= begin) {
                return Err(error.clone());
            }
            let after = begin.elapsed();
            if after >= RESOLVED_AT_MOST {
                // Asking ends by itself before; the answer names a host, and that is still looked up.
                let what = "looking up the host of its data port takes too long".to_owned();
                let (subject, peer) = (None, Arc::clone(&self.name));
                return Err(Error::PeerUnreachable { subject, peer, what, after });
            }
            self.ask(&mut state);
            // The step is for an engine that is closed meanwhile.
            state.askers += 1;
            let waited = self.asked.wait_timeout(state, Duration::from_millis(100));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.askers -= 1;
        }
    }

    /// The buffers that the peer publishes, asked for now.
    pub(crate) fn buffers(self: &Arc<Self>) -> Result<Vec<BufferInfo>> {
        Ok(self.resolved(true)?.buffers.clone())
    }

    /// Has the home thread ask for the descriptor, unless it is doing so.
    fn ask(self: &Arc<Self>, state: &mut State) {
        if !std::mem::replace(&mut state.fetching, true) {
            self.core.mailboxes[self.home].post(Command::Fetch(Arc::clone(self)));
        }
    }

    /// The same where the descriptor is known and may be out of date: whoever asks for what is not there again and again
    /// does not make it fly over again and again.
    fn ask_anew(self: &Arc<Self>, state: &mut State) {
        match state.asking.rests_until() {
            None => self.ask(state),
            // Once: whoever is kicked looks at the queue, and comes by here again.
            Some(at) if state.ask_at != Some(at) => {
                state.ask_at = Some(at);
                state.queue.note(at);
                self.kick();
            }
            Some(_) => {}
        }
    }

    /// The question for the descriptor, as nobody has asked it yet.
    pub(crate) fn question(self: &Arc<Self>) -> Arc<Question> {
        let asked = clock::now();
        let given_up = Arc::new(AtomicBool::new(false));
        let (peer, noted) = (Arc::clone(self), Arc::clone(&given_up));
        let stop = move || {
            let stop = !peer.lock().is_curious();
            // Relaxed: read by the one who stops because of it.
            noted.fetch_or(stop, Ordering::Relaxed);
            stop
        };
        let peer = Arc::clone(self);
        let answer = move |frame: Result<Frame>| match frame {
            Err(error) => peer.fetched(asked, given_up.load(Ordering::Relaxed), Err(error)),
            Ok(frame) => peer.read(asked, frame),
        };
        Arc::new(control::descriptor_question(&self.name, &self.address, stop, answer))
    }

    /// Has a pool read a descriptor, which may be long.
    fn read(self: &Arc<Self>, asked: Instant, frame: Frame) {
        let peer = Arc::clone(self);
        let read = move || match control::read_descriptor(&peer.name, &frame) {
            Ok(descriptor) => peer.find(asked, descriptor),
            Err(error) => peer.fetched(asked, false, Err(error)),
        };
        if !self.core.readers.run(read) {
            self.fetched(asked, false, Err(Error::Closed));
        }
    }

    /// Finds the addresses of the data port. A host that only the peer has named is looked up by threads of their own:
    /// its name servers may be of the peer's choice, and answer when they like.
    fn find(self: &Arc<Self>, asked: Instant, descriptor: SegmentDescriptor) {
        let (host, is_users) = control::data_host(&descriptor, &self.address);
        let (host, port) = (host.to_owned(), descriptor.tcp_data_port);
        let names = if is_users { &self.core.names } else { &self.core.strangers };
        let peer = Arc::clone(self);
        names.find(&host, port, move |found| {
            let Self { core, name, .. } = &*peer;
            let route = control::data_route(core, name, asked, &descriptor, found);
            peer.fetched(asked, false, route);
        });
    }

    /// The descriptor was asked for; `given_up`: nobody wanted to know it any more.
    fn fetched(self: &Arc<Self>, began: Instant, given_up: bool, fetched: Result<Route>) {
        let mut state = self.lock();
        state.fetching = false;
        if given_up && fetched.is_err() {
            // Nobody wanted to know, so nobody is told; somebody may have come since.
            state.queue.unpark();
            if state.is_curious() {
                self.ask(&mut state);
            }
            return;
        }
        state.doubted = false;
        state.queue.unpark();
        match fetched {
            Ok(route) => self.learned(state, route),
            Err(error) => self.not_told(state, began, error),
        }
        self.asked.notify_all();
        self.kick();
    }

    fn learned(&self, mut state: MutexGuard<'_, State>, route: Route) {
        let known = state.route.as_ref();
        let news = known.and_then(|known| route.news_since(known));
        let moved = known.is_some_and(|known| known.addrs != route.addrs);
        if known.is_none_or(|known| known.differs_from(&route)) || state.askers > 0 {
            state.asking.reset();
        } else {
            state.asking.grow(clock::now());
        }
        if moved {
            state.dialling.reset();
        }
        state.route = Some(Arc::new(route));
        state.fetch_error = None;
        drop(state);
        self.account.metrics.descriptors_fetched.add(1);
        if let Some(news) = news {
            self.core.log.info(Kind::Moved, &self.name, || format!("{} {news}", self.name));
        }
    }

    fn not_told(&self, mut state: MutexGuard<'_, State>, began: Instant, error: Error) {
        let mut orphans = Work::default();
        if state.route.is_none() {
            orphans = state.queue.take_all();
            state.unreachable_since.get_or_insert_with(clock::now);
        }
        state.redialled = false;
        state.fetch_error = Some((began, error.clone()));
        // Batches that fail by it say so. Others who ask are told by nobody else.
        let alone = state.route.is_none() && state.askers > 0 && orphans.is_empty();
        drop(state);
        if alone && !matches!(error, Error::Closed) {
            self.account.told(&self.core.log, &self.name, &error);
        }
        orphans.fail(&Cause::Whole(Arc::new(error)));
    }

    /// Moves slices from the queue to `out`, as many as `room` allows, and fails what cannot go.
    pub(crate) fn pull(self: &Arc<Self>, room: Room, now: Instant, out: &mut Vec<Slice>) -> Pulled {
        let (pulled, failed) = self.sort_out(room, now, out);
        failed.settle();
        pulled
    }

    /// The same, with what failed left to the caller, who is to settle it when no lock is held.
    fn sort_out(
        self: &Arc<Self>,
        room: Room,
        now: Instant,
        out: &mut Vec<Slice>,
    ) -> (Pulled, Failed) {
        let mut state = self.lock();
        let Some(route) = state.route.clone() else {
            let left = !state.queue.is_empty();
            return (Pulled { left, ..Pulled::default() }, Failed::default());
        };
        let (mut bytes, mut hint, mut looks) = (0, 0, 0);
        let (mut alone, mut failed) = (false, Vec::new());
        while out.len() < room.requests && bytes < room.bytes && looks < MAX_LOOKS && !alone {
            let Some(slice) = state.queue.next() else { break };
            match admit(&state, &route, &slice, now, &mut hint) {
                Admission::Fail(cause) => failed.push((slice, cause)),
                Admission::Wait => state.queue.park(slice),
                Admission::Alone if !room.empty || !out.is_empty() => {
                    state.queue.push_front(slice);
                    break;
                }
                admitted => {
                    alone = matches!(admitted, Admission::Alone);
                    let slice = state.queue.cut(slice, route.slice_len());
                    bytes += slice.len;
                    out.push(slice);
                    continue;
                }
            }
            looks += 1;
        }
        if state.queue.has_parked() {
            // The buffers may have been registered after the peer was asked: ask once more.
            self.ask_anew(&mut state);
        }
        let left = !state.queue.is_empty() || state.queue.has_parked();
        (Pulled { alone, more: looks == MAX_LOOKS, left }, Failed(failed))
    }

    /// Takes slices back that are to be sent again. Those whose batch was told to stop are settled here: whoever
    /// looks through queue and lanes for them may have been at the queue before, and at the lane after.
    pub(crate) fn requeue(self: &Arc<Self>, slices: &mut Vec<Slice>) {
        if slices.is_empty() {
            return;
        }
        let now = clock::now();
        let mut stopped = Vec::new();
        let mut state = self.lock();
        for slice in slices.drain(..).rev() {
            if let Some(stop) = slice.batch.stop_at(now) {
                stopped.push((slice, stop));
                continue;
            }
            self.account.metrics.retries.add(1);
            state.queue.push_front(slice);
        }
        drop(state);
        for (slice, stop) in stopped {
            slice.settle(Err(Cause::Stopped { stop, stage: QUEUED, sent: false }));
        }
        self.kick();
    }

    /// The peer refused what its descriptor lists: the descriptor is out of date.
    pub(crate) fn distrust(self: &Arc<Self>) {
        let mut state = self.lock();
        state.doubted = true;
        self.ask_anew(&mut state);
    }

    /// The earliest deadline of what has joined the queue since the last call.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.lock().queue.take_deadline()
    }

    /// Whether something waits that an open lane could take.
    pub(crate) fn wants_hands(&self) -> bool {
        let state = self.lock();
        let open = state.lanes > state.connecting;
        open && state.route.is_some() && !state.queue.is_empty()
    }

    /// True if IO thread `index` has not been told of the queue since it last looked.
    pub(crate) fn tell(&self, index: usize) -> bool {
        self.told.fetch_or(1 << index, Ordering::SeqCst) & (1 << index) == 0
    }

    /// IO thread `index` looks now; what comes after this tells it again.
    pub(crate) fn answer_tell(&self, index: usize) {
        self.told.fetch_and(!(1 << index), Ordering::SeqCst);
    }

    /// Whether nothing is to be done for it and nothing to be watched, apart from what is on its lanes.
    pub(crate) fn is_at_rest(&self) -> bool {
        let state = self.lock();
        let asks = state.ask_at.is_some();
        let resting = state.queue.is_empty() && !state.queue.has_parked() && !asks;
        drop(state);
        resting && locked(&self.notifications).is_empty()
    }

    /// Whether something waits in the queue.
    pub(crate) fn has_work(&self) -> bool {
        !self.lock().queue.is_empty()
    }

    pub(crate) fn route(&self) -> Option<Arc<Route>> {
        self.lock().route.clone()
    }

    /// Counts a new lane and says where it goes, and how many there were before, if one is needed.
    pub(crate) fn wants_lane(&self) -> Option<(Arc<Route>, usize)> {
        let mut state = self.lock();
        let most = self.core.config.lanes_per_peer;
        let enough = state.lanes - state.sidelined >= most || state.lanes >= WITH_SIDELINED * most;
        if state.queue.is_empty() || enough || state.dialling.rests_until().is_some() {
            return None;
        }
        let route = state.route.clone()?;
        // One at a time, but that every v1 request needs its own.
        let enough = match route.version {
            Version::V1 => state.queue.at_least(),
            Version::V2 => 1,
        };
        if state.connecting >= enough {
            return None;
        }
        state.lanes += 1;
        state.connecting += 1;
        Some((route, state.lanes - 1))
    }

    /// A lane that was counted was not made after all.
    pub(crate) fn lane_given_up(&self) {
        let mut state = self.lock();
        state.connecting -= 1;
        state.lanes -= 1;
    }

    /// A lane is connected.
    pub(crate) fn lane_opened(&self) {
        let mut state = self.lock();
        state.connecting -= 1;
        state.redialled = false;
        let replaces = state.closed > 0;
        state.closed -= usize::from(replaces);
        let unreachable_since = state.unreachable_since.take();
        drop(state);
        self.account.metrics.lanes_opened.add(1);
        self.account.metrics.reconnects.add(u64::from(replaces));
        if let Some(since) = unreachable_since {
            let text =
                || format!("{} can be reached again, after {:.1?}", self.name, clock::since(since));
            self.core.log.info(Kind::Reachable, &self.name, text);
        }
    }

    /// When another lane may be made, if something waits for that time.
    pub(crate) fn next_dial(&self) -> Option<Instant> {
        let state = self.lock();
        state.dialling.rests_until().filter(|_| !state.queue.is_empty())
    }

    /// An open lane takes nothing on for now.
    pub(crate) fn lane_sidelined(&self) {
        self.lock().sidelined += 1;
    }

    /// The peer has answered on a lane on which it had not for long, or never; `back`: which takes requests again.
    pub(crate) fn lane_answers(&self, back: bool) {
        let mut state = self.lock();
        state.sidelined -= usize::from(back);
        state.dialling.reset();
    }

    /// A lane that was connected is gone.
    pub(crate) fn lane_closed(&self, parting: Parting) {
        let mut state = self.lock();
        state.lanes -= 1;
        state.closed += usize::from(!parting.spent);
        state.sidelined -= usize::from(parting.sidelined);
        if parting.silent {
            state.dialling.grow(clock::now());
        }
        if state.lanes == 0 {
            state.redialled = false;
            if !parting.silent {
                // What was true of further lanes need not be true of the first.
                state.dialling.reset();
            }
        }
    }

    /// A lane could not be connected at any address. The first time the descriptor is asked for anew, since
    /// the peer may have moved; the second time the peer is unreachable.
    pub(crate) fn lane_failed(self: &Arc<Self>, addr: SocketAddr, why: &str, after: Duration) {
        self.account.metrics.connects_failed.add(1);
        let mut state = self.lock();
        state.connecting -= 1;
        state.lanes -= 1;
        if state.lanes > 0 {
            // Those that are open go on. The peer may have moved without their knowing.
            state.dialling.grow(clock::now());
            if !std::mem::replace(&mut state.redialled, true) {
                self.ask(&mut state);
            }
            return;
        }
        let mut orphans = Work::default();
        if state.redialled {
            orphans = state.queue.take_all();
            state.redialled = false;
            state.unreachable_since.get_or_insert_with(clock::now);
        } else {
            state.redialled = true;
        }
        state.route = None;
        if !state.queue.is_empty() {
            self.ask(&mut state);
        }
        drop(state);
        let what = format!("connecting to its data port at {addr} failed ({why})");
        let error =
            Error::PeerUnreachable { subject: None, peer: Arc::clone(&self.name), what, after };
        orphans.fail(&Cause::Whole(Arc::new(error)));
    }

    /// Settles what waits here and is to stop. Returns the next deadline of what is left.
    pub(crate) fn sweep(self: &Arc<Self>, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        if state.ask_at.is_some_and(|at| at <= now) {
            state.ask_at = None;
            if state.doubted || state.queue.has_parked() {
                self.ask(&mut state);
            }
        }
        let ask_at = state.ask_at;
        let stage = state.stage();
        let stopped = state.queue.take_stopped(now);
        let next = state.queue.batches().map(|b| b.deadline).min();
        drop(state);
        stopped.fail_stopped(now, stage);
        let next_notification = self.sweep_notifications(now);
        next.into_iter().chain(next_notification).chain(ask_at).min()
    }

    /// Has every waiting batch stop.
    pub(crate) fn stop_all(&self, stop: Stop) {
        let work = self.lock().queue.take_all();
        work.fail(&Cause::Stopped { stop, stage: QUEUED, sent: false });
        self.asked.notify_all();
        self.drop_notifications();
    }

    /// Has the waiting batches stop whose local ranges pin the buffer at `addr`.
    pub(crate) fn revoke(&self, addr: u64) {
        let state = self.lock();
        for batch in state.queue.batches() {
            if batch.pins_buffer(addr) {
                batch.request_stop(Stop::Unregistered);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn census(&self) -> Census {
        let state = self.lock();
        Census {
            waiting: state.queue.at_least() + usize::from(state.queue.has_parked()),
            lanes: state.lanes,
            connecting: state.connecting,
            reserved: self.queued.load(Ordering::SeqCst),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

/// What a peer has at some moment.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Census {
    pub(crate) waiting: usize,
    pub(crate) lanes: usize,
    pub(crate) connecting: usize,
    pub(crate) reserved: usize,
}

impl Owner for Peer {
    fn peer(&self) -> &Arc<str> {
        &self.name
    }

    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
        self.send_behind(batch);
    }

    fn spin(&self) -> &Spin {
        &self.core.spin
    }

    fn stopped(&self, _: &Arc<BatchInner>) {
        self.core.broadcast(|| Command::Sweep);
    }

    fn finished(&self, batch: &BatchInner) {
        self.release(batch.len());
        if let Some(failed) = batch.count(&self.account.metrics) {
            self.account.batch_failed(&self.core.log, &self.name, &failed);
        }
    }
}

enum Admission {
    Go,
    /// It may go if nothing else is in flight on its lane.
    Alone,
    /// Not before the descriptor was asked for anew.
    Wait,
    Fail(Cause),
}

fn admit(state: &State, route: &Route, slice: &Slice, now: Instant, hint: &mut usize) -> Admission {
    let batch = &slice.batch;
    if let Some(stop) = batch.stop_at(now) {
        return Admission::Fail(Cause::Stopped { stop, stage: QUEUED, sent: false });
    }
    if batch.has_failed(slice.entry) {
        // Its first failure is on record; this one only settles the slice.
        return Admission::Fail(Cause::NotPublished);
    }
    let request = batch.request(slice.entry);
    if route.covers(request.remote, request.len, hint) {
        // What was behind refusals so often goes alone, so that it cannot be again.
        return if slice.tries < SHARED_TRIES { Admission::Go } else { Admission::Alone };
    }
    if route.truncated {
        return Admission::Alone;
    }
    if route.asked >= batch.started {
        return Admission::Fail(Cause::NotPublished);
    }
    if let Some((_, error)) = state.fetch_error.as_ref().filter(|(at, _)| *at >= batch.started) {
        return Admission::Fail(Cause::Whole(Arc::new(error.clone())));
    }
    Admission::Wait
}

/// Slices that cannot go, and why.
#[derive(Default)]
struct Failed(Vec<(Slice, Cause)>);

impl Failed {
    /// Not under a lock: the last of a batch ends it, and whoever is told of that may do anything.
    fn settle(self) {
        for (slice, cause) in self.0 {
            slice.settle(Err(cause));
        }
    }
}

const QUEUED: &str = "it waited in the queue for a lane";

impl State {
    fn new() -> Self {
        Self {
            route: None,
            fetching: false,
            askers: 0,
            doubted: false,
            fetch_error: None,
            queue: Queue::default(),
            asking: Backoff::new(FIRST_ASK_REST, LONGEST_ASK_REST),
            ask_at: None,
            lanes: 0,
            connecting: 0,
            sidelined: 0,
            redialled: false,
            dialling: Backoff::new(FIRST_REST, LONGEST_REST),
            closed: 0,
            unreachable_since: None,
        }
    }

    /// Whether anybody still wants an answer from the control port.
    fn is_curious(&self) -> bool {
        self.askers > 0 || self.doubted || self.queue.has_parked() || !self.queue.is_empty()
    }

    /// How it looks to operators.
    fn seen(&self) -> PeerState {
        match () {
            () if self.lanes > self.connecting => PeerState::Connected,
            () if self.lanes > 0 => PeerState::Connecting,
            () if self.fetching && self.route.is_none() => PeerState::Resolving,
            () if self.unreachable_since.is_some() => PeerState::Unreachable,
            () if self.route.is_some() => PeerState::Idle,
            () => PeerState::Unknown,
        }
    }

    /// What a waiting request is waiting for.
    fn stage(&self) -> &'static str {
        if self.fetching || self.ask_at.is_some() {
            "the peer's control port had not answered with its descriptor"
        } else if self.lanes > 0 && self.lanes == self.connecting {
            "no connection to its data port had been made"
        } else {
            QUEUED
        }
    }
}
