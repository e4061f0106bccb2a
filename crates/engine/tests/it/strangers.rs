//! What a target makes of clients that it has no reason to trust.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use tensorferry::{Access, Config, Engine, HostBuffer, Notification, Op, RegisterOptions, Version};
use tensorferry_wire::{
    FrameKind, FrameReader, Header, MessageType, STATUS_LEN, Status, encode_frame,
};

use crate::common::{PROMPT, engine, eventually, lanes, ms, pattern, timed};
use crate::fake::{Answer, Raw};

/// A target with one buffer of `len` bytes.
fn target(len: usize) -> (Engine, HostBuffer) {
    let target = engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(len).unwrap();
    target.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    (target, memory)
}

#[test]
fn requests_may_arrive_byte_by_byte() {
    let (target, memory) = target(4096);
    let mut raw = Raw::connect(target.data_port());
    let bytes = pattern(50, 1);
    let mut stream = Raw::header(Op::Write, memory.addr() + 3, 50).to_vec();
    stream.extend_from_slice(&bytes);
    stream.extend_from_slice(&Raw::header(Op::Read, memory.addr() + 4, 20));
    for byte in stream {
        raw.send(&[byte]);
    }
    assert_eq!(raw.answer(), Answer::Applied);
    assert!(memory.read(3, 50) == bytes);
    assert_eq!(raw.answer(), Answer::Applied);
    assert!(raw.bytes(20) == bytes[1..21]);
}

#[test]
fn what_is_in_the_padding_does_not_matter() {
    let (target, memory) = target(64);
    let mut raw = Raw::connect(target.data_port());
    let mut header = Raw::header(Op::Read, memory.addr(), 64);
    header[17..].fill(0xff);
    raw.send(&header);
    assert_eq!(raw.answer(), Answer::Applied);
    assert_eq!(raw.bytes(64), [0; 64]);
}

/// This one takes five seconds: that is what it is about.
#[test]
fn half_a_header_is_waited_for_and_not_for_ever() {
    let (target, memory) = target(64);
    let mut idle = Raw::connect(target.data_port());
    idle.ask(memory.addr(), 8);
    assert_eq!(idle.answer(), Answer::Applied);
    let mut raw = Raw::connect(target.data_port());
    raw.send(&[0; 13]);
    let (answer, took) = timed(|| raw.answer());
    assert_eq!(answer, Answer::End);
    assert!(took > ms(4500) && took < ms(9000), "{took:?}");
    // A connection with nothing begun is left alone.
    assert_eq!(idle.bytes(8), [0; 8]);
    idle.ask(memory.addr(), 8);
    assert_eq!(idle.answer(), Answer::Applied);
}

#[test]
fn unknown_operations_are_closed_and_not_served() {
    let (target, memory) = target(64);
    for opcode in 0..=u8::MAX {
        if [0x00, 0x01, 0x80, 0x81].contains(&opcode) {
            continue;
        }
        let mut raw = Raw::connect(target.data_port());
        let mut header = Raw::header(Op::Read, memory.addr(), 64);
        header[16] = opcode;
        raw.send(&header);
        assert!(matches!(raw.answer(), Answer::End | Answer::Reset), "opcode {opcode:#x}");
    }
    let stats = target.stats();
    assert_eq!((stats.served_reads, stats.served_writes), (0, 0));
}

#[test]
fn what_was_applied_before_nonsense_is_acknowledged() {
    let (target, memory) = target(64);
    let mut raw = Raw::connect(target.data_port());
    let mut stream = Vec::new();
    for _ in 0..200 {
        stream.extend_from_slice(&Raw::header(Op::Write, memory.addr(), 64));
        stream.extend_from_slice(&[1; 64]);
    }
    stream.extend_from_slice(&[0xff; 24]);
    raw.send(&stream);
    for i in 0..200 {
        assert_eq!(raw.answer(), Answer::Applied, "WRITE {i}");
    }
    assert!(matches!(raw.answer(), Answer::End | Answer::Reset));
}

/// Ranges that no buffer contains, given a buffer at `addr` and another that begins where it ends.
fn outside(addr: u64, len: u64) -> Vec<(u64, u64)> {
    vec![
        (addr, 0),
        (0, 16),
        (0, 0),
        (addr - 1, 2),
        (addr + len - 1, 2),
        (addr + len - 8, 16),
        (addr + 2 * len - 8, 9),
        (addr, 2 * len),
        (addr + 2 * len, 1),
        (addr, u64::MAX),
        (u64::MAX, u64::MAX),
        (addr, u64::MAX - addr + 1),
        (u64::MAX - 7, 8),
    ]
}

