//! `tensorferry bench`: the same measurement as the demo's between any two machines, and plain sockets beside it.

mod beside;
mod card;
mod chart;
mod desk;
mod foreign;
mod initiator;
mod line;
mod peer;
mod plan;
mod port;
mod report;
mod target;

pub(crate) use initiator::run;
pub(crate) use target::serve;
