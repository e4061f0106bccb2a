//! A transfer engine: READ and WRITE the registered memory of peers, in batches, over plain TCP.
//!
//! An [`Engine`] publishes the buffers that are registered with it and moves bytes between local
//! memory and the buffers of peers. It speaks the TCP protocol of existing transfer engines, so
//! either end may be one of those. It installs no signal handler, writes nothing to stderr (it logs
//! through `tracing`), and keeps no state outside its values.
//!
//! ```
//! use tensorferry::{Config, Engine, HostBuffer, Op, RegisterOptions, SubmitOptions};
//!
//! # fn main() -> tensorferry::Result<()> {
//! let target = Engine::new("127.0.0.1", Config::default())?;
//! let remote = HostBuffer::zeroed(4096)?;
//! target.register_buffer(&remote, &RegisterOptions::default())?;
//!
//! let initiator = Engine::new("127.0.0.1", Config::default())?;
//! let local = HostBuffer::zeroed(4096)?;
//! local.write(0, b"hello");
//! let segment = initiator.open(target.name())?;
//! let request = local.request(Op::Write, 0, remote.addr(), 5)?;
//! segment.submit_owned(&[request], SubmitOptions::default())?.wait()?;
//! assert_eq!(remote.read(0, 5), b"hello");
//! # Ok(())
//! # }
//! ```
#![deny(clippy::print_stderr)]

mod bind;
mod clock;
mod config;
mod control;
mod core;
mod engine;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod io;
mod local;
mod log;
#[cfg(all(loom, test))]
mod loom_models;
mod memory;
mod metrics;
mod peer;
mod peers;
mod registry;
#[cfg(test)]
mod sim;
mod staging;
mod sync;
mod tcp;
mod transfer;

/// GPU libraries and devices: what was looked for, what was found, and how it is named.
pub mod gpu {
    pub use tensorferry_gpu::{
        Api, Choice, DeviceId, DeviceInfo, Discovery, Examined, Failure, Found, GpuError, Location,
        Memory, ParseError, Settings, State, StreamHandle, Tried, Vendor, Version, Versions,
        examine,
    };
}

pub use config::{Config, ConfigError, LogLevel, Notice};
pub use engine::{Engine, Segment};
pub use error::{Error, Result, Subject};
pub use memory::{HostBuffer, OwnedRequest};
pub use metrics::{PeerCounters, Stats};
pub use peer::{LaneState, LaneStats, LastError, PeerState, PeerStats};
pub use registry::{Access, BufferInfo, RegisterOptions, Repeat};
pub use staging::DeviceBuffer;
pub use tensorferry_metadata::{
    MetadataError, MetadataServer, P2P_HANDSHAKE, PortRange, SegmentName,
};
pub use tensorferry_wire::{Notification, Op, Version, WireError};
pub use transfer::{
    Batch, BatchId, BatchState, BatchTable, Completion, OnFull, Request, SubmitOptions, UserStream,
};

/// The version of this crate, as peers are told.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
