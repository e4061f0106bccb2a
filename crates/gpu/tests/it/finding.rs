//! What becomes of looking for a library.

use std::path::{Path, PathBuf};

use tensorferry_gpu::{
    Api, Choice, Discovery, GpuError, Location, Memory, Settings, State, Tried, Vendor,
};

use crate::children::{child_test, in_fork, mapped, text};
use crate::stubs::{Stub, folder, stub};

fn with_library(vendor: Vendor, file: impl Into<PathBuf>) -> Discovery {
    Discovery::new(Settings::default().with_library(vendor, file))
}

fn examined(discovery: &Discovery, vendor: Vendor) -> State {
    let _ = discovery.require(vendor);
    let at = Vendor::ALL.iter().position(|one| *one == vendor).expect("ALL has all");
    discovery.states()[at].clone()
}

/// The folder of stubs as a library path; empty where there are none.
fn path(of: &str) -> String {
    folder().map(|folder| text(&folder.join(of)).to_owned()).unwrap_or_default()
}

#[test]
fn a_library_that_is_not_there_is_missing() {
    let discovery = with_library(Vendor::Musa, "/nowhere/libmusart.so.5");
    let error = discovery.require(Vendor::Musa).unwrap_err();
    assert_eq!(
        error.to_string(),
        "MUSA cannot be used: no MUSA library was found (tried /nowhere/libmusart.so.5; the first \
         answered: no such file); install the vendor's driver, or name the file with \
         TENSORFERRY_MUSA_LIBRARY"
    );
    assert!(!discovery.supports(Vendor::Musa));
}

child_test! {
    /// What the loader said of each name is kept.
    fn every_name_that_was_tried_is_told() {
        let discovery = Discovery::new(Settings::default());
        match examined(&discovery, Vendor::Musa) {
            State::Missing { tried, .. } => {
                let names: Vec<_> = tried.iter().map(|one| text(&one.name)).collect();
                assert_eq!(names.first(), Some(&"libmusart.so.5"));
                assert_eq!(names.last(), Some(&"libmusa_runtime.so"));
                let answer = &tried[0].answer;
                assert!(answer.contains("cannot open shared object file"), "{answer}");
            }
            // This machine has such a device.
            other => eprintln!("skipped: {other}"),
        }
    }
}

child_test! {
    fn damaged_files_are_states() {
        let good = std::fs::read(stub!("a/libcuda.so.1")).unwrap();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged");
        std::fs::create_dir_all(&folder).unwrap();
        let edited = |at: usize, with: u8| {
            let mut bytes = good.clone();
            bytes[at] = with;
            bytes
        };
        let cases: [(&str, Vec<u8>, &str); 7] = [
            ("text", b"plain text ".repeat(9), "no shared library"),
            ("empty", Vec::new(), "no shared library"),
            ("cut", good[..good.len() / 3].to_vec(), "cut off"),
            ("headers", good[..80].to_vec(), "cut off"),
            ("class", edited(4, 1), "another kind of machine"),
            ("machine", edited(18, 0xf3), "another kind of machine"),
            ("object", edited(16, 1), "no shared library"),
        ];
        for (name, bytes, why) in cases {
            let file = folder.join(format!("lib{name}.so"));
            std::fs::write(&file, bytes).unwrap();
            let discovery = with_library(Vendor::Cuda, &file);
            let state = examined(&discovery, Vendor::Cuda);
            assert_eq!(state.word(), "unusable", "{name}: {state}");
            assert!(state.to_string().contains(why), "{name}: {state}");
            assert!(state.to_string().contains(text(&file)), "{name}: {state}");
        }
    }
}

/// What was tried: the last part of each name, the answer without the name, and whether it was found.
fn tried(discovery: &Discovery, vendor: Vendor) -> Vec<(String, String, bool)> {
    let one = |one: Tried| {
        let name = one.name.file_name().map(|name| text(name.as_ref()).to_owned());
        let answer = one.answer.rsplit(": ").next().map(str::to_owned);
        (name.unwrap_or_default(), answer.unwrap_or_default(), one.found)
    };
    discovery.tried(vendor).into_iter().map(one).collect()
}

