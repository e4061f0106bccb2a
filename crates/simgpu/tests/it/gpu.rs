//! One loaded copy, and its calls by name.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use tensorferry_simgpu::{Control, Variant, install, library};

/// A folder of its own, which is removed in the end; what is loaded from it stays loaded.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("simgpu-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn install(&self, name: &str) -> PathBuf {
        let library = library().expect("cargo builds the shared library with the tests");
        install(&library, &self.0, &[name]).unwrap().remove(0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) struct Gpu {
    pub(crate) control: Control,
    pub(crate) variant: Variant,
    pub(crate) path: PathBuf,
    prefix: &'static str,
    folder: Folder,
}

impl Gpu {
    pub(crate) fn new(variant: Variant) -> Self {
        Self::beside(variant, Folder::new())
    }

    pub(crate) fn beside(variant: Variant, folder: Folder) -> Self {
        let path = folder.install(variant.soname());
        let control = Control::open(&path).unwrap();
        let prefix = match variant {
            Variant::CudaDriver => "cu",
            Variant::CudaRuntime11 | Variant::CudaRuntime12 | Variant::CudaRuntime13 => "cuda",
            Variant::MusaDriver => "mu",
            Variant::MusaRuntime4 | Variant::MusaRuntime5 => "musa",
            _ => "hip",
        };
        Self { control, variant, path, prefix, folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn is_driver(&self) -> bool {
        self.variant.attribute_bytes() == 0
    }

    pub(crate) fn is_hip(&self) -> bool {
        self.prefix == "hip"
    }

    pub(crate) fn has(&self, suffix: &str) -> bool {
        let name = CString::new(format!("{}{suffix}", self.prefix)).unwrap();
        !self.control.symbol(&name).is_null()
    }

    pub(crate) fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.prefix)
    }

    /// Calls a function with integers and pointers, which the ABI passes in registers alike.
    pub(crate) fn call(&self, suffix: &str, arguments: &[u64]) -> i32 {
        let name = CString::new(self.name(suffix)).unwrap();
        let found = self.control.symbol(&name);
        assert!(!found.is_null(), "{} has no {name:?}", self.path.display());
        let mut a = [0; 6];
        a[..arguments.len()].copy_from_slice(arguments);
        // SAFETY: all functions of the simulator take at most six integers or pointers and return
        // an i32; registers that a function does not look at do no harm.
        let function = unsafe {
            std::mem::transmute::<*mut _, extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32>(found)
        };
        function(a[0], a[1], a[2], a[3], a[4], a[5])
    }

    /// A call whose first argument is where a 64-bit result goes.
    pub(crate) fn get(&self, suffix: &str, arguments: &[u64]) -> Result<u64, i32> {
        let mut out = 0u64;
        let all: Vec<u64> =
            [address(&mut out)].into_iter().chain(arguments.iter().copied()).collect();
        match self.call(suffix, &all) {
            0 => Ok(out),
            code => Err(code),
        }
    }

    /// Makes the device current on this thread: a driver needs a context, a runtime a choice.
    pub(crate) fn bind(&self, device: u64) {
        if self.is_driver() {
            assert_eq!(self.call("Init", &[0]), 0);
            let context = self.get("DevicePrimaryCtxRetain", &[device]).unwrap();
            assert_eq!(self.call("CtxPushCurrent_v2", &[context]), 0);
        } else {
            assert_eq!(self.call("SetDevice", &[device]), 0);
        }
    }

    pub(crate) fn malloc(&self, len: u64) -> Result<u64, i32> {
        self.get(if self.is_driver() { "MemAlloc_v2" } else { "Malloc" }, &[len])
    }

    pub(crate) fn free(&self, addr: u64) -> i32 {
        self.call(if self.is_driver() { "MemFree_v2" } else { "Free" }, &[addr])
    }

    pub(crate) fn pinned(&self, len: u64) -> Result<u64, i32> {
        self.get(self.pinned_name(), &[len, 1])
    }

    pub(crate) fn pinned_name(&self) -> &'static str {
        match self.prefix {
            "cu" | "mu" => "MemHostAlloc",
            "hip" => "HostMalloc",
            _ => "HostAlloc",
        }
    }

    pub(crate) fn stream(&self) -> u64 {
        let name = if self.is_driver() { "StreamCreate" } else { "StreamCreateWithFlags" };
        self.get(name, &[1]).unwrap()
    }

    pub(crate) fn event(&self) -> u64 {
        let name = if self.is_driver() { "EventCreate" } else { "EventCreateWithFlags" };
        self.get(name, &[2]).unwrap()
    }

    pub(crate) fn to_host(&self, to: u64, from: u64, len: u64, stream: u64) -> i32 {
        if self.is_driver() {
            self.call("MemcpyDtoHAsync_v2", &[to, from, len, stream])
        } else {
            self.call("MemcpyAsync", &[to, from, len, 2, stream])
        }
    }

    pub(crate) fn to_device(&self, to: u64, from: u64, len: u64, stream: u64) -> i32 {
        if self.is_driver() {
            self.call("MemcpyHtoDAsync_v2", &[to, from, len, stream])
        } else {
            self.call("MemcpyAsync", &[to, from, len, 1, stream])
        }
    }

    pub(crate) fn synchronize(&self, stream: u64) -> i32 {
        self.call("StreamSynchronize", &[stream])
    }

    /// The bytes at any address of the simulator's.
    pub(crate) fn peek(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.control.read(addr, &mut bytes).unwrap();
        bytes
    }
}

pub(crate) fn address<T>(place: &mut T) -> u64 {
    std::ptr::from_mut(place).expose_provenance() as u64
}

/// How a child ends that does `work`.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `work` in a forked child.
pub(crate) fn in_child(work: impl FnOnce() -> i32) -> End {
    // SAFETY: the child calls only the simulator, whose locks no thread of ours holds now, and
    // functions that a forked child may call.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let code = work();
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child and writes its status.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}
