//! Whether a file can be a shared library of this process, before the loader maps it.
//!
//! The loader checks headers, but not that the file is as long as they say: a truncated library
//! kills the process by SIGBUS while it is being loaded. So files that a user names, and files at
//! known places, are looked at first.

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

/// Says what is wrong with the file; `Ok` leaves the last word to the loader.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let told = |error: io::Error| error.to_string();
    let mut file = File::open(path).map_err(told)?;
    let meta = file.metadata().map_err(told)?;
    if !meta.is_file() {
        return Err("this is no file".to_owned());
    }
    let mut header = [0; HEADER_LEN];
    if file.read_exact(&mut header).is_err() || !header.starts_with(b"\x7fELF") {
        return Err("this is no shared library".to_owned());
    }
    if header[4] != CLASS_64 || header[5] != 1 {
        return Err(
            "this library is for another kind of machine (not 64 bits, little-endian)".to_owned()
        );
    }
    let machine = u16_at(&header, 18);
    if MACHINE != 0 && machine != MACHINE {
        return Err(format!(
            "this library is for another kind of machine (ELF machine {machine}, this is {MACHINE})"
        ));
    }
    if u16_at(&header, 16) != TYPE_SHARED {
        return Err("this is an ELF file, but no shared library".to_owned());
    }
    let (at, entry, count) = (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56));
    if usize::from(entry) != PROGRAM_HEADER_LEN || count == 0 || count > MOST_PROGRAM_HEADERS {
        return Err("this library's header is damaged".to_owned());
    }
    file.seek(SeekFrom::Start(at)).map_err(told)?;
    for _ in 0..count {
        let mut segment = [0; PROGRAM_HEADER_LEN];
        if file.read_exact(&mut segment).is_err() {
            return Err("this library is cut off in its headers".to_owned());
        }
        if u32_at(&segment, 0) != SEGMENT_LOAD {
            continue;
        }
        let end = u64_at(&segment, 8).checked_add(u64_at(&segment, 32));
        if end.is_none_or(|end| end > meta.len()) {
            return Err(format!(
                "this library is cut off: it has {} bytes, and its headers promise more",
                meta.len()
            ));
        }
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
        assert_eq!(check(Path::new("/")), Err("this is no file".to_owned()));
        assert!(check(Path::new("/nowhere/lib.so")).unwrap_err().contains("No such file"));
        assert!(check(Path::new("Cargo.toml")).unwrap_err().contains("no shared library"));
    }
}
