//! What the tests of device memory are made of: memory as a framework has it, and bytes to move.
#![expect(unsafe_code, reason = "memory that a framework has allocated, by its address")]

use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use tensorferry::gpu::{DeviceId, Location, Vendor};
use tensorferry::{
    Batch, Config, Engine, Op, RegisterOptions, Request, Result, Segment, SubmitOptions,
};
use tensorferry_simgpu::{Control, Memory};

use crate::common::{engine, ms, pattern, within};
use crate::gpu::{MIB, Sim};

impl Sim {
    pub(crate) fn cuda() -> Self {
        Self::new(Vendor::Cuda, &["libcuda.so.1"])
    }

    /// Every table that the engine knows, one image each.
    pub(crate) fn every() -> Vec<Self> {
        vec![
            Self::cuda(),
            Self::new(Vendor::Cuda, &["libcudart.so.12", "libcuda.so.1"]),
            Self::new(Vendor::Cuda, &["libcudart.so.13", "libcuda.so.1"]),
            Self::new(Vendor::Musa, &["libmusart.so.5", "libmusa.so.1"]),
            Self::new(Vendor::Hip, &["libamdhip64.so.5"]),
            Self::new(Vendor::Hip, &["libamdhip64.so.6"]),
        ]
    }

    /// Memory on device 1 as a framework has it; what it held before is not cleared.
    pub(crate) fn alloc(&self, len: usize) -> Block<'_> {
        self.alloc_on(1, len, Memory::Device)
    }

    pub(crate) fn alloc_on(&self, device: u32, len: usize, kind: Memory) -> Block<'_> {
        let addr = self.control.alloc(device.cast_signed(), len as u64, kind);
        Block { sim: self, device: self.device(device), addr: addr.expect("there is room"), len }
    }
}

/// Memory of a simulated device, freed by hand.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    sim: &'a Sim,
    pub(crate) device: DeviceId,
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

impl Block<'_> {
    pub(crate) fn control(&self) -> Control {
        self.sim.control
    }

    /// Some of it.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len);
        Self { addr: self.addr + offset as u64, len, ..*self }
    }

    /// What is there now, past all streams.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.sim.control.read(self.addr + offset as u64, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.sim.control.write(self.addr + offset as u64, bytes).unwrap();
    }

    /// All of it is `byte`.
    pub(crate) fn is_all(&self, byte: u8) -> bool {
        self.read(0, self.len) == vec![byte; self.len]
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.len]);
    }

    pub(crate) fn request(&self, op: Op, offset: usize, remote: u64, len: usize) -> Request {
        Request { op, local: self.addr + offset as u64, remote, len: len as u64 }
    }

    pub(crate) fn lend(&self, engine: &Engine) {
        self.lend_as(engine, &RegisterOptions::default()).unwrap();
    }

    pub(crate) fn lend_as(&self, engine: &Engine, options: &RegisterOptions) -> Result<()> {
        let named = options.with_location(Location::Device(self.device));
        // SAFETY: the simulator keeps it until the test frees it, which it does last.
        unsafe { engine.register(self.addr, self.len as u64, &named) }
    }

    pub(crate) fn free(&self) {
        self.sim.control.free(self.addr).unwrap();
    }
}

/// Submits what the tests vouch for.
pub(crate) fn submit(
    segment: &Segment,
    requests: Vec<Request>,
    options: SubmitOptions,
) -> Result<Batch> {
    // SAFETY: the tests free local memory after the batch is final, or want to see what happens when not.
    unsafe { segment.submit(requests, options) }
}

/// Two engines with these settings, the second of which has opened the first.
pub(crate) struct Two {
    pub(crate) target: Engine,
    pub(crate) initiator: Engine,
    pub(crate) segment: Segment,
}

impl Two {
    pub(crate) fn new(config: &Config) -> Self {
        Self::with(config.clone(), config.clone())
    }

    pub(crate) fn with(initiator: Config, target: Config) -> Self {
        let target = engine(target);
        let initiator = engine(initiator);
        let segment = initiator.open(target.name()).unwrap();
        Self { target, initiator, segment }
    }

    /// Moves bytes and waits for the end.
    pub(crate) fn run(&self, requests: Vec<Request>) -> Result<()> {
        submit(&self.segment, requests, within(ms(20_000)))?.wait()
    }
}

/// `len` bytes that differ from place to place and from `seed` to `seed`. They are parts of one text that is made
/// once, so that 256 MiB of them cost nothing.
pub(crate) fn text(len: usize, seed: usize) -> &'static [u8] {
    /// Most tests need little of it.
    const LENS: [usize; 3] = [6 * MIB, 33 * MIB, 257 * MIB];
    static TEXTS: [OnceLock<Vec<u8>>; 3] = [const { OnceLock::new() }; 3];
    let at = 1009 * (seed % 1000);
    let which = LENS.iter().position(|most| at + len <= *most).expect("no test moves more");
    let text = TEXTS[which].get_or_init(|| written(LENS[which]));
    &text[at..][..len]
}

/// The text's beginning.
fn written(len: usize) -> Vec<u8> {
    // No multiple of a slot or a slice, so that a piece at the wrong place is a wrong piece.
    const PART: usize = MIB - 4093;
    let part = pattern(PART, 1);
    let mut text = Vec::with_capacity(len + PART);
    while text.len() < len {
        let number = text.len() as u64;
        text.extend_from_slice(&part);
        text[number as usize..][..8].copy_from_slice(&number.to_le_bytes());
    }
    text
}

/// The result of a batch, which has to come by its deadline.
pub(crate) fn end(batch: &Batch) -> Result<()> {
    batch.wait_timeout(Duration::from_secs(30)).expect("a batch is final by its deadline")
}

/// Numbers that look random and are the same in every run.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

const APART: &str = "TENSORFERRY_ENGINE_TEST";
/// A process that takes longer has hung. Some take ten seconds of a processor, and most of a minute beside others.
const LONGEST: Duration = Duration::from_secs(400);

/// Runs `body` in a process of its own, where no other test's engine finds the simulator and asks it. `path` is the
/// name of the test.
pub(crate) fn run_apart(path: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    // The binary's own name is not part of a test's name.
    let test = path.split_once("::").map_or(path, |(_, rest)| rest);
    if std::env::var(APART).as_deref() == Ok(test) {
        std::thread::spawn(|| {
            std::thread::sleep(LONGEST);
            eprintln!("it hangs");
            std::process::abort();
        });
        return body();
    }
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(APART, test)
        .envs(env.iter().copied())
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{test}: {}\n{out}\n{err}", ran.status);
    assert!(out.contains("1 passed"), "{test} did not run:\n{out}\n{err}");
}

/// A test with this body, in a process of its own; with these environment variables.
macro_rules! apart {
    ($(#[$meta:meta])* fn $name:ident($($key:ident = $value:literal),*) $body:block) => {
        $(#[$meta])*
        #[test]
        fn $name() {
            let path = concat!(module_path!(), "::", stringify!($name));
            crate::gpu_kit::run_apart(path, &[$((stringify!($key), $value)),*], || $body);
        }
    };
}
pub(crate) use apart;
