//! Where the loader would find a library that is known by its bare name.
//!
//! It maps what it finds without a look at the file's length, so its search is repeated here, and
//! what it would take is checked first. The order is that of ld.so(8): the path of the environment
//! and of the files that search, the cache, the usual folders. Subfolders for kinds of CPUs
//! (`glibc-hwcaps`) are left to the loader.
#![expect(unsafe_code, reason = "the dynamic loader is C")]

use std::ffi::{CStr, OsStr, c_char, c_uint, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::os::unix::{Library as Handle, RTLD_LAZY};

use crate::elf::{self, Flaw};

/// As `dlfcn.h` has them; a loader without these questions refuses them.
const SEARCH_PATH: i32 = 4;
const SEARCH_PATH_SIZE: i32 = 5;

/// `ldconfig` writes it.
const CACHE: &str = "/etc/ld.so.cache";

/// A file that can be opened; or one that cannot, with why.
pub(crate) type Place = Result<PathBuf, (PathBuf, String)>;

/// The file that the loader would take for `name`; or the one that it would stop at, with why.
/// `None` leaves the search to the loader.
pub(crate) fn find(name: &Path) -> Option<Place> {
    let mut folders = search_path();
    let usual = folders.split_off(usual_from(&folders));
    let in_folders = |folders: &[PathBuf]| folders.iter().find_map(|at| look(at.join(name)));
    in_folders(&folders).or_else(|| {
        let cached: Vec<_> = cached(name).into_iter().filter_map(look).collect();
        match cached.iter().find(|found| found.is_err()) {
            None if cached.is_empty() => in_folders(&usual),
            // Which one of several it takes depends on the CPU; all are bad, or it is its choice.
            Some(bad) if cached.iter().all(Result::is_err) => Some(bad.clone()),
            _ => None,
        }
    })
}

/// `None`: there is no such file, or it is one that the loader passes over.
fn look(file: PathBuf) -> Option<Place> {
    match elf::check(&file) {
        Ok(()) => Some(Ok(file)),
        Err(Flaw { passed_over: true, .. }) => None,
        Err(Flaw { why, .. }) => Some(Err((file, why))),
    }
}

/// Where in the search path the usual folders begin: they end it, and none is there twice.
fn usual_from(folders: &[PathBuf]) -> usize {
    let is_usual = |folder: &Path| {
        let text = folder.to_str().unwrap_or_default();
        let mut parts = text.strip_prefix("/usr").unwrap_or(text).split('/');
        parts.next() == Some("")
            && parts.next().is_some_and(|part| ["lib", "lib32", "lib64", "libx32"].contains(&part))
            && parts.next().is_none_or(|part| part.contains("-linux-"))
            && parts.next().is_none()
    };
    let mut from = folders.len();
    while let Some(folder) = from.checked_sub(1).map(|before| &folders[before]) {
        if !is_usual(folder) || folders[from..].contains(folder) {
            break;
        }
        from -= 1;
    }
    from
}

/// The files of this name in the loader's cache, which has their paths as texts with a zero behind.
fn cached(name: &Path) -> Vec<PathBuf> {
    let cache = std::fs::read(CACHE).unwrap_or_default();
    let texts = cache.split(|byte| *byte == 0).filter(|text| text.starts_with(b"/"));
    let paths = texts.map(|text| Path::new(OsStr::from_bytes(text)));
    paths.filter(|path| path.file_name() == Some(name.as_os_str())).map(Path::to_owned).collect()
}

/// The beginning of `Dl_serinfo` of `dlfcn.h`. A list of `Dl_serpath` follows, which have the same
/// size: the text of a folder, and flags.
#[repr(C)]
struct Header {
    size: usize,
    count: c_uint,
}

/// The folders that the loader searches for what this code opens, without those of the cache; empty
/// if it does not say.
fn search_path() -> Vec<PathBuf> {
    // One more handle of what is running anyway: it is not given back.
    let searcher = this_code().into_raw();
    let mut header = Header { size: 0, count: 0 };
    // SAFETY: the handle is open, and the loader writes a header.
    if unsafe { libc::dlinfo(searcher, SEARCH_PATH_SIZE, (&raw mut header).cast()) } != 0 {
        return Vec::new();
    }
    let Header { size, count } = header;
    let mut room = vec![[ptr::null::<c_char>(); 2]; size.div_ceil(size_of::<Header>()).max(1)];
    // SAFETY: `room` holds at least a header, and is aligned for it.
    unsafe { room.as_mut_ptr().cast::<Header>().write(header) };
    // SAFETY: `room` has the size that the loader asked for, which the header repeats.
    if unsafe { libc::dlinfo(searcher, SEARCH_PATH, room.as_mut_ptr().cast()) } != 0 {
        return Vec::new();
    }
    let names = room.iter().skip(1).take(count as usize).map(|[name, _flags]| *name);
    let folder = |name: *const c_char| {
        // SAFETY: the loader's texts, in `room` or its own.
        let name = unsafe { CStr::from_ptr(name) };
        PathBuf::from(OsStr::from_bytes(name.to_bytes()))
    };
    names.filter(|name| !name.is_null()).map(folder).collect()
}

/// The program or library that this code is part of: each has a search path of its own.
fn this_code() -> Handle {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address of this code; the loader writes one record.
    let known = unsafe { libc::dladdr(this_code as *const c_void, info.as_mut_ptr()) };
    // SAFETY: all zeros is a record without a file, too.
    let file = unsafe { info.assume_init() }.dli_fname;
    let library = (known != 0 && !file.is_null()).then(|| {
        // SAFETY: the loader's own text, which stays as long as this code does.
        let file = unsafe { CStr::from_ptr(file) };
        let path = file.to_bytes().contains(&b'/').then(|| OsStr::from_bytes(file.to_bytes()))?;
        // SAFETY: it is mapped, or nothing is opened.
        unsafe { Handle::open(Some(path), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
    });
    // The program is not always known by a path.
    library.flatten().unwrap_or_else(Handle::this)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_tells_its_usual_folders_last() {
        let folders = search_path();
        let usual = &folders[usual_from(&folders)..];
        assert!(usual.iter().any(|folder| folder.ends_with("lib")), "{folders:?}");
    }

    #[test]
    fn usual_folders_are_told_from_those_of_a_path() {
        for (folders, usual) in [
            ("", ""),
            ("/x /lib64 /usr/lib64 /lib /usr/lib", "/lib64 /usr/lib64 /lib /usr/lib"),
            ("/usr/lib /lib/x86_64-linux-gnu /usr/lib", "/lib/x86_64-linux-gnu /usr/lib"),
            ("/lib /usr/lib/wsl/lib /lib /usr/lib", "/lib /usr/lib"),
            ("/usr/lib/cuda /usr/local/lib lib .", ""),
        ] {
            let folders: Vec<PathBuf> = folders.split_whitespace().map(PathBuf::from).collect();
            let text: Vec<_> =
                folders[usual_from(&folders)..].iter().flat_map(|f| f.to_str()).collect();
            assert_eq!(text.join(" "), usual);
        }
    }

    #[test]
    fn the_files_of_the_cache_have_the_whole_name() {
        let files = cached(Path::new("libc.so.6"));
        assert!(files.iter().all(|file| file.ends_with("libc.so.6")), "{files:?}");
        assert!(cached(Path::new("libno-such-library.so.1")).is_empty());
    }
}
