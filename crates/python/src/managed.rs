//! Managed buffers: memory that the engine allocates and registers for callers that cannot.
//!
//! A block is a mapping of its own, registered from `allocate` to `free` and not a moment longer: peers
//! reach what is allocated, and nothing else. Freed blocks wait to be used again, by size class.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tensorferry::gpu::Location;
use tensorferry::{Access, Engine, Error, HostBuffer, RegisterOptions, Repeat};

use crate::failure::Failure;

/// Classes are this times 1, 2, 4 and so on, up to [`LARGEST_CLASS`]; larger blocks have their own length.
const SMALLEST_CLASS: u64 = 8 << 10;
const LARGEST_CLASS: u64 = 256 << 20;
/// How much freed memory is kept for the next `allocate`.
const KEPT_BYTES: usize = 64 << 20;

/// How blocks are registered.
fn registered() -> RegisterOptions {
    RegisterOptions::default()
        .with_access(Access::ReadWrite)
        .with_repeat(Repeat::Refused)
        .with_location(Location::Cpu)
}

/// The managed buffers of one engine.
#[derive(Default)]
pub(crate) struct Managed {
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    used: BTreeMap<u64, HostBuffer>,
    /// The last one freed comes first.
    free: Vec<HostBuffer>,
    free_bytes: usize,
}

/// How long the block for `length` bytes is.
fn block_len(length: u64) -> Option<usize> {
    let len = if length <= LARGEST_CLASS {
        length.next_power_of_two().max(SMALLEST_CLASS)
    } else {
        length
    };
    usize::try_from(len).ok()
}

impl Managed {
    /// Allocates and registers a block of at least `length` bytes.
    pub(crate) fn allocate(&self, engine: &Engine, length: u64) -> Result<u64, Failure> {
        let len = block_len(length)
            .ok_or_else(|| Failure::new(format!("a length of {length} bytes is too much")))?;
        let buffer = match self.lock().take_free(len) {
            Some(buffer) => buffer,
            None => HostBuffer::zeroed(len)?,
        };
        engine.register_buffer(&buffer, &registered())?;
        let addr = buffer.addr();
        self.lock().used.insert(addr, buffer);
        Ok(addr)
    }

    /// Unregisters the block of `length` bytes at `addr`, and keeps or unmaps it.
    pub(crate) fn free(&self, engine: &Engine, addr: u64, length: u64) -> Result<(), Failure> {
        let buffer = {
            let mut blocks = self.lock();
            let Some(buffer) = blocks.used.get(&addr) else {
                return Err(Failure::new(format!(
                    "no managed buffer starts at {addr:#x}; was it freed already?"
                )));
            };
            if block_len(length) != Some(buffer.len()) {
                return Err(Failure::new(format!(
                    "the managed buffer at {addr:#x} was not allocated with a length of {length} \
                     bytes; pass the length that it was allocated with"
                )));
            }
            // Taken out first, so that of two calls at the same time one fails.
            blocks.used.remove(&addr)
        };
        let Some(buffer) = buffer else { return Ok(()) };
        match engine.unregister(addr) {
            // Registered by nobody any more: all the better.
            Ok(()) | Err(Error::NotRegistered { .. } | Error::Closed) => {}
            Err(error) => {
                self.lock().used.insert(addr, buffer);
                return Err(error.into());
            }
        }
        self.lock().keep(buffer);
        Ok(())
    }

    /// Whether a managed buffer starts at `addr`.
    pub(crate) fn starts_at(&self, addr: u64) -> bool {
        self.lock().used.contains_key(&addr)
    }

    /// The block that the whole range lies in, and the range's offset in it.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<(HostBuffer, usize)> {
        let blocks = self.lock();
        let (&start, buffer) = blocks.used.range(..=addr).next_back()?;
        let offset = addr - start;
        let end = offset.checked_add(len)?;
        (end <= buffer.len() as u64).then(|| (buffer.clone(), offset as usize))
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Blocks {
    fn take_free(&mut self, len: usize) -> Option<HostBuffer> {
        let at = self.free.iter().rposition(|buffer| buffer.len() == len)?;
        self.free_bytes -= len;
        Some(self.free.remove(at))
    }

    fn keep(&mut self, buffer: HostBuffer) {
        if self.free_bytes + buffer.len() <= KEPT_BYTES {
            self.free_bytes += buffer.len();
            self.free.push(buffer);
        }
    }
}
