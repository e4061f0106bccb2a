//! What users hold: [`Engine`] and [`Segment`].

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tensorferry_gpu::{DeviceId, Discovery, Location};
use tensorferry_metadata::SegmentName;
use tensorferry_wire::{DEFAULT_SEND_LIMIT, Notification};

use crate::bind::bind;
use crate::clock;
use crate::config::{Config, Notice};
use crate::control;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::{Command, IoThread, prepare};
use crate::local::Local;
use crate::memory::{HostBuffer, Lent, OwnedRequest, check_mapped};
use crate::metrics::Stats;
use crate::peer::{Account, Peer, PeerStats};
use crate::peers::Peers;
use crate::registry::{Access, BufferInfo, Pin, Range, RegisterOptions, check_range};
use crate::staging::{DeviceBuffer, Place, order};
use crate::transfer::{
    Batch, BatchInner, BatchTable, Cause, FOREVER, Held, OnFull, Order, Owner, Places, Request,
    Stop, SubmitOptions,
};

/// A transfer engine: registered memory that peers can reach, and a way to reach theirs.
///
/// Clones are the same engine. It is closed when the last clone and the last segment are gone, or by
/// [`Engine::close`].
///
/// ```
/// use tensorferry::{Config, Engine, HostBuffer, RegisterOptions};
///
/// # fn main() -> tensorferry::Result<()> {
/// let engine = Engine::new("127.0.0.1", Config::default())?;
/// let buffer = HostBuffer::zeroed(4096)?;
/// engine.register_buffer(&buffer, &RegisterOptions::default())?;
/// println!("peers open {}, and reach {:#x}", engine.name(), buffer.addr());
/// // When this has returned, nobody reaches the buffer any more.
/// engine.unregister(buffer.addr())?;
/// assert!(engine.buffers().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "an engine is closed when it is dropped"]
pub struct Engine {
    inner: Arc<Inner>,
}

/// The memory of one peer, by name. It keeps its engine; clones are the same segment.
///
/// ```
/// use tensorferry::{Config, Engine, HostBuffer, Op, RegisterOptions, SubmitOptions};
///
/// # fn main() -> tensorferry::Result<()> {
/// # let target = Engine::new("127.0.0.1", Config::default())?;
/// # let memory = HostBuffer::zeroed(4096)?;
/// # memory.write(0, b"hello");
/// # target.register_buffer(&memory, &RegisterOptions::default())?;
/// # let initiator = Engine::new("127.0.0.1", Config::default())?;
/// let segment = initiator.open(target.name())?;
/// let remote = segment.buffers()?[0];
/// let local = HostBuffer::zeroed(remote.len as usize)?;
/// let request = local.request(Op::Read, 0, remote.addr, local.len())?;
/// segment.submit_owned(&[request], SubmitOptions::default())?.wait()?;
/// assert_eq!(local.read(0, 5), b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Segment {
    engine: Engine,
    name: Arc<str>,
    target: Target,
}

#[derive(Clone)]
enum Target {
    /// The engine itself.
    Local(Arc<Local>),
    Peer(Arc<Peer>),
}

struct Inner {
    core: Arc<Core>,
    local: Arc<Local>,
    peers: Peers,
    threads: Mutex<Vec<IoThread>>,
    batches: BatchTable,
}

/// The longest request: more than any machine's memory.
const MAX_LEN: u64 = 1 << 48;
/// How long closing waits for descriptors that are being read.
const POOL_PATIENCE: Duration = Duration::from_millis(500);
/// How long closing waits for a resolver; one that takes longer has nothing of the engine's.
const NAMES_PATIENCE: Duration = Duration::from_millis(200);

impl Engine {
    /// Starts an engine that peers reach at `host` (a name or an address, a port behind it is ignored), peer to peer: its
    /// name becomes `host:port` with a control port chosen from `config.ports`.
    ///
    /// # Errors
    /// A host that cannot be advertised, no free port, no thread or socket to be had.
    pub fn new(host: &str, config: Config) -> Result<Self> {
        for notice in &config.notices {
            match notice {
                Notice::Warning(text) => tracing::warn!("{text}"),
                Notice::Debug(text) => tracing::debug!("{text}"),
            }
        }
        let (control, data, addresses) = bind(host, &config)?;
        let threads = config.io_threads.max(1);
        let (polls, mailboxes): (Vec<_>, Vec<_>) =
            (0..threads).map(|_| prepare()).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let core = Arc::new(Core::new(config, addresses, mailboxes)?);
        let engine = Self {
            inner: Arc::new(Inner {
                local: Local::new(Arc::clone(&core))?,
                core,
                peers: Peers::default(),
                threads: Mutex::default(),
                batches: BatchTable::default(),
            }),
        };
        let mut listeners = Some((control, data));
        for (index, poll) in polls.into_iter().enumerate() {
            let thread = IoThread::start(&engine.inner.core, index, poll, listeners.take())?;
            engine.inner.threads().push(thread);
        }
        Ok(engine)
    }

