//! Streams, events, contexts and captures: when things happen, and on which thread.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tensorferry_simgpu::{Memory, Variant};

use crate::gpu::{Gpu, address};

const LEN: u64 = 4096;

fn store(addr: u64, byte: u8, gpu: &Gpu) {
    gpu.control.write(addr, &[byte; LEN as usize]).unwrap();
}

#[test]
fn a_copy_reads_late_and_writes_late() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(1);
        let (device, host) = (gpu.malloc(LEN).unwrap(), gpu.pinned(LEN).unwrap());
        let (stream, event) = (gpu.stream(), gpu.event());
        assert_eq!(gpu.call("EventQuery", &[event]), 0, "never recorded is complete");
        for inbound in [true, false] {
            let (to, from) = if inbound { (device, host) } else { (host, device) };
            store(to, 0, &gpu);
            store(from, 1, &gpu);
            gpu.control.set("hang", 1);
            let copied = if inbound {
                gpu.to_device(to, from, LEN, stream)
            } else {
                gpu.to_host(to, from, LEN, stream)
            };
            assert_eq!((copied, gpu.call("EventRecord", &[event, stream])), (0, 0));
            assert_eq!(gpu.call("EventQuery", &[event]), 600);
            assert_eq!(gpu.call("StreamQuery", &[stream]), 600);
            assert_eq!(gpu.peek(to, 1), [0]);
            store(from, 2, &gpu);
            gpu.control.set("hang", 0);
            assert_eq!(gpu.call("EventSynchronize", &[event]), 0);
            assert_eq!((gpu.call("EventQuery", &[event]), gpu.synchronize(stream)), (0, 0));
            assert_eq!(gpu.peek(to, LEN as usize), [2; LEN as usize], "{variant:?}");
        }
        let bytes = |name| gpu.control.count(name);
        assert_eq!(
            (bytes("h2d_bytes.1"), bytes("d2h_bytes.1"), bytes("h2d_bytes.0")),
            (LEN, LEN, 0)
        );
        assert_eq!(
            (bytes("copies"), bytes("copies_in_flight"), bytes("pageable_copies")),
            (2, 0, 0)
        );
    }
}

#[test]
fn pageable_memory_makes_a_copy_wait() {
    let gpu = Gpu::new(Variant::CudaRuntime12);
    let device = gpu.malloc(LEN).unwrap();
    store(device, 5, &gpu);
    let mut plain = vec![0u8; LEN as usize];
    assert_eq!(gpu.to_host(address(&mut plain[0]), device, LEN, gpu.stream()), 0);
    assert_eq!(plain[17], 5);
    assert_eq!(gpu.control.count("pageable_copies"), 1);
}

#[test]
fn bandwidth_and_latency_are_kept() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    // Little, so that the time is the model's and not the processor's.
    let len = 1 << 16;
    let (device, host) = (gpu.malloc(len).unwrap(), gpu.pinned(len).unwrap());
    let (down, up) = (gpu.stream(), gpu.stream());
    gpu.control.set("d2h_bytes_per_second", 20 * len);
    gpu.control.set("h2d_bytes_per_second", 20 * len);
    // Twenty copies each way take a second, and both ways at once. A busy machine gets three tries.
    let mut tries = Vec::new();
    let kept = (0..3).any(|_| {
        let began = Instant::now();
        for _ in 0..20 {
            assert_eq!(gpu.to_host(host, device, len, down), 0);
            assert_eq!(gpu.to_device(device, host, len, up), 0);
        }
        let submitted = began.elapsed();
        assert_eq!((gpu.synchronize(down), gpu.synchronize(up)), (0, 0));
        let took = began.elapsed();
        assert!(took >= Duration::from_secs(1));
        tries.push((submitted, took));
        submitted < Duration::from_millis(900) && took < Duration::from_millis(1900)
    });
    assert!(kept, "submitted, and done, after {tries:?}");

    gpu.control.set("latency_ns", 30_000_000);
    let began = Instant::now();
    assert_eq!((gpu.to_host(host, device, 1, down), gpu.synchronize(down)), (0, 0));
    assert!(began.elapsed() >= Duration::from_millis(30));
}