fn row(name: &str, answer: &str, found: bool) -> (String, String, bool) {
    (name.to_owned(), answer.to_owned(), found)
}

/// A folder with a newer HIP library that is damaged, then the one with the good ones.
fn damaged_then_good() -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged_hip");
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(folder.join("libamdhip64.so.7"), "plain text ".repeat(99)))
        .expect("the target folder can be written");
    format!("{}:{}", text(&folder), path("a"))
}

child_test! {
    fn files_that_were_refused_before_the_one_that_was_taken_are_told(
        LD_LIBRARY_PATH = damaged_then_good()
    ) {
        stub!("a/libamdhip64.so.6");
        let discovery = Discovery::new(Settings::default());
        assert!(discovery.tried(Vendor::Hip).is_empty());
        assert_eq!(examined(&discovery, Vendor::Hip).word(), "ready");
        let found = [
            row("libamdhip64.so.10", "No such file or directory", false),
            row("libamdhip64.so.7", "this is no shared library", true),
            row("libamdhip64.so.6", "opened", true),
        ];
        assert_eq!(tried(&discovery, Vendor::Hip), found);
        // What is asked afterwards changes nothing.
        assert_eq!(discovery.peek(Vendor::Hip).word(), "ready");
        assert!(discovery.supports(Vendor::Hip));
        assert_eq!(tried(&discovery, Vendor::Hip), found);
        // For a second engine it is a copy that the process has loaded.
        let second = Discovery::new(Settings::default());
        assert!(second.supports(Vendor::Hip));
        assert_eq!(
            tried(&second, Vendor::Hip),
            [row("libamdhip64.so.6", "loaded already", true)]
        );
    }
}

/// A folder of one test's own that is searched before the one with the good libraries.
fn searched_first(test: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(test)
}

/// What a search answers that meets `put`'s file of a driver's name before a good one: the state's
/// word, and what was tried first.
fn meets(test: &str, put: impl FnOnce(&Path)) -> (&'static str, Tried) {
    let file = searched_first(test).join("libcuda.so.1");
    let _ = std::fs::remove_file(&file).or_else(|_| std::fs::remove_dir(&file));
    std::fs::create_dir_all(searched_first(test)).expect("the target folder can be written");
    put(&file);
    let discovery = Discovery::new(Settings::default());
    let word = examined(&discovery, Vendor::Cuda).word();
    (word, discovery.tried(Vendor::Cuda).swap_remove(0))
}

/// The loader's search ends at such a file.
fn stops_at(test: &str, answer: &str, put: impl FnOnce(&Path)) {
    let (word, first) = meets(test, put);
    let name = searched_first(test).join("libcuda.so.1");
    assert_eq!((word, &first.name, first.found), ("unusable", &name, true), "{first:?}");
    assert!(first.answer.contains(answer), "{first:?}");
    assert!(mapped("libcuda").is_empty());
}

/// The loader's search goes on after such a file.
fn goes_on_after(test: &str, put: impl FnOnce(&Path)) {
    let (word, first) = meets(test, put);
    assert_eq!((word, first.answer.as_str()), ("ready", "opened"), "{first:?}");
    assert_eq!(mapped("libcuda"), [text(&stubs().join("a/libcuda.so.1"))]);
}

fn stubs() -> &'static Path {
    folder().expect("they were built")
}

/// `test`'s own folder, then the one with the good libraries.
fn before_good(test: &str) -> String {
    format!("{}:{}", text(&searched_first(test)), path("a"))
}

