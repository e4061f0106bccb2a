//! What the simulator asks of the operating system: mappings, copies, the dynamic loader.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;

/// A host function on a stream.
pub(crate) type HostFunction = extern "C" fn(*mut c_void);
/// What `StreamAddCallback` takes: stream, status, the caller's pointer.
pub(crate) type StreamCallback = extern "C" fn(u64, c_int, *mut c_void);

/// Who may touch a mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Access {
    None,
    ReadWrite,
}

impl Access {
    fn flags(self) -> c_int {
        match self {
            Self::None => libc::PROT_NONE,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// An anonymous file, sparse until written, which stays open for the life of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryFile(c_int);

impl MemoryFile {
    pub(crate) fn new(size: u64) -> io::Result<Self> {
        // SAFETY: the name is a C string literal; the call touches no other memory of ours.
        let fd = unsafe { libc::memfd_create(c"simgpu".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was opened above; the call touches no memory.
        if unsafe { libc::ftruncate(fd, size.cast_signed()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(fd))
    }

    /// Maps a part of it anywhere, shared with every other mapping of that part.
    pub(crate) fn map(self, offset: u64, len: u64, access: Access) -> io::Result<u64> {
        map(0, len, access, libc::MAP_SHARED | libc::MAP_NORESERVE, self.0, offset)
    }

    /// Maps a part of it over a reservation of ours.
    pub(crate) fn map_at(self, at: u64, offset: u64, len: u64, access: Access) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        map(at, len, access, flags, self.0, offset).map(|_| ())
    }

    /// Gives the pages of a part back; they read as zeros afterwards.
    pub(crate) fn forget(self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: an open descriptor and two numbers; shared mappings stay valid over a hole.
        unsafe { libc::fallocate(self.0, mode, offset.cast_signed(), len.cast_signed()) };
    }
}

fn map(at: u64, len: u64, access: Access, flags: c_int, fd: c_int, offset: u64) -> io::Result<u64> {
    let (len, offset) = (len as usize, offset.cast_signed());
    let at = ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: MAP_FIXED is passed only by `map_at` and `unmap_to_reserved`, over addresses that
    // `reserve` returned and nobody else uses; all other mappings are where the kernel likes.
    let got = unsafe { libc::mmap(at, len, access.flags(), flags, fd, offset) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(got.expose_provenance() as u64)
}

/// Ordinary memory of the host.
pub(crate) fn host_memory(len: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(0, len, Access::ReadWrite, flags, -1, 0)
}

/// Addresses with nothing behind them.
pub(crate) fn reserve(len: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    map(0, len, Access::None, flags, -1, 0)
}

/// Makes a part of a reservation empty again.
pub(crate) fn unmap_to_reserved(at: u64, len: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // Out of mappings: the old one stays, which is what the simulator's tables then deny.
    let _ = map(at, len, Access::None, flags, -1, 0);
}

pub(crate) fn unmap(at: u64, len: u64) {
    let at = ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: only called with what `reserve` or `host_memory` returned and the tables have dropped.
    unsafe { libc::munmap(at, len as usize) };
}

pub(crate) fn protect(at: u64, len: u64, access: Access) {
    let at = ptr::with_exposed_provenance_mut(at as usize);
    // SAFETY: only called on parts of device ranges that `MemoryFile::map` returned.
    unsafe { libc::mprotect(at, len as usize, access.flags()) };
}

/// Moves bytes between two places that the host can touch.
pub(crate) fn copy(to: u64, from: u64, len: u64) {
    let to = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    let from = ptr::with_exposed_provenance::<u8>(from as usize);
    // SAFETY: a range inside our own alias, or memory that the caller of the vendor's API named
    // and keeps until the stream has passed the copy, as that API demands.
    unsafe { ptr::copy(from, to, len as usize) };
}

pub(crate) fn fill(to: u64, byte: u8, len: u64) {
    let to = ptr::with_exposed_provenance_mut::<u8>(to as usize);
    // SAFETY: as for `copy`.
    unsafe { ptr::write_bytes(to, byte, len as usize) };
}

/// Reads a word that the host, or another thread of ours, changes at any time.
pub(crate) fn load(at: u64) -> u32 {
    let at = ptr::with_exposed_provenance::<u32>(at as usize);
    // SAFETY: the tables say that the word is pinned memory or our alias, and `WaitValue32`
    // demands that it stays until the stream has passed the wait.
    let word = unsafe { at.read_volatile() };
    // Acquire: whoever wrote the word wrote what it announces before.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
    word
}

pub(crate) fn store(at: u64, value: u32) {
    let at = ptr::with_exposed_provenance_mut::<u32>(at as usize);
    // Release: pairs with the acquire of whoever polls the word.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    // SAFETY: as for `load`.
    unsafe { at.write_volatile(value) };
}

/// Makes short waits of this thread exact, and leaves the process's signals to its own threads.
pub(crate) fn prepare_worker() {
    // SAFETY: sets a number of the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: writes the set, which is ours.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was filled above; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), ptr::null_mut()) };
}

pub(crate) fn leak_descriptor() {
    // SAFETY: two numbers; nobody closes the descriptor, which is the point.
    unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
}

/// The file that this code was loaded from.
pub(crate) fn own_path() -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    // A private function: an exported name could belong to another copy.
    let inside = own_path as fn() -> Option<PathBuf> as *const c_void;
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `found` is ours and large enough; `inside` is an address of this image.
    if unsafe { libc::dladdr(inside, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: all fields of a Dl_info are pointers, so zeros are a value, and dladdr filled it.
    let found = unsafe { found.assume_init() };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own text, which lives as long as the image, which is never unloaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes())))
}

/// A loaded library. It is never closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(*mut c_void);

// SAFETY: the handle is the loader's, which any thread may ask; it is never closed.
unsafe impl Send for Library {}
// SAFETY: the same.
unsafe impl Sync for Library {}

impl Library {
    /// Loads `path`, or finds it if `loaded` says that it must be there already.
    pub(crate) fn open(path: &Path, loaded: bool) -> Result<Self, String> {
        use std::os::unix::ffi::OsStrExt;
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        let only = if loaded { libc::RTLD_NOLOAD } else { 0 };
        // SAFETY: a C string; what the library's initialisers do is the caller's choice of a file.
        let handle =
            unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | only) };
        if handle.is_null() { Err(last_loader_error(path)) } else { Ok(Self(handle)) }
    }

    pub(crate) fn symbol(self, name: &CStr) -> *mut c_void {
        // SAFETY: a handle that was never closed and a C string.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }
}

fn last_loader_error(path: &Path) -> String {
    // SAFETY: takes nothing; the answer is valid until this thread's next call to the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return format!("{} is not loaded", path.display());
    }
    // SAFETY: not null, and no call to the loader has come between.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A pointer as a C caller passed it: for a result, for an argument, or to nothing.
///
/// Nothing in this crate makes one from a number: it comes in through an exported function, whose
/// caller owes what the vendor's prototype demands of it, until that function returns. That is why
/// its methods are safe to call.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Pointer<T>(*mut T);

impl<T: Copy> Pointer<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn address(self) -> u64 {
        self.0.expose_provenance() as u64
    }

    /// Writes the result, which must be wanted.
    pub(crate) fn put(self, value: T) -> crate::code::Done {
        self.put_at(0, value)
    }

    pub(crate) fn put_at(self, index: usize, value: T) -> crate::code::Done {
        if self.0.is_null() {
            return Err(crate::code::INVALID_VALUE);
        }
        // SAFETY: not null; the C caller owes room for the values of the prototype (see the type).
        unsafe { self.0.wrapping_add(index).write_unaligned(value) };
        Ok(())
    }

    /// Writes the result if it is wanted.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            let _ = self.put(value);
        }
    }

