//! A running engine, and what the class's methods have it do.
#![expect(unsafe_code, reason = "addresses from Python")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tensorferry::gpu::{Choice, Location, Vendor};
use tensorferry::{
    Access, Batch, Config, Engine, Error, HostBuffer, MetadataServer, Notification, OnFull, Op,
    RegisterOptions, Repeat, Request, Segment, SubmitOptions, UserStream,
};

use crate::args::{Int, Ints, MOST_ENTRIES, room};
use crate::failure::Failure;
use crate::lifetime::watch;
use crate::logging;
use crate::managed::Managed;
use crate::streamed::Streamed;
use crate::waiting::SIGNALS;

/// How long the first batch to a peer may take until it has a number. A peer that is not there has said
/// so by then; one that is stuck keeps nobody for longer.
const FIRST_CONTACT: Duration = Duration::from_millis(250);
/// How many names of peers that were there are remembered.
const MOST_KNOWN: usize = 4096;

/// No submit waits for longer.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Managed memory is copied in pieces of so many bytes, so that Ctrl-C need not wait for all of it.
const PIECE: usize = 64 << 20;

/// An engine from `initialize` on, and what belongs to it. Whoever uses it has asked [`Ready::check`] before:
/// in a forked child nothing else here may be touched, since a lock may have been held at the fork.
pub(crate) struct Ready {
    engine: Engine,
    managed: Arc<Managed>,
    streamed: Arc<Streamed>,
    /// Peers that have answered, or that were waited for once.
    known: Mutex<HashSet<String>>,
    /// What `initialize` was asked for; TCP it is in any case.
    pub(crate) protocol: String,
    /// Which engine of this process it is, from 1.
    pub(crate) number: u64,
    /// The process that made it.
    pid: u32,
}

/// One list of local addresses, one of remote ones, one of lengths: the same number of each.
pub(crate) struct Lists {
    locals: Vec<u64>,
    remotes: Vec<u64>,
    lengths: Vec<u64>,
}

/// What is to be submitted, to whom, and how.
pub(crate) struct Order<'a> {
    pub(crate) segment: &'a Segment,
    pub(crate) lists: &'a Lists,
    pub(crate) op: Op,
    pub(crate) options: SubmitOptions,
}

/// A range that lies in one buffer.
pub(crate) enum Place {
    Managed(HostBuffer, usize),
    Registered(u64),
}

/// What came of trying to submit.
enum Tried<T> {
    Submitted(T),
    Full(Error),
}

/// How long the ranges of a batch are.
pub(crate) enum Lengths<'py> {
    Each(Ints<'py>),
    /// All of them the same.
    All(u64),
}

impl<'py> Lengths<'py> {
    /// A sequence of lengths, or one number.
    pub(crate) fn of(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        match given.extract::<Ints<'py>>() {
            Ok(lengths) => Ok(Self::Each(lengths)),
            Err(error) => {
                given.extract::<Int>().map(|Int(length)| Self::All(length)).map_err(|_| error)
            }
        }
    }

    fn len(&self, count: usize) -> usize {
        match self {
            Self::Each(lengths) => lengths.len(),
            Self::All(_) => count,
        }
    }

    pub(crate) fn read(&self, py: Python<'_>, count: usize) -> Result<Vec<u64>, Failure> {
        match self {
            Self::Each(lengths) => lengths.read(py, "lengths"),
            Self::All(length) => {
                let mut lengths = room(count)?;
                lengths.resize(count, *length);
                Ok(lengths)
            }
        }
    }
}

impl Lists {
    /// Reads what was given; `names` are what locals and remotes are called there.
    pub(crate) fn new(
        py: Python<'_>,
        locals: &Ints<'_>,
        remotes: &Ints<'_>,
        lengths: &Lengths<'_>,
        [local, remote]: [&str; 2],
    ) -> Result<Self, Failure> {
        let count = locals.len();
        Self::check_lengths([count, remotes.len(), lengths.len(count)])?;
        // What the call needs in all, asked for at once: the system says no to that before memory is full.
        if count <= MOST_ENTRIES {
            drop(room::<([u64; 3], Request)>(count)?);
        }
        let lists = Self {
            locals: locals.read(py, local)?,
            remotes: remotes.read(py, remote)?,
            lengths: lengths.read(py, count)?,
        };
        // Reading one list can run code that changes another.
        Self::check_lengths([lists.locals.len(), lists.remotes.len(), lists.lengths.len()])?;
        Ok(lists)
    }

