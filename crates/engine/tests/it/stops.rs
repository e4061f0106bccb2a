//! Deadlines and cancels, in every phase of a request: in time, and quiet afterwards.

use std::net::TcpStream;
use std::time::Duration;

use tensorferry::{
    Batch, BatchState, Engine, Error, HostBuffer, LaneState, LaneStats, Notification, Op, Segment,
};
use tensorferry_wire::Status;

use crate::common::{
    PROMPT, alone, buffer, engine, eventually, lanes, ms, pattern, promptly, row, says, start,
    start_within, ticks, timed, within,
};
use crate::fake::{BASE, Fake, Full, Gate, OnNotify, control_only, memory, silent};
use crate::faults::dead_port;

/// A request in the phase that is to be stopped.
struct Scene {
    /// What a deadline says it was waiting for.
    stage: &'static str,
    /// Whether bytes of the request have left, so that the error says what may be left behind.
    sent: bool,
    op: Op,
    len: usize,
    segment: Segment,
    engine: Engine,
    fake: Option<Fake>,
    _full: Option<Full>,
    /// What has to be running before.
    _before: Vec<Batch>,
}

/// Of a WRITE, and of a READ.
const LEFT_BEHIND: [&str; 2] =
    ["the remote range may still be written", "the local buffer's content is undefined"];

const PHASES: [&str; 7] =
    ["resolving", "connecting", "queued", "sending", "one big", "ack", "mid-READ"];

fn scene(phase: &str, io_threads: usize) -> Scene {
    let e = engine(lanes(1, io_threads));
    let hang = || Fake::new(|mut link| link.hang());
    let with = |fake: Fake, stage, sent, op, len| Scene {
        stage,
        sent,
        op,
        len,
        segment: e.open(&fake.name()).unwrap(),
        engine: e.clone(),
        fake: Some(fake),
        _full: None,
        _before: Vec::new(),
    };
    match phase {
        "resolving" => Scene {
            segment: e.segment(&control_only(silent)).unwrap(),
            fake: None,
            ..with(
                hang(),
                "control port had not answered with its descriptor",
                false,
                Op::Write,
                100,
            )
        },
        "connecting" => {
            let (fake, full) = (hang(), Full::new());
            fake.publish(|d| d.tcp_data_port = full.port);
            let scene = with(fake, "no connection to its data port", false, Op::Read, 100);
            Scene { _full: Some(full), ..scene }
        }
        "queued" => {
            let scene = with(hang(), "waited in the queue", false, Op::Write, 100);
            let local = HostBuffer::zeroed(32 << 20).unwrap();
            let fills = start(&scene.segment, Op::Write, &local, BASE);
            eventually("a lane", || scene.engine.stats().lanes_opened >= 1);
            Scene { _before: vec![fills], ..scene }
        }
        "sending" => with(hang(), "", true, Op::Write, 64 << 20),
        "one big" => {
            let fake = hang();
            fake.publish(|d| d.tcp_proto_version = 1);
            with(fake, "answer had not come", true, Op::Write, 64 << 20)
        }
        "ack" => with(hang(), "answer had not come", true, Op::Write, 100),
        "mid-READ" => {
            let fake = Fake::new(|mut link| {
                link.header();
                link.status(Status::Applied);
                link.send(&[7; 1000]);
                link.hang();
            });
            with(fake, "answer had not come", true, Op::Read, 100_000)
        }
        _ => unreachable!(),
    }
}

impl Scene {
    /// Waits until the request is in its phase.
    fn begin(&self, phase: &str, timeout: Duration) -> (Batch, HostBuffer) {
        let local = HostBuffer::zeroed(self.len).unwrap();
        let batch = start_within(&self.segment, self.op, &local, BASE, timeout);
        match phase {
            "sending" | "one big" | "ack" => {
                let fake = self.fake.as_ref().unwrap();
                eventually("something arrives", || fake.has_unread());
            }
            "mid-READ" => eventually("1,000 bytes", || local.read(999, 1) == [7]),
            _ => {}
        }
        (batch, local)
    }