    /// An engine whose threads somebody else runs.
    #[cfg(test)]
    pub(crate) fn simulated(core: Arc<Core>) -> Result<Self> {
        let local = Local::new(Arc::clone(&core))?;
        let (peers, threads, batches) = Default::default();
        Ok(Self { inner: Arc::new(Inner { core, local, peers, threads, batches }) })
    }

    /// The peers whose segments were opened.
    #[cfg(test)]
    pub(crate) fn known(&self) -> Vec<Arc<Peer>> {
        self.inner.peers.all()
    }

    /// The segment name that peers open: `host:port`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.core.name
    }

    /// The port that peers ask for the descriptor, notify and probe.
    #[must_use]
    pub fn control_port(&self) -> u16 {
        self.inner.core.control_port
    }

    /// The port that data connections go to.
    #[must_use]
    pub fn data_port(&self) -> u16 {
        self.inner.core.data_port
    }

    /// The settings in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.core.config
    }

    /// Lets peers reach `len` bytes at `addr` until [`Engine::unregister`] has returned.
    ///
    /// # Errors
    /// Null address, zero length, a range that wraps; [`Error::Unmapped`]; [`Error::Overlap`] with another
    /// buffer; [`Error::WrongLocation`]; [`Error::Gpu`]: the device that it is on cannot be used, and why.
    ///
    /// # Safety
    /// The range is host memory, mapped and writable (readable suffices for `Access::ReadOnly`), or memory of a device
    /// that this process has allocated, until `unregister` for it has returned.
    #[expect(unsafe_code, reason = "the caller promises what `# Safety` asks for")]
    pub unsafe fn register(&self, addr: u64, len: u64, options: &RegisterOptions) -> Result<()> {
        self.register_ranges(&[(addr, len)], options, None)
    }

    /// Registers all of the ranges (address, length), or none of them.
    ///
    /// # Errors
    /// As [`Engine::register`]; nothing is registered then.
    ///
    /// # Safety
    /// As [`Engine::register`].
    #[expect(unsafe_code, reason = "the caller promises what `# Safety` asks for")]
    pub unsafe fn register_all(
        &self,
        ranges: &[(u64, u64)],
        options: &RegisterOptions,
    ) -> Result<()> {
        self.register_ranges(ranges, options, None)
    }

    /// Registers a buffer that the engine keeps alive until it is unregistered.
    ///
    /// # Errors
    /// As [`Engine::register`].
    pub fn register_buffer(&self, buffer: &HostBuffer, options: &RegisterOptions) -> Result<()> {
        let options = RegisterOptions { location: Location::Cpu, ..*options };
        let lent = Some(buffer.clone().into());
        self.register_ranges(&[(buffer.addr(), buffer.len() as u64)], &options, lent)
    }

    /// Allocates `len` bytes of memory on a device, which can be lent without `unsafe`. For programs that have no
    /// framework which does it; the first such call of a process makes its context on the device.
    ///
    /// # Errors
    /// A length of zero; a device that cannot be used, and why; what its library refused.
    pub fn device_buffer(&self, device: DeviceId, len: usize) -> Result<DeviceBuffer> {
        self.inner.core.check_usable()?;
        DeviceBuffer::new(&self.inner.core.devices, device, len)
    }

    /// Registers a buffer that the engine keeps alive until it is unregistered.
    ///
    /// # Errors
    /// As [`Engine::register`].
    pub fn register_device_buffer(
        &self,
        buffer: &DeviceBuffer,
        options: &RegisterOptions,
    ) -> Result<()> {
        let options = RegisterOptions { location: Location::Device(buffer.device()), ..*options };
        let lent = Some(buffer.clone().into());
        self.register_ranges(&[(buffer.addr(), buffer.len() as u64)], &options, lent)
    }

    /// Ends what `register` began: when this returns, no peer and no thread of the engine touches the buffer.
    ///
    /// # Errors
    /// No buffer starts at `addr`; [`crate::Error::StillInUse`].
    pub fn unregister(&self, addr: u64) -> Result<()> {
        self.unregister_all(&[addr])
    }

    /// Unregisters all of the buffers, or, if one address is unknown, none of them.
    ///
    /// # Errors
    /// As [`Engine::unregister`].
    pub fn unregister_all(&self, addrs: &[u64]) -> Result<()> {
        let core = &self.inner.core;
        core.check_usable()?;
        core.registry.unregister(addrs, |buffer| {
            core.devices.revoke(buffer.addr);
            core.broadcast(|| Command::Revoke(buffer));
            self.inner.local.revoke(buffer);
        })
    }

    /// The buffers that are registered here, in the order of their registration.
    #[must_use]
    pub fn buffers(&self) -> Vec<BufferInfo> {
        self.inner.core.registry.all()
    }

    /// Names a peer's segment without asking for it; the first submit does.
    ///
    /// # Errors
    /// A name that cannot be understood.
    pub fn segment(&self, name: &str) -> Result<Segment> {
        let core = &self.inner.core;
        core.check_usable()?;
        if let Some(peer) = self.inner.peers.find(name) {
            return Ok(self.segment_of(Target::Peer(peer)));
        }
        let address = SegmentName::parse(name, core.config.control_port)?;
        if *address.to_string() == *core.name {
            return Ok(self.segment_of(Target::Local(Arc::clone(&self.inner.local))));
        }
        let peer = self.inner.peers.open(core, name, address);
        Ok(self.segment_of(Target::Peer(peer)))
    }

    /// Opens a peer's segment: its descriptor is fetched, unless it is known already.
    ///
    /// # Errors
    /// A name that cannot be understood, a peer that cannot be reached or understood.
    pub fn open(&self, name: &str) -> Result<Segment> {
        let segment = self.segment(name)?;
        if let Target::Peer(peer) = &segment.target {
            peer.resolved(false)?;
        }
        Ok(segment)
    }

    /// Asks a peer's control port whether it is alive.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn probe(&self, name: &str) -> Result<()> {
        let core = &self.inner.core;
        core.check_usable()?;
        let address = SegmentName::parse(name, core.config.control_port)?;
        control::probe(core, &address.to_string().into(), &address)
    }

    /// The notifications that have arrived since the last call, in order of arrival.
    #[must_use = "they are not given out again"]
    pub fn take_notifications(&self) -> Vec<Notification> {
        self.inner.core.take_notifications()
    }

    /// Batches by number, for callers that cannot hold a [`Batch`].
    #[must_use]
    pub fn batches(&self) -> &BatchTable {
        &self.inner.batches
    }

    /// What the engine has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Inner { core, local, peers, .. } = &*self.inner;
        // A lock that was held at a fork is held for ever.
        let known = if core.is_forked() { peers.try_counters() } else { Some(peers.counters()) };
        let mut sum = known.unwrap_or_default();
        sum.add(&local.account.metrics.counters());
        core.metrics.stats(&sum)
    }

    /// How the engine stands with every peer that it knows, and with itself if it was one. IO threads are asked about
    /// their lanes, and waited for no longer than 200 ms.
    ///
    /// The counters of all peers together are those of [`Engine::stats`], unless there were so many names (1,024) that
    /// some were forgotten to which there is neither a [`Segment`] nor a connection. In a forked child nothing is known.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStats> {
        let Inner { core, local, peers, .. } = &*self.inner;
        if core.is_forked() {
            return Vec::new();
        }
        let (lanes, lanes_known) = core.lanes();
        let mut lanes_of: HashMap<usize, Vec<_>> = HashMap::new();
        for lane in lanes {
            lanes_of.entry(lane.peer).or_default().push(lane.stats);
        }
        let all = peers.all();
        let stats = all.iter().map(|peer| {
            let lanes = lanes_of.remove(&peer.number).unwrap_or_default();
            PeerStats { lanes, lanes_known, ..peer.stats() }
        });
        stats.chain(local.stats()).collect()
    }

    /// Ends everything now: running batches fail with [`crate::Error::Closed`], sockets are closed, threads have
    /// ended when this returns, and no memory of users is touched any more.
    pub fn close(&self) {
        self.inner.close();
    }

    /// For a forked child, right after the fork: closes the copies of the engine's sockets that it has
    /// inherited, so that peers of the parent see the parent's end and not the child's. Takes no lock. Does
    /// nothing in the process that made the engine.
    pub fn close_inherited(&self) {
        if self.inner.core.is_forked() {
            self.inner.close_inherited();
        }
    }

    /// The GPU libraries of this process, as far as this engine has looked.
    #[must_use]
    pub fn gpus(&self) -> &Discovery {
        self.inner.core.devices.gpus()
    }

    /// Whether `close` was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.core.is_closed()
    }

    fn register_ranges(
        &self,
        ranges: &[(u64, u64)],
        options: &RegisterOptions,
        lent: Option<Lent>,
    ) -> Result<()> {
        let core = &self.inner.core;
        core.check_usable()?;
        let find = |&(addr, len): &(u64, u64)| find(core, BufferInfo { addr, len }, options);
        let ranges: Vec<Range> = ranges.iter().map(find).collect::<Result<_>>()?;
        let mut devices: Vec<_> = ranges.iter().filter_map(|range| range.device.as_ref()).collect();
        devices.dedup_by(|a, b| Arc::ptr_eq(a, b));
        for device in devices {
            // What a device needs is made now, so that the first transfer neither waits nor fails for it.
            device.ready().map_err(|why| (*why).clone())?;
        }
        core.registry.register(ranges, options.repeat, lent)
    }

    fn segment_of(&self, target: Target) -> Segment {
        let name = match &target {
            Target::Local(_) => &self.inner.core.name,
            Target::Peer(peer) => peer.name(),
        };
        Segment { engine: self.clone(), name: Arc::clone(name), target }
    }
}

