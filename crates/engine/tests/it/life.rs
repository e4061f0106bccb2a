//! The ends of things: engines that are closed, buffers that are taken back, and what is left behind.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tensorferry::{
    Batch, BatchState, Completion, Config, Engine, HostBuffer, Notification, Op, RegisterOptions,
    SubmitOptions,
};
use tensorferry_wire::Status;

use crate::common::{
    PROMPT, Pair, alone, buffer, engine, eventually, lanes, ms, pattern, promptly, row, start,
    timed, within,
};
use crate::fake::{Answer, BASE, Fake, Gate, OnNotify, Raw, control_only, memory, silent};

/// Everything that can be asked of a closed engine says so.
fn says_closed(e: &Engine, segment: &tensorferry::Segment) {
    let local = HostBuffer::zeroed(16).unwrap();
    let request = local.request(Op::Write, 0, BASE, 16).unwrap();
    let note = Notification::new("n", "m");
    assert!(e.is_closed());
    let answers = [
        e.open("127.0.0.1:1").map(|_| ()),
        e.segment("127.0.0.1:1").map(|_| ()),
        e.probe("127.0.0.1:1"),
        e.register_buffer(&local, &RegisterOptions::default()),
        e.unregister(local.addr()),
        segment.buffers().map(|_| ()),
        segment.notify(&note),
        segment.submit_owned(&[request], SubmitOptions::default()).map(|_| ()),
        segment.submit_owned(&[], SubmitOptions::default()).map(|_| ()),
    ];
    for (i, answer) in answers.into_iter().enumerate() {
        let error = answer.unwrap_err();
        assert_eq!(error.code(), 23, "{i}: {error}");
        assert_eq!(error.to_string(), "the engine is closed; make a new one");
    }
}

#[test]
fn closing_ends_running_batches_and_is_quiet() {
    for io_threads in [1, 3] {
        let go = Gate::default();
        let gate = go.clone();
        let fake = Fake::new(move |mut link| {
            let Some(header) = link.header() else { return };
            if header.op == Op::Read {
                link.status(Status::Applied);
                link.send(&memory(header.addr, 1000));
                gate.wait();
                link.send(&memory(header.addr + 1000, header.len - 1000));
            }
            link.hang();
        });
        let e = engine(lanes(4, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let big = HostBuffer::zeroed(64 << 20).unwrap();
        let reading = HostBuffer::zeroed(100_000).unwrap();
        let read = start(&segment, Op::Read, &reading, BASE);
        eventually("a part of the READ", || reading.read(0, 1000) == memory(BASE, 1000));
        let write =
            segment.submit_owned(&row(Op::Write, &big, BASE, 1 << 20, 64), within(ms(8000)));
        let one = start(&segment, Op::Write, &big, BASE);
        let unresolved = e.segment(&control_only(silent)).unwrap();
        let waiting = start(&unresolved, Op::Write, &reading, BASE);
        eventually("a lane", || e.stats().lanes_opened >= 2);
        let ((), took) = timed(|| e.close());
        assert!(took < PROMPT, "{took:?}");
        for batch in [read, write.unwrap(), one, waiting] {
            assert_eq!(batch.poll(), BatchState::Failed);
            for (i, error) in batch.failures() {
                assert_eq!(error.code(), 23, "entry {i}: {error}");
            }
            assert_eq!(batch.failures().len(), batch.len());
        }
        reading.write(0, &[0x5a; 100_000]);
        go.open();
        says_closed(&e, &segment);
        assert!(reading.read(0, 100_000) == [0x5a; 100_000]);
    }
}

#[test]
fn closing_twice_and_from_many_threads_ends_once_for_all() {
    let e = engine(lanes(2, 2));
    let segment = e.segment(&control_only(silent)).unwrap();
    let local = HostBuffer::zeroed(16).unwrap();
    let batch = start(&segment, Op::Write, &local, BASE);
    let opening = {
        let e = e.clone();
        let name = control_only(silent);
        std::thread::spawn(move || e.open(&name).map(|_| ()))
    };
    let ((), took) = timed(|| {
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    e.close();
                    assert_eq!(batch.poll(), BatchState::Failed);
                });
            }
        });
        e.close();
    });
    assert!(took < PROMPT, "{took:?}");
    assert_eq!(batch.wait().unwrap_err().code(), 23);
    assert_eq!(opening.join().unwrap().unwrap_err().code(), 23);
    says_closed(&e, &segment);
}

#[test]
fn the_end_of_the_last_handle_ends_its_batches() {
    let fake = Fake::new(|mut link| link.hang());
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    let batch = start(&segment, Op::Write, &local, BASE);
    eventually("a lane", || e.stats().lanes_opened == 1);
    drop(e);
    assert_eq!(batch.poll(), BatchState::Running, "a segment is a handle too");
    let ((), took) = timed(|| drop(segment));
    assert!(took < PROMPT, "{took:?}");
    assert_eq!(batch.wait().unwrap_err().code(), 23);
}

/// What a task does when it is woken, on a thread of the engine.
struct Woken<F: FnOnce() + Send>(Mutex<Option<F>>);

