//! Requests, batches, slices: what has to be moved, and what became of it.

mod batch;
mod cause;
mod completion;
mod options;
mod order;
mod spin;
mod table;

#[cfg(test)]
pub(crate) use batch::tests::batch_of;
pub use batch::{Batch, BatchState};
pub(crate) use batch::{BatchInner, FailedBatch, Held, Hold, Order, Owner, Places, Slice};
pub(crate) use cause::{Cause, Stop};
pub use completion::Completion;
pub use options::{OnFull, Request, SubmitOptions};
pub use order::UserStream;
pub(crate) use spin::Spin;
pub use table::{BatchId, BatchTable};

/// No deadline is later than this.
pub(crate) const FOREVER: std::time::Duration = std::time::Duration::from_secs(10 * 365 * 86_400);