impl Segment {
    /// The name it was opened by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The buffers that the peer has registered, asked for now.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn buffers(&self) -> Result<Vec<BufferInfo>> {
        match &self.target {
            Target::Local(_) => Ok(self.engine.inner.core.registry.published()),
            Target::Peer(peer) => peer.buffers(),
        }
    }

    /// Starts moving bytes. The requests of a batch run in any order, also at the same time.
    ///
    /// Entries that the peer refuses fail alone. Zero-length entries are complete at once. Waits if the queue to
    /// the peer is full, else never; an executor that must not be held up asks for [`OnFull::Refuse`], and tries again
    /// when a batch has ended.
    ///
    /// # Errors
    /// Malformed requests (null address, a range that wraps): nothing was sent. All else is the result of the [`Batch`].
    ///
    /// # Safety
    /// The local memory of every request stays mapped (READ: writable) until the batch is final
    /// ([`Batch::poll`] is not `Running`), and nobody else touches what a READ writes. Memory that is not mapped at
    /// all is an error of the entry, not undefined behaviour.
    #[expect(unsafe_code, reason = "the caller promises what `# Safety` asks for")]
    pub unsafe fn submit(&self, requests: Vec<Request>, options: SubmitOptions) -> Result<Batch> {
        self.start(requests, Vec::new(), options)
    }

    /// [`Segment::submit`] for buffers that the batch keeps alive.
    ///
    /// # Errors
    /// As [`Segment::submit`].
    pub fn submit_owned(&self, requests: &[OwnedRequest], options: SubmitOptions) -> Result<Batch> {
        let buffers = requests.iter().map(|r| r.buffer.clone()).collect();
        self.start(requests.iter().map(|r| r.request).collect(), buffers, options)
    }

    /// Sends a notification to the peer and waits for its answer.
    ///
    /// # Errors
    /// [`crate::Error::NotifyTooLarge`], [`crate::Error::NotifyFailed`].
    pub fn notify(&self, notification: &Notification) -> Result<()> {
        check_size(notification)?;
        let core = &self.engine.inner.core;
        core.check_usable()?;
        match &self.target {
            Target::Local(_) => core
                .take_in(notification.clone())
                .map_err(|why| Error::NotifyFailed { peer: Arc::clone(&self.name), why }),
            Target::Peer(peer) => {
                let deadline = clock::now() + core.config.transfer_timeout.min(FOREVER);
                control::notify(core, (&self.name, peer.address()), notification, deadline)
                    .inspect(|()| peer.account.metrics.notifications_sent.add(1))
                    .inspect_err(|error| peer.account.told(&core.log, &self.name, error))
            }
        }
    }

    fn start(
        &self,
        requests: Vec<Request>,
        buffers: Vec<Lent>,
        options: SubmitOptions,
    ) -> Result<Batch> {
        let core = &self.engine.inner.core;
        core.check_usable()?;
        let bytes = check_requests(&requests)?;
        options.notification.as_ref().map_or(Ok(()), check_size)?;
        let started = clock::now();
        let timeout = options.timeout.unwrap_or_else(|| core.config.default_timeout(bytes));
        let deadline = started + timeout.min(FOREVER);
        let wait_until = match options.on_full {
            OnFull::Wait => Some(deadline),
            OnFull::WaitFor(time) => Some(deadline.min(started + time.min(FOREVER))),
            OnFull::Refuse => None,
        };
        let (pins, places) = locate(core, &requests)?;
        match &self.target {
            Target::Local(local) => local.reserve(requests.len(), wait_until)?,
            Target::Peer(peer) => peer.reserve(requests.len(), wait_until)?,
        }
        let order = |stream| order(&core.devices, stream, places.devices());
        let mut pending = match options.stream.map(order).transpose() {
            Ok(pending) => pending,
            Err(error) => {
                self.target.release(requests.len());
                return Err(error);
            }
        };
        let word = pending.as_mut().and_then(|pending| pending.word.take());
        let (held, notification) = (Held { pins, buffers }, options.notification);
        let order = Order { requests, held, places, notification, started, deadline, word };
        let inner = BatchInner::new(self.target.owner(), order);
        self.target.account().metrics.batches_submitted.add(1);
        let batch = Batch { inner: Arc::clone(&inner) };
        match pending {
            _ if inner.is_settled() => inner.all_settled(),
            None => self.target.submit(inner),
            Some(pending) => {
                let target = self.target.clone();
                pending.start(&inner, move |batch| target.begin(&batch))?;
                // Somebody has to keep the deadline of a batch that nobody has begun.
                core.mailboxes[0].post(Command::Sweep);
            }
        }
        Ok(batch)
    }
}

