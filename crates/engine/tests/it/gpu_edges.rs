//! What peers and initiators are told at the edges: many answers in one call, ends before copies, peers that never answer.
#![expect(unsafe_code, reason = "memory that goes away under its registration")]

use std::io::Write;
use std::time::Duration;

use tensorferry::{HostBuffer, Op, RegisterOptions};
use tensorferry_wire::{Header, Version};

use crate::common::{engine, eventually, lanes, ms, promptly, resident, timed, within};
use crate::fake::{Answer, BASE, Fake, Raw, memory};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

apart! {
    /// As many small answers as the kernel takes pieces in one call, and behind them one in several slots.
    fn many_small_answers_and_a_long_one_leave_together() {
        let sim = Sim::cuda();
        let mut config = sim.add_to(lanes(1, 1));
        (config.staging_slots, config.staging_slot_bytes) = (16, 64 << 10);
        let target = engine(config);
        let block = sim.alloc(MIB);
        block.write(0, text(MIB, 1));
        block.lend(&target);
        for small in 509..513 {
            let mut raw = Raw::connect(target.data_port());
            let mut all = Raw::header(Op::Read, block.addr, 1).repeat(small);
            all.extend(Raw::header(Op::Read, block.addr + 1, 400_000));
            raw.send(&all);
            for i in 0..small {
                assert_eq!(raw.answer(), Answer::Applied, "{i} of {small}");
                assert_eq!(raw.bytes(1), text(1, 1));
            }
            assert_eq!(raw.answer(), Answer::Applied, "behind {small}");
            assert!(raw.bytes(400_000) == text(MIB, 1)[1..=400_000]);
        }
    }
}

apart! {
    /// In the first version the end of the connection says that a WRITE is applied.
    fn an_engine_that_is_closed_acknowledges_nothing_that_is_not_copied() {
        let sim = Sim::cuda();
        for len in [1, 1000, 20_000, 600_000] {
            let target = engine(sim.config());
            let block = sim.alloc(MIB);
            block.lend(&target);
            sim.control.set("latency_ns", 300_000_000);
            let mut raw = Raw::connect(target.data_port());
            let header = Header { op: Op::Write, version: Version::V1, addr: block.addr, len: len as u64 };
            raw.send(&header.encode());
            raw.send(text(len, 1));
            raw.half_close();
            eventually("it is being copied", || sim.control.count("copies_in_flight") > 0);
            std::thread::scope(|threads| {
                threads.spawn(|| target.close());
                let answer = raw.answer();
                // On a machine that is busy the copy may end before the engine does.
                let copied = answer == Answer::End && block.read(0, len) == text(len, 1);
                assert!(answer == Answer::Reset || copied, "{len} bytes: {answer:?}");
            });
            sim.control.set("latency_ns", 0);
            block.free();
        }
    }
}

/// Memory that the owner has unmapped under its registration, with copies by the kernel, which says so.
#[test]
fn a_write_that_cannot_be_applied_is_not_acknowledged_by_an_orderly_end() {
    let mut config = lanes(1, 1);
    config.safe_copy = true;
    let target = engine(config);
    let (len, access) = (8192, libc::PROT_READ | libc::PROT_WRITE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: an anonymous mapping at an address of the kernel's choice changes nothing that exists.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let addr = base.expose_provenance() as u64;
    // SAFETY: broken on purpose; the kernel finds out.
    unsafe { target.register(addr, len as u64, &RegisterOptions::default()) }.unwrap();
    // SAFETY: the mapping is this test's, and nothing else uses it.
    assert_eq!(unsafe { libc::mprotect(base, len, libc::PROT_NONE) }, 0);
    let mut raw = Raw::connect(target.data_port());
    let header = Header { op: Op::Write, version: Version::V1, addr, len: 100 };
    raw.send(&header.encode());
    raw.send(&[7; 100]);
    raw.half_close();
    assert_eq!(raw.answer(), Answer::Reset);
    target.unregister(addr).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munmap(base, len) }, 0);
}

