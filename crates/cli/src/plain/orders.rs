//! `tensorferry __plain`: the plain sockets of `scripts/compare`.
//!
//! Two such processes are an initiator and a target. Each obeys orders, one JSON object per line of stdin, and answers
//! each with a line. There is one connection at a time and one memory, and no protocol: a stream ends with its connection.

use std::io::{self, BufRead, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::stream::{self, Way};
use crate::measure::link::{read_line, write_line};
use crate::pattern::Pattern;

/// The other end is gone if it says nothing for so long.
const PATIENCE: Duration = Duration::from_secs(30);
/// What an order may ask for: bytes of memory, and round trips that are remembered.
const MOST_BYTES: usize = 8 << 30;
const MOST_PINGS: usize = 4_000_000;

/// From `scripts/compare`, on stdin. Each is answered before the next one is read.
#[derive(Clone, Copy, Debug, Deserialize)]
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
    /// Do the initiator's part, which has the clock. The connection is over then.
    Run(Work),
    /// Do the target's part.
    Serve(Work),
}

/// What moves between the ends, which are told the same.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Work {
    way: Way,
    /// Round trips of the memory; otherwise a stream of whole passes of it.
    pings: bool,
    /// Of the memory, from its first byte on.
    bytes: usize,
    /// Bytes of one call of a stream.
    chunk: usize,
    /// No pass and no ping begins later, but for the first one.
    limit_ns: u64,
    /// The most pings.
    most: usize,
    /// From one ping to the next; 0: at once.
    pace_us: u64,
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
        bytes: usize,
        wrong: Option<String>,
    },
    /// So many passes or pings have moved so many bytes.
    Moved {
        bytes: u64,
        calls: u64,
        seconds: f64,
        /// Of each ping; empty for a stream, and at the target.
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
    let mut end = End::listening()?;
    write_line(answers, &Answer::Ready { port: end.listener.local_addr()?.port() })?;
    while let Some(line) = read_line(orders)? {
        let answer = match serde_json::from_str(&line) {
            Ok(order) => end.carry_out(order).unwrap_or_else(|why| Answer::Failed {
                why: format!("{order:?}: {}", crate::chain(&why)),
            }),
            Err(why) => Answer::Failed { why: format!("this is no order: {why}") },
        };
        write_line(answers, &answer)?;
    }
    Ok(())
}

/// One end.
struct End {
    listener: TcpListener,
    stream: Option<TcpStream>,
    memory: Vec<u8>,
}

impl End {
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
            Order::Check { pattern, bytes } => {
                let mismatch = pattern.check_bytes(self.claim(bytes)?);
                Ok(Answer::Checked { bytes, wrong: mismatch.map(|m| m.to_string()) })
            }
            Order::Connect { port } => {
                let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
                self.take(stream.with_context(|| format!("nobody listens on port {port}"))?)
            }
            Order::Accept => {
                let accepted = self.listener.accept();
                let (stream, _) = accepted.context("connect the other end before this order")?;
                stream.set_nonblocking(false)?;
                self.take(stream)
            }
            Order::Run(work) => self.run(&work),
            Order::Serve(work) => self.serve(&work),
        }
    }

    fn take(&mut self, stream: TcpStream) -> Result<Answer> {
        stream::set_up(&stream, PATIENCE)?;
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
    fn parts(&mut self, work: &Work) -> Result<(TcpStream, &mut [u8])> {
        ensure!(work.chunk > 0, "chunk is at least 1");
        ensure!((1..=MOST_PINGS).contains(&work.most), "most is from 1 to {MOST_PINGS}");
        let stream = self.stream.take();
        let stream = stream.context("there is no connection: connect or accept first")?;
        Ok((stream, self.claim(work.bytes)?))
    }

    fn run(&mut self, work: &Work) -> Result<Answer> {
        let (stream, memory) = self.parts(work)?;
        let began = Instant::now();
        let mut latencies_ns = Vec::new();
        let calls = match (work.pings, work.way) {
            (true, _) => {
                latencies_ns = work.ping(&stream, memory)?;
                latencies_ns.len() as u64
            }
            (false, Way::Send) => {
                let passes = work.send(&stream, memory)?;
                stream::hear(&stream).context("no answer came")?;
                passes
            }
            (false, Way::Receive) => {
                stream::say(&stream)?;
                work.receive(&stream, memory)?
            }
        };
        Ok(work.moved(calls, began, latencies_ns))
    }

    fn serve(&mut self, work: &Work) -> Result<Answer> {
        let (stream, memory) = self.parts(work)?;
        let began = Instant::now();
        let calls = match (work.pings, work.way) {
            (true, _) => work.pong(&stream, memory)?,
            (false, Way::Send) => {
                let passes = work.receive(&stream, memory)?;
                stream::say(&stream)?;
                passes
            }
            (false, Way::Receive) => {
                stream::hear(&stream).context("no request came")?;
                work.send(&stream, memory)?
            }
        };
        Ok(work.moved(calls, began, Vec::new()))
    }
}

