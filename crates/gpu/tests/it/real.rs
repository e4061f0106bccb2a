//! The vendors' own libraries on a machine without their drivers and devices: each has to end in a
//! state with its reason, once and soon. `TENSORFERRY_TEST_LIBRARIES` names the files, separated by
//! colons; `scripts/test` fetches them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tensorferry_gpu::{Api, Discovery, Location, Memory, Settings, State, Vendor};

use crate::children::{child_test, mapped, text};
use crate::stubs::Stub;

const CUDART_13: &str = "libcudart.so.13";
const CUDART_12: &str = "libcudart.so.12";
const CUDART_11: &str = "libcudart.so.11.0";
const HIP_5: &str = "libamdhip64.so.5";

/// The file of this name among those that were fetched.
fn file(name: &str) -> Option<PathBuf> {
    let files = std::env::var("TENSORFERRY_TEST_LIBRARIES").unwrap_or_default();
    let found = files.split(':').find(|file| Path::new(file).file_name() == Some(name.as_ref()));
    found.map(PathBuf::from)
}

/// Its folder, for the loader's path: where the libraries are that it needs itself.
fn folder(name: &str) -> String {
    file(name)
        .and_then(|file| file.parent().map(|folder| text(folder).to_owned()))
        .unwrap_or_default()
}

/// The file, if it was fetched and this machine has no driver and no device that would answer.
fn bare(name: &str) -> Option<PathBuf> {
    let Some(file) = file(name) else {
        eprintln!("skipped: TENSORFERRY_TEST_LIBRARIES names no {name}");
        return None;
    };
    let used = if name == HIP_5 {
        Path::new("/dev/kfd").exists()
    } else {
        Discovery::new(Settings::default()).supports(Vendor::Cuda)
    };
    if used {
        eprintln!("skipped: this machine has a driver");
        return None;
    }
    // From here on the loader's time is measured, not the disk's.
    for file in file.parent().into_iter().flat_map(|folder| folder.read_dir().into_iter().flatten())
    {
        let _ = file.and_then(|file| std::fs::read(file.path()));
    }
    Some(file)
}

/// What the first question about the vendor ends with, and that later ones cost nothing.
fn first_answer(discovery: &Discovery, vendor: Vendor) -> (State, String) {
    let begun = Instant::now();
    let error = discovery.require(vendor).expect_err("there is no device").to_string();
    let first = begun.elapsed();
    let again = || {
        let begun = Instant::now();
        assert_eq!(discovery.require(vendor).expect_err("nor later").to_string(), error);
        begun.elapsed()
    };
    let later = (0..20).map(|_| again()).min().expect("it was asked again");
    eprintln!("{vendor}: first {first:?}, later {later:?}: {error}");
    assert!(first < Duration::from_secs(2), "{first:?}");
    assert!(later < Duration::from_micros(500), "it is asked once: {later:?}");
    assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
    (discovery.peek(vendor), error)
}

/// A CUDA runtime that was chosen, and what it says of the versions.
fn cuda_runtime(name: &str, versions: &str) {
    let Some(file) = bare(name) else { return };
    let chosen = Settings::default().with_library(Vendor::Cuda, &file);
    let discovery = Discovery::new(chosen.clone());
    let (state, error) = first_answer(&discovery, Vendor::Cuda);
    assert_eq!((state.word(), state.file()), ("no-driver", Some(file.as_path())));
    assert_eq!(state.failure().map(|failure| failure.code), Some(35));
    let State::NoDriver { api: Api::CudaRuntime, versions: known, .. } = state else {
        panic!("{state:?}");
    };
    assert!(known.driver.is_none());
    assert_eq!(
        error,
        format!(
            "CUDA cannot be used: {} found no driver: cudaGetDeviceCount answered 35 \
             cudaErrorInsufficientDriver (CUDA driver version is insufficient for CUDA runtime \
             version) (CUDA runtime, {versions}); install the CUDA driver, and in a container \
             hand the devices in",
            file.display()
        )
    );
    assert_eq!(mapped("libcudart"), [text(&file)]);
    assert!(discovery.supports(Vendor::Cuda), "it is there, and has all functions");
    // A second engine learns it from the first.
    let (_, second) = first_answer(&Discovery::new(chosen), Vendor::Cuda);
    assert_eq!(second, error);
}