child_test! {
    fn a_cut_library_in_the_search_path_is_no_accident(LD_LIBRARY_PATH = before_good("found_cut")) {
        let good = std::fs::read(stub!("a/libcuda.so.1")).unwrap();
        for len in [0, 1, 63, 64, 100, 900, 4096, 5000, good.len() / 2] {
            let answer = if len < 64 { "no shared library" } else { "cut off" };
            stops_at("found_cut", answer, |file| std::fs::write(file, &good[..len]).unwrap());
        }
        // By a link, as a package has it.
        stops_at("found_cut", "cut off", |file| {
            let cut = file.with_file_name("libcuda.so.550");
            std::fs::write(&cut, &good[..good.len() / 2]).unwrap();
            std::os::unix::fs::symlink(cut, file).unwrap();
        });
    }
}

child_test! {
    fn what_is_no_file_in_the_search_path_is_told(LD_LIBRARY_PATH = before_good("found_other")) {
        stub!("a/libcuda.so.1");
        stops_at("found_other", "this is no file", |file| std::fs::create_dir(file).unwrap());
        stops_at("found_other", "this is no file", |file| {
            std::os::unix::fs::symlink("/dev/zero", file).unwrap();
        });
        let fifo = |file: &Path| {
            let made = std::process::Command::new("mkfifo").arg(file).status().unwrap();
            assert!(made.success());
        };
        stops_at("found_other", "this is no file", fifo);
        // It can be named as well.
        let file = searched_first("found_other").join("libcuda.so.1");
        let discovery = with_library(Vendor::Cuda, &file);
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "not-looked-for");
        let state = examined(&discovery, Vendor::Cuda);
        assert!(state.to_string().contains("this is no file"), "{state}");
    }
}

child_test! {
    fn a_library_of_another_machine_is_passed_over(
        LD_LIBRARY_PATH = before_good("found_machine")
    ) {
        let mut bytes = std::fs::read(stub!("a/libcuda.so.1")).unwrap();
        bytes[18] = 0xf3;
        goes_on_after("found_machine", |file| std::fs::write(file, &bytes[..bytes.len() / 2]).unwrap());
    }
}

child_test! {
    fn a_library_of_another_class_is_passed_over(LD_LIBRARY_PATH = before_good("found_class")) {
        let mut bytes = std::fs::read(stub!("a/libcuda.so.1")).unwrap();
        bytes[4] = 1;
        goes_on_after("found_class", |file| std::fs::write(file, bytes).unwrap());
    }
}

child_test! {
    fn a_link_to_nowhere_is_passed_over(LD_LIBRARY_PATH = before_good("found_link")) {
        stub!("a/libcuda.so.1");
        goes_on_after("found_link", |file| std::os::unix::fs::symlink("/nowhere", file).unwrap());
    }
}

child_test! {
    fn an_unreadable_library_is_passed_over(LD_LIBRARY_PATH = before_good("found_unreadable")) {
        use std::os::unix::fs::PermissionsExt;
        let good = stub!("a/libcuda.so.1");
        let put = |file: &Path| {
            std::fs::copy(&good, file).unwrap();
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o0)).unwrap();
        };
        // The superuser can read it.
        let file = searched_first("found_unreadable").join("libcuda.so.1");
        let (word, _) = meets("found_unreadable", put);
        assert_eq!(word, "ready");
        assert_eq!(mapped("found_unreadable").is_empty(), std::fs::File::open(file).is_err());
    }
}

child_test! {
    fn a_link_to_a_good_library_is_opened_by_its_name(LD_LIBRARY_PATH = before_good("found_good")) {
        let good = stub!("b/libcuda.so.1");
        let (word, first) =
            meets("found_good", |file| std::os::unix::fs::symlink(&good, file).unwrap());
        assert_eq!((word, first.answer.as_str()), ("ready", "opened"));
        assert_eq!(text(&first.name), "libcuda.so.1");
        assert_eq!(mapped("libcuda"), [text(&good)]);
    }
}

child_test! {
    /// Whatever the file is called that it was loaded from.
    fn a_mapped_soname_is_not_loaded_again(LD_LIBRARY_PATH = path("b")) {
        let other = searched_first("found_soname").join("driver.so");
        std::fs::create_dir_all(searched_first("found_soname")).unwrap();
        std::fs::copy(stub!("a/libcuda.so.1"), &other).unwrap();
        let _framework = Stub::open(&other);
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.require(Vendor::Cuda).unwrap().file(), other.as_path());
        assert!(mapped("stubs/b/").is_empty());
    }
}