/// Two buffers without a gap; nothing beyond them is registered.
#[expect(unsafe_code, reason = "two buffers that touch")]
fn neighbours() -> (Engine, HostBuffer) {
    let target = engine(lanes(1, 1));
    let memory = HostBuffer::zeroed(2 * 4096).unwrap();
    for at in [0, 4096] {
        // SAFETY: the tests keep the memory as long as the engine.
        unsafe { target.register(memory.addr() + at, 4096, &RegisterOptions::default()) }.unwrap();
    }
    (target, memory)
}

#[test]
fn a_range_outside_is_refused_and_the_refusal_can_be_read() {
    let (target, memory) = neighbours();
    for (addr, len) in outside(memory.addr(), 4096) {
        for op in [Op::Read, Op::Write] {
            let mut raw = Raw::connect(target.data_port());
            raw.send(&Raw::header(op, addr, len));
            assert_eq!(raw.answer(), Answer::Rejected, "{op:?} {addr:#x} {len}");
            assert_eq!(raw.answer(), Answer::End);
        }
        let mut v1 = Raw::connect(target.data_port());
        v1.send(&Header { op: Op::Read, version: Version::V1, addr, len }.encode());
        assert!(matches!(v1.answer(), Answer::End | Answer::Reset));
    }
    assert!(memory.read(0, 8192).iter().all(|b| *b == 0));
    assert_eq!(target.stats().served_bytes_read, 0);
    for at in [0, 4096] {
        let mut raw = Raw::connect(target.data_port());
        raw.write(memory.addr() + at, &[7; 4096]);
        assert_eq!(raw.answer(), Answer::Applied);
    }
}

#[test]
fn a_refusal_is_not_lost_though_megabytes_were_on_their_way() {
    let (target, memory) = target(200 * 64);
    let body = vec![1; 8 << 20];
    let good = pattern(64, 1);
    for round in 0..30 {
        let mut raw = Raw::connect(target.data_port());
        if round % 2 == 1 {
            for i in 0..200 {
                raw.write(memory.addr() + i * 64, &good);
            }
        }
        raw.send(&Raw::header(Op::Write, 0x10, body.len() as u64));
        raw.send(&body);
        if round % 2 == 1 {
            for i in 0..200 {
                assert_eq!(raw.answer(), Answer::Applied, "round {round}, answer {i}");
            }
        }
        assert_eq!(raw.answer(), Answer::Rejected, "round {round}");
        assert_eq!(raw.answer(), Answer::End, "round {round}");
    }
    // They are counted when they have been answered.
    eventually("all are counted", || target.stats().served_writes >= 15 * 200);
    assert_eq!(target.stats().served_writes, 15 * 200);
}

#[test]
fn what_follows_a_refusal_is_not_applied() {
    let (target, memory) = target(64);
    let mut raw = Raw::connect(target.data_port());
    raw.ask(memory.addr() + 60, 5);
    raw.write(memory.addr(), &[9; 64]);
    assert_eq!(raw.answer(), Answer::Rejected);
    assert_eq!(raw.answer(), Answer::End);
    drop(raw);
    let mut raw = Raw::connect(target.data_port());
    raw.ask(memory.addr(), 64);
    assert_eq!(raw.answer(), Answer::Applied);
    assert_eq!(raw.bytes(64), [0; 64]);
}

#[test]
fn five_thousand_requests_in_one_burst_are_answered_in_order() {
    let (target, memory) = target(5000 * 64);
    let bytes = pattern(5000 * 64, 2);
    let writes: Vec<u8> = (0..5000)
        .flat_map(|i| {
            let header = Raw::header(Op::Write, memory.addr() + (i * 64) as u64, 64);
            [&header[..], &bytes[i * 64..][..64]].concat()
        })
        .collect();
    // Read in another order than they lie in memory, so that an answer out of order shows.
    let places: Vec<usize> = (0..5000).map(|i| i * 2503 % 5000).collect();
    let reads: Vec<u8> = places
        .iter()
        .flat_map(|i| Raw::header(Op::Read, memory.addr() + (i * 64) as u64, 64))
        .collect();
    let mut raw = Raw::connect(target.data_port());
    let mut sender = raw.stream.try_clone().unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            sender.write_all(&writes).unwrap();
            sender.write_all(&reads).unwrap();
        });
        for i in 0..5000 {
            assert_eq!(raw.answer(), Answer::Applied, "WRITE {i}");
        }
        assert!(memory.read(0, bytes.len()) == bytes);
        for (n, i) in places.iter().enumerate() {
            assert_eq!(raw.answer(), Answer::Applied, "READ {n}");
            assert!(raw.bytes(64) == bytes[i * 64..][..64], "READ {n}");
        }
    });
}

