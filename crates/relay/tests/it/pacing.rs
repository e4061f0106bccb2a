//! Bytes that come late, slowly, one by one, or wrong.

use std::io::{Read, Write};
use std::time::Instant;

use tensorferry_relay::{Corrupt, Rule, Way};

use crate::kit::{Over, Stand, bytes, ms, read_all, read_exactly, read_for};

#[test]
fn bytes_come_late_and_those_behind_do_not_wait_for_them() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).delay(ms(200))).unwrap();
    let (mut initiator, mut target) = stand.connect();
    let begin = Instant::now();
    let sent = bytes(2 << 20);
    initiator.write_all(&sent).unwrap();
    drop(initiator.shutdown(std::net::Shutdown::Write));
    assert_eq!(read_exactly(&mut target, 1), sent[..1]);
    assert!(begin.elapsed() >= ms(200));
    let (rest, over) = read_all(&mut target);
    assert!(rest == sent[1..]);
    assert_eq!(over, Over::Fin);
    // Were only 64 KiB under way at a time, it would take 32 times the delay.
    assert!(begin.elapsed() < ms(200 * 16), "{:?}", begin.elapsed());
    // The other way is not late.
    target.write_all(b"x").unwrap();
    assert_eq!(read_exactly(&mut initiator, 1), b"x");
}

#[test]
fn a_rate_is_not_exceeded_and_nothing_is_lost() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).rate(1_000_000)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    let begin = Instant::now();
    let sent = bytes(300_000);
    initiator.write_all(&sent).unwrap();
    assert!(read_exactly(&mut target, sent.len()) == sent);
    assert!(begin.elapsed() >= ms(280), "{:?}", begin.elapsed());
}

#[test]
fn a_byte_a_second_is_a_byte_a_second() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).rate(1)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    let begin = Instant::now();
    initiator.write_all(b"abcdef").unwrap();
    assert_eq!(read_exactly(&mut target, 1), b"a");
    assert_eq!(read_exactly(&mut target, 1), b"b");
    assert!(begin.elapsed() >= ms(990), "{:?}", begin.elapsed());
    // A faster rule takes hold at once.
    stand.relay.rule(Rule::new(Way::ToTarget)).unwrap();
    assert_eq!(read_exactly(&mut target, 4), b"cdef");
    assert!(begin.elapsed() < ms(4900), "{:?}", begin.elapsed());
}

#[test]
fn bytes_come_one_by_one() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).single_bytes().rate(500)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(&bytes(40)).unwrap();
    let (mut got, mut pieces) = (Vec::new(), 0);
    while got.len() < 40 {
        let mut piece = [0; 64];
        let n = target.read(&mut piece).unwrap();
        got.extend_from_slice(&piece[..n]);
        pieces += 1;
    }
    assert_eq!(got, bytes(40));
    // A reader that is late finds several together.
    assert!(pieces >= 5, "{pieces}");
    stand.relay.rule(Rule::new(Way::Both).single_bytes()).unwrap();
    initiator.write_all(&bytes(50_000)).unwrap();
    assert!(read_exactly(&mut target, 50_000) == bytes(50_000));
}

#[test]
fn the_bytes_that_are_named_come_wrong() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToInitiator).corrupt_at(2).corrupt_at(70_000)).unwrap();
    let (mut initiator, mut target) = stand.connect();
    let sent = bytes(80_000);
    target.write_all(&sent).unwrap();
    let got = read_exactly(&mut initiator, sent.len());
    let wrong: Vec<usize> = (0..sent.len()).filter(|i| got[*i] != sent[*i]).collect();
    assert_eq!(wrong, [2, 70_000]);
    assert_eq!(got[2], sent[2] ^ 1);
    assert_eq!(stand.counts().data.corrupted, 2);
    // The other way is right.
    initiator.write_all(&sent).unwrap();
    assert!(read_exactly(&mut target, sent.len()) == sent);
}

#[test]
fn one_of_every_so_many_bytes_comes_wrong_the_same_ones_each_time() {
    let stand = Stand::new();
    let corrupt = Corrupt { every: Some(100), seed: Some(4), ..Corrupt::default() };
    stand.relay.rule(Rule { corrupt: Some(corrupt), ..Rule::new(Way::ToTarget) }).unwrap();
    let sent = bytes(10_000);
    let wrong = |()| -> Vec<usize> {
        let (mut initiator, mut target) = stand.connect();
        initiator.write_all(&sent).unwrap();
        let got = read_exactly(&mut target, sent.len());
        (0..sent.len()).filter(|i| got[*i] != sent[*i]).collect()
    };
    let first = wrong(());
    assert_eq!(first.len(), 100);
    assert_eq!(first, wrong(()));
}

#[test]
fn what_is_late_still_comes_when_its_sender_has_gone() {
    let stand = Stand::new();
    stand.relay.rule(Rule::new(Way::ToTarget).delay(ms(40))).unwrap();
    let (mut initiator, mut target) = stand.connect();
    initiator.write_all(b"late").unwrap();
    drop(initiator);
    assert_eq!(read_for(&mut target, crate::kit::LONG), (b"late".to_vec(), Over::Fin));
}