child_test! {
    fn cuda_runtime_13_finds_no_driver() {
        cuda_runtime(CUDART_13, "no driver, runtime 13.5");
    }
}

child_test! {
    fn cuda_runtime_12_finds_no_driver() {
        cuda_runtime(CUDART_12, "no driver, runtime 12.9");
    }
}

child_test! {
    /// It refuses to tell even its own version.
    fn cuda_runtime_11_finds_no_driver() {
        cuda_runtime(CUDART_11, "version unknown");
    }
}

child_test! {
    /// A runtime that is found under its real name, or that the application has mapped, is not
    /// what `auto` takes for CUDA.
    fn a_real_cuda_runtime_is_never_picked_unasked(LD_LIBRARY_PATH = folder(CUDART_12)) {
        let Some(file) = bare(CUDART_12) else { return };
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
        let (state, error) = first_answer(&discovery, Vendor::Cuda);
        assert_eq!(state.word(), "missing");
        assert!(error.starts_with("CUDA cannot be used: no CUDA library was found (tried libcuda.so.1, "), "{error}");
        assert!(
            error.ends_with(
                "); install the vendor's driver, or name the file with TENSORFERRY_CUDA_LIBRARY"
            ),
            "{error}"
        );
        assert_eq!(mapped("libcudart"), Vec::<String>::new());

        let _application = Stub::open(Path::new(CUDART_12));
        assert_eq!(mapped("libcudart"), [text(&file)]);
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "missing");
        assert_eq!(Discovery::new(Settings::default()).peek(Vendor::Cuda).word(), "not-looked-for");
        assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
        assert_eq!(first_answer(&discovery, Vendor::Cuda).1, error);
    }
}

fn assert_no_hip_device(file: &Path, state: &State, error: &str) {
    assert_eq!((state.word(), state.file()), ("no-device", Some(file)));
    assert_eq!(state.failure().map(|failure| failure.code), Some(100));
    let said = format!(
        "HIP cannot be used: {} shows no device: hipGetDeviceCount answered 100 hipErrorNoDevice",
        file.display()
    );
    assert!(error.starts_with(&said), "{error}");
    // The version is there without a device, and with it what a memory type would mean.
    assert!(error.contains("runtime 5."), "{error}");
    assert!(error.contains("; check that the device is visible here ("), "{error}");
}

child_test! {
    fn hip_shows_no_device(LD_LIBRARY_PATH = folder(HIP_5)) {
        let Some(file) = bare(HIP_5) else { return };
        let chosen = Settings::default().with_library(Vendor::Hip, &file);
        let (state, error) = first_answer(&Discovery::new(chosen), Vendor::Hip);
        assert_no_hip_device(&file, &state, &error);
    }
}

child_test! {
    /// The loader would find it, but nobody uses it, so an address is no reason to.
    fn a_real_hip_library_is_asked_if_it_is_mapped(LD_LIBRARY_PATH = folder(HIP_5)) {
        let Some(file) = bare(HIP_5) else { return };
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
        assert_eq!(discovery.peek(Vendor::Hip).word(), "not-looked-for");
        assert_eq!(mapped("libamdhip64"), Vec::<String>::new());

        let _application = Stub::open(Path::new(HIP_5));
        assert_eq!(discovery.peek(Vendor::Hip).word(), "mapped");
        assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
        assert_eq!(discovery.peek(Vendor::Hip).word(), "no-device");
        let (state, error) = first_answer(&discovery, Vendor::Hip);
        assert_no_hip_device(&file, &state, &error);
    }
}

child_test! {
    /// A device that is named is a reason.
    fn a_real_hip_library_is_found_by_its_name(LD_LIBRARY_PATH = folder(HIP_5)) {
        let Some(file) = bare(HIP_5) else { return };
        let (state, error) = first_answer(&Discovery::new(Settings::default()), Vendor::Hip);
        assert_no_hip_device(&file, &state, &error);
    }
}
