//! Which thread does IO, and how: the only room that calls socket syscalls.

mod accept;
mod ask;
mod bounds;
mod conns;
mod control;
mod descriptors;
mod lane;
mod look;
mod mailbox;
mod names;
mod offer;
mod pool;
mod serve;
mod socket;
mod thread;
mod wait;

pub(crate) use descriptors::Descriptors;
pub(crate) use lane::LaneReport;
pub(crate) use mailbox::{Command, Mailbox, prepare};
pub(crate) use names::Names;
pub(crate) use offer::Offer;
pub(crate) use pool::Pool;
pub(crate) use socket::Pulse;
#[cfg(not(test))]
pub(crate) use socket::{Listener, Socket};
pub(crate) use thread::IoThread;

// In unit tests a socket is one of the kernel's or one of the simulation's.
#[cfg(test)]
pub(crate) use {
    crate::sim::{Listener, Socket},
    conns::Event,
    socket::{Listener as KernelListener, Socket as KernelSocket},
    thread::Reactor,
};
