//! Copies that do not end: deadlines hold, what the copy may touch stays, and all of it comes back when it ends.

use std::time::Duration;

use tensorferry::{Batch, BatchState, HostBuffer, Op};

use crate::common::{PROMPT, buffer, eventually, ms, row, says, timed, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Block, Two, apart, end, submit, text};

/// A device at each end that can hang by itself.
struct Sides {
    here: Sim,
    there: Sim,
    two: Two,
}

impl Sides {
    fn new() -> Self {
        let (here, there) = (Sim::cuda(), Sim::cuda());
        let two = Two::with(here.config(), there.config());
        Self { here, there, two }
    }

    /// Memory at each end, registered.
    fn blocks(&self, len: usize) -> (Block<'_>, Block<'_>) {
        let (local, remote) = (self.here.alloc(len), self.there.alloc(len));
        local.lend(&self.two.initiator);
        remote.lend(&self.two.target);
        // The rings are there, and lanes.
        self.two.run(vec![local.request(Op::Write, 0, remote.addr, len.min(MIB))]).unwrap();
        (local, remote)
    }

    fn are_whole(self) {
        drop(self.two);
        for sim in [&self.here, &self.there] {
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
        }
    }
}

fn hangs(sim: &Sim) {
    eventually("a copy hangs", || sim.control.count("copies_in_flight") > 0);
}

/// Transfers work in both directions, with right bytes.
fn work(sides: &Sides, local: &Block<'_>, remote: &Block<'_>) {
    // These are behind whatever hung, in every direction of both devices, and their end is the end of that.
    for op in [Op::Write, Op::Read] {
        sides.two.run(vec![local.request(op, 0, remote.addr, local.len)]).unwrap();
    }
    for (op, seed) in [(Op::Write, 1), (Op::Read, 2)] {
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        from.write(0, text(local.len, seed));
        sides.two.run(vec![local.request(op, 0, remote.addr, local.len)]).unwrap();
        assert!(to.read(0, local.len) == text(local.len, seed));
    }
}

apart! {
    fn a_copy_that_hangs_here_ends_at_its_deadline_and_says_so() {
        let sides = Sides::new();
        let (local, remote) = sides.blocks(12 * MIB);
        for op in [Op::Write, Op::Read] {
            // One that is sent in part, one that is not, and one that is in slots altogether.
            for (after, len) in [(5, 12 * MIB), (0, 12 * MIB), (0, 1000)] {
                sides.here.control.set("hang_after", after);
                let request = local.request(op, 0, remote.addr, len);
                let (result, took) = timed(|| {
                    end(&submit(&sides.two.segment, vec![request], within(ms(1500))).unwrap())
                });
                let error = result.unwrap_err();
                assert_eq!(error.code(), 29, "{op:?}, {after}, {len}: {error}");
                let subject = match op {
                    Op::Write => format!("WRITE of {len} bytes to {:#x} at ", remote.addr),
                    Op::Read => format!("READ of {len} bytes from {:#x} at ", remote.addr),
                };
                says(
                    &error,
                    &[
                        &subject,
                        sides.two.target.name(),
                        "a copy on cuda:1 does not end; its buffers stay registered",
                    "may be read or written until it does",
                        "look for a kernel or a driver that hangs, and end the process",
                    ],
                );
                assert!(!error.is_retryable());
                assert!(took >= ms(1500) && took < ms(1500) + PROMPT, "{op:?}: {took:?}");
                sides.here.control.heal();
                work(&sides, &local, &remote);
            }
        }
        sides.two.initiator.unregister(local.addr).unwrap();
        sides.are_whole();
    }
}

