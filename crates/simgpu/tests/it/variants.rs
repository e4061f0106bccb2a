//! What each library is called, what it has, and how it answers before any work is done.

use std::collections::BTreeSet;
use std::path::Path;

use tensorferry_simgpu::{Control, FILE_NAMES, Memory, Variant};

use crate::gpu::{End, Folder, Gpu, address, in_child};

#[test]
fn every_file_name_is_a_variant_and_every_variant_a_file() {
    let known: BTreeSet<_> =
        FILE_NAMES.iter().map(|name| Variant::of_file(name).unwrap().soname()).collect();
    let all: BTreeSet<_> = Variant::ALL.iter().map(|variant| variant.soname()).collect();
    assert_eq!(known, all);
    assert_eq!(Variant::of_file("libcudart.so.10.2"), None);
    assert_eq!(Variant::of_file("libc.so.6"), None);
}

#[test]
fn a_copy_has_its_vendors_symbols_and_no_others() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        let names = [
            (c"cuInit", variant == Variant::CudaDriver),
            (c"cuMemAlloc", variant == Variant::CudaDriver),
            (c"muInit", variant == Variant::MusaDriver),
            (c"cudaGetDeviceCount", variant.soname().starts_with("libcudart")),
            (c"musaGetDeviceCount", variant.soname().starts_with("libmusart")),
            (c"musaThreadExchangeStreamCaptureMode", variant == Variant::MusaRuntime5),
            (c"hipInit", variant.soname().starts_with("libamdhip64")),
            (c"hipLaunchHostFunc", matches!(variant, Variant::Hip6 | Variant::Hip7)),
            (c"simgpu_counters", true),
        ];
        for (name, there) in names {
            assert_eq!(!gpu.control.symbol(name).is_null(), there, "{name:?} in {variant:?}");
        }
    }
}

#[test]
fn a_loaded_copy_is_found_by_its_bare_soname() {
    let gpu = Gpu::new(Variant::Hip6);
    let found = Control::of_loaded(Path::new("libamdhip64.so.6")).unwrap();
    assert!(!found.symbol(c"hipMalloc").is_null());
    let text = Control::of_loaded("libc.so.6").unwrap_err().to_string();
    assert_eq!(text, "libc.so.6 is not simgpu: it has no \"simgpu_counters\"");
    drop(gpu);
}

#[test]
fn a_file_that_is_no_simulator_is_refused() {
    let folder = Folder::new();
    let own = std::env::current_exe().unwrap();
    let text = tensorferry_simgpu::install(&own, folder.path(), &["libc.so.6"]).unwrap_err();
    assert!(text.to_string().starts_with("libc.so.6 is no vendor's library; known are libcuda"));
    let text = folder.path().join("text");
    std::fs::write(&text, "not an ELF file").unwrap();
    let error = tensorferry_simgpu::install(&text, folder.path(), &["libcuda.so.1"]).unwrap_err();
    assert_eq!(error.to_string(), format!("{} is not the simulator's library", text.display()));
}

#[test]
fn versions_are_those_of_the_real_libraries() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        let name = if gpu.is_driver() { "DriverGetVersion" } else { "RuntimeGetVersion" };
        assert_eq!(gpu.get(name, &[]), Ok(u64::from(variant.version().cast_unsigned())));
    }
    assert_eq!(Variant::CudaRuntime11.version(), 11_080);
    assert_eq!(Variant::Hip5.version() / 10_000_000, 5);
}

#[test]
fn a_driver_must_be_initialised_and_a_runtime_does_it_itself() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        if gpu.is_driver() {
            assert_eq!(gpu.get("DeviceGetCount", &[]), Err(3));
            assert_eq!(gpu.call("Init", &[1]), 1);
            assert_eq!(gpu.call("Init", &[0]), 0);
            assert_eq!(gpu.get("DeviceGetCount", &[]), Ok(2));
            assert_eq!(gpu.control.calls(&gpu.name("Init")), 2);
        } else {
            assert_eq!(gpu.get("GetDeviceCount", &[]), Ok(2));
        }
        assert_eq!(gpu.control.count("contexts.0"), 0, "{variant:?}");
        let mut text = [0u8; 16];
        assert_eq!(gpu.call("DeviceGetPCIBusId", &[address(&mut text), 16, 1]), 0);
        assert_eq!(&text[..13], b"0000:11:00.0\0");
        assert_eq!(gpu.call("DeviceGetPCIBusId", &[address(&mut text), 16, 2]), 101);
    }
}

