//! Copies within the process that touch device memory.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_wire::Op;

use crate::memory::{CopyMode, copy_slot, copy_slots};
use crate::registry::Pin;
use crate::staging::ring::Taken;
use crate::staging::{Alarm, Copy, Fault, Job, Keep, Loan, Stager, Way};
use crate::transfer::{Slice, Stop};

/// From where to where a slice goes that is copied within the process, by way of a device at least at one end.
pub(crate) struct DevicePath<'a> {
    slice: &'a Slice,
    pin: &'a Pin,
    from: End,
    to: End,
}

struct End {
    addr: u64,
    device: Option<Arc<Stager>>,
    /// How user space may touch it, if it is the host's.
    mode: CopyMode,
}

/// Why a piece was not copied.
pub(crate) enum PathError {
    Host(io::Error),
    Device(Fault),
    Stopped(Stop),
}

/// How long a wait may last before it looks whether its batch is to stop.
const STEP: Duration = Duration::from_millis(20);

impl<'a> DevicePath<'a> {
    /// `None`: both ends are the host's. `modes` are those of the local and of the remote end.
    pub(crate) fn of(
        slice: &'a Slice,
        pin: &'a Pin,
        (from, to): (u64, u64),
        [local, remote]: [CopyMode; 2],
    ) -> Option<Self> {
        let (here, there) = (slice.device(), pin.device());
        if here.is_none() && there.is_none() {
            return None;
        }
        let ours = |addr| End { addr, device: here.cloned(), mode: local };
        let theirs = |addr| End { addr, device: there.cloned(), mode: remote };
        let (from, to) = match slice.op() {
            Op::Write => (ours(from), theirs(to)),
            Op::Read => (theirs(from), ours(to)),
        };
        Some(Self { slice, pin, from, to })
    }

    /// The most that one [`DevicePath::copy`] copies.
    pub(crate) fn most(&self) -> u64 {
        match self.stagers() {
            _ if self.is_direct() => u64::MAX,
            (Some(one), other) => {
                let bytes = one.ring(Way::ToHost).slot_bytes();
                other.map_or(bytes, |other| bytes.min(other.ring(Way::ToDevice).slot_bytes()))
                    as u64
            }
            (None, other) => other.map_or(1, |other| other.ring(Way::ToDevice).slot_bytes() as u64),
        }
    }

    fn stagers(&self) -> (Option<&Arc<Stager>>, Option<&Arc<Stager>>) {
        (self.from.device.as_ref(), self.to.device.as_ref())
    }

    /// Whether the devices can copy by themselves: one vendor's library knows both, and the ranges do not overlap.
    fn is_direct(&self) -> bool {
        let (Some(a), Some(b)) = self.stagers() else { return false };
        let apart = self.from.addr.abs_diff(self.to.addr) >= self.slice.len;
        a.device().vendor == b.device().vendor && apart
    }

    /// Copies `len` bytes, `at` bytes from the start.
    pub(crate) fn copy(&self, at: u64, len: u64) -> Result<(), PathError> {
        let (from, to, len) = (self.from.addr + at, self.to.addr + at, len as usize);
        match self.stagers() {
            (Some(_), Some(b)) if self.is_direct() => {
                let copy = Copy { device: to, other: from, len };
                self.run(b, Way::OnDevice, copy, Vec::new())
            }
            (Some(a), Some(b)) if a.device().vendor == b.device().vendor => {
                let slot = self.read(a, from, len)?;
                self.write(b, to, &slot, len)
            }
            (Some(a), Some(b)) => {
                let read = self.read(a, from, len)?;
                let slot = self.slot(b, Way::ToDevice)?;
                copy_slots(&read, &slot, len);
                self.write(b, to, &slot, len)
            }
            (Some(a), None) => {
                let slot = self.read(a, from, len)?;
                copy_slot(&slot, to, len, Op::Read, self.to.mode).map_err(PathError::Host)
            }
            (None, Some(b)) => {
                let slot = self.slot(b, Way::ToDevice)?;
                copy_slot(&slot, from, len, Op::Write, self.from.mode).map_err(PathError::Host)?;
                self.write(b, to, &slot, len)
            }
            (None, None) => unreachable!("one end is a device's"),
        }
    }

    fn read(&self, device: &Stager, from: u64, len: usize) -> Result<Arc<Loan>, PathError> {
        let slot = self.slot(device, Way::ToHost)?;
        let copy = Copy { device: from, other: slot.addr(), len };
        self.run(device, Way::ToHost, copy, vec![Keep::Slot(Arc::clone(&slot))])?;
        Ok(slot)
    }

    fn write(
        &self,
        device: &Stager,
        to: u64,
        slot: &Arc<Loan>,
        len: usize,
    ) -> Result<(), PathError> {
        let copy = Copy { device: to, other: slot.addr(), len };
        self.run(device, Way::ToDevice, copy, vec![Keep::Slot(Arc::clone(slot))])
    }

    fn run(
        &self,
        device: &Stager,
        way: Way,
        copy: Copy,
        mut keep: Vec<Keep>,
    ) -> Result<(), PathError> {
        keep.extend([Keep::Hold(self.slice.hold()), Keep::Pin(self.pin.again())]);
        let job = Job { way, copies: vec![copy], keep, bell: Some(Alarm::here()) };
        let done = device.submit(job);
        loop {
            match done.result() {
                Some(result) => return result.map_err(PathError::Device),
                None => self.park()?,
            }
        }
    }

    fn slot(&self, device: &Stager, way: Way) -> Result<Arc<Loan>, PathError> {
        let (bell, mut turn) = (Alarm::here(), None);
        loop {
            match device.slot(way, &mut turn, &bell).map_err(PathError::Device)? {
                Taken::Slot(loan) => return Ok(Arc::new(loan)),
                Taken::Wait => self.park()?,
            }
        }
    }

    fn park(&self) -> Result<(), PathError> {
        match self.slice.batch.stop_at(Instant::now()) {
            Some(stop) => Err(PathError::Stopped(stop)),
            None => {
                std::thread::park_timeout(STEP);
                Ok(())
            }
        }
    }
}
