//! Two engines with a network between them that misbehaves.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use tensorferry::{
    Batch, Config, Engine, HostBuffer, Op, OwnedRequest, RegisterOptions, Segment, Version,
};
use tensorferry_relay::{Accept, End, Port, Relay, Rule, Way};
use tensorferry_wire::{Header, STATUS_LEN, Status};

use crate::common::{
    buffer, engine, eventually, lanes, ms, pattern, promptly, row, says, start, timed, within,
};

/// A target with one buffer behind a relay of some copies, and an initiator that knows each copy as a peer.
struct Stand {
    target: Engine,
    remote: HostBuffer,
    relay: Relay,
    initiator: Engine,
}

impl Stand {
    fn new(len: usize, copies: usize, config: Config) -> Self {
        let target = engine(Config::default());
        let remote = HostBuffer::zeroed(len).unwrap();
        target.register_buffer(&remote, &RegisterOptions::default()).unwrap();
        let relay = Relay::start(target.name(), copies).unwrap();
        Self { target, remote, relay, initiator: engine(config) }
    }

    fn open(&self, copy: usize) -> Segment {
        self.initiator.open(&self.relay.name(copy)).unwrap()
    }

    /// Bytes that went through the data ports of all copies.
    fn relayed(&self) -> u64 {
        let counts = self.relay.counts().unwrap();
        counts.iter().map(|c| c.data.to_target + c.data.to_initiator).sum()
    }
}

#[test]
fn bytes_go_through_a_relay_and_nowhere_else() {
    for version in [Version::V2, Version::V1] {
        let mut config = lanes(2, 1);
        config.newest_version = version;
        let stand = Stand::new(8 << 20, 1, config);
        let segment = stand.open(0);
        for (seed, len) in [1, 24, 65_537, 5 << 20].into_iter().enumerate() {
            let (bytes, before) = (pattern(len, seed as u64), stand.relayed());
            start(&segment, Op::Write, &buffer(&bytes), stand.remote.addr()).wait().unwrap();
            assert!(stand.remote.read(0, len) == bytes, "{version:?} WRITE of {len}");
            let back = HostBuffer::zeroed(len).unwrap();
            start(&segment, Op::Read, &back, stand.remote.addr()).wait().unwrap();
            assert!(back.read(0, len) == bytes, "{version:?} READ of {len}");
            assert!(stand.relayed() >= before + 2 * len as u64);
        }
    }
}

#[test]
fn a_stream_that_comes_byte_by_byte_is_understood() {
    let stand = Stand::new(1 << 20, 1, lanes(2, 1));
    stand.relay.rule(Rule::new(Way::Both).single_bytes()).unwrap();
    stand.relay.rule(Rule::new(Way::Both).single_bytes().port(Port::Control)).unwrap();
    let segment = stand.open(0);
    let bytes = pattern(40_000, 1);
    let local = buffer(&bytes);
    let write = row(Op::Write, &local, stand.remote.addr(), 400, 100);
    segment.submit_owned(&write, within(ms(20_000))).unwrap().wait().unwrap();
    assert!(stand.remote.read(0, 40_000) == bytes);
    let back = HostBuffer::zeroed(40_000).unwrap();
    let read = row(Op::Read, &back, stand.remote.addr(), 400, 100);
    segment.submit_owned(&read, within(ms(20_000))).unwrap().wait().unwrap();
    assert!(back.read(0, 40_000) == bytes);
}

#[test]
fn a_corrupt_answer_fails_its_request_and_is_named() {
    for op in [Op::Write, Op::Read] {
        let stand = Stand::new(4096, STATUS_LEN, lanes(1, 1));
        let local = HostBuffer::zeroed(4096).unwrap();
        for byte in 0..STATUS_LEN {
            let rule = Rule::new(Way::ToInitiator).copy(byte).corrupt_at(byte as u64);
            stand.relay.rule(rule).unwrap();
            let error = start(&stand.open(byte), op, &local, stand.remote.addr()).wait();
            let expected = match byte {
                // The lowest bit makes it a refusal.
                0 => "the peer refused the range",
                1..4 => "status code",
                _ => "lack its magic",
            };
            says(&error.unwrap_err(), &[expected, &stand.relay.name(byte)]);
            stand.relay.rule(Rule::default().copy(byte)).unwrap();
            start(&stand.open(byte), op, &local, stand.remote.addr()).wait().unwrap();
        }
    }
}