#[test]
fn reads_and_writes_by_turns_are_answered_by_turns() {
    let (target, memory) = target(1 << 20);
    let mut raw = Raw::connect(target.data_port());
    for len in [1, 100, 16_383, 16_384, 100_000, 300_000] {
        let pieces: Vec<Vec<u8>> = (0..6).map(|i| pattern(len, i)).collect();
        for piece in &pieces {
            raw.write(memory.addr() + 5, piece);
            raw.ask(memory.addr() + 5, 1);
        }
        for piece in &pieces {
            assert_eq!(raw.answer(), Answer::Applied);
            assert_eq!(raw.answer(), Answer::Applied);
            // A later WRITE may have been applied before the bytes were sent, but nothing else.
            let byte = raw.bytes(1)[0];
            assert!(pieces.iter().any(|p| p[0] == byte), "{len}: {byte} not of {}", piece[0]);
        }
        assert!(memory.read(5, len) == pieces[5]);
    }
}

#[test]
fn a_client_that_takes_nothing_stalls_itself_alone() {
    let (target, memory) = target(1 << 20);
    let mut greedy = Raw::connect(target.data_port());
    greedy.stream.set_write_timeout(Some(ms(200))).unwrap();
    let ask = Raw::header(Op::Read, memory.addr(), 1 << 20).repeat(1000);
    let mut sent = 0;
    loop {
        match greedy.stream.write(&ask) {
            Ok(n) => sent += n,
            Err(e) => {
                assert!(matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{e}");
                break;
            }
        }
        assert!(sent < 64 << 20, "the target takes requests on without end");
    }
    // What it was asked for is a thousand times as much as what is kept for it.
    eventually("it has taken on much", || target.stats().served_bytes_read > 512 << 20);
    let mut other = Raw::connect(target.data_port());
    let ((), took) = timed(|| {
        for _ in 0..100 {
            other.ask(memory.addr(), 100);
            assert_eq!(other.answer(), Answer::Applied);
            other.bytes(100);
        }
    });
    assert!(took < PROMPT, "{took:?}");
    // When it does take them, they are all there.
    for _ in 0..300 {
        assert_eq!(greedy.answer(), Answer::Applied);
        greedy.bytes(1 << 20);
    }
}

#[test]
fn the_end_of_the_stream_in_a_body_closes_and_what_came_is_applied() {
    let (target, memory) = target(1 << 20);
    for len in [1000, 1 << 20] {
        let mut raw = Raw::connect(target.data_port());
        raw.write(memory.addr(), &[1; 10]);
        raw.send(&Raw::header(Op::Write, memory.addr(), len as u64));
        raw.send(&vec![2; len / 2]);
        raw.half_close();
        assert_eq!(raw.answer(), Answer::Applied, "what was whole is answered");
        assert_eq!(raw.answer(), Answer::End);
        assert!(memory.read(0, len / 2).iter().all(|b| *b == 2));
        assert!(memory.read(len / 2, len / 2).iter().all(|b| *b == 0));
        memory.write(0, &vec![0; 1 << 20]);
    }
    // Half a header, then the end.
    let mut raw = Raw::connect(target.data_port());
    raw.send(&[1; 20]);
    raw.half_close();
    assert_eq!(raw.answer(), Answer::End);
}

#[test]
fn a_request_followed_by_the_end_of_the_stream_is_answered() {
    let (target, memory) = target(8 << 20);
    memory.write(0, &pattern(8 << 20, 1));
    let mut raw = Raw::connect(target.data_port());
    raw.ask(memory.addr(), 8 << 20);
    raw.write(memory.addr(), &[0]);
    raw.half_close();
    assert_eq!(raw.answer(), Answer::Applied);
    assert!(raw.bytes(8 << 20)[1..] == pattern(8 << 20, 1)[1..]);
    assert_eq!(raw.answer(), Answer::Applied);
    assert_eq!(raw.answer(), Answer::End);
}

#[test]
fn v1_is_served_without_statuses() {
    let (target, memory) = target(4096);
    let mut raw = Raw::connect(target.data_port());
    let v1 = |op, len| Header { op, version: Version::V1, addr: memory.addr(), len }.encode();
    raw.send(&v1(Op::Write, 4));
    raw.send(b"abcd");
    raw.send(&v1(Op::Read, 6));
    assert_eq!(raw.bytes(6), b"abcd\0\0");
    raw.ask(memory.addr(), 2);
    assert_eq!(raw.bytes(STATUS_LEN + 2), [&Status::Applied.encode()[..], b"ab"].concat());
}

#[test]
fn access_is_what_it_was_registered_for() {
    let target = engine(lanes(1, 1));
    let with = |access| {
        let memory = HostBuffer::zeroed(4096).unwrap();
        let options = RegisterOptions::default().with_access(access);
        target.register_buffer(&memory, &options).unwrap();
        memory
    };
    let (read_only, local) = (with(Access::ReadOnly), with(Access::Local));
    let ask = |op, memory: &HostBuffer| {
        let mut raw = Raw::connect(target.data_port());
        raw.send(&Raw::header(op, memory.addr(), 4));
        if op == Op::Write {
            raw.send(&[1; 4]);
        }
        raw.answer()
    };
    assert_eq!(ask(Op::Read, &read_only), Answer::Applied);
    assert_eq!(ask(Op::Write, &read_only), Answer::Rejected);
    assert_eq!(ask(Op::Read, &local), Answer::Rejected);
    assert_eq!(ask(Op::Write, &local), Answer::Rejected);
    let initiator = engine(Config::default());
    let published = initiator.open(target.name()).unwrap().buffers().unwrap();
    assert_eq!(published.iter().map(|b| b.addr).collect::<Vec<_>>(), [read_only.addr()]);
    // A connection that has just used a buffer has no more right to it.
    let mut raw = Raw::connect(target.data_port());
    raw.ask(read_only.addr(), 4);
    assert_eq!(raw.answer(), Answer::Applied);
    raw.bytes(4);
    raw.write(read_only.addr(), &[1; 4]);
    assert_eq!(raw.answer(), Answer::Rejected);
    assert_eq!(read_only.read(0, 4), [0; 4]);
}

fn control(target: &Engine) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", target.control_port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
    stream
}

