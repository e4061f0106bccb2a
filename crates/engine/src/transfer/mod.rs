//! Requests, batches, slices: what has to be moved, and what became of it.

mod batch;
mod cause;
mod completion;
mod inner;
mod options;
mod order;
mod slice;
mod table;

#[cfg(test)]
pub(crate) use batch::tests::batch_of;
pub use batch::{Batch, BatchState};
pub(crate) use cause::{Cause, FailedBatch, Stop};
pub use completion::Completion;
pub(crate) use inner::{BatchInner, Held, Order, Owner, Places};
pub use options::{OnFull, Request, SubmitOptions};
pub use order::UserStream;
pub(crate) use slice::{Hold, Slice};
pub use table::{BatchId, BatchTable};

/// No deadline is later than this.
pub(crate) const FOREVER: std::time::Duration = std::time::Duration::from_secs(10 * 365 * 86_400);
