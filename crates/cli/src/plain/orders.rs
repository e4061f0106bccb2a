//! `tensorferry __plain`: what sockets alone move, which `scripts/compare` holds engines against.
//!
//! Two such processes are an initiator and a target. Each obeys orders, one JSON object per line of stdin, and answers
//! each with a line. There is one connection at a time, one buffer, blocking calls, and no protocol: a stream ends with
//! its connection.

use std::io::{self, BufRead, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::cpu;
use crate::pattern::Pattern;

/// What goes the other way than the payload: a request for it, or the answer that it has arrived.
const TOKEN: [u8; 8] = *b"received";
/// The other end is gone if it says nothing for so long.
const PATIENCE: Duration = Duration::from_secs(30);
/// What an order may ask for: bytes of memory, and round trips that are remembered.
const MOST_BYTES: usize = 8 << 30;
const MOST_CALLS: usize = 4_000_000;

/// From `scripts/compare`, on stdin. Each is answered before the next one is read.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(tag = "order", rename_all = "snake_case")]
enum Order {
    /// Fill the first bytes of your memory.
    Fill { pattern: Pattern, bytes: usize },
    /// Compare the first bytes of your memory, each of them.
    Check { pattern: Pattern, bytes: usize },
    /// Connect to the other process.
    Connect { port: u16 },
    /// Take the connection that the other process has made.
    Accept,
    /// Send these bytes of memory over and over, whole passes only, until the time is over; then end the stream.
    ///
    /// With the clock (a WRITE) begin at once and wait for the answer; without it (a READ) wait for the request.
    Send { bytes: usize, chunk: usize, seconds: f64, clock: bool },
    /// Receive into these bytes of memory over and over until the stream ends.
    Receive { bytes: usize, chunk: usize, clock: bool },
    /// Send the payload and wait for the answer, or ask for the payload and wait for it; again and again.
    Ping { write: bool, bytes: usize, seconds: f64, most: usize, pace_us: u64 },
    /// The other side of that, until the connection ends.
    Pong { write: bool, bytes: usize },
}

/// To `scripts/compare`, on stdout.
#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
enum Answer {
    /// The first line, said without being asked.
    Ready {
        port: u16,
    },
    Done,
    /// The memory was compared; what is wrong with it, if anything.
    Checked {
        bytes: u64,
        wrong: Option<String>,
    },
    /// Payload has moved.
    Moved {
        bytes: u64,
        calls: u64,
        seconds: f64,
        cpu_seconds: f64,
        /// Of each round trip; empty for a stream.
        latencies_ns: Vec<u64>,
    },
    /// The order could not be understood or obeyed.
    Failed {
        why: String,
    },
}

/// Obeys orders until stdin ends.
pub(crate) fn serve() -> Result<()> {
    obey(&mut io::stdin().lock(), &mut io::stdout())
}

fn obey(orders: &mut dyn BufRead, answers: &mut dyn Write) -> Result<()> {
    let mut plain = Plain::listening()?;
    say(answers, &Answer::Ready { port: plain.listener.local_addr()?.port() })?;
    for line in orders.lines() {
        let answer = match serde_json::from_str(&line?) {
            Ok(order) => plain.carry_out(order).unwrap_or_else(|why| Answer::Failed {
                why: format!("{order:?}: {}", crate::chain(&why)),
            }),
            Err(why) => Answer::Failed { why: format!("this is no order: {why}") },
        };
        say(answers, &answer)?;
    }
    Ok(())
}

fn say(answers: &mut dyn Write, answer: &Answer) -> Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    answers.write_all(&line)?;
    Ok(answers.flush()?)
}

/// One end.
struct Plain {
    listener: TcpListener,
    stream: Option<TcpStream>,
    memory: Vec<u8>,
}

