//! Lanes that do not move, peers that are frozen, and peers that have gone without a word.

use std::time::{Duration, Instant};

use tensorferry::{Batch, BatchState, Config, Engine, HostBuffer, Op};

use crate::common::{
    PROMPT, engine, eventually, lanes, ms, promptly, row, says, start, start_within, timed, within,
};
use crate::fake::{BASE, Fake, Gate, Link, memory};

/// An engine that trusts a lane for as long as it moves.
fn patient(lanes_per_peer: usize, io_threads: usize) -> Config {
    let mut config = lanes(lanes_per_peer, io_threads);
    config.lane_idle_probe = Duration::from_secs(600);
    config
}

/// The same, which takes a machine for gone that is silent for a second.
fn wary(mut config: Config) -> Config {
    config.silence_timeout = ms(1000);
    config
}

/// The peer serves one request on its first connection and then does `behave`; it serves well on all others.
fn then(behave: impl Fn(&mut Link) + Send + Sync + 'static) -> Fake {
    Fake::new(move |mut link| {
        if link.number > 0 {
            return link.serve();
        }
        let header = link.header().unwrap();
        if link.answer(&header) {
            behave(&mut link);
        }
    })
}

/// One request on the first lane, so that it is known to be good.
fn warm(e: &Engine, fake: &Fake) -> tensorferry::Segment {
    let segment = e.open(&fake.name()).unwrap();
    start(&segment, Op::Write, &HostBuffer::zeroed(16).unwrap(), BASE).wait().unwrap();
    segment
}

#[test]
fn a_lane_that_does_not_move_is_trusted_with_nothing_more() {
    for io_threads in [1, 2] {
        let fake = then(Link::swallow_all);
        let e = engine(patient(1, io_threads));
        let segment = warm(&e, &fake);
        let local = HostBuffer::zeroed(100).unwrap();
        let stuck = start_within(&segment, Op::Write, &local, BASE, Duration::from_secs(30));
        // Whatever is sent behind it is taken in by the peer's kernel, which is no progress.
        let (mut behind, limit) = (Vec::new(), Duration::from_secs(30));
        eventually("a request gets through", || {
            behind.push(start_within(&segment, Op::Write, &local, BASE, limit));
            std::thread::park_timeout(ms(20));
            behind.iter().any(|b| b.poll() == BatchState::Completed)
        });
        assert_eq!(e.stats().lanes_opened, 2);
        for _ in 0..20 {
            start(&segment, Op::Read, &local, BASE).wait().unwrap();
        }
        assert_eq!((fake.connections(), e.stats().lanes_opened), (2, 2));
        // It was sent and may yet be answered: that is for its deadline to decide.
        assert_eq!(stuck.poll(), BatchState::Running);
        stuck.cancel();
        behind.iter().for_each(Batch::cancel);
        eventually("the lane is given up", || fake.hung_up() == 1);
    }
}

#[test]
fn what_has_not_left_does_not_wait_behind_a_lane_that_does_not_move() {
    let fake = then(|link| {
        link.narrow();
        link.hang();
    });
    let e = engine(patient(1, 1));
    let segment = warm(&e, &fake);
    let local = HostBuffer::zeroed(64 << 20).unwrap();
    let requests = row(Op::Write, &local, BASE, 1 << 20, 64);
    let batch = segment.submit_owned(&requests, within(Duration::from_secs(30))).unwrap();
    let done = || (0..64).filter(|&i| matches!(batch.entry(i), Some(Ok(())))).count();
    // What the sockets between the two can hold is on its way, and nobody knows how far it came.
    eventually("all that has not left is moved by another lane", || done() >= 56);
    assert_eq!(batch.poll(), BatchState::Running);
    assert_eq!(fake.connections(), 2);
    let sent = |at: u64| fake.seen().iter().filter(|h| h.addr == BASE + (at << 20)).count();
    assert!((1..64).all(|at| sent(at) <= 1), "nothing is sent twice");
    batch.cancel();
}

#[test]
fn a_frozen_peer_keeps_its_lanes_and_gets_few_more() {
    for io_threads in [1, 3] {
        let go = Gate::default();
        let gate = go.clone();
        let fake = Fake::new(move |mut link| {
            gate.wait();
            link.serve();
        });
        let e = engine(wary(patient(2, io_threads)));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(64 << 10).unwrap();
        let long = |op| start_within(&segment, op, &local, BASE, Duration::from_secs(30));
        let mut batches = Vec::new();
        let frozen = Instant::now();
        eventually("three seconds", || {
            batches.push(long(if batches.len() % 2 == 0 { Op::Write } else { Op::Read }));
            std::thread::park_timeout(ms(20));
            frozen.elapsed() > ms(3000)
        });
        assert!(batches.iter().all(|b| b.poll() == BatchState::Running));
        let made = fake.connections();
        assert!((2..=4).contains(&made), "{made} connections for two lanes");
        go.open();
        let (_, took) = timed(|| batches.iter().for_each(|b| b.wait().unwrap()));
        assert!(took < PROMPT, "{took:?} for {} batches", batches.len());
        assert!(fake.connections() <= 4);
        assert_eq!((e.stats().lanes_lost, e.stats().batches_failed), (0, 0));
    }
}

