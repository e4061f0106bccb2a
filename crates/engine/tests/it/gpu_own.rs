//! An engine as its own peer, with device memory at one end or at both.

use std::time::Duration;

use tensorferry::gpu::Vendor;
use tensorferry::{BatchState, Config, Engine, HostBuffer, Op, Request, Segment};

use crate::common::{PROMPT, engine, eventually, ms, promptly, timed, within};
use crate::gpu::{MIB, SLOT, Sim};
use crate::gpu_kit::{Block, apart, end, submit, text};

/// An engine that has opened itself.
fn own(config: Config) -> (Engine, Segment) {
    let engine = engine(config);
    let segment = engine.open(engine.name()).unwrap();
    (engine, segment)
}

fn run(segment: &Segment, request: Request) {
    end(&submit(segment, vec![request], within(ms(20_000))).unwrap()).unwrap();
}

const SIZES: [usize; 8] = [1, 511, 4097, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 7, 17 * MIB + 3];
const LEN: usize = 17 * MIB + 64;

apart! {
    fn every_pairing_and_size_is_copied_within_the_process() {
        for sim in [Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.5"])] {
            let mut config = sim.config();
            config.safe_copy = sim.vendor == Vendor::Hip;
            let (engine, segment) = own(config);
            let host = [(); 2].map(|()| HostBuffer::zeroed(LEN).unwrap());
            let blocks = [sim.alloc(LEN), sim.alloc(LEN)];
            engine.register_buffer(&host[1], &Default::default()).unwrap();
            blocks.iter().for_each(|block| block.lend(&engine));
            for (i, len) in SIZES.into_iter().enumerate() {
                // From the host and back, at an odd place of the device's memory.
                for (op, seed) in [(Op::Write, 2 * i), (Op::Read, 2 * i + 1)] {
                    let bytes = text(len, seed);
                    blocks[0].fill(0xa5);
                    let into = if op == Op::Write { &host[0] } else { &host[1] };
                    into.write(3, bytes);
                    let (local, remote) = if op == Op::Write {
                        (host[0].addr() + 3, blocks[0].addr + 5)
                    } else {
                        (blocks[0].addr + 5, host[1].addr() + 3)
                    };
                    run(&segment, Request { op, local, remote, len: len as u64 });
                    assert!(blocks[0].read(5, len) == bytes, "{op:?} of {len} bytes to a device");
                    assert_eq!(blocks[0].read(4, 1), [0xa5]);
                    assert_eq!(blocks[0].read(5 + len, 1), [0xa5]);
                    into.write(0, &vec![0; LEN]);
                    let back = if op == Op::Write { Op::Read } else { Op::Write };
                    run(&segment, Request { op: back, local, remote, len: len as u64 });
                    assert!(into.read(3, len) == bytes, "{back:?} of {len} bytes from a device");
                    assert_eq!((into.read(2, 1), into.read(3 + len, 1)), (vec![0], vec![0]));
                }
                // On the device.
                let (bytes, before) = (text(len, 40 + i), sim.control.count("copies"));
                blocks[0].write(1, bytes);
                blocks[1].fill(0);
                let staged = sim.control.count("h2d_bytes") + sim.control.count("d2h_bytes");
                run(&segment, blocks[0].request(Op::Write, 1, blocks[1].addr + 2, len));
                assert!(blocks[1].read(2, len) == bytes, "{len} bytes on a device");
                assert_eq!(sim.control.count("copies"), before + 1, "one copy of the device's");
                let now = sim.control.count("h2d_bytes") + sim.control.count("d2h_bytes");
                assert_eq!(now, staged);
            }
        }
    }
}

apart! {
    fn two_devices_and_two_vendors_are_copied_between() {
        let (cuda, hip) = (Sim::cuda(), Sim::new(Vendor::Hip, &["libamdhip64.so.6"]));
        let (engine, segment) = own(hip.add_to(cuda.config()));
        let blocks = [
            cuda.alloc_on(0, LEN, tensorferry_simgpu::Memory::Device),
            cuda.alloc(LEN),
            hip.alloc(LEN),
            hip.alloc_on(0, LEN, tensorferry_simgpu::Memory::Mapped),
        ];
        blocks.iter().for_each(|block| block.lend(&engine));
        let mut seed = 0;
        for from in &blocks {
            for to in blocks.iter().filter(|to| to.addr != from.addr) {
                for len in [1, 70_001, 3 * SLOT + 7] {
                    seed += 1;
                    let bytes = text(len, seed);
                    from.write(9, bytes);
                    to.write(0, &vec![0; len + 2]);
                    let request = if seed % 2 == 0 {
                        from.request(Op::Write, 9, to.addr + 1, len)
                    } else {
                        to.request(Op::Read, 1, from.addr + 9, len)
                    };
                    run(&segment, request);
                    let (from, to_device) = (from.device, to.device);
                    assert!(to.read(1, len) == bytes, "{len} bytes from {from} to {to_device}");
                    assert_eq!((to.read(0, 1), to.read(len + 1, 1)), (vec![0], vec![0]));
                }
            }
        }
    }
}