impl Plain {
    fn listening() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .context("no port of 127.0.0.1 can be listened on")?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, stream: None, memory: Vec::new() })
    }

    fn carry_out(&mut self, order: Order) -> Result<Answer> {
        match order {
            Order::Fill { pattern, bytes } => {
                pattern.make(0, self.claim(bytes)?);
                Ok(Answer::Done)
            }
            Order::Check { pattern, bytes } => self.check(pattern, bytes),
            Order::Connect { port } => {
                let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
                self.take(stream.with_context(|| format!("nobody listens on port {port}"))?)
            }
            Order::Accept => {
                let accepted = self.listener.accept();
                let (stream, _) = accepted.context("connect the other end before this order")?;
                self.take(stream)
            }
            Order::Send { bytes, chunk, seconds, clock } => {
                self.send(bytes, chunk, duration(seconds)?, clock)
            }
            Order::Receive { bytes, chunk, clock } => self.receive(bytes, chunk, clock),
            Order::Ping { write, bytes, seconds, most, pace_us } => {
                ensure!((1..=MOST_CALLS).contains(&most), "most is from 1 to {MOST_CALLS}");
                let rhythm = Rhythm { limit: duration(seconds)?, most, pace_us };
                self.ping(write, bytes, &rhythm)
            }
            Order::Pong { write, bytes } => self.pong(write, bytes),
        }
    }

    fn take(&mut self, stream: TcpStream) -> Result<Answer> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        self.stream = Some(stream);
        Ok(Answer::Done)
    }

    /// The first bytes of the memory, which has at least so many from now on.
    fn claim(&mut self, bytes: usize) -> Result<&mut [u8]> {
        ensure!((1..=MOST_BYTES).contains(&bytes), "bytes is from 1 to {MOST_BYTES}");
        if self.memory.len() < bytes {
            self.memory = vec![0; bytes];
        }
        Ok(&mut self.memory[..bytes])
    }

    /// The connection, of which nothing is left when the order is carried out; and the memory.
    fn parts(&mut self, bytes: usize) -> Result<(TcpStream, &mut [u8])> {
        let stream =
            self.stream.take().context("there is no connection: connect or accept first")?;
        Ok((stream, self.claim(bytes)?))
    }

    fn check(&mut self, pattern: Pattern, bytes: usize) -> Result<Answer> {
        let mut expected = vec![0; 1 << 20];
        let mut wrong = None;
        for (n, piece) in self.claim(bytes)?.chunks(1 << 20).enumerate() {
            let expected = &mut expected[..piece.len()];
            pattern.make(n << 20, expected);
            if piece != expected && wrong.is_none() {
                let first = expected.iter().zip(piece).position(|(e, f)| e != f).unwrap_or(0);
                wrong = Some(format!("the first wrong byte is at {}", (n << 20) + first));
            }
        }
        Ok(Answer::Checked { bytes: bytes as u64, wrong })
    }

    fn send(&mut self, bytes: usize, chunk: usize, limit: Duration, clock: bool) -> Result<Answer> {
        ensure!(chunk > 0, "chunk is at least 1");
        let (mut stream, memory) = self.parts(bytes)?;
        if !clock {
            stream.read_exact(&mut [0; TOKEN.len()]).context("no request came")?;
        }
        let meter = Meter::start();
        let mut passes = 0;
        loop {
            for piece in memory.chunks(chunk) {
                stream.write_all(piece)?;
            }
            passes += 1;
            if meter.began.elapsed() >= limit {
                break;
            }
        }
        stream.shutdown(Shutdown::Write)?;
        if clock {
            stream.read_exact(&mut [0; TOKEN.len()]).context("no answer came")?;
        }
        Ok(meter.stop(passes * bytes as u64, passes, Vec::new()))
    }

    fn receive(&mut self, bytes: usize, chunk: usize, clock: bool) -> Result<Answer> {
        ensure!(chunk > 0, "chunk is at least 1");
        let (mut stream, memory) = self.parts(bytes)?;
        let meter = Meter::start();
        if clock {
            stream.write_all(&TOKEN)?;
        }
        let (mut at, mut passes) = (0, 0);
        loop {
            let end = bytes.min(at + chunk);
            let received = stream.read(&mut memory[at..end])?;
            if received == 0 {
                break;
            }
            at += received;
            if at == bytes {
                (at, passes) = (0, passes + 1);
            }
        }
        ensure!(at == 0, "the stream ended after {at} of {bytes} bytes");
        if !clock {
            stream.write_all(&TOKEN)?;
        }
        Ok(meter.stop(passes * bytes as u64, passes, Vec::new()))
    }

    fn ping(&mut self, write: bool, bytes: usize, rhythm: &Rhythm) -> Result<Answer> {
        let (mut stream, memory) = self.parts(bytes)?;
        let mut token = TOKEN;
        let meter = Meter::start();
        let mut latencies_ns = Vec::new();
        let mut due = meter.began;
        loop {
            let called = Instant::now();
            if write {
                stream.write_all(memory)?;
                stream.read_exact(&mut token)?;
            } else {
                stream.write_all(&token)?;
                stream.read_exact(memory)?;
            }
            let took = called.elapsed();
            latencies_ns.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            if latencies_ns.len() >= rhythm.most || meter.began.elapsed() >= rhythm.limit {
                break;
            }
            if rhythm.pace_us > 0 {
                // Late ones are not made up for: a burst would be another work.
                due = (due + Duration::from_micros(rhythm.pace_us)).max(called + took);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
        let calls = latencies_ns.len() as u64;
        Ok(meter.stop(calls * bytes as u64, calls, latencies_ns))
    }

    fn pong(&mut self, write: bool, bytes: usize) -> Result<Answer> {
        let (mut stream, memory) = self.parts(bytes)?;
        let mut token = TOKEN;
        let meter = Meter::start();
        let mut calls = 0;
        loop {
            let asked = if write { &mut *memory } else { &mut token[..] };
            match stream.read_exact(asked) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                done => done?,
            }
            stream.write_all(if write { &token[..] } else { &*memory })?;
            calls += 1;
        }
        Ok(meter.stop(calls * bytes as u64, calls, Vec::new()))
    }
}