#[test]
fn a_driver_without_devices_says_so_again_and_again_and_slowly() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        gpu.control.set("init_error", 100);
        let began = std::time::Instant::now();
        if gpu.is_driver() {
            assert_eq!((gpu.call("Init", &[0]), gpu.call("Init", &[0])), (100, 100));
            assert_eq!(gpu.get("DeviceGetCount", &[]), Err(3));
            assert_eq!(gpu.control.count("failed_initialisations"), 2);
            assert!(began.elapsed().as_millis() >= 20);
        } else {
            assert_eq!(gpu.get("GetDeviceCount", &[]), Err(100));
            assert_eq!(gpu.malloc(1), Err(100));
            assert_eq!(gpu.call("GetLastError", &[]), 100);
            assert_eq!(gpu.call("GetLastError", &[]), 100);
            assert_eq!(gpu.control.count("failed_initialisations"), 1);
        }
    }
}

#[test]
fn initialising_can_take_as_long_as_one_likes() {
    for variant in [Variant::CudaDriver, Variant::Hip6] {
        let gpu = Gpu::new(variant);
        gpu.control.set("init_delay_ns", 100_000_000);
        let first = if gpu.is_driver() { ("Init", &[0][..]) } else { ("Free", &[0][..]) };
        let took = [(); 2].map(|()| {
            let began = std::time::Instant::now();
            assert_eq!(gpu.call(first.0, first.1), 0, "{variant:?}");
            began.elapsed().as_millis()
        });
        assert!(took[0] >= 100 && took[1] < took[0], "{variant:?}: {took:?}");
    }
}