/// Sends bytes to the control port; what comes until the end of the stream.
fn exchange(target: &Engine, bytes: &[u8]) -> Vec<u8> {
    let mut stream = control(target);
    // The target may hang up before it has taken everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset, "{e}"),
    }
    answer
}

fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(body);
    bytes
}

#[test]
fn malformed_control_frames_do_no_harm() {
    let (target, memory) = target(64);
    let bomb = "[".repeat(5000);
    let deep = format!("{{\"name\":{}", "[".repeat(1 << 20));
    let mut hostile: Vec<Vec<u8>> = [
        (2, "[]"),
        (2, "1"),
        (2, "\"s\""),
        (2, "null"),
        (2, ""),
        (2, "{\"name\":{}}"),
        (2, "{\"notify_msg\":[]}"),
        (2, "{\"name\":\"a\",\"notify_msg\":7}"),
        (0, "[]"),
        (0, "1"),
        (0, "{\"qp_num\":[\"x\"]}"),
        (0, "{\"qp_num\":[-1]}"),
        (0, "{\"payload\":{}}"),
        (2, &bomb),
        (0, &bomb),
        (2, &deep),
        (4, "{}"),
        (0x7f, "x"),
        (0xff, "{}"),
    ]
    .iter()
    .map(|(kind, body)| frame(*kind, body.as_bytes()))
    .collect();
    hostile.push([&1_u64.to_le_bytes()[..], b"7"].concat());
    hostile.push(0_u64.to_le_bytes().to_vec());
    hostile.push([&u64::MAX.to_le_bytes()[..], &[2; 100]].concat());
    hostile.push([&(1_u64 << 40).to_le_bytes()[..], &[2; 100]].concat());
    hostile.push([&100_u64.to_le_bytes()[..], &[2; 50]].concat());
    hostile.push(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec());
    hostile.push(vec![0xff; 3]);
    let probe = encode_frame(FrameKind::Typed(MessageType::Probe), b"{}");
    for bytes in &hostile {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]);
        let (answer, took) = timed(|| exchange(&target, bytes));
        assert!(answer.is_empty(), "{shown:?}: {}", String::from_utf8_lossy(&answer));
        assert!(took < ms(2000), "{shown:?}: {took:?}");
        assert!(!exchange(&target, &probe).is_empty(), "after {shown:?}");
    }
    // Bodies that are not looked at do no harm either.
    for (kind, body) in [(3, &bomb[..]), (3, "1"), (1, "null"), (1, &deep[..])] {
        assert!(!exchange(&target, &frame(kind, body.as_bytes())).is_empty());
    }
    assert!(target.take_notifications().is_empty());
    // Text that is not UTF-8 costs what is wrong in it, and no other message.
    let texts: [&[u8]; 3] = [b"a", b"\xff", b"c"];
    for text in texts {
        let body = [b"{\"name\":\"", text, b"\",\"notify_msg\":\"m\"}"].concat();
        assert!(!exchange(&target, &frame(2, &body)).is_empty());
    }
    let names: Vec<String> = target.take_notifications().into_iter().map(|n| n.name).collect();
    assert_eq!(names, ["a", "\u{fffd}", "c"]);
    let mut raw = Raw::connect(target.data_port());
    raw.write(memory.addr(), &[1]);
    assert_eq!(raw.answer(), Answer::Applied);
}

