//! Which GPU libraries this process has, asked as late and as little as possible.

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cuda_driver::CudaDriver;
use crate::device::{Api, DeviceId, Location, Vendor};
use crate::error::{Failure, GpuError, Meaning, Result};
use crate::interface::{DeviceInfo, GpuRuntime};
use crate::library::{self, Library};
use crate::memory::Memory;
use crate::runtime::Runtime;
use crate::search::{Searched, search};
use crate::settings::{Choice, Settings};
use crate::state::{Found, State, Tried, Versions};

/// Whether somebody has initialised a library.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Awake {
    Yes,
    No,
    /// The interface cannot tell without initialising.
    Unknown,
}

/// Why a library could not be initialised.
pub(crate) struct Refusal {
    failure: Failure,
    versions: Versions,
}

impl Refusal {
    pub(crate) fn of(failure: Failure, versions: Versions) -> Self {
        Self { failure, versions }
    }
}

/// What finding needs of a table, beside what its users do.
pub(crate) trait Backend: GpuRuntime {
    /// Whether somebody has initialised the library; does not do it.
    fn awake(&self) -> Awake;

    /// Initialises it, and counts the devices. Called once per process.
    fn initialise(&self) -> std::result::Result<u32, Refusal>;
}

/// One library's table in this process. Engines share it, so that a library is initialised once
/// however many there are.
#[derive(Clone)]
pub(crate) struct Table {
    library: &'static Library,
    backend: Arc<dyn Backend>,
    outcome: Arc<Mutex<Option<State>>>,
}

/// What a library would need to be a vendor's.
pub(crate) struct Lack {
    pub(crate) why: String,
    /// The function.
    pub(crate) name: String,
}

/// The process in which a vendor's library was initialised through us; 0: none. Read without a
/// lock, since a child of a fork inherits a locked one as such.
static INITIALISED_IN: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];

impl Table {
    /// The table of `library`, made at most once; the error is what is wrong with the library.
    pub(crate) fn of(
        vendor: Vendor,
        library: &'static Library,
        chosen: bool,
    ) -> std::result::Result<Self, Lack> {
        let lacks = |name: String| Lack { why: format!("it lacks the function {name}"), name };
        let api = match vendor {
            Vendor::Musa => Api::MusaRuntime,
            Vendor::Hip => Api::HipRuntime,
            Vendor::Cuda => {
                match (library.has("cuInit"), chosen && library.has("cudaGetDeviceCount")) {
                    (true, false) => Api::CudaDriver,
                    (false, true) => Api::CudaRuntime,
                    (true, true) if is_runtime_by_name(library) => Api::CudaRuntime,
                    (true, true) => Api::CudaDriver,
                    (false, false) if chosen => {
                        return Err(Lack {
                            why: "it has neither cuInit (a driver) nor cudaGetDeviceCount (a \
                                  runtime)"
                                .to_owned(),
                            name: "cuInit".to_owned(),
                        });
                    }
                    (false, false) => return Err(lacks("cuInit".to_owned())),
                }
            }
        };
        let mut tables = library::process().tables.lock().unwrap_or_else(PoisonError::into_inner);
        let known = tables
            .iter()
            .find(|table| ptr::eq(table.library, library) && table.backend.api() == api);
        if let Some(known) = known {
            return Ok(known.clone());
        }
        let backend: Arc<dyn Backend> = match api {
            Api::CudaDriver => Arc::new(CudaDriver::new(library).map_err(lacks)?),
            _ => Arc::new(Runtime::new(api, library).map_err(lacks)?),
        };
        let table = Self { library, backend, outcome: Arc::new(Mutex::new(None)) };
        tables.push(table.clone());
        Ok(table)
    }

    /// Initialises the library, unless that has been done; the state is remembered, whatever it is.
    fn initialise(&self) -> State {
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*outcome {
            return known.clone();
        }
        let vendor = self.backend.vendor();
        let pid = std::process::id();
        // Relaxed: a child reads what was there when it was forked.
        let state = match INITIALISED_IN[vendor.index()].swap(pid, Ordering::Relaxed) {
            parent if parent != 0 && parent != pid => {
                INITIALISED_IN[vendor.index()].store(parent, Ordering::Relaxed);
                State::Forked { vendor, parent }
            }
            _ => self.state(self.backend.initialise()),
        };
        tracing::info!(%vendor, state = state.word(), "{state}");
        *outcome = Some(state.clone());
        state
    }

