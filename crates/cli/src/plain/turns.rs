//! Plain sockets: one TCP stream between the same two processes, and nothing else of the engine.
//!
//! The initiator says what comes next in 25 bytes; then one of the two sends, and the other receives, in chunks that
//! walk a memory of a given length. No syscall waits longer than [`STALL`] for a peer that does not go on.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A stream, and the memory that is sent from it and received to it.
pub(crate) struct Plain {
    stream: TcpStream,
    memory: Vec<u8>,
    at: usize,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Turn {
    pub(crate) way: Way,
    /// Bytes of one call, at most [`LARGEST_CHUNK`].
    pub(crate) chunk: usize,
    /// How much memory the chunks walk.
    pub(crate) footprint: u64,
    /// Bytes of a stream, or how many pings.
    pub(crate) amount: u64,
}

/// Who sends what.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// The initiator sends a stream, and is told when all of it is there.
    Send,
    /// The target sends a stream.
    Receive,
    /// The initiator sends a chunk, the target answers with eight bytes; again and again.
    PingSending,
    /// The initiator asks with eight bytes, the target answers with a chunk; again and again.
    PingReceiving,
}

/// A larger block is sent in several calls.
pub(crate) const LARGEST_CHUNK: usize = 1 << 20;
/// How long a peer may take to go on.
const STALL: Duration = Duration::from_secs(10);
/// How long the target waits for the next turn.
const IDLE: Duration = Duration::from_secs(600);
const TURN_BYTES: usize = 25;
const WORD: [u8; 8] = *b"received";

impl Plain {
    /// # Errors
    /// The socket takes no settings.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STALL))?;
        stream.set_write_timeout(Some(STALL))?;
        Ok(Self { stream, memory: Vec::new(), at: 0 })
    }

    /// The initiator's part of a turn; how long it took from the first byte to the last. `each` hears how long a ping took.
    ///
    /// # Errors
    /// The peer is gone, or does not go on; or it takes longer than `limit`.
    pub(crate) fn run(
        &mut self,
        turn: Turn,
        limit: Duration,
        each: &mut dyn FnMut(Duration),
    ) -> io::Result<Duration> {
        self.lay_out(turn);
        let began = Instant::now();
        let until = began + limit;
        self.stream.write_all(&turn.to_bytes())?;
        match turn.way {
            Way::Send => {
                self.send(turn, until)?;
                self.hear()?;
            }
            Way::Receive => self.receive(turn, until)?,
            Way::PingSending | Way::PingReceiving => self.ping(turn, until, each)?,
        }
        Ok(began.elapsed())
    }

    /// The target's part of all turns, until the initiator goes. At most `most` bytes of memory are made.
    ///
    /// # Errors
    /// The initiator does not go on, or said something else.
    pub(crate) fn serve(&mut self, most: u64) -> io::Result<()> {
        loop {
            let mut bytes = [0; TURN_BYTES];
            self.stream.set_read_timeout(Some(IDLE))?;
            match self.stream.read_exact(&mut bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                read => read?,
            }
            self.stream.set_read_timeout(Some(STALL))?;
            let turn = Turn::from_bytes(bytes).filter(|turn| turn.footprint <= most);
            let turn = turn.ok_or_else(|| invalid("what the initiator asks for is no turn"))?;
            self.lay_out(turn);
            // The initiator has the clock; a peer that stalls is what is not waited for here.
            let until = Instant::now() + IDLE;
            match turn.way {
                Way::Send => {
                    self.receive(turn, until)?;
                    self.stream.write_all(&WORD)?;
                }
                Way::Receive => self.send(turn, until)?,
                Way::PingSending | Way::PingReceiving => self.echo(turn)?,
            }
        }
    }

    /// Memory for a turn, each page of it written to, so that no page is first touched while the clock runs.
    fn lay_out(&mut self, turn: Turn) {
        let len = usize::try_from(turn.footprint).unwrap_or(usize::MAX).max(turn.chunk);
        if self.memory.len() != len {
            self.memory.clear();
            self.memory.shrink_to(len);
            self.memory.resize(len, 1);
        }
        self.at = 0;
    }

    fn send(&mut self, turn: Turn, until: Instant) -> io::Result<()> {
        let mut left = turn.amount;
        while left > 0 {
            let (at, len) = self.place(turn.chunk, left);
            let sent = (&self.stream).write(&self.memory[at..at + len]);
            left -= self.moved(sent)?;
            in_time(until)?;
        }
        Ok(())
    }

    fn receive(&mut self, turn: Turn, until: Instant) -> io::Result<()> {
        let mut left = turn.amount;
        while left > 0 {
            let (at, len) = self.place(turn.chunk, left);
            let received = (&self.stream).read(&mut self.memory[at..at + len]);
            left -= self.moved(received)?;
            in_time(until)?;
        }
        Ok(())
    }

    /// Where the next call reads or writes, and how much.
    fn place(&mut self, chunk: usize, left: u64) -> (usize, usize) {
        if self.at == self.memory.len() {
            self.at = 0;
        }
        let room = self.memory.len() - self.at;
        (self.at, usize::try_from(left).unwrap_or(usize::MAX).min(chunk).min(room))
    }

    fn moved(&mut self, result: io::Result<usize>) -> io::Result<u64> {
        match result {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => {
                self.at += len;
                Ok(len as u64)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(error),
        }
    }

    fn ping(
        &mut self,
        turn: Turn,
        until: Instant,
        each: &mut dyn FnMut(Duration),
    ) -> io::Result<()> {
        for _ in 0..turn.amount {
            let began = Instant::now();
            let block = &mut self.memory[..turn.chunk];
            if turn.way == Way::PingSending {
                self.stream.write_all(block)?;
                self.hear()?;
            } else {
                self.stream.write_all(&WORD)?;
                self.stream.read_exact(block)?;
            }
            each(began.elapsed());
            in_time(until)?;
        }
        Ok(())
    }

    fn echo(&mut self, turn: Turn) -> io::Result<()> {
        for _ in 0..turn.amount {
            let block = &mut self.memory[..turn.chunk];
            if turn.way == Way::PingSending {
                self.stream.read_exact(block)?;
                self.stream.write_all(&WORD)?;
            } else {
                self.stream.read_exact(&mut [0; WORD.len()])?;
                self.stream.write_all(block)?;
            }
        }
        Ok(())
    }

    fn hear(&mut self) -> io::Result<()> {
        let mut word = [0; WORD.len()];
        self.stream.read_exact(&mut word)?;
        if word == WORD { Ok(()) } else { Err(invalid("the target answered something else")) }
    }
}

