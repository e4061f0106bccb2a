//! The buffers that peers may reach, and who is using them.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tensorferry_gpu::Location;
use tensorferry_wire::Op;

use crate::error::{Error, Result};
use crate::memory::Lent;
use crate::staging::Stager;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What peers may do with a buffer.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Access {
    /// READ and WRITE.
    #[default]
    ReadWrite,
    /// READ only.
    ReadOnly,
    /// READ, and WRITE if the memory is writable when it is registered.
    AsMapped,
    /// Nothing: it is not published. For local buffers of requests.
    Local,
}

/// What registering the very same range again means.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Repeat {
    /// It is counted; as many `unregister` calls are needed.
    #[default]
    Counted,
    /// It is refused as an overlap.
    Refused,
}

/// How memory is registered. By default peers may READ and WRITE it, and the engine finds out where it is.
///
/// ```
/// use tensorferry::{Access, RegisterOptions};
///
/// let weights = RegisterOptions::default().with_access(Access::ReadOnly);
/// assert_eq!(weights.access, Access::ReadOnly);
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct RegisterOptions {
    /// What peers may do with it.
    pub access: Access,
    /// What registering the very same range again means.
    pub repeat: Repeat,
    /// What the caller knows about where it is. With [`Location::Any`] the engine finds out; a named
    /// device has its vendor's library opened and initialised.
    pub location: Location,
}

/// A registered buffer: where it is and how long.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct BufferInfo {
    /// Address of the first byte, in its owner's process.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RegisterOptions {
    /// The same with other things that peers may do.
    #[must_use]
    pub fn with_access(self, access: Access) -> Self {
        Self { access, ..self }
    }

    /// The same with another meaning of registering the very same range again.
    #[must_use]
    pub fn with_repeat(self, repeat: Repeat) -> Self {
        Self { repeat, ..self }
    }

    /// The same with what the caller knows about where the memory is.
    #[must_use]
    pub fn with_location(self, location: Location) -> Self {
        Self { location, ..self }
    }
}

/// What is to be registered: a range, and what was found out about it.
pub(crate) struct Range {
    pub(crate) info: BufferInfo,
    pub(crate) access: Access,
    /// The device whose memory it is.
    pub(crate) device: Option<Arc<Stager>>,
    /// The number of the allocation, where the device has such numbers.
    pub(crate) allocation: Option<u64>,
}

impl Range {
    pub(crate) fn host(info: BufferInfo, access: Access) -> Self {
        Self { info, access, device: None, allocation: None }
    }
}

/// Registered buffers by address. They do not overlap.
pub(crate) struct Registry {
    buffers: RwLock<BTreeMap<u64, Arc<Buffer>>>,
    next_epoch: AtomicU64,
    /// Counts changes of what is published.
    version: AtomicU64,
}

/// A registered buffer. It is taken out of the registry only when it is closed and nothing pins it.
pub(crate) struct Buffer {
    addr: u64,
    len: u64,
    access: Access,
    device: Option<Arc<Stager>>,
    allocation: Option<u64>,
    /// Which registration this is: an address that is registered again gets another epoch.
    epoch: u64,
    /// How often it is registered; changed under the registry's write lock only.
    repeats: AtomicU32,
    /// Somebody is taking it out of use, and waits for its pins.
    leaving: AtomicBool,
    /// Users, and [`CLOSED`].
    pins: AtomicU64,
    unpinned: (Mutex<()>, Condvar),
    /// Kept while it is registered.
    lent: Mutex<Option<Lent>>,
}

const CLOSED: u64 = 1 << 63;

/// A promise that a buffer stays registered: while one exists, `unregister` does not return.
pub(crate) struct Pin {
    buffer: Arc<Buffer>,
}

/// A buffer that was used before, and that the next request is likely to use. It promises nothing.
pub(crate) struct Seen {
    buffer: Arc<Buffer>,
}

impl Seen {
    /// Pins the buffer if the range lies in it, `op` is allowed there, and it is still registered.
    pub(crate) fn pin(&self, op: Op, addr: u64, len: u64) -> Option<Pin> {
        let buffer = &self.buffer;
        (len > 0 && buffer.contains(addr, len) && buffer.allows(op)).then(|| buffer.pin()).flatten()
    }
}

impl Buffer {
    fn contains(&self, addr: u64, len: u64) -> bool {
        addr >= self.addr && len <= self.len && addr - self.addr <= self.len - len
    }

