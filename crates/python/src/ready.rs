//! A running engine, and what the class's methods have it do.
#![expect(unsafe_code, reason = "addresses from Python")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tensorferry::{
    Batch, Config, Engine, Error, MetadataServer, Notification, Op, Request, SubmitOptions,
};

use crate::args::{Int, Ints};
use crate::failure::Failure;
use crate::lifetime::{Running, watch};
use crate::logging;
use crate::managed::Managed;

/// How long a wait may last before it looks whether Ctrl-C was pressed.
const SIGNALS: Duration = Duration::from_millis(100);

/// How long the first batch to a peer may take until it has a number. A peer that is not there has said
/// so by then; one that is stuck keeps nobody for longer.
const FIRST_CONTACT: Duration = Duration::from_millis(250);
/// How many names of peers that were there are remembered.
const MOST_KNOWN: usize = 4096;

/// An engine from `initialize` on, and what belongs to it.
pub(crate) struct Ready {
    pub(crate) running: Arc<Running>,
    pub(crate) managed: Managed,
    /// Peers that have answered.
    known: Mutex<HashSet<String>>,
    /// What `initialize` was asked for; TCP it is in any case.
    pub(crate) protocol: String,
    /// Which engine of this process it is, from 1.
    pub(crate) number: u64,
}

/// One list of local addresses, one of remote ones, one of lengths.
pub(crate) struct Lists {
    locals: Vec<u64>,
    remotes: Vec<u64>,
    lengths: Vec<u64>,
}

impl Lists {
    pub(crate) fn new(locals: Ints, remotes: Ints, lengths: Ints) -> Result<Self, Failure> {
        let (locals, remotes, lengths) = (locals.0, remotes.0, lengths.0);
        if locals.len() != remotes.len() || locals.len() != lengths.len() {
            return Err(Failure::new(format!(
                "the lists differ in length: {} buffers, {} peer addresses, {} lengths; nothing was sent",
                locals.len(),
                remotes.len(),
                lengths.len()
            )));
        }
        Ok(Self { locals, remotes, lengths })
    }

    pub(crate) fn one(local: Int, remote: Int, length: Int) -> Self {
        Self { locals: vec![local.0], remotes: vec![remote.0], lengths: vec![length.0] }
    }

    fn requests(&self, op: Op) -> Vec<Request> {
        let addresses = self.locals.iter().zip(&self.remotes);
        let entries = addresses.zip(&self.lengths);
        entries.map(|((&local, &remote), &len)| Request { op, local, remote, len }).collect()
    }
}

/// Starts an engine: all of `initialize` but the state of the object.
pub(crate) fn make(
    py: Python<'_>,
    host: &str,
    server: &str,
    protocol: &str,
) -> Result<Arc<Ready>, Failure> {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    // The environment is read with the interpreter lock held, under which Python changes it.
    let config = Config::from_env()?;
    match MetadataServer::parse(server)? {
        MetadataServer::PeerToPeer => {}
        other => return Err(Failure::new(format!("{other:?} is not supported by this face"))),
    }
    if protocol == "xgmi" {
        return Err(Failure::new("protocol xgmi is not supported; use tcp"));
    }
    logging::start(py, config.log)?;
    let engine = py.detach(|| Engine::new(host, config))?;
    let running = watch(py, engine)?;
    if !matches!(protocol, "tcp" | "") {
        logging::warn_once(
            py,
            format!("protocol {protocol:?} was asked for; this engine moves bytes over TCP"),
        )?;
    }
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    Ok(Arc::new(Ready {
        running,
        managed: Managed::default(),
        known: Mutex::default(),
        protocol: protocol.to_owned(),
        number,
    }))
}

