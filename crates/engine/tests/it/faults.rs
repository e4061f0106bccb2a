//! What an initiator makes of refusals, of lost connections and of peers that break the protocol.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use tensorferry::{
    Access, BatchState, Config, Error, HostBuffer, Notification, Op, OwnedRequest, RegisterOptions,
    SubmitOptions, Version,
};
use tensorferry_wire::Status;

use crate::common::{
    PROMPT, Pair, buffer, engine, eventually, lanes, ms, pattern, promptly, row, says, start,
    start_within, timed, within,
};
use crate::fake::{
    BASE, Fake, Full, Gate, LEN, Link, OnNotify, control_only, control_request, done, memory,
};

fn refused_or_unpublished(error: &Error) -> bool {
    matches!(error, Error::Refused(_) | Error::RangeNotPublished(_))
}

#[test]
fn a_buffer_that_went_away_fails_its_entry_alone_and_poisons_nothing() {
    let pair = Pair::new(1 << 20);
    let gone = HostBuffer::zeroed(4096).unwrap();
    for round in 0..20 {
        pair.target.register_buffer(&gone, &RegisterOptions::default()).unwrap();
        assert_eq!(pair.segment.buffers().unwrap().len(), 2);
        pair.target.unregister(gone.addr()).unwrap();
        let bytes = pattern(1000 * 1024, round);
        let local = buffer(&bytes);
        let mut requests = row(Op::Write, &local, pair.remote.addr(), 1024, 1000);
        requests[577] = local.request(Op::Write, 577 * 1024, gone.addr(), 1024).unwrap();
        let batch = pair.segment.submit_owned(&requests, within(ms(5000))).unwrap();
        assert!(refused_or_unpublished(&batch.wait().unwrap_err()));
        let failures = batch.failures();
        assert_eq!(failures.len(), 1, "{failures:?}");
        assert_eq!(failures[0].0, 577);
        let range = format!("WRITE of 1024 bytes to {:#x} at {}", gone.addr(), pair.target.name());
        says(&failures[0].1, &[&range, "regist"]);
        assert!(gone.read(0, 4096).iter().all(|b| *b == 0), "nothing is written there");
        let but_one = |bytes: &[u8]| [&bytes[..577 * 1024], &bytes[578 * 1024..]].concat();
        assert!(but_one(&pair.remote.read(0, bytes.len())) == but_one(&bytes));
        // What is valid is not held back by what was not.
        let next = buffer(&pattern(16, round));
        promptly(ms(500), "what is valid", || {
            let (result, took) =
                timed(|| start(&pair.segment, Op::Write, &next, pair.remote.addr()).wait());
            result.unwrap();
            took
        });
        local.write(577 * 1024, &[0; 1024]);
    }
}

#[test]
fn many_refusals_on_many_lanes_fail_their_entries_and_no_other() {
    // Published, so the initiator cannot know: only the peer can refuse.
    for (count, every) in [(600, 2), (1000, 333), (300, 1)] {
        let pair = Pair::with(1 << 20, lanes(3, 2));
        let read_only = HostBuffer::zeroed(1 << 20).unwrap();
        let options = RegisterOptions::default().with_access(Access::ReadOnly);
        pair.target.register_buffer(&read_only, &options).unwrap();
        let bytes = pattern(count * 64, 3);
        let local = buffer(&bytes);
        let mut requests = row(Op::Write, &local, pair.remote.addr(), 64, count);
        for i in (0..count).step_by(every) {
            requests[i] = local.request(Op::Write, i * 64, read_only.addr(), 64).unwrap();
        }
        let batch = pair.segment.submit_owned(&requests, within(ms(8000))).unwrap();
        batch.wait().unwrap_err();
        for i in 0..count {
            let result = batch.entry(i).unwrap();
            if i % every == 0 {
                assert_eq!(result.unwrap_err().code(), 8, "entry {i}");
            } else {
                result.unwrap_or_else(|e| panic!("entry {i} of {count}: {e}"));
                assert!(pair.remote.read(i * 64, 64) == bytes[i * 64..][..64]);
            }
        }
        assert!(read_only.read(0, 1 << 20).iter().all(|b| *b == 0));
    }
}