impl<F: FnOnce() + Send> Wake for Woken<F> {
    fn wake(self: Arc<Self>) {
        let act = self.0.lock().unwrap().take();
        act.into_iter().for_each(|act| act());
    }
}

/// Polls the end of a batch once.
fn await_with(batch: &Batch, act: impl FnOnce() + Send + 'static) -> Completion {
    let waker = Waker::from(Arc::new(Woken(Mutex::new(Some(act)))));
    let mut end = batch.into_future();
    assert!(Pin::new(&mut end).poll(&mut Context::from_waker(&waker)).is_pending());
    end
}

#[test]
fn a_waker_that_panics_harms_neither_the_engine_nor_other_wakers() {
    let fake = Fake::new(|mut link| link.hang());
    let pair = Pair::with(4096, lanes(1, 1));
    let segment = pair.initiator.segment(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    let batch = start(&segment, Op::Write, &local, BASE);
    let (sender, woken) = std::sync::mpsc::channel();
    let bad = await_with(&batch, || panic!("on purpose"));
    let good = await_with(&batch, move || sender.send(()).unwrap());
    batch.cancel();
    woken.recv_timeout(Duration::from_secs(10)).unwrap();
    drop((bad, good));
    pair.start(Op::Write, &local, pair.remote.addr(), 1000).wait().unwrap();
}

#[test]
fn a_waker_may_have_the_last_handle_of_its_engine() {
    let fake = Fake::new(|mut link| link.hang());
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    let batch = start(&segment, Op::Write, &local, BASE);
    let port = e.control_port();
    let end = await_with(&batch, move || drop((segment, e)));
    batch.request_cancel();
    eventually("the engine has let go of its port", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_err()
    });
    assert_eq!(batch.poll(), BatchState::Cancelled);
    drop(end);
}

#[test]
fn batches_that_race_with_closing_are_final() {
    for _ in 0..30 {
        let pair = Pair::with(4096, lanes(2, 2));
        let local = HostBuffer::zeroed(4096).unwrap();
        std::thread::scope(|threads| {
            for _ in 0..3 {
                threads.spawn(|| {
                    let request = local.request(Op::Write, 0, pair.remote.addr(), 64).unwrap();
                    while let Ok(batch) = pair
                        .segment
                        .submit_owned(std::slice::from_ref(&request), within(ms(20_000)))
                    {
                        let result = batch.wait_timeout(ms(10_000)).expect("final");
                        assert!(result.is_ok() || result.unwrap_err().code() == 23);
                    }
                });
            }
            eventually("some go through", || pair.target.stats().served_writes > 20);
            pair.initiator.close();
        });
    }
}

#[test]
fn nothing_is_left_of_a_hundred_engines() {
    alone("life::a_hundred_engines");
}

#[test]
#[ignore = "run by `nothing_is_left_of_a_hundred_engines`, in a process of its own"]
fn a_hundred_engines() {
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let cycle = |i: usize| {
        let pair = Pair::with(1 << 20, lanes(3, 1 + i % 3));
        let local = HostBuffer::zeroed(1 << 20).unwrap();
        start(&pair.segment, Op::Write, &local, pair.remote.addr()).wait().unwrap();
        let nobody = pair.initiator.segment("127.0.0.1:1").unwrap();
        let running: Vec<Batch> = (0..20)
            .map(|i| {
                let segment = if i % 5 == 0 { &nobody } else { &pair.segment };
                start(segment, Op::Write, &local, pair.remote.addr())
            })
            .collect();
        if i.is_multiple_of(2) {
            pair.target.close();
        }
        pair.initiator.close();
        assert!(running.iter().all(|b| b.poll() != BatchState::Running));
    };
    cycle(0);
    // The threads are joined; the kernel takes them off the list a moment later.
    let (fds, threads) = (count("fd"), 2);
    eventually("quiet", || count("task") <= threads);
    for i in 0..100 {
        cycle(i);
    }
    eventually("no thread is left", || count("task") <= threads);
    assert_eq!(count("fd"), fds);
}