/// A WRITE, a READ and a WRITE. Their headers, payloads and answers are 5,196 bytes one way, 84 the other.
const LENS: [usize; 3] = [100, 60, 5000];
const AT: [usize; 3] = [0, 1000, 2000];
const EACH: usize = 8192;

/// How many bytes pass before a connection is cut: every one of the answers, and those around each border of the
/// requests.
fn cuts() -> Vec<(Way, u64)> {
    let there = [0, 1, 23, 24, 25, 123, 124, 125, 147, 148, 149, 171, 172, 173, 5171, 5172];
    let there = there.map(|n| (Way::ToTarget, n));
    there.into_iter().chain((0..=84).map(|n| (Way::ToInitiator, n))).collect()
}

/// The three requests of a case, whose own part of the target's memory is the `case`-th.
fn three(stand: &Stand, case: usize, local: &HostBuffer) -> Vec<OwnedRequest> {
    let remote = stand.remote.addr() + (case * EACH) as u64;
    let one =
        |(op, i): (Op, usize)| local.request(op, AT[i], remote + AT[i] as u64, LENS[i]).unwrap();
    [(Op::Write, 0), (Op::Read, 1), (Op::Write, 2)].map(one).to_vec()
}

/// Whatever is said to be complete is in place; returns how many are.
fn check(stand: &Stand, case: usize, batch: &Batch, local: &HostBuffer, wanted: &[u8]) -> usize {
    let is_done = |i: usize| batch.entry(i).unwrap().is_ok();
    for i in (0..3).filter(|i| is_done(*i)) {
        let range = AT[i]..AT[i] + LENS[i];
        let found = match i {
            1 => local.read(AT[i], LENS[i]),
            _ => stand.remote.read(case * EACH + AT[i], LENS[i]),
        };
        assert!(found == wanted[range], "case {case}: entry {i} is complete, and is not");
    }
    assert_eq!(batch.failures().len(), 3 - (0..3).filter(|i| is_done(*i)).count());
    (0..3).filter(|i| is_done(*i)).count()
}