impl Target {
    fn account(&self) -> &Account {
        match self {
            Self::Local(local) => &local.account,
            Self::Peer(peer) => &peer.account,
        }
    }

    fn owner(&self) -> Arc<dyn Owner> {
        match self {
            Self::Local(local) => Arc::clone(local) as _,
            Self::Peer(peer) => Arc::clone(peer) as _,
        }
    }

    fn submit(&self, batch: Arc<BatchInner>) {
        match self {
            Self::Local(local) => local.submit(batch),
            Self::Peer(peer) => peer.submit(batch),
        }
    }

    /// As `submit`, on a thread that copies for others: it does not copy this batch itself.
    fn begin(&self, batch: &Arc<BatchInner>) {
        match self {
            Self::Peer(peer) => peer.submit_aside(Arc::clone(batch)),
            Self::Local(local) => {
                if !local.submit_aside(batch) {
                    batch.fail_unbegun(&Cause::Whole(Arc::new(Error::Closed)));
                }
            }
        }
    }

    /// Gives back what was reserved for a batch that does not come.
    fn release(&self, requests: usize) {
        match self {
            Self::Local(local) => local.release(requests),
            Self::Peer(peer) => peer.release(requests),
        }
    }
}

impl Inner {
    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<IoThread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In a forked child: the threads are the parent's, and here are only copies of their descriptors. No lock
    /// is taken, since one may have been held at the fork.
    fn close_inherited(&self) {
        self.core.mark_closed();
        self.core.descriptors.close_inherited();
    }

