//! The only holder of user pointers: a user's address is a number everywhere else.
//!
//! Memory that users lend is shared with the users themselves, with peers and with the kernel, so no
//! Rust reference to it is ever made. Registered host memory is copied with raw pointers; memory that
//! is not registered is touched by the kernel only, so that a bad address is an error.
#![expect(unsafe_code, reason = "this is where user memory is touched")]

use std::fmt;
use std::io;
use std::ptr;
use std::sync::Arc;

use tensorferry_wire::Op;

use crate::error::{Error, Result};
use crate::registry::Pin;
use crate::staging::Loan;
use crate::transfer::Request;

/// A piece of memory for the kernel to read or write: a number and a length, nothing is promised.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(C)]
pub(crate) struct Span {
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

// So that a slice of spans is a slice of iovecs to the kernel.
const _: () = assert!(
    size_of::<Span>() == size_of::<libc::iovec>()
        && std::mem::offset_of!(Span, addr) == std::mem::offset_of!(libc::iovec, iov_base)
        && std::mem::offset_of!(Span, len) == std::mem::offset_of!(libc::iovec, iov_len)
);

impl Span {
    /// Bytes of the engine's own, for the kernel to read.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() }
    }

    /// Bytes of the engine's own, for the kernel to write.
    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self { addr: bytes.as_mut_ptr().expose_provenance() as u64, len: bytes.len() }
    }

    /// Whether all of it lies in `whole`.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn is_inside(self, whole: Self) -> bool {
        self.addr.checked_sub(whole.addr).is_some_and(|at| {
            (at as usize).checked_add(self.len).is_some_and(|end| end <= whole.len)
        })
    }

    fn as_iovec(self) -> libc::iovec {
        libc::iovec { iov_base: ptr_to(self.addr).cast(), iov_len: self.len }
    }
}

fn ptr_to(addr: u64) -> *mut u8 {
    // Users hand out addresses as integers, so their provenance is exposed by definition.
    ptr::with_exposed_provenance_mut(addr as usize)
}

/// How user space copies into and out of registered memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum CopyMode {
    /// With the processor: fastest.
    Direct,
    /// Through the kernel, so that an unmapped page is an error and not a fault.
    Kernel,
}

/// Copies `bytes` to `addr`, which lies in the pinned buffer.
pub(crate) fn copy_in(pin: &Pin, addr: u64, bytes: &[u8], mode: CopyMode) -> io::Result<()> {
    assert!(pin.contains(addr, bytes.len() as u64), "the range was looked up before");
    match mode {
        CopyMode::Direct => {
            // SAFETY: `Engine::register`'s caller promised that the buffer is mapped and writable until
            // `unregister` has returned, which waits for `pin`. `bytes` is the engine's own memory, which
            // is never registered, so the two do not overlap.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr_to(addr), bytes.len()) };
            Ok(())
        }
        CopyMode::Kernel => kernel_copy(Span::of(bytes), Span { addr, len: bytes.len() }),
    }
}

/// Copies `bytes` into a slot, `at` bytes behind its start.
pub(crate) fn fill_slot(slot: &Loan, at: u64, bytes: &[u8]) {
    assert!(at + bytes.len() as u64 <= slot.len(), "the slot has room");
    // SAFETY: pinned memory of the engine's own, which `slot` lends to the caller; no copy or call uses these bytes
    // of it now.
    unsafe {
        ptr::copy_nonoverlapping(bytes.as_ptr(), ptr_to(slot.addr() + at), bytes.len());
    };
}

/// Copies `bytes.len()` bytes out of a slot, from `at` bytes behind its start on.
pub(crate) fn empty_slot(slot: &Loan, at: u64, bytes: &mut [u8]) {
    assert!(at + bytes.len() as u64 <= slot.len(), "the slot has so many bytes");
    // SAFETY: as in `fill_slot`.
    unsafe {
        ptr::copy_nonoverlapping(ptr_to(slot.addr() + at), bytes.as_mut_ptr(), bytes.len());
    };
}

/// Copies from one slot to another.
pub(crate) fn copy_slots(from: &Loan, to: &Loan, len: usize) {
    assert!(len as u64 <= from.len().min(to.len()), "both slots have so many bytes");
    // SAFETY: as in `fill_slot`, for both; two slots do not overlap.
    unsafe { ptr::copy_nonoverlapping(ptr_to(from.addr()), ptr_to(to.addr()), len) };
}

