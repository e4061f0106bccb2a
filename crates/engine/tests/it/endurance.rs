//! Much work, and work for long: memory, descriptors and threads stay what they were. With `TEST_FULL=1` in the
//! environment the counts are those that are promised; without it they are what there is time for.

use std::sync::Arc;
use std::time::Duration;

use tensorferry::{
    Batch, BatchState, Engine, HostBuffer, Notification, Op, Request, Segment, SubmitOptions,
};

use crate::common::{
    Pair, alone, engine, eventually, lanes, ms, promptly, resident, row, start, timed, within,
};
use crate::fake::{BASE, Fake, Full, Link, OnNotify, Raw, control_only, silent};

fn is_full() -> bool {
    std::env::var_os("TEST_FULL").is_some()
}

fn count_of(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count()
}

/// Most that the resident memory is while `work` goes on, above what it was.
fn peak(work: impl FnOnce() + Send) -> u64 {
    let before = resident();
    let mut most = before;
    std::thread::scope(|threads| {
        let working = threads.spawn(work);
        while !working.is_finished() {
            most = most.max(resident());
            std::thread::park_timeout(ms(2));
        }
    });
    (most - before) >> 20
}

const BLOCK: usize = 4096;

/// Blocks that share a little memory, so that what grows is what the engine needs for them.
fn blocks(op: Op, local: &HostBuffer, remote: u64, count: usize) -> Vec<Request> {
    let places = local.len() / BLOCK;
    let one = |i: usize| {
        let at = (i % places * BLOCK) as u64;
        Request { op, local: local.addr() + at, remote: remote + at, len: BLOCK as u64 }
    };
    (0..count).map(one).collect()
}

#[expect(unsafe_code, reason = "many requests over one buffer")]
fn submit(segment: &Segment, requests: Vec<Request>, options: SubmitOptions) -> Batch {
    // SAFETY: the tests keep the buffer until the batch is final; what READs bring is not looked at.
    unsafe { segment.submit(requests, options) }.unwrap()
}

/// Everywhere in it, so that no page of it comes later.
fn touched(len: usize) -> HostBuffer {
    let buffer = HostBuffer::zeroed(len).unwrap();
    buffer.write(0, &vec![1; len]);
    buffer
}

