//! Simulated memory. What the host sees of a device's memory is a mapping that nobody may touch;
//! the simulator copies through a second mapping of the same pages.

use std::collections::BTreeMap;
use std::io;

use crate::code::{
    ALREADY_REGISTERED, Done, INVALID_DEVICE, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY,
};
use crate::config::Config;
use crate::core::State;
use crate::sys::{self, Access, MemoryFile};

/// The smallest part that a device gives away.
const PAGE: u64 = 4096;
/// The granularity of memory that is mapped into a reservation.
pub(crate) const GRANULE: u64 = 2 << 20;
/// How much more `simgpu_alloc` reserves than it maps, as caching allocators do.
const SPARE: u64 = 64 << 30;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Device,
    Managed,
    /// Physical memory mapped into a reservation: no context.
    Mapped,
    /// From a stream-ordered pool: no context.
    Pool,
    Pinned,
    Registered,
}

impl Kind {
    /// Whether a copy from or to it is a host copy.
    pub(crate) fn is_host(self) -> bool {
        matches!(self, Self::Pinned | Self::Registered)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    pub(crate) device: usize,
    /// 0: none, or none that a query tells.
    pub(crate) context: u64,
    /// Unique for the life of the process.
    pub(crate) id: u64,
    /// Where the simulator finds its first byte.
    alias: u64,
    pub(crate) flags: u32,
    /// The reservation that it is mapped into, or the allocation itself.
    pub(crate) range: (u64, u64),
    /// The physical memory behind mapped memory.
    pub(crate) physical: u64,
}

/// Physical memory without an address.
#[derive(Clone, Debug)]
pub(crate) struct Physical {
    pub(crate) device: usize,
    offset: u64,
    len: u64,
    /// Handles and mappings that keep it.
    uses: u64,
}

/// The memory of one device.
struct Arena {
    file: MemoryFile,
    base: u64,
    alias: u64,
    free: BTreeMap<u64, u64>,
    used: u64,
}

impl Arena {
    fn new(size: u64, access: Access) -> io::Result<Self> {
        let file = MemoryFile::new(size)?;
        let base = file.map(0, size, access)?;
        let alias = file.map(0, size, Access::ReadWrite)?;
        Ok(Self { file, base, alias, free: BTreeMap::from([(0, size)]), used: 0 })
    }

    /// The first place that is large enough: freed addresses come back soon.
    fn take(&mut self, len: u64) -> Option<u64> {
        let (&offset, &room) = self.free.iter().find(|(_, room)| **room >= len)?;
        self.free.remove(&offset);
        if room > len {
            self.free.insert(offset + len, room - len);
        }
        self.used += len;
        Some(offset)
    }

    fn give(&mut self, mut offset: u64, mut len: u64) {
        self.file.forget(offset, len);
        self.used -= len;
        if let Some(next) = self.free.remove(&(offset + len)) {
            len += next;
        }
        if let Some((&before, room)) = self.free.range_mut(..offset).next_back()
            && before + *room == offset
        {
            *room += len;
            return;
        }
        self.free.insert(std::mem::take(&mut offset), len);
    }
}

pub(crate) struct Space {
    size: u64,
    access: Access,
    arenas: Vec<Option<Arena>>,
    /// By first address.
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    reservations: BTreeMap<u64, u64>,
    pub(crate) physical: BTreeMap<u64, Physical>,
    last_id: u64,
}

impl Space {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            size: config.memory,
            access: config.access,
            arenas: (0..config.devices).map(|_| None).collect(),
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            physical: BTreeMap::new(),
            last_id: 0,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn used(&self, device: usize) -> u64 {
        self.arenas.get(device).and_then(Option::as_ref).map_or(0, |arena| arena.used)
    }

    fn arena(&mut self, device: usize) -> Result<&mut Arena, i32> {
        let (size, access) = (self.size, self.access);
        let place = self.arenas.get_mut(device).ok_or(INVALID_DEVICE)?;
        if place.is_none() {
            *place = Some(Arena::new(size, access).map_err(|_| OUT_OF_MEMORY)?);
        }
        place.as_mut().ok_or(OUT_OF_MEMORY)
    }

    /// The allocation that `addr` lies in.
    pub(crate) fn find(&self, addr: u64) -> Option<&Allocation> {
        let (_, found) = self.allocations.range(..=addr).next_back()?;
        (addr - found.start < found.len).then_some(found)
    }

    fn add(&mut self, mut allocation: Allocation) -> u64 {
        self.last_id += 1;
        allocation.id = self.last_id;
        let start = allocation.start;
        self.allocations.insert(start, allocation);
        start
    }

