//! Which ranges of device memory may be reached, and which are still what was registered.
#![expect(unsafe_code, reason = "memory that a framework has allocated, by its address")]

use tensorferry::gpu::{Location, Vendor};
use tensorferry::{Access, HostBuffer, Op, RegisterOptions, Repeat, Request};
use tensorferry_simgpu::Memory;

use crate::common::{buffer, eventually, ms, says, within};
use crate::fake::{Answer, Raw};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

fn options(access: Access) -> RegisterOptions {
    RegisterOptions::default().with_access(access)
}

apart! {
    fn peers_do_with_device_memory_what_it_was_registered_for() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let local = buffer(text(MIB, 1));
        let run = |op, remote: u64| {
            let request = local.request(op, 0, remote, MIB).unwrap();
            end(&two.segment.submit_owned(&[request], within(ms(8000))).unwrap())
        };
        for access in [Access::ReadWrite, Access::AsMapped, Access::ReadOnly, Access::Local] {
            let block = sim.alloc(MIB);
            block.write(0, text(MIB, 2));
            block.lend_as(&two.target, &options(access)).unwrap();
            two.segment.buffers().unwrap();
            let mut raw = Raw::connect(two.target.data_port());
            raw.write(block.addr, &[9]);
            let written = raw.answer() == Answer::Applied;
            let mut raw = Raw::connect(two.target.data_port());
            raw.ask(block.addr, 100);
            let read = raw.answer() == Answer::Applied;
            let right = match access {
                Access::ReadOnly => (true, false),
                Access::Local => (false, false),
                _ => (true, true),
            };
            assert_eq!((read, written), right, "{access:?}");
            block.write(0, text(MIB, 2));
            assert_eq!(run(Op::Read, block.addr).is_ok(), right.0, "{access:?}");
            local.write(0, text(MIB, 1));
            let result = run(Op::Write, block.addr);
            assert_eq!(result.is_ok(), right.1, "{access:?}");
            let seed = if right.1 { 1 } else { 2 };
            assert!(block.read(0, MIB) == text(MIB, seed), "{access:?}");
            if let Err(error) = result {
                assert_eq!(error.code(), if access == Access::Local { 9 } else { 8 }, "{error}");
            }
            two.target.unregister(block.addr).unwrap();
            let error = run(Op::Read, block.addr).unwrap_err();
            assert!([8, 9].contains(&error.code()), "not registered any more: {error}");
        }
        // What is registered for local use is used.
        let (mine, theirs) = (sim.alloc(MIB), sim.alloc(MIB));
        theirs.lend(&two.target);
        mine.lend_as(&two.initiator, &options(Access::Local)).unwrap();
        mine.write(0, text(MIB, 3));
        two.run(vec![mine.request(Op::Write, 0, theirs.addr, MIB)]).unwrap();
        assert!(theirs.read(0, MIB) == text(MIB, 3));
    }
}

apart! {
    fn remote_ranges_lie_in_one_registered_buffer() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        // One allocation, registered in two halves, and its last page not at all.
        let block = sim.alloc(MIB + 4096);
        let half = (MIB / 2) as u64;
        for at in [0, half] {
            // SAFETY: it stays allocated.
            unsafe { two.target.register(block.addr + at, half, &Default::default()) }.unwrap();
        }
        block.fill(7);
        let local = HostBuffer::zeroed(4096).unwrap();
        for at in [half - 1, half - 4095, 2 * half - 4095, 2 * half, 2 * half + 1] {
            for op in [Op::Read, Op::Write] {
                let request = local.request(op, 0, block.addr + at, 4096).unwrap();
                let batch = two.segment.submit_owned(&[request], within(ms(8000))).unwrap();
                let error = end(&batch).unwrap_err();
                assert_eq!(error.code(), 9, "{error}");
                let mut raw = Raw::connect(two.target.data_port());
                match op {
                    Op::Read => raw.ask(block.addr + at, 4096),
                    Op::Write => raw.write(block.addr + at, &[1; 4096]),
                }
                assert_eq!(raw.answer(), Answer::Rejected);
            }
        }
        assert!(block.is_all(7));
        let request = local.request(Op::Write, 0, block.addr + half - 4096, 4096).unwrap();
        end(&two.segment.submit_owned(&[request], within(ms(8000))).unwrap()).unwrap();
    }
}