    pub(crate) fn get(self) -> Result<T, i32> {
        self.get_at(0)
    }

    pub(crate) fn get_at(self, index: usize) -> Result<T, i32> {
        if self.0.is_null() {
            return Err(crate::code::INVALID_VALUE);
        }
        // SAFETY: not null; the C caller owes initialised values of the prototype (see the type).
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }
}

impl Pointer<c_char> {
    /// The C string there.
    pub(crate) fn text(self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null; the C caller owes a terminated string (see the type).
        Some(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }

    /// Writes as much of `text` as fits into `len` bytes, terminated.
    pub(crate) fn put_text(self, len: usize, text: &str) {
        let Some(room) = len.checked_sub(1) else { return };
        let bytes = text.bytes().take(room).chain([0]);
        for (index, byte) in bytes.enumerate() {
            if self.put_at(index, byte.cast_signed()).is_err() {
                return;
            }
        }
    }
}

impl Pointer<u8> {
    pub(crate) fn put_bytes(self, bytes: &[u8]) -> crate::code::Done {
        bytes.iter().enumerate().try_for_each(|(index, byte)| self.put_at(index, *byte))
    }
}

/// Asks another copy for its state through its `simgpu_core`.
pub(crate) fn shared_core(
    function: *mut c_void,
    build: &'static CStr,
) -> Option<&'static crate::core::Core> {
    if function.is_null() {
        return None;
    }
    // SAFETY: `simgpu_core` of a library of this project, which has had this type from the start.
    let function = unsafe {
        std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> u64>(function)
    };
    let core = ptr::with_exposed_provenance::<crate::core::Core>(function(build.as_ptr()) as usize);
    // SAFETY: null, or a leaked Core of a copy of this very build, so of the same layout; that
    // copy is never unloaded.
    unsafe { core.as_ref() }
}
