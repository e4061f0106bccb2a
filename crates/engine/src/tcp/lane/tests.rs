//! Properties of a lane: any answers, cut anywhere, and any stops.

use super::*;
use crate::memory::HostBuffer;
use crate::staging::Alarm;
use crate::transfer::{Batch, BatchState, Request, batch_of};
use proptest::prelude::*;
use tensorferry_wire::{HEADER_LEN, Status};

const REMOTE: u64 = 1 << 40;
const DISCARD: usize = 10_000;

/// One request, each a batch of its own with memory of its own.
struct Asked {
    op: Op,
    len: u64,
    local: HostBuffer,
    batch: Batch,
    /// What its memory was when it was final and that must not change.
    quiet: Option<Vec<u8>>,
}

/// A lane, and a peer that is exactly as good as a test wants.
struct World {
    lane: Lane,
    half: SendHalf,
    asked: Vec<Asked>,
    /// Requests in the order in which they were given to the lane, and that were not taken back unsent.
    order: Vec<usize>,
    /// Bytes that have left.
    sent: u64,
    /// Answers that the peer has given.
    answered: usize,
    /// What the peer has sent and the lane has not received.
    arriving: VecDeque<u8>,
    discard: Vec<u8>,
    requeued: Vec<Slice>,
    over: bool,
}

fn content(i: usize, len: u64) -> Vec<u8> {
    (0..len).map(|k| (k as usize * 7 + i * 13 + 1) as u8).collect()
}

impl World {
    fn new() -> Self {
        let peer = ([127, 0, 0, 1], 1).into();
        Self {
            lane: Lane::new(Version::V2, peer),
            half: SendHalf::new(Version::V2),
            asked: Vec::new(),
            order: Vec::new(),
            sent: 0,
            answered: 0,
            arriving: VecDeque::new(),
            discard: vec![0; DISCARD],
            requeued: Vec::new(),
            over: false,
        }
    }

    fn launch(&mut self, op: Op, len: u64) {
        let room = self.lane.room();
        if room.requests == 0 || room.bytes == 0 || self.over {
            return;
        }
        let i = self.asked.len();
        let local = HostBuffer::zeroed(len as usize).unwrap();
        let request = Request { op, local: local.addr(), remote: REMOTE + i as u64, len };
        let batch = batch_of(vec![request]);
        self.half.launch(Slice::new(&batch.inner, 0, 0, len));
        self.asked.push(Asked { op, len, local, batch, quiet: None });
        self.order.push(i);
    }

    fn wire_len(&self, i: usize) -> u64 {
        let Asked { op, len, .. } = self.asked[i];
        HEADER_LEN as u64 + if op == Op::Write { len } else { 0 }
    }

    /// How many requests have left whole, and how many have begun to.
    fn left(&self) -> (usize, usize) {
        let (mut at, mut whole, mut begun) = (0, 0, 0);
        for &i in &self.order {
            begun += usize::from(at < self.sent);
            at += self.wire_len(i);
            whole += usize::from(at <= self.sent);
        }
        (whole, begun)
    }

    /// A send call of which the socket takes `most` bytes.
    fn send(&mut self, most: usize) {
        if self.over || !self.half.wants() {
            return;
        }
        let mut spans = Vec::new();
        self.half.plan(MAX_CALL_SPANS, &mut spans);
        assert!(!spans.is_empty() && spans.len() <= MAX_CALL_SPANS);
        assert!(spans.iter().all(|s| s.len > 0));
        let planned = spans.iter().map(|s| s.len).sum::<usize>();
        let total: u64 = self.order.iter().map(|&i| self.wire_len(i)).sum();
        assert!(planned as u64 <= total - self.sent);
        let n = most.min(planned);
        self.half.sent(n);
        self.sent += n as u64;
        self.lane.take_over(&mut self.half);
    }

    /// The peer answers what has arrived at it, up to `count` requests.
    fn answer(&mut self, count: usize) {
        for _ in 0..count {
            if self.answered >= self.left().0 {
                return;
            }
            let i = self.order[self.answered];
            self.arriving.extend(Status::Applied.encode());
            if self.asked[i].op == Op::Read {
                self.arriving.extend(content(i, self.asked[i].len));
            }
            self.answered += 1;
        }
    }

