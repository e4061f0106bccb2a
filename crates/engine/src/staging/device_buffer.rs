//! Device memory of the engine's making.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use tensorferry_gpu::{Context, DeviceId};
use tensorferry_wire::Op;

use crate::error::{Error, Result};
use crate::memory::{Lent, OwnedRequest, empty_slot, fill_slot};
use crate::staging::ring::Taken;
use crate::staging::worker::Order;
use crate::staging::{Alarm, Copy, Devices, Job, Keep, Loan, Stager, Way};

/// Memory of a device that can be lent without `unsafe`, as [`HostBuffer`](crate::HostBuffer) is.
///
/// Clones are the same memory; it is freed when the last one is gone, and both a registration and a running batch
/// hold one. Made by [`Engine::device_buffer`](crate::Engine::device_buffer), whose copy worker it uses: once that
/// engine is closed or dropped, nothing can be copied in or out ([`Error::Closed`]). The memory stays, and is freed all
/// the same; but a context that was made for it then stays until the process ends.
///
/// ```no_run
/// use tensorferry::gpu::{DeviceId, Vendor};
/// use tensorferry::{Config, Engine, RegisterOptions};
///
/// # fn main() -> tensorferry::Result<()> {
/// let engine = Engine::new("10.0.0.1", Config::default())?;
/// let block = engine.device_buffer(DeviceId::new(Vendor::Cuda, 0), 1 << 20)?;
/// block.write(0, b"hello")?;
/// engine.register_device_buffer(&block, &RegisterOptions::default())?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeviceBuffer {
    memory: Arc<Allocation>,
}

struct Allocation {
    stager: Arc<Stager>,
    addr: u64,
    len: usize,
    /// The process that it was allocated in, where its stager's thread is.
    pid: u32,
}

/// How long an allocation or a copy may take: the first one of a process makes the device's context.
const PATIENCE: Duration = Duration::from_secs(60);

impl DeviceBuffer {
    pub(crate) fn new(devices: &Devices, device: DeviceId, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::bad_argument("a buffer needs at least one byte"));
        }
        let stager = devices.stager(device, Context::Made)?;
        let (tell, told) = sync_channel(1);
        stager.order(Order::Alloc(len, tell));
        let answer = told.recv_timeout(PATIENCE).unwrap_or_else(|_| Err(stager.no_answer()));
        let addr = answer.map_err(|why| (*why).clone())?;
        let pid = std::process::id();
        Ok(Self { memory: Arc::new(Allocation { stager, addr, len, pid }) })
    }

    /// The address of the first byte, as requests and peers name it.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.memory.addr
    }

    /// The length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// The device that it is on.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.memory.stager.device()
    }

    /// Copies `bytes` to `offset`, and waits until they are there.
    ///
    /// # Errors
    /// They do not fit; what the device refused; [`Error::Closed`] once the engine is.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        let (stager, mut at) = (&self.memory.stager, self.addr() + offset as u64);
        let until = Instant::now() + PATIENCE;
        for piece in bytes.chunks(stager.ring(Way::ToDevice).slot_bytes()) {
            let slot = stager.slot_by(Way::ToDevice, until)?;
            fill_slot(&slot, 0, piece);
            self.copy(Way::ToDevice, at, &slot, piece.len(), until)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Copies `len` bytes at `offset` out.
    ///
    /// # Errors
    /// The range is not inside the buffer; what the device refused; [`Error::Closed`] once the engine is.
    pub fn read(&self, offset: usize, len: usize) -> Result<Vec<u8>> {
        self.check(offset, len)?;
        let mut bytes = vec![0; len];
        self.read_into(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// As [`DeviceBuffer::read`].
    pub fn read_into(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        let (stager, mut at) = (&self.memory.stager, self.addr() + offset as u64);
        let until = Instant::now() + PATIENCE;
        for piece in bytes.chunks_mut(stager.ring(Way::ToHost).slot_bytes()) {
            let slot = stager.slot_by(Way::ToHost, until)?;
            self.copy(Way::ToHost, at, &slot, piece.len(), until)?;
            empty_slot(&slot, 0, piece);
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// A request whose local range is `len` bytes at `offset` of this buffer.
    ///
    /// # Errors
    /// The range is not inside the buffer.
    pub fn request(&self, op: Op, offset: usize, remote: u64, len: usize) -> Result<OwnedRequest> {
        self.check(offset, len)?;
        Ok(OwnedRequest::new(op, self.addr() + offset as u64, remote, len as u64, self.clone()))
    }

    fn copy(
        &self,
        way: Way,
        device: u64,
        slot: &Arc<Loan>,
        len: usize,
        until: Instant,
    ) -> Result<()> {
        let copies = vec![Copy { device, other: slot.addr(), len }];
        let keep = vec![Keep::Slot(Arc::clone(slot)), Keep::Lent(self.clone().into())];
        self.memory.stager.copy_by(Job { way, copies, keep, bell: None }, until)
    }

    fn check(&self, offset: usize, len: usize) -> Result<()> {
        if self.memory.pid != std::process::id() {
            return Err(Error::ForkedProcess { parent: self.memory.pid });
        }
        if offset.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(Error::bad_argument(format!(
                "[{offset}, +{len}) is not inside the buffer of {} bytes",
                self.len()
            )));
        }
        Ok(())
    }
}

impl From<DeviceBuffer> for Lent {
    fn from(buffer: DeviceBuffer) -> Self {
        Self::new(buffer.memory)
    }
}

impl Stager {
    /// A slot, as soon as there is one.
    ///
    /// # Errors
    /// There are none; none came before `until`.
    pub(crate) fn slot_by(&self, way: Way, until: Instant) -> Result<Arc<Loan>> {
        let (bell, mut turn, mut waits) = (Alarm::here(), None, false);
        loop {
            match self.slot(way, &mut turn, &bell).map_err(|why| (*why).clone())? {
                Taken::Slot(loan) => return Ok(Arc::new(loan)),
                Taken::Wait => {
                    if !std::mem::replace(&mut waits, true) {
                        self.wait_for_slot();
                    }
                    park_until(until)
                        .ok_or(Error::DeviceStuck { subject: None, device: self.device() })?;
                }
            }
        }
    }

    /// Has a job carried out, and waits for its end.
    ///
    /// # Errors
    /// It failed; it did not end before `until`, and goes on.
    pub(crate) fn copy_by(&self, job: Job, until: Instant) -> Result<()> {
        let done = self.submit(Job { bell: Some(Alarm::here()), ..job });
        loop {
            match done.result() {
                Some(result) => return result.map_err(|why| (*why).clone()),
                None => park_until(until)
                    .ok_or(Error::DeviceStuck { subject: None, device: self.device() })?,
            }
        }
    }
}

/// Waits for a bell; `None` when `until` has come. A bell that rang before is not lost.
fn park_until(until: Instant) -> Option<()> {
    let left = until.checked_duration_since(Instant::now())?;
    std::thread::park_timeout(left);
    Some(())
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer[{}, {:#x}, +{})", self.device(), self.addr(), self.len())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // A forked child has neither the thread nor the memory.
        if self.pid == std::process::id() {
            self.stager.order(Order::Free(self.addr));
        }
    }
}
