//! What operators see: counters that add up, how the engine stands with each peer, and what is forgotten.

use std::net::Shutdown;
use std::sync::atomic::{AtomicU64, Ordering};

use tensorferry::{
    BatchId, Engine, HostBuffer, LaneState, LaneStats, Op, PeerCounters, PeerState, PeerStats,
    RegisterOptions, Version,
};
use tensorferry_wire::Status;

use crate::common::{Pair, alone, buffer, engine, eventually, lanes, ms, row, start, within};
use crate::fake::{BASE, Fake, Gate, Link, done};
use crate::faults::dead_port;

/// What is known of a peer, its lanes included: a thread that the machine does not let answer in time leaves them out.
fn peer(e: &Engine, name: &str) -> PeerStats {
    let mut found = None;
    eventually("its lanes are known", || {
        found = e.peers().into_iter().find(|p| *p.name == *name);
        found.as_ref().expect("it is known").lanes_known
    });
    found.unwrap()
}

/// The counters of `peers` together are the engine's.
fn add_up(e: &Engine) {
    let peers = e.peers();
    let all = e.stats().to_pairs();
    for (i, (name, _)) in PeerCounters::default().to_pairs().into_iter().enumerate() {
        let sum: u64 = peers.iter().map(|p| p.counters.to_pairs()[i].1).sum();
        let total = all.iter().find(|pair| pair.0 == name).unwrap().1;
        assert_eq!(sum, total, "{name}");
    }
}

/// The counters that are not zero.
fn counted(counters: &PeerCounters) -> Vec<(&'static str, u64)> {
    counters.to_pairs().into_iter().filter(|(_, n)| *n > 0).collect()
}

/// Serves fifty requests, takes one more and hangs up.
fn fifty(mut link: Link) {
    for _ in 0..50 {
        let Some(header) = link.header() else { return };
        link.answer(&header);
    }
    link.header();
}

#[test]
fn the_counters_of_1234_transfers_are_exact() {
    let (good, fickle, strict) = (Fake::new(|mut l| l.serve()), Fake::new(fifty), Pair::new(4096));
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(6400).unwrap();
    let segment = e.open(&good.name()).unwrap();
    for _ in 0..10 {
        let requests = row(Op::Write, &local, BASE, 64, 100);
        segment.submit_owned(&requests, within(ms(8000))).unwrap().wait().unwrap();
    }
    let segment = e.open(&fickle.name()).unwrap();
    let small = HostBuffer::zeroed(100).unwrap();
    for _ in 0..200 {
        start(&segment, Op::Read, &small, BASE).wait().unwrap();
    }
    e.register_buffer(&local, &RegisterOptions::default()).unwrap();
    let segment = e.open(e.name()).unwrap();
    for _ in 0..20 {
        start(&segment, Op::Write, &small, local.addr()).wait().unwrap();
    }
    let segment = e.open(strict.target.name()).unwrap();
    start(&segment, Op::Write, &small, strict.remote.addr()).wait().unwrap();
    for _ in 0..13 {
        assert_eq!(start(&segment, Op::Read, &small, 16).wait().unwrap_err().code(), 9);
    }

    let of_good = [
        ("batches_submitted", 10),
        ("batches_completed", 10),
        ("requests_completed", 1000),
        ("bytes_written", 64_000),
        ("lanes_opened", 1),
        ("descriptors_fetched", 1),
    ];
    assert_eq!(counted(&peer(&e, &good.name()).counters), of_good);
    let of_fickle = [
        ("batches_submitted", 200),
        ("batches_completed", 200),
        ("requests_completed", 200),
        ("bytes_read", 20_000),
        ("retries", 3),
        ("lanes_opened", 4),
        ("reconnects", 3),
        ("lanes_lost", 3),
        ("descriptors_fetched", 1),
    ];
    assert_eq!(counted(&peer(&e, &fickle.name()).counters), of_fickle);
    let own = peer(&e, e.name());
    let of_own = [
        ("batches_submitted", 20),
        ("batches_completed", 20),
        ("requests_completed", 20),
        ("bytes_written", 2000),
        ("bytes_copied_locally", 2000),
    ];
    assert_eq!((own.state, counted(&own.counters)), (PeerState::Local, of_own.to_vec()));
    let strict = peer(&e, strict.target.name());
    let of_strict = [
        ("batches_submitted", 14),
        ("batches_completed", 1),
        ("batches_failed", 13),
        ("requests_completed", 1),
        ("requests_failed", 13),
        ("bytes_written", 100),
        ("lanes_opened", 1),
        ("descriptors_fetched", 14),
    ];
    assert_eq!(counted(&strict.counters), of_strict);
    let last = strict.last_error.unwrap();
    assert_eq!(last.code, 9);
    assert!(last.text.contains("READ of 100 bytes from 0x10"), "{}", last.text);
    let all = e.stats();
    assert_eq!(all.requests_completed + all.requests_failed, 1234);
    add_up(&e);
}

