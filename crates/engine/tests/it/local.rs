//! Local memory that is not there: the entry fails, and nothing else does.
#![expect(unsafe_code, reason = "requests over addresses that nobody owns")]

use tensorferry::{Batch, BatchState, Config, HostBuffer, Op, Request, Segment, Version};

use crate::common::{Pair, buffer, engine, lanes, ms, pattern, says, start, timed, within};

const PAGE: usize = 4096;

/// Pages that can be touched, and behind them as many that cannot.
struct Fenced {
    base: u64,
    pages: usize,
}

impl Fenced {
    fn new(pages: usize) -> Self {
        let len = 2 * pages * PAGE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice changes nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the first half of the mapping that was just made.
        assert_eq!(unsafe { libc::mprotect(base, pages * PAGE, access) }, 0);
        Self { base: base.expose_provenance() as u64, pages }
    }

    /// An address with `len` usable bytes before the fence.
    fn before_end(&self, len: usize) -> u64 {
        self.base + (self.pages * PAGE - len) as u64
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        let base = std::ptr::with_exposed_provenance_mut(self.base as usize);
        // SAFETY: mapped in `new`; every batch over it is final.
        unsafe { libc::munmap(base, 2 * self.pages * PAGE) };
    }
}

fn submit(segment: &Segment, requests: Vec<Request>) -> Batch {
    // SAFETY: the tests keep their buffers, and what is not mapped is an error by the engine's word.
    unsafe { segment.submit(requests, within(ms(8000))) }.unwrap()
}

fn configs() -> [Config; 3] {
    let mut v1 = lanes(4, 1);
    v1.newest_version = Version::V1;
    [lanes(4, 1), lanes(2, 3), v1]
}

#[test]
fn one_bad_address_is_an_error_that_names_it() {
    for config in configs() {
        let pair = Pair::with(8 << 20, config);
        let fenced = Fenced::new(64);
        for op in [Op::Read, Op::Write] {
            for (local, len) in [
                (4096, 64),
                (4096, 3 << 20),
                (0xffff_8000_0000_0000, 100),
                (fenced.before_end(1), 2),
                (fenced.before_end(5000), 10_000),
                (fenced.before_end(64 * PAGE), 100 * PAGE as u64),
            ] {
                let request = Request { op, local, remote: pair.remote.addr(), len };
                let (result, took) = timed(|| submit(&pair.segment, vec![request]).wait());
                let error = result.unwrap_err();
                assert_eq!(error.code(), 12, "{op:?} {local:#x}: {error}");
                let range = format!("{} bytes", len);
                let place = format!("{local:#x} is not mapped");
                says(&error, &[&range, pair.target.name(), "EFAULT", &place, "check the address"]);
                assert!(took < ms(2000), "{took:?}");
                // The engine and the peer are as they were.
                let bytes = pattern(100, len);
                start(&pair.segment, Op::Write, &buffer(&bytes), pair.remote.addr())
                    .wait()
                    .unwrap();
                assert!(pair.remote.read(0, 100) == bytes);
            }
        }
    }
}

#[test]
fn bad_addresses_amid_good_ones_fail_alone() {
    for config in configs() {
        let v1 = config.newest_version == Version::V1;
        let pair = Pair::with(4 << 20, config);
        let fenced = Fenced::new(4);
        for (round, op) in [Op::Write, Op::Read, Op::Write, Op::Read].into_iter().enumerate() {
            let (count, len) = if v1 { (60, 3000) } else { (503, 3000) };
            let bytes = pattern(count * len, round as u64);
            let nothing = vec![0; count * len];
            let (here, there) =
                if op == Op::Write { (&bytes, &nothing) } else { (&nothing, &bytes) };
            let local = buffer(here);
            pair.remote.write(0, there);
            let mut requests: Vec<Request> = (0..count)
                .map(|i| Request {
                    op,
                    local: local.addr() + (i * len) as u64,
                    remote: pair.remote.addr() + (i * len) as u64,
                    len: len as u64,
                })
                .collect();
            let bad = [0, 1, 17, count / 2, count - 1];
            for (n, &i) in bad.iter().enumerate() {
                requests[i].local = if n % 2 == 0 { 4096 } else { fenced.before_end(1000) };
            }
            let batch = submit(&pair.segment, requests);
            assert_eq!(batch.wait().unwrap_err().code(), 12);
            assert_eq!(batch.poll(), BatchState::Failed);
            for i in 0..count {
                let result = batch.entry(i).unwrap();
                if bad.contains(&i) {
                    assert_eq!(result.unwrap_err().code(), 12);
                    continue;
                }
                result.unwrap_or_else(|e| panic!("{op:?} entry {i} of {count}: {e}"));
                let to = if op == Op::Write { &pair.remote } else { &local };
                assert!(to.read(i * len, len) == bytes[i * len..][..len], "{op:?} entry {i}");
            }
        }
    }
}