/// How long, how many and how often.
struct Rhythm {
    limit: Duration,
    most: usize,
    /// From one call to the next; 0: at once.
    pace_us: u64,
}

/// Time and processor time of what is measured.
struct Meter {
    began: Instant,
    cpu: Duration,
}

impl Meter {
    fn start() -> Self {
        Self { began: Instant::now(), cpu: cpu::process_time() }
    }

    fn stop(&self, bytes: u64, calls: u64, latencies_ns: Vec<u64>) -> Answer {
        Answer::Moved {
            bytes,
            calls,
            seconds: self.began.elapsed().as_secs_f64(),
            cpu_seconds: (cpu::process_time() - self.cpu).as_secs_f64(),
            latencies_ns,
        }
    }
}

fn duration(seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(limit) if limit <= Duration::from_secs(3600) => Ok(limit),
        _ => bail!("seconds is from 0 to 3600, not {seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LEN: usize = (3 << 20) + 5;

    /// Two ends that are connected; the first has the pattern, the second its complement.
    fn connected(pattern: Pattern, bytes: usize) -> (Plain, Plain) {
        let (mut one, mut other) = (Plain::listening().unwrap(), Plain::listening().unwrap());
        one.carry_out(Order::Fill { pattern, bytes }).unwrap();
        other.carry_out(Order::Fill { pattern: pattern.complement(), bytes }).unwrap();
        let port = one.listener.local_addr().unwrap().port();
        other.carry_out(Order::Connect { port }).unwrap();
        one.carry_out(Order::Accept).unwrap();
        (one, other)
    }

    fn both(one: (&mut Plain, Order), other: (&mut Plain, Order)) -> [Answer; 2] {
        thread::scope(|scope| {
            let first = scope.spawn(|| one.0.carry_out(one.1).unwrap());
            let second = other.0.carry_out(other.1).unwrap();
            [first.join().unwrap(), second]
        })
    }

    fn wrong(plain: &mut Plain, pattern: Pattern, bytes: usize) -> Option<String> {
        match plain.carry_out(Order::Check { pattern, bytes }).unwrap() {
            Answer::Checked { bytes: checked, wrong } => {
                assert_eq!(checked, bytes as u64);
                wrong
            }
            answer => panic!("{answer:?}"),
        }
    }

    fn moved(answer: &Answer) -> (u64, u64, usize) {
        match answer {
            Answer::Moved { bytes, calls, seconds, latencies_ns, .. } => {
                assert!(*seconds > 0.0);
                (*bytes, *calls, latencies_ns.len())
            }
            answer => panic!("{answer:?}"),
        }
    }

    #[test]
    fn a_stream_moves_every_byte_in_whole_passes_either_way() {
        for clock_at_sender in [true, false] {
            let pattern = Pattern::of_round(3, 1);
            let (mut sender, mut receiver) = connected(pattern, LEN);
            assert!(wrong(&mut receiver, pattern, LEN).is_some());
            let answers = both(
                (
                    &mut sender,
                    Order::Send { bytes: LEN, chunk: 65536, seconds: 0.01, clock: clock_at_sender },
                ),
                (
                    &mut receiver,
                    Order::Receive { bytes: LEN, chunk: 65536, clock: !clock_at_sender },
                ),
            );
            let (bytes, passes, latencies) = moved(&answers[0]);
            assert_eq!((bytes, latencies), (passes * LEN as u64, 0));
            assert!(passes > 0);
            assert_eq!(moved(&answers[1]), (bytes, passes, 0));
            assert_eq!(wrong(&mut receiver, pattern, LEN), None);
            receiver.memory[LEN - 1] ^= 1;
            let said = wrong(&mut receiver, pattern, LEN).unwrap();
            assert_eq!(said, format!("the first wrong byte is at {}", LEN - 1));
        }
    }

    #[test]
    fn round_trips_move_the_payload_the_way_they_should() {
        for write in [true, false] {
            let pattern = Pattern::of_round(3, 2);
            let (mut full, mut empty) = connected(pattern, 4096);
            let ping = Order::Ping { write, bytes: 4096, seconds: 30.0, most: 7, pace_us: 100 };
            let pong = Order::Pong { write, bytes: 4096 };
            let answers = if write {
                both((&mut full, ping), (&mut empty, pong))
            } else {
                both((&mut full, pong), (&mut empty, ping))
            };
            let initiator = usize::from(!write);
            assert_eq!(moved(&answers[initiator]), (7 * 4096, 7, 7));
            assert_eq!(moved(&answers[1 - initiator]), (7 * 4096, 7, 0));
            assert_eq!(wrong(&mut empty, pattern, 4096), None);
        }
    }

    #[test]
    fn orders_that_make_no_sense_are_refused_and_the_next_one_is_obeyed() {
        let orders = [
            "{",
            r#"{"order":"accept"}"#,
            r#"{"order":"receive","bytes":10,"chunk":1,"clock":true}"#,
            r#"{"order":"send","bytes":10,"chunk":0,"seconds":1,"clock":true}"#,
            r#"{"order":"send","bytes":10,"chunk":1,"seconds":-1,"clock":true}"#,
            r#"{"order":"fill","bytes":0,"pattern":{"seed":1,"complement":false}}"#,
            r#"{"order":"fill","bytes":8,"pattern":{"seed":1,"complement":false}}"#,
        ];
        let mut answers = Vec::new();
        obey(&mut orders.join("\n").as_bytes(), &mut answers).unwrap();
        let said = String::from_utf8(answers).unwrap();
        let said: Vec<Answer> =
            said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let why = |n: usize| match &said[n] {
            Answer::Failed { why } => why.as_str(),
            answer => panic!("{answer:?}"),
        };
        assert!(matches!(said[0], Answer::Ready { port: 1.. }), "{:?}", said[0]);
        for (n, text) in [
            (1, "this is no order"),
            (2, "connect the other end before this order"),
            (3, "there is no connection"),
            (4, "chunk is at least 1"),
            (5, "seconds is from 0 to 3600"),
            (6, "bytes is from 1 to"),
        ] {
            assert!(why(n).contains(text), "{}", why(n));
        }
        assert!(matches!(said[7], Answer::Done), "{:?}", said[7]);
    }
}
