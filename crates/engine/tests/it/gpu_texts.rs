//! GPU libraries that cannot be used: the error says which, why, and what to do; host memory does not care.
#![expect(unsafe_code, reason = "addresses that nobody owns")]

use std::path::PathBuf;

use tensorferry::gpu::{Choice, DeviceId, Location, Vendor};
use tensorferry::{Config, Engine, Error, HostBuffer, Op, RegisterOptions};

use crate::common::{Pair, buffer, engine, ms, row, says, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

/// Host memory moves, registered in every way that there is, and not at all.
fn host_memory_moves(config: &Config) {
    let two = Two::new(config);
    for location in [Location::Any, Location::Cpu] {
        let (local, remote) = (buffer(text(MIB, 1)), HostBuffer::zeroed(MIB).unwrap());
        let options = RegisterOptions::default().with_location(location);
        // SAFETY: unregistered below.
        unsafe { two.target.register(remote.addr(), MIB as u64, &options) }.unwrap();
        for op in [Op::Write, Op::Read] {
            let batch =
                two.segment.submit_owned(&row(op, &local, remote.addr(), MIB, 1), within(ms(8000)));
            end(&batch.unwrap()).unwrap();
            assert!(local.read(0, MIB) == remote.read(0, MIB));
        }
        two.target.unregister(remote.addr()).unwrap();
    }
}

/// Every way to need a device says the same; nobody is told to build anything.
fn refused(engine: &Engine, device: DeviceId, words: &[&str]) {
    let host = HostBuffer::zeroed(4096).unwrap();
    let options = RegisterOptions::default().with_location(Location::Device(device));
    for _ in 0..2 {
        let errors = [
            engine.device_buffer(device, 64).unwrap_err(),
            // SAFETY: it is refused.
            unsafe { engine.register(host.addr(), 4096, &options) }.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.code(), 27, "{error}");
            says(&error, words);
            is_no_advice_to_build(&error);
        }
    }
    assert!(engine.buffers().is_empty());
}

fn is_no_advice_to_build(error: &Error) {
    let text = error.to_string().to_lowercase();
    for word in ["rebuild", "recompil", "build it", "compile it", "use_cuda"] {
        assert!(!text.contains(word), "{text}");
    }
}

/// A folder for files that are no libraries.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let folder =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("files/{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn with_library(vendor: Vendor, path: PathBuf) -> Config {
    let mut config = Config::default();
    config.gpu = config.gpu.with_library(vendor, path);
    config
}

apart! {
    fn a_library_that_cannot_be_opened_says_why() {
        let sim = Sim::cuda();
        let whole = std::fs::read(&sim.file).unwrap();
        let mut foreign = whole.clone();
        // The machine of an ELF file: AArch64, or x86-64 where that is what we are.
        let other = if foreign[18..20] == [0xb7, 0] { [0x3e, 0] } else { [0xb7, 0] };
        foreign[18..20].copy_from_slice(&other);
        let cases: [(&str, Option<Vec<u8>>, &str); 4] = [
            ("libnothing.so.1", None, "no such file"),
            ("libgarbage.so.1", Some(b"this is no library at all\n".repeat(300)), ""),
            ("libcut.so.1", Some(whole[..whole.len() / 2].to_vec()), ""),
            ("libforeign.so.1", Some(foreign), ""),
        ];
        for (name, bytes, why) in cases {
            let path = file(name, bytes.as_deref().unwrap_or_default());
            if bytes.is_none() {
                std::fs::remove_file(&path).unwrap();
            }
            for vendor in Vendor::ALL {
                let config = with_library(vendor, path.clone());
                let e = engine(config.clone());
                let device = DeviceId::new(vendor, 0);
                let setting = format!("TENSORFERRY_{}_LIBRARY", vendor.to_string().to_uppercase());
                let cannot = format!("{device} cannot be used");
                refused(&e, device, &[&cannot, name, why, &setting]);
                drop(e);
                host_memory_moves(&config);
            }
            let _ = std::fs::remove_dir_all(path.parent().unwrap());
        }
    }
}

