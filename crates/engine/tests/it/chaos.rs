//! Many threads, lanes that die and batches that are cancelled, all at random moments: whatever is complete is
//! right, whatever is final is at rest, and nothing is left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry::{BatchState, HostBuffer, Op};

use crate::common::{Pair, buffer, engine, eventually, lanes, ms, pattern, row, start, within};
use crate::fake::{BASE, Fake, memory};

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

const THREADS: usize = 6;
const ROUNDS: usize = 60;
/// As much as a batch writes.
const ROOM: usize = 512 << 10;

#[test]
fn cancels_at_any_moment_harm_nobody() {
    for io_threads in [1, 3] {
        let pair = Pair::with((4 << 20) + THREADS * ROUNDS * ROOM, lanes(2, io_threads));
        let whole = pattern(4 << 20, 1);
        pair.remote.write(0, &whole);
        let cancelled = AtomicU64::new(0);
        std::thread::scope(|threads| {
            for t in 0..THREADS as u64 {
                let (pair, whole, cancelled) = (&pair, &whole, &cancelled);
                threads.spawn(move || {
                    let mut dice = Dice(t + 1);
                    for i in 0..ROUNDS as u64 {
                        // READs are of what never changes, WRITEs to a place of their own: what has left of one that is
                        // cancelled may arrive at any time.
                        let mine = (4 << 20) + (t as usize * ROUNDS + i as usize) * ROOM;
                        let op = if dice.roll(2) == 0 { Op::Read } else { Op::Write };
                        let (len, count) = match dice.roll(3) {
                            0 => (1 + dice.roll(500) as usize, 200),
                            1 => (1 + dice.roll(30_000) as usize, 15),
                            _ => (1 + dice.roll(400_000) as usize, 1),
                        };
                        let bytes = pattern(len * count, i << 8 | t);
                        let local = match op {
                            Op::Read => HostBuffer::zeroed(len * count).unwrap(),
                            Op::Write => buffer(&bytes),
                        };
                        let at = if op == Op::Read { dice.roll(3 << 20) as usize } else { mine };
                        let remote = pair.remote.addr() + at as u64;
                        let requests = row(op, &local, remote, len, count);
                        let batch = pair.segment.submit_owned(&requests, within(ms(8000))).unwrap();
                        if dice.roll(2) == 0 {
                            let until = Instant::now() + Duration::from_micros(dice.roll(800));
                            while Instant::now() < until {
                                std::hint::spin_loop();
                            }
                            batch.cancel();
                            cancelled.fetch_add(1, Ordering::Relaxed);
                            assert_ne!(batch.poll(), BatchState::Running);
                            if op == Op::Read {
                                local.write(0, &vec![0x5a; len * count]);
                                let _ = pair.segment.submit_owned(&[], within(ms(1000))).unwrap();
                                assert!(local.read(0, len * count).iter().all(|b| *b == 0x5a));
                            }
                            continue;
                        }
                        batch.wait().unwrap();
                        if op == Op::Read {
                            assert!(local.read(0, len * count) == whole[at..at + len * count]);
                        } else {
                            assert!(pair.remote.read(mine, len * count) == bytes);
                        }
                    }
                });
            }
        });
        assert!(cancelled.load(Ordering::Relaxed) > 100);
        assert!(pair.remote.read(0, 4 << 20) == whole);
        let stats = pair.initiator.stats();
        assert_eq!(stats.batches_submitted, stats.batches_completed + stats.batches_failed);
        assert!(!pair.initiator.is_closed() && !pair.target.is_closed());
    }
}

#[test]
fn lanes_that_die_at_any_moment_lose_no_request() {
    for io_threads in [1, 3] {
        let lives = Arc::new(AtomicU64::new(1));
        let fake = Fake::new(move |mut link| {
            let mut dice = Dice(lives.fetch_add(0x9e37_79b9, Ordering::SeqCst));
            dice.roll(1);
            for _ in 0..dice.roll(200) {
                let Some(header) = link.header() else { return };
                if !link.answer(&header) {
                    return;
                }
            }
            let Some(header) = link.header() else { return };
            match (header.op, dice.roll(4)) {
                (Op::Write, 0) => drop(link.swallow(header.len / 2)),
                (Op::Write, 1) => drop(link.swallow(header.len)),
                (Op::Read, 0) => drop(link.send(b"\0\0\0\0VTCM")),
                (Op::Read, 1) => drop(link.send(b"\0\0\0\0VT")),
                _ => {}
            }
            if dice.roll(2) == 0 {
                link.reset();
            }
        });
        let e = engine(lanes(4, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let counts: Vec<(u64, u64)> = std::thread::scope(|threads| {
            let all: Vec<_> = (0..4_u64)
                .map(|t| {
                    let segment = &segment;
                    threads.spawn(move || {
                        let (mut dice, mut good, mut bad) = (Dice(t + 77), 0, 0);
                        for _ in 0..40 {
                            let op = if dice.roll(2) == 0 { Op::Read } else { Op::Write };
                            let (len, count) = (1 + dice.roll(3000) as usize, 50);
                            let local = HostBuffer::zeroed(len * count).unwrap();
                            let remote = BASE + dice.roll(1 << 30);
                            let requests = row(op, &local, remote, len, count);
                            let batch = segment.submit_owned(&requests, within(ms(8000))).unwrap();
                            let _ = batch.wait();
                            for i in 0..count {
                                match batch.entry(i).unwrap() {
                                    Ok(()) => {
                                        good += 1;
                                        let at = remote + (i * len) as u64;
                                        let right = memory(at, len as u64);
                                        assert!(
                                            op == Op::Write || local.read(i * len, len) == right
                                        );
                                    }
                                    Err(error) => {
                                        bad += 1;
                                        let code = if op == Op::Read { 10 } else { 11 };
                                        assert_eq!(error.code(), code, "{error}");
                                    }
                                }
                            }
                        }
                        (good, bad)
                    })
                })
                .collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let (good, bad) = counts.iter().fold((0, 0), |(g, b), n| (g + n.0, b + n.1));
        assert_eq!(good + bad, 4 * 40 * 50);
        assert!(good > 1000 && bad > 0, "{good} complete, {bad} lost");
        assert!(!e.is_closed());
        let local = HostBuffer::zeroed(1).unwrap();
        eventually("a good lane", || start(&segment, Op::Read, &local, BASE).wait().is_ok());
    }
}