    fn close(&self) {
        let core = &self.core;
        if core.is_forked() {
            return self.close_inherited();
        }
        core.begin_close();
        core.broadcast(|| Command::Stop);
        for thread in std::mem::take(&mut *self.threads()) {
            thread.join();
        }
        self.local.close();
        core.devices.close();
        core.readers.close(POOL_PATIENCE);
        core.names.close(NAMES_PATIENCE);
        core.strangers.close(NAMES_PATIENCE);
        for peer in self.peers.all() {
            peer.stop_all(Stop::Closed);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Finds out what a range is that is to be registered. Refuses memory that is not there.
fn find(core: &Core, info: BufferInfo, options: &RegisterOptions) -> Result<Range> {
    let BufferInfo { addr, len } = info;
    check_range(addr, len)?;
    if let Place::Device(device, allocation) = core.devices.place(options.location, addr, len)? {
        let access = match options.access {
            Access::AsMapped => Access::ReadWrite,
            access => access,
        };
        return Ok(Range { info, access, device: Some(device), allocation });
    }
    let unmapped = |at, readable| Error::Unmapped {
        addr,
        len,
        at,
        readable,
        gpus: if readable { String::new() } else { core.devices.report() },
    };
    check_mapped(addr, len, false).map_err(|at| unmapped(at, false))?;
    match (options.access, check_mapped(addr, len, true)) {
        (Access::ReadWrite, Err(at)) => Err(unmapped(at, true)),
        (Access::AsMapped, Err(_)) => {
            tracing::info!("[{addr:#x}, +{len}) is not writable: peers may READ it only");
            Ok(Range::host(info, Access::ReadOnly))
        }
        (Access::AsMapped, Ok(())) => Ok(Range::host(info, Access::ReadWrite)),
        (access, _) => Ok(Range::host(info, access)),
    }
}

fn check_size(notification: &Notification) -> Result<()> {
    let len = notification.frame_len();
    if len > DEFAULT_SEND_LIMIT {
        return Err(Error::NotifyTooLarge { len, limit: DEFAULT_SEND_LIMIT });
    }
    Ok(())
}

/// Refuses what cannot be meant; returns the sum of the lengths.
fn check_requests(requests: &[Request]) -> Result<u64> {
    if u32::try_from(requests.len()).is_err() {
        return Err(Error::bad_argument("a batch holds at most 2^32 - 1 requests; submit several"));
    }
    let mut bytes = 0_u64;
    for (i, r) in requests.iter().enumerate().filter(|(_, r)| r.len > 0) {
        let wrong = |what: &str| {
            Error::bad_argument(format!(
                "request {i} (local {:#x}, remote {:#x}, {} bytes): {what}; nothing was sent",
                r.local, r.remote, r.len
            ))
        };
        if r.local == 0 || r.remote == 0 {
            return Err(wrong("an address is null"));
        }
        if r.len > MAX_LEN {
            return Err(wrong("the length is beyond any memory"));
        }
        if r.local.checked_add(r.len).is_none() || r.remote.checked_add(r.len).is_none() {
            return Err(wrong("a range runs past the end of the address space"));
        }
        bytes = bytes.saturating_add(r.len);
    }
    Ok(bytes)
}

/// Pins each registered buffer that a local range touches, and finds out which device each range is on. Only memory
/// that is not registered has to be asked about.
fn locate(core: &Core, requests: &[Request]) -> Result<(Vec<Pin>, Places)> {
    let (mut pins, mut places) = (Vec::<Pin>::new(), Places::default());
    let mut any_gpu = None;
    for (i, &Request { local, len, .. }) in requests.iter().enumerate().filter(|(_, r)| r.len > 0) {
        // Requests tend to stay in one buffer. Buffers that take turns are pinned again and again; that
        // costs little and is right.
        if pins.last().is_none_or(|pin| !pin.contains(local, len)) {
            core.registry.pin_touched(local, len, &mut pins);
            let whole = pins.last().is_some_and(|pin| pin.contains(local, len));
            if !whole && *any_gpu.get_or_insert_with(|| core.devices.is_any_in_use()) {
                if let Place::Device(device, _) = core.devices.place(Location::Any, local, len)? {
                    places.set(i, &device)?;
                }
                continue;
            }
        }
        if let Some(device) = pins.last().and_then(Pin::device) {
            places.set(i, device)?;
        }
    }
    if !places.devices().is_empty() {
        check_allocations(&pins)?;
    }
    Ok((pins, places))
}

/// Refuses device memory that was freed since it was registered, and whose address may be somebody else's now.
fn check_allocations(pins: &[Pin]) -> Result<()> {
    // Buffers that take turns in a batch are pinned again and again, and asked about once.
    let mut checked = HashSet::new();
    for pin in pins {
        let (Some((BufferInfo { addr, len }, number)), Some(device)) =
            (pin.allocation(), pin.device())
        else {
            continue;
        };
        if !checked.insert(addr) {
            continue;
        }
        // A library that cannot tell is no reason to refuse.
        if device.runtime().buffer_id(addr).is_ok_and(|now| now != Some(number)) {
            return Err(Error::Reallocated { addr, len });
        }
    }
    Ok(())
}
