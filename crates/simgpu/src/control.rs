//! A test's handle on a loaded simulator.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use crate::sys::Library;

/// The file that Cargo builds: by `TENSORFERRY_SIMGPU_LIBRARY`, or beside this program (for a
/// test, beside the folder of the tests).
#[must_use]
pub fn library() -> Option<PathBuf> {
    const NAME: &str = "libtensorferry_simgpu.so";
    if let Some(named) = env::var_os("TENSORFERRY_SIMGPU_LIBRARY") {
        return Some(PathBuf::from(named)).filter(|path| path.is_file());
    }
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    // Tests and doc tests lie in or below target/PROFILE/deps; the newest build is in deps.
    let places = [folder.join(NAME), folder.join("deps").join(NAME), folder.join("..").join(NAME)];
    places.into_iter().find(|path| path.is_file())
}

/// What `Control::alloc` makes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Memory {
    /// As from `cudaMalloc`.
    Device = 0,
    /// As from `cudaMallocManaged`: both sides can touch it.
    Managed = 1,
    /// 2 MiB parts in a far larger reservation, without a context, as expandable segments.
    Mapped = 2,
    /// As from `cudaMallocAsync`: without a context.
    Pool = 3,
    /// As from `cudaHostAlloc` with flag 1 (portable).
    Pinned = 4,
    /// As from `cudaHostAlloc` with flag 4 (write-combined).
    PinnedWriteCombined = 5,
}

/// The control functions of one loaded copy of the simulator.
///
/// Copies of one family in one folder (a driver and the runtimes beside it) answer alike.
#[derive(Clone, Copy, Debug)]
pub struct Control {
    library: Library,
    functions: Functions,
}

#[derive(Clone, Copy, Debug)]
struct Functions {
    counters: extern "C" fn(*mut c_char, usize) -> usize,
    count: extern "C" fn(*const c_char) -> u64,
    reset: extern "C" fn(),
    set: extern "C" fn(*const c_char, u64) -> c_int,
    inject: extern "C" fn(*const c_char, u64, u64, c_int) -> c_int,
    heal: extern "C" fn(),
    alloc: extern "C" fn(c_int, u64, c_int) -> u64,
    free: extern "C" fn(u64) -> c_int,
    read: extern "C" fn(u64, *mut u8, u64) -> c_int,
    write: extern "C" fn(u64, *const u8, u64) -> c_int,
    stream: extern "C" fn(c_int, u32) -> u64,
    stream_wait: extern "C" fn(u64) -> c_int,
    fill_later: extern "C" fn(u64, u64, u8, u64, u64) -> c_int,
    capture_begin: extern "C" fn(u64, c_int) -> c_int,
    capture_end: extern "C" fn(u64) -> c_int,
}

/// Why there is no `Control`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NotSimulated(String);

impl std::fmt::Display for NotSimulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotSimulated {}

