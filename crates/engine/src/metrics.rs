//! Every counter.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    (
        by peer: { $($(#[$doc:meta])* $by_peer:ident,)* }
        of the engine: { $($(#[$engine_doc:meta])* $of_engine:ident,)* }
    ) => {
        /// What an engine has done since it was made.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $by_peer: u64,)*
            $($(#[$engine_doc])* pub $of_engine: u64,)*
        }

        /// What an engine has done with one peer since it first heard of it: the part of [`Stats`] that has a peer.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct PeerCounters { $($(#[$doc])* pub $by_peer: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct Metrics { $(pub(crate) $of_engine: Counter,)* }

        #[derive(Debug, Default)]
        pub(crate) struct PeerMetrics { $(pub(crate) $by_peer: Counter,)* }

        impl Stats {
            /// Name and value of every counter.
            #[must_use]
            pub fn to_pairs(&self) -> Vec<(&'static str, u64)> {
                vec![
                    $((stringify!($by_peer), self.$by_peer),)*
                    $((stringify!($of_engine), self.$of_engine),)*
                ]
            }
        }

        impl PeerCounters {
            /// Name and value of every counter.
            #[must_use]
            pub fn to_pairs(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($by_peer), self.$by_peer),)*]
            }

            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$by_peer += other.$by_peer;)*
            }
        }

        impl Metrics {
            /// The engine's own counters, beside the sums over all peers.
            pub(crate) fn stats(&self, peers: &PeerCounters) -> Stats {
                Stats {
                    $($by_peer: peers.$by_peer,)*
                    $($of_engine: self.$of_engine.value(),)*
                }
            }
        }

        impl PeerMetrics {
            pub(crate) fn counters(&self) -> PeerCounters {
                PeerCounters { $($by_peer: self.$by_peer.value(),)* }
            }
        }
    };
}

counters! {
    by peer: {
        /// Batches submitted here.
        batches_submitted,
        /// Batches that ended with every byte in place.
        batches_completed,
        /// Batches that ended otherwise.
        batches_failed,
        /// Requests that are complete, zero-length ones among them.
        requests_completed,
        /// Requests that failed.
        requests_failed,
        /// Bytes of completed READ requests of this engine.
        bytes_read,
        /// Bytes of completed WRITE requests of this engine.
        bytes_written,
        /// Bytes that were copied within the process, because the target was this engine.
        bytes_copied_locally,
        /// Slices that a connection gave back, to be sent on another; of some of them nothing had left before.
        retries,
        /// Requests that the peer refused.
        refusals,
        /// Connections to the peer that were made.
        lanes_opened,
        /// Those of them that were made in the place of one that had closed. (Every request of protocol v1 has a
        /// connection of its own; those are not counted here.)
        reconnects,
        /// Connections to the peer that were lost.
        lanes_lost,
        /// Attempts to connect to the peer's data port that failed, at all of its addresses.
        connects_failed,
        /// Descriptors that were fetched from the peer.
        descriptors_fetched,
        /// Notifications that were delivered.
        notifications_sent,
    }
    of the engine: {
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
    }
}

#[cfg(test)]
mod tests;
