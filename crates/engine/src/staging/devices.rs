//! Which devices an engine uses, and what memory is where.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tensorferry_gpu::{
    Choice, Context, DeviceId, Discovery, GpuError, Location, Memory, Settings, State,
};

use crate::error::{Error, Result};
use crate::memory::check_mapped;
use crate::staging::{Bell, Stager};

/// The GPU side of one engine: nothing, until memory of a device turns up.
pub(crate) struct Devices {
    gpus: Discovery,
    /// Slots per ring, and bytes per slot.
    slots: (usize, usize),
    /// Has an IO thread look for those who wait too long.
    sweeper: Arc<dyn Bell>,
    stagers: RwLock<HashMap<DeviceId, Arc<Stager>>>,
    /// Set under the lock of `stagers`: no worker is started any more.
    closed: AtomicBool,
}

/// What a range turned out to be.
pub(crate) enum Place {
    /// Memory that a socket takes.
    Host,
    /// Memory that the device's copies reach, and the number of its allocation.
    Device(Arc<Stager>, Option<u64>),
}

/// Whether the library answers nothing any more, whatever it is asked.
fn is_silent(error: &GpuError) -> bool {
    error.is_sticky() || error.is_unloading()
}

/// How long closing waits for copies that hang.
const PATIENCE: Duration = Duration::from_millis(600);

impl Devices {
    pub(crate) fn new(settings: Settings, slots: (usize, usize), sweeper: Arc<dyn Bell>) -> Self {
        Self {
            gpus: Discovery::new(settings),
            slots,
            sweeper,
            stagers: RwLock::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn gpus(&self) -> &Discovery {
        &self.gpus
    }

    /// The worker of a device, started at the first call.
    pub(crate) fn stager(&self, device: DeviceId, context: Context) -> Result<Arc<Stager>> {
        let known = self.read().get(&device).cloned();
        if let Some(stager) = known.filter(|stager| stager.is_open()) {
            return Ok(stager);
        }
        let runtime = self.gpus.require_device(device)?;
        let mut stagers = self.stagers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(stager) = stagers.get(&device).filter(|stager| stager.is_open()) {
            return Ok(Arc::clone(stager));
        }
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::Closed);
        }
        let stager = Stager::start(device, runtime, context, self.slots, &self.sweeper)?;
        stagers.insert(device, Arc::clone(&stager));
        Ok(stager)
    }

    /// Finds out what a range is. Of unknown memory only those libraries are asked that the process uses already.
    ///
    /// # Errors
    /// The named device cannot be used; the range is in several allocations, or is not what it was said to be.
    pub(crate) fn place(&self, location: Location, addr: u64, len: u64) -> Result<Place> {
        let memory = match self.gpus.classify(location, addr, len) {
            Err(error) if location == Location::Any && is_silent(&error) => {
                // Nothing is known any more. What the host can touch moves all the same.
                return match check_mapped(addr, len, false) {
                    Ok(()) => Ok(Place::Host),
                    Err(_) => Err(error.into()),
                };
            }
            answer => answer?,
        };
        let named = match location {
            Location::Device(device) => Some(device),
            Location::Any | Location::Cpu => None,
        };
        let found = memory.staged_on();
        if named.is_some_and(|named| found != Some(named)) {
            let found =
                found.map_or("host memory".to_owned(), |device| format!("memory of {device}"));
            return Err(Error::WrongLocation { addr, len, named: location.to_string(), found });
        }
        match (memory, found) {
            (_, Some(device)) => {
                let stager = self.stager(device, Context::OfMemory(addr))?;
                Ok(Place::Device(stager, memory.buffer_id()))
            }
            (Memory::PinnedHost { host, .. }, None) if host != addr => {
                Err(Error::bad_argument(format!(
                    "[{addr:#x}, +{len}) is how a device sees pinned host memory, which the host sees at {host:#x}; \
                     use that address"
                )))
            }
            _ => Ok(Place::Host),
        }
    }

    /// What each vendor's library has answered so far, for the text of an error about an address.
    pub(crate) fn report(&self) -> String {
        let states = self.gpus.states();
        let asked = states.iter().filter(|state| !matches!(state, State::NotLookedFor { .. }));
        let mut texts: Vec<String> = asked
            .map(|state| match state {
                State::Ready(found) => {
                    let (api, file, count) = (found.api, found.file.display(), found.devices.len());
                    format!("the {api} ({file}, {count} devices) knows no memory there")
                }
                state => state.to_string(),
            })
            .collect();
        let left = if texts.is_empty() { "no GPU library" } else { "no other GPU library" };
        if texts.len() < states.len() {
            texts.push(match self.gpus.settings().choice {
                Choice::Auto => format!(
                    "{left} is loaded in this process, so none was asked; if it is memory of one, name the device as its \
                     location, such as cuda:0"
                ),
                Choice::Off => {
                    format!("{left} was looked for, because of TENSORFERRY_GPU=off; set it to auto")
                }
                Choice::Only(vendor) => {
                    format!("{left} was looked for, because of TENSORFERRY_GPU={vendor}; set it to auto")
                }
            });
        }
        texts.join("; ")
    }

    /// Whether any library could know about memory that is not registered.
    pub(crate) fn is_any_in_use(&self) -> bool {
        !self.gpus.in_use().is_empty()
    }

    /// As [`Stager::sweep`], for all.
    pub(crate) fn sweep(&self, now: Instant) -> Option<Instant> {
        self.read().values().filter_map(|stager| stager.sweep(now)).min()
    }

    pub(crate) fn revoke(&self, addr: u64) {
        self.read().values().for_each(|stager| stager.revoke(addr));
    }

    /// As [`Stager::starving_since`], for all.
    pub(crate) fn starving_since(&self) -> Option<Instant> {
        self.read().values().filter_map(|stager| stager.starving_since()).min()
    }

    /// Ends all copies.
    pub(crate) fn close(&self) {
        let mut stagers = self.stagers.write().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Relaxed);
        // Taken out: whoever closes again does not wait again for what hangs.
        let all = std::mem::take(&mut *stagers);
        drop(stagers);
        // One after the other they would take as long as there are devices that hang.
        all.values().for_each(|stager| stager.shut(&Arc::new(Error::Closed)));
        let until = Instant::now() + PATIENCE;
        all.into_values().for_each(|stager| stager.close(until));
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, HashMap<DeviceId, Arc<Stager>>> {
        self.stagers.read().unwrap_or_else(PoisonError::into_inner)
    }
}
