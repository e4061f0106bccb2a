//! Device memory by the first version of the protocol, in which the end of a connection is the only answer.

use tensorferry::{Op, Version};

use crate::common::{lanes, ms, within};
use crate::gpu::{MIB, SLOT, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

/// An initiator that speaks the first version only, and a target; a simulated driver for each.
fn first_version(slots: usize) -> (Sim, Sim, Two) {
    let (here, there) = (Sim::cuda(), Sim::cuda());
    let mut config = here.add_to(lanes(4, 1));
    config.newest_version = Version::V1;
    config.staging_slots = slots;
    let mut target = there.config();
    target.staging_slots = slots;
    let two = Two::with(config, target);
    (here, there, two)
}

apart! {
    fn every_size_moves_and_is_in_place_when_it_is_complete() {
        for slots in [8, 2] {
            let (here, there, two) = first_version(slots);
            let (local, remote) = (here.alloc(17 * MIB), there.alloc(17 * MIB));
            local.lend(&two.initiator);
            remote.lend(&two.target);
            for sim in [&here, &there] {
                sim.control.set("latency_ns", 2_000_000);
            }
            for (i, len) in [1, 511, 16 << 10, SLOT - 1, SLOT + 1, 3 * SLOT + 7, 17 * MIB]
                .into_iter()
                .enumerate()
            {
                for (op, seed) in [(Op::Write, i), (Op::Read, 50 + i)] {
                    let (from, to) =
                        if op == Op::Write { (&local, &remote) } else { (&remote, &local) };
                    from.write(0, text(len, seed));
                    two.run(vec![local.request(op, 0, remote.addr, len)]).unwrap();
                    assert!(to.read(0, len) == text(len, seed), "{op:?} of {len} bytes");
                }
            }
            // Several at once, each on a connection of its own.
            for (op, seed) in [(Op::Write, 7), (Op::Read, 8)] {
                let (from, to) =
                    if op == Op::Write { (&local, &remote) } else { (&remote, &local) };
                from.write(0, text(16 * MIB, seed));
                to.fill(0);
                let one =
                    |i: usize| local.request(op, i * MIB, remote.addr + (i * MIB) as u64, MIB - 1);
                two.run((0..16).map(one).collect()).unwrap();
                let got = to.read(0, 16 * MIB);
                for i in 0..16 {
                    let range = i * MIB..(i + 1) * MIB - 1;
                    assert!(got[range.clone()] == text(16 * MIB, seed)[range], "{op:?}, entry {i}");
                }
            }
            drop(two);
            for sim in [here, there] {
                assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
            }
        }
    }
}

apart! {
    fn a_copy_that_fails_at_the_target_is_no_success() {
        let (here, there, two) = first_version(8);
        let (local, remote) = (here.alloc(3 * MIB), there.alloc(3 * MIB));
        local.lend(&two.initiator);
        remote.lend(&two.target);
        there.control.set("latency_ns", 5_000_000);
        for len in [1, 1000, 20_000, 3 * MIB] {
            for (op, call) in
                [(Op::Write, "cuMemcpyHtoDAsync_v2"), (Op::Read, "cuMemcpyDtoHAsync_v2")]
            {
                for code in [1, 2, 999] {
                    // All of them: a READ that is lost is asked for again.
                    there.control.inject(call, 1, 0, code);
                    let request = local.request(op, 0, remote.addr, len);
                    let batch = submit(&two.segment, vec![request], within(ms(8000))).unwrap();
                    let error = end(&batch).expect_err("it looked like success");
                    let right = if op == Op::Write { 11 } else { 10 };
                    assert_eq!(error.code(), right, "{op:?} of {len} bytes: {error}");
                    there.control.heal();
                    let (from, to) =
                        if op == Op::Write { (&local, &remote) } else { (&remote, &local) };
                    from.write(0, text(len, 3));
                    two.run(vec![request]).unwrap();
                    assert!(to.read(0, len) == text(len, 3));
                }
            }
        }
    }
}

apart! {
    /// The device says so when the copy runs, long after the last byte has arrived.
    fn a_copy_that_fails_late_at_the_target_is_no_success() {
        for len in [1000, 2 * MIB] {
            let (here, there, two) = first_version(8);
            let (local, remote) = (here.alloc(2 * MIB), there.alloc(2 * MIB));
            remote.lend(&two.target);
            there.control.set("latency_ns", 20_000_000);
            there.control.inject("copy", 1, 1, 700);
            let request = local.request(Op::Write, 0, remote.addr, len);
            let batch = submit(&two.segment, vec![request], within(ms(8000))).unwrap();
            let error = end(&batch).expect_err("it looked like success");
            assert_eq!(error.code(), 11, "{error}");
        }
    }
}

apart! {
    fn a_copy_that_fails_at_the_initiator_fails_its_request() {
        let (here, there, two) = first_version(8);
        let (local, remote) = (here.alloc(3 * MIB), there.alloc(3 * MIB));
        remote.lend(&two.target);
        for (op, call) in [(Op::Write, "cuMemcpyDtoHAsync_v2"), (Op::Read, "cuMemcpyHtoDAsync_v2")]
        {
            for (len, nth) in [(1000, 1), (3 * MIB, 1), (3 * MIB, 3)] {
                here.control.inject(call, nth, 1, 1);
                let request = local.request(op, 0, remote.addr, len);
                let error = two.run(vec![request]).unwrap_err();
                assert_eq!(error.code(), 28, "{op:?} of {len} bytes: {error}");
                two.run(vec![request]).unwrap();
            }
        }
    }
}
