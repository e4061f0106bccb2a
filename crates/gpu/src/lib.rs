//! Where a GPU is talked to: finds the vendor's library at run time, tells what an address is, and
//! gives the engine the few calls that staging needs.
//!
//! Nothing here is linked against a vendor, chosen by a feature, or able to fail a build. A library
//! that is missing, damaged, too old or without devices is a [`State`] with its reason. The crate
//! reads no environment and makes no context on a device unless it is told to; it never uses the
//! legacy default stream, and never closes a library.
//!
//! ```
//! use tensorferry_gpu::{Discovery, Location, Memory, Settings};
//!
//! let gpus = Discovery::new(Settings::default());
//! let block = vec![0_u8; 4096];
//! // "*": find out. Nothing is opened for it: a process that uses a GPU has its library mapped.
//! let memory = gpus.classify(Location::Any, block.as_ptr() as u64, 4096)?;
//! assert_eq!(memory, Memory::Host);
//! # Ok::<(), tensorferry_gpu::GpuError>(())
//! ```

mod constants;
mod cuda_driver;
mod device;
mod discovery;
mod elf;
mod error;
mod examine;
mod interface;
mod library;
mod memory;
mod place;
mod queries;
mod runtime;
mod search;
mod settings;
mod state;
mod symbols;

pub use device::{Api, DeviceId, Location, ParseError, Vendor};
pub use discovery::Discovery;
pub use error::{Failure, GpuError, Result};
pub use examine::{Examined, examine};
pub use interface::{
    Context, DeviceInfo, Entered, Event, GpuRuntime, HostFn, Pinned, RelaxedCapture, Stream,
    StreamHandle, Thread,
};
pub use memory::Memory;
pub use settings::{Choice, Settings};
pub use state::{Found, State, Tried, Version, Versions};