    fn says(&self, error: &Error) {
        let verb = if self.op == Op::Read { "READ" } else { "WRITE" };
        let range = format!("{verb} of {} bytes", self.len);
        says(error, &[&range, self.segment.name(), "0x500000000000"]);
        if self.sent && self.len < 1 << 20 {
            says(error, &[LEFT_BEHIND[usize::from(self.op == Op::Read)]]);
        }
        for (op, text) in [Op::Write, Op::Read].into_iter().zip(LEFT_BEHIND) {
            let may = self.sent && self.op == op;
            assert!(may || !error.to_string().contains(text), "{error}");
        }
    }
}

#[test]
fn a_cancel_returns_at_once_in_every_phase() {
    for phase in PHASES {
        for io_threads in [1, 3] {
            promptly(ms(150), phase, || {
                let scene = scene(phase, io_threads);
                let (batch, local) = scene.begin(phase, ms(8000));
                assert_eq!(batch.poll(), BatchState::Running, "{phase}");
                let ((), took) = timed(|| batch.cancel());
                assert_eq!(batch.poll(), BatchState::Cancelled, "{phase}");
                let error = batch.wait().unwrap_err();
                assert_eq!(error.code(), 14, "{phase}: {error}");
                says(&error, &["cancelled"]);
                scene.says(&error);
                let after = local.read(0, local.len());
                batch.cancel();
                assert!(local.read(0, local.len()) == after);
                took
            });
        }
    }
}

#[test]
fn a_deadline_is_kept_in_every_phase() {
    std::thread::scope(|threads| {
        for phase in PHASES {
            let attempt = move || {
                let scene = scene(phase, 1);
                // So long that it is in its phase by then.
                let ((batch, _local), set_up) = timed(|| scene.begin(phase, ms(2000)));
                let (result, took) = timed(|| batch.wait());
                let took = set_up + took;
                let error = result.unwrap_err();
                assert!(took >= ms(2000), "{phase}: {took:?}");
                assert_eq!((batch.poll(), error.code()), (BatchState::TimedOut, 13), "{phase}");
                let words = [
                    "not complete at its deadline",
                    scene.stage,
                    "is the peer alive",
                    "TENSORFERRY_TRANSFER_TIMEOUT",
                ];
                says(&error, &words);
                scene.says(&error);
                assert!(error.is_retryable());
                took
            };
            threads.spawn(move || promptly(ms(2500), phase, attempt));
        }
    });
}

#[test]
fn a_batch_of_a_thousand_has_one_deadline() {
    let fake = Fake::new(|mut link| link.hang());
    let e = engine(lanes(4, 2));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000 * 4096).unwrap();
    promptly(ms(800), "a deadline of 300 ms", || {
        let begin = std::time::Instant::now();
        let requests = row(Op::Read, &local, BASE, 4096, 1000);
        let batch = segment.submit_owned(&requests, within(ms(300))).unwrap();
        assert_eq!(batch.wait().unwrap_err().code(), 13);
        let took = begin.elapsed();
        assert!(took >= ms(300), "{took:?}");
        assert_eq!(batch.failures().len(), 1000);
        assert!((0..1000).all(|i| batch.entry(i).unwrap().unwrap_err().code() == 13));
        took
    });
}

