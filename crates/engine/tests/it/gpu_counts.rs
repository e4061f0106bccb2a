//! What device memory costs, as the simulator counts it: calls, contexts, pinned memory.
#![expect(unsafe_code, reason = "memory that a framework has allocated, by its address")]

use tensorferry::gpu::Vendor;
use tensorferry::{HostBuffer, Op, RegisterOptions};
use tensorferry_simgpu::Memory;

use crate::common::{buffer, lanes, ms, row, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Dice, Two, apart, end, submit, text};

/// Registers host memory without saying that it is.
fn lend_unnamed(engine: &tensorferry::Engine, buffer: &HostBuffer) {
    // SAFETY: the buffer outlives the engine's use of it: the test drops it last.
    unsafe { engine.register(buffer.addr(), buffer.len() as u64, &RegisterOptions::default()) }
        .unwrap();
}

/// Host memory moves both ways, in large and in small requests.
fn move_host_memory(two: &Two, local: &HostBuffer, remote: &HostBuffer) {
    let (bytes, len) = (text(3 * MIB, 1), 3 * MIB);
    for op in [Op::Write, Op::Read] {
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        from.write(0, bytes);
        to.write(0, &vec![0; len]);
        let requests = row(op, local, remote.addr(), len, 1);
        end(&two.segment.submit_owned(&requests, within(ms(20_000))).unwrap()).unwrap();
        assert!(to.read(0, len) == bytes);
        let small = row(op, local, remote.addr(), 100, 1000);
        end(&two.segment.submit_owned(&small, within(ms(20_000))).unwrap()).unwrap();
    }
}

apart! {
    fn registered_host_memory_costs_no_call() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (local, remote) =
            (HostBuffer::zeroed(3 * MIB).unwrap(), HostBuffer::zeroed(3 * MIB).unwrap());
        // The library is loaded, initialised, and in use for memory of its own.
        let blocks = [sim.alloc(MIB), sim.alloc(MIB)];
        blocks[0].lend(&two.initiator);
        blocks[1].lend(&two.target);
        two.run(vec![blocks[0].request(Op::Write, 0, blocks[1].addr, MIB)]).unwrap();
        lend_unnamed(&two.initiator, &local);
        lend_unnamed(&two.target, &remote);
        sim.control.reset();
        move_host_memory(&two, &local, &remote);
        assert_eq!(sim.control.count("calls"), 0, "{}", sim.control.counters());
    }
}

apart! {
    fn a_library_that_nobody_uses_is_not_initialised() {
        for sim in [Sim::cuda(), Sim::every().swap_remove(1)] {
            let two = Two::new(&sim.config());
            let (local, remote) =
                (HostBuffer::zeroed(3 * MIB).unwrap(), HostBuffer::zeroed(3 * MIB).unwrap());
            lend_unnamed(&two.target, &remote);
            // Neither for memory that is registered, nor for what is not.
            move_host_memory(&two, &local, &remote);
            lend_unnamed(&two.initiator, &local);
            move_host_memory(&two, &local, &remote);
            drop(two);
            for call in ["cuInit", "cudaGetDeviceCount", "cudaSetDevice", "cudaGetDevice"] {
                assert_eq!(sim.control.calls(call), 0, "{}", sim.control.counters());
            }
            assert_eq!(sim.control.count("contexts_created.0"), 0);
            assert_eq!(sim.control.count("pinned_allocations"), 0);
        }
    }
}

