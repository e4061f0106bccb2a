//! Two engines in one process, over loopback, and strangers at their ports.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod api;
mod asking;
mod bounds;
mod chaos;
mod common;
mod endurance;
mod fake;
mod faults;
mod forbidden;
mod gpu;
mod gpu_access;
mod gpu_counts;
mod gpu_done;
mod gpu_edges;
mod gpu_faults;
mod gpu_kit;
mod gpu_life;
mod gpu_mixed;
mod gpu_order;
mod gpu_own;
mod gpu_slow;
mod gpu_stops;
mod gpu_stuck;
mod gpu_texts;
mod gpu_v1;
mod hostile;
mod life;
mod load;
mod local;
mod logs;
mod mutated;
mod names;
mod operators;
mod own;
mod pair;
mod probes;
mod recovery;
mod relay;
mod resolver;
mod sockets;
mod stops;
mod strangers;
