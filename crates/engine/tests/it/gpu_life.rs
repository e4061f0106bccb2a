//! Device memory beside captures, forks, other engines and the ends of processes; and what is left behind.
#![expect(unsafe_code, reason = "forks, and streams of the simulator's")]

use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use tensorferry::{Config, HostBuffer, Op, UserStream};

use crate::common::{PROMPT, eventually, lanes, ms, timed, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Two, apart, end, submit, text};

apart! {
    /// The mode in which a call of any thread spoils it, unless that thread keeps clear.
    fn a_capture_on_another_thread_survives_whatever_the_engine_does() {
        for sim in Sim::every() {
            let name = sim.file.display().to_string();
            let blocks: Vec<_> = (0..4).map(|_| sim.alloc(3 * MIB)).collect();
            let streams = [(); 2].map(|()| sim.control.stream(1, false).unwrap());
            let (begun, done) = (Barrier::new(2), Barrier::new(2));
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    sim.control.capture_begin(streams[0], 0).unwrap();
                    begun.wait();
                    done.wait();
                    sim.control
                        .capture_end(streams[0])
                        .unwrap_or_else(|code| panic!("{name}: {code}"));
                });
                begun.wait();
                // The first use of a device, its slots and streams among it.
                let two = Two::new(&sim.config());
                blocks[0].lend(&two.initiator);
                blocks[1].lend(&two.target);
                for (op, seed) in [(Op::Write, 1), (Op::Read, 2)] {
                    let (from, to) = if op == Op::Write {
                        (&blocks[0], &blocks[1])
                    } else {
                        (&blocks[1], &blocks[0])
                    };
                    from.write(0, text(3 * MIB, seed));
                    two.run(vec![blocks[0].request(op, 0, blocks[1].addr, 3 * MIB)]).unwrap();
                    assert!(to.read(0, 3 * MIB) == text(3 * MIB, seed), "{name}");
                    let own = two.target.open(two.target.name()).unwrap();
                    let request = blocks[2].request(op, 0, blocks[1].addr, 3 * MIB);
                    blocks[2].lend(&two.target);
                    end(&submit(&own, vec![request], within(ms(8000))).unwrap()).unwrap();
                    two.target.unregister(blocks[2].addr).unwrap();
                }
                // Memory that is not registered, an order with another stream, a buffer of the engine's.
                let host = HostBuffer::zeroed(MIB).unwrap();
                let request = host.request(Op::Write, 0, blocks[1].addr, MIB).unwrap();
                // SAFETY: the simulator's streams are never destroyed.
                let stream = unsafe { UserStream::new(sim.vendor, streams[1]) }.hold_later_work();
                let options = within(ms(8000)).with_stream(stream);
                end(&two.segment.submit_owned(&[request], options).unwrap()).unwrap();
                let buffer = two.initiator.device_buffer(sim.device(1), MIB).unwrap();
                buffer.write(5, text(1000, 1)).unwrap();
                assert!(buffer.read(5, 1000).unwrap() == text(1000, 1));
                drop(buffer);
                two.initiator.unregister(blocks[0].addr).unwrap();
                drop(two);
                done.wait();
            });
            assert_eq!(sim.control.count("captures_invalidated"), 0, "{name}");
            assert_eq!(sim.control.count("captured_operations"), 0, "{name}");
            assert_eq!(sim.control.count("pinned_live"), 1, "{name}: a page of words is kept");
        }
    }
}

/// Runs `body` in a fork of this process; 101: it panicked.
fn in_fork(body: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `body` on its one thread, and leaves without exit handlers.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the child.
        unsafe { libc::_exit(if done.is_ok() { 0 } else { 101 }) };
    }
    assert!(pid > 0);
    let until = Instant::now() + Duration::from_secs(20);
    let mut status = 0;
    loop {
        // SAFETY: asks about the child made above; writes one int.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
            0 if Instant::now() < until => std::thread::park_timeout(ms(2)),
            0 => {
                // SAFETY: ends the child made above, which has hung.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                return -1;
            }
            _ => break,
        }
    }
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) }
}