apart! {
    fn ranges_that_overlap_are_moved_as_memmove_does() {
        let sim = Sim::cuda();
        let mut config = sim.config();
        config.staging_slot_bytes = 64 << 10;
        let (engine, segment) = own(config);
        const PIECE: usize = 64 << 10;
        let block = sim.alloc(8 * PIECE);
        block.lend(&engine);
        for len in [3 * PIECE + 5, 100, PIECE] {
            for shift in [0, 1, 99, PIECE / 2, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE] {
                for (from, to) in [(7, 7 + shift), (7 + shift, 7)] {
                    let mut right = text(8 * PIECE, shift + len).to_vec();
                    block.write(0, &right);
                    right.copy_within(from..from + len, to);
                    run(&segment, block.request(Op::Write, from, block.addr + to as u64, len));
                    assert!(block.read(0, 8 * PIECE) == right, "{len} bytes from {from} to {to}");
                }
            }
        }
    }
}

/// What takes two seconds to copy when it is slow, from a host to a device and back.
const MUCH: usize = 64 * MIB;

fn slowly(sim: &Sim) {
    for way in ["h2d_bytes_per_second", "d2h_bytes_per_second", "d2d_bytes_per_second"] {
        sim.control.set(way, 32 << 20);
    }
}

/// Whether nothing is written to a block that has just become the caller's again.
fn stays(block: &Block<'_>, again: impl FnOnce()) {
    block.fill(0x5a);
    again();
    assert!(block.is_all(0x5a), "bytes came late");
}

apart! {
    fn a_copy_is_cancelled_and_ends_at_its_deadline() {
        let sim = Sim::cuda();
        let (engine, segment) = own(sim.config());
        let host = HostBuffer::zeroed(MUCH).unwrap();
        engine.register_buffer(&host, &Default::default()).unwrap();
        let (block, other) = (sim.alloc(MUCH), sim.alloc(MIB));
        other.lend(&engine);
        slowly(&sim);
        let to_block = block.request(Op::Read, 0, host.addr(), MUCH);
        let from_block = block.request(Op::Write, 0, host.addr(), MUCH);
        for (request, cancel) in
            [(to_block, true), (to_block, false), (from_block, true), (from_block, false)]
        {
            let (timeout, state) = if cancel {
                (ms(20_000), BatchState::Cancelled)
            } else {
                (ms(250), BatchState::TimedOut)
            };
            promptly(ms(1200), "its end", || {
                let before = sim.control.count("copies");
                let batch = submit(&segment, vec![request], within(timeout)).unwrap();
                let (result, took) = timed(|| {
                    if cancel {
                        eventually("a piece is copied", || sim.control.count("copies") > before);
                        batch.cancel();
                    }
                    end(&batch)
                });
                let again = || {
                    // Another copy goes the same way, behind whatever was there.
                    let request = Request { local: other.addr, len: 1000, ..request };
                    end(&submit(&segment, vec![request], within(ms(20_000))).unwrap()).unwrap();
                };
                let error = result.unwrap_err();
                if error.code() == 29 {
                    // What is slow on a machine that is busy can be taken for hung.
                    again();
                    return Duration::MAX;
                }
                assert_eq!(batch.poll(), state, "{error}");
                stays(&block, again);
                took
            });
        }
    }
}

apart! {
    /// Small copies are made by the thread that submits them, large ones by another.
    fn a_copy_that_hangs_ends_at_its_deadline() {
        let sim = Sim::cuda();
        let (engine, segment) = own(sim.config());
        let host = HostBuffer::zeroed(4 * MIB).unwrap();
        engine.register_buffer(&host, &Default::default()).unwrap();
        let (block, other) = (sim.alloc(4 * MIB), sim.alloc(4 * MIB));
        block.lend(&engine);
        other.lend(&engine);
        for len in [1000, 4 * MIB] {
            for request in [
                block.request(Op::Read, 0, host.addr(), len),
                block.request(Op::Write, 0, host.addr(), len),
                block.request(Op::Write, 0, other.addr, len),
            ] {
                sim.control.set("hang", 1);
                let (batch, took) = timed(|| {
                    let batch = submit(&segment, vec![request], within(ms(1500))).unwrap();
                    let result = end(&batch);
                    assert_eq!(result.unwrap_err().code(), 29, "{request:?}");
                    batch
                });
                assert_eq!(batch.poll(), BatchState::Failed);
                assert!(took >= ms(1500) && took < ms(1500) + PROMPT, "{took:?}");
                sim.control.heal();
                // What hung comes to its end before what follows it the same way.
                run(&segment, Request { len: 1000, ..request });
                block.write(0, text(len, 5));
                run(&segment, block.request(Op::Write, 0, other.addr, len));
                assert!(other.read(0, len) == text(len, 5));
            }
        }
        engine.unregister_all(&[block.addr, other.addr]).unwrap();
    }
}

apart! {
    fn a_copy_that_hangs_can_be_cancelled() {
        let sim = Sim::cuda();
        let (engine, segment) = own(sim.config());
        let host = HostBuffer::zeroed(4 * MIB).unwrap();
        engine.register_buffer(&host, &Default::default()).unwrap();
        let block = sim.alloc(4 * MIB);
        block.lend(&engine);
        sim.control.set("hang", 1);
        let request = block.request(Op::Read, 0, host.addr(), 4 * MIB);
        let batch = submit(&segment, vec![request], within(ms(20_000))).unwrap();
        eventually("it hangs", || sim.control.count("copies_in_flight") > 0);
        let ((), took) = timed(|| batch.cancel());
        assert!(took < PROMPT, "{took:?}");
        assert_eq!(batch.result().unwrap().unwrap_err().code(), 29);
        let ((), took) = timed(|| engine.close());
        assert!(took < PROMPT, "{took:?}");
        sim.control.heal();
    }
}
