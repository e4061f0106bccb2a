//! What peers were seen to send, and streams cut everywhere.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers of tests included")]

mod descriptor;
mod golden;
mod properties;
