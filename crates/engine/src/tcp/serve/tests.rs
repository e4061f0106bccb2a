//! Requests of peers: any stream, cut anywhere.

use super::*;
use crate::memory::HostBuffer;
use crate::registry::{Access, BufferInfo, Range};
use crate::staging::Alarm;
use proptest::prelude::*;

const LEN: usize = 256 << 10;
/// READs are of the first half, WRITEs of the second, so that it does not matter when an answer leaves.
const HALF: usize = LEN / 2;

struct Target {
    memory: HostBuffer,
    registry: Registry,
    serve: Serve,
    served: Served,
    answers: Vec<u8>,
    fault: Option<String>,
}

impl Target {
    fn new() -> Self {
        let memory = HostBuffer::zeroed(LEN).unwrap();
        let bytes: Vec<u8> = (0..HALF).map(|i| (i ^ (i >> 8)) as u8).collect();
        memory.write(0, &bytes);
        let registry = Registry::new();
        let range = BufferInfo { addr: memory.addr(), len: LEN as u64 };
        let range = Range::host(range, Access::default());
        registry.register(vec![range], Default::default(), None).unwrap();
        let (answers, served) = (Vec::new(), Served::default());
        Self { memory, registry, serve: Serve::new(), served, answers, fault: None }
    }

    /// `bytes` arrive in one call; `direct`: long payloads are received in place.
    fn arrive(&mut self, mut bytes: &[u8], direct: bool) {
        let bell = Alarm::here();
        let place = self.serve.direct(&bell).unwrap();
        if let Direct::At(span) = place
            && direct
        {
            let n = bytes.len().min(span.len);
            self.memory.write((span.addr - self.memory.addr()) as usize, &bytes[..n]);
            self.serve.received_direct(n as u64, &mut self.served);
            bytes = &bytes[n..];
        }
        let rules = Rules { registry: &self.registry, mode: CopyMode::Direct, bell: &bell };
        let fault = self.serve.received(bytes, &rules, &mut self.served).err();
        self.fault = fault.map(|f| f.to_string());
    }

    /// One send call of which the socket takes `most` bytes.
    fn leave(&mut self, most: usize) {
        let mut spans = Vec::new();
        self.serve.plan(&mut spans);
        assert!(spans.len() <= MAX_CALL_SPANS && spans.iter().all(|s| s.len > 0));
        assert!(spans.iter().map(|s| s.len as u64).sum::<u64>() <= MAX_CALL_BYTES);
        let mut left = most;
        for span in spans {
            let bytes = self.read(span);
            let n = left.min(bytes.len());
            self.answers.extend_from_slice(&bytes[..n]);
            left -= n;
        }
        self.serve.sent(most - left);
    }

    fn read(&self, span: Span) -> Vec<u8> {
        if span.is_inside(Span { addr: self.memory.addr(), len: LEN }) {
            return self.memory.read((span.addr - self.memory.addr()) as usize, span.len);
        }
        status_frame(span).expect("memory or a status frame").to_vec()
    }

    fn end(mut self) -> (Vec<u8>, Vec<u8>, Served, Option<String>) {
        while self.serve.wants_output() {
            self.leave(usize::MAX);
        }
        (self.memory.read(0, LEN), self.answers, self.served, self.fault)
    }
}

#[derive(Clone, Debug)]
struct Asked {
    op: Op,
    version: Version,
    at: usize,
    len: usize,
    /// Where the range is moved to, if that is to be outside.
    stray: u64,
}

fn asked() -> impl Strategy<Value = Asked> {
    let len = prop_oneof![4 => 1..200_usize, 1 => 16_000..17_000_usize, 1 => 1..HALF];
    let version = prop_oneof![9 => Just(Version::V2), 1 => Just(Version::V1)];
    let stray = prop_oneof![40 => Just(0), 1 => Just(LEN as u64)];
    (any::<bool>(), version, 0..HALF, len, stray).prop_map(|(write, version, at, len, stray)| {
        let op = if write { Op::Write } else { Op::Read };
        Asked { op, version, at: at.min(HALF - len), len, stray }
    })
}