    pub(crate) fn allocate(
        &mut self,
        device: usize,
        len: u64,
        kind: Kind,
        context: u64,
    ) -> Result<u64, i32> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let whole = len.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        let arena = self.arena(device)?;
        let offset = arena.take(whole).ok_or(OUT_OF_MEMORY)?;
        let (start, alias) = (arena.base + offset, arena.alias + offset);
        if kind == Kind::Managed {
            sys::protect(start, whole, Access::ReadWrite);
        }
        let context = if kind == Kind::Pool { 0 } else { context };
        let range = (start, len);
        let physical = 0;
        Ok(self.add(Allocation {
            start,
            len,
            kind,
            device,
            context,
            id: 0,
            alias,
            flags: 0,
            range,
            physical,
        }))
    }

    /// Frees what begins at `start` and is of one of `kinds`.
    pub(crate) fn free(&mut self, start: u64, kinds: &[Kind]) -> Done {
        let access = self.access;
        let found = self.allocations.get(&start).filter(|found| kinds.contains(&found.kind));
        let Some(found) = found.cloned() else { return Err(INVALID_VALUE) };
        self.allocations.remove(&start);
        let whole = found.len.next_multiple_of(PAGE);
        let arena = self.arena(found.device)?;
        if found.kind == Kind::Managed {
            sys::protect(start, whole, access);
        }
        arena.give(start - arena.base, whole);
        Ok(())
    }

    pub(crate) fn reserve(&mut self, len: u64) -> Result<u64, i32> {
        if len == 0 || !len.is_multiple_of(GRANULE) {
            return Err(INVALID_VALUE);
        }
        // Aligned as the driver's are: the unaligned ends stay unused.
        let start = sys::reserve(len + GRANULE).map_err(|_| OUT_OF_MEMORY)?;
        let start = start.next_multiple_of(GRANULE);
        self.reservations.insert(start, len);
        Ok(start)
    }

    pub(crate) fn release_reservation(&mut self, start: u64) -> Done {
        let len = *self.reservations.get(&start).ok_or(INVALID_VALUE)?;
        if self.allocations.range(start..start + len).next().is_some() {
            return Err(INVALID_VALUE);
        }
        self.reservations.remove(&start);
        sys::unmap(start, len);
        Ok(())
    }

    pub(crate) fn create_physical(&mut self, handle: u64, device: usize, len: u64) -> Done {
        if len == 0 || !len.is_multiple_of(GRANULE) {
            return Err(INVALID_VALUE);
        }
        let offset = self.arena(device)?.take(len).ok_or(OUT_OF_MEMORY)?;
        self.physical.insert(handle, Physical { device, offset, len, uses: 1 });
        Ok(())
    }

    pub(crate) fn retain_physical(&mut self, addr: u64) -> Result<u64, i32> {
        let handle = self.find(addr).map(|found| found.physical).ok_or(INVALID_VALUE)?;
        self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.uses += 1;
        Ok(handle)
    }

    pub(crate) fn release_physical(&mut self, handle: u64) -> Done {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        physical.uses -= 1;
        if physical.uses == 0 {
            let physical = physical.clone();
            self.physical.remove(&handle);
            self.arena(physical.device)?.give(physical.offset, physical.len);
        }
        Ok(())
    }

    pub(crate) fn map_physical(&mut self, start: u64, len: u64, handle: u64) -> Done {
        let (base, room) = self.reservations.range(..=start).next_back().ok_or(INVALID_VALUE)?;
        let range = (*base, *room);
        let inside = start - range.0 <= range.1 && len <= range.1 - (start - range.0);
        let access = self.access;
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if !inside || len != physical.len || !start.is_multiple_of(GRANULE) {
            return Err(INVALID_VALUE);
        }
        physical.uses += 1;
        let (device, offset) = (physical.device, physical.offset);
        let arena = self.arena(device)?;
        arena.file.map_at(start, offset, len, access).map_err(|_| OUT_OF_MEMORY)?;
        let alias = arena.alias + offset;
        let (kind, context, flags) = (Kind::Mapped, 0, 0);
        self.add(Allocation {
            start,
            len,
            kind,
            device,
            context,
            id: 0,
            alias,
            flags,
            range,
            physical: handle,
        });
        Ok(())
    }

    pub(crate) fn unmap_physical(&mut self, start: u64, len: u64) -> Done {
        let parts: Vec<_> = self.allocations.range(start..start + len).map(|(at, _)| *at).collect();
        if parts.is_empty() {
            return Err(INVALID_VALUE);
        }
        for at in parts {
            let Some(part) = self.allocations.remove(&at) else { continue };
            sys::unmap_to_reserved(part.start, part.len);
            self.release_physical(part.physical)?;
        }
        Ok(())
    }

    /// Memory of several physical parts in a far larger reservation, as expandable segments are.
    pub(crate) fn allocate_mapped(
        &mut self,
        device: usize,
        len: u64,
        mut handle: impl FnMut() -> u64,
    ) -> Result<u64, i32> {
        let len = len.next_multiple_of(GRANULE);
        let start = self.reserve(len + SPARE)?;
        for at in (start..start + len).step_by(GRANULE as usize) {
            let handle = handle();
            self.create_physical(handle, device, GRANULE)?;
            self.map_physical(at, GRANULE, handle)?;
            self.release_physical(handle)?;
        }
        Ok(start)
    }