    /// Refuses lists of different lengths: of local addresses, of remote ones, of lengths.
    pub(crate) fn check_lengths([locals, remotes, lengths]: [usize; 3]) -> Result<(), Failure> {
        if locals == remotes && locals == lengths {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the lists differ in length: {locals} buffers, {remotes} peer addresses, {lengths} lengths; \
             nothing was sent"
        )))
    }

    /// Lists that were read already, and are of the same length.
    pub(crate) fn of(locals: Vec<u64>, remotes: Vec<u64>, lengths: Vec<u64>) -> Self {
        debug_assert!(locals.len() == remotes.len() && locals.len() == lengths.len());
        Self { locals, remotes, lengths }
    }

    pub(crate) fn one(local: Int, remote: Int, length: Int) -> Self {
        Self { locals: vec![local.0], remotes: vec![remote.0], lengths: vec![length.0] }
    }

    fn requests(&self, op: Op) -> Result<Vec<Request>, Failure> {
        let mut requests = room(self.locals.len())?;
        let addresses = self.locals.iter().zip(&self.remotes);
        let entries = addresses.zip(&self.lengths);
        requests.extend(entries.map(|((&local, &remote), &len)| Request {
            op,
            local,
            remote,
            len,
        }));
        Ok(requests)
    }

    fn bytes(&self) -> u64 {
        self.lengths.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }
}

/// Starts an engine: all of `initialize` but the state of the object.
pub(crate) fn make(
    py: Python<'_>,
    host: &str,
    server: &str,
    protocol: &str,
) -> Result<Arc<Ready>, Failure> {
    // The environment is read with the interpreter lock held, under which Python changes it.
    let config = Config::from_env()?;
    match MetadataServer::parse(server)? {
        MetadataServer::PeerToPeer => {}
        other => return Err(Failure::new(format!("{other:?} is not supported by this face"))),
    }
    if protocol == "xgmi" {
        return Err(Failure::new("protocol xgmi is not supported; use tcp"));
    }
    let ready = start(py, host, config, protocol)?;
    if !matches!(protocol, "tcp" | "") {
        logging::warn_once(
            py,
            format!("protocol {protocol:?} was asked for; this engine moves bytes over TCP"),
        )?;
    }
    Ok(ready)
}

/// Starts an engine, which is closed when the interpreter ends, if not before.
pub(crate) fn start(
    py: Python<'_>,
    host: &str,
    config: Config,
    protocol: &str,
) -> Result<Arc<Ready>, Failure> {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    logging::start(py, config.log)?;
    let engine = py.detach(|| Engine::new(host, config))?;
    let ready = Arc::new(Ready {
        engine,
        managed: Arc::default(),
        streamed: Arc::default(),
        known: Mutex::default(),
        protocol: protocol.to_owned(),
        number: NUMBERS.fetch_add(1, Ordering::Relaxed),
        pid: std::process::id(),
    });
    watch(py, &ready)?;
    Ok(ready)
}

impl Ready {
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn managed(&self) -> &Arc<Managed> {
        &self.managed
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Fails in a forked child of the process that made the engine.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.is_forked() {
            return Err(Error::ForkedProcess { parent: self.pid }.into());
        }
        Ok(())
    }

    /// Ends the engine. Waits for its threads, which may be in the middle of a copy. In a forked child there are
    /// only copies of its sockets to be closed.
    pub(crate) fn close(&self, py: Python<'_>) {
        if self.is_forked() {
            self.engine.close_inherited();
        } else {
            py.detach(|| self.end());
        }
    }

    fn end(&self) {
        self.engine.close();
        self.streamed.end();
    }

