//! What the tables do, against the simulator: every test for every vendor's table, each in a
//! process of its own.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "one promise covers a whole scenario")]

use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tensorferry_gpu::{
    Api, Context, DeviceId, Discovery, GpuError, GpuRuntime, Location, Memory, Settings,
    StreamHandle, Thread, Vendor,
};
use tensorferry_simgpu::{Control, Memory as Kind, install, library};

use crate::children::{child_test, in_fork};

const MIB: u64 = 1 << 20;

/// One simulated library, and how it was found.
struct Sim {
    control: Control,
    discovery: Discovery,
    vendor: Vendor,
    /// A driver interface answers questions, so none of them makes a context.
    asks_driver: bool,
}

// SAFETY: the simulator's control functions may be called from any thread; the handle beside them
// is never closed.
unsafe impl Sync for Sim {}

impl Sim {
    /// Installs `files` in a folder of their own and maps the first, as a framework would.
    fn start(name: &str, vendor: Vendor, files: &[&str]) -> Option<Self> {
        let Some(built) = library() else {
            eprintln!("skipped: the simulator was not built");
            return None;
        };
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sim").join(name);
        let files = install(&built, &folder, files).expect("the target folder can be written");
        let control = Control::open(&files[0]).expect("the simulator can be opened");
        let settings = Settings::default().with_library(vendor, &files[0]);
        let asks_driver = vendor != Vendor::Hip && (files.len() > 1 || name == "cuda_driver");
        Some(Self { control, discovery: Discovery::new(settings), vendor, asks_driver })
    }

    fn id(&self, ordinal: u32) -> DeviceId {
        DeviceId::new(self.vendor, ordinal)
    }

    fn alloc(&self, device: i32, len: u64, kind: Kind) -> u64 {
        self.control.alloc(device, len, kind).expect("the simulator has room")
    }

    /// Asks about memory that is named as device 1's.
    fn named(&self, addr: u64, len: u64) -> Result<Memory, GpuError> {
        self.discovery.classify(Location::Device(self.id(1)), addr, len)
    }

    fn runtime(&self) -> Arc<dyn GpuRuntime> {
        self.discovery.require(self.vendor).expect("the simulator is ready")
    }
}

/// One test of one table.
macro_rules! table_test {
    ($name:ident = $body:ident) => {
        child_test! {
            fn $name() {
                if let Some(sim) = start() {
                    $body(&sim)
                }
            }
        }
    };
}

/// The same tests for each table.
macro_rules! tables {
    ($($table:ident = $vendor:ident [$($file:literal),*];)*) => {
        $(mod $table {
            use super::*;

            fn start() -> Option<Sim> {
                Sim::start(stringify!($table), Vendor::$vendor, &[$($file),*])
            }

            table_test! { devices_describe_themselves = devices }
            table_test! { memory_is_told_apart = memory }
            table_test! { unnamed_memory_is_told_apart = unnamed }
            table_test! { ranges_are_checked_at_both_ends = ranges }
            table_test! { a_range_takes_two_questions = questions }
            table_test! { an_address_given_out_again_is_noticed = reuse }
            table_test! { copies_are_asynchronous_and_exact = copies }
            table_test! { the_legacy_stream_does_not_hold_us_up = legacy }
            table_test! { a_callers_stream_is_waited_for_and_made_to_wait = ordering }
            table_test! { a_callers_thread_is_left_as_it_was = callers_thread }
            table_test! { a_capture_survives_us = capture }
            table_test! { refusals_are_typed = refusals }
            table_test! { a_fork_is_recognised = fork }
        })*
    };
}

tables! {
    cuda_driver = Cuda ["libcuda.so.1"];
    cuda_runtime_11 = Cuda ["libcudart.so.11.0", "libcuda.so.1"];
    cuda_runtime_12 = Cuda ["libcudart.so.12", "libcuda.so.1"];
    cuda_runtime_13 = Cuda ["libcudart.so.13", "libcuda.so.1"];
    cuda_runtime_12_alone = Cuda ["libcudart.so.12"];
    cuda_runtime_13_alone = Cuda ["libcudart.so.13"];
    musa_4 = Musa ["libmusart.so.4", "libmusa.so.1"];
    musa_5 = Musa ["libmusart.so.5", "libmusa.so.1"];
    musa_4_alone = Musa ["libmusart.so.4"];
    musa_5_alone = Musa ["libmusart.so.5"];
    hip_5 = Hip ["libamdhip64.so.5"];
    hip_6 = Hip ["libamdhip64.so.6"];
    hip_7 = Hip ["libamdhip64.so.7"];
}

