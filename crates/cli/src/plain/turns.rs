//! Turns that the stream itself says: the plain sockets of `tensorferry bench`.
//!
//! The initiator says what comes next in 25 bytes; then one of the two sends, and the other receives. A target makes no
//! more memory than it is allowed, whatever is asked for.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::stream::{self, Way};

/// A stream, and the memory that is sent from it and received to it.
pub(crate) struct Plain {
    stream: TcpStream,
    memory: Vec<u8>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Turn {
    pub(crate) way: Way,
    /// Chunks, each of which is answered; otherwise a stream.
    pub(crate) pings: bool,
    /// Bytes of one call, at most [`LARGEST_CHUNK`].
    pub(crate) chunk: usize,
    /// How much memory the chunks walk.
    pub(crate) footprint: u64,
    /// Bytes of a stream, or how many pings.
    pub(crate) amount: u64,
}

/// A larger block is sent in several calls.
pub(crate) const LARGEST_CHUNK: usize = 1 << 20;
/// How long a peer may take to go on.
const STALL: Duration = Duration::from_secs(10);
/// How long the target waits for the next turn.
const IDLE: Duration = Duration::from_secs(600);
const TURN_BYTES: usize = 25;

impl Plain {
    /// # Errors
    /// The socket takes no settings.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        stream::set_up(&stream, STALL)?;
        Ok(Self { stream, memory: Vec::new() })
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
        match (turn.pings, turn.way) {
            (true, way) => {
                for _ in 0..turn.amount {
                    each(stream::ping(&self.stream, way, &mut self.memory[..turn.chunk])?);
                    in_time(until)?;
                }
            }
            (false, Way::Send) => {
                self.send(turn, until)?;
                stream::hear(&self.stream)?;
            }
            (false, Way::Receive) => self.receive(turn, until)?,
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
            let turn =
                turn.ok_or_else(|| stream::invalid("what the initiator asks for is no turn"))?;
            self.lay_out(turn);
            // The initiator has the clock; a peer that stalls is what is not waited for here.
            let until = Instant::now() + IDLE;
            match (turn.pings, turn.way) {
                (true, way) => {
                    for _ in 0..turn.amount {
                        stream::pong(&self.stream, way, &mut self.memory[..turn.chunk])?;
                    }
                }
                (false, Way::Send) => {
                    self.receive(turn, until)?;
                    stream::say(&self.stream)?;
                }
                (false, Way::Receive) => self.send(turn, until)?,
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
    }

    fn send(&self, turn: Turn, until: Instant) -> io::Result<()> {
        turn.is_over(stream::send(&self.stream, &self.memory, turn.chunk, turn.more(until))?)
    }

    fn receive(&mut self, turn: Turn, until: Instant) -> io::Result<()> {
        let memory = &mut self.memory;
        turn.is_over(stream::receive(&self.stream, memory, turn.chunk, turn.more(until))?)
    }
}

fn in_time(until: Instant) -> io::Result<()> {
    if Instant::now() < until { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

impl Turn {
    /// What is left of a stream after so many bytes, as long as it is in time.
    fn more(self, until: Instant) -> impl FnMut(u64) -> io::Result<u64> {
        move |moved| in_time(until).map(|()| self.amount - moved)
    }

    fn is_over(self, moved: u64) -> io::Result<()> {
        if moved == self.amount { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn to_bytes(self) -> [u8; TURN_BYTES] {
        let way = match (self.pings, self.way) {
            (false, Way::Send) => 1,
            (false, Way::Receive) => 2,
            (true, Way::Send) => 3,
            (true, Way::Receive) => 4,
        };
        let mut bytes = [way; TURN_BYTES];
        let numbers = [self.chunk as u64, self.footprint, self.amount];
        for (place, number) in bytes[1..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: [u8; TURN_BYTES]) -> Option<Self> {
        let (pings, way) = match bytes[0] {
            1 => (false, Way::Send),
            2 => (false, Way::Receive),
            3 => (true, Way::Send),
            4 => (true, Way::Receive),
            _ => return None,
        };
        let (words, _) = bytes[1..].as_chunks::<8>();
        let [chunk, footprint, amount] = *words else { return None };
        let chunk = usize::try_from(u64::from_le_bytes(chunk)).ok()?;
        let (footprint, amount) = (u64::from_le_bytes(footprint), u64::from_le_bytes(amount));
        let sound = (1..=LARGEST_CHUNK).contains(&chunk);
        sound.then_some(Self { way, pings, chunk, footprint, amount })
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
        Turn { way, pings: false, chunk, footprint, amount }
    }

    #[test]
    fn turns_are_read_as_they_were_written() {
        for (way, pings, code) in [
            (Way::Send, false, 1),
            (Way::Receive, false, 2),
            (Way::Send, true, 3),
            (Way::Receive, true, 4),
        ] {
            let turn = Turn { pings, ..turn(way, 4095, 1 << 40, 3) };
            assert_eq!(turn.to_bytes()[0], code);
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
        for turn in [
            turn(Way::Send, 4096, 1 << 16, 1_000_003),
            turn(Way::Receive, 4095, 10_000, 1_000_003),
            turn(Way::Send, 1 << 20, 1, 5 << 20),
            Turn { pings: true, ..turn(Way::Send, 64, 64, 10) },
            Turn { pings: true, ..turn(Way::Receive, 65_536, 1 << 20, 10) },
            turn(Way::Receive, 1, 1, 0),
        ] {
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
