//! Bytes move, both ways, in every shape.

use tensorferry::{Config, HostBuffer, Notification, Op, SubmitOptions, Version};

use crate::common::{Pair, buffer, engine, eventually, pattern};

const SIZES: [usize; 12] =
    [1, 7, 8, 23, 24, 4095, 16 << 10, 65_537, 1 << 20, (1 << 20) + 1, 5 << 20, (64 << 20) + 3];

#[test]
fn every_size_arrives_both_ways() {
    for version in [Version::V2, Version::V1] {
        let mut config = Config::default();
        config.newest_version = version;
        config.transfer_timeout = std::time::Duration::from_secs(20);
        let pair = Pair::with((64 << 20) + 64, config);
        for (i, len) in SIZES.into_iter().enumerate() {
            let bytes = pattern(len, i as u64);
            let at = pair.remote.addr() + i as u64;
            pair.start(Op::Write, &buffer(&bytes), at, len).wait().unwrap();
            if version == Version::V1 {
                // In v1 the end of the stream is the acknowledgement, and it comes after the bytes.
                assert!(pair.remote.read(i, len) == bytes, "v1 WRITE of {len}");
            }
            assert!(pair.remote.read(i, len) == bytes, "{version:?} WRITE of {len}");
            let back = HostBuffer::zeroed(len).unwrap();
            pair.start(Op::Read, &back, at, len).wait().unwrap();
            assert!(back.read(0, len) == bytes, "{version:?} READ of {len}");
        }
    }
}

#[test]
fn batches_of_many_small_blocks_arrive() {
    for version in [Version::V2, Version::V1] {
        let mut config = Config::default();
        config.newest_version = version;
        config.transfer_timeout = std::time::Duration::from_secs(20);
        let pair = Pair::with(32 << 20, config);
        for count in [1, 128, if version == Version::V2 { 5000 } else { 500 }] {
            let bytes = pattern(32 << 20, count as u64);
            let local = buffer(&bytes);
            let blocks: Vec<(usize, usize)> = blocks(count);
            let requests = |op| -> Vec<_> {
                let one = |&(at, len): &(usize, usize)| {
                    local.request(op, at, pair.remote.addr() + at as u64, len).unwrap()
                };
                blocks.iter().map(one).collect()
            };
            let write = pair.segment.submit_owned(&requests(Op::Write), SubmitOptions::default());
            write.unwrap().wait().unwrap();
            assert!(
                blocks.iter().all(|&(at, len)| pair.remote.read(at, len) == bytes[at..at + len])
            );
            local.write(0, &vec![0; 32 << 20]);
            let read = pair.segment.submit_owned(&requests(Op::Read), SubmitOptions::default());
            read.unwrap().wait().unwrap();
            assert!(blocks.iter().all(|&(at, len)| local.read(at, len) == bytes[at..at + len]));
        }
    }
}

/// Blocks of 1 to 4,095 bytes that do not overlap.
fn blocks(count: usize) -> Vec<(usize, usize)> {
    let mut at = 3;
    (0..count)
        .map(|i| {
            let len = 1 + (i * 2_654_435_761) % 4095;
            at += len + i % 5;
            (at - len, len)
        })
        .collect()
}

#[test]
fn an_engine_is_its_own_peer_without_a_socket() {
    let e = engine(Config::default());
    let memory = buffer(&pattern(3 << 20, 1));
    e.register_buffer(&memory, &Default::default()).unwrap();
    let segment = e.open(e.name()).unwrap();
    for len in [100, 2 << 20] {
        let before = memory.read(0, len);
        let request = memory.request(Op::Write, 0, memory.addr() + (1 << 20), len).unwrap();
        segment.submit_owned(&[request], SubmitOptions::default()).unwrap().wait().unwrap();
        assert!(memory.read(1 << 20, len) == before, "overlap does no harm");
        let elsewhere = HostBuffer::zeroed(len).unwrap();
        let request = elsewhere.request(Op::Read, 0, memory.addr(), len).unwrap();
        segment.submit_owned(&[request], SubmitOptions::default()).unwrap().wait().unwrap();
        assert!(elsewhere.read(0, len) == memory.read(0, len));
    }
    assert_eq!(e.stats().connections_accepted, 0);
    assert_eq!(e.stats().lanes_opened, 0);
}

#[test]
fn notifications_come_after_their_bytes_and_in_order() {
    let pair = Pair::new(4096);
    let local = buffer(&pattern(4096, 9));
    for i in 0..50 {
        let options =
            SubmitOptions::default().with_notification(Notification::new("n", i.to_string()));
        let request = local.request(Op::Write, 0, pair.remote.addr(), 4096).unwrap();
        // Not waited for: a notification is sent without anyone polling.
        let _ = pair.segment.submit_owned(&[request], options).unwrap();
    }
    let mut messages = Vec::new();
    eventually("50 notifications", || {
        messages.extend(pair.target.take_notifications().into_iter().map(|n| n.message));
        messages.len() >= 50
    });
    assert_eq!(messages, (0..50).map(|i| i.to_string()).collect::<Vec<_>>());
    pair.segment.notify(&Notification::new("x", "y")).unwrap();
    assert_eq!(pair.target.take_notifications().len(), 1);
    pair.initiator.probe(pair.target.name()).unwrap();
}