child_test! {
    fn a_library_that_lacks_a_function_is_told_with_what_was_tried_after_it(
        LD_LIBRARY_PATH = path("lacking")
    ) {
        stub!("lacking/libcuda.so.1");
        let discovery = Discovery::new(Settings::default());
        assert_eq!(examined(&discovery, Vendor::Cuda).word(), "unusable");
        let all = tried(&discovery, Vendor::Cuda);
        let first = row("libcuda.so.1", "it lacks the function cuEventQuery", true);
        assert_eq!((&all[0], all.len()), (&first, 4), "{all:?}");
    }
}

child_test! {
    /// Without a need, only what is mapped is looked at; a name that was not tried is not told.
    fn only_what_was_tried_is_told(LD_LIBRARY_PATH = path("a")) {
        let file = stub!("a/libcuda.so.1");
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "not-looked-for");
        assert!(discovery.tried(Vendor::Cuda).is_empty());
        let framework = Stub::open(&file);
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "mapped");
        let loaded = row("libcuda.so.1", "loaded already", true);
        assert_eq!(tried(&discovery, Vendor::Cuda), [loaded]);
        assert_eq!(discovery.tried(Vendor::Cuda)[0].name, file);
        assert_eq!(framework.inits(), 0);
    }
}

child_test! {
    fn of_a_chosen_file_nothing_else_is_tried(LD_LIBRARY_PATH = path("a")) {
        let file = stub!("b/libcuda.so.1");
        for (file, answer, found) in [
            (file.clone(), "opened", true),
            (file.with_file_name("libno.so"), "no such file", false),
            (stub!("a/empty.so"), "it has neither cuInit (a driver) nor cudaGetDeviceCount (a \
                                   runtime)", true),
        ] {
            let discovery = with_library(Vendor::Cuda, &file);
            let _ = discovery.require(Vendor::Cuda);
            let answer = answer.to_owned();
            assert_eq!(discovery.tried(Vendor::Cuda), [Tried { name: file, answer, found }]);
        }
        let choice = Choice::Only(Vendor::Cuda);
        let discovery = Discovery::new(Settings::default().with_choice(choice));
        discovery.require(Vendor::Cuda).unwrap();
        let _ = discovery.require(Vendor::Hip);
        assert!(discovery.tried(Vendor::Hip).is_empty());
    }
}

child_test! {
    fn a_missing_function_is_named() {
        let file = stub!("lacking/libcuda.so.1");
        let discovery = with_library(Vendor::Cuda, &file);
        let error = discovery.require(Vendor::Cuda).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "CUDA cannot be used: {} is no usable CUDA library: it lacks the function \
                 cuEventQuery; install it anew, or name another file with \
                 TENSORFERRY_CUDA_LIBRARY",
                file.display()
            )
        );
        let GpuError::Unavailable { state, .. } = error else { panic!("{error}") };
        let State::Unusable { missing, .. } = *state else { panic!("{state}") };
        assert_eq!(missing.as_deref(), Some("cuEventQuery"));
    }
}

child_test! {
    fn a_library_of_no_vendor_says_what_it_lacks() {
        for (vendor, lacks) in [
            (Vendor::Cuda, "neither cuInit (a driver) nor cudaGetDeviceCount (a runtime)"),
            (Vendor::Musa, "musaGetDeviceCount"),
            (Vendor::Hip, "hipGetDeviceCount"),
        ] {
            let state = examined(&with_library(vendor, stub!("a/empty.so")), vendor);
            assert!(state.to_string().contains(lacks), "{state}");
        }
    }
}

