//! The state of one simulated family of devices, and how a call gets at it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::capture::Capture;
use crate::config::Config;
use crate::memory::Space;
use crate::stream::{Event, Stream};
use crate::sys;
use crate::variant::Variant;

/// What the simulator knows about one thread of the process.
#[derive(Debug, Default)]
pub(crate) struct Thread {
    /// The contexts that are current, the last one really.
    pub(crate) contexts: Vec<u64>,
    /// What the runtime's `SetDevice` said, if it was called.
    pub(crate) device: Option<usize>,
    pub(crate) last_error: i32,
    pub(crate) capture_mode: i32,
    /// Per-thread default streams, by context.
    pub(crate) streams: BTreeMap<u64, u64>,
    pub(crate) in_host_function: bool,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

fn with_thread(look: &mut dyn FnMut(&mut Thread)) {
    // A call from another thread-local's destructor finds a thread that never called before.
    let seen = THREAD.try_with(|thread| look(&mut thread.borrow_mut()));
    if seen.is_err() {
        look(&mut Thread::default());
    }
}

/// Shows the calling thread's state to a closure.
type ThreadAccess = fn(&mut dyn FnMut(&mut Thread));

/// One simulated family. A runtime's copy uses the driver's that lies beside it.
pub(crate) struct Core {
    state: Mutex<State>,
    /// Something was completed, released or broken.
    pub(crate) progress: Condvar,
    /// The process that initialised; 0 before.
    owner: AtomicU32,
    /// The owner image's, so that all images of the family see one current context.
    thread: ThreadAccess,
    pub(crate) driver_version: i32,
}

pub(crate) type Guard = MutexGuard<'static, State>;

impl Core {
    fn new() -> Self {
        let config = Config::from_environment();
        Self {
            driver_version: config.driver_version,
            state: Mutex::new(State::new(config)),
            progress: Condvar::new(),
            owner: AtomicU32::new(0),
            thread: with_thread,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait(&self, state: Guard) -> Guard {
        self.progress.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn thread<T>(&self, look: impl FnOnce(&mut Thread) -> T) -> T {
        let (mut look, mut result) = (Some(look), None);
        (self.thread)(&mut |thread| result = look.take().map(|look| look(thread)));
        result.expect("the thread's state is shown exactly once")
    }

    /// Whether this is the child of a process that initialised: nothing works there, and another
    /// thread may have held the lock when it was made.
    pub(crate) fn forked(&self) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        owner != 0 && owner != std::process::id()
    }

    pub(crate) fn initialised(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn own(&self) {
        self.owner.store(std::process::id(), Ordering::Relaxed);
    }
}

/// A call that is to fail.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) call: String,
    /// How many calls still pass.
    pub(crate) pass: u64,
    /// How many calls fail after those; `u64::MAX` is all.
    pub(crate) fail: u64,
    pub(crate) code: i32,
}

/// A simulated device.
#[derive(Debug, Default)]
pub(crate) struct Device {
    /// The primary context, which keeps its handle once it was made.
    pub(crate) primary: u64,
    pub(crate) retained: u32,
    /// The runtime's own share of `retained`.
    pub(crate) held_by_runtime: bool,
    pub(crate) contexts: u64,
    pub(crate) contexts_created: u64,
    pub(crate) bytes: [u64; 3],
    /// When each direction's copy engine is free again.
    pub(crate) free_at: [Option<Instant>; 3],
}

#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) alive: bool,
    pub(crate) legacy_stream: u64,
}

pub(crate) struct State {
    pub(crate) config: Config,
    pub(crate) devices: Vec<Device>,
    pub(crate) space: Space,
    pub(crate) contexts: BTreeMap<u64, Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) captures: Vec<Capture>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) init_failed: bool,
    calls: BTreeMap<&'static str, u64>,
    counts: BTreeMap<&'static str, u64>,
    handles: u64,
}

/// Counters that say how much there is, not how often something happened.
const GAUGES: [&str; 4] = ["pinned_bytes", "pinned_live", "registered_bytes", "copies_in_flight"];

impl State {
    fn new(config: Config) -> Self {
        let devices = (0..config.devices).map(|_| Device::default()).collect();
        Self {
            faults: config.faults.clone(),
            space: Space::new(&config),
            config,
            devices,
            contexts: BTreeMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            captures: Vec::new(),
            init_failed: false,
            calls: BTreeMap::new(),
            counts: BTreeMap::new(),
            handles: 0,
        }
    }

    /// A handle that no other family gives out and that faults when it is followed.
    pub(crate) fn handle(&mut self) -> u64 {
        const ROOM: u64 = 1 << 20;
        if self.handles.is_multiple_of(ROOM) {
            self.handles = sys::reserve(ROOM).expect("the process has addresses left");
        }
        self.handles += 64;
        if self.handles.is_multiple_of(ROOM) {
            return self.handle();
        }
        self.handles
    }

    pub(crate) fn add(&mut self, name: &'static str, more: u64) {
        *self.counts.entry(name).or_default() += more;
    }

    pub(crate) fn subtract(&mut self, name: &'static str, less: u64) {
        let count = self.counts.entry(name).or_default();
        *count = count.saturating_sub(less);
    }