#[test]
fn counters_add_up_though_lanes_die_and_batches_are_cancelled() {
    let lives = AtomicU64::new(0);
    let fakes: [Fake; 2] = {
        let behave = |seed: u64| {
            move |mut link: Link| {
                for _ in 0..(link.number as u64 * 37 + seed) % 120 {
                    let Some(header) = link.header() else { return };
                    if !link.answer(&header) {
                        return;
                    }
                }
                link.header();
            }
        };
        [Fake::new(behave(60)), Fake::new(behave(1))]
    };
    let gone = format!("127.0.0.1:{}", dead_port());
    let e = engine(lanes(3, 2));
    let names = [fakes[0].name(), fakes[1].name(), gone, e.name().to_owned()];
    std::thread::scope(|threads| {
        for t in 0..6_usize {
            let (e, names, lives) = (&e, &names, &lives);
            threads.spawn(move || {
                for i in 0..30_usize {
                    let segment = e.segment(&names[(t + i) % names.len()]).unwrap();
                    let local = HostBuffer::zeroed(40 * 200).unwrap();
                    let op = if i % 2 == 0 { Op::Read } else { Op::Write };
                    let requests = row(op, &local, BASE, 200, 40);
                    let batch = segment.submit_owned(&requests, within(ms(8000))).unwrap();
                    if i % 5 == 0 {
                        batch.cancel();
                    }
                    drop(batch.wait());
                    lives.fetch_add(40, Ordering::Relaxed);
                }
            });
        }
    });
    let all = e.stats();
    assert_eq!(all.batches_submitted, 180);
    assert_eq!(all.batches_completed + all.batches_failed, 180);
    assert_eq!(all.requests_completed + all.requests_failed, lives.load(Ordering::Relaxed));
    assert!(all.retries > 0 && all.lanes_lost > 0 && all.requests_failed > 0, "{all:?}");
    eventually("the last lanes have come to rest", || {
        let before = e.stats();
        e.peers().iter().all(|p| p.requests_running == 0 && p.requests_queued == 0)
            && before == e.stats()
    });
    add_up(&e);
}

#[test]
fn what_waits_and_what_is_in_flight_is_seen() {
    let fake = Fake::new(|mut link| link.hang());
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(40 << 20).unwrap();
    let segment = e.open(&fake.name()).unwrap();
    assert_eq!(peer(&e, &fake.name()).state, PeerState::Idle);
    let requests = row(Op::Write, &local, BASE, 2 << 20, 20);
    let batch = segment.submit_owned(&requests, within(ms(30_000))).unwrap();
    let mut p = peer(&e, &fake.name());
    eventually("the window is full", || {
        p = peer(&e, &fake.name());
        p.lanes.first().is_some_and(|lane| lane.bytes_in_flight == 8 << 20)
    });
    assert_eq!((p.state, p.lanes_known, p.lanes.len()), (PeerState::Connected, true, 1));
    assert_eq!((p.requests_running, p.batches_queued), (20, 1));
    assert_eq!(p.bytes_queued, 32 << 20);
    assert_eq!(p.requests_queued, 16);
    assert!(p.descriptor_age.is_some() && p.last_error.is_none());
    let lane = &p.lanes[0];
    assert_eq!((lane.version, lane.slices_in_flight, lane.io_thread), (Version::V2, 8, 0));
    assert_eq!((lane.slices_done, lane.bytes_done, lane.closing), (0, 0, None));
    eventually("it is called stalled", || {
        let stalled = |lane: &LaneStats| {
            lane.state == LaneState::Stalled
                && lane.slices_in_flight > 0
                && lane.quiet_for >= ms(900)
        };
        peer(&e, &fake.name()).lanes.iter().any(stalled)
    });
    batch.cancel();
    let p = peer(&e, &fake.name());
    assert_eq!((p.requests_running, p.batches_queued, p.bytes_queued), (0, 0, 0));
    assert!(p.last_error.is_none(), "who cancels has no trouble");
}

#[test]
fn how_a_peer_can_be_reached_is_seen() {
    let (go, quiet) = (Gate::default(), Fake::new(|mut link| link.serve()));
    quiet.hush({
        let go = go.clone();
        move || {
            go.wait();
            false
        }
    });
    let good = Fake::new(|mut link| link.serve());
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(64).unwrap();
    let segment = e.segment(&quiet.name()).unwrap();
    let state = |name: &str| peer(&e, name).state;
    assert_eq!(state(&quiet.name()), PeerState::Unknown);
    let waiting = start(&segment, Op::Write, &local, BASE);
    assert_eq!(state(&quiet.name()), PeerState::Resolving);
    go.open();
    waiting.wait().unwrap();
    let segment = e.open(&good.name()).unwrap();
    start(&segment, Op::Write, &local, BASE).wait().unwrap();
    assert_eq!(state(&good.name()), PeerState::Connected);
    let p = peer(&e, &good.name());
    eventually("its lane is idle", || peer(&e, &good.name()).lanes[0].state == LaneState::Idle);
    assert_eq!((p.lanes[0].slices_done, p.lanes[0].bytes_done), (1, 64));
    let gone = format!("127.0.0.1:{}", dead_port());
    assert_eq!(e.open(&gone).unwrap_err().code(), 7);
    let p = peer(&e, &gone);
    assert_eq!(p.state, PeerState::Unreachable);
    let last = p.last_error.unwrap();
    assert!(last.code == 7 && last.text.contains(&gone) && last.age < ms(8000), "{last:?}");
    e.close();
    assert!(e.peers().iter().all(|p| p.lanes.is_empty()), "a closed engine has none");
}

