//! Each variant, loaded by `dlopen` under its real name, as a user's program loads it.
#![expect(unsafe_code, reason = "these tests are C callers: FFI, fork, sockets on raw addresses")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod faults;
mod gpu;
mod memory;
mod order;
mod program;
mod variants;
