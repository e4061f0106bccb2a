//! Strangers at both ports of an engine while others use it: scanners, other protocols, and those who say little.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry::{Engine, HostBuffer, Op, RegisterOptions, Segment};
use tensorferry_wire::{FrameKind, MessageType, encode_frame};

use crate::common::{Dice, alone, buffer, engine, lanes, ms, pattern, start};
use crate::fake::Raw;

const PROBES: u64 = 5000;
/// Of those, so many say a little and then nothing, and stay.
const SILENT: u64 = 300;
const CLIENTS: u64 = 2;
/// How long a stranger is waited for, and what a busy machine adds.
const PATIENCE: Duration = Duration::from_secs(5);
const SLACK: Duration = Duration::from_secs(4);
/// The stream: one WRITE, one READ of so many bytes, in each such time.
const BLOCK: usize = 128 << 10;
const BEAT: Duration = Duration::from_millis(2);
/// What is left of the stream's pace, in hundredths. It is 95 and more on a machine that has nothing else to do.
const LEAST_PACE: u64 = 60;

#[test]
fn a_stream_goes_on_among_strangers() {
    alone("probes::a_stream_among_strangers_alone");
}

#[test]
#[ignore = "needs many sockets, so it is started by itself"]
fn a_stream_among_strangers_alone() {
    let target = engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(BLOCK).unwrap();
    target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let initiator = engine(lanes(1, 1));
    let stream = Stream { segment: initiator.open(target.name()).unwrap(), memory: &memory };
    // What others do on this machine may fall into either half of a measurement.
    let kept = (0..3).map(|_| measure(&target, &stream)).find(|kept| *kept >= LEAST_PACE);
    assert!(kept.is_some(), "three times less than {LEAST_PACE} % of the stream's pace was left");
    assert_eq!(initiator.stats().lanes_lost, 0);
    initiator.probe(target.name()).unwrap();
}

/// How much is left of the stream's pace while all the probes come, in hundredths.
fn measure(target: &Engine, stream: &Stream<'_>) -> u64 {
    let alone = stream.pace_while(ms(1500), &AtomicBool::new(true));
    let bothered = AtomicBool::new(true);
    let (pace, slowest) = std::thread::scope(|threads| {
        let strangers = threads.spawn(|| {
            let slowest = all_probes(target, stream.memory.addr());
            bothered.store(false, Ordering::Relaxed);
            slowest
        });
        let pace = stream.pace_while(Duration::from_secs(60), &bothered);
        (pace, strangers.join().unwrap())
    });
    let kept = 100 * pace / alone.max(1);
    eprintln!(
        "{PROBES} probes, the slowest closed after {slowest:?}; {kept} % of the pace is left"
    );
    assert!(slowest < PATIENCE + SLACK, "a probe was closed after {slowest:?}");
    kept
}

/// Who uses the engine as it is meant to be used.
struct Stream<'m> {
    segment: Segment,
    memory: &'m HostBuffer,
}

impl Stream<'_> {
    /// Writes, reads and compares, in every beat, for so long at most; how many beats were kept, in thousandths.
    fn pace_while(&self, most: Duration, go_on: &AtomicBool) -> u64 {
        let local = HostBuffer::zeroed(BLOCK).unwrap();
        let begin = Instant::now();
        let mut done = 0;
        while go_on.load(Ordering::Relaxed) && begin.elapsed() < most {
            let bytes = pattern(BLOCK, u64::from(done));
            start(&self.segment, Op::Write, &buffer(&bytes), self.memory.addr()).wait().unwrap();
            start(&self.segment, Op::Read, &local, self.memory.addr()).wait().unwrap();
            assert!(local.read(0, BLOCK) == bytes);
            done += 1;
            let next = begin + BEAT * done;
            std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
        }
        let beats = begin.elapsed().as_micros().div_ceil(BEAT.as_micros()) as u64;
        1000 * u64::from(done) / beats.max(1)
    }
}

/// All of them; how long the slowest was kept.
fn all_probes(target: &Engine, addr: u64) -> Duration {
    let made = AtomicU64::new(SILENT);
    std::thread::scope(|threads| {
        let silent = threads.spawn(|| silent_probes(target));
        let quick: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (made, mut dice) = (&made, Dice::new(client));
                threads.spawn(move || {
                    let mut slowest = Duration::ZERO;
                    while made.fetch_add(1, Ordering::Relaxed) < PROBES {
                        slowest = slowest.max(probe(target, addr, &mut dice));
                    }
                    slowest
                })
            })
            .collect();
        quick.into_iter().chain([silent]).map(|t| t.join().unwrap()).max().unwrap()
    })
}

fn port(target: &Engine, control: bool) -> u16 {
    if control { target.control_port() } else { target.data_port() }
}

/// A few bytes of a frame, and then nothing.
fn silent_probes(target: &Engine) -> Duration {
    let open = |i: u64| {
        let mut stream = Raw::connect(port(target, i.is_multiple_of(2))).stream;
        stream.write_all(&[0, 1, 0, 0, 0, 0, 0][..1 + (i / 2) as usize % 7]).unwrap();
        (stream, Instant::now())
    };
    let streams: Vec<(TcpStream, Instant)> = (0..SILENT).map(open).collect();
    let ends = streams.into_iter().map(|(mut stream, since)| {
        until_closed(&mut stream);
        since.elapsed()
    });
    ends.max().unwrap()
}

/// One that is answered or closed as soon as it has spoken; how long that took.
fn probe(target: &Engine, addr: u64, dice: &mut Dice) -> Duration {
    let control = dice.below(2) == 0;
    let mut stream = Raw::connect(port(target, control)).stream;
    let begin = Instant::now();
    let said = sayings(control, addr, dice);
    let one_by_one = dice.below(4) == 0;
    for piece in said.chunks(if one_by_one { 1 } else { said.len() }) {
        // Who has heard enough hangs up.
        if stream.write_all(piece).is_err() {
            break;
        }
    }
    // A part of a frame, or a payload that does not come, would be waited for.
    let _ = stream.shutdown(std::net::Shutdown::Write);
    until_closed(&mut stream);
    begin.elapsed()
}

/// What strangers say, and clients who make mistakes.
fn sayings(control: bool, addr: u64, dice: &mut Dice) -> Vec<u8> {
    let random = |len: u64, dice: &mut Dice| (0..len).map(|_| dice.roll() as u8).collect();
    match dice.below(8) {
        0 => {
            b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scan\r\nAccept: */*\r\n\r\n".to_vec()
        }
        1 => {
            // The start of a TLS hello.
            let mut hello = vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03];
            hello.extend::<Vec<u8>>(random(120, dice));
            hello
        }
        2 => b"SSH-2.0-scanner\r\n".to_vec(),
        3 | 4 if control => {
            let len: u64 = dice.one_of(&[0, 1 << 62, u64::MAX, (16 << 20) + 1, 1000]);
            [&len.to_le_bytes()[..], b"\x01{\"name\":"].concat()
        }
        3 | 4 => {
            let op = dice.one_of(&[Op::Read, Op::Write]);
            Raw::header(op, addr, dice.one_of(&[0, 1 << 62, u64::MAX])).to_vec()
        }
        // As it should be.
        5 if control => encode_frame(FrameKind::Typed(MessageType::Probe), b"{}"),
        5 => Raw::header(Op::Read, addr, 1).to_vec(),
        n => random(1 + dice.below(n * 20), dice),
    }
}

/// Reads what there is until the end of the stream.
fn until_closed(stream: &mut TcpStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "not closed: {e}"),
    }
}