/// A first call that fails, with the word for it.
fn fails_once(word: &str, part: &str) {
    let file = stub!("a/libcuda.so.1");
    let stub = Stub::open(&file);
    let discovery = with_library(Vendor::Cuda, &file);
    for _ in 0..3 {
        assert!(discovery.require(Vendor::Cuda).is_err());
    }
    let state = examined(&discovery, Vendor::Cuda);
    assert_eq!(state.word(), word, "{state}");
    assert!(state.to_string().contains(part), "{state}");
    // A second engine does not ask again, and neither do questions about addresses.
    let second = with_library(Vendor::Cuda, &file);
    assert_eq!(examined(&second, Vendor::Cuda).word(), word);
    assert!(matches!(second.classify(Location::Any, 0x1000, 64), Ok(Memory::Host)));
    assert_eq!(stub.inits(), 1);
}

child_test! {
    fn no_device_is_asked_for_once(STUB_INIT = 100) {
        let said = "cuInit answered 100 CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected) \
                    (driver 12.4); check that";
        fails_once("no-device", said);
    }
}

child_test! {
    fn an_old_driver_is_asked_once(STUB_INIT = 35) {
        fails_once("driver-too-old", "install a newer driver");
    }
}

child_test! {
    fn a_driver_that_does_not_initialise_is_asked_once(STUB_INIT = 3) {
        fails_once("init-failed", "cuInit answered 3 (driver 12.4)");
    }
}

child_test! {
    fn a_driver_after_a_fork_is_asked_once(STUB_INIT = 304) {
        fails_once("init-failed", "by spawn instead of fork");
    }
}

child_test! {
    fn threads_that_ask_together_initialise_once(STUB_INIT = 999) {
        let file = stub!("a/libcuda.so.1");
        let stub = Stub::open(&file);
        let engines: Vec<_> = (0..4).map(|_| with_library(Vendor::Cuda, &file)).collect();
        std::thread::scope(|scope| {
            for at in 0..16 {
                let engine = &engines[at % engines.len()];
                scope.spawn(move || assert!(engine.require(Vendor::Cuda).is_err()));
            }
        });
        assert_eq!(stub.inits(), 1);
    }
}

child_test! {
    fn a_stand_in_for_linking_is_recognised(STUB_INIT = 34) {
        fails_once("init-failed", "stand-in for linking");
    }
}

child_test! {
    fn no_devices_is_no_device(STUB_DEVICES = 0) {
        fails_once("no-device", "counts no devices");
    }
}

child_test! {
    fn a_library_that_is_found_is_ready(LD_LIBRARY_PATH = path("b")) {
        let file = stub!("b/libcuda.so.1");
        let discovery = Discovery::new(Settings::default());
        let runtime = discovery.require_device("cuda:1".parse().unwrap()).unwrap();
        assert_eq!((runtime.api(), runtime.file()), (Api::CudaDriver, file.as_path()));
        let state = examined(&discovery, Vendor::Cuda);
        let found = state.ready().unwrap();
        assert_eq!(found.devices.len(), 2);
        assert_eq!(found.versions.to_string(), "driver 12.4");
        assert!(found.absent.contains(&"cuStreamWaitValue32_v2".to_owned()));
        assert!(!runtime.can_wait_value());
        let error = discovery.require_device("cuda:2".parse().unwrap()).unwrap_err();
        assert!(error.to_string().starts_with("there is no cuda:2: "), "{error}");
        // It is held once, however many engines ask.
        let second = Discovery::new(Settings::default());
        second.require(Vendor::Cuda).unwrap();
        assert_eq!(Stub::open(&file).inits(), 1);
    }
}

child_test! {
    /// The copy that the framework allocates with is the one to ask.
    fn a_mapped_copy_is_preferred(LD_LIBRARY_PATH = path("b")) {
        let file = stub!("a/libcuda.so.1");
        let _framework = Stub::open(&file);
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.require(Vendor::Cuda).unwrap().file(), file.as_path());
        assert!(mapped("stubs/b/").is_empty());
    }
}

