//! One remote segment: what is known of it, what waits for it, and which lanes go there.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_metadata::SegmentName;
use tensorferry_wire::{SegmentDescriptor, Version};

use crate::control;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::Command;
use crate::registry::BufferInfo;
use crate::tcp::Room;
use crate::transfer::{BatchInner, Cause, Owner, Slice, Stop};

/// What a descriptor said, ready for use.
pub(crate) struct Route {
    pub(crate) version: Version,
    /// Where the data port may be; never empty.
    pub(crate) addrs: Vec<SocketAddr>,
    /// As published.
    buffers: Vec<BufferInfo>,
    /// By address.
    sorted: Vec<BufferInfo>,
    /// The peer has more buffers than it could list.
    truncated: bool,
    /// When the asking began: what was registered before is in it.
    asked: Instant,
}

pub(crate) struct Peer {
    name: Arc<str>,
    address: SegmentName,
    core: Arc<Core>,
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
    kicked: AtomicBool,
    /// Other IO threads that have been told to look, as bits; there are at most 64.
    told: AtomicU64,
    notifications: Mutex<Notifications>,
}

#[derive(Default)]
struct State {
    route: Option<Arc<Route>>,
    fetching: bool,
    /// How many times asking has ended.
    fetches: u64,
    fetch_error: Option<(Instant, Error)>,
    /// Requests wait for a newer route.
    stale: bool,
    /// To be sent again, before anything else.
    requeued: VecDeque<Slice>,
    queue: VecDeque<Cursor>,
    /// The earliest deadline that the home thread has not been told of.
    new_deadline: Option<Instant>,
    /// Lanes open or connecting.
    lanes: usize,
    connecting: usize,
    /// Connecting has failed since the last lane was open.
    redialled: bool,
    /// No further lane is tried before, as long as one is open.
    rest_until: Option<Instant>,
}

/// How far a batch has been cut into slices.
struct Cursor {
    batch: Arc<BatchInner>,
    entry: u32,
    offset: u64,
    /// The slice length that the current entry was cut by.
    slice_len: u64,
}

/// Batches whose bytes are applied and whose notifications are to be sent, in order.
#[derive(Default)]
struct Notifications {
    waiting: VecDeque<Arc<BatchInner>>,
    sending: bool,
}

/// What a look at the queue brought.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Pulled {
    /// The one request that was pulled needs the lane for itself.
    pub(crate) alone: bool,
}

/// How often a slice shares a lane with others after it was behind a refused one.
const SHARED_TRIES: u8 = 4;
/// How long no further lane is tried after one could not be had while others were open.
const DIAL_REST: Duration = Duration::from_secs(1);
/// How much of a request moves on one lane at a time.
const SLICE: u64 = 1 << 20;

impl Route {
    pub(crate) fn new(
        descriptor: &SegmentDescriptor,
        addrs: Vec<SocketAddr>,
        newest: Version,
        asked: Instant,
    ) -> Self {
        let spoken = if descriptor.tcp_proto_version >= 2 { Version::V2 } else { Version::V1 };
        let buffers: Vec<BufferInfo> =
            descriptor.buffers.iter().map(|b| BufferInfo { addr: b.addr, len: b.len }).collect();
        let mut sorted = buffers.clone();
        sorted.sort_unstable_by_key(|b| b.addr);
        let truncated = descriptor.tensorferry.as_ref().is_some_and(|f| f.buffers_truncated);
        Self { version: spoken.min(newest), addrs, buffers, sorted, truncated, asked }
    }

    /// Whether one published buffer contains the range. `hint` remembers which.
    fn covers(&self, addr: u64, len: u64, hint: &mut usize) -> bool {
        let inside =
            |b: &BufferInfo| addr >= b.addr && len <= b.len && addr - b.addr <= b.len - len;
        if self.sorted.get(*hint).is_some_and(inside) {
            return true;
        }
        let after = self.sorted.partition_point(|b| b.addr <= addr);
        *hint = after.wrapping_sub(1);
        self.sorted.get(*hint).is_some_and(inside)
    }

    fn slice_len(&self) -> u64 {
        // A v1 slice costs a connection.
        if self.version == Version::V1 { u64::MAX } else { SLICE }
    }
}