#[test]
fn clients_that_hold_control_connections_delay_nobody() {
    let (target, _memory) = target(64);
    let idle: Vec<TcpStream> = (0..50).map(|_| control(&target)).collect();
    // Others have had their answer and do not hang up, or have sent half a request.
    let probe = encode_frame(FrameKind::Typed(MessageType::Probe), b"{}");
    let mut lingering: Vec<TcpStream> = (0..20).map(|_| control(&target)).collect();
    for (i, stream) in lingering.iter_mut().enumerate() {
        stream.write_all(if i % 2 == 0 { &probe } else { &probe[..5] }).unwrap();
    }
    let initiator = engine(Config::default());
    let ((), took) = timed(|| {
        for _ in 0..20 {
            initiator.probe(target.name()).unwrap();
        }
        initiator.open(target.name()).unwrap();
    });
    assert!(took < PROMPT, "{took:?}");
    drop((idle, lingering));
}

#[test]
fn a_client_that_floods_the_control_port_delays_nobody_for_long() {
    let (target, memory) = target(64);
    let probe = encode_frame(FrameKind::Typed(MessageType::Probe), b"{}");
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            let mut flood = control(&target);
            flood.write_all(&probe).unwrap();
            let done = &done;
            threads.spawn(move || {
                let bytes = vec![0; 1 << 20];
                while !done.load(std::sync::atomic::Ordering::Relaxed)
                    && flood.write_all(&bytes).is_ok()
                {}
            });
        }
        let mut raw = Raw::connect(target.data_port());
        let ((), took) = timed(|| {
            for _ in 0..50 {
                raw.write(memory.addr(), &[1]);
                assert_eq!(raw.answer(), Answer::Applied);
            }
        });
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(took < 2 * PROMPT, "{took:?}");
    });
}

#[test]
fn control_frames_may_arrive_byte_by_byte() {
    let (target, _memory) = target(64);
    let note = Notification { name: "n\u{e9}".into(), message: String::new() };
    let mut stream = control(&target);
    stream.set_nodelay(true).unwrap();
    for byte in encode_frame(FrameKind::Typed(MessageType::Notify), &note.to_json()) {
        stream.write_all(&[byte]).unwrap();
    }
    let mut answer = [0; 256];
    let n = stream.read(&mut answer).unwrap();
    let (_, frame) = FrameReader::new(1 << 20).feed(&answer[..n]).unwrap();
    let body = frame.unwrap().body;
    assert!(String::from_utf8(body).unwrap().contains("\"notify_msg\":\"success\""));
    assert_eq!(target.take_notifications(), [note]);
    // Whoever does not hang up is hung up on in the end, but the answer is there.
    drop(stream);
    eventually("more connections", || !exchange(&target, &frame_of_probe()).is_empty());
}

fn frame_of_probe() -> Vec<u8> {
    encode_frame(FrameKind::Typed(MessageType::Probe), b"{}")
}

#[test]
fn notifications_that_nobody_takes_are_bounded() {
    let (target, _memory) = target(64);
    let message = "x".repeat(1_000_000);
    let note = Notification { name: "n".into(), message };
    let bytes = encode_frame(FrameKind::Typed(MessageType::Notify), &note.to_json());
    let taken = (0..80).filter(|_| !exchange(&target, &bytes).is_empty()).count();
    assert!((60..70).contains(&taken), "{taken}");
    assert_eq!(target.take_notifications().len(), taken);
    assert!(!exchange(&target, &bytes).is_empty(), "there is room again");
}
