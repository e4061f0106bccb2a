//! Opening a vendor's library: by name, by path, or the copy that the process has mapped already.
//!
//! A library is opened once, with its symbols to itself, and never closed: vendors' runtimes leave
//! threads and exit handlers behind.
#![expect(unsafe_code, reason = "the dynamic loader is C")]

use std::collections::hash_map::{Entry, HashMap};
use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::device::Vendor;
use crate::elf;
use crate::place::{self, Place};
use crate::state::Tried;

/// A library that is mapped for the rest of the process's life.
pub(crate) struct Library {
    handle: Handle,
    file: PathBuf,
    /// It was not mapped before we opened it.
    ours: bool,
    /// What was mapped when we had opened it.
    generation: u64,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Library").field(&self.file).finish()
    }
}

impl Library {
    /// The file, as the loader knows it.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Whether anybody but us may have mapped it: it was there before, or something else came
    /// since.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.ours || self.generation != generation()
    }

    /// Whether the library has a symbol of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        // SAFETY: the pointer is not used.
        unsafe { self.symbol::<unsafe extern "C" fn()>(name) }.is_some()
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` is the type of the function that the library has under this name.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // `Option<F>` has the size of a pointer, which `get` checks, and takes the null of an
        // unresolved IFUNC. SAFETY: the type is the caller's promise; nothing is called here.
        unsafe { self.handle.get::<Option<F>>(name) }.ok().and_then(|symbol| *symbol)
    }
}

/// Which file names are tried for a vendor, in order. The plain names go through the loader's own
/// search; the paths after them are where vendors install without telling it.
pub(crate) fn names(vendor: Vendor) -> &'static [&'static str] {
    match vendor {
        // `libcuda.so` last: where a toolkit is installed, it may be the stand-in for linking.
        Vendor::Cuda => &[
            "libcuda.so.1",
            "/usr/lib/wsl/lib/libcuda.so.1",
            "/run/opengl-driver/lib/libcuda.so.1",
            "libcuda.so",
        ],
        Vendor::Musa => &[
            "libmusart.so.5",
            "libmusart.so.4",
            "libmusart.so.1.5",
            "libmusart.so.1.0",
            "libmusart.so",
            "/usr/local/musa/lib/libmusart.so",
            "libmusa_runtime.so",
        ],
        Vendor::Hip => &[
            "libamdhip64.so.10",
            "libamdhip64.so.7",
            "libamdhip64.so.6",
            "libamdhip64.so.5",
            "libamdhip64.so",
            "/opt/rocm/lib/libamdhip64.so",
            "libgalaxyhip.so.5",
            "/opt/dtk/hip/lib/libgalaxyhip.so.5",
        ],
    }
}

/// The first part of the file names that a mapped copy of a vendor's library can have.
pub(crate) fn stems(vendor: Vendor) -> &'static [&'static str] {
    match vendor {
        Vendor::Cuda => &["libcuda"],
        Vendor::Musa => &["libmusart", "libmusa_runtime"],
        Vendor::Hip => &["libamdhip64", "libgalaxyhip"],
    }
}

/// Opens a library by name or path.
pub(crate) fn open(name: &Path) -> Result<&'static Library, Tried> {
    let found = find(name);
    // What is mapped is good, whatever has become of its file since.
    if let Some(mapped) = load_mapped(name, &found) {
        return Ok(mapped);
    }
    match found {
        // By its path, so that it is the file that was checked.
        Some(Ok(file)) => load(&file, 0),
        Some(Err((file, answer))) => {
            let found = !is_path(name) || name.exists();
            let answer = if found { answer } else { "no such file".to_owned() };
            Err(Tried { name: file, answer, found })
        }
        None => load(name, 0),
    }
}

/// The copy at `name` if it is mapped; nothing is loaded.
pub(crate) fn open_mapped(name: &Path) -> Option<&'static Library> {
    load_mapped(name, &find(name))
}

/// The copy that is mapped by this name. The loader looks at the file as well, to know it by its
/// other names, so it is not asked for what would keep it waiting.
fn load_mapped(name: &Path, found: &Option<Place>) -> Option<&'static Library> {
    match found {
        Some(Err((file, _))) if elf::is_no_file(file) => None,
        _ => load(name, libc::RTLD_NOLOAD).ok(),
    }
}

fn is_path(name: &Path) -> bool {
    name.as_os_str().as_bytes().contains(&b'/')
}

/// The file that `name` means, checked; `None` leaves it to the loader.
fn find(name: &Path) -> Option<Place> {
    if is_path(name) {
        let checked = elf::check(name).map_err(|flaw| (name.to_owned(), flaw.why));
        return Some(checked.map(|()| name.to_owned()));
    }
    place::find(name)
}

fn load(name: &Path, flags: c_int) -> Result<&'static Library, Tried> {
    // SAFETY: what a vendor's library does while it is loaded is what every program that links it
    // accepts; it is never unloaded, so no exit code of it runs early.
    let opened = unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) };
    match opened {
        Ok(handle) => Ok(keep(handle, name, flags & libc::RTLD_NOLOAD == 0)),
        Err(error) => {
            let answer = match error {
                libloading::Error::DlOpen { source } => source.to_string(),
                other => other.to_string(),
            };
            // "NAME: cannot open shared object file: No such file…" with our own name says that it
            // is not there; with another one, that it is there and needs something that is not.
            let absent =
                format!("{}: cannot open shared object file: No such file", name.display());
            let found = !answer.starts_with(&absent);
            Err(Tried { name: name.to_owned(), answer, found })
        }
    }
}

/// Keeps the handle for the life of the process; one per image, however often and by whatever name
/// it is opened.
fn keep(handle: Handle, name: &Path, ours: bool) -> &'static Library {
    // glibc's handle is the address of the image's link map.
    let raw = handle.into_raw();
    let mut images = process().images.lock().unwrap_or_else(PoisonError::into_inner);
    match images.entry(raw as usize) {
        // The loader counts handles; one too many is harmless, as none is given back.
        Entry::Occupied(known) => known.get(),
        Entry::Vacant(new) => {
            let file = file_of(raw).unwrap_or_else(|| name.to_owned());
            // SAFETY: `raw` came from `into_raw` above and goes nowhere else.
            let handle = unsafe { Handle::from_raw(raw) };
            new.insert(Box::leak(Box::new(Library {
                handle,
                file,
                ours,
                generation: generation(),
            })))
        }
    }
}

/// The first fields of glibc's `struct link_map` (`link.h`), which are its public part.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const libc::c_char,
}

fn file_of(handle: *mut c_void) -> Option<PathBuf> {
    let mut map: *const LinkMap = ptr::null();
    // SAFETY: `handle` is an open library's, and RTLD_DI_LINKMAP writes one pointer, for which
    // there is room.
    let asked = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if asked != 0 || map.is_null() {
        return None;
    }
    // SAFETY: the loader's record of an open library, which stays because the library does.
    let name = unsafe { (*map).name };
    if name.is_null() {
        return None;
    }
    // SAFETY: the loader's own string, of the same life.
    let name = unsafe { CStr::from_ptr(name) };
    (!name.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// A number that grows whenever something is mapped; 0 if the loader does not say.
pub(crate) fn generation() -> u64 {
    extern "C" fn first(info: *mut libc::dl_phdr_info, size: usize, out: *mut c_void) -> c_int {
        if size >= std::mem::size_of::<libc::dl_phdr_info>() {
            // SAFETY: the loader's record, whole according to `size`, for the time of this call.
            let adds = unsafe { (*info).dlpi_adds };
            // SAFETY: `generation` passes its own variable, and waits.
            unsafe { *out.cast::<u64>() = adds };
        }
        1
    }
    let mut adds = 0_u64;
    // SAFETY: the callback does not unwind, and writes to `adds` only during the call.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut adds).cast()) };
    adds
}

/// The files of mapped libraries whose name begins with one of `stems`.
pub(crate) fn mapped(stems: &[&str]) -> Vec<PathBuf> {
    struct Search<'a> {
        stems: &'a [&'a str],
        found: Vec<CString>,
    }

    extern "C" fn each(info: *mut libc::dl_phdr_info, _size: usize, out: *mut c_void) -> c_int {
        // SAFETY: the loader's record, for the time of this call; the name is in every version of
        // it.
        let name = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: the loader's own string, for the time of this call.
        let name = unsafe { CStr::from_ptr(name) };
        // SAFETY: `mapped` passes its own variable, and waits.
        let search = unsafe { &mut *out.cast::<Search<'_>>() };
        if is_named(name.to_bytes(), search.stems) {
            search.found.push(name.to_owned());
        }
        0
    }

    let mut search = Search { stems, found: Vec::new() };
    // SAFETY: the callback does not unwind, and uses `search` only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut search).cast()) };
    search.found.into_iter().map(|name| PathBuf::from(OsStr::from_bytes(name.to_bytes()))).collect()
}

/// Whether the last part of `path` is STEM.so… or, as wheels rename what they bundle, STEM-….so….
fn is_named(path: &[u8], stems: &[&str]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    stems.iter().any(|stem| {
        name.strip_prefix(stem.as_bytes()).is_some_and(|rest| {
            rest.starts_with(b".so")
                || (rest.starts_with(b"-") && rest.windows(3).any(|w| w == b".so"))
        })
    })
}

/// What this process has opened. A child of a fork starts with an empty one: the lock of the
/// parent's may be held by a thread that the child does not have.
pub(crate) struct Process {
    /// The process that it belongs to.
    pub(crate) pid: u32,
    images: Mutex<HashMap<usize, &'static Library>>,
    /// See `discovery.rs`; beside the images so that it is left behind in a fork with them.
    pub(crate) tables: Mutex<Vec<crate::discovery::Table>>,
}

/// What this process has opened.
pub(crate) fn process() -> &'static Process {
    static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
    let pid = std::process::id();
    loop {
        // Acquire: pairs with the Release below; publishes the record's content.
        let known = PROCESS.load(Ordering::Acquire);
        if !known.is_null() {
            // SAFETY: only leaked boxes are stored here.
            let record = unsafe { &*known };
            if record.pid == pid {
                return record;
            }
        }
        let new = Box::into_raw(Box::new(Process {
            pid,
            images: Mutex::new(HashMap::new()),
            tables: Mutex::new(Vec::new()),
        }));
        // Release: pairs with the Acquire above.
        if PROCESS.compare_exchange(known, new, Ordering::Release, Ordering::Relaxed).is_err() {
            // SAFETY: from `into_raw` above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_found_by_their_last_name() {
        let stems = stems(Vendor::Cuda);
        assert!(is_named(b"/usr/lib/x86_64-linux-gnu/libcuda.so.1", stems));
        assert!(is_named(b"libcuda.so.550.163.01", stems));
        assert!(is_named(b"/x/libcuda-1f2e3d4c.so.1", stems));
        assert!(!is_named(b"/x/libcudart.so.12", stems));
        assert!(!is_named(b"/x/libcuda/libother.so", stems));
        assert!(!is_named(b"", stems));
    }

    #[test]
    fn one_image_is_kept_once() {
        let first = open(Path::new("libm.so.6")).unwrap();
        assert!(ptr::eq(first, open(first.file()).unwrap()));
        assert!(ptr::eq(first, open_mapped(Path::new("libm.so.6")).unwrap()));
        assert!(first.has("cos") && !first.has("no_such_function"));
        assert!(mapped(&["libm"]).contains(&first.file().to_owned()));
        assert_ne!(generation(), 0);
    }

    #[test]
    fn what_is_not_there_is_told_in_the_loaders_words() {
        let tried = open(Path::new("libno-such-library.so.1")).unwrap_err();
        assert!(!tried.found);
        assert!(tried.answer.contains("No such file"), "{}", tried.answer);
    }
}