fn devices(sim: &Sim) {
    let runtime = sim.runtime();
    let state = sim.discovery.peek(sim.vendor);
    let found = state.ready().expect("it is ready");
    assert_eq!(found.devices.len(), 2);
    let last = &found.devices[1];
    assert_eq!(last.id, sim.id(1));
    assert!(last.pci_address.as_deref().is_some_and(|text| text.len() >= 12), "{last:?}");
    if sim.asks_driver || sim.vendor == Vendor::Hip {
        assert_eq!(last.memory_bytes, Some(16 << 30), "{last:?}");
        assert!(last.name.is_some(), "{last:?}");
    }
    assert!(found.versions.driver.is_some());
    // Looking at devices makes no context on them.
    for device in 0..2 {
        assert_eq!(sim.control.count(&format!("contexts.{device}")), 0);
    }
    assert_eq!(runtime.device_count().unwrap_or(0), 2);
}

fn memory(sim: &Sim) {
    let (device, one) = (sim.id(1), 1);
    let plain = sim.alloc(one, MIB, Kind::Device);
    let managed = sim.alloc(one, MIB, Kind::Managed);
    let mapped = sim.alloc(one, 6 * MIB, Kind::Mapped);
    let pool = sim.alloc(one, MIB, Kind::Pool);
    let pinned = sim.alloc(one, MIB, Kind::Pinned);
    let combined = sim.alloc(one, MIB, Kind::PinnedWriteCombined);
    let host = vec![0_u8; 4096];

    // From inside, too.
    for at in [0, 4097] {
        match sim.named(plain + at, 512) {
            Ok(Memory::Device { device: owner, base, size, .. }) => {
                assert_eq!(owner, device);
                assert!(base <= plain + at && plain + at + 512 <= base + size);
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(
            sim.named(managed + at, 512),
            Ok(Memory::Managed { device: owner, .. }) if owner == device
        ));
        assert!(matches!(
            sim.named(pinned + at, 512),
            Ok(Memory::PinnedHost { host, write_combined: false, .. }) if host == pinned + at
        ));
        assert!(matches!(
            sim.named(combined + at, 512),
            Ok(Memory::PinnedHost { write_combined: true, .. })
        ));
        assert!(matches!(sim.named(host.as_ptr() as u64 + at % 4096, 64), Ok(Memory::Host)));
    }
    for without_context in [mapped, pool] {
        match sim.named(without_context + 8, MIB - 8) {
            Ok(Memory::Device { device: owner, size, .. }) => {
                assert_eq!(owner, device);
                assert!(size <= 6 * MIB, "the reservation is not the allocation: {size}");
            }
            other => panic!("{other:?}"),
        }
    }
    // Several parts of one reservation are one tensor.
    assert!(matches!(sim.named(mapped + MIB, 4 * MIB), Ok(Memory::Device { .. })));
    assert!(matches!(sim.named(0, 1), Ok(Memory::Host)));
    assert_eq!(sim.control.count("contexts.0"), 0);
    assert_eq!(sim.control.count("context_pushes"), sim.control.count("context_pops"));
}

/// `*`, which initialises nothing and makes no context where a driver answers.
fn unnamed(sim: &Sim) {
    let host = [0_u8; 64];
    let ask = |addr| sim.discovery.classify(Location::Any, addr, 64);
    let before = sim.control.count("pointer_queries");
    let addr = sim.alloc(1, MIB, Kind::Device);
    let is_cuda_runtime = sim.vendor == Vendor::Cuda
        && sim.discovery.peek(Vendor::Cuda).to_string().contains("CUDA runtime");
    if is_cuda_runtime {
        // Its questions can make contexts, so a device has to be named first.
        assert!(matches!(ask(addr), Ok(Memory::Host)));
        assert_eq!(sim.control.count("pointer_queries"), before);
        sim.runtime();
    }
    assert!(matches!(ask(addr), Ok(Memory::Device { device, .. }) if device == sim.id(1)));
    assert!(matches!(ask(host.as_ptr() as u64), Ok(Memory::Host)));
    if sim.vendor == Vendor::Cuda && !is_cuda_runtime {
        assert_eq!(sim.control.calls("cuInit"), 0);
        // One for the device memory, both ends of the host memory.
        assert_eq!(sim.control.count("pointer_queries") - before, 3);
    }
    if sim.asks_driver || sim.vendor == Vendor::Hip {
        assert_eq!(sim.control.count("contexts.0"), 0);
    }
}

fn ranges(sim: &Sim) {
    let addr = sim.alloc(1, MIB, Kind::Device);
    assert!(sim.named(addr, MIB).is_ok());
    for (at, len) in [(addr, 64 * MIB), (addr + MIB - 1, 64 * MIB), (addr, u64::MAX)] {
        match sim.named(at, len) {
            Err(error @ GpuError::Straddles { .. }) => {
                assert!(error.to_string().contains("a range lies in one allocation"), "{error}");
            }
            other => panic!("{len}: {other:?}"),
        }
    }
}

fn questions(sim: &Sim) {
    sim.runtime();
    let kinds = [Kind::Device, Kind::Managed, Kind::Pinned, Kind::Mapped, Kind::Pool];
    let mut cases = kinds.map(|kind| (Some(kind), sim.alloc(1, 6 * MIB, kind))).to_vec();
    let host = vec![0_u8; 6 << 20];
    cases.push((None, host.as_ptr() as u64));
    for (kind, addr) in cases {
        for (at, len) in [(addr, 6 * MIB), (addr + 4097, 5 * MIB), (addr + 7, 1)] {
            let before = sim.control.count("pointer_queries");
            let memory = sim.named(at, len).expect("it lies in one piece");
            assert_eq!(memory == Memory::Host, kind.is_none());
            let asked = sim.control.count("pointer_queries") - before;
            // MUSA's driver tells neither at once of what it does not know, nor of its parts.
            let virtual_memory = matches!(kind, Some(Kind::Mapped | Kind::Pool));
            let parts = sim.vendor == Vendor::Musa && sim.asks_driver && virtual_memory;
            assert!(asked <= if parts { 4 } else { 2 }, "{kind:?} {len}: {asked}");
        }
    }
}

fn reuse(sim: &Sim) {
    let runtime = sim.runtime();
    let first = sim.alloc(1, MIB, Kind::Device);
    let Some(id) = sim.named(first, MIB).ok().and_then(Memory::buffer_id) else {
        // The struct of CUDA's and MUSA's runtimes has no such number.
        assert!(!sim.asks_driver && sim.vendor != Vendor::Hip);
        return;
    };
    assert_eq!(runtime.buffer_id(first + 77).ok(), Some(Some(id)));
    sim.control.free(first).expect("it is allocated");
    let second = sim.alloc(1, MIB, Kind::Device);
    assert_eq!(second, first, "the simulator gives the address out again");
    let now = runtime.buffer_id(second).ok().flatten();
    assert!(now.is_some_and(|now| now != id), "{now:?}");
}

fn copies(sim: &Sim) {
    let len = 3 * MIB as usize + 7;
    let addr = sim.alloc(1, len as u64, Kind::Device);
    let other = sim.alloc(1, len as u64, Kind::Device);
    let runtime = sim.runtime();
    std::thread::scope(|scope| {
        scope.spawn(|| on_our_thread(sim, &*runtime, (addr, other), len)).join().expect("no panic");
    });
    assert_eq!(sim.control.count("contexts.0"), 0);
    assert_eq!(sim.control.count("context_pushes"), sim.control.count("context_pops"));
    for none in ["pageable_copies", "legacy_stream_operations", "pinned_live"] {
        assert_eq!(sim.control.count(none), 0, "{none}");
    }
}

fn on_our_thread(sim: &Sim, runtime: &dyn GpuRuntime, (addr, other): (u64, u64), len: usize) {
    let _relaxed = runtime.relax_capture().expect("a thread can relax");
    let inside = runtime.enter(1, Context::InUse, Thread::Ours).expect("device 1 is in use");
    assert_eq!(inside.device(), sim.id(1));
    let out = runtime.alloc_pinned(&inside, len).expect("there is memory");
    let back = runtime.alloc_pinned(&inside, len).expect("there is memory");
    let stream = runtime.create_stream(&inside).expect("a stream can be made");
    let event = runtime.create_event(&inside).expect("an event can be made");
    let pattern: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8).collect();
    // SAFETY: `out` has `len` bytes, and no copy runs yet.
    unsafe { out.as_ptr().copy_from_nonoverlapping(pattern.as_ptr(), len) };
    // They do not end before they were asked about.
    sim.control.set("hang", 1);
    // SAFETY: all handles are from this runtime and live to the end of this function; the copies
    // end before the memory goes, because the event is waited for.
    unsafe {
        assert!(runtime.query_event(event).expect("never recorded is complete"));
        runtime.copy_to_device(addr, out.addr(), len, stream).expect("it is submitted");
        runtime.copy_on_device(other, addr, len, stream).expect("it is submitted");
        runtime.copy_to_host(back.addr(), other, len, stream).expect("it is submitted");
        runtime.record_event(event, stream.handle()).expect("it is recorded");
        assert!(!runtime.query_event(event).expect("it is under way"), "copies are asynchronous");
        assert_eq!(
            sim.control.count("thread.last_error"),
            0,
            "not ready is no error of the caller's"
        );
        sim.control.set("hang", 0);
        runtime.sync_event(event).expect("it completes");
        assert!(runtime.query_event(event).expect("it is complete"));
        runtime.sync_stream(stream).expect("it is empty");
        assert_eq!(std::slice::from_raw_parts(back.as_ptr(), len), pattern);
        runtime.destroy_event(event).expect("it lives");
        runtime.destroy_stream(stream).expect("it lives");
        runtime.free_pinned(&inside, out).expect("it is ours");
        runtime.free_pinned(&inside, back).expect("it is ours");
    }
    let mut seen = vec![0; len];
    sim.control.read(other, &mut seen).expect("it is allocated");
    assert_eq!(seen, pattern);
}

