//! Completed means applied: when a transfer is complete, the devices' copies are.

use std::time::Duration;

use tensorferry::gpu::Vendor;
use tensorferry::{HostBuffer, Notification, Op, Request};

use crate::common::{engine, eventually, ms, within};
use crate::fake::{Answer, Raw};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Dice, Two, apart, end, submit, text};

const LEN: usize = 3 * MIB;

/// Copies that come to their end long after they were submitted.
fn late(sim: &Sim) {
    sim.control.set("latency_ns", 2_000_000);
    sim.control.set("h2d_bytes_per_second", 1 << 30);
    sim.control.set("d2h_bytes_per_second", 1 << 30);
}

apart! {
    fn every_byte_is_in_place_when_a_transfer_is_complete() {
        // Each copy has its latency, one after the other.
        const SMALL: usize = 20;
        for sim in [Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.6"])] {
            let two = Two::new(&sim.config());
            let (local, remote) = (sim.alloc(LEN), sim.alloc(LEN));
            let host = [(); 2].map(|()| HostBuffer::zeroed(LEN).unwrap());
            remote.lend(&two.target);
            local.lend(&two.initiator);
            two.target.register_buffer(&host[1], &Default::default()).unwrap();
            late(&sim);
            let mut dice = Dice(3);
            for i in 0..90 {
                let len = match dice.roll(4) {
                    0 => 1 + dice.roll(500),
                    1 => 1 + dice.roll(70_000),
                    2 => MIB,
                    _ => 1 + dice.roll(LEN - 1),
                };
                let bytes = text(len, i);
                let op = if i % 2 == 0 { Op::Write } else { Op::Read };
                match (i / 2 % 3, op) {
                    (0, Op::Write) => {
                        local.write(0, bytes);
                        two.run(vec![local.request(op, 0, remote.addr, len)]).unwrap();
                        assert!(remote.read(0, len) == bytes, "{i}: {op:?} of {len} bytes");
                    }
                    (0, Op::Read) => {
                        remote.write(0, bytes);
                        two.run(vec![local.request(op, 0, remote.addr, len)]).unwrap();
                        assert!(local.read(0, len) == bytes, "{i}: {op:?} of {len} bytes");
                    }
                    (1, Op::Write) => {
                        host[0].write(0, bytes);
                        let request = host[0].request(op, 0, remote.addr, len).unwrap();
                        let batch = two.segment.submit_owned(&[request], within(ms(20_000)));
                        end(&batch.unwrap()).unwrap();
                        assert!(remote.read(0, len) == bytes, "{i}: {op:?} of {len} bytes");
                    }
                    (1, Op::Read) => {
                        host[1].write(0, bytes);
                        two.run(vec![local.request(op, 0, host[1].addr(), len)]).unwrap();
                        assert!(local.read(0, len) == bytes, "{i}: {op:?} of {len} bytes");
                    }
                    // Small ones, which share a slot and a copy.
                    _ => {
                        let (from, to) =
                            if op == Op::Write { (&local, &remote) } else { (&remote, &local) };
                        from.write(0, text(LEN, i));
                        to.fill(0);
                        let at = |k: usize| k * 53_001;
                        let one = |k| local.request(op, at(k), remote.addr + at(k) as u64, 700);
                        two.run((0..SMALL).map(one).collect()).unwrap();
                        let got = to.read(0, LEN);
                        for k in 0..SMALL {
                            assert!(
                                got[at(k)..][..700] == text(LEN, i)[at(k)..][..700],
                                "{i}: {k}"
                            );
                        }
                    }
                }
            }
        }
    }
}

apart! {
    fn an_acknowledgement_follows_the_copy_it_acknowledges() {
        let sim = Sim::cuda();
        let target = engine(sim.config());
        let (block, host) = (sim.alloc(LEN), HostBuffer::zeroed(LEN).unwrap());
        block.lend(&target);
        target.register_buffer(&host, &Default::default()).unwrap();
        late(&sim);
        let mut raw = Raw::connect(target.data_port());
        for i in 0..60 {
            let len = [1, 4000, 20_000, 300_000][i % 4];
            let bytes = text(len, i);
            // A WRITE to the host between two to the device: its answer may not be taken for theirs.
            raw.write(block.addr, bytes);
            raw.write(host.addr(), bytes);
            raw.write(block.addr + len as u64, bytes);
            assert_eq!(raw.answer(), Answer::Applied);
            assert!(block.read(0, len) == bytes, "{i}");
            assert_eq!(raw.answer(), Answer::Applied);
            assert!(host.read(0, len) == bytes, "{i}");
            assert_eq!(raw.answer(), Answer::Applied);
            assert!(block.read(len, len) == bytes, "{i}");
            // What follows on the connection sees it as well.
            raw.write(block.addr, &bytes[..len.div_ceil(2)]);
            raw.ask(block.addr + len as u64, len as u64);
            assert_eq!(raw.answer(), Answer::Applied);
            assert_eq!(raw.answer(), Answer::Applied);
            assert!(raw.bytes(len) == bytes, "{i}");
        }
    }
}

apart! {
    fn a_notification_follows_the_copies_of_its_batch() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (local, remote) = (sim.alloc(LEN), sim.alloc(LEN));
        remote.lend(&two.target);
        late(&sim);
        sim.control.set("h2d_bytes_per_second", 100 << 20);
        for i in 0..5 {
            let bytes = text(LEN, i);
            local.write(0, bytes);
            let notification = Notification::new(i.to_string(), "");
            let requests: Vec<Request> = (0..3)
                .map(|k| local.request(Op::Write, k * MIB, remote.addr + (k * MIB) as u64, MIB))
                .collect();
            let options = within(Duration::from_secs(20)).with_notification(notification);
            let batch = submit(&two.segment, requests, options).unwrap();
            eventually("it arrives", || !two.target.take_notifications().is_empty());
            assert!(remote.read(0, LEN) == bytes, "{i}");
            end(&batch).unwrap();
        }
    }
}
