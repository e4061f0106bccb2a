//! The order between transfers and the caller's own work on a stream.
#![expect(unsafe_code, reason = "streams of the simulator's, which live as long as it does")]

use std::time::Duration;

use tensorferry::gpu::Vendor;
use tensorferry::{Batch, BatchState, HostBuffer, Op, Result, SubmitOptions, UserStream};

use crate::common::{PROMPT, eventually, ms, promptly, says, timed, within};
use crate::gpu::{MIB, Sim};
use crate::gpu_kit::{Block, Two, apart, end, submit};

/// Begins behind what is on the stream; with `hold`, what comes there later waits.
fn behind(sim: &Sim, stream: u64, hold: bool, timeout: Duration) -> SubmitOptions {
    // SAFETY: the simulator's streams are never destroyed.
    let user = unsafe { UserStream::new(sim.vendor, stream) };
    let user = if hold { user.hold_later_work() } else { user };
    within(timeout).with_stream(user)
}

const LONG: Duration = Duration::from_secs(10);

/// A kernel on the stream that fills the block after a while.
fn kernel(block: &Block<'_>, stream: u64, byte: u8, delay: u64) {
    let range = (block.addr, block.len as u64);
    block.control().fill_later(stream, range, byte, ms(delay)).unwrap();
}

/// Two engines, a block at each end, and a stream of the initiator's.
struct Ordered<'a> {
    sim: &'a Sim,
    two: Two,
    local: Block<'a>,
    remote: Block<'a>,
    stream: u64,
}

impl<'a> Ordered<'a> {
    fn new(sim: &'a Sim, len: usize) -> Self {
        let two = Two::new(&sim.config());
        let (local, remote) = (sim.alloc(len), sim.alloc(len));
        local.lend(&two.initiator);
        remote.lend(&two.target);
        let stream = sim.control.stream(1, false).unwrap();
        two.run(vec![local.request(Op::Write, 0, remote.addr, len)]).unwrap();
        Self { sim, two, local, remote, stream }
    }

    fn submit(&self, op: Op, hold: bool, timeout: Duration) -> Result<Batch> {
        let request = self.local.request(op, 0, self.remote.addr, self.local.len);
        submit(&self.two.segment, vec![request], behind(self.sim, self.stream, hold, timeout))
    }

    fn wait(&self) {
        self.sim.control.stream_wait(self.stream).unwrap();
    }
}

apart! {
    fn a_transfer_begins_when_the_work_before_it_is_done() {
        for sim in Sim::every() {
            let name = sim.file.display().to_string();
            let ordered = Ordered::new(&sim, 3 * MIB);
            let Ordered { local, remote, stream, .. } = &ordered;
            for hold in [false, true] {
                // What a kernel writes late is carried.
                local.fill(1);
                remote.fill(1);
                kernel(local, *stream, 7, 60);
                let batch = ordered.submit(Op::Write, hold, LONG).unwrap();
                let waits = batch.poll() == BatchState::Running;
                assert!(waits || local.is_all(7), "{name}: it is complete before the kernel");
                end(&batch).unwrap_or_else(|e| panic!("{name}, hold {hold}: {e}"));
                assert!(remote.is_all(7), "{name}, hold {hold}");
                // What a kernel is still writing is not overwritten before.
                kernel(local, *stream, 3, 60);
                let batch = ordered.submit(Op::Read, hold, LONG).unwrap();
                end(&batch).unwrap_or_else(|e| panic!("{name}, hold {hold}: {e}"));
                ordered.wait();
                assert!(local.is_all(7), "{name}, hold {hold}: {:?}", local.read(0, 4));
            }
            assert_eq!(sim.control.count("contexts.0"), 0, "{name}: it is not in use");
        }
    }
}