#[test]
fn streams_of_one_direction_share_its_engine() {
    let gpu = Gpu::new(Variant::CudaRuntime13);
    let len = 1 << 20;
    let (device, host) = (gpu.malloc(len).unwrap(), gpu.pinned(len).unwrap());
    gpu.control.set("d2h_bytes_per_second", 100 << 20);
    let streams = [gpu.stream(), gpu.stream()];
    let began = Instant::now();
    for _ in 0..4 {
        for stream in streams {
            assert_eq!(gpu.to_host(host, device, len, stream), 0);
        }
    }
    for stream in streams {
        assert_eq!(gpu.synchronize(stream), 0);
    }
    assert!(began.elapsed() >= Duration::from_millis(80));
}

#[test]
fn an_event_orders_two_streams() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        let (device, host) = (gpu.malloc(LEN).unwrap(), gpu.pinned(LEN).unwrap());
        store(device, 0, &gpu);
        let (kernel, copy, event) = (gpu.stream(), gpu.stream(), gpu.event());
        gpu.control.fill_later(kernel, (device, LEN), 8, Duration::from_millis(20)).unwrap();
        assert_eq!(gpu.call("EventRecord", &[event, kernel]), 0);
        assert_eq!(gpu.call("StreamWaitEvent", &[copy, event, 0]), 0);
        assert_eq!((gpu.to_host(host, device, LEN, copy), gpu.synchronize(copy)), (0, 0));
        assert_eq!(gpu.peek(host, 1), [8], "{variant:?}");

        // Without it, the copy does not wait.
        let began = Instant::now();
        gpu.control.fill_later(kernel, (device, LEN), 9, Duration::from_millis(200)).unwrap();
        assert_eq!((gpu.to_host(host, device, LEN, copy), gpu.synchronize(copy)), (0, 0));
        if began.elapsed() < Duration::from_millis(200) {
            assert_eq!(gpu.peek(host, 1), [8]);
        }
        gpu.control.stream_wait(kernel).unwrap();
        assert_eq!(gpu.peek(device, 1), [9]);
    }
}

#[test]
fn the_legacy_stream_joins_blocking_streams_and_is_counted() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let device = gpu.malloc(LEN).unwrap();
    let blocking = gpu.control.stream(0, true).unwrap();
    let free = gpu.control.stream(0, false).unwrap();
    assert_eq!(gpu.control.count("legacy_stream_operations"), 0);
    let (later, began) = (Duration::from_millis(30), Instant::now());
    gpu.control.fill_later(free, (device + 1, 1), 1, later * 10).unwrap();
    gpu.control.fill_later(blocking, (device, 1), 1, later).unwrap();
    let mut byte = 0u8;
    assert_eq!(gpu.call("MemcpyDtoH_v2", &[address(&mut byte), device, 1]), 0);
    assert_eq!(byte, 1);
    assert_eq!(gpu.call("MemcpyDtoH_v2", &[address(&mut byte), device + 1, 1]), 0);
    if began.elapsed() < later * 10 {
        assert_eq!(byte, 0, "a non-blocking stream is not waited for");
    }
    assert_eq!(gpu.control.count("legacy_stream_operations"), 2);
}

#[test]
fn a_stream_waits_for_a_word_and_calls_the_host() {
    static CALLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn note(user: *mut c_void) {
        CALLED.store(user.addr() as u32, Ordering::Release);
    }
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        let name = if gpu.is_driver() { "StreamWaitValue32_v2" } else { "StreamWaitValue32" };
        if !gpu.has(name) {
            continue;
        }
        gpu.bind(0);
        let (device, host) = (gpu.malloc(LEN).unwrap(), gpu.pinned(LEN).unwrap());
        let stream = gpu.stream();
        store(host, 0, &gpu);
        store(device, 3, &gpu);
        assert_eq!(gpu.call(name, &[stream, host, 5, 0, 0xffff_ffff]), 0);
        assert_eq!(gpu.to_host(host + 8, device, 8, stream), 0);
        if gpu.has("LaunchHostFunc") {
            CALLED.store(0, Ordering::Relaxed);
            let function = note as *const c_void;
            let function = function.expose_provenance() as u64;
            assert_eq!(gpu.call("LaunchHostFunc", &[stream, function, 77]), 0);
        }
        assert_eq!(gpu.call("StreamQuery", &[stream]), 600);
        assert_eq!(gpu.peek(host + 8, 1), [0]);
        let word: &AtomicU32 = {
            let at = std::ptr::with_exposed_provenance_mut(host as usize);
            // SAFETY: pinned memory that is freed by nobody before the process ends.
            unsafe { AtomicU32::from_ptr(at) }
        };
        word.store(4, Ordering::Release);
        assert_eq!(gpu.call("StreamQuery", &[stream]), 600);
        word.store(5, Ordering::Release);
        assert_eq!(gpu.synchronize(stream), 0);
        assert_eq!(gpu.peek(host + 8, 1), [3]);
        if gpu.has("LaunchHostFunc") {
            assert_eq!(CALLED.load(Ordering::Acquire), 77, "{variant:?}");
        }
        let mut plain = 0u32;
        assert_eq!(gpu.call(name, &[stream, address(&mut plain), 5, 0, 0]), 1);
    }
}