    fn state(&self, count: std::result::Result<u32, Refusal>) -> State {
        let (file, api) = (self.backend.file().to_owned(), self.backend.api());
        match count {
            Ok(0) => {
                State::NoDevice { file, api, versions: self.backend.versions(), failure: None }
            }
            Ok(count) => State::Ready(Arc::new(Found {
                file,
                api,
                versions: self.backend.versions(),
                devices: (0..count).map(|ordinal| self.device(ordinal)).collect(),
                absent: self.backend.absent(),
            })),
            Err(Refusal { failure, versions }) => match failure.meaning() {
                Meaning::NoDevice => {
                    State::NoDevice { file, api, versions, failure: Some(failure) }
                }
                // A runtime gives the same number for a driver that is too old and for one that is
                // not there.
                Meaning::InsufficientDriver
                    if api != Api::CudaDriver && versions.driver.is_none() =>
                {
                    State::NoDriver { file, api, versions, failure }
                }
                Meaning::InsufficientDriver => State::DriverTooOld { file, api, versions, failure },
                _ => State::InitFailed { file, api, versions, failure },
            },
        }
    }

    fn device(&self, ordinal: u32) -> DeviceInfo {
        self.backend.device(ordinal).unwrap_or_else(|error| {
            tracing::debug!(%error, ordinal, "a device does not describe itself");
            DeviceInfo {
                id: DeviceId::new(self.backend.vendor(), ordinal),
                name: None,
                memory_bytes: None,
                pci_address: None,
                uuid: None,
                integrated: false,
            }
        })
    }
}

/// A file that has the functions of both goes by its name.
fn is_runtime_by_name(library: &Library) -> bool {
    library.file().file_name().is_some_and(|name| name.to_string_lossy().starts_with("libcudart"))
}

/// What one engine knows about one vendor.
struct Slot {
    state: State,
    /// What was tried to come to it.
    tried: Vec<Tried>,
    table: Option<Table>,
    /// Somebody asked for a device, so the answer is final.
    decided: bool,
    /// What was mapped when it was looked for last.
    generation: u64,
}

/// Finds the vendors' libraries, and remembers what it found.
///
/// Nothing is opened until it is needed; nothing is initialised but for [`Discovery::require`] (a
/// device was named, or a report is made), or because [`Choice::Only`] says so. A library that the
/// process has mapped already is preferred to every other file, because it is the one whose memory
/// will be named.
pub struct Discovery {
    settings: Settings,
    pid: u32,
    slots: [Mutex<Slot>; 3],
}

impl fmt::Debug for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discovery").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// How a slot is looked at.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Glance {
    /// Nothing is called that could initialise anything.
    Look,
    /// A mapped MUSA or HIP library may be asked, which is how they find out that there is a
    /// device.
    Ask,
}