#[test]
fn names_that_do_not_answer_are_forgotten() {
    alone("operators::ten_thousand_names");
}

/// Resident memory in KiB, threads and descriptors of this process.
fn process() -> (u64, usize, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    let resident = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    (resident, count("task"), count("fd"))
}

#[test]
#[ignore = "run by `names_that_do_not_answer_are_forgotten`, in a process of its own"]
fn ten_thousand_names() {
    let [held, other, seen] = [0; 3].map(|_| Fake::new(|mut link| link.serve()));
    let e = engine(lanes(2, 2));
    let local = HostBuffer::zeroed(64).unwrap();
    let port = dead_port();
    let ask = |from: usize, to: usize| {
        for i in from..to {
            let name = format!("127.1.{}.{}:{port}", i / 250, 1 + i % 250);
            let result = e.segment(&name).map(|s| start(&s, Op::Write, &local, BASE).wait());
            assert_eq!(result.unwrap().unwrap_err().code(), 7);
        }
    };
    drop(e.open(&seen.name()).unwrap());
    let handle = e.open(&held.name()).unwrap();
    start(&e.open(&other.name()).unwrap(), Op::Write, &local, BASE).wait().unwrap();
    ask(0, 3000);
    let before = process();
    ask(3000, 10_000);
    let after = process();
    assert!(after.0 < before.0 + 4096, "{} KiB more", after.0 - before.0);
    // Some come and go; thousands of names cost none.
    let few = |after: usize, before: usize| after <= before + 8;
    assert!(few(after.1, before.1) && few(after.2, before.2), "{before:?}, {after:?}");
    let peers = e.peers();
    assert!(peers.len() <= 1024 + 1, "{}", peers.len());
    assert!(peers.iter().any(|p| *p.name == *held.name()), "somebody has a handle to it");
    assert!(peers.iter().any(|p| *p.name == *other.name()), "it has a lane");
    // What was done with those that are forgotten still counts.
    let all = e.stats();
    assert_eq!((all.batches_submitted, all.batches_failed), (10_001, 10_000));
    start(&handle, Op::Write, &local, BASE).wait().unwrap();
    // One that was forgotten is found again.
    assert!(!peers.iter().any(|p| *p.name == *seen.name()));
    start(&e.open(&seen.name()).unwrap(), Op::Read, &local, BASE).wait().unwrap();
    assert_eq!(e.stats().batches_completed, 3);
}

#[test]
fn one_bad_entry_of_a_thousand_fails_alone() {
    let fake = Fake::new(|mut link| {
        while let Some(header) = link.header() {
            if header.addr == BASE + 500 * 64 {
                done((link.swallow(header.len), link.status(Status::Rejected)));
                // What is on its way is taken, so that no reset destroys the refusal.
                done((link.stream.shutdown(Shutdown::Write), link.swallow(u64::MAX)));
                return;
            }
            if !link.answer(&header) {
                return;
            }
        }
    });
    let e = engine(lanes(2, 1));
    let local = buffer(&[7; 64_000]);
    let requests = row(Op::Write, &local, BASE, 64, 1000);
    let segment = e.open(&fake.name()).unwrap();
    let batch = segment.submit_owned(&requests, within(ms(8000))).unwrap();
    assert_eq!(batch.wait().unwrap_err().code(), 8);
    for i in 0..1000 {
        assert_eq!(batch.entry(i).unwrap().is_ok(), i != 500, "entry {i}");
    }
    let failures = batch.failures();
    assert_eq!((failures.len(), failures[0].0, failures[0].1.code()), (1, 500, 8));
    let stats = e.stats();
    assert_eq!((stats.requests_completed, stats.requests_failed, stats.refusals), (999, 1, 1));
    assert_eq!(stats.bytes_written, 999 * 64);
}

#[test]
fn batch_ids_that_were_never_given_out_are_errors() {
    let e = engine(lanes(1, 1));
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..10_000 {
        x = (x ^ (x << 13)).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (x >> 7);
        let error = e.batches().take(BatchId::from_raw(x)).unwrap_err();
        assert_eq!(error.code(), 22, "{error}");
    }
}
