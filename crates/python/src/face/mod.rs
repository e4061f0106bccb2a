//! `tensorferry` itself, the pythonic face: objects that lend their memory, exceptions, `await`.
//!
//! It has the same engine underneath as the drop-in, and shares its rooms: arguments, waiting, the ends of engines.

mod buffer;
mod dlpack;
mod engine;
mod error;
mod kept;
mod loops;
mod options;
mod registration;
mod segment;
mod settings;
mod transfer;
mod values;

pub(crate) use engine::Engine;
pub(crate) use error::raise;
pub(crate) use kept::{forget as forget_kept, sweep as sweep_kept};
pub(crate) use loops::Wakeups;
pub(crate) use registration::Registration;
pub(crate) use segment::Segment;
pub(crate) use transfer::Transfer;
pub(crate) use values::{Buffer, Notification};