#[test]
fn a_range_that_was_never_registered_is_refused_here() {
    let pair = Pair::new(4096);
    let local = HostBuffer::zeroed(4096).unwrap();
    let end = pair.remote.addr() + 4096;
    for remote in [0x10, end, end - 4095, pair.remote.addr() - 1] {
        let error = start(&pair.segment, Op::Write, &local, remote).wait().unwrap_err();
        assert_eq!(error.code(), 9, "{error}");
        let range = format!("WRITE of 4096 bytes to {remote:#x} at {}", pair.target.name());
        says(&error, &[&range, "in no buffer that the peer has registered; register it there"]);
        assert!(!error.is_retryable());
    }
    assert_eq!(pair.target.stats().served_refusals, 0, "nothing was sent");
}

#[test]
fn a_buffer_registered_after_the_peer_was_opened_is_found_by_asking_once() {
    let pair = Pair::new(4096);
    let late = buffer(&pattern(4096, 1));
    pair.target.register_buffer(&late, &RegisterOptions::default()).unwrap();
    let local = HostBuffer::zeroed(4096).unwrap();
    for _ in 0..3 {
        start(&pair.segment, Op::Read, &local, late.addr()).wait().unwrap();
    }
    assert!(local.read(0, 4096) == late.read(0, 4096));
    assert_eq!(pair.initiator.stats().descriptors_fetched, 2);
}

/// The peer does `behave` with its first connection and serves well on all others.
fn first(behave: impl Fn(&mut Link) + Send + Sync + 'static) -> Fake {
    Fake::new(move |mut link| if link.number == 0 { behave(&mut link) } else { link.serve() })
}

#[test]
fn a_peer_that_breaks_the_protocol_fails_the_request_and_says_how() {
    type Behaviour = fn(&mut Link);
    let cases: [(Behaviour, Op, &str); 5] = [
        (|l| done((l.header(), l.send(b"HTTP/1.1 400 Bad"))), Op::Write, "lack its magic"),
        (|l| done((l.header(), l.send(b"HTTP/1.1 400 Bad"))), Op::Read, "lack its magic"),
        (|l| done((l.header(), l.send(b"\x02\0\0\0VTCM"))), Op::Write, "status code 2 arrived"),
        (|l| done((l.header(), l.send(b"\xff\xff\xff\xffVTCM"))), Op::Read, "status code 4294967"),
        (|l| done((l.header(), l.send(&[0; 8]))), Op::Read, "lack its magic"),
    ];
    for (behave, op, words) in cases {
        let fake = first(move |link| {
            behave(link);
            link.hang();
        });
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(4096).unwrap();
        let (result, took) = timed(|| start(&segment, op, &local, BASE + 5).wait());
        let error = result.unwrap_err();
        assert_eq!(error.code(), 16, "{error}");
        let subject =
            if op == Op::Read { "READ of 4096 bytes from" } else { "WRITE of 4096 bytes to" };
        says(&error, &[subject, &fake.name(), "127.0.0.1:", "broke the protocol", words]);
        assert!(took < PROMPT, "{took:?}");
        start(&segment, op, &local, BASE).wait().unwrap();
        assert_eq!(fake.connections(), 2);
    }
}

#[test]
fn an_acknowledgement_of_what_has_not_left_is_not_believed() {
    let fake = first(|link| {
        link.header();
        for _ in 0..64 {
            link.status(Status::Applied);
        }
        link.hang();
    });
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(64 << 20).unwrap();
    let error = start(&segment, Op::Write, &local, BASE).wait().unwrap_err();
    assert_eq!(error.code(), 16, "{error}");
    says(
        &error,
        &["WRITE of 67108864 bytes", "acknowledged before all of its payload had been sent"],
    );
}