apart! {
    fn a_copy_that_hangs_can_be_cancelled() {
        for op in [Op::Write, Op::Read] {
            let sides = Sides::new();
            let (local, remote) = sides.blocks(12 * MIB);
            sides.here.control.set("hang", 1);
            let batches: Vec<Batch> = [1000, MIB, 12 * MIB]
                .iter()
                .map(|len| {
                    let request = local.request(op, 0, remote.addr, *len);
                    submit(&sides.two.segment, vec![request], within(ms(20_000))).unwrap()
                })
                .collect();
            hangs(&sides.here);
            for batch in &batches {
                let ((), took) = timed(|| batch.cancel());
                assert!(took < PROMPT, "{op:?}: {took:?}");
                assert!([14, 29].contains(&batch.wait().unwrap_err().code()));
            }
            assert_eq!(batches[0].wait().unwrap_err().code(), 29, "its copy has begun");
            assert_eq!(batches[0].poll(), BatchState::Failed);
            sides.here.control.heal();
            work(&sides, &local, &remote);
            sides.are_whole();
        }
    }
}

apart! {
    fn what_a_hung_copy_may_touch_stays_registered_until_it_ends() {
        for initiators in [true, false] {
            let sides = Sides::new();
            let (local, remote) = sides.blocks(4 * MIB);
            let (sim, engine, addr) = if initiators {
                (&sides.here, &sides.two.initiator, local.addr)
            } else {
                (&sides.there, &sides.two.target, remote.addr)
            };
            sim.control.set("hang", 1);
            // Into the device: at the initiator a READ, at the target a WRITE.
            let op = if initiators { Op::Read } else { Op::Write };
            let request = local.request(op, 0, remote.addr, 4 * MIB);
            let batch = submit(&sides.two.segment, vec![request], within(ms(1500))).unwrap();
            let error = end(&batch).unwrap_err();
            if initiators {
                assert_eq!(error.code(), 29, "{error}");
            } else {
                assert_eq!(error.code(), 13, "{error}");
                says(&error, &["bytes had been sent, so the remote range may still be written"]);
            }
            let error = engine.unregister(addr).unwrap_err();
            assert_eq!(error.code(), 6, "{error}");
            let range = format!("the buffer [{addr:#x}, +{}) is still in use after ", 4 * MIB);
            says(&error, &[&range, "keep its memory mapped and call unregister again"]);
            assert!(error.is_retryable());
            // Peers cannot reach it any more, and its slots are lent to nobody else.
            assert!(engine.buffers().is_empty());
            sim.control.heal();
            let (result, took) = timed(|| engine.unregister(addr));
            result.unwrap();
            assert!(took < PROMPT, "{took:?}");
            if initiators { &local } else { &remote }.lend(engine);
            work(&sides, &local, &remote);
            sides.are_whole();
        }
    }
}

apart! {
    fn an_engine_with_a_hung_copy_is_closed_all_the_same() {
        for (op, initiators) in
            [(Op::Write, true), (Op::Read, true), (Op::Write, false), (Op::Read, false)]
        {
            let sides = Sides::new();
            let (local, remote) = sides.blocks(4 * MIB);
            let (sim, engine) = if initiators {
                (&sides.here, &sides.two.initiator)
            } else {
                (&sides.there, &sides.two.target)
            };
            sim.control.set("hang", 1);
            let request = local.request(op, 0, remote.addr, 4 * MIB);
            let batch = submit(&sides.two.segment, vec![request], within(ms(20_000))).unwrap();
            hangs(sim);
            let ((), took) = timed(|| engine.close());
            assert!(took < PROMPT, "{op:?}: {took:?}");
            if initiators {
                let result = batch.wait_timeout(Duration::ZERO).expect("final when it is closed");
                assert!([23, 29].contains(&result.unwrap_err().code()));
            } else {
                let (result, took) = timed(|| end(&batch));
                assert!([7, 8, 10, 11].contains(&result.unwrap_err().code()), "{op:?}");
                assert!(took < PROMPT, "{op:?}: {took:?}");
            }
            // Its slots are left to the copy, and so is its end.
            assert!(sim.control.count("pinned_bytes") > 0);
            sim.control.heal();
        }
    }
}

