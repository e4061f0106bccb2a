//! Devices that fail in the middle of transfers: what fails says so, and nothing else does.
#![expect(unsafe_code, reason = "memory that is registered by its address")]

use tensorferry::{Batch, HostBuffer, Op, RegisterOptions, Request};

use crate::common::{PROMPT, buffer, eventually, ms, row, says, timed, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Block, Two, apart, end, submit, text};

/// An engine with a device of its own at each end, so that one can fail and the other not.
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

    fn side(&self, initiators: bool) -> &Sim {
        if initiators { &self.here } else { &self.there }
    }

    /// Both are as they were: no slot is lost, nothing is left pinned.
    fn are_whole(self) {
        drop(self.two);
        for sim in [&self.here, &self.there] {
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
        }
    }
}

fn slow(sim: &Sim) {
    sim.control.set("d2h_bytes_per_second", 64 << 20);
    sim.control.set("h2d_bytes_per_second", 64 << 20);
}

/// Host memory moves both ways, whether it is registered or not.
fn host_memory_moves(two: &Two) {
    let remote = HostBuffer::zeroed(MIB).unwrap();
    two.target.register_buffer(&remote, &RegisterOptions::default()).unwrap();
    for registered in [false, true] {
        let local = buffer(text(MIB, 9));
        if registered {
            // SAFETY: unregistered below, before the buffer goes.
            unsafe { two.initiator.register(local.addr(), MIB as u64, &Default::default()) }
                .unwrap();
        }
        let run = |op| {
            let requests = row(op, &local, remote.addr(), MIB / 4, 4);
            end(&two.segment.submit_owned(&requests, within(ms(8000)))?)
        };
        run(Op::Write).unwrap();
        assert!(remote.read(0, MIB) == text(MIB, 9));
        remote.write(0, text(MIB, 8));
        run(Op::Read).unwrap();
        assert!(local.read(0, MIB) == text(MIB, 8));
        if registered {
            two.initiator.unregister(local.addr()).unwrap();
        }
    }
    two.target.unregister(remote.addr()).unwrap();
}

/// What takes two seconds to copy when it is slow.
const MUCH: usize = 128 * MIB;

/// A transfer of that much, which has begun.
fn begun(sides: &Sides, op: Op, local: &Block<'_>, remote: &Block<'_>) -> Batch {
    let request = local.request(op, 0, remote.addr, MUCH);
    let batch = submit(&sides.two.segment, vec![request], within(ms(8000))).unwrap();
    for sim in [&sides.here, &sides.there] {
        eventually("bytes move", || sim.control.count("copies") > 1);
    }
    batch
}

apart! {
    fn a_device_fault_in_mid_transfer_ends_it_and_host_memory_goes_on() {
        for (initiators, op) in
            [(true, Op::Write), (true, Op::Read), (false, Op::Write), (false, Op::Read)]
        {
            let sides = Sides::new();
            let (local, remote) = (sides.here.alloc(MUCH), sides.there.alloc(MUCH));
            local.lend(&sides.two.initiator);
            remote.lend(&sides.two.target);
            slow(&sides.here);
            slow(&sides.there);
            let batch = begun(&sides, op, &local, &remote);
            let sim = sides.side(initiators);
            sim.control.set("sticky", 700);
            let (result, took) = timed(|| end(&batch));
            let error = result.unwrap_err();
            assert!(took < PROMPT, "{took:?}");
            let subject = match op {
                Op::Write => format!("WRITE of {} bytes to {:#x} at", MUCH, remote.addr),
                Op::Read => format!("READ of {} bytes from {:#x} at", MUCH, remote.addr),
            };
            if initiators {
                assert_eq!(error.code(), 28, "{error}");
                says(
                    &error,
                    &[
                        &subject,
                        sides.two.target.name(),
                        "answered 700 CUDA_ERROR_ILLEGAL_ADDRESS",
                        "a kernel of this process failed earlier",
                        "start the process anew; host memory still moves",
                        "the content of the destination is undefined",
                    ],
                );
                assert!(!error.is_retryable());
            } else {
                // The protocol has no words for it: a WRITE's answer does not come, a READ's neither, or a refusal.
                let codes: &[u32] = if op == Op::Write { &[11] } else { &[8, 10] };
                assert!(codes.contains(&error.code()), "{error}");
                says(&error, &[&subject, sides.two.target.name()]);
            }
            host_memory_moves(&sides.two);
            // Whatever needs that device says why it cannot be had, at once.
            let engine = if initiators { &sides.two.initiator } else { &sides.two.target };
            let (_, device) = (engine, sim.device(1));
            let (error, took) = timed(|| engine.device_buffer(device, 64).unwrap_err());
            assert_eq!(error.code(), 27, "{error}");
            says(&error, &["cuda:1", "700 CUDA_ERROR_ILLEGAL_ADDRESS", "failed earlier"]);
            assert!(took < PROMPT, "{took:?}");
            if initiators {
                let error = sides.two.run(vec![local.request(op, 0, remote.addr, 100)]);
                let error = error.unwrap_err();
                says(&error, &["700 CUDA_ERROR_ILLEGAL_ADDRESS", "failed earlier"]);
            }
            // The other end's device is as good as before.
            let host = buffer(text(MIB, 4));
            if initiators {
                let request = host.request(Op::Write, 0, remote.addr, MIB).unwrap();
                end(&sides.two.segment.submit_owned(&[request], within(ms(8000))).unwrap())
                    .unwrap();
                assert!(remote.read(0, MIB) == text(MIB, 4));
            }
            let ((), took) = timed(|| sides.two.initiator.close());
            assert!(took < PROMPT, "{took:?}");
            let ((), took) = timed(|| sides.two.target.close());
            assert!(took < PROMPT, "{took:?}");
        }
    }
}