    /// A receive call that brings `most` bytes of what is there.
    fn receive(&mut self, most: usize, max_spans: usize) -> Option<LaneFault> {
        if self.over {
            return None;
        }
        self.lane.take_over(&mut self.half);
        let discard = Span::of_mut(&mut self.discard);
        let mut spans = Vec::new();
        self.lane.plan(discard, max_spans, &mut spans, &Alarm::here());
        assert!(!spans.is_empty() && spans.len() <= max_spans);
        let planned = spans.iter().map(|s| s.len).sum::<usize>();
        let n = most.min(planned).min(self.arriving.len());
        let bytes: Vec<u8> = self.arriving.drain(..n).collect();
        let mut rest = &bytes[..];
        for span in spans {
            let (now, later) = rest.split_at(rest.len().min(span.len));
            self.put(span, now);
            rest = later;
        }
        let fault = self.lane.received(n, &self.half, &Alarm::here()).err();
        self.look();
        fault
    }

    fn put(&mut self, span: Span, bytes: &[u8]) {
        // Nobody looks at what is discarded.
        if self.lane.put_scratch(span, bytes) || span.is_inside(Span::of(&self.discard)) {
            return;
        }
        let of = |a: &Asked| Span { addr: a.local.addr(), len: a.len as usize };
        let found = self.asked.iter().find(|a| span.is_inside(of(a)));
        let asked = found.expect("scratch, discard or local memory");
        assert_eq!((asked.op, asked.batch.poll()), (Op::Read, BatchState::Running));
        asked.local.write((span.addr - asked.local.addr()) as usize, bytes);
    }

    /// Takes note of what is final now.
    fn look(&mut self) {
        let owed: u64 = self.lane.flights.iter().map(|f| f.len).sum();
        assert_eq!(self.lane.bytes_in_flight(), owed);
        for asked in &mut self.asked {
            if asked.quiet.is_none() && asked.batch.poll() != BatchState::Running {
                asked.quiet = Some(asked.local.read(0, asked.len as usize));
            }
        }
    }

    fn cancel(&mut self, i: usize, stop: Stop) {
        let Some(asked) = self.asked.get(i) else { return };
        if self.over || asked.batch.poll() != BatchState::Running {
            return;
        }
        asked.batch.inner.request_stop(stop);
        // What was taken back unsent is not on its way to the peer.
        self.lane.take_over(&mut self.half);
        let begun = self.left().1;
        self.lane.sweep(&mut self.half, Instant::now(), &mut self.requeued);
        let asked = &self.asked;
        let mut at = 0;
        let is_shut = self.half.is_shut();
        self.order.retain(|&o| {
            at += 1;
            at <= begun || (o != i && !is_shut)
        });
        assert!(asked[i].batch.poll() != BatchState::Running || self.comes_back(i));
        self.look();
    }

    fn comes_back(&self, i: usize) -> bool {
        self.requeued.iter().any(|s| s.remote() == REMOTE + i as u64)
    }

    fn lose(&mut self, ending: &Ending<'_>) {
        self.over = true;
        self.lane.lost(&mut self.half, ending, &mut self.requeued);
        self.look();
    }

