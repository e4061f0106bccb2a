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
//!
//! # Who does what
//!
//! | | |
//! |---|---|
//! | [`Engine`] | publishes buffers, opens peers; made from a [`Config`] |
//! | [`HostBuffer`], [`DeviceBuffer`] | memory that can be lent without `unsafe`; memory of your own is lent by [`Engine::register`] |
//! | [`Segment`] | the memory of a peer, to which [`Request`]s are submitted with [`SubmitOptions`] |
//! | [`Batch`], [`Completion`] | what has been submitted: to be waited for, awaited, or cancelled |
//! | [`Error`] | why not: to what, what happened, what to do next |
//! | [`Stats`], [`PeerStats`] | what was done, and how it stands with each peer; `docs/metrics.md` has the meanings |
//!
//! All of them may be used from any thread.
//!
//! # Waiting
//!
//! [`Segment::submit`] returns at once, unless the queue to the peer is full ([`OnFull`]). A batch ends by its deadline
//! whether anybody waits or not. [`Batch::wait`] blocks; `batch.await` does not, and needs no runtime of any kind. What asks
//! a peer something blocks until it answers or cannot: [`Engine::open`] (but not [`Engine::segment`]),
//! [`Engine::probe`], [`Segment::buffers`], [`Segment::notify`]; so does [`Engine::unregister`].
//!
//! # Compatibility
//!
//! Versions are semantic, and this is what they cover:
//!
//! - What is public and documented here keeps compiling. Options, enums and reports that may grow are
//!   `#[non_exhaustive]`. Variants of [`Error`] may get more fields: match them with `..`.
//! - [`Error::code`] and [`Error::name`] of an error stay, and a number is never used twice. Its **text may change** in any
//!   version, and so may what `Debug` shows, and the lines of the log.
//! - Names of counters, and of the variables that [`Config::from_env`] reads, stay. New ones may come, defaults may change
//!   in a minor version, and the changelog says so.
//! - On the wire, this version talks to earlier ones, and to the released engines that the README names.
//! - The oldest Rust that this builds with is `rust-version` in `Cargo.toml`. It may rise in a minor version, to one that
//!   is at least half a year old, and never in a patch.
//! - Not covered: what is hidden from this documentation, and the crates `tensorferry-wire`, `tensorferry-metadata` and
//!   `tensorferry-gpu` beyond what is exported here.
//!
//! Before 1.0, a minor version may break any of this, as Cargo takes it; the changelog says how.
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
mod spin;
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
