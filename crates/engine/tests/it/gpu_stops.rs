//! Transfers of device memory that are cancelled, time out or lose their buffers at random moments:
//! whatever is final is at rest.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tensorferry::{BatchState, Op, Request};

use crate::common::{PROMPT, lanes, ms, timed, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Block, Dice, Two, apart, end, submit, text};

/// Copies take about as long as the sockets, so that a stop finds both at work.
fn busy(sim: &Sim) {
    sim.control.set("h2d_bytes_per_second", 400 << 20);
    sim.control.set("d2h_bytes_per_second", 400 << 20);
    sim.control.set("latency_ns", 50_000);
}

fn spin(micros: usize) {
    let until = Instant::now() + Duration::from_micros(micros as u64);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

/// What a device had been asked to copy before is copied: one more of the same direction has come to its end.
fn flush(two: &Two, spare: &Block<'_>, remote: u64) {
    for op in [Op::Write, Op::Read] {
        two.run(vec![spare.request(op, 0, remote, 1000)]).unwrap();
    }
}

const ROOM: usize = 2 * MIB;

/// `count` requests of `len` bytes, one behind the other at both ends.
fn requests(op: Op, local: &Block<'_>, remote: u64, len: usize, count: usize) -> Vec<Request> {
    (0..count).map(|i| local.request(op, i * len, remote + (i * len) as u64, len)).collect()
}

fn sizes(dice: &mut Dice) -> (usize, usize) {
    match dice.roll(3) {
        0 => (1 + dice.roll(500), 60),
        1 => (1 + dice.roll(60_000), 20),
        _ => (1 + dice.roll(ROOM - 1), 1),
    }
}

apart! {
    fn stops_at_any_moment_leave_device_memory_at_rest() {
        for io_threads in [1, 3] {
            let sim = Sim::cuda();
            let mut config = sim.add_to(lanes(3, io_threads));
            (config.staging_slots, config.staging_slot_bytes) = (4, 256 << 10);
            let two = Two::new(&config);
            // READs are of what never changes, WRITEs to a place of the thread's own.
            let remote = sim.alloc(6 * ROOM);
            remote.lend(&two.target);
            remote.write(0, text(6 * ROOM, 1));
            busy(&sim);
            let stopped = AtomicU64::new(0);
            std::thread::scope(|threads| {
                for t in 0..4 {
                    let (two, sim, remote, stopped) = (&two, &sim, &remote, &stopped);
                    threads.spawn(move || {
                        let mut dice = Dice(t as u64 + 11);
                        let (local, spare) = (sim.alloc(ROOM), sim.alloc(1000));
                        if t % 2 == 0 {
                            local.lend(&two.initiator);
                        }
                        let mine = remote.addr + ((1 + t) * ROOM) as u64;
                        for round in 0..20 {
                            let op = if dice.roll(2) == 0 { Op::Read } else { Op::Write };
                            let (len, count) = sizes(&mut dice);
                            let from = if op == Op::Read { remote.addr } else { mine };
                            local.write(0, text(ROOM, round));
                            let list = requests(op, &local, from, len, count);
                            let how = dice.roll(4);
                            let timeout =
                                if how == 0 { ms(1 + dice.roll(4) as u64) } else { ms(8000) };
                            let batch = submit(&two.segment, list, within(timeout)).unwrap();
                            if how == 1 {
                                spin(dice.roll(3000));
                                batch.cancel();
                            }
                            let result = end(&batch);
                            assert_ne!(batch.poll(), BatchState::Running);
                            if batch.failures().iter().any(|(_, error)| error.code() == 29) {
                                // What is late on a machine that is busy can be taken for hung, and may yet come.
                                flush(two, &spare, remote.addr + (5 * ROOM) as u64);
                                continue;
                            }
                            if result.is_err() {
                                stopped.fetch_add(1, Ordering::Relaxed);
                            }
                            if batch.poll() == BatchState::Completed && op == Op::Read {
                                assert!(
                                    local.read(0, len * count) == text(6 * ROOM, 1)[..len * count]
                                );
                            }
                            local.fill(0x5a);
                            flush(two, &spare, remote.addr + (5 * ROOM) as u64);
                            assert!(local.is_all(0x5a), "{op:?} of {count} × {len}: late bytes");
                        }
                    });
                }
            });
            assert!(stopped.load(Ordering::Relaxed) > 10, "{stopped:?}");
            assert!(remote.read(0, ROOM) == text(6 * ROOM, 1)[..ROOM]);
            drop(two);
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
        }
    }
}

apart! {
    /// When `unregister` has returned, neither end's device reads or writes the buffer.
    fn unregister_in_mid_transfer_leaves_device_memory_at_rest() {
        for io_threads in [1, 2] {
            let sim = Sim::cuda();
            let mut config = sim.add_to(lanes(3, io_threads));
            (config.staging_slots, config.staging_slot_bytes) = (4, 256 << 10);
            let two = Two::new(&config);
            let (local, remote) = (sim.alloc(16 * MIB), sim.alloc(16 * MIB));
            let (spare, safe) = (sim.alloc(1000), sim.alloc(1000));
            safe.lend(&two.target);
            busy(&sim);
            let mut dice = Dice(23);
            for round in 0..12 {
                local.lend(&two.initiator);
                remote.lend(&two.target);
                // What is taken back is what is being written.
                let (op, engine, block) = match round % 4 {
                    0 => (Op::Write, &two.target, &remote),
                    1 => (Op::Read, &two.initiator, &local),
                    2 => (Op::Read, &two.target, &remote),
                    _ => (Op::Write, &two.initiator, &local),
                };
                let list = requests(op, &local, remote.addr, MIB, 16);
                let batch = submit(&two.segment, list, within(ms(8000))).unwrap();
                spin(dice.roll(20_000));
                let (result, took) = timed(|| engine.unregister(block.addr));
                result.unwrap();
                assert!(took < PROMPT, "round {round}: {took:?}");
                block.fill(0x5a);
                let result = end(&batch);
                flush(&two, &spare, safe.addr);
                assert!(block.is_all(0x5a), "round {round}: late bytes, {result:?}");
                for (engine, block) in [(&two.initiator, &local), (&two.target, &remote)] {
                    let _ = engine.unregister(block.addr);
                }
            }
            drop(two);
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
        }
    }
}

apart! {
    fn closing_in_mid_transfer_leaves_device_memory_at_rest() {
        let sim = Sim::cuda();
        busy(&sim);
        let mut dice = Dice(5);
        for round in 0..10 {
            let two = Two::new(&sim.add_to(lanes(3, 1 + round % 2)));
            let (local, remote) = (sim.alloc(8 * MIB), sim.alloc(8 * MIB));
            remote.lend(&two.target);
            let op = if round % 2 == 0 { Op::Write } else { Op::Read };
            let batch =
                submit(&two.segment, requests(op, &local, remote.addr, MIB, 8), within(ms(8000)));
            spin(dice.roll(15_000));
            let (engine, block) = match op {
                Op::Write => (&two.target, &remote),
                Op::Read => (&two.initiator, &local),
            };
            let ((), took) = timed(|| engine.close());
            assert!(took < PROMPT, "{took:?}");
            // Its streams have gone with it, so that nothing can be on them.
            block.fill(0x5a);
            let _ = end(&batch.unwrap());
            drop(two);
            assert!(block.is_all(0x5a), "round {round}: late bytes");
            local.free();
            remote.free();
        }
        assert_eq!(sim.control.count("pinned_bytes"), 0);
        assert_eq!(sim.control.count("copies_in_flight"), 0);
    }
}
