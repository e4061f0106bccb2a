//! Every counter.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What an engine has done since it was made.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct Stats { $($(#[$doc])* pub $name: u64,)* }

        impl Stats {
            /// Name and value of every counter.
            #[must_use]
            pub fn to_pairs(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }

        #[derive(Debug, Default)]
        pub(crate) struct Metrics { $(pub(crate) $name: Counter,)* }

        impl Metrics {
            pub(crate) fn stats(&self) -> Stats {
                Stats { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

counters! {
    /// Batches submitted here.
    batches_submitted,
    /// Batches that ended with every byte in place.
    batches_completed,
    /// Batches that ended otherwise.
    batches_failed,
    /// Requests of completed batches, zero-length ones among them.
    requests_completed,
    /// Entries that failed.
    requests_failed,
    /// Bytes of completed READ requests of this engine.
    bytes_read,
    /// Bytes of completed WRITE requests of this engine.
    bytes_written,
    /// Bytes that were copied within the process, because the target was this engine.
    bytes_copied_locally,
    /// Slices that were sent again.
    retries,
    /// Connections to peers that were made.
    lanes_opened,
    /// Connections to peers that were lost.
    lanes_lost,
    /// Descriptors that were fetched from peers.
    descriptors_fetched,
    /// Data connections from peers.
    connections_accepted,
    /// READ requests of peers that were answered.
    served_reads,
    /// WRITE requests of peers that were applied.
    served_writes,
    /// Bytes that peers have read here.
    served_bytes_read,
    /// Bytes that peers have written here.
    served_bytes_written,
    /// Requests of peers that were refused.
    served_refusals,
    /// Notifications that arrived.
    notifications_received,
    /// Notifications that were delivered.
    notifications_sent,
}