    /// The end of all: no request is lost, none is settled twice (which `Batch` checks), and each is what
    /// it ought to be.
    fn check(mut self) {
        self.look();
        let again: Vec<usize> =
            self.requeued.iter().map(|s| (s.remote() - REMOTE) as usize).collect();
        for (i, asked) in self.asked.iter().enumerate() {
            let times = again.iter().filter(|n| **n == i).count();
            let running = asked.batch.poll() == BatchState::Running;
            assert_eq!(times, usize::from(running), "request {i} is lost or doubled");
            if running {
                continue;
            }
            let bytes = asked.local.read(0, asked.len as usize);
            assert!(asked.quiet.as_ref() == Some(&bytes), "request {i} was touched at rest");
            if asked.batch.poll() == BatchState::Completed {
                let place = self.order.iter().position(|o| *o == i);
                assert!(place.is_some_and(|p| p < self.answered), "request {i} had no answer");
                if asked.op == Op::Read {
                    assert!(bytes == content(i, asked.len), "request {i} has another's bytes");
                }
            }
        }
        for slice in self.requeued.drain(..) {
            slice.settle(Ok(()));
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Launch(Op, u64),
    Send(usize),
    Answer(usize),
    Receive(usize, usize),
    Cancel(usize, Stop),
    BadSource,
    BadDestination,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![3 => 1..100_u64, 1 => 1..100_000_u64];
    let amount = || prop_oneof![1..30_usize, 1..3000_usize, Just(usize::MAX)];
    let spans = prop_oneof![Just(1_usize), 1..8_usize, Just(MAX_CALL_SPANS)];
    let stop = prop_oneof![Just(Stop::Cancelled), Just(Stop::TimedOut)];
    let op = any::<bool>().prop_map(|write| if write { Op::Write } else { Op::Read });
    prop_oneof![
        6 => (op, len).prop_map(|(op, len)| Step::Launch(op, len)),
        6 => amount().prop_map(Step::Send),
        4 => (1..6_usize).prop_map(Step::Answer),
        8 => (amount(), spans).prop_map(|(n, spans)| Step::Receive(n, spans)),
        1 => (0..30_usize, stop).prop_map(|(i, stop)| Step::Cancel(i, stop)),
        // Rare: each ends the lane for what is behind it.
        1 => prop_oneof![19 => Just(Step::Answer(1)), 1 => Just(Step::BadSource), 2 => Just(Step::BadDestination)],
    ]
}

fn run(steps: &[Step]) -> World {
    let mut world = World::new();
    for step in steps {
        match *step {
            Step::Launch(op, len) => world.launch(op, len),
            Step::Send(n) => world.send(n),
            Step::Answer(n) => world.answer(n),
            Step::Receive(n, spans) => {
                let fault = world.receive(n, spans);
                assert!(fault.is_none(), "{fault:?}");
            }
            Step::Cancel(i, stop) => world.cancel(i, stop),
            Step::BadSource => bad_source(&mut world),
            Step::BadDestination => bad_destination(&mut world),
        }
    }
    world
}

fn bad_source(world: &mut World) {
    let (whole, begun) = world.left();
    let Some(&i) = world.order.get(whole).filter(|_| !world.over && world.half.wants()) else {
        return;
    };
    if world.asked[i].op == Op::Read {
        return;
    }
    world.lane.cannot_send(Cause::BadAddress("".into()), &mut world.half, &mut world.requeued);
    let keep = if world.half.is_shut() { begun } else { world.order.len() };
    world.order.truncate(keep);
    if begun == whole {
        world.order.retain(|o| *o != i);
    }
    world.look();
}

fn bad_destination(world: &mut World) {
    world.lane.take_over(&mut world.half);
    let want = world.lane.flights.front().map(|f| world.lane.reader.want(&f.expected(Version::V2)));
    if matches!(want, Some(ReplyWant::Payload { .. })) {
        world.lane.cannot_receive(Cause::BadAddress("".into()));
        world.look();
    }
}

/// The peer answers all that has left, and the lane receives it.
fn drain(world: &mut World) {
    while world.half.wants() {
        world.send(usize::MAX);
    }
    world.answer(world.order.len());
    while !world.arriving.is_empty() {
        assert!(world.receive(usize::MAX, MAX_CALL_SPANS).is_none());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Whatever is cancelled when, answers stay with their requests, and every request ends once.
    #[test]
    fn answers_stay_with_their_requests(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = run(&steps);
        drain(&mut world);
        let left = world.left().0;
        for (n, &i) in world.order.iter().enumerate() {
            let state = world.asked[i].batch.poll();
            prop_assert!(state != BatchState::Running || n >= left, "request {} of {}", i, left);
        }
        world.lose(&Ending::Lost("the end"));
        world.check();
    }

    /// Wherever the connection ends: what had left is unknown, what had not and every READ comes back.
    #[test]
    fn a_lost_lane_gives_back_what_may_be_sent_again(
        steps in prop::collection::vec(step(), 1..120),
        refused in any::<bool>(),
    ) {
        let mut world = run(&steps);
        let begun: Vec<usize> = world.order[..world.left().1].to_vec();
        let running: Vec<usize> = (0..world.asked.len())
            .filter(|&i| world.asked[i].batch.poll() == BatchState::Running && !world.comes_back(i))
            .collect();
        world.lose(if refused { &Ending::Refusal } else { &Ending::Lost("cut") });
        for i in running {
            let asked = &world.asked[i];
            let unknown = asked.op == Op::Write && begun.contains(&i) && !refused;
            prop_assert_eq!(world.comes_back(i), !unknown);
            if unknown {
                prop_assert_eq!(asked.batch.wait().unwrap_err().code(), 11);
            }
        }
        world.check();
    }

    /// The same answers, cut otherwise, settle the same requests.
    #[test]
    fn answers_may_be_cut_anywhere(
        asks in prop::collection::vec((any::<bool>(), 1..3000_u64), 1..40),
        cuts in prop::collection::vec((prop_oneof![1..10_usize, 1..5000_usize], 1..6_usize), 1..30),
        refused in any::<bool>(),
    ) {
        let mut world = World::new();
        for &(write, len) in &asks {
            world.launch(if write { Op::Write } else { Op::Read }, len);
        }
        while world.half.wants() {
            world.send(usize::MAX);
        }
        let good = if refused { asks.len() / 2 } else { asks.len() };
        world.answer(good);
        if refused {
            world.arriving.extend(Status::Rejected.encode());
        }
        let mut fault = None;
        for (n, spans) in cuts.iter().cycle() {
            if fault.is_some() || world.arriving.is_empty() {
                break;
            }
            fault = world.receive(*n, *spans);
        }
        prop_assert_eq!(matches!(fault, Some(LaneFault::Refused)), refused);
        for i in 0..good {
            prop_assert_eq!(world.asked[i].batch.poll(), BatchState::Completed);
        }
        if refused {
            prop_assert_eq!(world.asked[good].batch.wait().unwrap_err().code(), 8);
            world.lose(&Ending::Refusal);
            prop_assert_eq!(world.requeued.len(), asks.len() - good - 1);
        }
        world.check();
    }
}

#[test]
fn an_answer_to_what_has_not_left_is_a_violation() {
    for sent in [HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 99] {
        let mut world = World::new();
        world.launch(Op::Write, 100);
        world.send(sent);
        world.arriving.extend(Status::Applied.encode());
        let fault = world.receive(usize::MAX, MAX_CALL_SPANS);
        assert!(matches!(fault, Some(LaneFault::Wire(WireError::TooEarly))), "{fault:?}");
        world.lose(&Ending::Violation(&Arc::new(WireError::TooEarly)));
        assert_eq!(world.asked[0].batch.wait().unwrap_err().code(), 16);
    }
}

#[test]
fn a_refusal_may_come_before_the_payload_has_left() {
    let mut world = World::new();
    world.launch(Op::Write, 100);
    world.launch(Op::Read, 5);
    world.send(HEADER_LEN + 3);
    world.arriving.extend(Status::Rejected.encode());
    assert!(matches!(world.receive(8, 1), Some(LaneFault::Refused)));
    world.lose(&Ending::Refusal);
    assert_eq!(world.asked[0].batch.wait().unwrap_err().code(), 8);
    assert!(world.comes_back(1));
    world.check();
}

#[test]
fn a_slice_is_not_sent_again_for_ever() {
    let batch = batch_of(vec![Request { op: Op::Read, local: 8, remote: 8, len: 8 }]);
    let mut slice = Slice::new(&batch.inner, 0, 0, 8);
    for tries in 0.. {
        let mut lane = Lane::new(Version::V2, ([127, 0, 0, 1], 1).into());
        let (mut half, mut back) = (SendHalf::new(Version::V2), Vec::new());
        half.launch(slice);
        lane.lost(&mut half, &Ending::Lost("nothing left"), &mut back);
        match back.pop() {
            Some(again) => slice = again,
            None => {
                assert_eq!(tries, usize::from(MAX_UNTOUCHED_TRIES));
                break;
            }
        }
    }
    assert_eq!(batch.wait().unwrap_err().code(), 10);
}