apart! {
    fn a_forked_child_is_told_and_the_parent_goes_on() {
        for sim in [Sim::cuda(), Sim::every().swap_remove(3), Sim::every().swap_remove(5)] {
            let two = Two::new(&sim.config());
            let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
            local.lend(&two.initiator);
            remote.lend(&two.target);
            let buffer = two.initiator.device_buffer(sim.device(1), 4096).unwrap();
            let request = local.request(Op::Write, 0, remote.addr, MIB);
            two.run(vec![request]).unwrap();
            let code = in_fork(|| {
                let refused = |error: tensorferry::Error| assert_eq!(error.code(), 24, "{error}");
                let ((), took) = timed(|| {
                    refused(submit(&two.segment, vec![request], within(ms(8000))).unwrap_err());
                    refused(local.lend_as(&two.initiator, &Default::default()).unwrap_err());
                    refused(two.initiator.unregister(local.addr).unwrap_err());
                    refused(two.initiator.device_buffer(sim.device(1), 64).unwrap_err());
                    refused(buffer.read(0, 100).unwrap_err());
                    refused(buffer.write(0, &[1; 100]).unwrap_err());
                    two.initiator.close();
                });
                assert!(took < PROMPT, "{took:?}");
                // A new engine moves host memory, and says why it moves no other.
                let fresh = Two::new(&sim.config());
                let (here, there) =
                    (HostBuffer::zeroed(MIB).unwrap(), HostBuffer::zeroed(MIB).unwrap());
                fresh.target.register_buffer(&there, &Default::default()).unwrap();
                here.write(0, text(MIB, 1));
                let move_it = here.request(Op::Write, 0, there.addr(), MIB).unwrap();
                end(&fresh.segment.submit_owned(&[move_it], within(ms(8000))).unwrap()).unwrap();
                assert!(there.read(0, MIB) == text(MIB, 1));
                let error = fresh.initiator.device_buffer(sim.device(1), 64).unwrap_err();
                assert!(error.to_string().contains("before a fork"), "{error}");
                fresh.initiator.close();
            });
            assert_eq!(code, 0, "{}", sim.vendor);
            local.write(0, text(MIB, 2));
            two.run(vec![request]).unwrap();
            assert!(remote.read(0, MIB) == text(MIB, 2));
            buffer.write(0, &[7; 100]).unwrap();
            assert_eq!(buffer.read(0, 100).unwrap(), [7; 100]);
        }
    }
}

const ENDS: &str = "TENSORFERRY_ENGINE_TEST_ENDS";

#[test]
fn a_process_may_end_without_a_word_to_its_engines() {
    const NAME: &str = "gpu_life::a_process_may_end_without_a_word_to_its_engines";
    if let Ok(how) = std::env::var(ENDS) {
        return end_without_a_word(&how);
    }
    for how in ["idle", "busy", "hung", "broken", "ordered"] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
            .env(ENDS, how)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if begin.elapsed() < Duration::from_secs(15) => {
                    std::thread::park_timeout(ms(2))
                }
                None => {
                    child.kill().unwrap();
                    panic!("{how}: it does not end");
                }
            }
        };
        std::fs::remove_dir_all(Sim::folder(child.id(), 0)).unwrap();
        assert_eq!(status.code(), Some(42), "{how}: {status}");
        assert!(begin.elapsed() < Duration::from_secs(8), "{how}: {:?}", begin.elapsed());
    }
}