/// Copies host memory of this process to a slot (`Write`), or a slot to host memory (`Read`). `mode` is `Direct` only
/// if a pin covers that memory, and it is writable if it is written.
pub(crate) fn copy_slot(
    slot: &Loan,
    addr: u64,
    len: usize,
    op: Op,
    mode: CopyMode,
) -> io::Result<()> {
    assert!(len as u64 <= slot.len(), "the slot has so many bytes");
    let (slot, memory) = (Span { addr: slot.addr(), len }, Span { addr, len });
    let (from, to) = if op == Op::Write { (memory, slot) } else { (slot, memory) };
    match mode {
        CopyMode::Kernel => kernel_copy(from, to),
        CopyMode::Direct => {
            // SAFETY: as in `fill_slot` for the slot, and as in `copy_within` for the memory.
            unsafe { ptr::copy_nonoverlapping(ptr_to(from.addr), ptr_to(to.addr), len) };
            Ok(())
        }
    }
}

/// Copies `len` bytes from one address to another within this process, with memmove semantics; a bad address is
/// an error. One range is in the buffer that `pin` is on, the other is the local memory of a request that is not
/// final; `mode` is `Direct` only if a pin of its batch covers that one too, and is of writable memory if that
/// is written.
pub(crate) fn copy_within(
    pin: &Pin,
    (from, to, len): (u64, u64, u64),
    mode: CopyMode,
) -> io::Result<()> {
    assert!(pin.contains(from, len) || pin.contains(to, len), "the range was looked up before");
    if mode == CopyMode::Direct {
        // SAFETY: both ranges lie in pinned buffers, whose owners promised `Engine::register` to keep them
        // mapped until `unregister` has returned, which waits for the pins; `copy` allows overlap.
        unsafe { ptr::copy(ptr_to(from), ptr_to(to), len as usize) };
        return Ok(());
    }
    let mut bounce = vec![0u8; (len as usize).min(BOUNCE)];
    let pieces = len.div_ceil(BOUNCE as u64);
    for i in 0..pieces {
        // Back to front if the destination is behind the source, so that overlap does no harm.
        let at = if to > from { pieces - 1 - i } else { i } * BOUNCE as u64;
        let piece = &mut bounce[..(len - at).min(BOUNCE as u64) as usize];
        kernel_copy(Span { addr: from + at, len: piece.len() }, Span::of_mut(piece))?;
        kernel_copy(Span::of(piece), Span { addr: to + at, len: piece.len() })?;
    }
    Ok(())
}

const BOUNCE: usize = 256 << 10;

/// Has the kernel copy within this process; `EFAULT` if either side is not mapped.
fn kernel_copy(from: Span, to: Span) -> io::Result<()> {
    let (local, remote) = (from.as_iovec(), to.as_iovec());
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: one iovec each, alive during the call. The kernel checks both addresses; the callers
    // write only to memory that was lent to the engine or that it owns.
    let n = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    match usize::try_from(n) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == from.len => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Copies what the span names, in place of the kernel; false where nothing is ever mapped.
#[cfg(test)]
pub(crate) fn copy_from(span: Span, bytes: &mut Vec<u8>) -> bool {
    if span.addr < NEVER_MAPPED || span.len == 0 {
        return span.len == 0;
    }
    // SAFETY: a test passes what the engine would have a socket read, which is mapped and is read by one thread only.
    bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(ptr_to(span.addr), span.len) });
    true
}

/// Copies `bytes`, which fit, to what the span names, in place of the kernel; false where nothing is ever mapped.
#[cfg(test)]
pub(crate) fn copy_to(span: Span, bytes: &[u8]) -> bool {
    assert!(bytes.len() <= span.len, "the caller has cut them");
    if span.addr < NEVER_MAPPED {
        return bytes.is_empty();
    }
    // SAFETY: a test passes what the engine would have a socket write, which is mapped and is used by one thread only.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr_to(span.addr), bytes.len()) };
    true
}

/// Below this the kernel maps nothing.
#[cfg(test)]
const NEVER_MAPPED: u64 = 1 << 16;

/// Whether the kernel can read, and if `writable` write, the first and the last byte of a range on this
/// process's behalf. `Err` holds the address of the byte that it cannot.
///
/// Nothing is changed: a write is tried as an atomic "add 0", which loses nobody else's write.
pub(crate) fn check_mapped(addr: u64, len: u64, writable: bool) -> std::result::Result<(), u64> {
    for at in [addr, addr + (len - 1)] {
        let mapped = if writable { is_writable(at) } else { is_readable(at) };
        if !mapped {
            return Err(at);
        }
    }
    Ok(())
}

// Futex calls touch a word on our behalf and are allowed everywhere, unlike `process_vm_*`. The word is
// aligned, so it lies in the same page as its every byte.

