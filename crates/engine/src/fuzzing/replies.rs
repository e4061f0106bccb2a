//! Answers of a hostile target, against an initiator's lane.

use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use tensorferry_wire::{Op, STATUS_LEN, Status, Version};

use crate::fuzzing::Cuts;
use crate::memory::{HostBuffer, Span};
use crate::spin::Spin;
use crate::staging::Alarm;
use crate::sync::locked;
use crate::tcp::{Ending, Lane, LaneFault, MAX_CALL_SPANS, SendHalf};
use crate::transfer::{
    Batch, BatchInner, BatchState, Held, Order, Owner, Places, Request, Slice, Stop,
};

/// What lies between the memory of two requests.
const GUARD: usize = 64;
const MOST_REQUESTS: usize = 16;
const MOST_LEN: usize = 5000;
const LEN: usize = MOST_REQUESTS * (MOST_LEN + GUARD) + GUARD;
const UNTOUCHED: u8 = 0xa5;
const REMOTE: u64 = 1 << 40;

static CLEAN: [u8; LEN] = [UNTOUCHED; LEN];
static MEMORY: LazyLock<Mutex<HostBuffer>> =
    LazyLock::new(|| Mutex::new(HostBuffer::zeroed(LEN).expect("there is so much memory")));

/// Answers, for requests that the first bytes of the input describe: after the byte that says how the stream is cut,
/// one with their number and version, then three for each.
pub fn replies(input: &[u8]) {
    let [seed, kind, rest @ ..] = input else { return };
    let is_v1 = kind & 0x80 != 0;
    let count = if is_v1 { 1 } else { 1 + usize::from(*kind) % MOST_REQUESTS };
    let Some((asked, stream)) = rest.split_at_checked(3 * count) else { return };
    let memory = locked(&MEMORY);
    let version = if is_v1 { Version::V1 } else { Version::V2 };
    let mut end = Initiator::new(&memory, version, asked);
    end.run(stream, Cuts::new(*seed), seed & 0x40 != 0);
    end.check(stream);
}

struct Asked {
    op: Op,
    /// Where its local memory is.
    at: usize,
    len: usize,
    batch: Batch,
}

struct Initiator<'m> {
    memory: &'m HostBuffer,
    version: Version,
    lane: Lane,
    half: SendHalf,
    asked: Vec<Asked>,
    requeued: Vec<Slice>,
    discard: Vec<u8>,
    consumed: usize,
    /// A request was stopped on the way, so answers may be those of others than the model thinks.
    stopped: bool,
    all_left_first: bool,
}

impl<'m> Initiator<'m> {
    fn new(memory: &'m HostBuffer, version: Version, asked: &[u8]) -> Self {
        let peer = ([127, 0, 0, 1], 1).into();
        let mut end = Self {
            memory,
            version,
            lane: Lane::new(version, peer),
            half: SendHalf::new(version),
            asked: Vec::new(),
            requeued: Vec::new(),
            discard: vec![0; 999],
            consumed: 0,
            stopped: false,
            all_left_first: false,
        };
        let mut at = GUARD;
        for one in asked.chunks_exact(3) {
            let op = if one[0] & 1 == 0 { Op::Read } else { Op::Write };
            let len = 1 + usize::from(u16::from_le_bytes([one[1], one[2]])) % MOST_LEN;
            let local = memory.addr() + at as u64;
            let remote = REMOTE + end.asked.len() as u64;
            let batch = batch(Request { op, local, remote, len: len as u64 });
            end.half.launch(Slice::new(&batch.inner, 0, 0, len as u64));
            end.asked.push(Asked { op, at, len, batch });
            at += len + GUARD;
        }
        memory.write(0, &CLEAN[..at]);
        end.lane.take_over(&mut end.half);
        end
    }

    fn run(&mut self, mut stream: &[u8], mut cuts: Cuts, stops: bool) {
        let half_way = stream.len() / 2;
        self.all_left_first = !cuts.flip();
        while self.all_left_first && self.half.wants() {
            self.send(usize::MAX);
        }
        while !stream.is_empty() {
            self.send(cuts.next(usize::MAX));
            let n = cuts.next(stream.len());
            let (taken, fault) = self.receive(&stream[..n], cuts.next(MAX_CALL_SPANS));
            stream = &stream[taken..];
            if let Some(fault) = fault {
                let violation;
                let ending = match fault {
                    LaneFault::Refused => Ending::Refusal,
                    LaneFault::Wire(e) => {
                        violation = Arc::new(e);
                        Ending::Violation(&violation)
                    }
                };
                self.lane.lost(&mut self.half, &ending, &mut self.requeued);
                return;
            }
            if stops && !self.stopped && stream.len() < half_way {
                self.stop(cuts.next(self.asked.len()) - 1);
            }
        }
        let (wants, shut) = (self.half.wants(), self.half.is_shut());
        if self.lane.wants_half_close(&self.half) && !wants && !shut {
            self.half.end();
        }
        self.lane.ended(&self.half, true);
        self.lane.lost(&mut self.half, &Ending::Lost("the end"), &mut self.requeued);
    }