impl Work {
    /// Sends passes until the time is over, and ends the stream; how many.
    fn send(&self, stream: &TcpStream, memory: &[u8]) -> Result<u64> {
        let (pass, began) = (self.bytes as u64, Instant::now());
        let sent = stream::send(stream, memory, self.chunk, |sent| {
            let left = pass - sent % pass;
            let is_over = sent > 0 && left == pass && began.elapsed() >= self.limit();
            Ok(if is_over { 0 } else { left })
        })?;
        stream.shutdown(Shutdown::Write)?;
        self.passes(sent)
    }

    /// Receives passes until the stream ends; how many.
    fn receive(&self, stream: &TcpStream, memory: &mut [u8]) -> Result<u64> {
        self.passes(stream::receive(stream, memory, self.chunk, |_| Ok(u64::MAX))?)
    }

    fn passes(&self, bytes: u64) -> Result<u64> {
        let pass = self.bytes as u64;
        let (passes, rest) = (bytes / pass, bytes % pass);
        ensure!(rest == 0, "the stream ended after {rest} of {pass} bytes");
        Ok(passes)
    }

    /// How long each of the pings took.
    fn ping(&self, stream: &TcpStream, block: &mut [u8]) -> Result<Vec<u64>> {
        let began = Instant::now();
        let (mut due, mut latencies_ns) = (began, Vec::new());
        loop {
            let took = stream::ping(stream, self.way, block)?;
            let now = Instant::now();
            latencies_ns.push(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            if latencies_ns.len() >= self.most || now - began >= self.limit() {
                return Ok(latencies_ns);
            }
            if self.pace_us > 0 {
                // Late ones are not made up for: a burst would be another work.
                due = (due + Duration::from_micros(self.pace_us)).max(now);
                thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        }
    }

    /// Answers pings until the connection ends; how many.
    fn pong(&self, stream: &TcpStream, block: &mut [u8]) -> Result<u64> {
        let mut calls = 0;
        loop {
            match stream::pong(stream, self.way, block) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(calls),
                done => done?,
            }
            calls += 1;
        }
    }

    fn limit(&self) -> Duration {
        Duration::from_nanos(self.limit_ns)
    }

    fn moved(&self, calls: u64, began: Instant, latencies_ns: Vec<u64>) -> Answer {
        let seconds = began.elapsed().as_secs_f64();
        Answer::Moved { bytes: calls * self.bytes as u64, calls, seconds, latencies_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = (3 << 20) + 5;

    fn work(way: Way, pings: bool, bytes: usize) -> Work {
        let limit_ns = if pings { u64::MAX } else { 10_000_000 };
        Work { way, pings, bytes, chunk: 65536, limit_ns, most: 7, pace_us: 100 }
    }

    /// What became of `work` at the initiator and at the target: bytes, calls, latencies. The sink, to be looked at.
    fn moved(work: Work, pattern: Pattern) -> ([(u64, u64, usize); 2], End) {
        let (mut initiator, mut target) = (End::listening().unwrap(), End::listening().unwrap());
        let (bytes, is_source) = (work.bytes, work.way == Way::Send);
        for (end, is_source) in [(&mut initiator, is_source), (&mut target, !is_source)] {
            let pattern = if is_source { pattern } else { pattern.complement() };
            end.carry_out(Order::Fill { pattern, bytes }).unwrap();
        }
        let port = target.listener.local_addr().unwrap().port();
        initiator.carry_out(Order::Connect { port }).unwrap();
        target.carry_out(Order::Accept).unwrap();
        let answers = thread::scope(|scope| {
            let serving = scope.spawn(|| target.carry_out(Order::Serve(work)).unwrap());
            let ran = initiator.carry_out(Order::Run(work)).unwrap();
            [ran, serving.join().unwrap()]
        });
        let figures = answers.map(|answer| match answer {
            Answer::Moved { bytes, calls, seconds, latencies_ns } if seconds > 0.0 => {
                (bytes, calls, latencies_ns.len())
            }
            answer => panic!("{answer:?}"),
        });
        (figures, if is_source { target } else { initiator })
    }

    fn wrong(end: &mut End, pattern: Pattern, bytes: usize) -> Option<String> {
        match end.carry_out(Order::Check { pattern, bytes }).unwrap() {
            Answer::Checked { bytes: checked, wrong } => {
                assert_eq!(checked, bytes);
                wrong
            }
            answer => panic!("{answer:?}"),
        }
    }

    #[test]
    fn a_stream_moves_every_byte_in_whole_passes_either_way() {
        for way in [Way::Send, Way::Receive] {
            let pattern = Pattern::of_round(3, 1);
            let ([ran, served], mut sink) = moved(work(way, false, LEN), pattern);
            let (bytes, passes, latencies) = ran;
            assert_eq!((bytes, latencies), (passes * LEN as u64, 0));
            assert!(passes > 0);
            assert_eq!(served, ran);
            assert_eq!(wrong(&mut sink, pattern, LEN), None);
            sink.memory[LEN - 1] ^= 1;
            let said = wrong(&mut sink, pattern, LEN).unwrap();
            let expected =
                format!("1 of {LEN} bytes are wrong; the first one, at offset {},", LEN - 1);
            assert!(said.starts_with(&expected), "{said}");
        }
    }

    #[test]
    fn round_trips_move_the_payload_the_way_they_should() {
        for way in [Way::Send, Way::Receive] {
            let pattern = Pattern::of_round(3, 2);
            let ([ran, served], mut sink) = moved(work(way, true, 4096), pattern);
            assert_eq!((ran, served), ((7 * 4096, 7, 7), (7 * 4096, 7, 0)));
            assert_eq!(wrong(&mut sink, pattern, 4096), None);
        }
    }

    #[test]
    fn a_stream_that_ends_within_a_pass_is_an_error() {
        let mut end = End::listening().unwrap();
        let port = end.listener.local_addr().unwrap().port();
        let mut other = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        end.carry_out(Order::Accept).unwrap();
        other.write_all(&[0; 25]).unwrap();
        drop(other);
        let error = end.carry_out(Order::Serve(work(Way::Send, false, 10))).unwrap_err();
        assert_eq!(error.to_string(), "the stream ended after 5 of 10 bytes");
    }

    #[test]
    fn orders_that_make_no_sense_are_refused_and_the_next_one_is_obeyed() {
        let work = r#""way":"send","pings":false,"limit_ns":1,"pace_us":0"#;
        let orders = [
            "{".to_owned(),
            r#"{"order":"accept"}"#.to_owned(),
            format!(r#"{{"order":"run",{work},"bytes":10,"chunk":1,"most":1}}"#),
            format!(r#"{{"order":"serve",{work},"bytes":10,"chunk":0,"most":1}}"#),
            format!(r#"{{"order":"run",{work},"bytes":10,"chunk":1,"most":0}}"#),
            r#"{"order":"fill","bytes":0,"pattern":{"seed":1,"complement":false}}"#.to_owned(),
            r#"{"order":"fill","bytes":8,"pattern":{"seed":1,"complement":false}}"#.to_owned(),
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
            (5, "most is from 1 to"),
            (6, "bytes is from 1 to"),
        ] {
            assert!(why(n).contains(text), "{}", why(n));
        }
        assert!(matches!(said[7], Answer::Done), "{:?}", said[7]);
    }
}