    fn allows(&self, op: Op) -> bool {
        match self.access {
            Access::ReadWrite | Access::AsMapped => true,
            Access::ReadOnly => op == Op::Read,
            Access::Local => false,
        }
    }

    fn pin(self: &Arc<Self>) -> Option<Pin> {
        // Acquire: pairs with the AcqRel in `close`; a pin either is seen there or sees CLOSED.
        let before = self.pins.fetch_add(1, Ordering::Acquire);
        let pin = Pin { buffer: Arc::clone(self) };
        (before & CLOSED == 0).then_some(pin)
    }

    fn close(&self) {
        self.pins.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Waits until a closed buffer has no pin.
    fn wait_unpinned(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut guard = self.unpinned.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Acquire: pairs with the Release in `Pin::drop`; whoever held a pin has let go of the bytes.
        while self.pins.load(Ordering::Acquire) != CLOSED {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return false };
            let waited = self.unpinned.1.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Whether it is closed and nobody pins it.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.pins.load(Ordering::Acquire) == CLOSED
    }

    pub(crate) fn info(&self) -> BufferInfo {
        BufferInfo { addr: self.addr, len: self.len }
    }
}

impl Pin {
    /// Whether the range is inside the pinned buffer.
    pub(crate) fn contains(&self, addr: u64, len: u64) -> bool {
        self.buffer.contains(addr, len)
    }

    /// Whether a part of the range is inside the pinned buffer.
    pub(crate) fn touches(&self, addr: u64, len: u64) -> bool {
        addr < self.buffer.addr + self.buffer.len && self.buffer.addr < addr + len
    }

    /// Whether user space may write the buffer: it was seen to be writable when it was registered.
    pub(crate) fn is_writable(&self) -> bool {
        self.buffer.access == Access::ReadWrite
    }

    /// The device whose memory it is; `None`: a socket takes it.
    pub(crate) fn device(&self) -> Option<&Arc<Stager>> {
        self.buffer.device.as_ref()
    }

    /// The buffer, and the number that its allocation had when it was registered.
    pub(crate) fn allocation(&self) -> Option<(BufferInfo, u64)> {
        Some((self.buffer.info(), self.buffer.allocation?))
    }

    /// Another promise of the same. It is given also after `unregister` has begun, which waits for this pin anyway.
    pub(crate) fn again(&self) -> Self {
        // Relaxed: this pin keeps the count from falling to nothing meanwhile.
        self.buffer.pins.fetch_add(1, Ordering::Relaxed);
        Self { buffer: Arc::clone(&self.buffer) }
    }

    /// Remembers the buffer without a promise.
    pub(crate) fn seen(&self) -> Seen {
        Seen { buffer: Arc::clone(&self.buffer) }
    }

    /// Where the pinned buffer starts, which names it while it is registered.
    pub(crate) fn buffer_addr(&self) -> u64 {
        self.buffer.addr
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `wait_unpinned`.
        if self.buffer.pins.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            drop(self.buffer.unpinned.0.lock().unwrap_or_else(PoisonError::into_inner));
            self.buffer.unpinned.1.notify_all();
        }
    }
}

impl Registry {
    /// How long `unregister` waits for requests in progress before it has their lanes closed.
    const PATIENCE: Duration = Duration::from_millis(500);
    /// How long it waits after that. Lanes are closed within one round of an IO thread.
    const LAST_WAIT: Duration = Duration::from_secs(5);

    pub(crate) fn new() -> Self {
        Self {
            buffers: RwLock::default(),
            next_epoch: AtomicU64::new(1),
            version: AtomicU64::new(0),
        }
    }

