//! Connections that end because a rule says so.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use tensorferry_relay::{Connections, Copies, End, Port, Rule, Way};
use tensorferry_wire::MessageType;

use crate::kit::{LONG, Over, Stand, ask, bytes, eventually, ms, read_all, read_exactly, read_for};

/// Long enough for something that must not come.
const A_WHILE: Duration = Duration::from_millis(150);

/// The side that sends this way, and the one that receives.
fn ends((initiator, target): (TcpStream, TcpStream), way: Way) -> (TcpStream, TcpStream) {
    if way == Way::ToTarget { (initiator, target) } else { (target, initiator) }
}

#[test]
fn a_connection_ends_after_the_byte_that_was_named() {
    let stand = Stand::new();
    for way in [Way::ToTarget, Way::ToInitiator] {
        for (end, over) in [(End::Fin, Over::Fin), (End::Rst, Over::Rst)] {
            for n in [0, 1, 23, 24, 70_000] {
                stand.relay.rule(Rule::new(way).after(n, end)).unwrap();
                let (mut from, mut to) = ends(stand.connect(), way);
                let sent = bytes(70_001);
                // It may be over before all has been sent; then that is what tells of a reset.
                let told = from.write_all(&sent).is_err();
                let (got, how) = read_all(&mut to);
                assert!(got == sent[..n as usize], "{end:?} after {n}: {}", got.len());
                assert_eq!(how, over, "after {n} {way:?}");
                if !told {
                    assert_eq!(read_for(&mut from, LONG), (vec![], over), "after {n} {way:?}");
                }
            }
        }
        stand.relay.rule(Rule::new(way)).unwrap();
    }
    eventually("all are over", || stand.counts().data.open == 0);
    assert_eq!(stand.counts().data.ended, 20);
}

#[test]
fn one_way_is_closed_and_the_other_goes_on() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).after(5, End::HalfClose)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"hello, and more").unwrap();
    assert_eq!(read_all(&mut target), (b"hello".to_vec(), Over::Fin));
    target.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&mut initiator, 6), b"answer");
    // What comes later is taken and lost.
    initiator.write_all(&bytes(4 << 20)).unwrap();
    drop(target);
    assert_eq!(read_all(&mut initiator), (vec![], Over::Fin));
    drop(initiator);
    eventually("it is over", || stand.counts().data.open == 0);
}

#[test]
fn a_stalled_way_holds_back_and_the_other_goes_on() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).after(5, End::Stall)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"hello, and more").unwrap();
    assert_eq!(read_exactly(&mut target, 5), b"hello");
    assert_eq!(read_for(&mut target, A_WHILE), (vec![], Over::Open));
    target.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&mut initiator, 6), b"answer");
    // A later rule lets it go on, with nothing lost.
    stand.relay.rule(Rule::new(Way::ToTarget)).unwrap();
    assert_eq!(read_exactly(&mut target, 10), b", and more");
}

#[test]
fn nothing_is_read_from_the_start_of_a_stalled_connection() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::Both).stall()).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"x").unwrap();
    target.write_all(b"y").unwrap();
    assert_eq!(read_for(&mut target, A_WHILE), (vec![], Over::Open));
    assert_eq!(read_for(&mut initiator, A_WHILE), (vec![], Over::Open));
    stand.relay.rule(Rule::default()).unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"x");
    assert_eq!(read_exactly(&mut initiator, 1), b"y");
}

#[test]
fn a_silent_connection_tells_nobody_anything() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToInitiator).after(3, End::Silence)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    target.write_all(b"abcdef").unwrap();
    assert_eq!(read_exactly(&mut initiator, 3), b"abc");
    assert_eq!(read_for(&mut initiator, A_WHILE), (vec![], Over::Open));
    initiator.write_all(b"are you there").unwrap();
    assert_eq!(read_for(&mut target, A_WHILE), (vec![], Over::Open));
    drop(target);
    assert_eq!(read_for(&mut initiator, A_WHILE), (vec![], Over::Open));
    drop(initiator);
    eventually("it is forgotten when both are gone", || stand.counts().data.open == 0);
    // New ones work.
    stand.relay.rule(Rule::default()).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"x");
}

