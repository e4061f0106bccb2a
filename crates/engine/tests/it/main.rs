//! Two engines in one process, over loopback, and strangers at their ports.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod bounds;
mod chaos;
mod common;
mod fake;
mod faults;
mod gpu;
mod life;
mod load;
mod local;
mod own;
mod pair;
mod stops;
mod strangers;
