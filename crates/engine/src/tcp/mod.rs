//! The data plane as state machines: no IO, no clock. `io/` moves bytes for them.

mod lane;
mod send;
mod serve;

pub(crate) use lane::{Cost, Ending, Lane, LaneFault, Room};
pub(crate) use send::SendHalf;
#[cfg(any(test, fuzzing))]
pub(crate) use serve::status_frame;
pub(crate) use serve::{Direct, Refusal, Rules, Serve, ServeFault, Served};

/// The most user memory that one syscall moves: a page fault there stalls only so much.
pub(crate) const MAX_CALL_BYTES: u64 = 1 << 20;
/// The most pieces that one syscall takes.
pub(crate) const MAX_CALL_SPANS: usize = 1024;