apart! {
    /// The buffer is the engine's own, so nothing else keeps it allocated.
    fn a_lent_buffer_is_not_freed_under_a_hung_copy() {
        for op in [Op::Write, Op::Read] {
            let sides = Sides::new();
            let (local, remote) = sides.blocks(MIB);
            let device = sides.here.device(1);
            let buffer = sides.two.initiator.device_buffer(device, MIB).unwrap();
            sides.here.control.set("hang", 1);
            let request = buffer.request(op, 0, remote.addr, MIB).unwrap();
            let batch = sides
                .two
                .segment
                .submit_owned(std::slice::from_ref(&request), within(ms(1500)))
                .unwrap();
            assert_eq!(end(&batch).unwrap_err().code(), 29);
            drop((request, batch, buffer));
            // What is freed is freed before the next is allocated, and waits for the device.
            let (result, took) = timed(|| sides.two.initiator.device_buffer(device, MIB));
            drop(result.unwrap());
            assert!(took < PROMPT, "{took:?}: the copy's memory is being freed");
            sides.here.control.heal();
            eventually("the memory is freed", || sides.here.control.calls("cuMemFree_v2") == 2);
            work(&sides, &local, &remote);
            sides.are_whole();
        }
    }
}

apart! {
    fn closing_does_not_free_a_lent_buffer_under_a_hung_copy() {
        let sides = Sides::new();
        let (_, remote) = sides.blocks(MIB);
        let buffer = sides.two.initiator.device_buffer(sides.here.device(1), MIB).unwrap();
        sides.here.control.set("hang", 1);
        let request = buffer.request(Op::Read, 0, remote.addr, MIB).unwrap();
        let batch = sides.two.segment.submit_owned(&[request], within(ms(20_000))).unwrap();
        hangs(&sides.here);
        drop(buffer);
        let ((), took) = timed(|| sides.two.initiator.close());
        assert!(took < PROMPT, "{took:?}");
        assert!(batch.poll() != BatchState::Running);
        let ((), took) = timed(|| drop((batch, sides.two)));
        assert!(took < PROMPT, "{took:?}");
        assert_eq!(sides.here.control.calls("cuMemFree_v2"), 0);
        sides.here.control.heal();
    }
}

apart! {
    /// What does not need the device does not wait for it longer than what does.
    fn host_memory_goes_on_beside_a_hung_copy() {
        let sides = Sides::new();
        let (local, remote) = sides.blocks(4 * MIB);
        let there = HostBuffer::zeroed(MIB).unwrap();
        sides.two.target.register_buffer(&there, &Default::default()).unwrap();
        sides.here.control.set("hang", 1);
        for op in [Op::Write, Op::Read] {
            let request = local.request(op, 0, remote.addr, 4 * MIB);
            let stuck = submit(&sides.two.segment, vec![request], within(ms(1500))).unwrap();
            hangs(&sides.here);
            let here = buffer(text(MIB, 3));
            let requests = row(Op::Write, &here, there.addr(), MIB / 8, 8);
            let (result, took) = timed(|| {
                end(&sides.two.segment.submit_owned(&requests, within(ms(8000))).unwrap())
            });
            result.unwrap();
            assert!(took < ms(1500) + PROMPT, "{took:?}");
            assert!(there.read(0, MIB) == text(MIB, 3));
            assert_eq!(end(&stuck).unwrap_err().code(), 29);
        }
        sides.here.control.heal();
    }
}

apart! {
    /// One copy hangs for a while, and others of its direction behind it; the ring is smaller meanwhile, and whole
    /// afterwards.
    fn slots_of_hung_copies_come_back_when_they_end() {
        let sides = Sides::new();
        let (local, remote) = sides.blocks(16 * MIB);
        for op in [Op::Write, Op::Read] {
            for round in 0..3 {
                sides.here.control.set("hang_after", round);
                let one = |i: usize| {
                    let request = local.request(op, i * MIB, remote.addr + (i * MIB) as u64, MIB);
                    submit(&sides.two.segment, vec![request], within(ms(200))).unwrap()
                };
                let batches: Vec<_> = (0..16).map(one).collect();
                for batch in &batches {
                    if let Err(error) = end(batch) {
                        assert!([13, 29].contains(&error.code()), "{error}");
                    }
                }
                sides.here.control.heal();
                work(&sides, &local, &remote);
            }
        }
        sides.are_whole();
    }
}