/// A framework's kernel on the default stream, which every blocking stream of the device waits for.
fn legacy(sim: &Sim) {
    let addr = sim.alloc(1, MIB, Kind::Device);
    let other = sim.alloc(1, MIB, Kind::Device);
    let runtime = sim.runtime();
    let inside = runtime.enter(1, Context::InUse, Thread::Callers).expect("device 1 is in use");
    let ours = runtime.create_stream(&inside).expect("a stream can be made");
    let back = runtime.alloc_pinned(&inside, 4096).expect("there is memory");
    let long = Duration::from_secs(2);
    let begun = Instant::now();
    // The default stream waits for a blocking stream, and blocking streams for the default stream.
    let users = sim.control.stream(1, true).expect("device 1 has streams");
    sim.control.fill_later(users, (addr, MIB), 7, long).expect("it is launched");
    let fill = match runtime.api() {
        Api::CudaDriver => c"cuMemsetD8Async",
        Api::CudaRuntime => c"cudaMemsetAsync",
        Api::MusaRuntime => c"musaMemsetAsync",
        Api::HipRuntime => c"hipMemsetAsync",
        other => panic!("no function of {other} fills memory here"),
    };
    let fill = sim.control.symbol(fill);
    assert!(!fill.is_null());
    // SAFETY: the simulator's function of this name; a byte is passed like an int.
    let fill: extern "C" fn(u64, i32, usize, u64) -> i32 = unsafe { std::mem::transmute(fill) };
    assert_eq!(fill(addr, 9, 4096, 0), 0);
    // SAFETY: the handles live; the copy ends before this function does.
    unsafe {
        runtime.copy_to_host(back.addr(), other, 4096, ours).expect("it is submitted");
        runtime.sync_stream(ours).expect("it completes");
    }
    assert!(begun.elapsed() < long, "our stream waited for the default stream");
}