#[test]
fn error_names_and_texts() {
    let gpu = Gpu::new(Variant::CudaDriver);
    let text = |function, code| {
        let mut out = 0u64;
        let answer = gpu.call(function, &[code, address(&mut out)]);
        (answer, out)
    };
    let (code, name) = text("GetErrorName", 700);
    assert_eq!((code, c_text(name)), (0, "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned()));
    assert_eq!(text("GetErrorName", 12345), (1, 0));
    assert_eq!(c_text(text("GetErrorString", 100).1), "no capable device is detected");

    for (variant, name) in [
        (Variant::CudaRuntime12, "cudaErrorMemoryAllocation"),
        (Variant::MusaRuntime5, "musaErrorMemoryAllocation"),
        (Variant::Hip6, "hipErrorMemoryAllocation"),
    ] {
        let gpu = Gpu::new(variant);
        assert_eq!(c_text(gpu.pointer("GetErrorName", 2)), name);
        assert_eq!(c_text(gpu.pointer("GetErrorString", 12345)), "unrecognized error code");
    }
}

impl Gpu {
    fn pointer(&self, suffix: &str, code: i32) -> u64 {
        let name = std::ffi::CString::new(self.name(suffix)).unwrap();
        // SAFETY: these two functions take an i32 and return a pointer.
        let function = unsafe {
            std::mem::transmute::<*mut _, extern "C" fn(i32) -> u64>(self.control.symbol(&name))
        };
        function(code)
    }
}

fn c_text(at: u64) -> String {
    let at = std::ptr::with_exposed_provenance(at as usize);
    // SAFETY: the simulator's texts are constants of a library that is never unloaded.
    unsafe { std::ffi::CStr::from_ptr(at) }.to_str().unwrap().to_owned()
}

#[test]
fn the_old_names_with_32_bit_pointers_abort() {
    let gpu = Gpu::new(Variant::CudaDriver);
    let end = in_child(|| gpu.call("MemcpyDtoHAsync", &[0, 0, 0, 0]));
    assert_eq!(end, End::Signal(libc::SIGABRT));
}

#[test]
fn symbols_can_be_looked_up_through_the_driver() {
    let gpu = Gpu::new(Variant::CudaDriver);
    let mut found = 0u64;
    let mut look = |name: &std::ffi::CStr| {
        let name = name.as_ptr().expose_provenance() as u64;
        (gpu.call("GetProcAddress_v2", &[name, address(&mut found), 12_000, 0, 0]), found)
    };
    let newest = gpu.control.symbol(c"cuMemAlloc_v2").expose_provenance() as u64;
    assert_eq!(look(c"cuMemAlloc"), (0, newest));
    assert_eq!(look(c"cuNoSuchThing"), (500, 0));
}

#[test]
fn vendors_do_not_mix() {
    let (cuda, hip) = (Gpu::new(Variant::CudaDriver), Gpu::new(Variant::Hip6));
    let addr = cuda.control.alloc(0, 4096, Memory::Device).unwrap();
    let mut kind = 9u32;
    assert_eq!(cuda.call("Init", &[0]), 0);
    assert_eq!(cuda.call("PointerGetAttribute", &[address(&mut kind), 2, addr]), 0);
    let mut attributes = [9u8; 32];
    assert_eq!(hip.call("PointerGetAttributes", &[address(&mut attributes), addr]), 0);
    assert_eq!((kind, attributes[0]), (2, 0));
    assert_eq!(hip.control.count("contexts.0"), 0);
    cuda.bind(0);
    let stream = cuda.stream();
    assert_eq!(hip.call("StreamSynchronize", &[stream]), 400);
}

#[test]
fn a_runtime_works_on_the_driver_beside_it() {
    for (driver, runtime) in [
        (Variant::CudaDriver, Variant::CudaRuntime12),
        (Variant::MusaDriver, Variant::MusaRuntime5),
    ] {
        let folder = Folder::new();
        let path = folder.install(driver.soname());
        let runtime = Gpu::beside(runtime, folder);
        let addr = runtime.malloc(4096).unwrap();
        let driver = Control::open(path).unwrap();
        assert_eq!(driver.count("contexts.0"), 1);
        assert_eq!(driver.count("calls.cuInit"), 0);
        let mut bytes = [1; 16];
        driver.read(addr, &mut bytes).unwrap();
        assert!(
            runtime.folder().join("libcuda.so.1").exists()
                || runtime.variant == Variant::MusaRuntime5
        );
    }
}

#[test]
fn a_driver_that_is_too_old_for_the_runtime() {
    // Through the environment, so in a program of its own: see `program`.
    let folder = Folder::new();
    folder.install("libcudart.so.12");
    let source = r#"
        int cudaGetDeviceCount(int *count);
        int main(void) { int count = 7; return cudaGetDeviceCount(&count) * (count == 7); }
    "#;
    let Some(mut program) = crate::program::compile(&folder, source, &["libcudart.so.12"]) else {
        return;
    };
    let status = program.env("SIMGPU_DRIVER_VERSION", "11080").status().unwrap();
    assert_eq!(status.code(), Some(35));
}

#[test]
fn a_forked_child_of_a_process_that_initialised_has_no_gpu() {
    for variant in Variant::ALL {
        let gpu = Gpu::new(variant);
        let early = in_child(|| if gpu.is_driver() { gpu.call("Init", &[0]) } else { 0 });
        assert_eq!(early, End::Exit(0));
        gpu.bind(0);
        let init = if gpu.is_driver() { "Init" } else { "GetDevice" };
        let code = |code: i32| End::Exit(code & 0xff);
        let expected = if gpu.is_driver() { 304 } else { 3 };
        assert_eq!(in_child(|| gpu.call(init, &[0])), code(expected), "{variant:?}");
        assert_eq!(in_child(|| gpu.malloc(1).unwrap_err()), code(3));
        assert!(gpu.malloc(1).is_ok(), "the parent still has one");
    }
}