#[test]
fn unregister_ends_a_write_that_is_arriving() {
    let target = engine(Config::default());
    let memory = HostBuffer::zeroed(1 << 20).unwrap();
    target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let mut raw = Raw::connect(target.data_port());
    raw.send(&Raw::header(Op::Write, memory.addr(), 1 << 20));
    raw.send(&vec![1; 512 << 10]);
    eventually("half has arrived", || memory.read((512 << 10) - 1, 1) == [1]);
    let (result, took) = timed(|| target.unregister(memory.addr()));
    result.unwrap();
    assert!(took < PROMPT, "{took:?}");
    // The connection is closed, and what still comes goes nowhere.
    let _ = std::io::Write::write_all(&mut raw.stream, &vec![2; 512 << 10]);
    assert!(matches!(raw.answer(), Answer::Reset | Answer::End));
    assert!(memory.read(512 << 10, 512 << 10).iter().all(|b| *b == 0));
    // Who pauses within the patience of unregister is served to the end; a busy machine may make a pause longer.
    let served = (0..3).any(|_| {
        memory.write(0, &vec![0; 1 << 20]);
        target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
        let mut raw = Raw::connect(target.data_port());
        raw.send(&Raw::header(Op::Write, memory.addr(), 1 << 20));
        raw.send(&vec![3; 512 << 10]);
        eventually("half has arrived", || memory.read((512 << 10) - 1, 1) == [3]);
        std::thread::scope(|threads| {
            let unregister = threads.spawn(|| target.unregister(memory.addr()));
            eventually("it is not published any more", || {
                let mut other = Raw::connect(target.data_port());
                other.ask(memory.addr(), 1);
                other.answer() == Answer::Rejected
            });
            let _ = std::io::Write::write_all(&mut raw.stream, &vec![4; 512 << 10]);
            let answer = raw.answer();
            unregister.join().unwrap().unwrap();
            assert!(target.buffers().is_empty());
            answer == Answer::Applied
        })
    });
    assert!(served, "three times it was not waited for");
}

#[test]
fn unregister_ends_an_answer_that_nobody_takes() {
    let target = engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(64 << 20).unwrap();
    target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let mut raw = Raw::connect(target.data_port());
    raw.ask(memory.addr(), 64 << 20);
    assert_eq!(raw.answer(), Answer::Applied);
    let (result, took) = timed(|| target.unregister(memory.addr()));
    result.unwrap();
    assert!(took >= ms(400) && took < PROMPT, "{took:?}");
    memory.write(0, &vec![9; 64 << 20]);
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut raw.stream, &mut rest);
    assert!(rest.len() < 64 << 20);
    // What the socket had taken before is all that can come; nothing is read afterwards.
    assert!(rest.iter().all(|b| *b == 0));
}

#[test]
fn unregister_of_a_local_buffer_ends_its_batches() {
    for io_threads in [1, 3] {
        let fake = Fake::new(|mut link| link.hang());
        let e = engine(lanes(1, io_threads));
        let segment = e.open(&fake.name()).unwrap();
        let (mine, other) =
            (HostBuffer::zeroed(16 << 20).unwrap(), HostBuffer::zeroed(64).unwrap());
        e.register_buffer(&mine, &RegisterOptions::default()).unwrap();
        let slow =
            segment.submit_owned(&row(Op::Write, &mine, BASE, 1 << 20, 16), within(ms(8000)));
        let slow = slow.unwrap();
        let bystander = start(&segment, Op::Write, &other, BASE);
        eventually("a lane", || e.stats().lanes_opened >= 1);
        let (result, took) = timed(|| e.unregister(mine.addr()));
        result.unwrap();
        assert!(took < PROMPT, "{took:?}");
        // Its memory is let go a moment before it says so.
        assert_eq!(slow.wait_timeout(PROMPT).unwrap().unwrap_err().code(), 15);
        assert_eq!((slow.poll(), slow.failures().len()), (BatchState::Failed, 16));
        for (_, error) in slow.failures() {
            assert_eq!(error.code(), 15, "{error}");
            assert!(error.to_string().contains("unregister after the transfer's end"), "{error}");
        }
        assert_eq!(bystander.poll(), BatchState::Running);
        bystander.cancel();
    }
}

#[test]
fn a_notification_that_is_on_its_way_holds_no_buffer() {
    let fake = Fake::new(|mut link| link.serve());
    fake.on_notify(OnNotify::Silence);
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = buffer(&pattern(100, 1));
    // Less than it waits for those who do hold it.
    promptly(ms(400), "unregister", || {
        e.register_buffer(&local, &RegisterOptions::default()).unwrap();
        let options = within(ms(8000)).with_notification(Notification::new("n", "m"));
        let request = local.request(Op::Write, 0, BASE, 100).unwrap();
        let seen = fake.seen().len();
        let batch = segment.submit_owned(&[request], options).unwrap();
        eventually("its bytes have left", || fake.seen().len() > seen);
        let (result, took) = timed(|| e.unregister(local.addr()));
        result.unwrap();
        assert_eq!(batch.poll(), BatchState::Running);
        batch.cancel();
        took
    });
}

#[test]
fn many_buffers_that_peers_hold_are_waited_for_together() {
    let target = engine(lanes(1, 1));
    let stuck: Vec<(HostBuffer, Raw)> = (0..8)
        .map(|_| {
            let memory = HostBuffer::zeroed(4096).unwrap();
            target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
            let mut raw = Raw::connect(target.data_port());
            raw.send(&Raw::header(Op::Write, memory.addr(), 4096));
            raw.send(&[1; 100]);
            eventually("a part has arrived", || memory.read(99, 1) == [1]);
            (memory, raw)
        })
        .collect();
    let addrs: Vec<u64> = stuck.iter().map(|(memory, _)| memory.addr()).collect();
    let (result, took) = timed(|| target.unregister_all(&addrs));
    result.unwrap();
    assert!(took < PROMPT, "{took:?}");
    assert!(target.buffers().is_empty());
}
