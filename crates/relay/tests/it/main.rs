//! The relay between plain sockets, and the program.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod doors;
mod ends;
mod kit;
mod pacing;
mod passing;
mod program;