fn end_without_a_word(how: &str) {
    let sim = Sim::cuda();
    let two = Two::new(&sim.config());
    let (local, remote) = (sim.alloc(32 * MIB), sim.alloc(32 * MIB));
    local.lend(&two.initiator);
    remote.lend(&two.target);
    two.run(vec![local.request(Op::Read, 0, remote.addr, MIB)]).unwrap();
    let stream = sim.control.stream(1, false).unwrap();
    let mut options = within(ms(20_000));
    match how {
        "busy" => sim.control.set("d2h_bytes_per_second", 20 << 20),
        "hung" => sim.control.set("hang", 1),
        "broken" => sim.control.set("sticky", 700),
        "ordered" => {
            sim.control.fill_later(stream, (local.addr, 1000), 1, Duration::from_secs(60)).unwrap();
            // SAFETY: the simulator's streams are never destroyed.
            let user = unsafe { UserStream::new(sim.vendor, stream) };
            options.stream = Some(user.hold_later_work());
        }
        _ => {}
    }
    if how != "idle" {
        let request = local.request(Op::Write, 0, remote.addr, 32 * MIB);
        let batch = submit(&two.segment, vec![request], options);
        if how == "busy" {
            let before = sim.control.count("copies");
            eventually("bytes move", || sim.control.count("copies") > before);
        }
        std::mem::forget(batch);
    }
    std::mem::forget(two);
    std::process::exit(42);
}

apart! {
    fn engines_share_a_device_and_leave_it_one_by_one() {
        let sim = Sim::cuda();
        let pairs: Vec<_> = (0..3).map(|_| Two::new(&sim.config())).collect();
        std::thread::scope(|threads| {
            for (t, two) in pairs.iter().enumerate() {
                let sim = &sim;
                threads.spawn(move || {
                    let (local, remote) = (sim.alloc(4 * MIB), sim.alloc(4 * MIB));
                    local.lend(&two.initiator);
                    remote.lend(&two.target);
                    for i in 0..10 {
                        local.write(0, text(4 * MIB, 10 * t + i));
                        two.run(vec![local.request(Op::Write, 0, remote.addr, 4 * MIB)]).unwrap();
                        assert!(remote.read(0, 4 * MIB) == text(4 * MIB, 10 * t + i));
                    }
                });
            }
        });
        for (gone, two) in pairs.into_iter().enumerate() {
            assert_eq!(sim.control.count("pinned_bytes"), ((3 - gone as u64) * 32) << 20);
            drop(two);
        }
        assert_eq!(sim.control.count("pinned_bytes"), 0);
    }
}

apart! {
    fn nothing_is_left_of_fifty_engines_with_devices() {
        let sim = Sim::cuda();
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        let (local, remote) = (sim.alloc(MIB), sim.alloc(MIB));
        let contexts = sim.control.count("contexts.1");
        let cycle = |i: usize| {
            let config: Config = sim.add_to(lanes(2, 1 + i % 2));
            let two = Two::new(&config);
            remote.lend(&two.target);
            if i.is_multiple_of(2) {
                local.lend(&two.initiator);
            }
            let request = |op| local.request(op, 0, remote.addr, MIB);
            two.run(vec![request(Op::Write), request(Op::Read)]).unwrap();
            let buffer = two.target.device_buffer(sim.device(1), 4096).unwrap();
            buffer.write(0, &[1; 4096]).unwrap();
            if i.is_multiple_of(3) {
                drop(buffer);
                two.target.close();
            } else {
                // Its memory is freed after the engine has gone.
                drop(two.target);
                drop((two.segment, two.initiator, buffer));
            }
        };
        cycle(0);
        // The threads are joined; the kernel takes them off the list a moment later. One watches over the test.
        eventually("quiet", || count("task") <= 3);
        let fds = count("fd");
        (0..50).for_each(&cycle);
        // An engine whose buffer outlives it leaves the device's context to the process, and is not undone.
        let kept = (0..50_usize).filter(|i| !i.is_multiple_of(3)).count() as u64;
        eventually("no thread is left", || count("task") <= 3);
        assert_eq!(count("fd"), fds);
        assert_eq!(sim.control.count("pinned_bytes"), 0);
        assert_eq!(sim.control.count("contexts.1"), contexts);
        let popped = sim.control.count("context_pops");
        assert_eq!(sim.control.count("context_pushes"), popped + kept);
        assert_eq!(sim.control.count("allocations"), 2, "the test's own");
        let balance = |made, gone| sim.control.calls(made) - sim.control.calls(gone);
        assert_eq!(balance("cuStreamCreate", "cuStreamDestroy_v2"), 0);
        assert_eq!(balance("cuEventCreate", "cuEventDestroy_v2"), 0);
        assert_eq!(balance("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"), kept);
    }
}