impl Discovery {
    /// Nothing is looked for yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let choice = settings.choice;
        let slots = Vendor::ALL.map(|vendor| {
            Mutex::new(Slot {
                state: State::NotLookedFor { vendor, choice },
                tried: Vec::new(),
                table: None,
                decided: false,
                generation: u64::MAX,
            })
        });
        Self { settings, pid: std::process::id(), slots }
    }

    /// The settings that it was made with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What is known about each vendor now; nothing is looked for.
    #[must_use]
    pub fn states(&self) -> [State; 3] {
        Vendor::ALL.map(|vendor| self.state(vendor))
    }

    /// What is known about one of them.
    pub(crate) fn state(&self, vendor: Vendor) -> State {
        self.closed(vendor).unwrap_or_else(|| self.slot(vendor).state.clone())
    }

    /// Which files were tried when the vendor's library was looked for last, in order, and what came
    /// of each; where one was taken, it is the last. Nothing is looked for.
    ///
    /// Where a file was chosen, it is the only one. A copy that the process has loaded comes first
    /// otherwise, and if it can be used, or nobody needs the library yet, no name is tried.
    #[must_use]
    pub fn tried(&self, vendor: Vendor) -> Vec<Tried> {
        match self.closed(vendor) {
            Some(_) => Vec::new(),
            None => self.slot(vendor).tried.clone(),
        }
    }

    /// What the process has mapped of a vendor, and whether somebody has initialised it. Opens no
    /// file that is not mapped, and initialises nothing.
    #[must_use]
    pub fn peek(&self, vendor: Vendor) -> State {
        if let Some(state) = self.closed(vendor) {
            return state;
        }
        let mut slot = self.slot(vendor);
        self.glance(vendor, &mut slot, Glance::Look);
        slot.state.clone()
    }

    /// Whether a library of this vendor is mapped, or opens and has all functions. Nothing is
    /// initialised, so this says nothing about devices.
    #[must_use]
    pub fn supports(&self, vendor: Vendor) -> bool {
        if self.closed(vendor).is_some() {
            return false;
        }
        let mut slot = self.slot(vendor);
        if slot.table.is_some() {
            return true;
        }
        if slot.decided && slot.generation == library::generation() {
            return false;
        }
        self.locate(vendor, &mut slot, false)
    }

    /// A vendor's library, opened and initialised at the first call; the outcome is remembered.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] with the state and its reason.
    pub fn require(&self, vendor: Vendor) -> Result<Arc<dyn GpuRuntime>> {
        self.require_for(vendor, || vendor.spoken().to_owned())
    }

    /// The library of a device, and that there is such a device.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] with the state and its reason, [`GpuError::NoSuchDevice`].
    pub fn require_device(&self, device: DeviceId) -> Result<Arc<dyn GpuRuntime>> {
        let runtime = self.require_for(device.vendor, || device.to_string())?;
        // As counted when it was initialised: the number does not change, and a call could fail.
        let known = |state: &State| state.ready().map_or(0, |found| found.devices.len());
        let count = u32::try_from(known(&self.slot(device.vendor).state)).unwrap_or(u32::MAX);
        if device.ordinal < count {
            return Ok(runtime);
        }
        Err(GpuError::NoSuchDevice { device, file: runtime.file().display().to_string(), count })
    }

    /// The libraries that can be asked about an address of unknown kind: those in use by this
    /// process, and no other.
    #[must_use]
    pub fn in_use(&self) -> Vec<Arc<dyn GpuRuntime>> {
        Vendor::ALL.into_iter().filter_map(|vendor| self.askable(vendor)).collect()
    }

    /// What the `len` bytes at `addr` are, given what the caller says about them. `cpu` is
    /// believed. For a named device the answer may be another memory than that, for the caller to
    /// refuse. `*` is asked of the libraries in use; nothing is initialised for it, as a process
    /// whose library is not initialised has no device memory.
    ///
    /// # Errors
    /// What a library refused, [`GpuError::Unavailable`] for a named device,
    /// [`GpuError::Straddles`].
    pub fn classify(&self, location: Location, addr: u64, len: u64) -> Result<Memory> {
        match location {
            Location::Cpu => Ok(Memory::Host),
            Location::Device(device) => {
                self.require_device(device)?.classify(addr, len, Some(device.ordinal))
            }
            Location::Any => {
                let mut refused = None;
                for runtime in Vendor::ALL.into_iter().filter_map(|vendor| self.askable(vendor)) {
                    match runtime.classify(addr, len, None) {
                        Ok(Memory::Host) => {}
                        Ok(memory) => return Ok(memory),
                        // Another vendor may know it.
                        Err(error) => refused = refused.or(Some(error)),
                    }
                }
                refused.map_or(Ok(Memory::Host), Err)
            }
        }
    }

    /// The state of a vendor that may not be looked for at all.
    pub(crate) fn closed(&self, vendor: Vendor) -> Option<State> {
        let choice = self.settings.choice;
        if !choice.allows(vendor) {
            return Some(State::NotLookedFor { vendor, choice });
        }
        // Before any lock: another thread of the parent may have held it.
        (self.pid != std::process::id()).then_some(State::Forked { vendor, parent: self.pid })
    }

    fn slot(&self, vendor: Vendor) -> MutexGuard<'_, Slot> {
        self.slots[vendor.index()].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn require_for(
        &self,
        vendor: Vendor,
        wanted: impl FnOnce() -> String,
    ) -> Result<Arc<dyn GpuRuntime>> {
        let (state, runtime) = match self.closed(vendor) {
            Some(state) => (state, None),
            None => self.decide(vendor),
        };
        runtime.ok_or_else(|| GpuError::Unavailable { wanted: wanted(), state: Box::new(state) })
    }

    /// Looks, opens, initialises; once.
    fn decide(&self, vendor: Vendor) -> (State, Option<Arc<dyn GpuRuntime>>) {
        let mut slot = self.slot(vendor);
        if !slot.decided {
            slot.decided = true;
            if slot.table.is_some() || self.locate(vendor, &mut slot, false) {
                slot.initialise();
            }
        } else if slot.table.is_none() && slot.generation != library::generation() {
            // It was not there; what has been mapped since may be it.
            if self.locate(vendor, &mut slot, true) {
                slot.initialise();
            }
        }
        (slot.state.clone(), slot.runtime())
    }

    /// The vendor's library, if this process uses it.
    fn askable(&self, vendor: Vendor) -> Option<Arc<dyn GpuRuntime>> {
        if self.closed(vendor).is_some() {
            return None;
        }
        if self.settings.choice == Choice::Only(vendor) {
            return self.decide(vendor).1;
        }
        let mut slot = self.slot(vendor);
        self.glance(vendor, &mut slot, Glance::Ask);
        slot.runtime()
    }

    /// Brings the slot up to date with what is mapped.
    fn glance(&self, vendor: Vendor, slot: &mut Slot, how: Glance) {
        if slot.table.is_none() {
            // Nothing was mapped since, so nothing changed. 0: the loader does not say.
            let now = library::generation();
            if (now != 0 && slot.generation == now) || !self.locate(vendor, slot, true) {
                return;
            }
        }
        let Some(table) = &slot.table else { return };
        if !matches!(slot.state, State::Mapped { .. }) {
            return;
        }
        let in_use = match table.backend.api() {
            Api::CudaDriver => table.backend.awake() == Awake::Yes,
            // Its questions make contexts: only for a device that was named.
            Api::CudaRuntime => false,
            Api::MusaRuntime => match table.backend.awake() {
                Awake::Yes => true,
                Awake::No => false,
                Awake::Unknown => how == Glance::Ask && table.library.is_wanted(),
            },
            Api::HipRuntime => how == Glance::Ask && table.library.is_wanted(),
        };
        if in_use {
            slot.initialise();
        }
    }

    /// Finds the library; whether it did. The state says which, or why not.
    fn locate(&self, vendor: Vendor, slot: &mut Slot, only_mapped: bool) -> bool {
        slot.generation = library::generation();
        let Searched { tried, found } = search(&self.settings, vendor, only_mapped);
        match found {
            Ok(table) => {
                slot.tried = tried;
                slot.state = State::Mapped {
                    file: table.library.file().to_owned(),
                    api: table.backend.api(),
                };
                slot.table = Some(table);
                true
            }
            Err(Some(state)) => {
                slot.tried = tried;
                slot.state = *state;
                false
            }
            // Nothing of it is mapped, and that was all we asked.
            Err(None) => false,
        }
    }
}

impl Slot {
    fn initialise(&mut self) {
        if let Some(table) = &self.table {
            self.state = table.initialise();
        }
    }

    fn runtime(&self) -> Option<Arc<dyn GpuRuntime>> {
        let table = self.table.as_ref().filter(|_| matches!(self.state, State::Ready(_)))?;
        Some(table.backend.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_is_off() {
        let discovery = Discovery::new(Settings { choice: Choice::Off, ..Settings::default() });
        assert!(discovery.in_use().is_empty());
        assert!(!discovery.supports(Vendor::Cuda));
        let error = discovery.require(Vendor::Cuda).unwrap_err();
        assert_eq!(
            error.to_string(),
            "CUDA cannot be used: CUDA was not looked for, because of TENSORFERRY_GPU=off; set it \
             to cuda or auto"
        );
        assert_eq!(discovery.classify(Location::Any, 0x1000, 8).unwrap(), Memory::Host);
    }

    #[test]
    fn host_memory_needs_no_library() {
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.classify(Location::Cpu, 0x1000, 8).unwrap(), Memory::Host);
        assert!(discovery.states().iter().all(|state| state.word() == "not-looked-for"));
    }
}