/// Not what memory usually holds: a word that is equal costs a timer.
const RARE: u32 = 0x5fe3_d1b7;

fn is_readable(at: u64) -> bool {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let no_time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: compares the word with one that is rare, and returns at once if it is another; else it waits for
    // no time. EFAULT if the word cannot be read.
    let done =
        unsafe { libc::syscall(libc::SYS_futex, ptr_to(at & !3), op, RARE, &raw const no_time) };
    done >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

fn is_writable(at: u64) -> bool {
    let word: u32 = 0;
    let other = ptr_to(at & !3);
    let add_zero = (libc::FUTEX_OP_ADD << 28) | (libc::FUTEX_OP_CMP_EQ << 24);
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: wakes nobody (0 and 0 waiters), and adds 0 to the word at `other`, atomically. EFAULT if that
    // cannot be written.
    let done =
        unsafe { libc::syscall(libc::SYS_futex, &raw const word, op, 0, 0_usize, other, add_zero) };
    done >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// Host memory of the engine's making, page-aligned and zeroed, that can be lent without `unsafe`.
///
/// Clones are the same memory; it is unmapped when the last one is gone, and both a registration and
/// a running batch hold one. Peers may change the content at any time, so it is read and written by
/// copy, and no reference to it can be had.
///
/// ```
/// use tensorferry::HostBuffer;
///
/// # fn main() -> tensorferry::Result<()> {
/// let buffer = HostBuffer::zeroed(4096)?;
/// buffer.write(100, b"hello");
/// assert_eq!(buffer.read(99, 7), b"\0hello\0");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HostBuffer {
    map: Arc<Mapping>,
}

struct Mapping {
    addr: u64,
    len: usize,
}

/// Memory that the engine keeps alive while it uses it.
#[derive(Clone)]
pub(crate) struct Lent(
    #[expect(dead_code, reason = "kept alive, not looked at")] Arc<dyn Send + Sync>,
);

impl Lent {
    pub(crate) fn new(memory: Arc<dyn Send + Sync>) -> Self {
        Self(memory)
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lent")
    }
}

impl From<HostBuffer> for Lent {
    fn from(buffer: HostBuffer) -> Self {
        Self(buffer.map)
    }
}

/// A request whose local memory is a [`HostBuffer`] or a [`DeviceBuffer`](crate::DeviceBuffer), which it keeps.
///
/// Made by their `request` methods, for [`Segment::submit_owned`](crate::Segment::submit_owned).
#[derive(Clone, Debug)]
pub struct OwnedRequest {
    pub(crate) request: Request,
    pub(crate) buffer: Lent,
}

impl OwnedRequest {
    pub(crate) fn new(op: Op, local: u64, remote: u64, len: u64, buffer: impl Into<Lent>) -> Self {
        Self { request: Request { op, local, remote, len }, buffer: buffer.into() }
    }
}

impl HostBuffer {
    /// Maps `len` bytes of zeroes.
    ///
    /// # Errors
    /// A length of zero, or more than the system can give.
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::bad_argument("a buffer needs at least one byte"));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice changes nothing that exists.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
        if addr == libc::MAP_FAILED {
            return Err(Error::io(format!("mapping {len} bytes"), io::Error::last_os_error()));
        }
        Ok(Self { map: Arc::new(Mapping { addr: addr.expose_provenance() as u64, len }) })
    }

    /// Maps `len` bytes of zeroes at an address, if nothing is there.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn zeroed_at(addr: u64, len: usize) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: an anonymous mapping that replaces nothing changes nothing that exists.
        let got = unsafe { libc::mmap(ptr_to(addr).cast(), len, protection, flags, -1, 0) };
        if got.expose_provenance() as u64 != addr {
            let why = io::Error::last_os_error();
            return Err(Error::io(format!("mapping {len} bytes at {addr:#x}"), why));
        }
        Ok(Self { map: Arc::new(Mapping { addr, len }) })
    }

    /// The address of the first byte, as requests and peers name it.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.map.addr
    }

    /// The length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        let to = ptr_to(self.map.addr + offset as u64);
        // SAFETY: checked against the mapping, which `self` keeps until this returns.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies `len` bytes at `offset` out.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    #[must_use]
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read_into(offset, &mut bytes);
        bytes
    }

    /// Fills `bytes` from `offset`.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn read_into(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        let from = ptr_to(self.map.addr + offset as u64);
        // SAFETY: checked against the mapping, which `self` keeps until this returns.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// A request whose local range is `len` bytes at `offset` of this buffer.
    ///
    /// # Errors
    /// The range is not inside the buffer.
    pub fn request(&self, op: Op, offset: usize, remote: u64, len: usize) -> Result<OwnedRequest> {
        if offset.checked_add(len).is_none_or(|end| end > self.map.len) {
            return Err(Error::bad_argument(format!(
                "[{offset}, +{len}) is not inside the buffer of {} bytes",
                self.map.len
            )));
        }
        let local = self.map.addr + offset as u64;
        Ok(OwnedRequest::new(op, local, remote, len as u64, self.clone()))
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.map.len),
            "[{offset}, +{len}) is not inside the buffer of {} bytes",
            self.map.len
        );
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer[{:#x}, +{})", self.map.addr, self.map.len)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `zeroed` with this length. Registrations and batches hold clones, so nothing
        // that the engine still touches is unmapped.
        unsafe { libc::munmap(ptr_to(self.addr).cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Access, BufferInfo, Range};

    fn registered(buffer: &HostBuffer) -> Pin {
        let registry = crate::registry::Registry::new();
        let range = BufferInfo { addr: buffer.addr(), len: buffer.len() as u64 };
        let lent = Some(buffer.clone().into());
        registry
            .register(vec![Range::host(range, Access::ReadWrite)], Default::default(), lent)
            .unwrap();
        registry.find(Op::Write, range.addr, range.len).unwrap()
    }

    #[test]
    fn copies_within_allow_overlap_and_refuse_bad_addresses() {
        let buffer = HostBuffer::zeroed(3 * BOUNCE).unwrap();
        let pin = registered(&buffer);
        let pattern: Vec<u8> = (0..buffer.len()).map(|i| (i * 7 % 251) as u8).collect();
        for mode in [CopyMode::Direct, CopyMode::Kernel] {
            for (from, to) in [(0, 1000), (1000, 0), (5, 5)] {
                buffer.write(0, &pattern);
                let len = buffer.len() - 1000 - 5;
                let (a, b) = (buffer.addr() + from as u64, buffer.addr() + to as u64);
                copy_within(&pin, (a, b, len as u64), mode).unwrap();
                assert!(buffer.read(to, len) == pattern[from..from + len]);
            }
        }
        for (from, to) in [(buffer.addr(), 16), (16, buffer.addr())] {
            let error = copy_within(&pin, (from, to, 8), CopyMode::Kernel).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        }
    }

    #[test]
    fn both_copy_modes_copy() {
        let buffer = HostBuffer::zeroed(64).unwrap();
        let pin = registered(&buffer);
        for mode in [CopyMode::Direct, CopyMode::Kernel] {
            copy_in(&pin, buffer.addr() + 3, b"abc", mode).unwrap();
            assert_eq!(buffer.read(2, 5), b"\0abc\0");
            buffer.write(0, &[0; 64]);
        }
    }

    #[test]
    fn memory_is_looked_at_before_it_is_trusted() {
        let buffer = HostBuffer::zeroed(3 * 4096).unwrap();
        buffer.write(0, &[7; 3 * 4096]);
        let (addr, len) = (buffer.addr(), buffer.len() as u64);
        for (from, len) in [(0, len), (1, 1), (4095, 2), (len - 1, 1)] {
            assert_eq!(check_mapped(addr + from, len, true), Ok(()));
        }
        assert!(buffer.read(0, 3 * 4096).iter().all(|b| *b == 7), "nothing was changed");
        assert_eq!(check_mapped(4096, 10, true), Err(4096));
        assert_eq!(check_mapped(4096, 10, false), Err(4096));
        assert_eq!(check_mapped(u64::MAX - 4096, 10, true), Err(u64::MAX - 4096));
        let last = (addr + 2 * 4096) as usize;
        // SAFETY: the last page of `buffer`, which nobody else uses.
        unsafe { libc::mprotect(ptr_to(last as u64).cast(), 4096, libc::PROT_READ) };
        assert_eq!(check_mapped(addr, len, false), Ok(()));
        assert_eq!(check_mapped(addr, len, true), Err(addr + len - 1));
    }

    #[test]
    fn a_request_outside_its_buffer_is_refused() {
        let buffer = HostBuffer::zeroed(10).unwrap();
        assert!(buffer.request(Op::Read, 0, 1, 10).is_ok());
        for (offset, len) in [(1, 10), (11, 0), (usize::MAX, 2)] {
            assert!(buffer.request(Op::Read, offset, 1, len).is_err());
        }
        assert!(HostBuffer::zeroed(0).is_err());
    }
}
