//! Ports that do not let people in.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};

use tensorferry_relay::{Accept, Copies, Port};

use crate::kit::{LONG, Over, Stand, eventually, ms, read_exactly, read_for};

fn try_connect(to: SocketAddr) -> Result<TcpStream, ErrorKind> {
    TcpStream::connect_timeout(&to, ms(300)).map_err(|e| e.kind())
}

#[test]
fn a_port_refuses_and_lets_in_again() {
    let stand = Stand::with_copies(2);
    let [first, second] = [0, 1].map(|copy| stand.relay.addresses()[copy]);
    let (mut before, mut before_target) = stand.connect();
    for port in [Port::Control, Port::Data] {
        let of = |address: tensorferry_relay::Address| match port {
            Port::Control => address.control,
            Port::Data => address.data,
        };
        for _ in 0..3 {
            stand.relay.accept(Some(Copies::One(0)), port, Accept::Refuse).unwrap();
            assert_eq!(try_connect(of(first)).unwrap_err(), ErrorKind::ConnectionRefused);
            try_connect(of(second)).unwrap();
            stand.relay.accept(None, port, Accept::Pass).unwrap();
            try_connect(of(first)).unwrap();
        }
    }
    // Connections from before are not touched.
    before.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut before_target, 1), b"x");
}

#[test]
fn a_silent_port_accepts_and_says_nothing() {
    let stand = Stand::new();
    stand.relay.accept(None, Port::Data, Accept::Silent).unwrap();
    let mut initiator = stand.dial(0);
    initiator.write_all(b"hello").unwrap();
    assert_eq!(read_for(&mut initiator, ms(150)), (vec![], Over::Open));
    stand.data.set_nonblocking(true).unwrap();
    assert!(stand.data.accept().is_err(), "the target is not called");
    assert_eq!(stand.counts().data.open, 1);
    drop(initiator);
    eventually("it is forgotten", || stand.counts().data.open == 0);
}

#[test]
fn a_full_port_does_not_answer_until_it_lets_in_again() {
    let stand = Stand::new();
    let data = stand.relay.addresses()[0].data;
    stand.relay.accept(None, Port::Data, Accept::Never).unwrap();
    for _ in 0..3 {
        assert_eq!(try_connect(data).unwrap_err(), ErrorKind::TimedOut);
    }
    // Whoever is patient gets in: the kernel repeats the call after a second.
    let waiting = std::thread::spawn(move || TcpStream::connect_timeout(&data, LONG));
    stand.relay.accept(None, Port::Data, Accept::Pass).unwrap();
    let mut late = waiting.join().unwrap().unwrap();
    let (mut target, _) = stand.data.accept().unwrap();
    late.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"x");
}
