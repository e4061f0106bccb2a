//! Device memory at either end, with simulated libraries.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use tensorferry::gpu::{DeviceId, Vendor};
use tensorferry::{
    Config, DeviceBuffer, Engine, Error, HostBuffer, Op, OwnedRequest, RegisterOptions, Segment,
};
use tensorferry_simgpu::{Control, install, library};

use crate::common::{engine, ms, within};
use crate::gpu_kit::{apart, text};

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const SLOT: usize = MIB;

/// A simulated library, loaded as a framework would have it.
pub(crate) struct Sim {
    pub(crate) control: Control,
    pub(crate) file: PathBuf,
    pub(crate) vendor: Vendor,
}

impl Sim {
    /// An image of its own, of the first of `names`; the others lie beside it.
    pub(crate) fn new(vendor: Vendor, names: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = Self::folder(std::process::id(), number);
        let simulator = library().expect("cargo builds the simulator before the tests");
        let files = install(&simulator, &folder, names).expect("the target folder can be written");
        let control = Control::open(&files[0]).expect("the simulator can be opened");
        // Mapped, its file is not needed any more; and no other test finds it.
        Self { control, file: files[0].clone(), vendor }
    }

    /// Where the files of a process's image are.
    pub(crate) fn folder(process: u32, number: u32) -> PathBuf {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sim/{process}-{number}"))
    }

    pub(crate) fn device(&self, ordinal: u32) -> DeviceId {
        DeviceId::new(self.vendor, ordinal)
    }

    /// Settings with which an engine takes this library.
    pub(crate) fn config(&self) -> Config {
        self.add_to(Config::default())
    }

    pub(crate) fn add_to(&self, mut config: Config) -> Config {
        config.gpu = config.gpu.with_library(self.vendor, &self.file);
        config
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // Mapped, it works without its files. They are some megabytes, and there are hundreds of them in a run.
        let _ = self.file.parent().map(std::fs::remove_dir_all);
    }
}

/// Memory of either kind.
#[derive(Clone, Debug)]
pub(crate) enum Buffer {
    Host(HostBuffer),
    Device(DeviceBuffer),
}

impl Buffer {
    pub(crate) fn on(engine: &Engine, device: Option<DeviceId>, len: usize) -> Self {
        match device {
            None => Self::Host(HostBuffer::zeroed(len).unwrap()),
            Some(device) => Self::Device(engine.device_buffer(device, len).unwrap()),
        }
    }

    pub(crate) fn register(&self, engine: &Engine) {
        let options = RegisterOptions::default();
        match self {
            Self::Host(buffer) => engine.register_buffer(buffer, &options).unwrap(),
            Self::Device(buffer) => engine.register_device_buffer(buffer, &options).unwrap(),
        }
    }

    pub(crate) fn addr(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.addr(),
            Self::Device(buffer) => buffer.addr(),
        }
    }

    pub(crate) fn request(&self, op: Op, offset: usize, remote: u64, len: usize) -> OwnedRequest {
        match self {
            Self::Host(buffer) => buffer.request(op, offset, remote, len).unwrap(),
            Self::Device(buffer) => buffer.request(op, offset, remote, len).unwrap(),
        }
    }
}

const SIZES: [usize; 8] = [1, 511, 512, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 7, 256 * MIB];

/// A buffer of each kind at both ends.
struct Matrix<'a> {
    sim: &'a Sim,
    _target: Engine,
    segment: Segment,
    local: [Buffer; 2],
    remote: [Buffer; 2],
}

impl<'a> Matrix<'a> {
    fn new(sim: &'a Sim) -> Self {
        let (target, initiator) = (engine(sim.config()), engine(sim.config()));
        let both = |engine: &Engine| {
            [None, Some(sim.device(1))].map(|device| Buffer::on(engine, device, 256 * MIB + 1))
        };
        let (local, remote) = (both(&initiator), both(&target));
        remote.iter().for_each(|buffer| buffer.register(&target));
        let segment = initiator.open(target.name()).unwrap();
        Self { sim, _target: target, segment, local, remote }
    }

