//! Peers and strangers that are slow, or stop in the middle: they hold up nobody else's device memory.

use std::io::Read;
use std::time::{Duration, Instant};

use tensorferry::{BatchState, Config, HostBuffer, Op};
use tensorferry_wire::Status;

use crate::common::{PROMPT, engine, eventually, lanes, ms, promptly, says, timed, within};
use crate::fake::{Answer, BASE, Fake, Gate, Raw, memory};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

/// A peer that answers its first READ with so many bytes, and then stays silent.
fn stalling(after: u64) -> Fake {
    Fake::new(move |mut link| {
        if link.number > 0 {
            return link.serve();
        }
        let Some(header) = link.header() else { return };
        link.status(Status::Applied);
        link.send(&memory(header.addr, after));
        link.hang();
    })
}

apart! {
    /// Some bytes have arrived, and wait for more of them to be copied.
    fn a_read_that_stops_in_its_payload_ends_when_it_has_to() {
        let sim = Sim::cuda();
        for after in [1, 1000, 300_000] {
            for how in ["deadline", "cancel", "unregister", "close"] {
                let fake = stalling(after);
                let e = engine(sim.add_to(lanes(1, 1)));
                let segment = e.open(&fake.name()).unwrap();
                let block = sim.alloc(MIB);
                block.fill(0);
                block.lend(&e);
                let timeout = if how == "deadline" { ms(2000) } else { ms(20_000) };
                let request = block.request(Op::Read, 0, BASE, MIB);
                let batch = submit(&segment, vec![request], within(timeout)).unwrap();
                eventually("a part is on its way", || !fake.seen().is_empty());
                let (code, took) = timed(|| {
                    match how {
                        "cancel" => batch.cancel(),
                        "unregister" => e.unregister(block.addr).unwrap(),
                        "close" => e.close(),
                        _ => {}
                    }
                    end(&batch).unwrap_err().code()
                });
                let right = [("deadline", 13), ("cancel", 14), ("unregister", 15), ("close", 23)];
                assert!(right.contains(&(how, code)), "{how}: {code}");
                assert!(took < 2 * PROMPT, "{how}: {took:?}");
                block.fill(0x5a);
                if how == "deadline" {
                    // The next request goes by another lane, and comes to its own bytes.
                    let other = sim.alloc(MIB);
                    let request = other.request(Op::Read, 0, BASE + 5, MIB);
                    end(&submit(&segment, vec![request], within(ms(8000))).unwrap()).unwrap();
                    assert!(other.read(0, MIB) == memory(BASE + 5, MIB as u64));
                    other.free();
                }
                assert!(block.is_all(0x5a), "{how}: bytes came late");
                drop((segment, batch, e));
                block.free();
            }
        }
        assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
    }
}

apart! {
    fn a_read_that_is_lost_in_its_payload_is_asked_for_again() {
        let sim = Sim::cuda();
        for after in [0, 1, 1000, 300_000, (MIB - 1) as u64] {
            for reset in [false, true] {
                let fake = Fake::new(move |mut link| {
                    if link.number > 0 {
                        return link.serve();
                    }
                    link.header().unwrap();
                    link.status(Status::Applied);
                    // Other bytes than it will be in the end.
                    link.send(&vec![0xee; after as usize]);
                    if reset {
                        link.reset();
                    }
                });
                let e = engine(sim.add_to(lanes(1, 1)));
                let segment = e.open(&fake.name()).unwrap();
                let block = sim.alloc(MIB);
                let request = block.request(Op::Read, 0, BASE, MIB);
                let batch = submit(&segment, vec![request], within(ms(8000))).unwrap();
                end(&batch).unwrap_or_else(|e| panic!("after {after}, reset {reset}: {e}"));
                assert!(block.read(0, MIB) == memory(BASE, MIB as u64), "after {after} bytes");
                block.free();
            }
        }
    }
}

/// A target whose rings have so many slots, with 8 MiB of device memory.
fn target(sim: &Sim, slots: usize) -> Config {
    let mut config = sim.add_to(lanes(2, 1));
    (config.staging_slots, config.staging_slot_bytes) = (slots, 256 << 10);
    config
}

