//! Copies of the simulator under the vendors' names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::variant::{FILE_NAMES, Variant};

/// Copies `library` into `folder`, once for each of `names` (all of [`FILE_NAMES`] if there are
/// none), and gives each copy the name inside and the symbols that the vendor's library has.
///
/// # Errors
/// A name that is no vendor's, a `library` that is not a 64-bit shared library of this crate, or
/// what the file system answers.
pub fn install(library: &Path, folder: &Path, names: &[&str]) -> io::Result<Vec<PathBuf>> {
    let names = if names.is_empty() { &FILE_NAMES[..] } else { names };
    let original = fs::read(library)?;
    fs::create_dir_all(folder)?;
    let mut made = Vec::new();
    for name in names {
        let variant = Variant::of_file(name).ok_or_else(|| {
            wrong(format!("{name} is no vendor's library; known are {}", FILE_NAMES.join(", ")))
        })?;
        let mut copy = original.clone();
        disguise(&mut copy, variant).ok_or_else(|| {
            wrong(format!("{} is not the simulator's library", library.display()))
        })?;
        let path = folder.join(name);
        // A new file: a process that has the old one mapped keeps it.
        let fresh = folder.join(format!(".{name}.{}", std::process::id()));
        fs::write(&fresh, &copy)?;
        fs::rename(&fresh, &path)?;
        made.push(path);
    }
    Ok(made)
}

fn wrong(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Rewrites DT_SONAME and hides what `variant` does not have. None: not a file of ours.
fn disguise(file: &mut [u8], variant: Variant) -> Option<()> {
    const DYNAMIC: u32 = 6;
    const DYNSYM: u32 = 11;
    const SONAME: u64 = 14;
    const HIDDEN: u8 = 2;
    if file.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let sections = Sections::of(file)?;
    let (offset, len, link) = sections.find(file, DYNSYM)?;
    let (strings, _, _) = sections.at(file, link)?;
    for symbol in (offset..offset + len).step_by(24) {
        let name = text(file, strings + u32_at(file, symbol)? as usize)?;
        let keep = std::str::from_utf8(name).map_or(true, |name| variant.exports(name));
        let defined = u16_at(file, symbol + 6)? != 0;
        if defined && !keep {
            *file.get_mut(symbol + 5)? |= HIDDEN;
        }
    }
    let (offset, len, link) = sections.find(file, DYNAMIC)?;
    let (strings, _, _) = sections.at(file, link)?;
    let entry = (offset..offset + len).step_by(16).find(|at| u64_at(file, *at) == Some(SONAME))?;
    let at = strings + usize::try_from(u64_at(file, entry + 8)?).ok()?;
    let old = text(file, at)?.len();
    let new = variant.soname().as_bytes();
    let place = file.get_mut(at..at + old)?;
    place.get_mut(..new.len())?.copy_from_slice(new);
    place.get_mut(new.len()..)?.fill(0);
    Some(())
}

/// The section headers of an ELF file.
struct Sections {
    offset: usize,
    count: usize,
}

impl Sections {
    const ENTRY: usize = 64;

    fn of(file: &[u8]) -> Option<Self> {
        let offset = usize::try_from(u64_at(file, 0x28)?).ok()?;
        Some(Self { offset, count: u16_at(file, 0x3c)?.into() })
    }

    /// Where a section lies, its length and the section that it refers to.
    fn at(&self, file: &[u8], index: usize) -> Option<(usize, usize, usize)> {
        let header = self.offset + index * Self::ENTRY;
        let offset = usize::try_from(u64_at(file, header + 0x18)?).ok()?;
        let len = usize::try_from(u64_at(file, header + 0x20)?).ok()?;
        Some((offset, len, u32_at(file, header + 0x28)? as usize))
    }

    fn find(&self, file: &[u8], kind: u32) -> Option<(usize, usize, usize)> {
        let is = |index: &usize| u32_at(file, self.offset + index * Self::ENTRY + 4) == Some(kind);
        self.at(file, (0..self.count).find(is)?)
    }
}

fn text(file: &[u8], at: usize) -> Option<&[u8]> {
    file.get(at..)?.split(|byte| *byte == 0).next()
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    file.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    file.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize) -> Option<u64> {
    file.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}