/// Eight entries of 1 MiB; their results.
fn eight(sides: &Sides, op: Op, local: &Block<'_>, remote: &Block<'_>) -> Batch {
    let one = |i: usize| local.request(op, i * MIB, remote.addr + (i * MIB) as u64, MIB);
    let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
    from.write(0, text(8 * MIB, 3));
    to.fill(0);
    let batch = submit(&sides.two.segment, (0..8).map(one).collect(), within(ms(8000))).unwrap();
    let _ = end(&batch);
    for i in 0..8 {
        if batch.entry(i).unwrap().is_ok() {
            assert!(to.read(i * MIB, MIB) == text(8 * MIB, 3)[i * MIB..][..MIB], "entry {i}");
        }
    }
    batch
}

const NAMES: [(i32, &str); 3] = [
    (1, "answered 1 CUDA_ERROR_INVALID_VALUE"),
    (2, "answered 2 CUDA_ERROR_OUT_OF_MEMORY"),
    (999, "answered 999 CUDA_ERROR_UNKNOWN"),
];

apart! {
    fn a_copy_that_fails_here_fails_its_entry_alone() {
        let sides = Sides::new();
        let (local, remote) = (sides.here.alloc(8 * MIB), sides.there.alloc(8 * MIB));
        local.lend(&sides.two.initiator);
        remote.lend(&sides.two.target);
        for (op, call) in [(Op::Write, "cuMemcpyDtoHAsync_v2"), (Op::Read, "cuMemcpyHtoDAsync_v2")]
        {
            for (code, name) in NAMES {
                for nth in [1, 2, 5, 7] {
                    sides.here.control.inject(call, nth, 1, code);
                    let batch = eight(&sides, op, &local, &remote);
                    let failures = batch.failures();
                    // Neighbours whose bytes came one behind the other may be copied as one.
                    let (first, last) = (failures[0].0, failures[failures.len() - 1].0);
                    let alone = failures.len() == 1 || (op == Op::Read && last == first + 1);
                    assert!(alone, "{op:?}, call {nth}: {failures:?}");
                    let (i, error) = &failures[0];
                    assert_eq!(error.code(), 28, "{error}");
                    let at = remote.addr + (i * MIB) as u64;
                    let subject = format!("{at:#x} at {}", sides.two.target.name());
                    let doing = if op == Op::Write { "bytes from 0x" } else { "bytes to 0x" };
                    let said = format!("{call} {name}");
                    says(error, &[&subject, "copying ", doing, &said, "destination is undefined"]);
                    assert!(eight(&sides, op, &local, &remote).failures().is_empty());
                }
            }
        }
        sides.are_whole();
    }
}

apart! {
    fn a_copy_that_fails_there_fails_what_shares_its_connection_and_heals() {
        let sides = Sides::new();
        let (local, remote) = (sides.here.alloc(8 * MIB), sides.there.alloc(8 * MIB));
        local.lend(&sides.two.initiator);
        remote.lend(&sides.two.target);
        for (op, call) in [(Op::Write, "cuMemcpyHtoDAsync_v2"), (Op::Read, "cuMemcpyDtoHAsync_v2")]
        {
            for (code, _) in NAMES {
                for nth in [1, 2, 5, 7] {
                    sides.there.control.inject(call, nth, 1, code);
                    let failures = eight(&sides, op, &local, &remote).failures();
                    for (i, error) in &failures {
                        // A READ of which nothing was sent is refused; one that was lost is asked for again.
                        let right = if op == Op::Write { 11 } else { 8 };
                        assert_eq!(error.code(), right, "entry {i}: {error}");
                    }
                    assert!(op == Op::Read || !failures.is_empty(), "it looked like success");
                    assert!(op == Op::Write || failures.len() <= 1, "{failures:?}");
                    assert!(eight(&sides, op, &local, &remote).failures().is_empty());
                    host_memory_moves(&sides.two);
                }
            }
        }
        sides.are_whole();
    }
}

apart! {
    /// The device says at the end of a copy that it failed, not when it is asked for.
    fn a_copy_that_fails_while_it_runs_is_no_success() {
        for (initiators, op) in
            [(true, Op::Write), (true, Op::Read), (false, Op::Write), (false, Op::Read)]
        {
            let sides = Sides::new();
            let (local, remote) = (sides.here.alloc(8 * MIB), sides.there.alloc(8 * MIB));
            local.lend(&sides.two.initiator);
            remote.lend(&sides.two.target);
            sides.side(initiators).control.inject("copy", 3, 1, 700);
            // Entries that are said to be complete were compared.
            assert!(!eight(&sides, op, &local, &remote).failures().is_empty());
            host_memory_moves(&sides.two);
        }
    }
}