/// What is put on the stream after a submission comes after the transfer.
fn later_work_waits(sim: &Sim) {
    let name = sim.file.display().to_string();
    let ordered = Ordered::new(sim, 2 * MIB);
    let Ordered { local, remote, stream, .. } = &ordered;
    sim.control.set("d2h_bytes_per_second", 40 << 20);
    for _ in 0..2 {
        local.fill(7);
        kernel(local, *stream, 8, 5);
        let batch = ordered.submit(Op::Write, true, LONG).unwrap();
        kernel(local, *stream, 9, 0);
        let ((), took) = timed(|| ordered.wait());
        assert_eq!(
            batch.poll(),
            BatchState::Completed,
            "{name}: the stream went on after {took:?}"
        );
        assert!(remote.is_all(8), "{name}: {:?}", remote.read(0, 4));
        assert!(local.is_all(9), "{name}");
        // And a READ: what it brought is what the next kernel finds, and may overwrite.
        let batch = ordered.submit(Op::Read, true, LONG).unwrap();
        kernel(local, *stream, 5, 0);
        ordered.wait();
        assert_eq!(batch.poll(), BatchState::Completed, "{name}");
        assert!(local.is_all(5), "{name}");
    }
    sim.control.set("d2h_bytes_per_second", 0);
}

apart! {
    fn later_work_waits_for_a_word() {
        for sim in Sim::every() {
            later_work_waits(&sim);
            assert_eq!(sim.control.count("host_functions"), 0, "{}", sim.file.display());
        }
    }
}

apart! {
    fn later_work_waits_in_a_host_function_where_words_cannot_be_waited_for() {
        let calls = ["cuStreamWaitValue32_v2", "muStreamWaitValue32_v2", "hipStreamWaitValue32"];
        for sim in Sim::every() {
            if sim.file.ends_with("libamdhip64.so.5") {
                continue;
            }
            calls.iter().for_each(|call| sim.control.inject(call, 1, 0, 801));
            later_work_waits(&sim);
            assert_eq!(sim.control.count("host_functions"), 4, "{}", sim.file.display());
        }
    }
}

apart! {
    /// HIP 5.2 has no host functions; if it could not wait for words either, later work could not be held.
    fn work_that_cannot_be_held_is_an_error_and_nothing_moves() {
        let sim = Sim::new(Vendor::Hip, &["libamdhip64.so.5"]);
        let ordered = Ordered::new(&sim, MIB);
        sim.control.inject("hipStreamWaitValue32", 1, 0, 801);
        ordered.local.fill(1);
        ordered.remote.fill(2);
        let error = ordered.submit(Op::Write, true, LONG).unwrap_err();
        assert_eq!(error.code(), 27, "{error}");
        says(
            &error,
            &["hipLaunchHostFunc", "libamdhip64.so.5", "a newer version of the HIP library has it"],
        );
        end(&ordered.submit(Op::Write, false, LONG).unwrap()).unwrap();
        assert!(ordered.remote.is_all(1));
        let stats = ordered.two.initiator.stats();
        assert_eq!(stats.batches_submitted, stats.batches_completed + stats.batches_failed);
    }
}

apart! {
    fn a_stream_that_is_captured_is_refused_and_its_capture_goes_on() {
        for sim in Sim::every() {
            let name = sim.file.display().to_string();
            let ordered = Ordered::new(&sim, MIB);
            ordered.local.fill(1);
            ordered.remote.fill(2);
            sim.control.capture_begin(ordered.stream, 0).unwrap();
            for (op, hold) in [(Op::Write, false), (Op::Read, true)] {
                let error = ordered.submit(op, hold, LONG).unwrap_err();
                assert_eq!(error.code(), 33, "{name}: {error}");
                let text = format!(
                    "stream {:#x} of {} is being captured into a graph, which cannot hold a transfer; submit it \
                     before or after the capture",
                    ordered.stream,
                    sim.device(1)
                );
                assert_eq!(error.to_string(), text);
            }
            sim.control.capture_end(ordered.stream).unwrap_or_else(|code| panic!("{name}: {code}"));
            assert_eq!(sim.control.count("captured_operations"), 0, "{name}");
            assert!(ordered.remote.is_all(2), "{name}");
            end(&ordered.submit(Op::Write, true, LONG).unwrap()).unwrap();
            assert!(ordered.remote.is_all(1), "{name}");
            ordered.wait();
        }
    }
}

