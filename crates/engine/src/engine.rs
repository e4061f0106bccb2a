//! What users hold: [`Engine`] and [`Segment`].

use std::sync::Arc;

use crate::config::Config;
use crate::error::Result;
use crate::memory::{HostBuffer, OwnedRequest};
use crate::metrics::Stats;
use crate::registry::{BufferInfo, RegisterOptions};
use crate::transfer::{Batch, BatchTable, Request, SubmitOptions};
use tensorferry_wire::Notification;

/// A transfer engine: registered memory that peers can reach, and a way to reach theirs.
///
/// Clones are the same engine. It is closed when the last clone, segment and running batch are
/// gone, or by [`Engine::close`].
#[derive(Clone, Debug)]
pub struct Engine {}

/// The memory of one peer, by name.
#[derive(Clone, Debug)]
pub struct Segment {}

impl Engine {
    /// Starts an engine that peers reach at `host` (a name or an address, a port behind it is ignored), peer to peer: its
    /// name becomes `host:port` with a control port chosen from `config.ports`.
    ///
    /// # Errors
    /// A host that cannot be advertised, no free port, no thread or socket to be had.
    pub fn new(host: &str, config: Config) -> Result<Self> { todo!() }

    /// The segment name that peers open: `host:port`.
    #[must_use]
    pub fn name(&self) -> &str { todo!() }

    /// The port that peers ask for the descriptor, notify and probe.
    #[must_use]
    pub fn control_port(&self) -> u16 { todo!() }

    /// The port that data connections go to.
    #[must_use]
    pub fn data_port(&self) -> u16 { todo!() }

    /// The settings in force.
    #[must_use]
    pub fn config(&self) -> &Config { todo!() }

    /// Lets peers reach `len` bytes at `addr` until [`Engine::unregister`] has returned.
    ///
    /// # Errors
    /// Null address, zero length, a range that wraps; [`crate::Error::Overlap`] with another buffer.
    ///
    /// # Safety
    /// The range is host memory, mapped and writable (readable suffices for `Access::ReadOnly`) until `unregister` for it has returned.
    pub unsafe fn register(&self, addr: u64, len: u64, options: &RegisterOptions) -> Result<()> { todo!() }

    /// Registers all of the ranges (address, length), or none of them.
    ///
    /// # Errors
    /// As [`Engine::register`]; nothing is registered then.
    ///
    /// # Safety
    /// As [`Engine::register`].
    pub unsafe fn register_all(&self, ranges: &[(u64, u64)], options: &RegisterOptions) -> Result<()> { todo!() }

    /// Registers a buffer that the engine keeps alive until it is unregistered.
    ///
    /// # Errors
    /// As [`Engine::register`].
    pub fn register_buffer(&self, buffer: &HostBuffer, options: &RegisterOptions) -> Result<()> { todo!() }

    /// Ends what `register` began: when this returns, no peer and no thread of the engine touches the buffer.
    ///
    /// # Errors
    /// No buffer starts at `addr`; [`crate::Error::StillInUse`].
    pub fn unregister(&self, addr: u64) -> Result<()> { todo!() }

    /// Unregisters all of the buffers, or, if one address is unknown, none of them.
    ///
    /// # Errors
    /// As [`Engine::unregister`].
    pub fn unregister_all(&self, addrs: &[u64]) -> Result<()> { todo!() }

    /// The buffers that are registered here, in the order of their registration.
    #[must_use]
    pub fn buffers(&self) -> Vec<BufferInfo> { todo!() }

    /// Names a peer's segment without asking for it; the first submit does.
    ///
    /// # Errors
    /// A name that cannot be understood.
    pub fn segment(&self, name: &str) -> Result<Segment> { todo!() }

    /// Opens a peer's segment: its descriptor is fetched, unless it is known already.
    ///
    /// # Errors
    /// A name that cannot be understood, a peer that cannot be reached or understood.
    pub fn open(&self, name: &str) -> Result<Segment> { todo!() }

    /// Asks a peer's control port whether it is alive.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn probe(&self, name: &str) -> Result<()> { todo!() }

    /// The notifications that have arrived since the last call, in order of arrival.
    pub fn take_notifications(&self) -> Vec<Notification> { todo!() }

    /// Batches by number, for callers that cannot hold a [`Batch`].
    #[must_use]
    pub fn batches(&self) -> &BatchTable { todo!() }

    /// What the engine has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats { todo!() }

    /// Ends everything now: running batches fail with [`crate::Error::Closed`], sockets are closed, threads have
    /// ended when this returns, and no memory of users is touched any more.
    pub fn close(&self) { todo!() }

    /// Whether `close` was called.
    #[must_use]
    pub fn is_closed(&self) -> bool { todo!() }
}

impl Segment {
    /// The name it was opened by.
    #[must_use]
    pub fn name(&self) -> &str { todo!() }

    /// The buffers that the peer has registered, asked for now.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn buffers(&self) -> Result<Vec<BufferInfo>> { todo!() }

    /// Starts moving bytes. The requests of a batch run in any order, also at the same time.
    ///
    /// Entries that the peer refuses fail alone. Zero-length entries are complete at once. Waits if the queue to
    /// the peer is full, else never.
    ///
    /// # Errors
    /// Malformed requests (null address, a range that wraps): nothing was sent. All else is the result of the [`Batch`].
    ///
    /// # Safety
    /// The local memory of every request stays mapped (READ: writable) until the batch is final
    /// ([`Batch::poll`] is not `Running`), and nobody else touches what a READ writes. Memory that is not mapped at
    /// all is an error of the entry, not undefined behaviour.
    pub unsafe fn submit(&self, requests: Vec<Request>, options: SubmitOptions) -> Result<Batch> { todo!() }

    /// [`Segment::submit`] for buffers that the batch keeps alive.
    ///
    /// # Errors
    /// As [`Segment::submit`].
    pub fn submit_owned(&self, requests: &[OwnedRequest], options: SubmitOptions) -> Result<Batch> { todo!() }

    /// Sends a notification to the peer and waits for its answer.
    ///
    /// # Errors
    /// [`crate::Error::NotifyTooLarge`], [`crate::Error::NotifyFailed`].
    pub fn notify(&self, notification: &Notification) -> Result<()> { todo!() }
}