#[test]
fn contexts_belong_to_threads_and_are_counted() {
    let gpu = Gpu::new(Variant::CudaDriver);
    assert_eq!(gpu.call("Init", &[0]), 0);
    let mut device = 9i32;
    assert_eq!(gpu.call("CtxGetDevice", &[address(&mut device)]), 201);
    assert_eq!(gpu.malloc(1), Err(201));
    let (mut flags, mut active) = (9u32, 9i32);
    let state = [1, address(&mut flags), address(&mut active)];
    assert_eq!((gpu.call("DevicePrimaryCtxGetState", &state), active), (0, 0));
    let context = gpu.get("DevicePrimaryCtxRetain", &[1]).unwrap();
    assert_eq!((gpu.call("DevicePrimaryCtxGetState", &state), active), (0, 1));
    assert_eq!(gpu.call("CtxPushCurrent_v2", &[context]), 0);
    assert_eq!((gpu.call("CtxGetDevice", &[address(&mut device)]), device), (0, 1));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(gpu.get("CtxGetCurrent", &[]), Ok(0)));
    });
    assert_eq!(gpu.control.count("thread.contexts"), 1);
    assert_eq!(gpu.get("CtxPopCurrent_v2", &[]), Ok(context));
    assert_eq!(gpu.call("CtxPopCurrent_v2", &[0]), 201);
    let count = |name| gpu.control.count(name);
    assert_eq!((count("context_pushes"), count("context_pops")), (1, 1));
    assert_eq!((count("contexts.0"), count("contexts.1")), (0, 1));
    assert_eq!(gpu.call("DevicePrimaryCtxRelease_v2", &[1]), 0);
    assert_eq!((count("contexts.1"), count("contexts_created.1")), (0, 1));
    assert_eq!(gpu.call("CtxPushCurrent_v2", &[context]), 709);
    assert_eq!(gpu.call("DevicePrimaryCtxRelease_v2", &[1]), 201);

    let own = gpu.get("CtxCreate_v2", &[0, 0]).unwrap();
    assert_eq!((gpu.get("CtxGetCurrent", &[]), count("contexts.0")), (Ok(own), 1));
    assert_eq!((gpu.call("CtxDestroy_v2", &[own]), count("contexts.0")), (0, 0));
}

#[test]
fn runtimes_make_contexts_by_themselves() {
    for (variant, at_set_device, at_query) in [
        (Variant::CudaRuntime11, 0, 1),
        (Variant::CudaRuntime12, 1, 1),
        (Variant::CudaRuntime13, 1, 1),
        (Variant::Hip5, 0, 0),
        (Variant::Hip6, 0, 0),
    ] {
        let gpu = Gpu::new(variant);
        let mut bytes = [0u8; 256];
        assert_eq!(gpu.get("GetDevice", &[]), Ok(0));
        assert_eq!(gpu.control.count("contexts.0"), 0);
        assert_eq!(gpu.call("SetDevice", &[1]), 0);
        assert_eq!(gpu.call("SetDevice", &[2]), 101);
        assert_eq!(gpu.get("GetDevice", &[]), Ok(1));
        assert_eq!(gpu.control.count("contexts.1"), at_set_device, "{variant:?}");
        let bytes = address(&mut bytes);
        gpu.call("PointerGetAttributes", &[bytes, bytes]);
        assert_eq!(gpu.control.count("contexts.1"), at_query, "{variant:?}");
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(gpu.get("GetDevice", &[]), Ok(0)));
        });
        assert_eq!(gpu.control.count("contexts.0"), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(gpu.malloc(1).is_ok()));
        });
        assert_eq!(gpu.control.count("contexts.0"), 1, "device 0, if nothing was said");
    }
}