apart! {
    fn an_address_is_asked_about_when_it_is_registered_and_not_per_slice() {
        for sim in Sim::every() {
            let name = sim.file.file_name().unwrap().to_owned();
            let by_driver = sim.file.ends_with("libcuda.so.1");
            // HIP's answer about an address tells neither its allocation nor that one's length.
            let most = if sim.vendor == Vendor::Hip { 5 } else { 2 };
            let len = if by_driver { 256 * MIB } else { 16 * MIB };
            let queries = || {
                let queries = sim.control.count("pointer_queries");
                sim.control.reset();
                queries
            };
            let two = Two::new(&sim.config());
            let (local, remote) = (sim.alloc(len), sim.alloc(len));
            queries();
            for (block, engine) in [(&local, &two.initiator), (&remote, &two.target)] {
                block.lend(engine);
                let asked = queries();
                assert!((1..=most).contains(&asked), "{name:?}: {asked} to register it");
            }
            for op in [Op::Write, Op::Read] {
                two.run(vec![local.request(op, 0, remote.addr, len)]).unwrap();
                assert!(queries() <= 1, "{name:?}: {len} bytes");
                let requests = |i: usize| local.request(op, i * 8192, remote.addr, 4096);
                two.run((0..1000).map(requests).collect()).unwrap();
                assert!(queries() <= 1, "{name:?}: 1000 requests");
            }
            if sim.vendor == Vendor::Cuda && !by_driver {
                // A CUDA runtime is not asked about what nobody has named.
                continue;
            }
            // Memory that is not registered is asked about once per request, as for a registration.
            let other = sim.alloc(MIB);
            queries();
            let requests = |i: usize| other.request(Op::Write, i * 4096, remote.addr, 4096);
            two.run((0..10).map(requests).collect()).unwrap();
            let asked = queries();
            assert!((10..=10 * most).contains(&asked), "{name:?}: {asked} for 10 requests");
            let host = HostBuffer::zeroed(40_960).unwrap();
            let requests = row(Op::Write, &host, remote.addr, 4096, 10);
            end(&two.segment.submit_owned(&requests, within(ms(20_000))).unwrap()).unwrap();
            let asked = queries();
            assert!((10..=20).contains(&asked), "{name:?}: {asked} for 10 requests");
        }
    }
}

apart! {
    /// Keys and values lie in two buffers, and their blocks take turns in a batch.
    fn buffers_that_take_turns_are_asked_about_once_per_batch() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (keys, values, remote) = (sim.alloc(MIB), sim.alloc(MIB), sim.alloc(MIB));
        remote.lend(&two.target);
        keys.lend(&two.initiator);
        values.lend(&two.initiator);
        let one = |i: usize| {
            let block = if i.is_multiple_of(2) { keys } else { values };
            block.request(Op::Write, i * 512, remote.addr + i as u64 * 512, 512)
        };
        sim.control.reset();
        two.run((0..2000).map(one).collect()).unwrap();
        let asked = sim.control.count("pointer_queries");
        assert!(asked <= 2, "{asked} questions about two buffers");
    }
}

apart! {
    fn contexts_and_pinned_memory_are_made_once_and_given_back() {
        for sim in Sim::every() {
            let name = sim.file.file_name().unwrap().to_owned();
            let blocks: Vec<_> = (0..2).map(|_| sim.alloc(4 * MIB)).collect();
            let contexts = sim.control.count("contexts.1");
            for round in 0..2 {
                let two = Two::new(&sim.config());
                blocks[0].lend(&two.initiator);
                blocks[1].lend(&two.target);
                let run = |op| {
                    two.run(vec![blocks[0].request(op, 0, blocks[1].addr, 4 * MIB)]).unwrap();
                };
                run(Op::Write);
                run(Op::Read);
                // Two engines, two directions, 8 slots of 1 MiB.
                assert_eq!(sim.control.count("pinned_bytes"), 32 << 20, "{name:?}");
                let before = sim.control.count("pinned_allocations");
                for _ in 0..20 {
                    run(Op::Write);
                    run(Op::Read);
                }
                assert_eq!(sim.control.count("pinned_allocations"), before, "{name:?}");
                assert_eq!(sim.control.count("pinned_bytes_max"), 32 << 20, "{name:?}");
                assert_eq!(sim.control.count("contexts.0"), 0, "{name:?}: not in use");
                assert_eq!(sim.control.count("contexts.1"), contexts, "{name:?}: in use before");
                drop(two);
                assert_eq!(sim.control.count("pinned_bytes"), 0, "{name:?}, round {round}");
                let (pushes, pops) =
                    (sim.control.count("context_pushes"), sim.control.count("context_pops"));
                assert_eq!(pushes, pops, "{name:?}");
                assert_eq!(sim.control.count("thread.contexts"), 0, "{name:?}: on this thread");
                assert_eq!(sim.control.count("thread.last_error"), 0, "{name:?}: on this thread");
            }
            assert_eq!(sim.control.count("pageable_copies"), 0, "{name:?}");
            assert_eq!(sim.control.count("legacy_stream_operations"), 0, "{name:?}");
        }
    }
}