apart! {
    /// A lane whose peer says nothing has no use for a slot, and keeps none from others.
    fn lanes_of_a_silent_peer_are_lent_no_slot() {
        let sim = Sim::cuda();
        for slots in [2, 4] {
            let mut config = sim.add_to(lanes(4, 1));
            (config.staging_slots, config.staging_slot_bytes) = (slots, 64 << 10);
            config.lane_idle_probe = Duration::from_secs(600);
            let silent = Fake::new(|mut link| link.hang());
            let good = Fake::new(|mut link| link.serve());
            let e = engine(config);
            let (to_silent, to_good) = (e.open(&silent.name()).unwrap(), e.open(&good.name()).unwrap());
            let block = sim.alloc(64 * MIB);
            // Every slot is in use while the others ask for one.
            sim.control.set("h2d_bytes_per_second", 50 << 20);
            let request = block.request(Op::Read, 0, BASE, 8 * MIB);
            let busy = submit(&to_good, vec![request], within(ms(8000))).unwrap();
            eventually("slots are in use", || sim.control.count("copies_in_flight") > 0);
            let ask = |i: usize| {
                let request = block.request(Op::Read, (16 + 4 * i) * MIB, BASE, 4 * MIB);
                submit(&to_silent, vec![request], within(ms(20_000))).unwrap()
            };
            let stuck: Vec<_> = (0..8).map(ask).collect();
            eventually("the silent peer was asked", || silent.has_unread());
            let (result, took) = timed(|| end(&busy));
            result.unwrap_or_else(|error| panic!("{slots} slots: {error}"));
            assert!(took < ms(3000), "{slots} slots: {took:?}");
            assert!(block.read(0, 8 * MIB) == memory(BASE, 8 * MIB as u64));
            stuck.iter().for_each(tensorferry::Batch::cancel);
            sim.control.set("h2d_bytes_per_second", 0);
            drop((to_silent, to_good, e));
            block.free();
        }
        assert_eq!(sim.control.count("pinned_bytes"), 0, "slots were lost");
    }
}

apart! {
    /// Dropped, an engine is closed again.
    fn what_hangs_is_waited_for_once_however_often_an_engine_is_closed() {
        promptly(ms(1000), "closing", || {
            let sim = Sim::cuda();
            let two = Two::new(&sim.config());
            let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
            remote.lend(&two.target);
            sim.control.set("hang", 1);
            let request = local.request(Op::Write, 0, remote.addr, MIB);
            let batch = submit(&two.segment, vec![request], within(ms(20_000))).unwrap();
            eventually("a copy hangs", || sim.control.count("copies_in_flight") > 0);
            let ((), first) = timed(|| two.initiator.close());
            assert_eq!(end(&batch).unwrap_err().code(), 29);
            let ((), again) = timed(|| two.initiator.close());
            two.target.close();
            let ((), dropped) = timed(|| drop((batch, two)));
            sim.control.heal();
            // The others have a third of the time, in which nothing that hangs can have been waited for.
            first.max(3 * again).max(3 * dropped)
        });
    }
}

apart! {
    /// What arrives while no slot can be had stays where it is, in the sockets.
    fn connections_that_wait_for_a_slot_keep_little() {
        let sim = Sim::cuda();
        let target = engine(sim.add_to(lanes(1, 1)));
        let block = sim.alloc(MIB);
        block.lend(&target);
        let mut all = Vec::new();
        for _ in 0..20 {
            all.extend(Raw::header(Op::Write, block.addr, 15_000));
            all.extend([7; 15_000]);
        }
        sim.control.set("hang", 1);
        let before = resident() >> 10;
        let raws: Vec<_> = (0..300)
            .map(|_| {
                let mut raw = Raw::connect(target.data_port());
                raw.stream.set_nonblocking(true).unwrap();
                // As much as the sockets take; more than the engine reads at once.
                let _ = raw.stream.write(&all);
                raw
            })
            .collect();
        eventually("all are accepted", || target.stats().connections_accepted == 300);
        // Its only thread turns to those that are ready one after the other, so that it has been at each of them.
        let host = HostBuffer::zeroed(64).unwrap();
        target.register_buffer(&host, &Default::default()).unwrap();
        let mut last = Raw::connect(target.data_port());
        for _ in 0..100 {
            last.ask(host.addr(), 1);
            last.bytes(9);
        }
        let kept = (resident() >> 10).saturating_sub(before);
        assert!(kept < 24 << 10, "{kept} KiB for {} connections", raws.len());
        sim.control.heal();
        for mut raw in raws {
            raw.stream.set_nonblocking(false).unwrap();
            assert_eq!(raw.answer(), Answer::Applied);
        }
    }
}

apart! {
    /// Nothing is read from it, and so nothing says by itself that it has ended.
    fn a_connection_that_is_reset_while_it_waits_for_a_slot_is_closed() {
        let sim = Sim::cuda();
        let mut config = sim.add_to(lanes(1, 1));
        (config.staging_slots, config.staging_slot_bytes) = (2, 64 << 10);
        let target = engine(config);
        let block = sim.alloc(MIB);
        block.lend(&target);
        sim.control.set("hang", 1);
        let sockets = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = sockets();
        let mut raws: Vec<_> = (0..20).map(|_| Raw::connect(target.data_port())).collect();
        for raw in &mut raws {
            raw.stream.set_nonblocking(true).unwrap();
            // More than the slots hold.
            let _ = raw.stream.write(&Raw::header(Op::Write, block.addr, MIB as u64));
            let _ = raw.stream.write(&vec![1; MIB]);
        }
        eventually("all are accepted", || target.stats().connections_accepted == 20);
        eventually("copies hang", || sim.control.count("copies_in_flight") > 0);
        for raw in raws {
            let socket = socket2::Socket::from(raw.stream);
            socket.set_linger(Some(Duration::ZERO)).unwrap();
        }
        eventually("all are closed", || sockets() <= before);
        sim.control.heal();
    }
}