#[test]
fn bytes_that_nobody_asked_for_cost_the_lane_and_nothing_else() {
    let ready = Gate::default();
    let sent = ready.clone();
    let fake = first(move |link| {
        let header = link.header().unwrap();
        link.answer(&header);
        link.send(b"surprise");
        sent.open();
        link.hang();
    });
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    start(&segment, Op::Read, &local, BASE).wait().unwrap();
    assert!(local.read(0, 100) == memory(BASE, 100));
    ready.wait();
    // The lane is seen to be bad when the bytes are, which may be with the next request.
    let next = start(&segment, Op::Read, &local, BASE + 7).wait();
    if let Err(error) = next {
        assert_eq!(error.code(), 16, "{error}");
    }
    start(&segment, Op::Read, &local, BASE + 9).wait().unwrap();
    assert!(local.read(0, 100) == memory(BASE + 9, 100));
}

#[test]
fn a_read_is_tried_again_on_a_new_lane_whenever_its_lane_is_lost() {
    type Behaviour = fn(&mut Link);
    let ends: [Behaviour; 4] = [
        |_| {},
        |l| done(l.header()),
        |l| done((l.header(), l.send(&Status::Applied.encode()[..3]))),
        |l| done((l.header(), l.status(Status::Applied), l.send(&[0xee; 70_000]))),
    ];
    for (i, behave) in ends.into_iter().enumerate() {
        for reset in [false, true] {
            let fake = Fake::new(move |mut link| {
                if link.number > 0 {
                    return link.serve();
                }
                behave(&mut link);
                if reset {
                    link.reset();
                }
            });
            let e = engine(lanes(1, 1));
            let segment = e.open(&fake.name()).unwrap();
            let local = HostBuffer::zeroed(100_000).unwrap();
            let result = start(&segment, Op::Read, &local, BASE).wait();
            result.unwrap_or_else(|e| panic!("case {i}, reset {reset}: {e}"));
            assert!(local.read(0, 100_000) == memory(BASE, 100_000));
            assert_eq!(fake.connections(), 2);
            // A lane that ends before anything was given to it costs no try.
            assert!(e.stats().retries <= 1 && (e.stats().retries == 1 || i == 0));
        }
    }
}

#[test]
fn a_read_that_is_lost_again_and_again_fails() {
    let fake = Fake::new(|mut link| done((link.header(), link.status(Status::Applied))));
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    let (result, took) = timed(|| start(&segment, Op::Read, &local, BASE).wait());
    let error = result.unwrap_err();
    assert_eq!(error.code(), 10, "{error}");
    assert!(error.is_retryable());
    let words = [
        "READ of 1000 bytes from 0x500000000000",
        &fake.name(),
        "closed the connection",
        "try again",
    ];
    says(&error, &words);
    assert!(took < PROMPT, "{took:?}");
}

#[test]
fn a_write_that_had_left_is_unknown_and_is_not_sent_twice() {
    type Behaviour = fn(&mut Link);
    let ends: [Behaviour; 3] = [
        |l| done(l.header()),
        |l| done((l.header(), l.swallow(500))),
        |l| done((l.header(), l.swallow(1000), l.send(&Status::Applied.encode()[..7]))),
    ];
    for behave in ends {
        for reset in [false, true] {
            let fake = Fake::new(move |mut link| {
                behave(&mut link);
                if reset {
                    link.reset();
                }
            });
            let e = engine(lanes(2, 1));
            let segment = e.open(&fake.name()).unwrap();
            let local = HostBuffer::zeroed(1000).unwrap();
            let error = start(&segment, Op::Write, &local, BASE).wait().unwrap_err();
            assert_eq!(error.code(), 11, "{error}");
            let words = [
                "WRITE of 1000 bytes to 0x500000000000 at",
                &fake.name(),
                "no answer came",
                "unknown",
                "write it again",
            ];
            says(&error, &words);
            assert_eq!((fake.connections(), fake.seen().len()), (1, 1), "sent once");
            assert_eq!(e.stats().retries, 0);
        }
    }
}