apart! {
    fn a_stranger_that_goes_away_in_the_middle_leaves_nothing_behind() {
        let sim = Sim::cuda();
        let target = engine(target(&sim, 4));
        let block = sim.alloc(8 * MIB);
        for sent in [1, 100, 20_000, 600_000] {
            for (op, close) in
                [(Op::Write, true), (Op::Write, false), (Op::Read, true), (Op::Read, false)]
            {
                // Its connection is closed, so nobody has to be waited for and nothing is revoked.
                promptly(ms(450), "unregister", || {
                    block.lend(&target);
                    let mut raw = Raw::connect(target.data_port());
                    raw.send(&Raw::header(op, block.addr, 8 * MIB as u64));
                    match op {
                        Op::Write => raw.send(text(sent, 1)),
                        Op::Read => assert_eq!(raw.answer(), Answer::Applied),
                    }
                    if !close {
                        raw.half_close();
                    }
                    drop(raw);
                    let (result, took) = timed(|| target.unregister(block.addr));
                    result.unwrap();
                    took
                });
            }
        }
        drop(target);
        assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
    }
}

/// Strangers at a data port that have all the slots they can get.
fn strangers(port: u16, block: u64, count: usize) -> Vec<Raw> {
    (0..count)
        .map(|i| {
            let mut raw = Raw::connect(port);
            match i % 4 {
                // Asks, and reads nothing.
                0 => raw.ask(block, 8 * MIB as u64),
                1 => {
                    raw.ask(block, 8 * MIB as u64);
                    raw.half_close();
                }
                // Sends half of what it says.
                2 => {
                    raw.send(&Raw::header(Op::Write, block + 4 * MIB as u64, 100_000));
                    raw.send(text(50_000, 1));
                }
                _ => {
                    raw.send(&Raw::header(Op::Write, block + 4 * MIB as u64, 9000));
                    raw.send(text(100, 1));
                }
            }
            raw
        })
        .collect()
}

apart! {
    fn strangers_that_stall_hold_up_nobody_else() {
        for (slots, count) in [(2, 4), (2, 40), (4, 20), (8, 40)] {
            let sim = Sim::cuda();
            let two = Two::with(sim.config(), target(&sim, slots));
            let (local, remote) = (sim.alloc(4 * MIB), sim.alloc(8 * MIB));
            remote.lend(&two.target);
            local.lend(&two.initiator);
            let held = strangers(two.target.data_port(), remote.addr, count);
            for round in 0..4 {
                for op in [Op::Write, Op::Read] {
                    let bytes = text(3 * MIB, round);
                    let (from, to) =
                        if op == Op::Write { (&local, &remote) } else { (&remote, &local) };
                    from.write(0, bytes);
                    let request = local.request(op, 0, remote.addr, 3 * MIB);
                    let (result, took) = timed(|| {
                        let batch = submit(&two.segment, vec![request], within(ms(8000))).unwrap();
                        end(&batch)
                    });
                    result.unwrap_or_else(|e| panic!("{slots} slots, {count} strangers: {e}"));
                    assert!(to.read(0, 3 * MIB) == bytes);
                    // Whoever stalls is known after the first time.
                    let most = if round == 0 { 50 * count as u64 + 3000 } else { 3000 };
                    assert!(took < ms(most), "{slots} slots, {count} strangers: {op:?} {took:?}");
                }
            }
            // Copies within the process need the same slots.
            let own = two.target.open(two.target.name()).unwrap();
            let host = HostBuffer::zeroed(MIB).unwrap();
            let request = host.request(Op::Read, 0, remote.addr, MIB).unwrap();
            let (result, took) =
                timed(|| own.submit_owned(&[request], within(ms(8000))).unwrap().wait());
            result.unwrap_or_else(|e| panic!("{slots} slots, {count} strangers: {e}"));
            assert!(took < PROMPT, "{took:?}");
            // Whoever reads at last gets what it asked for.
            for (i, mut raw) in held.into_iter().enumerate().filter(|(i, _)| i % 4 < 2).take(3) {
                assert_eq!(raw.answer(), Answer::Applied, "stranger {i}");
                raw.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                let mut got = vec![0; 8 * MIB];
                raw.stream.read_exact(&mut got).unwrap();
            }
            drop((own, two));
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
        }
    }
}