    pub(crate) fn free_mapped(&mut self, start: u64) -> Done {
        let len = *self.reservations.get(&start).ok_or(INVALID_VALUE)?;
        self.unmap_physical(start, len)?;
        self.release_reservation(start)
    }

    /// Where the simulator finds `[addr, addr + len)`, piece by piece. Memory that it does not
    /// know is taken for the host's.
    pub(crate) fn pieces(&self, addr: u64, len: u64) -> Result<Vec<(u64, u64)>, i32> {
        let end = addr.checked_add(len).ok_or(INVALID_VALUE)?;
        if self.find(addr).is_none() {
            let crossed = self.allocations.range(addr..end).next().is_some();
            return if crossed || self.is_ours(addr, end) {
                Err(INVALID_VALUE)
            } else {
                Ok(vec![(addr, len)])
            };
        }
        let (mut at, mut pieces) = (addr, Vec::new());
        while at < end {
            let part = self.find(at).ok_or(INVALID_VALUE)?;
            let skip = at - part.start;
            let take = (part.len - skip).min(end - at);
            pieces.push((part.alias + skip, take));
            at += take;
        }
        Ok(pieces)
    }

    /// Whether a range reaches into what no host memory can be: a device's or a reservation's.
    fn is_ours(&self, addr: u64, end: u64) -> bool {
        let meets = |start: u64, len: u64| addr < start + len && end > start;
        let mut arenas = self.arenas.iter().flatten();
        arenas.any(|arena| meets(arena.base, self.size))
            || self.reservations.iter().any(|(start, len)| meets(*start, *len))
    }

    /// The places of two ranges of one length, cut so that each part is whole at both ends.
    pub(crate) fn pairs(&self, to: u64, from: u64, len: u64) -> Result<Vec<(u64, u64, u64)>, i32> {
        let (mut to, mut from) =
            (self.pieces(to, len)?.into_iter(), self.pieces(from, len)?.into_iter());
        let (mut pairs, mut left, mut right) = (Vec::new(), to.next(), from.next());
        while let (Some((a, a_len)), Some((b, b_len))) = (left, right) {
            let take = a_len.min(b_len);
            pairs.push((a, b, take));
            left = if take == a_len { to.next() } else { Some((a + take, a_len - take)) };
            right = if take == b_len { from.next() } else { Some((b + take, b_len - take)) };
        }
        Ok(pairs)
    }
}

impl State {
    pub(crate) fn pin(
        &mut self,
        device: usize,
        context: u64,
        len: u64,
        flags: u32,
    ) -> Result<u64, i32> {
        if len == 0 {
            return Err(INVALID_VALUE);
        }
        let whole = len.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        let start = sys::host_memory(whole).map_err(|_| OUT_OF_MEMORY)?;
        self.add("pinned_allocations", 1);
        self.add("pinned_live", 1);
        self.add("pinned_bytes", len);
        let now = self.value("pinned_bytes");
        self.raise("pinned_bytes_max", now);
        self.host(start, len, Kind::Pinned, device, context, flags);
        Ok(start)
    }

    pub(crate) fn unpin(&mut self, start: u64) -> Done {
        let found = self.space.allocations.get(&start).filter(|found| found.kind == Kind::Pinned);
        let len = found.map(|found| found.len).ok_or(INVALID_VALUE)?;
        self.space.allocations.remove(&start);
        sys::unmap(start, len.next_multiple_of(PAGE));
        self.subtract("pinned_live", 1);
        self.subtract("pinned_bytes", len);
        Ok(())
    }

    pub(crate) fn register(
        &mut self,
        device: usize,
        context: u64,
        start: u64,
        len: u64,
        flags: u32,
    ) -> Done {
        if start == 0 || len == 0 {
            return Err(INVALID_VALUE);
        }
        let end = start.checked_add(len).ok_or(INVALID_VALUE)?;
        let taken = self.space.find(start).is_some()
            || self.space.allocations.range(start..end).next().is_some();
        if taken {
            return Err(ALREADY_REGISTERED);
        }
        self.add("registrations", 1);
        self.add("registered_bytes", len);
        self.host(start, len, Kind::Registered, device, context, flags);
        Ok(())
    }

    pub(crate) fn unregister(&mut self, start: u64) -> Done {
        let found = self.space.allocations.get(&start);
        let found = found.filter(|found| found.kind == Kind::Registered);
        let len = found.map(|found| found.len).ok_or(NOT_REGISTERED)?;
        self.space.allocations.remove(&start);
        self.subtract("registered_bytes", len);
        Ok(())
    }

    fn host(&mut self, start: u64, len: u64, kind: Kind, device: usize, context: u64, flags: u32) {
        let (alias, range) = (start, (start, len));
        self.space.add(Allocation {
            start,
            len,
            kind,
            device,
            context,
            id: 0,
            alias,
            flags,
            range,
            physical: 0,
        });
    }
}
