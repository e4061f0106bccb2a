//! Failures on demand, and what is counted.

use tensorferry_simgpu::{Memory, Variant};

use crate::gpu::Gpu;

#[test]
fn any_call_can_be_told_to_fail() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        let name = gpu.name(gpu.pinned_name());
        gpu.control.inject(&name, 2, 1, 2);
        let ended = |result: Result<u64, i32>| result.err().unwrap_or(0);
        let got: Vec<i32> = (0..3).map(|_| ended(gpu.pinned(4096))).collect();
        assert_eq!(got, [0, 2, 0], "{variant:?}");
        gpu.control.inject(&name, 1, 0, 999);
        let got: Vec<i32> = (0..3).map(|_| ended(gpu.pinned(4096))).collect();
        assert_eq!(got, [999; 3]);
        gpu.control.heal();
        assert_eq!(ended(gpu.pinned(4096)), 0);
        assert_eq!(gpu.control.calls(&name), 7);
        assert_eq!(gpu.control.count("pinned_allocations"), 3);
        if !gpu.is_driver() {
            assert_eq!((gpu.call("GetLastError", &[]), gpu.call("GetLastError", &[])), (999, 0));
        }
    }
}

#[test]
fn a_sticky_error_is_repeated_by_every_call() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.bind(0);
        let (device, host) = (gpu.malloc(4096).unwrap(), gpu.pinned(4096).unwrap());
        let (stream, event) = (gpu.stream(), gpu.event());
        gpu.control.write(device, &[1; 4096]).unwrap();
        gpu.control.inject("copy", 2, 1, 700);
        for _ in 0..3 {
            assert!([0, 700].contains(&gpu.to_host(host, device, 4096, stream)));
        }
        assert_eq!(gpu.synchronize(stream), 700, "{variant:?}");
        assert_eq!(gpu.call("EventQuery", &[event]), 700);
        assert_eq!(gpu.pinned(1), Err(700));
        assert_eq!(gpu.control.count("copies"), 1);
        assert_eq!(gpu.control.count("copies_in_flight"), 0);
        let version = if gpu.is_driver() { "DriverGetVersion" } else { "RuntimeGetVersion" };
        assert!(gpu.get(version, &[]).is_ok());
        gpu.control.heal();
        assert!(gpu.pinned(1).is_ok());
    }
}

#[test]
fn a_copy_can_hang() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let (device, host) = (gpu.malloc(4096).unwrap(), gpu.pinned(4096).unwrap());
    let (stream, event) = (gpu.stream(), gpu.event());
    gpu.control.set("hang_after", 2);
    for _ in 0..2 {
        assert_eq!(gpu.to_host(host, device, 4096, stream), 0);
    }
    assert_eq!(gpu.synchronize(stream), 0);
    assert_eq!(gpu.to_host(host, device, 4096, stream), 0);
    assert_eq!(gpu.call("EventRecord", &[event, stream]), 0);
    assert_eq!(gpu.call("EventQuery", &[event]), 600);
    assert_eq!(gpu.control.count("copies_in_flight"), 1);
    gpu.control.heal();
    assert_eq!(gpu.call("EventSynchronize", &[event]), 0);
    assert_eq!(gpu.control.count("copies"), 3);
}

#[test]
fn memory_that_is_freed_under_a_copy_is_a_device_fault() {
    let gpu = Gpu::new(Variant::CudaDriver);
    gpu.bind(0);
    let (pool, host) =
        (gpu.control.alloc(0, 4096, Memory::Pool).unwrap(), gpu.pinned(4096).unwrap());
    let (freeing, copying) = (gpu.stream(), gpu.stream());
    gpu.control.set("hang", 1);
    assert_eq!(gpu.to_host(host, pool, 4096, copying), 0);
    assert_eq!(gpu.call("MemFreeAsync", &[pool, freeing]), 0);
    assert_eq!(gpu.synchronize(freeing), 0);
    gpu.control.set("hang", 0);
    assert_eq!(gpu.synchronize(copying), 700);
}

#[test]
fn the_counters_are_json() {
    let gpu = Gpu::new(Variant::Hip6);
    gpu.bind(1);
    let (device, host) = (gpu.malloc(4096).unwrap(), gpu.pinned(4096).unwrap());
    let stream = gpu.stream();
    assert_eq!(gpu.to_device(device, host, 4096, stream), 0);
    assert_eq!(gpu.synchronize(stream), 0);
    let json: serde_json::Value = serde_json::from_str(&gpu.control.counters()).unwrap();
    assert_eq!(json["library"], "libamdhip64.so.6");
    assert_eq!(json["devices"][1]["contexts"], 1);
    assert_eq!(json["devices"][1]["h2d_bytes"], 4096);
    assert_eq!(json["devices"][1]["memory_used"], 4096);
    assert_eq!(json["devices"][0]["contexts_created"], 0);
    assert_eq!(json["pinned_bytes"], 4096);
    assert_eq!(json["allocations"], 2);
    assert_eq!(json["calls"]["hipMemcpyAsync"], 1);
    for (name, value) in json.as_object().unwrap() {
        if let Some(value) = value.as_u64() {
            assert_eq!(gpu.control.count(name), value, "{name}");
        }
    }
    gpu.control.reset();
    assert_eq!(gpu.control.count("calls"), 0);
    assert_eq!((gpu.control.count("pinned_bytes"), gpu.control.count("h2d_bytes")), (4096, 0));
}