apart! {
    fn a_batch_that_waits_for_its_stream_ends_when_it_has_to() {
        for call in ["", "cuStreamWaitValue32_v2"] {
            for (how, code) in [("deadline", 13), ("cancel", 14), ("unregister", 15), ("close", 23)]
            {
                // Closing gives pinned memory back, for which a driver waits until its streams are empty.
                promptly(ms(if how == "close" { 2200 } else { 900 }), how, || {
                    let sim = Sim::cuda();
                    sim.control.inject(call, 1, 0, 801);
                    let ordered = Ordered::new(&sim, MIB);
                    let Ordered { local, remote, stream, two, .. } = &ordered;
                    remote.fill(2);
                    kernel(local, *stream, 7, 1500);
                    let timeout = if how == "deadline" { ms(200) } else { LONG };
                    let batch = ordered.submit(Op::Write, true, timeout).unwrap();
                    kernel(local, *stream, 9, 0);
                    let (result, ended) = timed(|| {
                        match how {
                            "cancel" => batch.cancel(),
                            "unregister" => two.initiator.unregister(local.addr).unwrap(),
                            "close" => two.initiator.close(),
                            _ => {}
                        }
                        end(&batch)
                    });
                    let error = result.unwrap_err();
                    assert_eq!(error.code(), code, "{how}: {error}");
                    if how == "deadline" {
                        says(&error, &["it waited for the work before it on the caller's stream"]);
                    }
                    // The stream is held no longer than that, and nothing of the transfer is done.
                    let ((), took) = timed(|| ordered.wait());
                    assert!(took < 2 * PROMPT, "{how}: {took:?}");
                    assert!(local.is_all(9), "{how}");
                    assert!(remote.is_all(2), "{how}: it moved after its end");
                    ended
                });
            }
        }
    }
}

apart! {
    fn a_batch_that_fails_lets_its_stream_go() {
        for call in ["", "cuStreamWaitValue32_v2"] {
            let sim = Sim::cuda();
            sim.control.inject(call, 1, 0, 801);
            let ordered = Ordered::new(&sim, MIB);
            let Ordered { local, stream, two, .. } = &ordered;
            // Nobody has registered it.
            let request = local.request(Op::Write, 0, 4096, 100);
            let batch =
                submit(&two.segment, vec![request], behind(&sim, *stream, true, LONG)).unwrap();
            let ((), took) = timed(|| ordered.wait());
            assert_eq!(batch.result().expect("it is final").unwrap_err().code(), 9);
            assert!(took < PROMPT, "{took:?}");
            // A copy that hangs: its deadline is the stream's.
            sim.control.set("hang", 1);
            let (batch, took) = timed(|| {
                let batch = ordered.submit(Op::Write, true, ms(1500)).unwrap();
                ordered.wait();
                batch
            });
            assert_eq!(batch.result().expect("it is final").unwrap_err().code(), 29);
            assert!(took >= ms(1500) && took < ms(1500) + PROMPT, "{took:?}");
            sim.control.heal();
        }
    }
}

apart! {
    fn a_device_fault_ends_a_batch_that_waits_for_its_stream() {
        let sim = Sim::cuda();
        let ordered = Ordered::new(&sim, MIB);
        kernel(&ordered.local, ordered.stream, 7, 5000);
        let batch = ordered.submit(Op::Write, true, LONG).unwrap();
        sim.control.set("sticky", 700);
        let (result, took) = timed(|| end(&batch));
        let error = result.unwrap_err();
        assert_eq!(error.code(), 28, "{error}");
        says(&error, &["answered 700 CUDA_ERROR_ILLEGAL_ADDRESS"]);
        assert!(took < PROMPT, "{took:?}");
    }
}

apart! {
    /// The stream's device is found, and no context is made where the process has none.
    fn a_batch_of_host_memory_can_be_ordered_too() {
        for sim in Sim::every() {
            let name = sim.file.display().to_string();
            let two = Two::new(&sim.config());
            let block = sim.alloc(MIB);
            block.lend(&two.target);
            let stream = sim.control.stream(1, false).unwrap();
            let host = HostBuffer::zeroed(MIB).unwrap();
            kernel(&block, stream, 7, 60);
            let request = host.request(Op::Read, 0, block.addr, MIB).unwrap();
            let options = behind(&sim, stream, true, LONG);
            let batch = two.segment.submit_owned(&[request], options).unwrap();
            kernel(&block, stream, 9, 0);
            sim.control.stream_wait(stream).unwrap();
            assert_eq!(batch.poll(), BatchState::Completed, "{name}");
            assert!(host.read(0, MIB) == vec![7; MIB], "{name}");
            // HIP does not tell which devices are in use; its contexts cost next to nothing.
            let free = sim.vendor == Vendor::Hip || sim.control.count("contexts.0") == 0;
            assert!(free, "{name}: device 0 is not in use");
            assert_eq!(sim.control.count("thread.last_error"), 0, "{name}");
        }
    }
}