fn stream(asked: &[Asked], base: u64) -> Vec<u8> {
    let mut stream = Vec::new();
    for (i, a) in asked.iter().enumerate() {
        let at = a.at + if a.op == Op::Write { HALF } else { 0 };
        let addr = base + at as u64 + a.stray;
        let header = Header { op: a.op, version: a.version, addr, len: a.len as u64 };
        stream.extend_from_slice(&header.encode());
        if a.op == Op::Write {
            stream.extend((0..a.len).map(|k| (k * 31 + i * 7 + 1) as u8));
        }
    }
    stream
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn a_stream_may_be_cut_anywhere(
        asked in prop::collection::vec(asked(), 1..40),
        cuts in prop::collection::vec(prop_oneof![1..30_usize, 1..5000_usize, 1..100_000_usize], 1..50),
        takes in prop::collection::vec(prop_oneof![Just(0_usize), 1..20_usize, 1..100_000_usize], 1..50),
        direct in any::<bool>(),
    ) {
        // The same stream but for the base address of its memory.
        let mut whole = Target::new();
        let uncut = stream(&asked, whole.memory.addr());
        whole.arrive(&uncut, false);
        let mut cut = Target::new();
        let bytes = stream(&asked, cut.memory.addr());
        let (mut at, mut cuts, mut takes) = (0, cuts.iter().cycle(), takes.iter().cycle());
        while at < bytes.len() && cut.fault.is_none() {
            let n = cuts.next().unwrap().min(&(bytes.len() - at)).to_owned();
            cut.arrive(&bytes[at..at + n], direct);
            at += n;
            cut.leave(*takes.next().unwrap());
        }
        let (whole, cut) = (whole.end(), cut.end());
        prop_assert_eq!(whole.2, cut.2);
        prop_assert_eq!(whole.3, cut.3);
        prop_assert!(whole.1 == cut.1, "the answers differ");
        prop_assert!(whole.0 == cut.0, "the memory differs");
    }
}

#[test]
fn what_is_pinned_is_let_go_when_its_answer_has_left() {
    let mut target = Target::new();
    let addr = target.memory.addr();
    let read = Header { op: Op::Read, version: Version::V2, addr, len: 100 };
    let write = Header { op: Op::Write, ..read };
    target.arrive(&read.encode(), false);
    assert!(target.serve.uses(addr));
    target.leave(107);
    assert!(target.serve.uses(addr));
    target.leave(1);
    assert!(!target.serve.uses(addr) && !target.serve.wants_output());
    target.arrive(&write.encode(), false);
    target.arrive(&[1; 99], false);
    assert!(target.serve.uses(addr) && !target.serve.wants_output());
    target.arrive(&[1], false);
    assert!(!target.serve.uses(addr) && target.serve.wants_output());
    target.registry.unregister(&[addr], |_| panic!("nothing is pinned")).unwrap();
    // A buffer that was used a moment ago is not remembered past its end.
    target.arrive(&read.encode(), false);
    assert_eq!(target.served.refusals, 1);
    assert!(target.serve.is_refusing());
}

#[test]
fn a_refused_sender_is_swallowed_up_to_a_bound() {
    let mut target = Target::new();
    let write = Header { op: Op::Write, version: Version::V2, addr: 16, len: u64::MAX };
    target.arrive(&write.encode(), false);
    let bytes = vec![0; 1 << 20];
    for _ in 0..MAX_DRAIN >> 20 {
        target.arrive(&bytes, false);
        assert_eq!(target.fault, None);
    }
    target.arrive(&[0], false);
    assert!(target.fault.is_some());
}

/// Little is read ahead where long payloads are expected, so the rest of every one of them has to be received at once: one
/// that is just long enough was once read bit by bit, at a third of the speed.
#[test]
fn whoever_is_read_little_of_is_received_in_place_to_the_end() {
    for len in [DIRECT_FROM - 1, DIRECT_FROM, DIRECT_FROM + 1, 2 * DIRECT_FROM] {
        for ahead in [0, 1, 4 << 10, len - 1] {
            let mut target = Target::new();
            let addr = target.memory.addr() + HALF as u64;
            let header = Header { op: Op::Write, version: Version::V2, addr, len };
            target.arrive(&[&header.encode()[..], &vec![7; ahead as usize]].concat(), false);
            let place = target.serve.direct(&Alarm::here()).unwrap();
            match place {
                Direct::At(span) => {
                    let rest = (span.addr, span.len as u64);
                    assert_eq!(
                        rest,
                        (addr + ahead, len - ahead),
                        "{len} bytes, {ahead} of them ahead"
                    );
                }
                _ => assert!(!target.serve.expects_direct(), "{len} bytes, {ahead} of them ahead"),
            }
        }
    }
}
