//! The control port: descriptors, notifications, probes.

mod client;
mod server;

pub(crate) use client::{deliver, fetch, notify, probe};
pub(crate) use server::reply;