apart! {
    fn local_ranges_may_span_registrations_but_not_allocations() {
        for sim in [Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.6"])] {
            let two = Two::new(&sim.config());
            let remote = sim.alloc(2 * MIB);
            remote.lend(&two.target);
            let block = sim.alloc(MIB);
            let half = (MIB / 2) as u64;
            for at in [0, half] {
                // SAFETY: it stays allocated.
                unsafe { two.initiator.register(block.addr + at, half, &Default::default()) }
                    .unwrap();
            }
            for (op, seed) in [(Op::Write, 1), (Op::Read, 2)] {
                let (from, to) =
                    if op == Op::Write { (&block, &remote) } else { (&remote, &block) };
                from.write(0, text(MIB, seed));
                two.run(vec![block.request(op, 0, remote.addr, MIB)]).unwrap();
                assert!(to.read(0, MIB) == text(MIB, seed), "{op:?}");
            }
            // Neighbours in the address space are not one.
            let (a, b) = (sim.alloc(MIB), sim.alloc(MIB));
            assert_eq!(a.addr + MIB as u64, b.addr, "the simulator packs them");
            // (HIP tells neither where an allocation begins nor how long it is.)
            for len in [2 * MIB, MIB + 1].into_iter().filter(|_| sim.vendor == Vendor::Cuda) {
                let request = a.request(Op::Write, 0, remote.addr, len);
                let error = submit(&two.segment, vec![request], within(ms(8000))).unwrap_err();
                assert_eq!(error.code(), 27, "{error}");
                says(
                    &error,
                    &[
                        &format!("[{:#x}, +{len}) begins in memory of", a.addr),
                        "check the address and length",
                    ],
                );
                // SAFETY: it is refused.
                let error =
                    unsafe { two.initiator.register(a.addr, len as u64, &Default::default()) };
                assert_eq!(error.unwrap_err().code(), 27);
            }
            // Parts that a framework has mapped side by side are.
            let mapped = sim.alloc_on(1, 5 * MIB, Memory::Mapped);
            mapped.write(0, text(5 * MIB, 4));
            let at = 2 * MIB - 1000;
            two.run(vec![mapped.request(Op::Write, at, remote.addr, 2 * MIB)]).unwrap();
            assert!(remote.read(0, 2 * MIB) == text(5 * MIB, 4)[at..][..2 * MIB]);
        }
    }
}

apart! {
    fn a_location_is_checked() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (block, host) = (sim.alloc(MIB), HostBuffer::zeroed(MIB).unwrap());
        let named = |device| {
            RegisterOptions::default().with_location(Location::Device(sim.device(device)))
        };
        for (addr, device, found) in
            [(block.addr, 0, "memory of cuda:1"), (host.addr(), 1, "host memory")]
        {
            // SAFETY: it is refused.
            let error =
                unsafe { two.target.register(addr, MIB as u64, &named(device)) }.unwrap_err();
            assert_eq!(error.code(), 31, "{error}");
            let text = format!(
                "[{addr:#x}, +{MIB}) was said to be on cuda:{device}, and is {found}; name that, or let the engine \
                 find out (Location::Any, \"*\")"
            );
            assert_eq!(error.to_string(), text);
        }
        assert!(two.target.buffers().is_empty());
    }
}

apart! {
    fn the_same_registration_is_counted_and_another_refused() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let block = sim.alloc(MIB);
        block.lend(&two.target);
        block.lend(&two.target);
        let refused = RegisterOptions::default().with_repeat(Repeat::Refused);
        assert_eq!(block.lend_as(&two.target, &refused).unwrap_err().code(), 4);
        // SAFETY: it is refused.
        let part = unsafe { two.target.register(block.addr + 1, 100, &Default::default()) };
        assert_eq!(part.unwrap_err().code(), 4);
        let local = sim.alloc(MIB);
        for left in [true, false] {
            two.target.unregister(block.addr).unwrap();
            let result = two.run(vec![local.request(Op::Write, 0, block.addr, MIB)]);
            assert_eq!(result.is_ok(), left);
        }
        assert_eq!(two.target.unregister(block.addr).unwrap_err().code(), 5);
    }
}