/// Calls a control function that answers with one of the vendor's numbers.
fn answer(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

impl Control {
    /// Loads a copy, or finds it where it is loaded already.
    ///
    /// # Errors
    /// The loader's text, or that the library is no simulator.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, NotSimulated> {
        Self::of(Library::open(path.as_ref(), false).map_err(NotSimulated)?, path.as_ref())
    }

    /// Finds a copy that the process has loaded by itself, and loads nothing.
    ///
    /// # Errors
    /// That it is not loaded, or that the library is no simulator.
    pub fn of_loaded(path: impl AsRef<Path>) -> Result<Self, NotSimulated> {
        Self::of(Library::open(path.as_ref(), true).map_err(NotSimulated)?, path.as_ref())
    }

    fn of(library: Library, path: &Path) -> Result<Self, NotSimulated> {
        macro_rules! find {
            ($($field:ident $name:literal)*) => { Functions { $($field: {
                let found = library.symbol($name);
                if found.is_null() {
                    let text = format!("{} is not simgpu: it has no {:?}", path.display(), $name);
                    return Err(NotSimulated(text));
                }
                // SAFETY: `simgpu_*` are this crate's own, of the type that the field has.
                unsafe { std::mem::transmute_copy::<*mut c_void, _>(&found) }
            },)* } };
        }
        let functions = find! {
            counters c"simgpu_counters" count c"simgpu_count" reset c"simgpu_reset"
            set c"simgpu_set" inject c"simgpu_inject" heal c"simgpu_heal" alloc c"simgpu_alloc"
            free c"simgpu_free" read c"simgpu_read" write c"simgpu_write"
            stream c"simgpu_stream" stream_wait c"simgpu_stream_wait"
            fill_later c"simgpu_fill_later" capture_begin c"simgpu_capture_begin"
            capture_end c"simgpu_capture_end"
        };
        Ok(Self { library, functions })
    }

    /// The address of any symbol of this copy; null if it has none of that name.
    #[must_use]
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        self.library.symbol(name)
    }

    /// All counters as JSON.
    #[must_use]
    pub fn counters(&self) -> String {
        let mut text = vec![0u8; 4096];
        loop {
            let len = (self.functions.counters)(text.as_mut_ptr().cast(), text.len());
            if len < text.len() {
                text.truncate(len);
                return String::from_utf8_lossy(&text).into_owned();
            }
            text.resize(len + 1, 0);
        }
    }

    /// One counter, by its name in the JSON text: `pinned_bytes`, `contexts.0`, `calls.cuInit`.
    ///
    /// # Panics
    /// There is no counter of that name.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        let count = (self.functions.count)(terminated(name).as_ptr());
        assert_ne!(count, u64::MAX, "simgpu counts nothing called {name}");
        count
    }

    /// How often a function of the vendor's was called since the last reset.
    #[must_use]
    pub fn calls(&self, function: &str) -> u64 {
        self.count(&format!("calls.{function}"))
    }

    /// Sets the counters to zero, except those that say how much there is.
    pub fn reset(&self) {
        (self.functions.reset)();
    }

    /// Changes a setting: `d2h_bytes_per_second`, `h2d_bytes_per_second`, `latency_ns`, `hang` …
    ///
    /// # Panics
    /// There is no setting of that name.
    pub fn set(&self, name: &str, value: u64) {
        let code = (self.functions.set)(terminated(name).as_ptr(), value);
        assert_eq!(code, 0, "simgpu has no setting {name}");
    }

    /// Makes `times` calls of `function` (0: all) fail with `code`, from the `nth` next one on.
    /// The function `copy` is a copy being carried out: its failure is a device fault.
    pub fn inject(&self, function: &str, nth: u64, times: u64, code: i32) {
        (self.functions.inject)(terminated(function).as_ptr(), nth, times, code);
    }

    /// Ends injected failures, the hang and the sticky error.
    pub fn heal(&self) {
        (self.functions.heal)();
    }

    /// Memory as a framework would have made it: the device's primary context is active afterwards,
    /// no call is counted. None: out of memory, or no such device.
    #[must_use]
    pub fn alloc(&self, device: i32, len: u64, memory: Memory) -> Option<u64> {
        let addr = (self.functions.alloc)(device, len, memory as c_int);
        (addr != 0).then_some(addr)
    }

    /// Frees what `alloc` returned.
    ///
    /// # Errors
    /// The vendor's number.
    pub fn free(&self, addr: u64) -> Result<(), i32> {
        answer((self.functions.free)(addr))
    }

    /// Reads device memory past all streams.
    ///
    /// # Errors
    /// The vendor's number: the range is not one of the simulator's.
    pub fn read(&self, addr: u64, to: &mut [u8]) -> Result<(), i32> {
        answer((self.functions.read)(addr, to.as_mut_ptr(), to.len() as u64))
    }

    /// Writes device memory past all streams.
    ///
    /// # Errors
    /// The vendor's number: the range is not one of the simulator's.
    pub fn write(&self, addr: u64, from: &[u8]) -> Result<(), i32> {
        answer((self.functions.write)(addr, from.as_ptr(), from.len() as u64))
    }

    /// A stream on `device`, as a framework would have made it. `blocking`: it and the legacy
    /// stream wait for each other.
    #[must_use]
    pub fn stream(&self, device: i32, blocking: bool) -> Option<u64> {
        let stream = (self.functions.stream)(device, u32::from(!blocking));
        (stream != 0).then_some(stream)
    }

    /// Waits for everything on a stream.
    ///
    /// # Errors
    /// The vendor's number.
    pub fn stream_wait(&self, stream: u64) -> Result<(), i32> {
        answer((self.functions.stream_wait)(stream))
    }

    /// A kernel that fills device memory some time after it was launched.
    ///
    /// # Errors
    /// The vendor's number.
    pub fn fill_later(
        &self,
        stream: u64,
        range: (u64, u64),
        byte: u8,
        delay: std::time::Duration,
    ) -> Result<(), i32> {
        let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        answer((self.functions.fill_later)(stream, range.0, byte, range.1, delay))
    }

    /// Begins a capture on a stream of this thread: mode 0 global, 1 of this thread, 2 relaxed.
    ///
    /// # Errors
    /// The vendor's number.
    pub fn capture_begin(&self, stream: u64, mode: i32) -> Result<(), i32> {
        answer((self.functions.capture_begin)(stream, mode))
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// 901: some call invalidated it.
    pub fn capture_end(&self, stream: u64) -> Result<(), i32> {
        answer((self.functions.capture_end)(stream))
    }
}

fn terminated(name: &str) -> CString {
    CString::new(name).expect("a name has no NUL in it")
}