    fn send(&mut self, most: usize) {
        if !self.half.wants() {
            return;
        }
        let mut spans = Vec::new();
        self.half.plan(MAX_CALL_SPANS, &mut spans);
        let planned = spans.iter().map(|s| s.len).sum();
        self.half.sent(most.min(planned));
    }

    /// A receive call with what is there of `bytes`; how much it took.
    fn receive(&mut self, bytes: &[u8], max_spans: usize) -> (usize, Option<LaneFault>) {
        let discard = Span::of_mut(&mut self.discard);
        let mut spans = Vec::new();
        self.lane.plan(discard, max_spans, &mut spans, &Alarm::here());
        assert!(!spans.is_empty() && spans.len() <= max_spans);
        let mut rest = bytes;
        for span in spans {
            let (now, later) = rest.split_at(rest.len().min(span.len));
            self.put(span, now);
            rest = later;
        }
        let taken = bytes.len() - rest.len();
        let fault = self.lane.received(taken, &self.half, &Alarm::here()).err();
        self.consumed += taken;
        (taken, fault)
    }

    /// The kernel writes only what a running READ has lent, or what is the engine's own.
    fn put(&mut self, span: Span, bytes: &[u8]) {
        if self.lane.put_scratch(span, bytes) || span.is_inside(Span::of(&self.discard)) {
            return;
        }
        let of = |a: &Asked| Span { addr: self.memory.addr() + a.at as u64, len: a.len };
        let owner = self.asked.iter().find(|a| span.is_inside(of(a)));
        let owner = owner.unwrap_or_else(|| panic!("{span:?} is nobody's"));
        assert_eq!((owner.op, owner.batch.poll()), (Op::Read, BatchState::Running));
        self.memory.write((span.addr - self.memory.addr()) as usize, bytes);
    }

    fn stop(&mut self, i: usize) {
        self.stopped = true;
        self.asked[i].batch.inner.request_stop(Stop::Cancelled);
        self.lane.sweep(&mut self.half, Instant::now(), &mut self.requeued);
    }

    /// Each request has ended once, as the stream says, and touched what is its own.
    fn check(&self, stream: &[u8]) {
        let mut at = 0;
        let answers = answers(self.version, &self.asked, &stream[..self.consumed]);
        for (i, asked) in self.asked.iter().enumerate() {
            let guard = self.memory.read(at, asked.at - at);
            assert!(guard.iter().all(|b| *b == UNTOUCHED), "memory before request {i}");
            at = asked.at + asked.len;
            let memory = self.memory.read(asked.at, asked.len);
            let untouched = asked.op == Op::Read || memory.iter().all(|b| *b == UNTOUCHED);
            assert!(untouched, "what WRITE {i} sends was written");
            let again = self.requeued.iter().filter(|s| s.remote() == REMOTE + i as u64).count();
            let state = asked.batch.poll();
            assert_eq!(again, usize::from(state == BatchState::Running), "request {i}: {state:?}");
            if self.stopped || (self.version == Version::V1 && asked.op == Op::Write) {
                continue;
            }
            let answer = answers.get(i).filter(|a| a.is_some());
            if state == BatchState::Completed {
                let payload = answer.and_then(Option::as_ref);
                let payload = payload.unwrap_or_else(|| panic!("request {i} had no answer"));
                assert!(asked.op == Op::Write || *payload == memory, "what READ {i} brought");
            } else {
                assert!(answer.is_none() || !self.all_left_first, "the answer to {i} was lost");
            }
        }
        assert!(self.memory.read(at, GUARD).iter().all(|b| *b == UNTOUCHED), "memory behind");
    }
}

/// What a stream says, if every request has left before it: the payload of each answer that is complete.
fn answers<'s>(version: Version, asked: &[Asked], mut rest: &'s [u8]) -> Vec<Option<&'s [u8]>> {
    let mut all = Vec::new();
    for asked in asked {
        if version == Version::V2 {
            let Some((status, behind)) = rest.split_first_chunk::<STATUS_LEN>() else { break };
            if Status::parse(status) != Ok(Status::Applied) {
                break;
            }
            rest = behind;
        }
        let len = if asked.op == Op::Read { asked.len } else { 0 };
        let Some((payload, behind)) = rest.split_at_checked(len) else { break };
        rest = behind;
        all.push(Some(payload));
    }
    all
}

/// A batch of one request, that nobody but the lane moves.
fn batch(request: Request) -> Batch {
    let now = Instant::now();
    let order = Order {
        requests: vec![request],
        held: Held::default(),
        places: Places::default(),
        notification: None,
        started: now,
        deadline: now + Duration::from_secs(3600),
        word: None,
    };
    let owner = Arc::new(Nobody("peer:1".into(), Spin::new(Duration::ZERO)));
    Batch { inner: BatchInner::new(owner, order) }
}

struct Nobody(Arc<str>, Spin);

impl Owner for Nobody {
    fn peer(&self) -> &Arc<str> {
        &self.0
    }

    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
        batch.finish(None);
    }

    fn spin(&self) -> &Spin {
        &self.1
    }

    fn stopped(&self, _: &Arc<BatchInner>) {}

    fn finished(&self, _: &BatchInner) {}
}