static RAN: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn note(user: *mut c_void) {
    // Release: pairs with the Acquire in `ordering`.
    RAN.store(user as usize as u32, Ordering::Release);
}

fn ordering(sim: &Sim) {
    let len = MIB;
    let addr = sim.alloc(1, len, Kind::Device);
    let runtime = sim.runtime();
    let users = StreamHandle::from_raw(sim.control.stream(1, true).expect("device 1 has streams"));
    let inside = runtime.enter(1, Context::InUse, Thread::Callers).expect("device 1 is in use");
    let ours = runtime.create_stream(&inside).expect("a stream can be made");
    let event = runtime.create_event(&inside).expect("an event can be made");
    let word = runtime.alloc_pinned(&inside, 4096).expect("there is memory");
    let back = runtime.alloc_pinned(&inside, len as usize).expect("there is memory");
    let late = Duration::from_millis(30);
    // SAFETY: all handles live to the end of this function; nothing is destroyed while the streams
    // have work.
    unsafe {
        // Our copy comes after the caller's kernel.
        sim.control.fill_later(users.raw(), (addr, len), 7, late).expect("it is launched");
        assert!(!runtime.is_capturing(users).expect("it can be asked"));
        runtime.record_event(event, users).expect("it is recorded");
        runtime.stream_wait_event(ours.handle(), event).expect("it waits");
        runtime.copy_to_host(back.addr(), addr, len as usize, ours).expect("it is submitted");
        runtime.sync_stream(ours).expect("it completes");
        assert!(std::slice::from_raw_parts(back.as_ptr(), len as usize).iter().all(|b| *b == 7));

        // The caller's next kernel comes after our word.
        if runtime.can_wait_value() {
            let flag = AtomicU32::from_ptr(word.as_ptr().cast());
            flag.store(0, Ordering::Release);
            runtime.stream_wait_value(users, word.addr(), 5).expect("it waits");
            sim.control.fill_later(users.raw(), (addr, len), 9, Duration::ZERO).expect("launched");
            std::thread::sleep(late);
            let mut byte = [0];
            sim.control.read(addr, &mut byte).expect("it is allocated");
            assert_eq!(byte, [7], "the kernel waits");
            flag.store(5, Ordering::Release);
            sim.control.stream_wait(users.raw()).expect("it goes on");
            sim.control.read(addr, &mut byte).expect("it is allocated");
            assert_eq!(byte, [9]);
        } else {
            assert!(matches!(
                runtime.stream_wait_value(users, word.addr(), 5),
                Err(GpuError::Unsupported { .. })
            ));
        }

        // Or after our function.
        if runtime.can_launch_host_fn() {
            let user = std::ptr::without_provenance_mut(42);
            runtime.launch_host_fn(users, note, user).expect("it is launched");
            sim.control.stream_wait(users.raw()).expect("it goes on");
            // Acquire: pairs with the Release in `note`.
            assert_eq!(RAN.load(Ordering::Acquire), 42);
        } else {
            match runtime.launch_host_fn(users, note, std::ptr::null_mut()) {
                Err(GpuError::Unsupported { symbol, .. }) => {
                    assert_eq!(symbol, "hipLaunchHostFunc");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    let expected = sim.asks_driver || sim.vendor == Vendor::Hip;
    assert_eq!(runtime.can_wait_value(), expected);
    assert_eq!(sim.control.count("legacy_stream_operations"), 0);
}

fn callers_thread(sim: &Sim) {
    let host = [0_u8; 64];
    let addr = sim.alloc(1, MIB, Kind::Device);
    let before = sim.control.count("thread.context");
    let runtime = sim.runtime();
    assert!(sim.named(addr, MIB).is_ok());
    assert!(sim.named(host.as_ptr() as u64, 64).is_ok());
    // A refusal leaves no trace for the framework's next check.
    assert!(runtime.buffer_id(host.as_ptr() as u64).is_ok());
    assert_eq!(sim.control.count("thread.last_error"), 0);
    assert_eq!(sim.control.count("thread.context"), before);
    // A device that the process does not use is not entered by an interface that can tell.
    if runtime.api() == Api::CudaDriver {
        for context in [Context::InUse, Context::OfMemory(host.as_ptr() as u64)] {
            let error = runtime.enter(0, context, Thread::Callers);
            assert!(matches!(error, Err(GpuError::NoContext { device }) if device == sim.id(0)));
        }
        assert_eq!(sim.control.count("contexts.0"), 0);
        drop(runtime.enter(1, Context::InUse, Thread::Callers).expect("device 1 is in use"));
        assert_eq!(sim.control.count("thread.context"), before);
        // A question that wants a context gets one that is there.
        sim.control.set("query_needs_context", 1);
        assert!(sim.named(addr, MIB).is_ok());
        assert_eq!(sim.control.count("thread.context"), before);
        assert_eq!(sim.control.count("contexts.0"), 0);
    }
    // One that a program makes for itself.
    let inside = runtime.enter(0, Context::Made, Thread::Callers).expect("device 0 is there");
    let own = runtime.alloc_device(&inside, 4096).expect("there is memory");
    assert!(matches!(
        runtime.classify(own, 4096, Some(0)),
        Ok(Memory::Device { device, .. }) if device == sim.id(0)
    ));
    // SAFETY: allocated above, used by nothing.
    unsafe { runtime.free_device(&inside, own) }.expect("it is ours");
}

fn capture(sim: &Sim) {
    let addr = sim.alloc(1, MIB, Kind::Device);
    let runtime = sim.runtime();
    let users = sim.control.stream(1, false).expect("device 1 has streams");
    sim.control.capture_begin(users, 0).expect("it begins");
    // SAFETY: the stream lives.
    let capturing = unsafe { runtime.is_capturing(StreamHandle::from_raw(users)) };
    assert!(capturing.expect("it can be asked"));
    let relaxed = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let relaxed = runtime.relax_capture().expect("a thread can relax");
            if relaxed.is_supported() {
                on_our_thread(sim, &*runtime, (addr, addr), 4096);
            }
            relaxed.is_supported()
        });
        worker.join().expect("no panic")
    });
    assert!(sim.named(addr, MIB).is_ok());
    assert!(runtime.buffer_id(addr).is_ok());
    sim.control.capture_end(users).expect("nothing spoiled it");
    // MUSA's public users take the function for missing; so may we.
    assert!(relaxed || sim.vendor == Vendor::Musa);
}