    /// Registers all of the ranges, which [`check_range`] has found good, or none.
    pub(crate) fn register(
        &self,
        ranges: Vec<Range>,
        repeat: Repeat,
        lent: Option<Lent>,
    ) -> Result<()> {
        let mut buffers = self.write();
        let mut done = Vec::with_capacity(ranges.len());
        for range in ranges {
            let addr = range.info.addr;
            if let Err(error) = self.add(&mut buffers, range, repeat, &lent) {
                done.into_iter().for_each(|addr| undo(&mut buffers, addr));
                return Err(error);
            }
            done.push(addr);
        }
        self.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn add(
        &self,
        buffers: &mut BTreeMap<u64, Arc<Buffer>>,
        range: Range,
        repeat: Repeat,
        lent: &Option<Lent>,
    ) -> Result<()> {
        let Range { info: BufferInfo { addr, len }, access, device, allocation } = range;
        let before = buffers.range(..addr + len).next_back();
        if let Some((_, other)) = before.filter(|(_, b)| b.addr + b.len > addr) {
            if other.allocation.is_some() && allocation.is_some() && other.allocation != allocation
            {
                let BufferInfo { addr, len } = other.info();
                return Err(Error::Reallocated { addr, len });
            }
            let same = (other.addr, other.len, other.access) == (addr, len, access)
                && other.pins.load(Ordering::Relaxed) & CLOSED == 0;
            if same && repeat == Repeat::Counted {
                other.repeats.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            return Err(Error::Overlap { addr, len, other_addr: other.addr, other_len: other.len });
        }
        let buffer = Buffer {
            addr,
            len,
            access,
            device,
            allocation,
            epoch: self.next_epoch.fetch_add(1, Ordering::Relaxed),
            repeats: AtomicU32::new(1),
            leaving: AtomicBool::new(false),
            pins: AtomicU64::new(0),
            unpinned: Default::default(),
            lent: Mutex::new(lent.clone()),
        };
        buffers.insert(addr, Arc::new(buffer));
        Ok(())
    }

    /// Takes the buffers that start at `addrs` out of use, or none of them if one is unknown. When
    /// this returns Ok, nothing of the engine touches them. `revoke` has whoever holds a pin on the
    /// given buffer let go of it.
    pub(crate) fn unregister(&self, addrs: &[u64], revoke: impl Fn(BufferInfo)) -> Result<()> {
        let closed = self.close(addrs)?;
        let mut result = Ok(());
        let begin = Instant::now();
        for buffer in closed {
            // All have been closed for as long as the first.
            let patience = Self::PATIENCE.saturating_sub(begin.elapsed());
            let quiet = buffer.wait_unpinned(patience) || {
                revoke(buffer.info());
                buffer.wait_unpinned(Self::LAST_WAIT)
            };
            if quiet {
                self.remove(&buffer);
            } else {
                // Whoever calls again waits again. Release: pairs with the Acquire in `close`.
                buffer.leaving.store(false, Ordering::Release);
                let BufferInfo { addr, len } = buffer.info();
                result = Err(Error::StillInUse { addr, len, waited: begin.elapsed() });
            }
        }
        result
    }

    pub(crate) fn close(&self, addrs: &[u64]) -> Result<Vec<Arc<Buffer>>> {
        let buffers = self.write();
        let mut times: BTreeMap<u64, u32> = BTreeMap::new();
        for &addr in addrs {
            let wanted = times.entry(addr).or_default();
            *wanted += 1;
            // One that somebody else takes out of use is that one's to answer for.
            let known = buffers.get(&addr).filter(|b| !b.leaving.load(Ordering::Acquire));
            let known = known.map_or(0, |b| b.repeats.load(Ordering::Relaxed));
            if known < *wanted {
                return Err(Error::NotRegistered { addr });
            }
        }
        let mut closed = Vec::new();
        for (addr, times) in times {
            let buffer = &buffers[&addr];
            // A buffer that could not be emptied last time is closed with one repeat left.
            if buffer.repeats.load(Ordering::Relaxed) > times {
                buffer.repeats.fetch_sub(times, Ordering::Relaxed);
            } else {
                buffer.repeats.store(1, Ordering::Relaxed);
                buffer.leaving.store(true, Ordering::Relaxed);
                buffer.close();
                closed.push(Arc::clone(buffer));
            }
        }
        self.version.fetch_add(1, Ordering::Release);
        Ok(closed)
    }

    pub(crate) fn remove(&self, buffer: &Arc<Buffer>) {
        let mut buffers = self.write();
        // Only the one that is registered is taken out.
        if buffers.get(&buffer.addr).is_some_and(|b| b.epoch == buffer.epoch) {
            buffers.remove(&buffer.addr);
        }
        drop(buffers);
        *buffer.lent.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Pins the buffer that contains the whole range, if peers may do `op` there.
    pub(crate) fn find(&self, op: Op, addr: u64, len: u64) -> Option<Pin> {
        self.at(addr).filter(|b| len > 0 && b.contains(addr, len) && b.allows(op))?.pin()
    }

    /// Pins every buffer that the range touches, for requests of this engine's own.
    pub(crate) fn pin_touched(&self, addr: u64, len: u64, pins: &mut Vec<Pin>) {
        let buffers = self.read();
        let before = buffers.range(..addr + len).rev();
        let touched = before.take_while(|(_, b)| b.addr + b.len > addr);
        pins.extend(touched.filter_map(|(_, b)| b.pin()));
    }

    fn at(&self, addr: u64) -> Option<Arc<Buffer>> {
        let buffers = self.read();
        buffers
            .range((Bound::Unbounded, Bound::Included(addr)))
            .next_back()
            .map(|(_, b)| Arc::clone(b))
    }

    /// What peers may know of, in the order of registration.
    pub(crate) fn published(&self) -> Vec<BufferInfo> {
        self.listed(|b| b.access != Access::Local)
    }

    /// All that is registered, in the order of registration.
    pub(crate) fn all(&self) -> Vec<BufferInfo> {
        self.listed(|_| true)
    }

    fn listed(&self, wanted: impl Fn(&Buffer) -> bool) -> Vec<BufferInfo> {
        let buffers = self.read();
        let open = |b: &&Arc<Buffer>| b.pins.load(Ordering::Relaxed) & CLOSED == 0;
        let mut listed: Vec<_> = buffers
            .values()
            .filter(open)
            .filter(|b| wanted(b))
            .map(|b| (b.epoch, b.info()))
            .collect();
        listed.sort_unstable_by_key(|(epoch, _)| *epoch);
        listed.into_iter().map(|(_, info)| info).collect()
    }

    /// A number that changes whenever what is published may have changed.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Arc<Buffer>>> {
        self.buffers.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Arc<Buffer>>> {
        self.buffers.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn undo(buffers: &mut BTreeMap<u64, Arc<Buffer>>, addr: u64) {
    // All under one write lock: nobody has pinned what was added, nobody has counted a repeat.
    if buffers[&addr].repeats.fetch_sub(1, Ordering::Relaxed) == 1 {
        buffers[&addr].close();
        buffers.remove(&addr);
    }
}

/// Refuses a range that cannot be a buffer.
pub(crate) fn check_range(addr: u64, len: u64) -> Result<()> {
    if addr == 0 {
        return Err(Error::bad_argument(
            "a buffer cannot start at address 0; was the memory allocated?",
        ));
    }
    if len == 0 {
        return Err(Error::bad_argument(format!(
            "the buffer at {addr:#x} has length 0; register at least one byte"
        )));
    }
    if addr.checked_add(len).is_none() {
        return Err(Error::bad_argument(format!(
            "the buffer [{addr:#x}, +{len}) runs past the end of the address space; check its length"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(ranges: &[(u64, u64)]) -> Registry {
        let r = Registry::new();
        add(&r, ranges, Repeat::Counted).unwrap();
        r
    }

    fn add(r: &Registry, ranges: &[(u64, u64)], repeat: Repeat) -> Result<()> {
        add_with(r, ranges, Access::ReadWrite, repeat)
    }

    fn add_with(r: &Registry, ranges: &[(u64, u64)], access: Access, repeat: Repeat) -> Result<()> {
        let range = |&(addr, len): &(u64, u64)| Range::host(BufferInfo { addr, len }, access);
        r.register(ranges.iter().map(range).collect(), repeat, None)
    }

    #[test]
    fn only_whole_ranges_of_one_buffer_are_found() {
        let r = registry(&[(100, 50), (150, 50)]);
        assert!(r.find(Op::Write, 100, 50).is_some());
        assert!(r.find(Op::Write, 199, 1).is_some());
        for (addr, len) in
            [(99, 1), (149, 2), (100, 51), (200, 1), (100, 0), (120, u64::MAX), (0, 1)]
        {
            assert!(r.find(Op::Write, addr, len).is_none(), "{addr} {len}");
        }
    }

    #[test]
    fn access_is_kept() {
        let r = Registry::new();
        add_with(&r, &[(100, 10)], Access::ReadOnly, Repeat::Counted).unwrap();
        add_with(&r, &[(200, 10)], Access::Local, Repeat::Counted).unwrap();
        assert!(r.find(Op::Read, 100, 10).is_some());
        assert!(r.find(Op::Write, 100, 10).is_none());
        assert!(r.find(Op::Read, 200, 10).is_none());
        let mut pins = Vec::new();
        r.pin_touched(205, 1, &mut pins);
        assert!(pins.len() == 1 && pins[0].contains(200, 10) && !pins[0].is_writable());
        assert_eq!(r.published(), [BufferInfo { addr: 100, len: 10 }]);
        assert_eq!(r.all().len(), 2);
    }

    #[test]
    fn exact_repeats_are_counted_or_refused() {
        let r = registry(&[(100, 50), (100, 50), (100, 50)]);
        assert!(matches!(add(&r, &[(100, 50)], Repeat::Refused), Err(Error::Overlap { .. })));
        for _ in 0..2 {
            r.unregister(&[100], |_| {}).unwrap();
            assert!(r.find(Op::Read, 100, 50).is_some());
        }
        r.unregister(&[100], |_| {}).unwrap();
        assert!(r.find(Op::Read, 100, 50).is_none());
        assert!(matches!(r.unregister(&[100], |_| {}), Err(Error::NotRegistered { addr: 100 })));
    }

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let r = registry(&[(100, 50)]);
        for range in [(90, 11), (149, 1), (120, 10), (90, 100), (100, 49), (100, 51)] {
            assert!(matches!(
                add(&r, &[range], Repeat::Counted),
                Err(Error::Overlap { other_addr: 100, other_len: 50, .. })
            ));
        }
        add(&r, &[(90, 10), (150, 1)], Repeat::Refused).unwrap();
    }

    #[test]
    fn all_or_nothing_both_ways() {
        let r = registry(&[(100, 50)]);
        assert!(add(&r, &[(300, 10), (300, 10), (120, 1)], Repeat::Counted).is_err());
        assert_eq!(r.all(), [BufferInfo { addr: 100, len: 50 }]);
        assert!(r.unregister(&[100, 999], |_| {}).is_err());
        assert!(r.unregister(&[100, 100], |_| {}).is_err());
        assert!(r.find(Op::Read, 100, 50).is_some());
        r.unregister(&[100], |_| {}).unwrap();
        add(&r, &[(100, 60)], Repeat::Refused).unwrap();
    }

    #[test]
    fn nonsense_is_refused_with_its_reason() {
        for ((addr, len), word) in
            [((0, 16), "address 0"), ((16, 0), "length 0"), ((u64::MAX - 9, 100), "past the end")]
        {
            let text = check_range(addr, len).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn unregister_waits_for_pins_then_has_them_dropped() {
        let r = registry(&[(100, 50)]);
        let pin = Mutex::new(r.find(Op::Write, 100, 50));
        let seen = pin.lock().unwrap().as_ref().unwrap().seen();
        drop(seen.pin(Op::Read, 110, 5).expect("open"));
        assert!(seen.pin(Op::Read, 149, 2).is_none());
        r.unregister(&[100], |buffer| {
            assert_eq!(buffer, BufferInfo { addr: 100, len: 50 });
            assert!(seen.pin(Op::Read, 100, 1).is_none(), "closed");
            drop(pin.lock().unwrap().take().unwrap());
        })
        .unwrap();
        assert!(r.all().is_empty());
    }

    #[test]
    fn only_one_of_two_calls_takes_a_buffer_out_of_use() {
        let r = registry(&[(100, 50)]);
        let pin = Mutex::new(r.find(Op::Write, 100, 50));
        r.unregister(&[100], |_| {
            let second = r.unregister(&[100], |_| panic!("it is not the second's to revoke"));
            assert!(matches!(second, Err(Error::NotRegistered { addr: 100 })));
            drop(pin.lock().unwrap().take());
        })
        .unwrap();
        assert!(r.all().is_empty());
    }

    #[test]
    fn every_buffer_that_a_local_range_touches_is_pinned() {
        let r = registry(&[(100, 50), (150, 50), (300, 10)]);
        for ((addr, len), wanted) in [
            ((100, 50), 1),
            ((149, 2), 2),
            ((90, 300), 3),
            ((200, 100), 0),
            ((0, 100), 0),
            ((199, 102), 2),
        ] {
            let mut pins = Vec::new();
            r.pin_touched(addr, len, &mut pins);
            assert_eq!(pins.len(), wanted, "{addr} {len}");
        }
    }

    #[test]
    fn the_order_is_that_of_registration() {
        let r = registry(&[(300, 1), (100, 1), (200, 1)]);
        let addrs: Vec<u64> = r.published().iter().map(|b| b.addr).collect();
        assert_eq!(addrs, [300, 100, 200]);
    }
}
