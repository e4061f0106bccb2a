//! The calls: a memory that is walked, and round trips.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::time::{Duration, Instant};

use serde::Deserialize;

/// Which way the payload goes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    /// The initiator sends it, and is told when it is there.
    Send,
    /// The target sends it, when it is told to.
    Receive,
}

/// What goes the other way than the payload: a request for it, or the answer that it has arrived.
const WORD: [u8; 8] = *b"received";

/// No call waits longer than `stall` for another end that does not go on.
pub(super) fn set_up(stream: &TcpStream, stall: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(stall))?;
    stream.set_write_timeout(Some(stall))
}

/// Sends `memory` over and over, a call for each chunk; how many bytes. `more` says how many may follow so many.
pub(super) fn send(
    mut stream: &TcpStream,
    memory: &[u8],
    chunk: usize,
    more: impl FnMut(u64) -> io::Result<u64>,
) -> io::Result<u64> {
    walk(memory.len(), chunk, more, |range| stream.write(&memory[range]))
}

/// Receives into `memory` over and over, at most a chunk with each call, until no `more` is wanted or the stream ends.
pub(super) fn receive(
    mut stream: &TcpStream,
    memory: &mut [u8],
    chunk: usize,
    more: impl FnMut(u64) -> io::Result<u64>,
) -> io::Result<u64> {
    walk(memory.len(), chunk, more, |range| stream.read(&mut memory[range]))
}

fn walk(
    len: usize,
    chunk: usize,
    mut more: impl FnMut(u64) -> io::Result<u64>,
    mut call: impl FnMut(Range<usize>) -> io::Result<usize>,
) -> io::Result<u64> {
    let (mut at, mut moved) = (0, 0);
    loop {
        let left = usize::try_from(more(moved)?).unwrap_or(usize::MAX);
        if left == 0 {
            return Ok(moved);
        }
        match call(at..at + left.min(chunk).min(len - at)) {
            Ok(0) => return Ok(moved),
            Ok(bytes) => {
                at = (at + bytes) % len;
                moved += bytes as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The initiator's part of a round trip; how long it took.
pub(super) fn ping(mut stream: &TcpStream, way: Way, block: &mut [u8]) -> io::Result<Duration> {
    let began = Instant::now();
    match way {
        Way::Send => {
            stream.write_all(block)?;
            hear(stream)?;
        }
        Way::Receive => {
            say(stream)?;
            stream.read_exact(block)?;
        }
    }
    Ok(began.elapsed())
}

/// The target's part of it.
pub(super) fn pong(mut stream: &TcpStream, way: Way, block: &mut [u8]) -> io::Result<()> {
    match way {
        Way::Send => {
            stream.read_exact(block)?;
            say(stream)
        }
        Way::Receive => {
            hear(stream)?;
            stream.write_all(block)
        }
    }
}

/// Says the word.
pub(super) fn say(mut stream: &TcpStream) -> io::Result<()> {
    stream.write_all(&WORD)
}

/// Waits for it.
pub(super) fn hear(mut stream: &TcpStream) -> io::Result<()> {
    let mut word = [0; WORD.len()];
    stream.read_exact(&mut word)?;
    if word == WORD { Ok(()) } else { Err(invalid("the other end said something else")) }
}

pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_is_walked_with_a_call_for_each_chunk() {
        let mut calls = Vec::new();
        let call = |range: Range<usize>| {
            calls.push(range.clone());
            Ok(range.len())
        };
        assert_eq!(walk(10, 4, |moved| Ok(25 - moved), call).unwrap(), 25);
        assert_eq!(calls, [0..4, 4..8, 8..10, 0..4, 4..8, 8..10, 0..4, 4..5]);
    }

    #[test]
    fn a_call_that_moves_less_is_followed_by_one_from_there_until_the_stream_ends() {
        let (mut calls, mut said) = (Vec::new(), vec![Ok(0), Ok(1), Err(()), Ok(3)]);
        let call = |range: Range<usize>| {
            calls.push(range);
            said.pop().unwrap().map_err(|()| io::ErrorKind::Interrupted.into())
        };
        assert_eq!(walk(10, 4, |_| Ok(u64::MAX), call).unwrap(), 4);
        assert_eq!(calls, [0..4, 3..7, 3..7, 4..8]);
    }
}