#[test]
fn a_global_capture_forbids_unsafe_calls_unless_they_are_relaxed() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        let capturing = gpu.control.stream(0, false).unwrap();
        let (stream, event) = (gpu.stream(), gpu.event());
        let (device, host) = (gpu.malloc(LEN).unwrap(), gpu.pinned(LEN).unwrap());
        let elsewhere = |work: &(dyn Fn() + Sync)| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    gpu.bind(0);
                    work();
                });
            });
        };
        let mut status = 9i32;
        let is_capturing = [capturing, address(&mut status)];

        // A thread that has not said anything breaks it.
        gpu.control.capture_begin(capturing, 0).unwrap();
        assert_eq!((gpu.call("StreamIsCapturing", &is_capturing), status), (0, 1));
        elsewhere(&|| {
            assert_eq!(gpu.to_host(host, device, LEN, stream), 0, "not an unsafe call");
            assert_eq!(gpu.pinned(LEN), Err(900), "{variant:?}");
        });
        assert_eq!((gpu.call("StreamIsCapturing", &is_capturing), status), (0, 2));
        assert_eq!(gpu.to_host(host, device, LEN, capturing), 901);
        assert_eq!(gpu.control.capture_end(capturing), Err(901));
        assert_eq!(gpu.control.count("captures_invalidated"), 1);
        // The copy of the other thread writes late; what follows looks at the same memory.
        assert_eq!(gpu.call("StreamSynchronize", &[stream]), 0);

        // A relaxed one does not.
        gpu.control.capture_begin(capturing, 0).unwrap();
        if gpu.has("ThreadExchangeStreamCaptureMode") {
            elsewhere(&|| {
                let mut mode = 2i32;
                assert_eq!(gpu.call("ThreadExchangeStreamCaptureMode", &[address(&mut mode)]), 0);
                assert_eq!(mode, 0);
                assert!(gpu.pinned(LEN).is_ok());
                assert_eq!(gpu.call("EventQuery", &[event]), 0);
            });
        }
        // What is captured is not carried out, and its events cannot be asked.
        store(host, 1, &gpu);
        assert_eq!(gpu.to_host(host, device, LEN, capturing), 0);
        assert_eq!(gpu.call("EventRecord", &[event, capturing]), 0);
        assert_eq!(gpu.control.capture_end(capturing), Ok(()));
        assert_eq!(gpu.peek(host, 1), [1]);
        assert_eq!(gpu.call("EventQuery", &[event]), 907);

        // A capture of another thread that is that thread's own affair.
        gpu.control.capture_begin(capturing, 1).unwrap();
        elsewhere(&|| assert!(gpu.pinned(LEN).is_ok()));
        assert_eq!(gpu.pinned(LEN), Err(900), "{variant:?}");
        assert_eq!(gpu.control.capture_end(capturing), Err(901));
    }
}

#[test]
fn the_legacy_stream_breaks_a_capture() {
    let gpu = Gpu::new(Variant::CudaRuntime12);
    let device = gpu.malloc(LEN).unwrap();
    let host = gpu.pinned(LEN).unwrap();
    let capturing = gpu.control.stream(0, true).unwrap();
    gpu.control.capture_begin(capturing, 2).unwrap();
    assert_eq!(gpu.to_host(host, device, LEN, 0), 906);
    assert_eq!(gpu.control.capture_end(capturing), Err(901));
}

#[test]
fn freeing_waits_for_the_streams() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let device = gpu.control.alloc(0, LEN, Memory::Device).unwrap();
    let stream = gpu.control.stream(0, false).unwrap();
    let began = Instant::now();
    gpu.control.fill_later(stream, (device, LEN), 1, Duration::from_millis(30)).unwrap();
    assert_eq!(gpu.free(device), 0);
    assert!(began.elapsed() >= Duration::from_millis(30));
}