#[test]
fn a_bad_address_towards_this_very_engine_is_the_same_error() {
    let e = crate::common::engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(1 << 20).unwrap();
    e.register_buffer(&memory, &Default::default()).unwrap();
    let segment = e.open(e.name()).unwrap();
    let fenced = Fenced::new(4);
    for op in [Op::Read, Op::Write] {
        for (local, len) in [(4096, 64), (fenced.before_end(1000), 2000), (4096, 1 << 20)] {
            let request = Request { op, local, remote: memory.addr(), len };
            let error = submit(&segment, vec![request]).wait().unwrap_err();
            assert_eq!(error.code(), 12, "{error}");
        }
    }
}

#[test]
fn requests_that_cannot_be_meant_are_refused_before_a_byte_moves() {
    let pair = Pair::new(4096);
    let good = pair.remote.addr();
    for (local, remote, len, words) in [
        (0, good, 1, "an address is null"),
        (8, 0, 1, "an address is null"),
        (u64::MAX, good, 2, "past the end of the address space"),
        (8, u64::MAX - 1, 3, "past the end of the address space"),
        (8, good, 1 << 60, "beyond any memory"),
    ] {
        let fine = Request { op: Op::Write, local: good, remote: good, len: 8 };
        let wrong = Request { op: Op::Read, local, remote, len };
        // SAFETY: refused, as the test shows.
        let result = unsafe { pair.segment.submit(vec![fine, wrong], within(ms(1000))) };
        let error = result.unwrap_err();
        assert_eq!(error.code(), 3, "{error}");
        says(&error, &["request 1", words, "nothing was sent"]);
    }
    assert_eq!(pair.target.stats().served_writes, 0);
}

impl Fenced {
    /// Registers the pages that can be touched, and then takes `pages` of them away from its engine.
    fn register_and_break(&self, engine: &tensorferry::Engine, at: usize, pages: usize) {
        let len = (self.pages * PAGE) as u64;
        // SAFETY: the range is mapped now; that it is not later is what these tests are about, with an engine that
        // has the kernel copy.
        unsafe { engine.register(self.base, len, &Default::default()) }.unwrap();
        let hole = std::ptr::with_exposed_provenance_mut(self.base as usize + at * PAGE);
        // SAFETY: pages of the mapping that `new` made.
        assert_eq!(unsafe { libc::mprotect(hole, pages * PAGE, libc::PROT_NONE) }, 0);
    }
}

fn careful() -> Config {
    let mut config = lanes(1, 1);
    config.safe_copy = true;
    config
}

#[test]
fn a_registered_buffer_that_is_gone_fails_the_copy_within_and_not_the_process() {
    let e = engine(careful());
    let fenced = Fenced::new(8);
    fenced.register_and_break(&e, 0, 8);
    let own = buffer(&pattern(PAGE, 1));
    e.register_buffer(&own, &Default::default()).unwrap();
    let segment = e.open(e.name()).unwrap();
    for op in [Op::Read, Op::Write] {
        let error = start(&segment, op, &own, fenced.base).wait().unwrap_err();
        assert_eq!(error.code(), 12, "{error}");
    }
    assert!(own.read(0, PAGE) == pattern(PAGE, 1));
}

/// A receive that stops at a hole looks like one that has emptied the socket.
#[test]
fn a_write_into_a_hole_ends_at_once_and_not_at_its_deadline() {
    let target = engine(careful());
    let fenced = Fenced::new(1024);
    fenced.register_and_break(&target, 700, 4);
    let e = engine(lanes(1, 1));
    let segment = e.open(target.name()).unwrap();
    let local = HostBuffer::zeroed(1000 * PAGE).unwrap();
    let (result, took) = timed(|| start(&segment, Op::Write, &local, fenced.base).wait());
    assert_eq!(result.unwrap_err().code(), 11);
    assert!(took < ms(3000), "{took:?}");
}