#[test]
fn a_cancelled_read_is_quiet_and_its_neighbours_are_right() {
    for (len, io_threads) in [(100_000, 1), (100_000, 3), (12 << 20, 1)] {
        let go = Gate::default();
        let gate = go.clone();
        let fake = Fake::new(move |mut link| {
            let first = link.header().unwrap();
            link.status(Status::Applied);
            let bytes = memory(first.addr, first.len);
            link.send(&bytes[..50_000]);
            gate.wait();
            link.send(&bytes[50_000..]);
            link.serve();
        });
        let e = engine(lanes(1, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let (mine, other) = (HostBuffer::zeroed(len).unwrap(), HostBuffer::zeroed(5000).unwrap());
        let cancelled = start(&segment, Op::Read, &mine, BASE);
        let read = start(&segment, Op::Read, &other, BASE + 77);
        let write = start(&segment, Op::Write, &buffer(&pattern(3000, 1)), BASE + 9);
        eventually("half has arrived", || mine.read(0, 50_000) == memory(BASE, 50_000));
        cancelled.cancel();
        assert_eq!(cancelled.poll(), BatchState::Cancelled);
        let marks = vec![0x5a; len];
        mine.write(0, &marks);
        go.open();
        read.wait().unwrap();
        write.wait().unwrap();
        assert!(other.read(0, 5000) == memory(BASE + 77, 5000));
        assert!(mine.read(0, len) == marks, "not touched after the cancel");
        assert_eq!(fake.connections(), 1, "on the same lane");
    }
}

#[test]
fn a_read_too_long_to_swallow_does_not_harm_others() {
    let go = Gate::default();
    let gate = go.clone();
    let fake = Fake::new(move |mut link| {
        if link.number > 0 {
            return link.serve();
        }
        while let Some(header) = link.header() {
            gate.wait();
            if !link.answer(&header) {
                return;
            }
        }
    });
    let mut config = lanes(1, 1);
    config.newest_version = tensorferry::Version::V2;
    let e = engine(config);
    let segment = e.open(&fake.name()).unwrap();
    let big = HostBuffer::zeroed(64 << 20).unwrap();
    let small = HostBuffer::zeroed(1000).unwrap();
    let cancelled = start(&segment, Op::Read, &big, BASE);
    eventually("a request", || !fake.seen().is_empty());
    let other = start(&segment, Op::Read, &small, BASE + 1);
    cancelled.cancel();
    go.open();
    other.wait().unwrap();
    assert!(small.read(0, 1000) == memory(BASE + 1, 1000));
    assert!(big.read(0, 64 << 20).iter().all(|b| *b == 0));
}

#[test]
fn a_cancelled_write_that_had_left_costs_its_neighbours_nothing() {
    let go = Gate::default();
    let gate = go.clone();
    let fake = Fake::new(move |mut link| {
        let first = link.header().unwrap();
        link.swallow(first.len);
        gate.wait();
        link.status(Status::Applied);
        link.serve();
    });
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    let cancelled = start(&segment, Op::Write, &local, BASE);
    eventually("it has left", || !fake.seen().is_empty());
    let others: Vec<Batch> =
        (1..50).map(|i| start(&segment, Op::Write, &local, BASE + i * 1000)).collect();
    cancelled.cancel();
    assert_eq!(cancelled.poll(), BatchState::Cancelled);
    go.open();
    others.iter().for_each(|b| b.wait().unwrap());
    assert_eq!(cancelled.poll(), BatchState::Cancelled);
    assert_eq!(fake.connections(), 1);
}

#[test]
fn a_write_cancelled_in_mid_body_sends_its_neighbours_elsewhere() {
    for io_threads in [1, 3] {
        let fake = Fake::new(move |mut link| {
            if link.number > 0 {
                return link.serve();
            }
            link.narrow();
            let first = link.header().unwrap();
            link.answer(&first);
            link.hang();
        });
        let e = engine(lanes(1, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let (big, local) = (HostBuffer::zeroed(6 << 20).unwrap(), buffer(&pattern(4096, 1)));
        start(&segment, Op::Write, &local, BASE).wait().unwrap();
        // More than this end's socket takes, and there is room on the lane for what is behind it.
        let cancelled = start(&segment, Op::Write, &big, BASE);
        let behind: Vec<Batch> =
            (0..20).map(|_| start(&segment, Op::Write, &local, BASE + 64)).collect();
        // All of it is on the lane, so that some of it is cut off in the middle.
        eventually("it is being sent", || {
            fake.has_unread() && e.peers().iter().all(|peer| peer.batches_queued == 0)
        });
        let ((), took) = timed(|| cancelled.cancel());
        assert!(took < PROMPT, "{took:?}");
        assert_eq!(cancelled.poll(), BatchState::Cancelled);
        behind.iter().for_each(|b| b.wait().unwrap());
        start(&segment, Op::Write, &local, BASE).wait().unwrap();
    }
}

/// The peer takes no other connection while its only one is stuck.
#[test]
fn a_batch_on_a_stuck_lane_is_cancelled_though_no_other_lane_can_be_had() {
    for io_threads in [1, 3] {
        let full = Full::new();
        let fake = Fake::new(|mut link| link.hang());
        let e = engine(lanes(2, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(16 << 20).unwrap();
        let first = start(&segment, Op::Write, &buffer(&[1]), BASE);
        eventually("a lane", || e.stats().lanes_opened == 1);
        fake.publish(|d| d.tcp_data_port = full.port);
        segment.buffers().unwrap();
        let requests = row(Op::Write, &local, BASE, 1 << 20, 16);
        let batch = segment.submit_owned(&requests, within(ms(8000))).unwrap();
        eventually("it is being sent", || fake.has_unread());
        let ((), took) = timed(|| batch.cancel());
        assert!(took < PROMPT, "{took:?}");
        assert!((0..16).all(|i| batch.entry(i).unwrap().unwrap_err().code() == 14));
        first.cancel();
    }
}

/// Work that nobody can take must not keep the thread busy with trying.
#[test]
fn lanes_that_cannot_be_had_are_not_tried_without_end() {
    alone("stops::refused_lanes");
}

#[test]
#[ignore = "run by `lanes_that_cannot_be_had_are_not_tried_without_end`, in a process of its own"]
fn refused_lanes() {
    let fake = Fake::new(|mut link| link.hang());
    let e = engine(lanes(4, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(32 << 20).unwrap();
    let first = start(&segment, Op::Write, &buffer(&[1]), BASE);
    eventually("a lane", || e.stats().lanes_opened == 1);
    fake.publish(|d| d.tcp_data_port = dead_port());
    segment.buffers().unwrap();
    let before = ticks();
    let batch = start_within(&segment, Op::Write, &local, BASE, ms(500));
    assert_eq!(batch.wait().unwrap_err().code(), 13);
    let spent = ticks() - before;
    assert!(spent < 20, "the process was busy for {spent} of 50 hundredths");
    first.cancel();
}

#[test]
fn a_deadline_is_kept_by_notifications_that_wait_for_each_other() {
    let fake = Fake::new(|mut link| link.serve());
    fake.on_notify(OnNotify::Silence);
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let with_note = |timeout| {
        let notification = Notification::new("n", "m");
        let options = within(timeout).with_notification(notification);
        let request = local.request(Op::Write, 0, BASE, 100).unwrap();
        segment.submit_owned(&[request], options).unwrap()
    };
    let stuck = with_note(ms(20_000));
    promptly(ms(2500), "a deadline of two seconds", || {
        let (error, took) = timed(|| with_note(ms(2000)).wait().unwrap_err());
        assert_eq!(error.code(), 18, "{error}");
        assert!(took >= ms(2000), "{took:?}");
        took
    });
    let seen = fake.seen().len();
    let other = with_note(ms(20_000));
    eventually("its bytes are there", || fake.seen().len() > seen);
    let ((), took) = timed(|| other.cancel());
    assert!(took < PROMPT, "{took:?}");
    let ((), took) = timed(|| stuck.cancel());
    assert!(took < PROMPT, "{took:?}");
    assert_eq!(stuck.wait().unwrap_err().code(), 18);
    // They hold nothing up that comes later.
    fake.on_notify(OnNotify::Answer);
    with_note(ms(8000)).wait().unwrap();
}

#[test]
fn a_lane_that_was_idle_is_replaced_before_it_is_used() {
    let mut config = lanes(1, 1);
    config.lane_idle_probe = ms(20);
    let fake = Fake::new(|mut link| {
        let header = link.header().unwrap();
        link.answer(&header);
        // Silent from now on, as behind a firewall that has forgotten the connection.
        link.hang();
    });
    let e = engine(config);
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    for i in 1..=3 {
        start(&segment, Op::Write, &local, BASE).wait().unwrap();
        assert_eq!(fake.connections(), i);
        let idle = std::time::Instant::now();
        eventually("the lane has been idle", || idle.elapsed() > ms(25));
    }
    assert_eq!(e.stats().retries, 0);
}

#[test]
fn a_stuck_connection_on_one_thread_leaves_the_lanes_of_the_others_in_use() {
    let fake = Fake::new(|mut link| {
        // The first lane is good until it gets the long WRITE.
        while let Some(header) = link.header() {
            if header.addr == BASE && link.number == 0 {
                return link.hang();
            }
            if !link.answer(&header) {
                return;
            }
        }
    });
    let e = engine(lanes(2, 2));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(32 << 20).unwrap();
    // Both lanes are there, each on its thread.
    eventually("two lanes", || {
        start(&segment, Op::Write, &local, BASE + (1 << 30)).wait().unwrap();
        e.stats().lanes_opened == 2
    });
    // As much as a lane takes on, so that nothing has room behind it, or it has been found to be stuck. The other lane may
    // have had a part, which is answered.
    let (long, mut stuck) = (HostBuffer::zeroed(8 << 20).unwrap(), Vec::new());
    eventually("one lane is full", || {
        let peer = &e.peers()[0];
        let full =
            |lane: &LaneStats| lane.bytes_in_flight >= 8 << 20 || lane.state == LaneState::Stalled;
        let done = peer.batches_queued == 0 && peer.lanes.iter().any(|l| l.slices_in_flight == 0);
        if done && fake.has_unread() && peer.lanes.iter().any(full) {
            return true;
        }
        if peer.batches_queued == 0 {
            stuck.push(start(&segment, Op::Write, &long, BASE));
        }
        false
    });
    let small = HostBuffer::zeroed(100).unwrap();
    for i in 0..50 {
        let batch = start(&segment, Op::Write, &small, BASE + (2 << 30) + i);
        batch.wait().unwrap_or_else(|e| panic!("request {i}: {e}"));
    }
    drop(TcpStream::connect(fake.name()));
}

#[test]
fn peers_that_nobody_waits_for_any_more_hold_no_thread() {
    let e = engine(lanes(1, 1));
    let good = Fake::new(|mut link| link.serve());
    let local = HostBuffer::zeroed(16).unwrap();
    // As many as the pool has threads.
    let stuck: Vec<Batch> = (0..8)
        .map(|i| {
            let segment = e.segment(&control_only(silent)).unwrap();
            start_within(&segment, Op::Write, &local, BASE, ms(if i == 0 { 8000 } else { 200 }))
        })
        .collect();
    for batch in &stuck[1..] {
        assert_eq!(batch.wait().unwrap_err().code(), 13);
    }
    stuck[0].cancel();
    let (segment, took) = timed(|| e.open(&good.name()).unwrap());
    assert!(took < PROMPT, "{took:?}");
    start(&segment, Op::Write, &local, BASE).wait().unwrap();
}

/// Peers that take connections to their control port and never answer hold up nobody else, however many they are.
#[test]
fn peers_that_never_answer_hold_up_nobody() {
    let e = engine(lanes(1, 1));
    let listeners: Vec<_> =
        (0..60).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let local = HostBuffer::zeroed(4096).unwrap();
    let stuck: Vec<Batch> = listeners
        .iter()
        .map(|listener| {
            let segment = e.segment(&listener.local_addr().unwrap().to_string()).unwrap();
            let request = local.request(Op::Write, 0, BASE, 4096).unwrap();
            let notification = Notification::new("n", "m");
            let options = within(2 * PROMPT).with_notification(notification);
            segment.submit_owned(&[request], options).unwrap()
        })
        .collect();
    for _ in 0..5 {
        let target = engine(lanes(1, 1));
        let remote = buffer(&[0; 4096]);
        target.register_buffer(&remote, &Default::default()).unwrap();
        let (moved, took) = timed(|| {
            let segment = e.open(target.name())?;
            segment.notify(&Notification::new("n", "m"))?;
            start(&segment, Op::Write, &local, remote.addr()).wait()
        });
        moved.unwrap();
        assert!(took < PROMPT, "{took:?}");
    }
    for batch in stuck {
        let error = batch.wait().unwrap_err();
        assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    }
}