/// Waits until the device has nothing to copy any more.
fn rests(sim: &Sim) {
    let mut last = (sim.control.count("copies"), Instant::now());
    eventually("no copy for a while", || {
        let now = sim.control.count("copies");
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > ms(100)
    });
}

apart! {
    /// Nobody else waits for a slot, so nobody else has the strangers' taken away.
    fn strangers_that_stall_hold_up_no_copy_within_the_process() {
        let sim = Sim::cuda();
        let target = engine(target(&sim, 2));
        let block = sim.alloc(8 * MIB);
        block.lend(&target);
        block.write(0, text(8 * MIB, 1));
        let own = target.open(target.name()).unwrap();
        let host = HostBuffer::zeroed(MIB).unwrap();
        let buffer = target.device_buffer(sim.device(1), 1000).unwrap();
        for what in ["copy", "buffer"] {
            let held = [(); 2].map(|()| {
                let mut raw = Raw::connect(target.data_port());
                raw.ask(block.addr, 8 * MIB as u64);
                raw
            });
            rests(&sim);
            let ((), took) = timed(|| {
                if what == "buffer" {
                    buffer.read(0, 1000).unwrap();
                } else {
                    let request = host.request(Op::Read, 0, block.addr, MIB).unwrap();
                    own.submit_owned(&[request], within(ms(8000))).unwrap().wait().unwrap();
                    assert!(host.read(0, MIB) == text(MIB, 1));
                }
            });
            assert!(took < ms(4000), "{what}: {took:?}");
            drop(held);
        }
    }
}

apart! {
    /// They stop one after the other, each when it has got a slot that others wait for.
    fn strangers_that_stall_one_after_the_other_hold_up_nobody_for_ever() {
        let sim = Sim::cuda();
        let two = Two::with(sim.config(), target(&sim, 2));
        let (local, remote) = (sim.alloc(MIB), sim.alloc(8 * MIB));
        remote.lend(&two.target);
        let go = Gate::default();
        std::thread::scope(|threads| {
            for i in 0..6 {
                let (port, addr, go) = (two.target.data_port(), remote.addr, go.clone());
                threads.spawn(move || {
                    let mut raw = Raw::connect(port);
                    raw.ask(addr, 8 * MIB as u64);
                    // Reads a little now and then, so that it has slots, and no more.
                    let mut some = [0; 100_000];
                    for k in 0..8 {
                        let _ = raw.stream.read(&mut some);
                        std::thread::park_timeout(ms(7 + 3 * i + k));
                    }
                    go.wait();
                });
            }
            for i in 0..20 {
                let request = local.request(Op::Read, 0, remote.addr, MIB);
                let (result, took) = timed(|| two.run(vec![request]));
                result.unwrap();
                assert!(took < ms(3000), "transfer {i}: {took:?}");
            }
            go.open();
        });
    }
}

apart! {
    /// A lane that waited for a slot does not want it any more when its batch is cancelled.
    fn a_slot_that_a_cancelled_batch_waited_for_goes_to_others() {
        let sim = Sim::cuda();
        let mut config = sim.add_to(lanes(4, 1));
        (config.staging_slots, config.staging_slot_bytes) = (2, 64 << 10);
        config.lane_idle_probe = Duration::from_secs(600);
        let (cancelled, good) =
            (Fake::new(|mut link| link.serve()), Fake::new(|mut link| link.serve()));
        let e = engine(config);
        let segments = [&cancelled, &good].map(|fake| e.open(&fake.name()).unwrap());
        // More than two lanes take on, so that the others wait.
        let block = sim.alloc(48 * MIB);
        for op in [Op::Write, Op::Read] {
            for _ in 0..3 {
                sim.control.set("hang", 1);
                let batches: Vec<_> = (0..8)
                    .map(|i| {
                        let request = block.request(op, i * 6 * MIB, BASE, 6 * MIB);
                        submit(&segments[0], vec![request], within(ms(8000))).unwrap()
                    })
                    .collect();
                eventually("both slots are taken", || sim.control.count("copies_in_flight") > 1);
                batches.iter().for_each(tensorferry::Batch::cancel);
                assert!(batches.iter().all(|batch| batch.poll() != BatchState::Running));
                sim.control.heal();
                let request = block.request(op, 0, BASE, 2 * MIB);
                let batch = submit(&segments[1], vec![request], within(ms(8000))).unwrap();
                let (result, took) = timed(|| end(&batch));
                result.unwrap_or_else(|e| panic!("{op:?}: {e}"));
                assert!(took < ms(4000), "{op:?}: {took:?}");
            }
        }
        drop((segments, e));
        assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
    }
}