apart! {
    fn sixty_four_transfers_at_once_share_the_rings() {
        // Slots, bytes of each, IO threads.
        for (slots, slot, io_threads) in [(8, MIB, 1), (2, 64 << 10, 1), (3, 64 << 10, 3)] {
            let sim = Sim::cuda();
            let mut config = sim.add_to(lanes(4, io_threads));
            (config.staging_slots, config.staging_slot_bytes) = (slots, slot);
            let two = Two::new(&config);
            const ROOM: usize = 400 << 10;
            let (local, remote) = (sim.alloc(64 * ROOM), sim.alloc(64 * ROOM));
            remote.lend(&two.target);
            for round in 0..2 {
                local.write(0, text(64 * ROOM, 1));
                remote.write(0, text(64 * ROOM, 2));
                let mut dice = Dice(7 + round);
                let lens: Vec<_> = (0..64).map(|_| 1 + dice.roll(ROOM - 9)).collect();
                let op = |i| if i % 2 == 0 { Op::Write } else { Op::Read };
                let batches: Vec<_> = (0..64)
                    .map(|i| {
                        let at = i * ROOM + i % 9;
                        let request = local.request(op(i), at, remote.addr + at as u64, lens[i]);
                        submit(&two.segment, vec![request], within(ms(20_000))).unwrap()
                    })
                    .collect();
                for (i, batch) in batches.iter().enumerate() {
                    end(batch).unwrap_or_else(|e| panic!("{slots} slots, transfer {i}: {e}"));
                    let at = i * ROOM + i % 9;
                    let seed = if op(i) == Op::Write { 1 } else { 2 };
                    for block in [&local, &remote] {
                        let right = &text(64 * ROOM, seed)[at..at + lens[i]];
                        assert!(block.read(at, lens[i]) == right, "{slots} slots, transfer {i}");
                    }
                }
            }
            let most = (4 * slots * slot) as u64;
            assert_eq!(sim.control.count("pinned_bytes_max"), most);
        }
    }
}

apart! {
    fn pinned_host_memory_is_sent_as_it_is() {
        for sim in Sim::every() {
            let two = Two::new(&sim.config());
            let remote = HostBuffer::zeroed(MIB).unwrap();
            two.target.register_buffer(&remote, &RegisterOptions::default()).unwrap();
            for kind in [Memory::Pinned, Memory::PinnedWriteCombined] {
                let pinned = sim.alloc_on(1, MIB, kind);
                pinned.write(0, text(MIB, 3));
                two.run(vec![pinned.request(Op::Write, 0, remote.addr(), MIB)]).unwrap();
                assert!(remote.read(0, MIB) == text(MIB, 3));
                // SAFETY: freed last.
                unsafe { two.initiator.register(pinned.addr, MIB as u64, &Default::default()) }
                    .unwrap();
                two.run(vec![pinned.request(Op::Read, 0, remote.addr(), MIB)]).unwrap();
                two.initiator.unregister(pinned.addr).unwrap();
                pinned.free();
            }
            assert_eq!(sim.control.count("copies"), 0);
            assert_eq!(sim.control.count("pinned_allocations"), 2, "the test's own");
            drop(buffer(&[1]));
        }
    }
}
