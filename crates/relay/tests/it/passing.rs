//! A relay without a rule is not noticed.

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use socket2::SockRef;
use tensorferry_relay::Relay;
use tensorferry_wire::{MessageType, Notification, is_notify_success};

use crate::kit::{Over, Stand, ask, bytes, eventually, ms, read_all, read_exactly, read_for};

#[test]
fn the_descriptor_leads_to_the_relay() {
    let stand = Stand::with_copies(3);
    for (copy, address) in stand.relay.addresses().iter().enumerate() {
        let descriptor = stand.ask(copy);
        assert_eq!(descriptor.name, stand.relay.name(copy));
        assert_eq!(descriptor.tcp_data_host.as_deref(), Some("127.0.0.1"));
        assert_eq!(descriptor.tcp_data_port, address.data.port());
        assert_eq!(descriptor.buffers.len(), 1);
    }
}

#[test]
fn notifications_pass() {
    let stand = Stand::new();
    let body = Notification { name: "n".into(), message: "m".into() }.to_json();
    let answer = ask(stand.relay.addresses()[0].control, MessageType::Notify, &body).unwrap();
    assert!(is_notify_success(&answer.body));
}

#[test]
fn bytes_pass_both_ways_at_once() {
    let stand = Stand::new();
    let (initiator, target) = stand.connect();
    let (there, back) = (bytes(20 << 20), bytes((9 << 20) + 7));
    std::thread::scope(|scope| {
        for (stream, what) in [(&initiator, &there), (&target, &back)] {
            scope.spawn(move || {
                let mut stream = stream.try_clone().unwrap();
                stream.write_all(what).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
        }
        for (stream, what) in [(&target, &there), (&initiator, &back)] {
            scope.spawn(move || {
                let (got, over) = read_all(&mut stream.try_clone().unwrap());
                assert!(got == *what);
                assert_eq!(over, Over::Fin);
            });
        }
    });
    drop((initiator, target));
    eventually("the connection is over", || stand.counts().data.open == 0);
    let counts = stand.counts().data;
    assert_eq!((counts.to_target, counts.to_initiator), (there.len() as u64, back.len() as u64));
    assert_eq!((counts.total, counts.ended, counts.corrupted), (1, 0, 0));
}

#[test]
fn a_half_close_passes_and_the_other_way_goes_on() {
    let stand = Stand::new();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"request").unwrap();
    initiator.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut target), (b"request".to_vec(), Over::Fin));
    target.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&mut initiator, 6), b"answer");
    drop(target);
    assert_eq!(read_all(&mut initiator), (vec![], Over::Fin));
}

#[test]
fn a_reset_passes_after_what_was_said_before_it() {
    let stand = Stand::new();
    for by_target in [false, true] {
        let (initiator, target) = stand.connect();
        let (mut from, mut to) = if by_target { (target, initiator) } else { (initiator, target) };
        from.write_all(b"last words").unwrap();
        SockRef::from(&from).set_linger(Some(Duration::ZERO)).unwrap();
        assert_eq!(read_exactly(&mut to, 10), b"last words");
        drop(from);
        assert_eq!(read_all(&mut to), (vec![], Over::Rst));
    }
    eventually("both are over", || stand.counts().data.open == 0);
    assert_eq!(stand.counts().data.ended, 0);
}

#[test]
fn whoever_does_not_read_makes_the_other_one_wait() {
    let stand = Stand::new();
    let (mut initiator, mut target) = stand.connect();
    initiator.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let block = bytes(1 << 20);
    // The kernel's buffers take some MiB.
    let mut quiet = 0;
    while quiet < 50 && sent < 256 << 20 {
        match initiator.write(&block[sent % 1000..]) {
            Ok(n) => (sent, quiet) = (sent + n, 0),
            Err(_) => {
                quiet += 1;
                std::thread::park_timeout(ms(2));
            }
        }
    }
    assert!(sent < 256 << 20, "nothing held the sender back");
    initiator.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&mut target).0.len(), sent);
}

#[test]
fn a_target_that_moves_is_followed_when_its_descriptor_is_asked_for() {
    let mut stand = Stand::new();
    let (mut initiator, old) = stand.connect();
    drop(old);
    assert_eq!(read_all(&mut initiator), (vec![], Over::Fin));
    stand.move_data();
    let mut refused = stand.dial(0);
    assert_eq!(read_all(&mut refused), (vec![], Over::Rst));
    stand.ask(0);
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"x");
}

#[test]
fn another_target_is_followed_likewise() {
    let (stand, other) = (Stand::new(), Stand::new());
    stand.relay.retarget(None, &other.control.to_string()).unwrap();
    let _ = stand.connect();
    stand.ask(0);
    let mut initiator = stand.dial(0);
    let mut target = other.data.accept().unwrap().0;
    initiator.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"x");
}

#[test]
fn nobody_is_led_to_a_data_port_that_is_not_known() {
    let stand = Stand::new();
    let relay = Relay::start(&stand.control.to_string(), 1).unwrap();
    let mut early = std::net::TcpStream::connect(relay.addresses()[0].data).unwrap();
    assert_eq!(read_for(&mut early, crate::kit::LONG).1, Over::Rst);
}

#[test]
fn nothing_is_left_when_it_is_dropped() {
    let stand = Stand::new();
    let (mut initiator, mut target) = stand.connect();
    let address = stand.relay.addresses()[0];
    let Stand { relay, .. } = stand;
    drop(relay);
    assert_ne!(read_all(&mut initiator).1, Over::Open);
    assert_ne!(read_all(&mut target).1, Over::Open);
    assert!(std::net::TcpStream::connect(address.data).is_err());
    assert!(std::net::TcpStream::connect(address.control).is_err());
}