fn in_time(until: Instant) -> io::Result<()> {
    if Instant::now() < until { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Turn {
    fn to_bytes(self) -> [u8; TURN_BYTES] {
        let way = match self.way {
            Way::Send => 1,
            Way::Receive => 2,
            Way::PingSending => 3,
            Way::PingReceiving => 4,
        };
        let mut bytes = [way; TURN_BYTES];
        let numbers = [self.chunk as u64, self.footprint, self.amount];
        for (place, number) in bytes[1..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: [u8; TURN_BYTES]) -> Option<Self> {
        let way = match bytes[0] {
            1 => Way::Send,
            2 => Way::Receive,
            3 => Way::PingSending,
            4 => Way::PingReceiving,
            _ => return None,
        };
        let (words, _) = bytes[1..].as_chunks::<8>();
        let [chunk, footprint, amount] = *words else { return None };
        let chunk = usize::try_from(u64::from_le_bytes(chunk)).ok()?;
        let (footprint, amount) = (u64::from_le_bytes(footprint), u64::from_le_bytes(amount));
        let sound = (1..=LARGEST_CHUNK).contains(&chunk);
        sound.then_some(Self { way, chunk, footprint, amount })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn two(most: u64) -> (Plain, JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let initiator = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (target, _) = listener.accept().unwrap();
        let serving = thread::spawn(move || Plain::new(target)?.serve(most));
        (Plain::new(initiator).unwrap(), serving)
    }

    fn turn(way: Way, chunk: usize, footprint: u64, amount: u64) -> Turn {
        Turn { way, chunk, footprint, amount }
    }

    #[test]
    fn turns_are_read_as_they_were_written() {
        for way in [Way::Send, Way::Receive, Way::PingSending, Way::PingReceiving] {
            let turn = turn(way, 4095, 1 << 40, 3);
            assert_eq!(Turn::from_bytes(turn.to_bytes()), Some(turn));
        }
        let sound = turn(Way::Send, 1, 1, 1).to_bytes();
        let mut odd = sound;
        odd[0] = 9;
        assert_eq!(Turn::from_bytes(odd), None);
        for chunk in [0, LARGEST_CHUNK + 1] {
            assert_eq!(Turn::from_bytes(turn(Way::Send, chunk, 1, 1).to_bytes()), None);
        }
    }

    #[test]
    fn both_ways_move_all_bytes_and_pings_are_counted() {
        let (mut initiator, serving) = two(1 << 20);
        let mut pings = 0;
        for (way, chunk, footprint, amount) in [
            (Way::Send, 4096, 1 << 16, 1_000_003),
            (Way::Receive, 4095, 10_000, 1_000_003),
            (Way::Send, 1 << 20, 1, 5 << 20),
            (Way::PingSending, 64, 64, 10),
            (Way::PingReceiving, 65_536, 1 << 20, 10),
            (Way::Receive, 1, 1, 0),
        ] {
            let turn = turn(way, chunk, footprint, amount);
            initiator.run(turn, LIMIT, &mut |_| pings += 1).unwrap();
        }
        assert_eq!(pings, 20);
        drop(initiator);
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn more_memory_than_there_may_be_is_refused() {
        let (mut initiator, serving) = two(1000);
        initiator.run(turn(Way::Send, 10, 1001, 10), LIMIT, &mut |_| {}).unwrap_err();
        let error = serving.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "what the initiator asks for is no turn");
    }

    #[test]
    fn what_takes_too_long_is_ended() {
        let (mut initiator, serving) = two(1 << 20);
        let forever = turn(Way::Receive, 1, 1, u64::MAX);
        let error = initiator.run(forever, Duration::from_millis(50), &mut |_| {}).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(initiator);
        serving.join().unwrap().unwrap_err();
    }
}