impl Peer {
    pub(crate) fn new(core: Arc<Core>, address: SegmentName, number: usize) -> Arc<Self> {
        let home = number % core.mailboxes.len();
        Arc::new(Self {
            name: address.to_string().into(),
            address,
            core,
            number,
            home,
            state: Mutex::default(),
            asked: Condvar::new(),
            queued: AtomicUsize::new(0),
            kicked: AtomicBool::new(false),
            told: AtomicU64::new(0),
            notifications: Mutex::default(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn address(&self) -> &SegmentName {
        &self.address
    }

    /// Takes a batch on. Never blocks on the network.
    pub(crate) fn submit(self: &Arc<Self>, batch: Arc<BatchInner>) {
        let mut state = self.lock();
        state.note(batch.deadline);
        state.queue.push_back(Cursor { batch, entry: 0, offset: 0, slice_len: SLICE });
        if state.route.is_none() {
            self.ask(&mut state);
        }
        drop(state);
        self.kick();
        if self.core.is_closed() {
            // The threads may have gone before the batch came; then nobody else would settle it.
            self.stop_all(Stop::Closed);
        }
    }

    /// Reserves room for a batch of so many requests.
    pub(crate) fn reserve(&self, requests: usize, wait_until: Option<Instant>) -> Result<()> {
        self.core.reserve(&self.name, &self.queued, requests, wait_until)
    }

    /// Has the home thread look at the queue.
    pub(crate) fn kick(self: &Arc<Self>) {
        if !self.kicked.swap(true, Ordering::SeqCst) {
            self.core.mailboxes[self.home].post(Command::Kick(Arc::clone(self)));
        }
    }

    /// The home thread looks now; what comes after this kicks again.
    pub(crate) fn answer_kick(&self) {
        self.kicked.store(false, Ordering::SeqCst);
    }

    /// Waits until the descriptor is known. `anew`: until it was asked for after this call began.
    pub(crate) fn resolved(self: &Arc<Self>, anew: bool) -> Result<Arc<Route>> {
        let begin = Instant::now();
        let mut state = self.lock();
        loop {
            self.core.check_usable()?;
            if let Some(route) = state.route.as_ref().filter(|r| !anew || r.asked >= begin) {
                return Ok(Arc::clone(route));
            }
            if let Some((asked, error)) = state.fetch_error.as_ref().filter(|(at, _)| *at >= begin)
            {
                tracing::debug!("asked {:?} ago", asked.elapsed());
                return Err(error.clone());
            }
            self.ask(&mut state);
            // Asking ends by itself; the step is for an engine that is closed meanwhile.
            let waited = self.asked.wait_timeout(state, Duration::from_millis(100));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The buffers that the peer publishes, asked for now.
    pub(crate) fn buffers(self: &Arc<Self>) -> Result<Vec<BufferInfo>> {
        Ok(self.resolved(true)?.buffers.clone())
    }

    /// Has the pool ask for the descriptor, unless it is doing so.
    fn ask(self: &Arc<Self>, state: &mut State) {
        if state.fetching {
            return;
        }
        state.fetching = true;
        let peer = Arc::clone(self);
        if !self.core.pool.run(move || peer.fetch()) {
            state.fetching = false;
            let why = if self.core.is_closed() {
                Error::Closed
            } else {
                Error::io("starting a thread", std::io::Error::last_os_error())
            };
            state.fetch_error = Some((Instant::now(), why));
        }
    }

    fn fetch(self: &Arc<Self>) {
        let began = Instant::now();
        let fetched = control::fetch(&self.core, &self.name, &self.address);
        let mut state = self.lock();
        state.fetching = false;
        state.stale = false;
        state.fetches += 1;
        let mut orphans = Work::default();
        match fetched {
            Ok(route) => {
                if state.route.as_ref().is_some_and(|known| known.addrs != route.addrs) {
                    state.rest_until = None;
                }
                state.route = Some(Arc::new(route));
                state.fetch_error = None;
            }
            Err(error) => {
                if state.route.is_none() {
                    orphans = state.take_work();
                }
                state.redialled = false;
                state.fetch_error = Some((began, error.clone()));
                tracing::debug!("no descriptor: {error}");
            }
        }
        let error = state.fetch_error.clone();
        drop(state);
        if let Some((_, error)) = error {
            orphans.fail(&Cause::Whole(Arc::new(error)));
        }
        self.asked.notify_all();
        self.kick();
    }

    /// Moves slices from the queue to `out`, as many as `room` allows.
    pub(crate) fn pull(self: &Arc<Self>, room: Room, now: Instant, out: &mut Vec<Slice>) -> Pulled {
        let mut state = self.lock();
        let Some(route) = state.route.clone() else { return Pulled::default() };
        if state.stale || state.is_empty() {
            return Pulled::default();
        }
        let (mut bytes, mut hint) = (0, 0);
        while out.len() < room.requests && bytes < room.bytes {
            let Some(slice) = state.next(&route) else { break };
            match self.admit(&mut state, &route, &slice, now, &mut hint) {
                Admission::Go => {
                    bytes += slice.len;
                    out.push(slice);
                }
                Admission::Fail(cause) => slice.settle(Err(cause)),
                Admission::Alone if room.empty && out.is_empty() => {
                    out.push(slice);
                    return Pulled { alone: true };
                }
                Admission::Alone | Admission::Wait => {
                    state.requeued.push_front(slice);
                    break;
                }
            }
        }
        Pulled::default()
    }

    fn admit(
        self: &Arc<Self>,
        state: &mut State,
        route: &Route,
        slice: &Slice,
        now: Instant,
        hint: &mut usize,
    ) -> Admission {
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
        if let Some((_, error)) = state.fetch_error.as_ref().filter(|(at, _)| *at >= batch.started)
        {
            return Admission::Fail(Cause::Whole(Arc::new(error.clone())));
        }
        // The buffer may have been registered after the peer was asked: ask once more.
        state.stale = true;
        self.ask(state);
        Admission::Wait
    }

    /// Takes slices back that are to be sent again. Those whose batch was told to stop are settled here: whoever
    /// looks through queue and lanes for them may have been at the queue before, and at the lane after.
    pub(crate) fn requeue(self: &Arc<Self>, slices: &mut Vec<Slice>) {
        if slices.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut stopped = Vec::new();
        let mut state = self.lock();
        for slice in slices.drain(..).rev() {
            if let Some(stop) = slice.batch.stop_at(now) {
                stopped.push((slice, stop));
                continue;
            }
            self.core.metrics.retries.add(1);
            state.note(slice.batch.deadline);
            state.requeued.push_front(slice);
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
        state.stale = true;
        self.ask(&mut state);
    }

    /// The earliest deadline of what has joined the queue since the last call.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.lock().new_deadline.take()
    }

    /// Whether something waits that an open lane could take.
    pub(crate) fn wants_hands(&self) -> bool {
        let state = self.lock();
        let open = state.lanes > state.connecting;
        open && state.route.is_some() && !state.stale && !state.is_empty()
    }

    /// True if IO thread `index` has not been told of the queue since it last looked.
    pub(crate) fn tell(&self, index: usize) -> bool {
        self.told.fetch_or(1 << index, Ordering::SeqCst) & (1 << index) == 0
    }

    /// IO thread `index` looks now; what comes after this tells it again.
    pub(crate) fn answer_tell(&self, index: usize) {
        self.told.fetch_and(!(1 << index), Ordering::SeqCst);
    }

    /// Whether something waits in the queue.
    pub(crate) fn has_work(&self) -> bool {
        !self.lock().is_empty()
    }

    pub(crate) fn route(&self) -> Option<Arc<Route>> {
        self.lock().route.clone()
    }

    /// Counts a new lane and says where it goes, and how many there were before, if one is needed.
    pub(crate) fn wants_lane(&self) -> Option<(Arc<Route>, usize)> {
        let mut state = self.lock();
        if state.stale || state.is_empty() || state.lanes >= self.core.config.lanes_per_peer {
            return None;
        }
        if state.lanes > 0 && state.rest_until.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        let route = state.route.clone()?;
        // One at a time, but that every v1 request needs its own.
        let enough = match route.version {
            Version::V1 => state.requeued.len() + state.queue.len(),
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
        drop(state);
        self.core.metrics.lanes_opened.add(1);
    }

    /// A lane that was connected is gone.
    pub(crate) fn lane_closed(&self) {
        let mut state = self.lock();
        state.lanes -= 1;
        if state.lanes == 0 {
            state.redialled = false;
        }
    }

    /// A lane could not be connected at any address. The first time the descriptor is asked for anew, since
    /// the peer may have moved; the second time the peer is unreachable.
    pub(crate) fn lane_failed(self: &Arc<Self>, addr: SocketAddr, why: &str, after: Duration) {
        let mut state = self.lock();
        state.connecting -= 1;
        state.lanes -= 1;
        if state.lanes > 0 {
            // Those that are open go on. The peer may have moved without their knowing.
            state.rest_until = Some(Instant::now() + DIAL_REST);
            if !std::mem::replace(&mut state.redialled, true) {
                self.ask(&mut state);
            }
            return;
        }
        let mut orphans = Work::default();
        if state.redialled {
            orphans = state.take_work();
            state.redialled = false;
        } else {
            state.redialled = true;
        }
        state.route = None;
        if !state.is_empty() {
            self.ask(&mut state);
        }
        drop(state);
        let what = format!("connecting to its data port at {addr} failed ({why})");
        let error = Error::PeerUnreachable { peer: Arc::clone(&self.name), what, after };
        orphans.fail(&Cause::Whole(Arc::new(error)));
    }

    /// Settles what waits here and is to stop. Returns the next deadline of what is left.
    pub(crate) fn sweep(&self, now: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let stage = state.stage();
        let stopped = state.take_stopped(now);
        let next = state.deadlines().min();
        drop(state);
        stopped.fail_stopped(now, stage);
        let next_notification = self.sweep_notifications(now);
        next.into_iter().chain(next_notification).min()
    }

    /// Ends what is to stop and still waits for earlier notifications to be delivered.
    fn sweep_notifications(&self, now: Instant) -> Option<Instant> {
        let mut notifications = locked(&self.notifications);
        let all = std::mem::take(&mut notifications.waiting);
        let (stopped, waiting): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|b| b.stop_at(now).is_some());
        let next = waiting.iter().map(|b| b.deadline).min();
        notifications.waiting = waiting.into();
        drop(notifications);
        for batch in stopped {
            let why = match batch.stop_at(now) {
                Some(Stop::TimedOut) => "its deadline passed while earlier ones were delivered",
                _ => "it was cancelled while earlier ones were delivered",
            };
            batch.finish(Some(Error::NotifyFailed {
                peer: Arc::clone(&self.name),
                why: why.into(),
            }));
        }
        next
    }

    /// Has every waiting batch stop.
    pub(crate) fn stop_all(&self, stop: Stop) {
        let work = self.lock().take_work();
        work.fail(&Cause::Stopped { stop, stage: QUEUED, sent: false });
        self.asked.notify_all();
        self.drop_notifications();
    }

    fn drop_notifications(&self) {
        let dropped = std::mem::take(&mut *locked(&self.notifications)).waiting;
        for batch in dropped {
            batch.finish(Some(Error::Closed));
        }
    }

    /// Has the waiting batches stop whose local ranges pin the buffer at `addr`.
    pub(crate) fn revoke(&self, addr: u64) {
        let state = self.lock();
        let queued = state.queue.iter().map(|c| &c.batch);
        for batch in queued.chain(state.requeued.iter().map(|s| &s.batch)) {
            if batch.pins_buffer(addr) {
                batch.request_stop(Stop::Unregistered);
            }
        }
    }

    fn send_notifications(self: &Arc<Self>) {
        loop {
            let next = {
                let mut notifications = locked(&self.notifications);
                let next = notifications.waiting.pop_front();
                notifications.sending = next.is_some();
                next
            };
            let Some(batch) = next else { return };
            control::deliver(&self.core, &self.name, &self.address, &batch);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

impl Owner for Peer {
    fn peer(&self) -> &Arc<str> {
        &self.name
    }

    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
        let mut notifications = locked(&self.notifications);
        notifications.waiting.push_back(Arc::clone(batch));
        let behind = std::mem::replace(&mut notifications.sending, true);
        drop(notifications);
        if behind {
            // The home thread sees to it that a deadline is kept while others are delivered.
            self.lock().note(batch.deadline);
            return self.kick();
        }
        let peer = Arc::clone(&self);
        if !self.core.pool.run(move || peer.send_notifications()) {
            self.drop_notifications();
        }
    }

    fn spinners(&self) -> &AtomicUsize {
        &self.core.spinners
    }

    fn stopped(&self, _: &Arc<BatchInner>) {
        self.core.broadcast(|| Command::Sweep);
    }

    fn finished(&self, batch: &BatchInner) {
        self.core.release(&self.queued, batch.len());
        batch.count(&self.core.metrics);
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

const QUEUED: &str = "it waited in the queue for a lane";

impl State {
    fn note(&mut self, deadline: Instant) {
        self.new_deadline = Some(self.new_deadline.map_or(deadline, |d| d.min(deadline)));
    }

    fn is_empty(&self) -> bool {
        self.requeued.is_empty() && self.queue.is_empty()
    }

    /// What a waiting request is waiting for.
    fn stage(&self) -> &'static str {
        if self.fetching {
            "the peer's control port had not answered with its descriptor"
        } else if self.lanes > 0 && self.lanes == self.connecting {
            "no connection to its data port had been made"
        } else {
            QUEUED
        }
    }

    /// The next slice in line.
    fn next(&mut self, route: &Route) -> Option<Slice> {
        if let Some(slice) = self.requeued.pop_front() {
            return Some(slice);
        }
        while let Some(cursor) = self.queue.front_mut() {
            match cursor.next(route.slice_len()) {
                Some(slice) => return Some(slice),
                None => drop(self.queue.pop_front()),
            }
        }
        None
    }

    fn take_work(&mut self) -> Work {
        Work { slices: self.requeued.drain(..).collect(), cursors: self.queue.drain(..).collect() }
    }

    fn take_stopped(&mut self, now: Instant) -> Work {
        let all = self.take_work();
        let stopped = |batch: &Arc<BatchInner>| batch.stop_at(now).is_some();
        let (slices, left) = all.slices.into_iter().partition(|s| stopped(&s.batch));
        let (cursors, queue) = all.cursors.into_iter().partition(|c| stopped(&c.batch));
        let left: Vec<Slice> = left;
        let queue: Vec<Cursor> = queue;
        (self.requeued, self.queue) = (left.into(), queue.into());
        Work { slices, cursors }
    }

    fn deadlines(&self) -> impl Iterator<Item = Instant> {
        let queued = self.queue.iter().map(|c| c.batch.deadline);
        queued.chain(self.requeued.iter().map(|s| s.batch.deadline))
    }
}

impl Cursor {
    /// Cuts the next slice off; `None` at the end of the batch.
    fn next(&mut self, slice_len: u64) -> Option<Slice> {
        while (self.entry as usize) < self.batch.len() {
            let request = self.batch.request(self.entry);
            if self.offset == 0 {
                self.slice_len = slice_len;
                let slices = request.len.div_ceil(slice_len);
                if slices > 1 {
                    self.batch.cut(self.entry, slices as u32);
                }
            }
            let len = self.slice_len.min(request.len - self.offset);
            let (entry, offset) = (self.entry, self.offset);
            if offset + len == request.len {
                (self.entry, self.offset) = (entry + 1, 0);
            } else {
                self.offset += len;
            }
            if len > 0 {
                return Some(Slice::new(&self.batch, entry, offset, len));
            }
        }
        None
    }

    /// Fails all that was not cut off.
    fn fail(mut self, cause: &Cause) {
        if self.offset > 0 {
            let left = self.batch.request(self.entry).len - self.offset;
            let slices = left.div_ceil(self.slice_len) as u32;
            self.batch.settle(self.entry, slices, Err(cause.clone()));
            self.entry += 1;
        }
        for entry in self.entry..self.batch.len() as u32 {
            if self.batch.request(entry).len > 0 {
                self.batch.settle(entry, 1, Err(cause.clone()));
            }
        }
    }
}

/// Requests that were taken out of the queue to be failed, without a lock held.
#[derive(Default)]
struct Work {
    slices: Vec<Slice>,
    cursors: Vec<Cursor>,
}

impl Work {
    fn fail(self, cause: &Cause) {
        for slice in self.slices {
            slice.settle(Err(cause.clone()));
        }
        for cursor in self.cursors {
            cursor.fail(cause);
        }
    }

    fn fail_stopped(self, now: Instant, stage: &'static str) {
        let cause = |batch: &BatchInner| {
            let stop = batch.stop_at(now).unwrap_or(Stop::Cancelled);
            Cause::Stopped { stop, stage, sent: false }
        };
        for slice in self.slices {
            let cause = cause(&slice.batch);
            slice.settle(Err(cause));
        }
        for cursor in self.cursors {
            let cause = cause(&cursor.batch);
            cursor.fail(&cause);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
