//! Plain sockets: what a TCP stream moves without an engine, which engines are held against.
//!
//! One stream of blocking calls between two processes walks a memory in chunks, or sends a chunk to and fro. Ends take
//! turns that the stream itself says ([`Plain`], beside `tensorferry bench`), or obey orders ([`serve`], for
//! `scripts/compare`).

mod orders;
mod stream;
mod turns;

pub(crate) use orders::serve;
pub(crate) use stream::Way;
pub(crate) use turns::{LARGEST_CHUNK, Plain, Turn};
