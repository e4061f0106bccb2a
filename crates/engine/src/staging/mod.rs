//! GPU memory on its way to and from sockets: a copy worker per device, and the pinned slots that
//! its copies and the sockets share.
//!
//! ```text
//! device ── copy ──► slot ── send ──► socket      outlet.rs reads ahead of a socket
//! socket ── recv ──► slot ── copy ──► device      inlet.rs follows one
//! ```
//! A slot is lent ([`Loan`]) to whoever fills or empties it, and goes back to its [`Ring`] when the
//! last of them has let go: a copy in progress holds it, so a request that fails or is cancelled
//! cannot give it to somebody else too early. What a copy touches beside the slot is held by the
//! copy as well ([`Keep`]): the batch is not final, and the buffer not unregistered, before it ends.

mod device_buffer;
mod devices;
mod fence;
mod inlet;
mod outlet;
mod path;
mod ring;
mod stager;
mod worker;

use std::sync::Arc;

use crate::error::Error;

pub use device_buffer::DeviceBuffer;
pub(crate) use devices::{Devices, Place};
pub(crate) use fence::{Gate, Word, order};
pub(crate) use inlet::{Inlet, Room};
pub(crate) use outlet::{Ahead, Outlet, Payload};
pub(crate) use path::{DevicePath, PathError};
pub(crate) use ring::{Loan, Ring, Turn};
pub(crate) use stager::{Copy, Done, Job, Keep, Stager, Way};

/// Why there is no slot, or a copy failed; shared by all that it concerns.
pub(crate) type Fault = Arc<Error>;

/// How something that waits for a slot or a copy is woken.
pub(crate) trait Bell: Send + Sync {
    /// May be called by any thread, and often.
    fn ring(&self);
    /// Whoever it woke looks now; what comes after this rings again.
    fn heard(&self) {}
}

/// A bell that unparks the thread that made it.
pub(crate) struct Alarm(std::thread::Thread);

impl Alarm {
    pub(crate) fn here() -> Arc<dyn Bell> {
        Arc::new(Self(std::thread::current()))
    }
}

impl Bell for Alarm {
    fn ring(&self) {
        self.0.unpark();
    }
}