#[test]
fn short_deadlines_at_a_frozen_peer_make_no_storm_of_connections() {
    let go = Gate::default();
    let gate = go.clone();
    let fake = Fake::new(move |mut link| {
        gate.wait();
        link.serve();
    });
    let e = engine(lanes(4, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let (begin, mut failed) = (Instant::now(), 0);
    while begin.elapsed() < ms(2000) {
        let error = start_within(&segment, Op::Write, &local, BASE, ms(10)).wait().unwrap_err();
        assert_eq!(error.code(), 13, "{error}");
        failed += 1;
    }
    let made = fake.connections();
    assert!(made <= 20, "{made} connections for {failed} requests");
    go.open();
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    result.unwrap();
    assert!(took < PROMPT, "{took:?}");
    // It answers, so nothing is delayed any more.
    for _ in 0..20 {
        promptly(ms(300), "a request", || {
            let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
            result.unwrap();
            took
        });
    }
}

/// How the peer goes, seen from the request that is on its way.
const DEPARTURES: [&str; 3] = ["before it came", "after it came", "while nothing is read"];

fn gone(how: &'static str) -> Fake {
    then(move |link| {
        match how {
            "before it came" => link.vanish(),
            "after it came" => {
                let header = link.header().unwrap();
                link.swallow(if header.op == Op::Write { header.len } else { 0 });
                link.vanish();
            }
            _ => {
                link.narrow();
                link.await_bytes();
                // Until the kernel here takes no more.
                std::thread::park_timeout(ms(300));
                link.vanish();
            }
        }
        link.hang();
    })
}

#[test]
fn a_peer_that_goes_without_a_word_is_noticed_long_before_any_deadline() {
    std::thread::scope(|threads| {
        for how in DEPARTURES {
            for op in [Op::Write, Op::Read] {
                threads.spawn(move || noticed(how, op));
            }
        }
    });
}

fn noticed(how: &'static str, op: Op) {
    if op == Op::Read && how == "while nothing is read" {
        return;
    }
    let fake = gone(how);
    let e = engine(wary(patient(1, 1)));
    let segment = warm(&e, &fake);
    let len = if how == "while nothing is read" { 8 << 20 } else { 100 };
    let local = HostBuffer::zeroed(len).unwrap();
    let limit = Duration::from_secs(60);
    let (result, took) = timed(|| start_within(&segment, op, &local, BASE + 7, limit).wait());
    assert!(took < ms(20_000), "{how}: {took:?}");
    match op {
        Op::Read => {
            result.unwrap();
            assert!(local.read(0, len) == memory(BASE + 7, len as u64));
        }
        Op::Write => {
            let error = result.unwrap_err();
            assert_eq!(error.code(), 11, "{how}: {error}");
            says(&error, &["no sign of life for", &fake.name(), "unknown"]);
        }
    }
    eventually("it is counted", || e.stats().lanes_lost == 1);
    start(&segment, Op::Write, &HostBuffer::zeroed(16).unwrap(), BASE).wait().unwrap();
}

#[test]
fn a_lane_that_nobody_uses_is_closed_after_a_while() {
    let fake = Fake::new(|mut link| link.serve());
    let mut config = patient(2, 2);
    config.lane_keep = ms(300);
    let e = engine(config);
    let segment = warm(&e, &fake);
    eventually("it is closed", || fake.hung_up() == fake.connections());
    let lost = e.stats().lanes_lost;
    let batches: Vec<Batch> = (0..4)
        .map(|_| start(&segment, Op::Write, &HostBuffer::zeroed(16).unwrap(), BASE))
        .collect();
    batches.iter().for_each(|b| b.wait().unwrap());
    assert_eq!((lost, e.stats().lanes_lost), (0, 0));
}

#[test]
fn asking_again_and_again_for_what_is_not_there_does_not_ask_the_peer_every_time() {
    let fake = Fake::new(|mut link| link.serve());
    fake.publish(|d| d.buffers[0].len = 4096);
    let e = engine(lanes(1, 2));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let (begin, mut failed) = (Instant::now(), 0);
    while begin.elapsed() < ms(1000) || failed < 20 {
        let error = start(&segment, Op::Write, &local, BASE + 8192).wait().unwrap_err();
        assert_eq!(error.code(), 9, "{error}");
        failed += 1;
    }
    let asked = fake.asked() as u128;
    assert!(asked <= 12 + begin.elapsed().as_millis() / 20, "{asked} times for {failed} requests");
    // Others are not held up by it, and what turns up is found soon.
    promptly(ms(300), "a request for what is there", || {
        let missing = start(&segment, Op::Write, &local, BASE + 8192);
        let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
        result.unwrap();
        missing.wait().unwrap_err();
        took
    });
    let mut len = 8192;
    promptly(ms(300), "a request for what has turned up", || {
        len += 4096;
        fake.publish(|d| d.buffers[0].len = len);
        let late = BASE + len - 4096;
        let (result, took) = timed(|| start(&segment, Op::Write, &local, late).wait());
        result.unwrap();
        took
    });
}