child_test! {
    fn a_chosen_file_is_preferred_to_a_mapped_copy(LD_LIBRARY_PATH = path("a")) {
        let _framework = Stub::open(&stub!("a/libcuda.so.1"));
        let file = stub!("b/libcuda.so.1");
        let discovery = with_library(Vendor::Cuda, &file);
        assert_eq!(discovery.require(Vendor::Cuda).unwrap().file(), file.as_path());
    }
}

child_test! {
    fn the_symbols_of_a_chosen_file_decide() {
        for (file, api) in [
            (stub!("a/libcuda.so.1"), Api::CudaDriver),
            (stub!("a/libcudart.so.12"), Api::CudaRuntime),
            (stub!("a/anything.so"), Api::CudaRuntime),
        ] {
            let discovery = with_library(Vendor::Cuda, &file);
            assert_eq!(discovery.require(Vendor::Cuda).unwrap().api(), api, "{}", file.display());
        }
    }
}

child_test! {
    fn a_cuda_runtime_is_never_picked_unasked(LD_LIBRARY_PATH = path("a")) {
        let runtime = Stub::open(&stub!("a/libcudart.so.12"));
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "not-looked-for");
        assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
        assert_eq!(discovery.require(Vendor::Cuda).unwrap().api(), Api::CudaDriver);
        assert_eq!((runtime.inits(), runtime.number("stub_queries")), (0, 0));
    }
}

child_test! {
    /// A chosen runtime makes contexts when it is asked, so it is asked for a named device only.
    fn a_chosen_cuda_runtime_needs_a_named_device() {
        let file = stub!("a/libcudart.so.12");
        let runtime = Stub::open(&file);
        let discovery = with_library(Vendor::Cuda, &file);
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "mapped");
        assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
        assert_eq!((runtime.inits(), runtime.number("stub_queries")), (0, 0));
        let named = "cuda:1".parse().unwrap();
        assert_eq!(discovery.classify(named, 0x1000, 64).unwrap(), Memory::Host);
        assert!(runtime.number("stub_queries") > 0);
    }
}

child_test! {
    fn nothing_is_opened_for_an_address(LD_LIBRARY_PATH = path("a")) {
        stub!("a/libcuda.so.1");
        let discovery = Discovery::new(Settings::default());
        for location in [Location::Any, Location::Cpu] {
            assert_eq!(discovery.classify(location, 0x1000, 64).unwrap(), Memory::Host);
        }
        for vendor in Vendor::ALL {
            assert_eq!(discovery.peek(vendor).word(), "not-looked-for");
        }
        assert!(discovery.in_use().is_empty());
        assert_eq!(mapped("stubs/"), Vec::<String>::new());
    }
}

child_test! {
    fn peeking_initialises_nothing(LD_LIBRARY_PATH = path("a")) {
        let framework = Stub::open(&stub!("a/libcuda.so.1"));
        let discovery = Discovery::new(Settings::default());
        for _ in 0..2 {
            assert_eq!(discovery.peek(Vendor::Cuda).word(), "mapped");
            assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
            assert!(discovery.supports(Vendor::Cuda));
        }
        assert_eq!((framework.inits(), framework.number("stub_queries")), (0, 0));
        // The framework starts to use it: no call of ours is needed.
        assert_eq!(framework.init(), 0);
        assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
        assert!(framework.number("stub_queries") > 0);
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "ready");
        assert!(discovery.require(Vendor::Cuda).is_ok());
        assert_eq!(framework.inits(), 1);
    }
}

child_test! {
    fn a_mapped_hip_or_musa_library_is_asked(STUB_VERSION = 60443484) {
        let discovery = Discovery::new(Settings::default());
        let (hip, musa) = (stub!("a/libamdhip64.so.6"), stub!("a/libmusart.so.5"));
        for (vendor, file) in [(Vendor::Hip, hip), (Vendor::Musa, musa)] {
            assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
            let framework = Stub::open(&file);
            assert_eq!(discovery.peek(vendor).word(), "mapped");
            assert_eq!(framework.inits(), 0);
            assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
            assert!(framework.inits() > 0 && framework.number("stub_queries") > 0, "{vendor}");
        }
    }
}