#[test]
fn writes_of_which_nothing_had_left_move_to_another_lane() {
    let full = Gate::default();
    let go = full.clone();
    let fake = Fake::new(move |mut link| {
        if link.number > 0 {
            return link.serve();
        }
        link.header();
        go.wait();
        link.reset();
    });
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(32 << 20).unwrap();
    let batch = segment.submit_owned(&row(Op::Write, &local, BASE, 1 << 20, 32), within(ms(8000)));
    eventually("a header arrives", || !fake.seen().is_empty());
    full.open();
    let batch = batch.unwrap();
    batch.wait().unwrap_err();
    let (mut unknown, mut done) = (0, 0);
    for i in 0..32 {
        match batch.entry(i).unwrap() {
            Ok(()) => done += 1,
            Err(e) => {
                assert_eq!(e.code(), 11, "{e}");
                unknown += 1;
            }
        }
    }
    assert!(unknown > 0 && done >= 32 - 9, "{unknown} unknown, {done} done");
    for i in 0..32 {
        let addr = BASE + (i << 20);
        let times = fake.seen().iter().filter(|h| h.addr == addr).count();
        assert!(times <= 1, "{addr:#x} was sent {times} times");
    }
}

/// A port that refuses connections: it is bound, so that nobody else is given it, and nobody listens there.
pub(crate) fn dead_port() -> u16 {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
    let port = socket.local_addr().unwrap().as_socket().unwrap().port();
    std::mem::forget(socket);
    port
}

