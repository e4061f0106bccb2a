//! Memory to move, wherever it is.

use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use tensorferry::gpu::{DeviceId, State};
use tensorferry::{DeviceBuffer, Engine, HostBuffer, Op, OwnedRequest, RegisterOptions, Result};

/// Where memory is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// `cpu`
    Host,
    /// `cuda:0` and the like
    Device(DeviceId),
}

/// A text that is no place.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct NoPlace;

/// Memory in one place, which the engine may be lent.
#[derive(Debug)]
pub(crate) enum Buffer {
    Host(HostBuffer),
    Device(DeviceBuffer),
}

/// Memory of the host is filled and compared in pieces that stay in the processor's cache...
pub(crate) const HOST_PIECE: usize = 32 << 10;
/// ...and memory of a device in pieces that are worth a copy by its driver.
const DEVICE_PIECE: usize = 1 << 20;

impl Buffer {
    /// # Errors
    /// No such device, or not so much memory there.
    pub(crate) fn new(engine: &Engine, place: Place, len: usize) -> Result<Self> {
        match place {
            Place::Host => HostBuffer::zeroed(len).map(Self::Host),
            Place::Device(device) => engine.device_buffer(device, len).map(Self::Device),
        }
    }

    /// As [`Buffer::new`], with an error that says what the demo's user can do.
    pub(crate) fn for_demo(engine: &Engine, place: Place, len: usize) -> anyhow::Result<Self> {
        let why = match place {
            Place::Host => "not enough memory; use smaller --sizes or --batches".to_owned(),
            Place::Device(device) => format!("no memory of {device}"),
        };
        Self::new(engine, place, len).context(why)
    }

    pub(crate) fn register(&self, engine: &Engine, options: &RegisterOptions) -> Result<()> {
        match self {
            Self::Host(buffer) => engine.register_buffer(buffer, options),
            Self::Device(buffer) => engine.register_device_buffer(buffer, options),
        }
    }

    pub(crate) fn addr(&self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.addr(),
            Self::Device(buffer) => buffer.addr(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Device(buffer) => buffer.len(),
        }
    }

    /// How many bytes are best written or read at a time.
    pub(crate) fn piece(&self) -> usize {
        match self {
            Self::Host(_) => HOST_PIECE,
            Self::Device(_) => DEVICE_PIECE,
        }
    }

    /// Copies `bytes` to `offset`; they are there when this returns.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Panics
    /// If host memory is shorter.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(buffer) => {
                buffer.write(offset, bytes);
                Ok(())
            }
            Self::Device(buffer) => buffer.write(offset, bytes),
        }
    }

    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// The device refused.
    ///
    /// # Panics
    /// If host memory is shorter.
    pub(crate) fn read_into(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(buffer) => {
                buffer.read_into(offset, bytes);
                Ok(())
            }
            Self::Device(buffer) => buffer.read_into(offset, bytes),
        }
    }

    pub(crate) fn request(
        &self,
        op: Op,
        offset: usize,
        remote: u64,
        len: usize,
    ) -> Result<OwnedRequest> {
        match self {
            Self::Host(buffer) => buffer.request(op, offset, remote, len),
            Self::Device(buffer) => buffer.request(op, offset, remote, len),
        }
    }
}

impl Place {
    /// The name of the device, if the engine has found it.
    pub(crate) fn device_name(self, engine: &Engine) -> Option<String> {
        let Self::Device(device) = self else { return None };
        let states = engine.gpus().states();
        let mut devices = states.iter().filter_map(State::ready).flat_map(|found| &found.devices);
        devices.find(|known| known.id == device)?.name.clone()
    }
}

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> std::result::Result<Self, NoPlace> {
        match text.trim() {
            "cpu" => Ok(Self::Host),
            other => other.parse().map(Self::Device).map_err(|_| NoPlace),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Device(device) => device.fmt(f),
        }
    }
}

impl fmt::Display for NoPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected cpu, or a device such as cuda:0, musa:0 or hip:0")
    }
}

impl std::error::Error for NoPlace {}

#[cfg(test)]
pub(crate) mod tests {
    use tensorferry::Config;

    use super::*;

    /// Memory of a simulated device, and the engine that it goes with; `None`, with a line that says so, where the simulator was not built.
    pub(crate) fn on_a_device(test: &str, len: usize) -> Option<(Engine, Buffer)> {
        let Some(library) = tensorferry_simgpu::library() else {
            eprintln!("skipped: the simulator was not built");
            return None;
        };
        let folder =
            std::env::temp_dir().join(format!("tensorferry-{test}-{}", std::process::id()));
        let files = tensorferry_simgpu::install(&library, &folder, &["libcuda.so.1"]).unwrap();
        let mut config = Config::default();
        config.gpu.cuda_library = files.into_iter().next();
        let engine = Engine::new("127.0.0.1", config).unwrap();
        let buffer = Buffer::new(&engine, "cuda:1".parse().unwrap(), len).unwrap();
        assert_eq!(
            "cuda:1".parse::<Place>().unwrap().device_name(&engine).unwrap(),
            "simgpu Cuda 1"
        );
        std::fs::remove_dir_all(folder).unwrap();
        Some((engine, buffer))
    }

    #[test]
    fn places_are_read_as_they_are_written() {
        for text in ["cpu", "cuda:0", "musa:3", "hip:12"] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        for text in ["", "*", "gpu:0", "cuda", "CPU"] {
            assert_eq!(text.parse::<Place>(), Err(NoPlace), "{text}");
        }
    }
}