child_test! {
    fn whether_there_is_support_is_found_without_initialising(LD_LIBRARY_PATH = path("a")) {
        let file = stub!("a/libamdhip64.so.6");
        let discovery = Discovery::new(Settings::default());
        for vendor in Vendor::ALL {
            assert!(discovery.supports(vendor), "{vendor}");
        }
        // That we opened it is no reason to believe that the process uses it.
        assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
        assert_eq!(Stub::open(&file).inits(), 0);
    }
}

child_test! {
    fn one_chosen_vendor_may_be_initialised_for_an_address(LD_LIBRARY_PATH = path("a")) {
        let file = stub!("a/libcuda.so.1");
        let choice = Choice::Only(Vendor::Cuda);
        let discovery = Discovery::new(Settings::default().with_choice(choice));
        assert_eq!(discovery.classify(Location::Any, 0x1000, 64).unwrap(), Memory::Host);
        assert_eq!(Stub::open(&file).inits(), 1);
        let words = discovery.states().map(|state| state.word());
        assert_eq!(words, ["ready", "not-looked-for", "not-looked-for"]);
    }
}

child_test! {
    fn a_runtime_without_a_driver_says_so(STUB_INIT = 35) {
        let state = examined(&with_library(Vendor::Cuda, stub!("a/libcudart.so.12")), Vendor::Cuda);
        assert_eq!(state.word(), "no-driver");
        let said = "cudaGetDeviceCount answered 35 anErrorName (an error text)";
        assert!(state.to_string().contains(said), "{state}");
        assert!(state.to_string().contains("no driver, runtime 12.9"), "{state}");
    }
}

child_test! {
    fn a_runtime_newer_than_its_driver_says_so(STUB_INIT = 35, STUB_DRIVER = 11080) {
        let state = examined(&with_library(Vendor::Cuda, stub!("a/libcudart.so.12")), Vendor::Cuda);
        assert_eq!(state.word(), "driver-too-old");
        assert!(state.to_string().contains("driver 11.8, runtime 12.9"), "{state}");
    }
}

child_test! {
    fn musa_is_understood_by_name(STUB_INIT = 7) {
        let state = examined(&with_library(Vendor::Musa, stub!("a/libmusart.so.5")), Vendor::Musa);
        assert_eq!(state.word(), "no-device", "{state}");
    }
}

child_test! {
    fn a_fork_is_recognised(LD_LIBRARY_PATH = path("a")) {
        let file = stub!("a/libcuda.so.1");
        let framework = Stub::open(&file);
        let discovery = Discovery::new(Settings::default());
        let runtime = discovery.require(Vendor::Cuda).unwrap();
        let code = in_fork(|| {
            assert!(matches!(discovery.require(Vendor::Cuda), Err(GpuError::Unavailable { .. })));
            assert!(matches!(runtime.classify(0x1000, 64, None), Err(GpuError::Forked { .. })));
            let own = Discovery::new(Settings::default());
            assert_eq!(own.classify(Location::Cpu, 0x1000, 64).unwrap(), Memory::Host);
            let error = own.require(Vendor::Cuda).unwrap_err().to_string();
            assert!(error.contains("before a fork"), "{error}");
            framework.inits()
        });
        assert_eq!(code, 1);
    }
}

child_test! {
    /// What was only looked at can be used in a child.
    fn a_fork_of_a_process_that_only_looked_can_use_it(LD_LIBRARY_PATH = path("a")) {
        let _framework = Stub::open(&stub!("a/libcuda.so.1"));
        let discovery = Discovery::new(Settings::default());
        assert_eq!(discovery.peek(Vendor::Cuda).word(), "mapped");
        let code = in_fork(|| {
            i32::from(Discovery::new(Settings::default()).require(Vendor::Cuda).is_ok())
        });
        assert_eq!(code, 1);
    }
}