#[test]
fn as_many_requests_as_anybody_asks_for_take_little_memory() {
    alone("endurance::many_requests");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn many_requests() {
    let pair = Pair::with(8 << 20, lanes(4, 1));
    pair.remote.write(0, &vec![1; 8 << 20]);
    let local = touched(8 << 20);
    let limit = Duration::from_secs(60);
    for op in [Op::Write, Op::Read] {
        let grown = peak(|| {
            let requests = blocks(op, &local, pair.remote.addr(), 200_000);
            submit(&pair.segment, requests, within(limit)).wait().unwrap();
        });
        assert!(grown <= 64, "{grown} MiB for one call");
    }
    let grown = peak(|| {
        std::thread::scope(|threads| {
            for _ in 0..64 {
                threads.spawn(|| {
                    let requests = || blocks(Op::Write, &local, pair.remote.addr(), 1024);
                    let all: Vec<Batch> =
                        (0..4).map(|_| submit(&pair.segment, requests(), within(limit))).collect();
                    all.iter().for_each(|batch| batch.wait().unwrap());
                });
            }
        });
    });
    assert!(grown <= 64, "{grown} MiB for 64 threads");
}

#[test]
fn a_slow_peer_costs_time_and_no_memory() {
    alone("endurance::a_slow_peer");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn a_slow_peer() {
    // All lanes together: 10 MB a second.
    let turn = Arc::new(std::sync::Mutex::new(vec![0; 50 << 10]));
    let fake = Fake::new(move |mut link| {
        loop {
            let mut bytes = turn.lock().unwrap();
            if !std::io::Read::read(&mut link.stream, &mut bytes).is_ok_and(|n| n > 0) {
                return;
            }
            std::thread::park_timeout(ms(5));
        }
    });
    let e = engine(lanes(4, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = touched(8 << 20);
    let grown = peak(|| {
        std::thread::scope(|threads| {
            for _ in 0..64 {
                threads.spawn(|| {
                    let requests = blocks(Op::Write, &local, BASE, 1024);
                    let error = submit(&segment, requests, within(ms(2000))).wait().unwrap_err();
                    assert_eq!(error.code(), 13, "{error}");
                });
            }
        });
    });
    assert!(grown <= 64, "{grown} MiB");
}

/// Some batches at once, of which every tenth is to fail, one way or another.
fn some(pair: &Pair, local: &HostBuffer, count: usize) {
    let good = row(Op::Write, local, pair.remote.addr(), 64, 2);
    let bad = row(Op::Read, local, 16, 64, 2);
    let start = |i: usize| {
        let (requests, options) = match i % 30 {
            5 => (&bad, within(ms(8000))),
            15 => (&good, within(Duration::ZERO)),
            _ => (&good, within(ms(8000))),
        };
        let batch = pair.segment.submit_owned(requests, options).unwrap();
        if i % 30 == 25 {
            batch.cancel();
        }
        batch
    };
    let batches: Vec<Batch> = (0..count).map(start).collect();
    for (i, batch) in batches.iter().enumerate() {
        assert!(batch.wait().is_ok() || i % 10 == 5);
    }
}

#[test]
fn nothing_grows_with_the_number_of_batches() {
    alone("endurance::many_batches");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn many_batches() {
    let (pair, local) = (Pair::with(1 << 16, lanes(2, 1)), touched(1 << 16));
    let run = |count: usize| (0..count / 600).for_each(|_| some(&pair, &local, 600));
    run(30_000);
    let (fds, threads) = (count_of("fd"), count_of("task"));
    let before = resident();
    let count = if is_full() { 300_000 } else { 30_000 };
    run(count);
    let grown = resident().saturating_sub(before) >> 10;
    assert!(grown < 1024 * (count as u64 / 100_000).max(1), "{grown} KiB for {count} batches");
    eventually("lanes that were given up are closed", || count_of("fd") <= fds + 4);
    assert!(count_of("task") <= threads, "{} of {threads} threads", count_of("task"));
}

#[test]
fn numbers_that_are_never_given_back_are_forgotten() {
    alone("endurance::forgotten_numbers");
}

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn forgotten_numbers() {
    let e = engine(lanes(1, 1));
    let segment = e.segment("127.0.0.1:1").unwrap();
    let nothing = row(Op::Write, &HostBuffer::zeroed(64).unwrap(), BASE, 0, 2);
    // Complete at once, as there is nothing to move. Every second number is given back.
    let run = |count: usize| {
        for i in 0..count {
            let batch = segment.submit_owned(&nothing, SubmitOptions::default()).unwrap();
            let id = e.batches().insert(batch);
            if i % 2 == 0 {
                let _ = e.batches().take(id).unwrap();
            }
        }
    };
    // It grows until as many are remembered as ever will be, and then until the allocator has found out which holes that
    // leaves; what leaked would do so in every round.
    let mut grown = Vec::new();
    while grown.last().is_none_or(|last| *last >= 1024) {
        assert!(grown.len() < 10, "KiB for 100,000 numbers, round by round: {grown:?}");
        let before = resident();
        run(100_000);
        grown.push(resident().saturating_sub(before) >> 10);
    }
}

#[test]
fn nothing_is_left_of_five_hundred_engines() {
    alone("endurance::five_hundred_engines");
}

#[test]
#[ignore = "counts descriptors of the process, so it is started by itself"]
fn five_hundred_engines() {
    let target = engine(lanes(1, 1));
    let remote = touched(4096);
    target.register_buffer(&remote, &Default::default()).unwrap();
    let local = touched(4096);
    let cycle = || {
        let e = engine(lanes(2, 1));
        let segment = e.open(target.name()).unwrap();
        let requests = row(Op::Write, &local, remote.addr(), 64, 4);
        segment.submit_owned(&requests, within(ms(8000))).unwrap().wait().unwrap();
    };
    cycle();
    eventually("quiet", || count_of("task") <= 4);
    let (fds, threads) = (count_of("fd"), count_of("task"));
    (0..500).for_each(|_| cycle());
    eventually("no thread is left", || count_of("task") <= threads);
    eventually("no descriptor is left", || count_of("fd") <= fds + 2);
}

/// What an engine may be doing when it is closed, and what keeps up what it does.
type State = fn(&Engine) -> (Vec<Batch>, Box<dyn Send>);

/// A device that hangs is in `gpu_edges`, a resolver in `resolver`.
const STATES: [(&str, State); 8] = [
    ("nothing", |_| (Vec::new(), Box::new(()))),
    ("a peer that is frozen", |e| with_peer(e, 64 << 10, Link::hang)),
    ("a transfer", |e| with_peer(e, 64 << 20, Link::swallow_all)),
    ("half a WRITE from a client", half_a_write),
    ("connecting", connecting),
    ("asking", asking),
    ("a notification", notifying),
    ("a lane that does not move", stalled),
];

fn with_peer(
    e: &Engine,
    len: usize,
    behave: impl Fn(&mut Link) + Send + Sync + 'static,
) -> (Vec<Batch>, Box<dyn Send>) {
    let fake = Fake::new(move |mut link| {
        link.header();
        behave(&mut link);
    });
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(len).unwrap();
    let batch = start(&segment, Op::Write, &local, BASE);
    eventually("it is asked", || !fake.seen().is_empty());
    (vec![batch], Box::new(fake))
}

fn half_a_write(e: &Engine) -> (Vec<Batch>, Box<dyn Send>) {
    let memory = HostBuffer::zeroed(1 << 20).unwrap();
    e.register_buffer(&memory, &Default::default()).unwrap();
    let mut client = Raw::connect(e.data_port());
    client.send(&Raw::header(Op::Write, memory.addr(), 1 << 20));
    client.send(&[1; 1000]);
    eventually("it arrives", || memory.read(999, 1) == [1]);
    (Vec::new(), Box::new(client))
}

fn connecting(e: &Engine) -> (Vec<Batch>, Box<dyn Send>) {
    let (fake, full) = (Fake::new(|_| {}), Full::new());
    fake.publish(|d| d.tcp_data_port = full.port);
    let segment = e.open(&fake.name()).unwrap();
    let batch = start(&segment, Op::Write, &HostBuffer::zeroed(64).unwrap(), BASE);
    (vec![batch], Box::new((fake, full)))
}

fn asking(e: &Engine) -> (Vec<Batch>, Box<dyn Send>) {
    let segment = e.segment(&control_only(silent)).unwrap();
    let batch = start(&segment, Op::Write, &HostBuffer::zeroed(64).unwrap(), BASE);
    (vec![batch], Box::new(()))
}

fn notifying(e: &Engine) -> (Vec<Batch>, Box<dyn Send>) {
    let fake = Fake::new(|mut link| link.serve());
    fake.on_notify(OnNotify::Silence);
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(64).unwrap();
    let notification = Notification::new("n", "m");
    let options = within(ms(20_000)).with_notification(notification);
    let batch = segment.submit_owned(&row(Op::Write, &local, BASE, 64, 1), options).unwrap();
    eventually("its bytes are there", || !fake.seen().is_empty());
    (vec![batch], Box::new(fake))
}

fn stalled(e: &Engine) -> (Vec<Batch>, Box<dyn Send>) {
    let (batches, fake) = with_peer(e, 64 << 20, Link::hang);
    eventually("others are made in its place", || e.stats().lanes_opened >= 2);
    (batches, fake)
}

#[test]
fn closing_takes_less_than_a_second_in_every_state() {
    for (name, state) in STATES {
        for io_threads in [1, 3] {
            promptly(ms(1000), name, || {
                let e = engine(lanes(1, io_threads));
                let (batches, kept) = state(&e);
                let ((), took) = timed(|| e.close());
                assert!(batches.iter().all(|b| b.poll() == BatchState::Failed), "{name}");
                drop(kept);
                took
            });
        }
    }
}