    /// Submits, and waits for the end.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        peer: &str,
        lists: &Lists,
        op: Op,
        notification: Option<Notification>,
    ) -> Result<i32, Failure> {
        let segment = &self.engine.segment(peer)?;
        let mut options = SubmitOptions::default();
        options.notification = notification;
        self.complete(py, &Order { segment, lists, op, options })?.1?;
        Ok(0)
    }

    /// Submits, and waits for the end: the batch, and what became of it.
    pub(crate) fn complete(
        &self,
        py: Python<'_>,
        order: &Order<'_>,
    ) -> Result<(Batch, tensorferry::Result<()>), Failure> {
        let (batch, result) = self.submit(py, order, |batch| {
            let result = batch.wait_timeout(SIGNALS);
            (batch, result)
        })?;
        if let Some(result) = result {
            return Ok((batch, result));
        }
        let batches = std::slice::from_ref(&batch);
        self.look_for_signals(py, batches)?;
        let result = self.wait(py, &batch, batches)?;
        Ok((batch, result))
    }

    /// Submits, and gives the batch a number; but not to a peer that is not there.
    pub(crate) fn begin(
        &self,
        py: Python<'_>,
        peer: &str,
        lists: &Lists,
        op: Op,
    ) -> Result<u64, Failure> {
        let known = self.known().contains(peer);
        let segment = &self.engine.segment(peer)?;
        let order = Order { segment, lists, op, options: SubmitOptions::default() };
        let batch = self.submit(py, &order, |batch| batch)?;
        if !known {
            self.meet(py, peer, &batch)?;
        }
        Ok(self.engine.batches().insert(batch).as_raw())
    }

    /// Submits behind what is on the stream `raw`, and holds up what comes after it. Fails if an earlier such
    /// transfer did; nothing is submitted then.
    pub(crate) fn begin_on_stream(
        &self,
        py: Python<'_>,
        method: &'static str,
        peer: &str,
        lists: &Lists,
        (op, raw): (Op, u64),
    ) -> Result<(), Failure> {
        self.streamed.take_failure()?;
        let stream = self.stream(py, raw).hold_later_work();
        let segment = &self.engine.segment(peer)?;
        let options = SubmitOptions::default().with_stream(stream);
        let order = Order { segment, lists, op, options };
        let batch = self.submit(py, &order, |batch| batch)?;
        self.streamed.add(method, batch);
        Ok(())
    }

    /// The stream `raw` of the library that this process uses.
    pub(crate) fn stream(&self, py: Python<'_>, raw: u64) -> UserStream {
        let vendor = py.detach(|| self.vendor());
        // SAFETY: the caller keeps the stream until the transfer has ended and the stream has gone on, as the
        // documentation of both faces asks.
        unsafe { UserStream::new(vendor, raw) }
    }

    /// Whose streams programs have in this process: the methods are called `…_on_cuda` wherever they run.
    fn vendor(&self) -> Vendor {
        let gpus = self.engine.gpus();
        if let Choice::Only(vendor) = gpus.settings().choice {
            return vendor;
        }
        let in_use: Vec<Vendor> = gpus.in_use().iter().map(|gpu| gpu.vendor()).collect();
        // In the order in which vendors are asked, CUDA first.
        in_use.first().copied().unwrap_or(Vendor::Cuda)
    }

    /// How many transfers failed that are ordered with a stream.
    pub(crate) fn streamed_failures(&self) -> u64 {
        self.streamed.failures()
    }

    /// Registers all of the ranges, or none of them.
    ///
    /// A location that is not where the memory is counts as none, since existing engines do not look at it.
    pub(crate) fn register(
        &self,
        py: Python<'_>,
        ranges: &[(u64, u64)],
        location: Location,
    ) -> Result<(), Failure> {
        let register = |location| {
            // Weights are often mapped from a file, read-only. Existing engines know no repeats.
            let options = RegisterOptions::default()
                .with_access(Access::AsMapped)
                .with_repeat(Repeat::Refused)
                .with_location(location);
            // SAFETY: the caller keeps the ranges mapped (device memory: allocated) until `unregister` for them
            // has returned, as the class's documentation asks.
            py.detach(|| unsafe { self.engine.register_all(ranges, &options) })
        };
        let Err(error) = register(location) else { return Ok(()) };
        if !matches!(error, Error::WrongLocation { .. }) {
            return Err(error.into());
        }
        let said = format!(
            "location \"{location}\" was given for memory that is not on that device; it counts as \"*\""
        );
        logging::warn_once(py, said)?;
        Ok(register(Location::Any)?)
    }

    /// Finds out whether the peer of the first batch to it is there.
    fn meet(&self, py: Python<'_>, peer: &str, batch: &Batch) -> Result<(), Failure> {
        let until = Instant::now() + FIRST_CONTACT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match py.detach(|| batch.wait_timeout(left.min(SIGNALS))) {
                Some(Err(error)) if is_absence(&error) => return Err(error.into()),
                Some(_) => {
                    self.remember(peer);
                    return Ok(());
                }
                // It answers slowly, or the batch is long. Calls that come later wait no more, however dead it is.
                None if left <= SIGNALS => {
                    self.remember(peer);
                    return Ok(());
                }
                None => self.look_for_signals(py, std::slice::from_ref(batch))?,
            }
        }
    }

    /// Submits, as soon as there is room in the queue, and does `then` before the interpreter lock is taken again.
    pub(crate) fn submit<T: Send>(
        &self,
        py: Python<'_>,
        order: &Order<'_>,
        then: impl Fn(Batch) -> T + Sync,
    ) -> Result<T, Failure> {
        let begun = Instant::now();
        let (then, mut ends) = (&then, None);
        loop {
            let tried = py.detach(|| {
                Ok::<_, Failure>(match self.try_submit(order, ends)? {
                    Tried::Submitted(batch) => Tried::Submitted(then(batch)),
                    Tried::Full(error) => Tried::Full(error),
                })
            })?;
            let full = match tried {
                Tried::Submitted(value) => return Ok(value),
                Tried::Full(error) => error,
            };
            let (_, no_later) = *ends.get_or_insert_with(|| self.ends(order, begun));
            if Instant::now() >= no_later {
                return Err(full.into());
            }
            self.look_for_signals(py, &[])?;
        }
    }

    /// By when a batch has to be final, and until when it may wait for room in the queue.
    fn ends(&self, order: &Order<'_>, begun: Instant) -> (Instant, Instant) {
        let by_default = || self.engine.config().default_timeout(order.lists.bytes());
        let timeout = order.options.timeout.unwrap_or_else(by_default).min(FOREVER);
        let patience = match order.options.on_full {
            OnFull::Wait => timeout,
            OnFull::WaitFor(time) => time.min(timeout),
            _ => Duration::ZERO,
        };
        (begun + timeout, begun + patience)
    }

    /// Submits if there is room in the queue before the next look for signals. What has waited for room has the less time left.
    fn try_submit(
        &self,
        order: &Order<'_>,
        ends: Option<(Instant, Instant)>,
    ) -> Result<Tried<Batch>, Failure> {
        let mut options = order.options.clone();
        if let Some((deadline, no_later)) = ends {
            let now = Instant::now();
            options.timeout = Some(deadline.saturating_duration_since(now));
            options.on_full = OnFull::WaitFor(no_later.saturating_duration_since(now).min(SIGNALS));
        } else {
            options.on_full = match options.on_full {
                OnFull::Wait => OnFull::WaitFor(SIGNALS),
                OnFull::WaitFor(time) => OnFull::WaitFor(time.min(SIGNALS)),
                other => other,
            };
        }
        let requests = order.lists.requests(order.op)?;
        // SAFETY: the caller keeps the local ranges mapped until the batch has ended, as the documentation of both
        // faces asks; calls that wait return no sooner, unless by an exception, after a cancel, and closing the
        // engine ends batches, too.
        match unsafe { order.segment.submit(requests, options) } {
            Ok(batch) => Ok(Tried::Submitted(batch)),
            Err(error @ Error::Busy { .. }) => Ok(Tried::Full(error)),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the end of `batch`, with the interpreter lock released; looks for signals meanwhile. One that
    /// raises cancels `all`.
    pub(crate) fn wait(
        &self,
        py: Python<'_>,
        batch: &Batch,
        all: &[Batch],
    ) -> Result<tensorferry::Result<()>, Failure> {
        loop {
            match py.detach(|| batch.wait_timeout(SIGNALS)) {
                Some(result) => return Ok(result),
                None => self.look_for_signals(py, all)?,
            }
        }
    }

    /// Has Python run its signal handlers. One that raises cancels `all`.
    pub(crate) fn look_for_signals(&self, py: Python<'_>, all: &[Batch]) -> Result<(), Failure> {
        let raised = py.check_signals();
        if let Err(failure) = self.check() {
            // The handler forked, and this is the child, where nobody ends batches.
            all.iter().cloned().for_each(std::mem::forget);
            raised?;
            return Err(failure);
        }
        raised.map_err(|raised| {
            py.detach(|| all.iter().for_each(Batch::cancel));
            Failure::Raised(raised)
        })
    }

    fn known(&self) -> MutexGuard<'_, HashSet<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, peer: &str) {
        let mut known = self.known();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(peer.to_owned());
    }

    pub(crate) fn refuse_managed(&self, addrs: &[u64]) -> Result<(), Failure> {
        match addrs.iter().find(|&&addr| self.managed.starts_at(addr)) {
            None => Ok(()),
            Some(&addr) => {
                let what = "is a managed buffer; free it with free_managed_buffer";
                Err(Failure::from(Error::NotRegistered { addr })
                    .with_text(format!("{addr:#x} {what}")))
            }
        }
    }

    /// Where a range is that lies in one managed or registered buffer.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Result<Place, Failure> {
        if let Some((block, offset)) = self.managed.find(addr, len) {
            return Ok(Place::Managed(block, offset));
        }
        self.check_within(addr, len)?;
        Ok(Place::Registered(addr))
    }

    pub(crate) fn write(&self, py: Python<'_>, to: &Place, bytes: &[u8]) -> Result<(), Failure> {
        match to {
            Place::Managed(block, offset) => {
                for (i, piece) in bytes.chunks(PIECE).enumerate() {
                    py.detach(|| block.write(offset + i * PIECE, piece));
                    self.look_for_signals(py, &[])?;
                }
                Ok(())
            }
            &Place::Registered(addr) => {
                let local = bytes.as_ptr().expose_provenance() as u64;
                self.copy_within(py, Op::Write, local, addr, bytes.len() as u64)
            }
        }
    }

    /// The bytes, read straight into the object that holds them.
    pub(crate) fn read<'py>(
        &self,
        py: Python<'py>,
        from: &Place,
        len: u64,
    ) -> Result<Bound<'py, PyBytes>, Failure> {
        let mut failure = None;
        let bytes = PyBytes::new_with(py, len as usize, |bytes| {
            failure = self.read_into(py, from, bytes).err();
            Ok(())
        })?;
        failure.map_or(Ok(bytes), Err)
    }

    fn read_into(&self, py: Python<'_>, from: &Place, bytes: &mut [u8]) -> Result<(), Failure> {
        match from {
            Place::Managed(block, offset) => {
                for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
                    py.detach(|| block.read_into(offset + i * PIECE, piece));
                    self.look_for_signals(py, &[])?;
                }
                Ok(())
            }
            &Place::Registered(addr) => {
                let local = bytes.as_mut_ptr().expose_provenance() as u64;
                self.copy_within(py, Op::Read, local, addr, bytes.len() as u64)
            }
        }
    }

    /// Copies between memory of ours, which outlives the call, and a registered buffer. It is a transfer
    /// from the engine to itself, so that the buffer is pinned meanwhile.
    fn copy_within(
        &self,
        py: Python<'_>,
        op: Op,
        local: u64,
        addr: u64,
        len: u64,
    ) -> Result<(), Failure> {
        let request = Request { op, local, remote: addr, len };
        let batch = py.detach(|| {
            let segment = self.engine.segment(self.engine.name())?;
            // SAFETY: the two callers own the memory at `local` and keep it until this returns, which is after
            // the batch's end: `wait` returns no sooner, and a signal that raises cancels the batch, which
            // waits for its end.
            unsafe { segment.submit(vec![request], SubmitOptions::default()) }
        })?;
        Ok(self.wait(py, &batch, std::slice::from_ref(&batch))??)
    }

    fn check_within(&self, addr: u64, len: u64) -> Result<(), Failure> {
        let inside =
            |start: u64, size: u64| addr >= start && len <= size && addr - start <= size - len;
        if len == 0 || self.engine.buffers().iter().any(|b| inside(b.addr, b.len)) {
            return Ok(());
        }
        Err(Failure::new(format!("[{addr:#x}, +{len}) is in no registered or managed buffer")))
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if self.is_forked() {
            // A fork that Python's hooks were not told of. See there.
            self.engine.close_inherited();
            let Self { engine, managed, streamed, .. } = self;
            std::mem::forget((engine.clone(), Arc::clone(managed), Arc::clone(streamed)));
            return;
        }
        // The last owner is a Python object whose reference count became zero, so this thread is attached;
        // unless the interpreter is gone, when nobody is kept waiting.
        if Python::try_attach(|py| self.close(py)).is_none() {
            self.end();
        }
    }
}

/// Whether a batch failed because there is nobody to talk to.
fn is_absence(error: &Error) -> bool {
    matches!(
        error,
        Error::PeerUnreachable { .. }
            | Error::Name(_)
            | Error::BadAnswer { .. }
            | Error::Closed
            | Error::ForkedProcess { .. }
    )
}