    /// Moves the first `len` bytes, and checks them and the byte behind them.
    fn check(&self, op: Op, (local, remote): (&Buffer, &Buffer), len: usize, seed: usize) {
        let bytes = text(len, seed);
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        self.put(from, 0, bytes);
        self.put(to, len, &[0xa5]);
        let request = local.request(op, 0, remote.addr(), len);
        self.segment.submit_owned(&[request], within(ms(120_000))).unwrap().wait().unwrap();
        let mut piece = vec![0; MIB];
        for (i, right) in bytes.chunks(MIB).enumerate() {
            let got = &mut piece[..right.len()];
            self.get(to, i * MIB, got);
            assert!(got == right, "{op:?} of {len} bytes, after {i} MiB");
        }
        let mut behind = [0];
        self.get(to, len, &mut behind);
        assert_eq!(behind, [0xa5], "{op:?} of {len} bytes wrote one more");
    }

    fn put(&self, buffer: &Buffer, offset: usize, bytes: &[u8]) {
        match buffer {
            Buffer::Host(buffer) => buffer.write(offset, bytes),
            Buffer::Device(buffer) => {
                self.sim.control.write(buffer.addr() + offset as u64, bytes).unwrap();
            }
        }
    }

    fn get(&self, buffer: &Buffer, offset: usize, bytes: &mut [u8]) {
        match buffer {
            Buffer::Host(buffer) => buffer.read_into(offset, bytes),
            Buffer::Device(buffer) => {
                self.sim.control.read(buffer.addr() + offset as u64, bytes).unwrap();
            }
        }
    }
}

fn every_pairing_and_size(sim: &Sim) {
    let matrix = Matrix::new(sim);
    for local in &matrix.local {
        for remote in &matrix.remote {
            for (i, len) in SIZES.into_iter().enumerate() {
                matrix.check(Op::Write, (local, remote), len, 2 * i);
                matrix.check(Op::Read, (local, remote), len, 2 * i + 1);
            }
        }
    }
    assert_eq!(sim.control.count("contexts.0"), 0, "device 0 was not used");
}

apart! {
    fn every_pairing_and_size_by_the_cuda_driver() {
        every_pairing_and_size(&Sim::new(Vendor::Cuda, &["libcuda.so.1"]));
    }
}

apart! {
    fn every_pairing_and_size_by_cuda_runtime_12() {
        every_pairing_and_size(&Sim::new(Vendor::Cuda, &["libcudart.so.12", "libcuda.so.1"]));
    }
}

apart! {
    fn every_pairing_and_size_by_cuda_runtime_13() {
        every_pairing_and_size(&Sim::new(Vendor::Cuda, &["libcudart.so.13", "libcuda.so.1"]));
    }
}

apart! {
    fn every_pairing_and_size_by_musa_5() {
        every_pairing_and_size(&Sim::new(Vendor::Musa, &["libmusart.so.5", "libmusa.so.1"]));
    }
}

apart! {
    fn every_pairing_and_size_by_hip_6() {
        every_pairing_and_size(&Sim::new(Vendor::Hip, &["libamdhip64.so.6"]));
    }
}

/// Nothing of device 0 is in use when the last clone of a buffer is gone, though its engine went first.
fn outlived(sim: &Sim) {
    const LEN: usize = 3 * MIB;
    let used = || sim.control.count("memory_used.0") as usize;
    for dropped in [false, true] {
        let first = engine(sim.config());
        let buffer = first.device_buffer(sim.device(0), LEN).unwrap();
        buffer.write(0, &[7; 4096]).unwrap();
        first.close();
        let closed = (!dropped).then_some(first);
        for result in [buffer.write(0, &[8; 4096]), buffer.read(0, 4096).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Closed), "{error}");
        }
        let clone = buffer.clone();
        drop(buffer);
        assert_eq!(used(), LEN, "the clone holds it");
        drop(clone);
        assert_eq!(used(), 0, "{:?}", sim.vendor);
        drop(closed);
    }
}

#[test]
fn device_memory_that_outlives_its_engine_is_freed() {
    outlived(&Sim::new(Vendor::Cuda, &["libcuda.so.1"]));
    outlived(&Sim::new(Vendor::Cuda, &["libcudart.so.12"]));
    outlived(&Sim::new(Vendor::Musa, &["libmusart.so.5"]));
    outlived(&Sim::new(Vendor::Hip, &["libamdhip64.so.6"]));
}