apart! {
    /// Each has begun to answer, and has a slot for what it does not send.
    fn a_peer_that_stops_sending_holds_up_no_other_peer() {
        let sim = Sim::cuda();
        for slots in [2, 4] {
            // More lanes than slots.
            let mut config = sim.add_to(lanes(6, 1));
            (config.staging_slots, config.staging_slot_bytes) = (slots, 64 << 10);
            let silent = Fake::new(|mut link| {
                let Some(header) = link.header() else { return };
                link.status(Status::Applied);
                link.send(&memory(header.addr, 100));
                link.hang();
            });
            let good = Fake::new(|mut link| link.serve());
            let e = engine(config);
            let block = sim.alloc(8 * MIB);
            let (to_silent, to_good) =
                (e.open(&silent.name()).unwrap(), e.open(&good.name()).unwrap());
            let mut stuck = Vec::new();
            eventually("all lanes are answered", || {
                let request = block.request(Op::Read, 0, BASE, 8 * MIB);
                stuck.push(submit(&to_silent, vec![request], within(ms(20_000))).unwrap());
                silent.seen().len() >= 6
            });
            let other = sim.alloc(4 * MIB);
            for _ in 0..5 {
                let request = other.request(Op::Read, 0, BASE, 4 * MIB);
                let (result, took) =
                    timed(|| end(&submit(&to_good, vec![request], within(ms(8000))).unwrap()));
                result.unwrap();
                assert!(took < ms(4000), "{slots} slots: {took:?}");
                assert!(other.read(0, 4 * MIB) == memory(BASE, 4 * MIB as u64));
            }
            for batch in &stuck {
                let ((), took) = timed(|| batch.cancel());
                assert!(took < PROMPT, "{took:?}");
            }
            drop((to_silent, to_good, e));
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
            block.free();
            other.free();
        }
    }
}

apart! {
    /// Its lanes have read ahead what it does not take.
    fn a_peer_that_does_not_read_holds_up_no_other_peer() {
        let sim = Sim::cuda();
        for slots in [2, 4, 8] {
            let mut config = sim.add_to(lanes(4, 1));
            (config.staging_slots, config.staging_slot_bytes) = (slots, 64 << 10);
            let deaf = Fake::new(|mut link| {
                link.narrow();
                link.hang();
            });
            let good = Fake::new(|mut link| link.serve());
            let e = engine(config);
            let block = sim.alloc(32 * MIB);
            let (to_deaf, to_good) = (e.open(&deaf.name()).unwrap(), e.open(&good.name()).unwrap());
            let stuck = submit(
                &to_deaf,
                vec![block.request(Op::Write, 0, BASE, 32 * MIB)],
                within(ms(20_000)),
            )
            .unwrap();
            eventually("it stalls", || deaf.has_unread());
            for _ in 0..5 {
                let request = block.request(Op::Write, 0, BASE, 4 * MIB);
                let (result, took) =
                    timed(|| end(&submit(&to_good, vec![request], within(ms(8000))).unwrap()));
                result.unwrap();
                assert!(took < ms(4000), "{slots} slots: {took:?}");
            }
            let ((), took) = timed(|| stuck.cancel());
            assert!(took < PROMPT, "{took:?}");
            let error = stuck.wait().unwrap_err();
            says(&error, &["cancelled"]);
            drop((to_deaf, to_good, e));
            assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
            block.free();
        }
    }
}