#[test]
fn a_connection_cut_anywhere_completes_nothing_that_is_not_in_place() {
    for end in [End::Fin, End::Rst, End::HalfClose] {
        let cuts = cuts();
        let stand = Stand::new(EACH * cuts.len(), cuts.len(), lanes(1, 1));
        let begin = Instant::now();
        let cases: Vec<_> = (0..cuts.len())
            .map(|case| {
                let (way, n) = cuts[case];
                stand.relay.rule(Rule::new(way).copy(case).after(n, end)).unwrap();
                let wanted = pattern(EACH, case as u64);
                // What is to be read is there, what is to be written is not.
                stand.remote.write(case * EACH + AT[1], &wanted[AT[1]..][..LENS[1]]);
                let local = buffer(&wanted);
                local.write(AT[1], &vec![0; LENS[1]]);
                let (segment, requests) = (stand.open(case), three(&stand, case, &local));
                let batch = segment.submit_owned(&requests, within(ms(4000))).unwrap();
                (segment, local, wanted, batch)
            })
            .collect();
        for (case, (segment, local, wanted, batch)) in cases.iter().enumerate() {
            // That it failed says nothing: what counts is what it says of each entry.
            let _ = batch.wait();
            let done = check(&stand, case, batch, local, wanted);
            let (way, n) = cuts[case];
            if way == Way::ToInitiator && n < STATUS_LEN as u64 {
                batch.entry(0).unwrap().expect_err("it was not acknowledged");
            }
            if (way, n) == (Way::ToInitiator, 84) {
                assert_eq!(done, 3, "all had passed: {:?}", batch.failures());
            }
            stand.relay.rule(Rule::default().copy(case)).unwrap();
            let again = segment.submit_owned(&three(&stand, case, local), within(ms(20_000)));
            let again = again.unwrap();
            again.wait().unwrap_or_else(|e| panic!("{end:?} after {n} {way:?}, then: {e}"));
            assert_eq!(check(&stand, case, &again, local, wanted), 3);
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{end:?}: {:?}", begin.elapsed());
    }
}

#[test]
fn distance_costs_a_batch_no_round_trip_per_block() {
    const BLOCK: usize = 128 << 10;
    const ALL: usize = 512 * BLOCK;
    // Every block is another part of it.
    let stock = pattern(BLOCK + 512, 1);
    let bytes = (0..512).map(|i| &stock[i..i + BLOCK]).collect::<Vec<_>>().concat();
    for lanes_per_peer in [1, 4] {
        let stand = Stand::new(ALL, 1, lanes(lanes_per_peer, 1));
        let late = Rule::new(Way::Both).delay(ms(2));
        stand.relay.rule(late.clone()).unwrap();
        stand.relay.rule(late.port(Port::Control)).unwrap();
        let segment = stand.open(0);
        let local = buffer(&bytes);
        // Makes the connections, and the memory.
        segment
            .submit_owned(&row(Op::Write, &local, stand.remote.addr(), BLOCK, 8), within(ms(8000)))
            .unwrap()
            .wait()
            .unwrap();
        let (_, raw) = timed(|| raw_write(&stand, &bytes));
        let requests = row(Op::Write, &local, stand.remote.addr(), BLOCK, 512);
        promptly(10 * raw, "ten times one stream's time", || {
            let (result, took) =
                timed(|| segment.submit_owned(&requests, within(ms(20_000))).unwrap().wait());
            result.unwrap();
            assert!(stand.remote.read(0, ALL) == bytes);
            took
        });
    }
}

/// All of `bytes` as one request, by a client that does nothing else.
fn raw_write(stand: &Stand, bytes: &[u8]) {
    let mut stream = TcpStream::connect(stand.relay.addresses()[0].data).unwrap();
    let (addr, len) = (stand.remote.addr(), bytes.len() as u64);
    let header = Header { op: Op::Write, version: Version::V2, addr, len }.encode();
    stream.write_all(&header).unwrap();
    stream.write_all(bytes).unwrap();
    let mut status = [0; STATUS_LEN];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(Status::parse(&status), Ok(Status::Applied));
}

#[test]
fn a_port_that_does_not_let_in_fails_a_request_by_its_deadline_and_no_other() {
    let stand = Stand::new(4096, 4, lanes(2, 1));
    let local = buffer(&pattern(4096, 1));
    for (copy, how) in [(1, Accept::Refuse), (2, Accept::Silent), (3, Accept::Never)] {
        let one = Some(tensorferry_relay::Copies::One(copy));
        stand.relay.accept(one, Port::Data, how).unwrap();
    }
    let batches: Vec<Batch> = (0..4)
        .map(|copy| {
            let requests = row(Op::Write, &local, stand.remote.addr(), 4096, 1);
            // The good one has all the time.
            let timeout = ms(if copy == 0 { 20_000 } else { 1500 });
            stand.open(copy).submit_owned(&requests, within(timeout)).unwrap()
        })
        .collect();
    batches[0].wait().unwrap();
    let begin = Instant::now();
    for batch in &batches[1..] {
        batch.wait().unwrap_err();
    }
    assert!(begin.elapsed() < ms(4000), "{:?}", begin.elapsed());
    stand.relay.accept(None, Port::Data, Accept::Pass).unwrap();
    for copy in 0..4 {
        start(&stand.open(copy), Op::Write, &local, stand.remote.addr()).wait().unwrap();
    }
    // The last one is counted when it has been answered.
    eventually("all are counted", || stand.target.stats().served_writes >= 5);
}
