//! Whether a file can be a shared library of this process, before the loader maps it.
//!
//! The loader checks headers, but not that the file is as long as they say: a truncated library
//! kills the process by SIGBUS while it is being loaded, and a FIFO keeps it waiting. So files are
//! looked at first.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

const HEADER_LEN: usize = 64;
const PROGRAM_HEADER_LEN: usize = 56;
const CLASS_64: u8 = 2;
const TYPE_SHARED: u16 = 3;
const SEGMENT_LOAD: u32 = 1;
/// More would be no library.
const MOST_PROGRAM_HEADERS: u16 = 512;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
/// Other machines leave the question to the loader.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const MACHINE: u16 = 0;

/// Why a file is no library of this process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flaw {
    pub(crate) why: String,
    /// The loader's search goes on to the next folder.
    pub(crate) passed_over: bool,
}

impl From<String> for Flaw {
    fn from(why: String) -> Self {
        Self { why, passed_over: false }
    }
}

impl From<&str> for Flaw {
    fn from(why: &str) -> Self {
        why.to_owned().into()
    }
}

impl From<io::Error> for Flaw {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
        let passed_over = matches!(error.kind(), NotADirectory | NotFound | PermissionDenied);
        Self { why: error.to_string(), passed_over }
    }
}

/// Whether there is something at `path` that is no file, so that opening it could wait for ever.
pub(crate) fn is_no_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| !meta.is_file())
}

/// Says what is wrong with the file; `Ok` leaves the last word to the loader.
pub(crate) fn check(path: &Path) -> Result<(), Flaw> {
    if is_no_file(path) {
        return Err("this is no file".into());
    }
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut header = [0; HEADER_LEN];
    if file.read_exact(&mut header).is_err() || !header.starts_with(b"\x7fELF") {
        return Err("this is no shared library".into());
    }
    check_machine(&header)?;
    if u16_at(&header, 16) != TYPE_SHARED {
        return Err("this is an ELF file, but no shared library".into());
    }
    let (at, entry, count) = (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56));
    if usize::from(entry) != PROGRAM_HEADER_LEN || count == 0 || count > MOST_PROGRAM_HEADERS {
        return Err("this library's header is damaged".into());
    }
    file.seek(SeekFrom::Start(at))?;
    for _ in 0..count {
        let mut segment = [0; PROGRAM_HEADER_LEN];
        if file.read_exact(&mut segment).is_err() {
            return Err("this library is cut off in its headers".into());
        }
        if u32_at(&segment, 0) != SEGMENT_LOAD {
            continue;
        }
        let end = u64_at(&segment, 8).checked_add(u64_at(&segment, 32));
        if end.is_none_or(|end| end > len) {
            return Err(format!(
                "this library is cut off: it has {len} bytes, and its headers promise more"
            )
            .into());
        }
    }
    Ok(())
}

fn check_machine(header: &[u8]) -> Result<(), Flaw> {
    if header[4] != CLASS_64 || header[5] != 1 {
        let why = "this library is for another kind of machine (not 64 bits, little-endian)";
        return Err(Flaw { why: why.to_owned(), passed_over: header[4] != CLASS_64 });
    }
    let machine = u16_at(header, 18);
    if MACHINE != 0 && machine != MACHINE {
        let why = format!(
            "this library is for another kind of machine (ELF machine {machine}, this is {MACHINE})"
        );
        return Err(Flaw { why, passed_over: true });
    }
    Ok(())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

/// `N` bytes from `at`; the callers' offsets are inside of fixed arrays.
fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut taken = [0; N];
    taken.copy_from_slice(&bytes[at..at + N]);
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_this_machine_passes_the_header_checks() {
        // Test binaries are position-independent executables, which are shared objects to ELF.
        assert_eq!(check(&std::env::current_exe().unwrap()), Ok(()));
    }

    #[test]
    fn folders_and_missing_files_are_told_apart() {
        assert_eq!(check(Path::new("/")), Err("this is no file".into()));
        let missing = check(Path::new("/nowhere/lib.so")).unwrap_err();
        assert!(missing.why.contains("No such file") && missing.passed_over);
        let text = check(Path::new("Cargo.toml")).unwrap_err();
        assert!(text.why.contains("no shared library") && !text.passed_over);
    }
}