impl Ready {
    pub(crate) fn engine(&self) -> &Engine {
        &self.running.engine
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
        let (batch, result) = py.detach(|| {
            let options = SubmitOptions { notification, ..SubmitOptions::default() };
            let segment = self.engine().segment(peer)?;
            // SAFETY: the caller keeps the local ranges mapped until the transfer has ended, as the class's
            // documentation asks; this returns no sooner, unless by an exception, after a cancel.
            let batch = unsafe { segment.submit(lists.requests(op), options) }?;
            let result = batch.wait_timeout(SIGNALS);
            Ok::<_, Error>((batch, result))
        })?;
        match result {
            Some(result) => result?,
            None => {
                py_signals(py, std::slice::from_ref(&batch))?;
                wait(py, &batch, std::slice::from_ref(&batch))??;
            }
        }
        Ok(0)
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
        let batch = py.detach(|| {
            let segment = self.engine().segment(peer)?;
            // SAFETY: the caller keeps the local ranges mapped until the batch has ended, as the class's
            // documentation asks; closing the engine ends it, too.
            unsafe { segment.submit(lists.requests(op), SubmitOptions::default()) }
        })?;
        if !known {
            match py.detach(|| batch.wait_timeout(FIRST_CONTACT)) {
                Some(Err(error)) if is_absence(&error) => return Err(error.into()),
                Some(_) => self.remember(peer),
                // It answers slowly, or the batch is long.
                None => {}
            }
        }
        Ok(self.engine().batches().insert(batch).as_raw())
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

    pub(crate) fn write_within(&self, addr: u64, bytes: &[u8]) -> Result<(), Failure> {
        let len = bytes.len() as u64;
        if let Some((block, offset)) = self.managed.find(addr, len) {
            block.write(offset, bytes);
            return Ok(());
        }
        self.copy_within(Op::Write, bytes.as_ptr().expose_provenance() as u64, addr, len)
    }

    pub(crate) fn read_within(&self, addr: u64, len: u64) -> Result<Vec<u8>, Failure> {
        if let Some((block, offset)) = self.managed.find(addr, len) {
            return Ok(block.read(offset, len as usize));
        }
        self.check_within(addr, len)?;
        let mut bytes = vec![0; len as usize];
        let local = bytes.as_mut_ptr().expose_provenance() as u64;
        self.copy_within(Op::Read, local, addr, len)?;
        Ok(bytes)
    }

    /// Copies between memory of ours, which outlives the call, and a registered buffer. It is a transfer
    /// from the engine to itself, so that the buffer is pinned meanwhile.
    fn copy_within(&self, op: Op, local: u64, addr: u64, len: u64) -> Result<(), Failure> {
        self.check_within(addr, len)?;
        let segment = self.engine().segment(self.engine().name())?;
        let request = Request { op, local, remote: addr, len };
        // SAFETY: the two callers own the memory at `local` and keep it until this returns, which is after
        // the batch's end.
        let batch = unsafe { segment.submit(vec![request], SubmitOptions::default()) }?;
        Ok(batch.wait()?)
    }

    fn check_within(&self, addr: u64, len: u64) -> Result<(), Failure> {
        let inside =
            |start: u64, size: u64| addr >= start && len <= size && addr - start <= size - len;
        if len == 0 || self.engine().buffers().iter().any(|b| inside(b.addr, b.len)) {
            return Ok(());
        }
        Err(Failure::new(format!("[{addr:#x}, +{len}) is in no registered or managed buffer")))
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

/// Waits for the end of `batch`, with the interpreter lock released; looks for signals meanwhile. One that
/// raises cancels `all`.
pub(crate) fn wait(
    py: Python<'_>,
    batch: &Batch,
    all: &[Batch],
) -> Result<tensorferry::Result<()>, Failure> {
    loop {
        match py.detach(|| batch.wait_timeout(SIGNALS)) {
            Some(result) => return Ok(result),
            None => py_signals(py, all)?,
        }
    }
}

fn py_signals(py: Python<'_>, all: &[Batch]) -> Result<(), Failure> {
    py.check_signals().map_err(|raised| {
        py.detach(|| all.iter().for_each(Batch::cancel));
        Failure::Raised(raised)
    })
}