fn refusals(sim: &Sim) {
    let addr = sim.alloc(1, MIB, Kind::Device);
    let runtime = sim.runtime();
    let call = match runtime.api() {
        Api::CudaDriver => "cuMemHostAlloc",
        Api::CudaRuntime => "cudaHostAlloc",
        Api::MusaRuntime => "musaHostAlloc",
        Api::HipRuntime => "hipHostMalloc",
        other => panic!("no function of {other} pins memory here"),
    };
    let inside = runtime.enter(1, Context::InUse, Thread::Ours).expect("device 1 is in use");
    sim.control.inject(call, 1, 1, 2);
    let error = runtime.alloc_pinned(&inside, 4096).expect_err("it was told to fail");
    let text = error.to_string();
    assert!(
        text.starts_with(&format!(
            "pinning 4096 bytes of host memory for {}: {call} answered 2 ",
            sim.id(1)
        )),
        "{text}"
    );
    assert!(
        text.ends_with(
            "; free device or pinned host memory, or use fewer or smaller staging buffers"
        ),
        "{text}"
    );
    assert!(!error.is_sticky());

    // A fault of the user's kernel is repeated by every call, ours too.
    sim.control.set("sticky", 700);
    let error = runtime.create_event(&inside).expect_err("the context is in error");
    assert!(error.is_sticky(), "{error}");
    assert!(error.to_string().contains("a kernel of this process failed earlier"), "{error}");
    sim.control.heal();
    assert!(runtime.create_event(&inside).is_ok());
    assert!(sim.named(addr, MIB).is_ok());
}

fn fork(sim: &Sim) {
    let addr = sim.alloc(1, MIB, Kind::Device);
    let runtime = sim.runtime();
    let code = in_fork(|| {
        assert!(matches!(runtime.classify(addr, MIB, None), Err(GpuError::Forked { .. })));
        assert!(runtime.enter(1, Context::InUse, Thread::Ours).is_err());
        let own = Discovery::new(sim.discovery.settings().clone());
        let error = own.require(sim.vendor).expect_err("the parent has used it").to_string();
        assert!(error.contains("before a fork"), "{error}");
        assert!(matches!(own.classify(Location::Cpu, addr, MIB), Ok(Memory::Host)));
        assert!(matches!(own.classify(Location::Any, addr, MIB), Ok(Memory::Host)));
        0
    });
    assert_eq!(code, 0);
}