#[test]
fn a_kill_ends_what_is_open_and_nothing_else() {
    let stand = Stand::with_copies(2);
    for (end, over) in [(End::Fin, Over::Fin), (End::Rst, Over::Rst), (End::Silence, Over::Open)] {
        let (mut initiator, mut target) = stand.connect();
        let (mut other, mut others_target) = stand.connect_to(1);
        stand.relay.kill(Some(Copies::One(0)), Some(Port::Data), end).unwrap();
        assert_eq!(read_for(&mut initiator, A_WHILE).1, over);
        assert_eq!(read_for(&mut target, A_WHILE).1, over);
        other.write_all(b"x").unwrap();
        assert_eq!(read_exactly(&mut others_target, 1), b"x");
        let (mut initiator, mut target) = stand.connect();
        target.write_all(b"y").unwrap();
        assert_eq!(read_exactly(&mut initiator, 1), b"y");
    }
}

#[test]
fn idle_connections_end_and_busy_ones_do_not() {
    let stand = Stand::new();
    for (end, over) in [(End::Fin, Over::Fin), (End::Rst, Over::Rst), (End::Silence, Over::Open)] {
        // So long that the busy one is not idle because the machine is busy as well.
        stand.relay.idle(None, Port::Data, Some((ms(1500), end))).unwrap();
        let (mut idle, mut idle_target) = stand.connect();
        let (mut busy, mut busy_target) = stand.connect();
        let ended = stand.counts().data.ended;
        eventually("the idle one ends", || {
            busy.write_all(b"x").unwrap();
            assert_eq!(read_exactly(&mut busy_target, 1), b"x");
            std::thread::park_timeout(ms(1));
            stand.counts().data.ended > ended
        });
        assert_eq!(read_for(&mut idle, A_WHILE), (vec![], over));
        assert_eq!(read_for(&mut idle_target, A_WHILE), (vec![], over));
        stand.relay.idle(None, Port::Data, None).unwrap();
    }
}

#[test]
fn a_rule_is_for_the_connections_it_names() {
    let stand = Stand::with_copies(2);
    let (mut old, mut old_target) = stand.connect();
    let future = Rule::new(Way::ToTarget).after(1, End::Fin).connections(Connections::Future);
    stand.relay.rule(future.copy(0)).unwrap();
    old.write_all(b"12").unwrap();
    assert_eq!(read_exactly(&mut old_target, 2), b"12");
    let (mut new, mut new_target) = stand.connect();
    let _ = new.write_all(b"12");
    assert_eq!(read_all(&mut new_target), (b"1".to_vec(), Over::Fin));
    let (mut other, mut others_target) = stand.connect_to(1);
    other.write_all(b"12").unwrap();
    assert_eq!(read_exactly(&mut others_target, 2), b"12");
    // Past the offset that it names, a rule is met at once.
    let existing = Rule::new(Way::ToTarget).after(1, End::Rst).connections(Connections::Existing);
    stand.relay.rule(existing.copy(1)).unwrap();
    assert_eq!(read_all(&mut others_target), (vec![], Over::Rst));
    let (mut other, mut others_target) = stand.connect_to(1);
    other.write_all(b"12").unwrap();
    assert_eq!(read_exactly(&mut others_target, 2), b"12");
}

#[test]
fn the_control_port_has_rules_of_its_own() {
    let stand = Stand::new();
    let control = stand.relay.addresses()[0].control;
    stand.relay.rule(Rule::new(Way::ToInitiator).port(Port::Control).after(20, End::Fin)).unwrap();
    assert_eq!(ask(control, MessageType::Metadata, b"{}"), None);
    assert_eq!(stand.counts().control.ended, 1);
    let (mut initiator, mut target) = stand.connect();
    target.write_all(&bytes(40)).unwrap();
    assert_eq!(read_exactly(&mut initiator, 40), bytes(40));
    stand.relay.rule(Rule::default().port(Port::Control)).unwrap();
    assert!(ask(control, MessageType::Metadata, b"{}").is_some());
}

#[test]
fn a_copy_that_is_not_there_is_an_error() {
    let stand = Stand::with_copies(2);
    let error = stand.relay.rule(Rule::default().copy(2)).unwrap_err();
    assert_eq!(error.to_string(), "there is no copy 2: there are 2, counted from 0");
    let copies = Some(Copies::Some(vec![0, 7]));
    assert!(stand.relay.kill(copies, None, End::Rst).is_err());
}