apart! {
    /// The work is on another device than the memory.
    fn a_stream_of_another_device_is_waited_for() {
        for sim in Sim::every() {
            let ordered = Ordered::new(&sim, MIB);
            let other = sim.alloc_on(0, 4096, tensorferry_simgpu::Memory::Device);
            let stream = sim.control.stream(0, false).unwrap();
            let ordered = Ordered { stream, ..ordered };
            // What makes the batch's bytes comes after the kernel there.
            ordered.local.fill(1);
            kernel(&other, stream, 7, 60);
            let batch = ordered.submit(Op::Write, true, LONG).unwrap();
            eventually("the kernel is done", || {
                other.is_all(7) || batch.poll() != BatchState::Running
            });
            assert!(other.is_all(7), "{}: it did not wait", sim.file.display());
            end(&batch).unwrap();
            ordered.wait();
        }
    }
}

apart! {
    fn a_thousand_ordered_transfers_cost_no_more_than_a_few() {
        for call in ["", "cuStreamWaitValue32_v2"] {
            let sim = Sim::cuda();
            sim.control.inject(call, 1, 0, 801);
            let ordered = Ordered::new(&sim, 1000);
            let run = |count: usize, empty: bool| {
                for i in 0..count {
                    let op = if i % 2 == 0 { Op::Write } else { Op::Read };
                    let batch = if empty {
                        let options = behind(&sim, ordered.stream, true, LONG);
                        submit(&ordered.two.segment, Vec::new(), options).unwrap()
                    } else {
                        ordered.submit(op, true, LONG).unwrap()
                    };
                    end(&batch).unwrap();
                }
                ordered.wait();
            };
            let events = || {
                let made = sim.control.calls("cuEventCreate");
                made - sim.control.calls("cuEventDestroy_v2")
            };
            run(10, false);
            let (pinned, allocations) =
                (sim.control.count("pinned_bytes"), sim.control.count("pinned_allocations"));
            let before = events();
            run(500, false);
            run(100, true);
            eventually("its events are given back", || events() <= before + 1);
            // Several at once, as many as there are words on a page and more.
            let batches: Vec<_> =
                (0..100).map(|_| ordered.submit(Op::Write, true, LONG).unwrap()).collect();
            batches.iter().for_each(|batch| end(batch).unwrap());
            drop(batches);
            run(300, false);
            let more = sim.control.count("pinned_bytes") - pinned;
            assert!(more <= 2 * 4096, "{more} bytes more");
            assert!(sim.control.count("pinned_allocations") <= allocations + 2);
            eventually("its events are given back", || events() <= before + 1);
        }
    }
}

apart! {
    fn streams_of_many_threads_do_not_hold_up_each_other() {
        let sim = Sim::cuda();
        let ordered = Ordered::new(&sim, 4 * MIB);
        std::thread::scope(|threads| {
            for t in 0..4_usize {
                let (ordered, sim) = (&ordered, &sim);
                threads.spawn(move || {
                    let stream = sim.control.stream(1, false).unwrap();
                    let part = ordered.local.part(t * MIB, MIB);
                    for round in 1..30_u8 {
                        kernel(&part, stream, round, 1);
                        let request =
                            part.request(Op::Write, 0, ordered.remote.addr + (t * MIB) as u64, MIB);
                        let options = behind(sim, stream, true, LONG);
                        let batch = submit(&ordered.two.segment, vec![request], options).unwrap();
                        kernel(&part, stream, 0, 0);
                        end(&batch).unwrap();
                        let got = ordered.remote.read(t * MIB, MIB);
                        assert!(
                            got == vec![round; MIB],
                            "thread {t}, round {round}: {:?}",
                            &got[..4]
                        );
                    }
                    // A kernel that never comes to its end on one stream is no matter to the others.
                    if t == 0 {
                        kernel(&part, stream, 99, 700);
                    }
                });
            }
        });
    }
}