#[test]
fn a_peer_that_came_back_on_another_data_port_is_found_within_the_request() {
    let fake = Fake::new(|mut link| {
        let header = link.header().unwrap();
        link.answer(&header);
    });
    let e = engine(lanes(2, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000).unwrap();
    start(&segment, Op::Write, &local, BASE).wait().unwrap();
    // What is sent to a peer that is about to hang up may have arrived, for all that is known here.
    eventually("it has hung up", || fake.hung_up() == 1);
    // Its port is gone, the control port says the new one.
    fake.publish(|d| d.tcp_data_port = dead_port());
    assert_eq!(segment.buffers().unwrap().len(), 1);
    fake.move_data_port(|mut link| link.serve());
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    result.unwrap();
    assert!(took < PROMPT, "{took:?}");
    // Its descriptor decides where requests may go that have not been sent.
    fake.publish(|d| d.tcp_data_port = dead_port());
    segment.buffers().unwrap();
    fake.move_data_port(|mut link| link.serve());
    fake.publish(|d| d.buffers[0].len = 4096);
    let far = start(&segment, Op::Write, &local, BASE + 8192).wait();
    if let Err(error) = far {
        assert_eq!(error.code(), 9, "{error}");
    }
}

#[test]
fn a_peer_that_is_not_there_is_an_error_at_once() {
    let e = engine(Config::default());
    let name = format!("127.0.0.1:{}", dead_port());
    let segment = e.segment(&name).unwrap();
    let local = HostBuffer::zeroed(16).unwrap();
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    let error = result.unwrap_err();
    assert_eq!(error.code(), 7, "{error}");
    assert!(error.is_retryable() && took < PROMPT, "{took:?}");
    says(&error, &[&name, "connecting to its control port", "is it running"]);
    assert_eq!(e.open(&name).unwrap_err().code(), 7);
    assert_eq!(e.probe(&name).unwrap_err().code(), 7);
    // The control port answers and the data port does not.
    let fake = Fake::new(|_| {});
    fake.publish(|d| d.tcp_data_port = dead_port());
    let segment = e.open(&fake.name()).unwrap();
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    let error = result.unwrap_err();
    assert_eq!(error.code(), 7, "{error}");
    says(&error, &[&fake.name(), "connecting to its data port at 127.0.0.1:", "is it running"]);
    assert!(took < PROMPT, "{took:?}");
    assert_eq!(fake.asked(), 2, "asked anew once");
}

#[test]
fn names_that_mean_nothing_are_errors_that_quote_them() {
    let e = engine(Config::default());
    for name in ["", "host:99999", "host:abc", "[::1", "a b:1"] {
        let (result, took) = timed(|| e.segment(name).map(|_| ()));
        let error = result.unwrap_err();
        assert_eq!(error.code(), 2, "{name}: {error}");
        assert!(took < PROMPT, "{took:?}");
    }
}

#[test]
fn a_control_port_that_talks_nonsense_is_an_error_and_the_engine_goes_on() {
    let good = Pair::new(16);
    let local = HostBuffer::zeroed(16).unwrap();
    let head = |d: &str| format!("{{\"protocol\":\"tcp\",\"tcp_data_port\":{d}");
    let bomb = "[".repeat(1 << 20);
    let nested = format!("{{\"x\":{}{}}}", "[".repeat(5000), "]".repeat(5000));
    let bodies: Vec<Vec<u8>> = vec![
        b"[]".to_vec(),
        b"null".to_vec(),
        b"1".to_vec(),
        b"\"s\"".to_vec(),
        b"{}".to_vec(),
        b"{".to_vec(),
        b"\xff\xfe".to_vec(),
        head("\"5\"}").into(),
        head("70000}").into(),
        head("0}").into(),
        head("[5]}").into(),
        head("5,\"buffers\":{}}").into(),
        head("5,\"buffers\":[1]}").into(),
        head("5,\"buffers\":[{\"addr\":\"1\",\"length\":1,\"name\":\"n\"}]}").into(),
        head("5,\"buffers\":[{\"addr\":18446744073709551615,\"length\":2,\"name\":\"n\"}]}").into(),
        head("5,\"name\":{}}").into(),
        head("5,\"tensorferry\":[]}").into(),
        b"{\"protocol\":[\"tcp\"]}".to_vec(),
        b"{\"protocol\":\"rdma\",\"tcp_data_port\":5}".to_vec(),
        bomb.into(),
        nested.into(),
        Vec::new(),
    ];
    let frame = |body: &[u8]| {
        let mut bytes = (body.len() as u64 + 1).to_le_bytes().to_vec();
        bytes.push(1);
        bytes.extend_from_slice(body);
        bytes
    };
    let mut answers: Vec<Vec<u8>> = bodies.iter().map(|b| frame(b)).collect();
    answers.push(u64::MAX.to_le_bytes().to_vec());
    answers.push(0_u64.to_le_bytes().to_vec());
    answers.push([&4_u64.to_le_bytes()[..], b"\x80abc"].concat());
    answers.push(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    answers.push(Vec::new());
    for answer in answers {
        let shown = String::from_utf8_lossy(&answer[..answer.len().min(80)]).into_owned();
        let name = control_only(move |mut stream| {
            control_request(&mut stream);
            let _ = std::io::Write::write_all(&mut stream, &answer);
        });
        let (result, took) = timed(|| good.initiator.open(&name).map(|_| ()));
        let error = result.unwrap_err();
        assert!([7, 17].contains(&error.code()), "{shown}: {error}");
        says(&error, &[&name]);
        assert!(took < ms(2000), "{shown}: {took:?}");
        let segment = good.initiator.segment(&name).unwrap();
        let batch = start(&segment, Op::Write, &local, BASE).wait();
        assert!([7, 17].contains(&batch.unwrap_err().code()));
        start(&good.segment, Op::Write, &local, good.remote.addr()).wait().unwrap();
    }
}

#[test]
fn a_notification_that_does_not_arrive_is_an_error_though_all_bytes_did() {
    let arrived = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&arrived);
    let fake = Fake::new(move |mut link| {
        while let Some(header) = link.header() {
            if !link.answer(&header) {
                return;
            }
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    fake.on_notify(OnNotify::HangUp);
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let notification = Notification::new("n", "m");
    let options = within(ms(3000)).with_notification(notification.clone());
    for requests in [vec![local.request(Op::Write, 0, BASE, 100).unwrap()], Vec::new()] {
        let batch = segment.submit_owned(&requests, options.clone()).unwrap();
        let error = batch.wait().unwrap_err();
        assert_eq!((error.code(), batch.poll()), (18, BatchState::Failed), "{error}");
        let words = [
            "all bytes are applied at",
            &fake.name(),
            "not delivered",
            "without an answer",
            "Segment::notify",
        ];
        says(&error, &words);
        assert!(batch.failures().is_empty());
    }
    assert_eq!(segment.notify(&notification).unwrap_err().code(), 18);
    assert_eq!(arrived.load(Ordering::SeqCst), 1);
    let stats = e.stats();
    assert_eq!((stats.batches_completed, stats.batches_failed), (0, 2));
    // One that is too large is refused before anything is done.
    let message = "x".repeat(1 << 20);
    let options = SubmitOptions::default().with_notification(Notification::new("n", message));
    let request = local.request(Op::Write, 0, BASE, 100).unwrap();
    let error = segment.submit_owned(&[request], options).unwrap_err();
    assert_eq!(error.code(), 19, "{error}");
    says(&error, &["1048576", "send less"]);
    assert_eq!(arrived.load(Ordering::SeqCst), 1);
}

#[test]
fn empty_batches_and_entries_are_complete_and_notify() {
    let pair = Pair::new(16);
    let local = HostBuffer::zeroed(16).unwrap();
    let nothing = |remote| local.request(Op::Write, 3, remote, 0).unwrap();
    let note = |i: usize| Notification { name: String::new(), message: i.to_string() };
    let batches: [Vec<OwnedRequest>; 3] =
        [vec![], vec![nothing(0)], vec![nothing(1), nothing(u64::MAX)]];
    for (i, requests) in batches.iter().enumerate() {
        pair.segment.submit_owned(requests, SubmitOptions::default()).unwrap().wait().unwrap();
        let options = SubmitOptions::default().with_notification(note(i));
        pair.segment.submit_owned(requests, options).unwrap().wait().unwrap();
        assert_eq!(pair.target.take_notifications(), [note(i)]);
    }
    assert_eq!(pair.target.stats().connections_accepted, 0);
    let mixed =
        [nothing(0), local.request(Op::Write, 0, pair.remote.addr(), 16).unwrap(), nothing(9)];
    let batch = pair.segment.submit_owned(&mixed, SubmitOptions::default()).unwrap();
    batch.wait().unwrap();
    assert!((0..3).all(|i| batch.entry(i).unwrap().is_ok()));
    // To a peer that is not even there.
    let nobody = pair.initiator.segment(&format!("127.0.0.1:{}", dead_port())).unwrap();
    nobody.submit_owned(&[nothing(5)], SubmitOptions::default()).unwrap().wait().unwrap();
}

#[test]
fn v1_requests_go_alone_each_on_its_own_connection() {
    let answered = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&answered);
    let fake = Fake::new(move |mut link| {
        let mut count = 0;
        while let Some(header) = link.header() {
            count += 1;
            match header.op {
                Op::Read => done(link.send(&memory(header.addr, header.len))),
                Op::Write => done(link.swallow(header.len)),
            }
        }
        log.lock().unwrap().push(count);
    });
    fake.publish(|d| d.tcp_proto_version = 1);
    let e = engine(lanes(4, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(64 * 1000).unwrap();
    for op in [Op::Write, Op::Read] {
        let batch = segment.submit_owned(&row(op, &local, BASE, 1000, 64), within(ms(5000)));
        batch.unwrap().wait().unwrap();
    }
    assert!(local.read(0, 64_000) == memory(BASE, 64_000));
    eventually("128 connections end", || answered.lock().unwrap().len() == 128);
    assert!(answered.lock().unwrap().iter().all(|n| *n == 1));
    assert!(fake.seen().iter().all(|h| h.version == Version::V1));
}

#[test]
fn a_refused_v1_write_is_a_failure_here_and_touches_nothing_there() {
    for read_only in [0, 8 << 20] {
        let mut config = lanes(4, 1);
        config.newest_version = Version::V1;
        let pair = Pair::with(64, config);
        let memory = HostBuffer::zeroed(8 << 20).unwrap();
        let options = RegisterOptions::default().with_access(Access::ReadOnly);
        pair.target.register_buffer(&memory, &options).unwrap();
        let local = buffer(&pattern(read_only.max(100), 1));
        for _ in 0..20 {
            let error = start(&pair.segment, Op::Write, &local, memory.addr()).wait().unwrap_err();
            assert!([8, 10, 11].contains(&error.code()), "{error}");
        }
        assert!(memory.read(0, 8 << 20).iter().all(|b| *b == 0));
        let small = HostBuffer::zeroed(64).unwrap();
        start(&pair.segment, Op::Write, &small, pair.remote.addr()).wait().unwrap();
    }
}

#[test]
fn a_v1_write_to_a_peer_that_dies_in_its_body_is_not_complete() {
    let fake = Fake::new(|mut link| {
        link.header();
        link.swallow(10_000);
        // Closing with bytes unread is what the kernel does for a process that is killed.
    });
    fake.publish(|d| d.tcp_proto_version = 1);
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    for len in [100_000, 8 << 20] {
        let local = HostBuffer::zeroed(len).unwrap();
        let error = start(&segment, Op::Write, &local, BASE).wait().unwrap_err();
        assert_eq!(error.code(), 11, "{error}");
    }
    assert_eq!(fake.seen().len(), 2, "neither was sent twice");
}

#[test]
fn a_range_outside_a_list_that_was_cut_is_sent_alone() {
    let others = Arc::new(AtomicUsize::new(0));
    let (log, beyond) = (Arc::clone(&others), BASE + (1 << 30));
    let fake = Fake::new(move |mut link| {
        link.stream.set_nonblocking(false).unwrap();
        while let Some(header) = link.header() {
            if header.addr >= beyond {
                link.swallow(header.len);
                // Whatever was sent behind it is here already.
                link.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                log.fetch_add(usize::from(link.stream.peek(&mut [0]).is_ok()), Ordering::SeqCst);
                link.stream.set_read_timeout(None).unwrap();
                let status = if header.addr % 2 == 0 { Status::Applied } else { Status::Rejected };
                link.status(status);
                if status == Status::Rejected {
                    return;
                }
            } else if !link.answer(&header) {
                return;
            }
        }
    });
    fake.truncate();
    let e = engine(lanes(2, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(1000 * 64).unwrap();
    let mut requests = row(Op::Write, &local, BASE, 64, 1000);
    for (i, at) in [(0, 0), (300, 64), (301, 129), (999, 4096)] {
        requests[i] = local.request(Op::Write, i * 64, beyond + at, 64).unwrap();
    }
    let batch = segment.submit_owned(&requests, within(ms(5000))).unwrap();
    batch.wait().unwrap_err();
    let failures = batch.failures();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert_eq!((failures[0].0, failures[0].1.code()), (301, 8));
    assert_eq!(others.load(Ordering::SeqCst), 0, "nothing is behind them");
    assert!(BASE + LEN > beyond);
}

#[test]
fn a_range_that_is_asked_about_holds_nothing_else_up() {
    let silent = Arc::new(AtomicBool::new(false));
    let fake = Fake::new(|mut link| link.serve());
    let hush = Arc::clone(&silent);
    fake.hush(move || hush.load(Ordering::SeqCst));
    let e = engine(lanes(2, 1));
    let segment = e.open(&fake.name()).unwrap();
    silent.store(true, Ordering::SeqCst);
    let local = HostBuffer::zeroed(100).unwrap();
    let outside = start_within(&segment, Op::Write, &local, 16, ms(60_000));
    for _ in 0..20 {
        let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
        result.unwrap();
        assert!(took < PROMPT, "{took:?}");
    }
    let late = start_within(&segment, Op::Write, &local, 16, ms(200)).wait().unwrap_err();
    assert_eq!(late.code(), 13, "{late}");
    says(&late, &["control port had not answered with its descriptor"]);
    assert_eq!(outside.poll(), BatchState::Running);
    let ((), took) = timed(|| outside.cancel());
    assert!(took < PROMPT, "{took:?}");
    assert_eq!(outside.wait().unwrap_err().code(), 14);
}

#[test]
fn a_data_port_that_does_not_answer_is_given_up_after_the_time_that_is_set() {
    let full = Full::new();
    let fake = Fake::new(|_| {});
    fake.publish(|d| d.tcp_data_port = full.port);
    let mut config = lanes(2, 1);
    config.connect_timeout = ms(150);
    let e = engine(config);
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    let error = result.unwrap_err();
    assert_eq!(error.code(), 7, "{error}");
    says(&error, &[&fake.name(), "no answer in 150ms (TENSORFERRY_CONNECT_TIMEOUT)"]);
    assert!(took >= ms(150) && took < PROMPT, "{took:?}");
}
