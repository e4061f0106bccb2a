//! The control port: descriptors, notifications, probes.

mod client;
mod question;
mod server;

pub(crate) use client::{
    data_host, descriptor_question, find_data_port, notify, notify_question, probe, read_descriptor,
};
pub(crate) use question::{Failure, Question, Step};
pub(crate) use server::reply;
