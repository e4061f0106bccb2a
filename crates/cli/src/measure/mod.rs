//! What is measured between two processes, and how: for whatever subcommand starts them.

pub(crate) mod figures;
pub(crate) mod link;
pub(crate) mod obey;
pub(crate) mod orders;
pub(crate) mod progress;
pub(crate) mod rounds;
pub(crate) mod row;
