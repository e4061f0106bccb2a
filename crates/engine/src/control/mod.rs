//! The control port: descriptors, notifications, probes.

mod client;
mod question;
mod server;

pub(crate) use client::{
    data_host, data_route, descriptor_question, notify, notify_question, probe, read_descriptor,
};
pub(crate) use question::{Failure, Question, Step};
pub(crate) use server::reply;