apart! {
    /// An event that cannot be recorded says nothing about the copies before it, which go on.
    fn a_copy_that_no_event_tells_of_is_waited_for() {
        let sides = Sides::new();
        let (local, remote) = (sides.here.alloc(8 * MIB), sides.there.alloc(8 * MIB));
        let spare = sides.here.alloc(MIB);
        local.lend(&sides.two.initiator);
        remote.lend(&sides.two.target);
        for i in 0..5 {
            sides.here.control.set("latency_ns", 30_000_000);
            sides.here.control.inject("cuEventRecord", 1, 1, 1);
            let error =
                sides.two.run(vec![local.request(Op::Read, 0, remote.addr, 1000)]).unwrap_err();
            says(
                &error,
                &["recording an event", "cuEventRecord answered 1 CUDA_ERROR_INVALID_VALUE"],
            );
            local.fill(0x5a);
            sides.two.run(vec![spare.request(Op::Read, 0, remote.addr, 1000)]).unwrap();
            assert!(local.is_all(0x5a), "bytes came after the end");
            // Nor is the slot lent to others meanwhile: entries that are complete are right.
            for op in [Op::Write, Op::Read] {
                for sim in [&sides.here, &sides.there] {
                    sim.control.set("latency_ns", 3_000_000);
                    sim.control.inject("cuEventRecord", 1 + i, 2, 1);
                }
                let _ = eight(&sides, op, &local, &remote);
                sides.here.control.heal();
                sides.there.control.heal();
                assert!(eight(&sides, op, &local, &remote).failures().is_empty());
            }
        }
        sides.are_whole();
    }
}

apart! {
    fn pinned_memory_that_cannot_be_had_is_an_error_that_says_what_to_do() {
        let sides = Sides::new();
        let (local, remote) = (sides.here.alloc(MIB), sides.there.alloc(MIB));
        remote.lend(&sides.two.target);
        sides.here.control.inject("cuMemHostAlloc", 1, 0, 2);
        let error = local.lend_as(&sides.two.initiator, &Default::default()).unwrap_err();
        assert_eq!(error.code(), 27, "{error}");
        let words = [
            "pinning 8388608 bytes of host memory for cuda:1",
            "cuMemHostAlloc answered 2 CUDA_ERROR_OUT_OF_MEMORY (",
            "free device or pinned host memory, or use fewer or smaller staging buffers",
        ];
        says(&error, &words);
        assert!(sides.two.initiator.buffers().is_empty());
        // Memory that is not registered fails its request, and the engine lives.
        for op in [Op::Write, Op::Read] {
            let request = local.request(op, 0, remote.addr, MIB);
            let (result, took) = timed(|| sides.two.run(vec![request]));
            let error = result.unwrap_err();
            assert_eq!(error.code(), 28, "{error}");
            says(&error, &words);
            assert!(took < PROMPT, "{took:?}");
        }
        host_memory_moves(&sides.two);
        sides.here.control.heal();
        eventually("there is pinned memory again", || {
            local.lend_as(&sides.two.initiator, &Default::default()).is_ok()
        });
        local.write(0, text(MIB, 6));
        sides.two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]).unwrap();
        assert!(remote.read(0, MIB) == text(MIB, 6));
        sides.are_whole();
    }
}

apart! {
    fn requests_over_unregistered_memory_recover_when_pinned_memory_does() {
        let sides = Sides::new();
        let (local, remote) = (sides.here.alloc(MIB), sides.there.alloc(MIB));
        remote.lend(&sides.two.target);
        sides.here.control.inject("cuMemHostAlloc", 1, 0, 2);
        let run = || sides.two.run(vec![local.request(Op::Write, 0, remote.addr, MIB)]);
        run().unwrap_err();
        sides.here.control.heal();
        eventually("there is pinned memory again", || run().is_ok());
        sides.are_whole();
    }
}

apart! {
    fn fewer_slots_than_wanted_are_enough() {
        let (here, there) = (Sim::cuda(), Sim::cuda());
        let mut config = here.config();
        config.staging_slots = 96;
        let two = Two::with(config, there.config());
        let sides = Sides { here, there, two };
        let (local, remote) = (sides.here.alloc(8 * MIB), sides.there.alloc(8 * MIB));
        remote.lend(&sides.two.target);
        // 64 MiB at once: the second piece of each ring is not to be had.
        sides.here.control.inject("cuMemHostAlloc", 2, 1, 2);
        local.lend(&sides.two.initiator);
        for op in [Op::Write, Op::Read] {
            assert!(eight(&sides, op, &local, &remote).failures().is_empty());
        }
        assert_eq!(sides.here.control.count("pinned_bytes"), (64 + 96) << 20);
        let request: Vec<Request> =
            (0..1000).map(|i| local.request(Op::Write, i, remote.addr, 9)).collect();
        sides.two.run(request).unwrap();
        sides.are_whole();
    }
}
