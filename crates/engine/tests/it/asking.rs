//! Control ports that do not answer at once: they are asked again, and what comes of it counts.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorferry::{Error, HostBuffer, Notification, Op};

use crate::common::{engine, eventually, lanes, ms, says, start, start_within, timed};
use crate::fake::{BASE, Fake, Gate, control_only, control_request};

/// Passes what a connection asks on to the control port at `name`, and the answer back.
fn answer_for(name: &str, mut stream: TcpStream) {
    let mut there = TcpStream::connect(name).unwrap();
    let mut back = there.try_clone().unwrap();
    let mut from = stream.try_clone().unwrap();
    std::thread::spawn(move || std::io::copy(&mut from, &mut there));
    let _ = std::io::copy(&mut back, &mut stream);
}

/// The name of a peer whose control port gives its connections, which are counted, to `behave` and, where that says so, to
/// a peer that serves well.
fn behind(
    good: &Fake,
    behave: impl Fn(usize, &mut TcpStream) -> bool + Send + Sync + 'static,
) -> (String, Arc<AtomicUsize>) {
    let (name, count) = (good.name(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&count);
    let peer = control_only(move |mut stream| {
        if behave(counted.fetch_add(1, Ordering::SeqCst), &mut stream) {
            answer_for(&name, stream);
        }
    });
    (peer, count)
}

/// Reads until the other end closes, and says nothing.
fn say_nothing(stream: &mut TcpStream) -> bool {
    let _ = std::io::copy(stream, &mut std::io::sink());
    false
}

#[test]
fn a_control_port_that_is_back_is_met_by_who_comes_then_and_by_who_waited() {
    let good = Fake::new(|mut link| link.serve());
    let back = Gate::default();
    let is_back = back.clone();
    let (peer, asked) = behind(&good, move |_, stream| is_back.is_open() || say_nothing(stream));
    let e = engine(lanes(1, 1));
    let segment = e.segment(&peer).unwrap();
    let local = HostBuffer::zeroed(100).unwrap();
    let early = start_within(&segment, Op::Write, &local, BASE, ms(300));
    let patient = start_within(&segment, Op::Write, &local, BASE, ms(60_000));
    assert_eq!(early.wait().unwrap_err().code(), 13);
    eventually("it is asked again", || asked.load(Ordering::SeqCst) >= 3);
    back.open();
    // The answer to the first time of asking is waited for ten seconds long.
    let (result, took) = timed(|| start(&segment, Op::Write, &local, BASE).wait());
    result.unwrap();
    assert!(took < ms(3000), "{took:?}");
    patient.wait().unwrap();
}

#[test]
fn a_peer_that_answers_late_is_heard_over_its_first_connection() {
    let good = Fake::new(|mut link| link.serve());
    let slow = Gate::default();
    let go = slow.clone();
    let (peer, asked) = behind(&good, move |number, stream| {
        if number > 0 {
            return say_nothing(stream);
        }
        go.wait();
        true
    });
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(100).unwrap();
    let segment = e.segment(&peer).unwrap();
    let batch = start_within(&segment, Op::Write, &local, BASE, ms(60_000));
    eventually("it is asked again and again", || asked.load(Ordering::SeqCst) >= 3);
    slow.open();
    batch.wait().unwrap();
    assert_eq!(e.stats().descriptors_fetched, 1);
}

#[test]
fn a_connection_that_ends_without_an_answer_fails_nothing_while_another_is_open() {
    let good = Fake::new(|mut link| link.serve());
    let second = Gate::default();
    let (peer, _) = behind(&good, move |number, stream| match number {
        // It ends when the second is there.
        0 => {
            let _ = control_request(stream);
            second.wait();
            false
        }
        1 => {
            let _ = control_request(stream);
            second.open();
            say_nothing(stream)
        }
        _ => true,
    });
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(100).unwrap();
    let segment = e.segment(&peer).unwrap();
    start_within(&segment, Op::Write, &local, BASE, ms(60_000)).wait().unwrap();
}

#[test]
fn a_peer_that_is_gone_when_it_is_asked_again_is_unreachable_at_once() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let e = engine(lanes(1, 1));
    let local = HostBuffer::zeroed(100).unwrap();
    let segment = e.segment(&name).unwrap();
    let batch = start_within(&segment, Op::Write, &local, BASE, ms(60_000));
    let (first, _) = listener.accept().unwrap();
    drop(listener);
    let (result, took) = timed(|| batch.wait());
    let error = result.unwrap_err();
    assert!(matches!(error, Error::PeerUnreachable { .. }), "{error}");
    says(&error, &[&name, "connecting to its control port", "refused"]);
    assert!(took < ms(5000), "{took:?}");
    drop(first);
}

#[test]
fn a_notification_is_sent_once_however_late_its_answer_is() {
    let good = Fake::new(|mut link| link.serve());
    let answer = Gate::default();
    let go = answer.clone();
    let (peer, asked) = behind(&good, move |_, stream| {
        let frame = control_request(stream).unwrap();
        go.wait();
        let body = br#"{"name":"","notify_msg":"success"}"#;
        let kind = frame.kind;
        stream.write_all(&tensorferry_wire::encode_frame(kind, body)).unwrap();
        false
    });
    let e = engine(lanes(1, 1));
    let segment = e.segment(&peer).unwrap();
    std::thread::scope(|threads| {
        let note = Notification::new("n", "m");
        let sent = threads.spawn(move || segment.notify(&note));
        std::thread::park_timeout(ms(1300));
        assert_eq!(asked.load(Ordering::SeqCst), 1);
        answer.open();
        sent.join().unwrap().unwrap();
    });
}