apart! {
    fn a_library_without_the_functions_it_needs_names_one() {
        // Each is another vendor's.
        let (cuda, hip) = (Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.6"]));
        for (vendor, sim, word) in [
            (Vendor::Cuda, &hip, "cuInit"),
            (Vendor::Musa, &cuda, "it lacks the function musa"),
            (Vendor::Hip, &cuda, "it lacks the function hip"),
        ] {
            let config = with_library(vendor, sim.file.clone());
            let e = engine(config.clone());
            let device = DeviceId::new(vendor, 1);
            let name = sim.file.display().to_string();
            let cannot = format!("{device} cannot be used");
            refused(&e, device, &[&cannot, &name, "is no usable ", word, "install it anew"]);
            drop(e);
            host_memory_moves(&config);
        }
    }
}

apart! {
    fn a_driver_that_does_not_come_up_says_what_it_said() {
        for (code, words) in [
            (100, ["shows no device", "cuInit answered 100 CUDA_ERROR_NO_DEVICE", "nvidia-smi"]),
            (803, ["could not be initialised", "cuInit answered 803", "reload the module"]),
            (
                999,
                [
                    "could not be initialised",
                    "cuInit answered 999 CUDA_ERROR_UNKNOWN",
                    "driver 13.0",
                ],
            ),
            (34, ["could not be initialised", "cuInit answered 34", "install the driver"]),
        ] {
            let sim = Sim::cuda();
            sim.control.set("init_error", code);
            let e = engine(sim.config());
            let name = sim.file.display().to_string();
            refused(&e, sim.device(0), &[&["cuda:0 cannot be used", &name][..], &words].concat());
            drop(e);
            host_memory_moves(&sim.config());
            assert_eq!(sim.control.calls("cuInit"), 1, "it is slow, and leaks: never again");
        }
        for sim in
            [Sim::every().swap_remove(1), Sim::every().swap_remove(3), Sim::every().swap_remove(5)]
        {
            sim.control.set("init_error", 100);
            let e = engine(sim.config());
            let name = sim.file.display().to_string();
            refused(
                &e,
                sim.device(0),
                &["cannot be used", &name, "shows no device", "answered 100"],
            );
            drop(e);
            host_memory_moves(&sim.config());
        }
    }
}

apart! {
    fn a_device_that_there_is_not_says_how_many_there_are() {
        for sim in Sim::every() {
            let e = engine(sim.config());
            let name = sim.file.display().to_string();
            let no = format!("there is no {}", sim.device(2));
            refused(&e, sim.device(2), &[&no, &name, "shows 2 ", " devices; check the ordinal"]);
        }
    }
}

apart! {
    fn a_library_whose_file_is_removed_works_on() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
        remote.lend(&two.target);
        std::fs::remove_file(&sim.file).unwrap();
        local.write(0, text(MIB, 1));
        two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]).unwrap();
        assert!(remote.read(0, MIB) == text(MIB, 1));
        let two = Two::new(&sim.config());
        remote.lend(&two.target);
        two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]).unwrap();
    }
}

apart! {
    /// Nothing is set: the framework's copy is taken.
    fn a_library_that_the_process_uses_is_found_without_a_word() {
        for sim in
            [Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.6"]), Sim::every().swap_remove(3)]
        {
            let two = Two::new(&Config::default());
            let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
            // SAFETY: it stays allocated.
            unsafe { two.target.register(remote.addr, MIB as u64, &Default::default()) }.unwrap();
            local.write(0, text(MIB, 1));
            two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]).unwrap();
            assert!(remote.read(0, MIB) == text(MIB, 1), "{}", sim.vendor);
        }
    }
}

/// What is said of a device's address when no library may be asked, or none is there to ask.
fn bad_address(config: &Config, addr: u64, words: &[&str]) {
    let pair = Pair::with(MIB, config.clone());
    let all = [
        &["not mapped for ", "CPU", "check the address and length", "if it is memory of a GPU"][..],
        words,
    ]
    .concat();
    for op in [Op::Write, Op::Read] {
        let request =
            tensorferry::Request { op, local: addr, remote: pair.remote.addr(), len: 5000 };
        let error =
            end(&submit(&pair.segment, vec![request], within(ms(8000))).unwrap()).unwrap_err();
        assert_eq!(error.code(), 12, "{error}");
        let place = format!("bad local address (EFAULT): {addr:#x}");
        says(&error, &[&all[..], &[&place, pair.target.name(), "5000 bytes"]].concat());
        is_no_advice_to_build(&error);
        // Within the process the same.
        let own = pair.initiator.open(pair.initiator.name()).unwrap();
        let host = HostBuffer::zeroed(MIB).unwrap();
        pair.initiator.register_buffer(&host, &Default::default()).unwrap();
        let request = tensorferry::Request { remote: host.addr(), ..request };
        let error = end(&submit(&own, vec![request], within(ms(8000))).unwrap()).unwrap_err();
        assert_eq!(error.code(), 12, "{error}");
        says(&error, &all);
        pair.initiator.unregister(host.addr()).unwrap();
    }
    for location in [Location::Any, Location::Cpu] {
        let options = RegisterOptions::default().with_location(location);
        // SAFETY: it is refused.
        let error = unsafe { pair.initiator.register(addr, 5000, &options) }.unwrap_err();
        assert_eq!(error.code(), 26, "{error}");
        let range =
            format!("[{addr:#x}, +5000) cannot be registered: the byte at {addr:#x} is not mapped");
        says(&error, &[&all[1..], &[&range]].concat());
        is_no_advice_to_build(&error);
    }
}

apart! {
    fn an_address_that_no_library_is_asked_about_says_so() {
        let sim = Sim::cuda();
        let block = sim.alloc(MIB);
        let mut config = sim.config();
        config.gpu.choice = Choice::Off;
        let off = "no GPU library was looked for, because of TENSORFERRY_GPU=off; set it to auto";
        bad_address(&config, block.addr, &[off]);
        config.gpu.choice = Choice::Only(Vendor::Hip);
        bad_address(
            &config,
            block.addr,
            &["no HIP library was found", "no other GPU library was looked for", "set it to auto"],
        );
    }
}

apart! {
    fn an_address_without_any_library_says_so() {
        // Nothing can be touched there, as in a device's memory of which nobody told.
        let len = 4 * MIB;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: an anonymous mapping at an address of the kernel's choice changes nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
        let none = "no GPU library is loaded in this process, so none was asked";
        bad_address(&Config::default(), base.expose_provenance() as u64, &[none]);
    }
}

apart! {
    /// A CUDA runtime makes contexts when it is asked, so it is asked about named devices only.
    fn an_address_that_a_cuda_runtime_could_know_says_that_it_was_not_asked() {
        let sim = Sim::every().swap_remove(2);
        let block = sim.alloc(MIB);
        let name = sim.file.display().to_string();
        let asked = "is loaded, and is asked about named devices only";
        bad_address(&sim.config(), block.addr, &[&name, asked]);
    }
}