apart! {
    fn memory_that_was_freed_under_its_registration_is_noticed() {
        for sim in Sim::every() {
            let two = Two::new(&sim.config());
            let name = sim.file.display().to_string();
            let remote = sim.alloc(MIB);
            remote.lend(&two.target);
            let before = sim.alloc(MIB);
            before.lend(&two.initiator);
            two.run(vec![before.request(Op::Write, 0, remote.addr, 100)]).unwrap();
            before.free();
            let run = |op| two.run(vec![before.request(op, 50, remote.addr, 100)]);
            let text = format!(
                "the registered buffer [{:#x}, +{MIB}) was freed, and another allocation of the device has its \
                 address; unregister it, then register the new memory",
                before.addr
            );
            let freed = run(Op::Write).unwrap_err();
            assert_eq!(freed.code(), 32, "{name}: {freed}");
            let after = sim.alloc(MIB);
            assert_eq!(after.addr, before.addr, "the simulator gives addresses out again");
            after.fill(3);
            for op in [Op::Read, Op::Write] {
                let error = run(op).unwrap_err();
                assert_eq!(error.code(), 32, "{name}: {error}");
                assert_eq!(error.to_string(), text);
            }
            assert!(after.is_all(3), "{name}");
            // Nor does registering it again hide that the old registration is of something else.
            let error = after.lend_as(&two.initiator, &Default::default()).unwrap_err();
            assert_eq!(error.to_string(), text);
            two.initiator.unregister(before.addr).unwrap();
            after.lend(&two.initiator);
            run(Op::Read).unwrap();
            // The target's freed memory is not written, and that is not taken for success.
            remote.free();
            let other = sim.alloc_on(0, MIB, Memory::Device);
            let local = buffer(&[1; 100]);
            let request = local.request(Op::Write, 0, remote.addr, 100).unwrap();
            let result = end(&two.segment.submit_owned(&[request], within(ms(8000))).unwrap());
            assert!(result.is_err(), "{name}: it looked like success");
            two.target.unregister(remote.addr).unwrap();
            other.lend(&two.target);
            two.run(vec![after.request(Op::Write, 0, other.addr, 100)]).unwrap();
        }
    }
}

apart! {
    /// The pieces of one batch are looked at before any of it moves.
    fn a_batch_with_freed_memory_moves_nothing() {
        let sim = Sim::cuda();
        let two = Two::new(&sim.config());
        let (good, freed, remote) = (sim.alloc(MIB), sim.alloc(MIB), sim.alloc(MIB));
        good.lend(&two.initiator);
        freed.lend(&two.initiator);
        remote.lend(&two.target);
        remote.fill(1);
        good.fill(2);
        freed.free();
        let list: Vec<Request> = [&good, &freed, &good]
            .iter()
            .map(|block| block.request(Op::Write, 0, remote.addr, 1000))
            .collect();
        assert_eq!(submit(&two.segment, list, within(ms(8000))).unwrap_err().code(), 32);
        assert!(remote.is_all(1));
        // Nothing of the refused batch is kept.
        two.initiator.unregister_all(&[good.addr, freed.addr]).unwrap();
        eventually("no buffer", || two.initiator.buffers().is_empty());
    }
}

apart! {
    fn memory_of_the_engines_own_is_written_and_read_in_any_pieces() {
        for sim in Sim::every() {
            let two = Two::new(&sim.config());
            let engine = &two.initiator;
            let device = sim.device(1);
            // A framework uses the device as well, so that its context outlives the engine.
            let _theirs = sim.alloc(1);
            assert_eq!(engine.device_buffer(device, 0).unwrap_err().code(), 3);
            let buffer = engine.device_buffer(device, 3 * MIB + 5).unwrap();
            assert_eq!((buffer.len(), buffer.device()), (3 * MIB + 5, device));
            assert!(format!("{buffer:?}").contains(&device.to_string()));
            for (at, len) in [(0, 3 * MIB + 5), (1, 1), (MIB - 1, 2), (7, MIB), (MIB, 2 * MIB + 5)]
            {
                buffer.write(at, text(len, len)).unwrap();
                assert!(buffer.read(at, len).unwrap() == text(len, len));
            }
            for (at, len) in [(3 * MIB + 5, 1), (0, 3 * MIB + 6), (usize::MAX, 2)] {
                let errors = [
                    buffer.read(at, len).map(|_| ()).unwrap_err(),
                    buffer.request(Op::Read, at, 1, len).map(|_| ()).unwrap_err(),
                ];
                for error in errors {
                    assert_eq!(error.code(), 3, "{error}");
                    says(&error, &["is not inside the buffer of 3145733 bytes"]);
                }
            }
            buffer.write(3 * MIB + 5, &[]).unwrap();
            std::thread::scope(|threads| {
                for t in 0..4 {
                    let buffer = &buffer;
                    threads.spawn(move || {
                        for i in 0..10 {
                            let bytes = text(700_000, 10 * t + i);
                            buffer.write(t * 750_000, bytes).unwrap();
                            assert!(buffer.read(t * 750_000, 700_000).unwrap() == bytes);
                        }
                    });
                }
            });
            // It outlives its engine, which is what it is good for no longer.
            two.initiator.close();
            assert_eq!(buffer.read(0, 1).unwrap_err().code(), 23);
            drop(buffer);
            assert_eq!(sim.control.count("allocations"), 1, "theirs");
        }
    }
}