    pub(crate) fn raise(&mut self, name: &'static str, to: u64) {
        let count = self.counts.entry(name).or_default();
        *count = (*count).max(to);
    }

    pub(crate) fn value(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or_default()
    }

    pub(crate) fn count_call(&mut self, name: &'static str) {
        *self.calls.entry(name).or_default() += 1;
    }

    /// The code that an injected failure gives this call.
    pub(crate) fn fault(&mut self, name: &str) -> Option<i32> {
        let fault = self.faults.iter_mut().find(|fault| fault.call == name && fault.fail > 0)?;
        if fault.pass > 0 {
            fault.pass -= 1;
            return None;
        }
        if fault.fail != u64::MAX {
            fault.fail -= 1;
        }
        Some(fault.code)
    }

    pub(crate) fn reset_counters(&mut self) {
        self.calls.clear();
        self.counts.retain(|name, _| GAUGES.contains(name));
        let pinned = self.value("pinned_bytes");
        self.raise("pinned_bytes_max", pinned);
        for device in &mut self.devices {
            device.bytes = [0; 3];
            device.contexts_created = 0;
        }
    }

    /// One number by its name in the JSON text: `calls.NAME`, `contexts.0`, `pinned_bytes` …
    pub(crate) fn count(&self, name: &str) -> Option<u64> {
        if name == "calls" {
            return Some(self.calls.values().sum());
        }
        if let Some(call) = name.strip_prefix("calls.") {
            return Some(self.calls.get(call).copied().unwrap_or_default());
        }
        if let Some((what, device)) = name.split_once('.') {
            let device = device.parse::<usize>().ok()?;
            let (_, value) = self.of_device(device)?.into_iter().find(|(name, _)| *name == what)?;
            return Some(value);
        }
        let sum = |index: usize| self.devices.iter().map(|device| device.bytes[index]).sum();
        Some(match name {
            "h2d_bytes" => sum(0),
            "d2h_bytes" => sum(1),
            "d2d_bytes" => sum(2),
            "allocations" => self.space.allocations.len() as u64,
            _ => COUNTERS.contains(&name).then(|| self.value(name))?,
        })
    }

    fn of_device(&self, index: usize) -> Option<[(&'static str, u64); 6]> {
        let device = self.devices.get(index)?;
        Some([
            ("contexts", device.contexts),
            ("contexts_created", device.contexts_created),
            ("h2d_bytes", device.bytes[0]),
            ("d2h_bytes", device.bytes[1]),
            ("d2d_bytes", device.bytes[2]),
            ("memory_used", self.space.used(index)),
        ])
    }

    /// All counters as JSON.
    pub(crate) fn report(&self, variant: Variant) -> String {
        let mut text = format!("{{\"library\":\"{}\",\"devices\":[", variant.soname());
        for index in 0..self.devices.len() {
            let comma = if index == 0 { "" } else { "," };
            let fields = self.of_device(index).into_iter().flatten();
            let _ = write!(text, "{comma}{{{}}}", object(fields));
        }
        let counters = COUNTERS.into_iter().map(|name| (name, self.value(name)));
        let calls = self.calls.iter().map(|(name, count)| (*name, *count));
        let allocations = self.space.allocations.len();
        let _ = write!(text, "],\"allocations\":{allocations},{}", object(counters));
        let _ = write!(text, ",\"calls\":{{{}}}}}", object(calls));
        text
    }
}

const COUNTERS: [&str; 19] = [
    "pinned_bytes",
    "pinned_bytes_max",
    "pinned_live",
    "pinned_allocations",
    "registered_bytes",
    "registrations",
    "context_pushes",
    "context_pops",
    "pointer_queries",
    "copies",
    "copies_in_flight",
    "copies_in_flight_max",
    "pageable_copies",
    "host_functions",
    "legacy_stream_operations",
    "captures_begun",
    "captures_invalidated",
    "captured_operations",
    "failed_initialisations",
];

fn object(fields: impl Iterator<Item = (&'static str, u64)>) -> String {
    let fields: Vec<_> = fields.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    fields.join(",")
}

/// What this image is.
pub(crate) fn variant() -> Variant {
    image().0
}

/// The state that this image works on.
pub(crate) fn core() -> &'static Core {
    image().1
}

fn image() -> (Variant, &'static Core) {
    static IMAGE: OnceLock<(Variant, &'static Core)> = OnceLock::new();
    *IMAGE.get_or_init(|| {
        let path = sys::own_path().unwrap_or_default();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let variant = Variant::of_file(&name).unwrap_or(Variant::CudaDriver);
        let shared = variant.driver().and_then(|driver| beside(&path.with_file_name(driver)));
        (variant, shared.unwrap_or_else(|| Box::leak(Box::new(Core::new()))))
    })
}

/// The core of the driver's copy in the same folder, if it is there and of the same build.
fn beside(driver: &Path) -> Option<&'static Core> {
    if !driver.is_absolute() && driver.components().count() < 2 || !driver.exists() {
        return None;
    }
    let driver = sys::Library::open(driver, false).ok()?;
    crate::exports::core_of(driver)
}
