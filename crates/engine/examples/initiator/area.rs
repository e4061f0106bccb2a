//! The memory that is transferred from and to: mapped once, and closed to everybody at the caller's word.

#![expect(unsafe_code, reason = "maps memory, and takes it away from the process")]

use std::io;
use std::ptr::NonNull;

/// As in tests/pattern.py.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const SALT: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// Memory for the life of the program.
pub(crate) struct Area {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the process for good, and is touched through raw pointers only. Orders that run at the
// same time are given ranges that do not overlap, by whoever gives them.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The address of a range, which is in the area.
    pub(crate) fn range(&self, at: usize, len: usize) -> io::Result<u64> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.base() + at as u64),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "a range outside the memory")),
        }
    }

    /// Writes words of a pattern; `at` and `len` are multiples of eight.
    pub(crate) fn fill(&self, at: usize, len: usize, seed: u64) -> io::Result<()> {
        self.range(at, len)?;
        for i in 0..len / 8 {
            let place = self.place(at + i * 8).cast::<u64>();
            // SAFETY: the range is inside the mapping, which starts at a page and is never unmapped.
            unsafe { place.write(word(seed, i)) };
        }
        Ok(())
    }

    /// The first byte at which the range is not the pattern, counted in words.
    pub(crate) fn difference(&self, at: usize, len: usize, seed: u64) -> io::Result<Option<usize>> {
        self.range(at, len)?;
        let differs = |i: &usize| {
            let place = self.place(at + i * 8).cast::<u64>();
            // SAFETY: as in `fill`. Volatile: the kernel writes here, unseen by the compiler.
            let seen = unsafe { place.read_volatile() };
            seen != word(seed, *i)
        };
        Ok((0..len / 8).find(differs).map(|i| i * 8))
    }

    /// Lets the process touch whole pages of the area, or not.
    pub(crate) fn protect(&self, at: usize, len: usize, open: bool) -> io::Result<()> {
        self.range(at, len)?;
        let access = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        let place = self.place(at).cast();
        // SAFETY: the pages are the area's; nobody holds a reference into them.
        let code = unsafe { libc::mprotect(place, len, access) };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn place(&self, at: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(at)
    }
}

fn word(seed: u64, i: usize) -> u64 {
    (i as u64).wrapping_mul(STEP).wrapping_add(seed.wrapping_mul(SALT))
}
