//! What an initiator makes of targets that answer with anything.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorferry::{Config, Engine, Error, HostBuffer, Notification, Op, Segment};
use tensorferry_wire::{BufferDescriptor, SegmentDescriptor, Status};

use crate::common::{Pair, alone, engine, eventually, lanes, resident, says, start, timed};
use crate::fake::{BASE, Fake, Gate, LEN, Link, control_only, control_request, done, memory};

const METADATA: u8 = 1;
const NOTIFY: u8 = 2;
const PROBE: u8 = 3;
/// The longest frame that is accepted.
const LIMIT: usize = 16 << 20;
/// What an answer may take to be understood, or not, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(body);
    bytes
}

/// A peer whose control port answers everything with the same bytes.
struct Parrot {
    answer: Arc<Mutex<Vec<u8>>>,
    name: String,
}

impl Parrot {
    fn new() -> Self {
        let answer = Arc::new(Mutex::new(Vec::new()));
        let says = Arc::clone(&answer);
        let name = control_only(move |mut stream: TcpStream| {
            control_request(&mut stream);
            let answer = says.lock().unwrap().clone();
            // Whoever has heard enough hangs up.
            done(stream.write_all(&answer));
        });
        Self { answer, name }
    }

    fn says(&self, answer: Vec<u8>) {
        *self.answer.lock().unwrap() = answer;
    }
}

/// An engine with a peer that is as it should be, and one that is not.
struct Between {
    good: Pair,
    local: HostBuffer,
    parrot: Parrot,
    segment: Segment,
}

impl Between {
    fn new() -> Self {
        let (good, local) = (Pair::new(4096), HostBuffer::zeroed(64).unwrap());
        let parrot = Parrot::new();
        let segment = good.initiator.segment(&parrot.name).unwrap();
        Self { good, local, parrot, segment }
    }

    /// What the engine makes of this descriptor; it goes on with others in any case.
    fn describe(&self, body: &[u8]) -> Result<usize, Error> {
        self.answer(frame(METADATA, body))
    }

    fn answer(&self, bytes: Vec<u8>) -> Result<usize, Error> {
        self.parrot.says(bytes);
        let (result, took) = timed(|| self.segment.buffers());
        assert!(took < SOON, "{took:?}");
        self.goes_on();
        if let Err(error) = &result {
            says(error, &[&self.parrot.name]);
            assert!(error.to_string().len() < 2000, "{error}");
        }
        result.map(|buffers| buffers.len())
    }

    fn goes_on(&self) {
        start(&self.good.segment, Op::Write, &self.local, self.good.remote.addr()).wait().unwrap();
    }
}

/// The keys of a descriptor, and what they hold in one that is as it should be.
const KEYS: [(&str, &str); 9] = [
    ("buffers", r#"[{"addr":4096,"length":4096,"name":"n"}]"#),
    ("name", r#""n""#),
    ("protocol", r#""tcp""#),
    ("rdma_server_name", r#""""#),
    ("tcp_data_host", r#""127.0.0.1""#),
    ("tcp_data_port", "9"),
    ("tcp_proto_version", "2"),
    ("tensorferry", r#"{"incarnation":"0123456789abcdef","version":"v"}"#),
    ("timestamp", r#""t""#),
];

/// A descriptor whose `key` holds `value`; `None`: it does not have it.
fn descriptor_with(key: &str, value: Option<&str>) -> String {
    let mut json = String::new();
    for (known, good) in KEYS {
        let value = if known == key { value } else { Some(good) };
        if let Some(value) = value {
            let comma = if json.is_empty() { "{" } else { "," };
            write!(json, "{comma}\"{known}\":{value}").unwrap();
        }
    }
    json + "}"
}

#[test]
fn every_key_is_looked_at_before_it_is_believed() {
    let between = Between::new();
    assert_eq!(between.describe(descriptor_with("", None).as_bytes()).unwrap(), 1);
    let deep = format!("{}1{}", "[".repeat(6000), "]".repeat(6000));
    let nested = format!("{}1{}", "{\"a\":".repeat(6000), "}".repeat(6000));
    let values = [
        "null",
        "true",
        "-1",
        "1.5",
        "1e300",
        "1e999",
        "-0",
        "18446744073709551616",
        "[]",
        "{}",
        "[[[{}]]]",
        r#""\u0000""#,
        r#""\ud800""#,
        "7x",
        "",
        &deep,
        &nested,
    ];
    for (key, _) in KEYS {
        for value in values {
            let result = between.describe(descriptor_with(key, Some(value)).as_bytes());
            let is_json = !["1e999", r#""\ud800""#, "7x", "", &deep, &nested].contains(&value);
            let fits = match key {
                "buffers" => ["null", "[]"].contains(&value),
                "name" | "rdma_server_name" | "timestamp" => {
                    ["null", r#""\u0000""#].contains(&value)
                }
                "tcp_data_host" | "tensorferry" => value == "null",
                // Minus zero is zero, of which a version may be.
                "tcp_proto_version" => ["null", "-0"].contains(&value),
                _ => false,
            };
            match result {
                Ok(_) => assert!(fits, "{key}: {value:.40} was taken"),
                Err(error) => {
                    // What is no host cannot be found; all else is not understood.
                    let is_host = key == "tcp_data_host" && value == r#""\u0000""#;
                    let (code, words) = match (is_host, is_json) {
                        (true, _) => (7, "the host of its data port"),
                        (false, true) => (17, key),
                        (false, false) => (17, "expected JSON"),
                    };
                    says(&error, &[words]);
                    assert!(!fits && error.code() == code, "{key}: {value:.40}: {error}");
                }
            }
        }
        let absent = between.describe(descriptor_with(key, None).as_bytes());
        assert_eq!(absent.is_err(), ["protocol", "tcp_data_port"].contains(&key), "{key}");
    }
}

#[test]
fn a_descriptor_that_is_cut_or_goes_on_is_not_taken_for_a_whole_one() {
    let between = Between::new();
    let whole = descriptor_with("", None).into_bytes();
    for len in (0..whole.len()).step_by(5) {
        assert_eq!(between.describe(&whole[..len]).unwrap_err().code(), 17, "{len} bytes");
    }
    for junk in ["x", "}", "{}", "\0", ",", "\u{feff}"] {
        let body = [&whole, junk.as_bytes()].concat();
        assert_eq!(between.describe(&body).unwrap_err().code(), 17, "{junk:?} behind it");
    }
    for at in (0..whole.len()).step_by(11) {
        let body = [&whole[..at], b"\xff", &whole[at..]].concat();
        assert_eq!(between.describe(&body).unwrap_err().code(), 17, "no UTF-8 at {at}");
    }
    // The last of two values counts, as for released peers.
    let twice = descriptor_with("tcp_data_port", Some(r#""x","tcp_data_port":9"#));
    assert_eq!(between.describe(twice.as_bytes()).unwrap(), 1);
    assert_eq!(between.describe(&[&whole[..], b" \r\n\t"].concat()).unwrap(), 1);
}

#[test]
fn a_bad_port_or_host_is_named() {
    let between = Between::new();
    for port in ["0", "65536", "-1", "\"9\"", "99999999999999999999"] {
        let error = between.describe(descriptor_with("tcp_data_port", Some(port)).as_bytes());
        says(&error.unwrap_err(), &["tcp_data_port"]);
    }
    let long = "h".repeat(64 << 10);
    let hosts = [
        "a\\u0000b",
        "\\u0000",
        "fe80::1%nope0",
        "fe80::1%../../x",
        "::1%",
        "[::1]",
        &long,
        "256.256.256.256.",
        "\\n",
        "127.0.0.1 ",
        "..",
    ];
    for host in hosts {
        let body = descriptor_with("tcp_data_host", Some(&format!("\"{host}\"")));
        let error = between.describe(body.as_bytes()).unwrap_err();
        assert_eq!(error.code(), 7, "{host:.40}: {error}");
        says(&error, &["the host of its data port", "no address found"]);
    }
    // Without one, it is the host of the name.
    assert_eq!(
        between.describe(descriptor_with("tcp_data_host", Some("\"\"")).as_bytes()).unwrap(),
        1
    );
}

#[test]
fn an_answer_of_another_kind_is_none() {
    let between = Between::new();
    let whole = descriptor_with("", None).into_bytes();
    for kind in [0, 2, 3] {
        let error = between.answer(frame(kind, &whole)).unwrap_err();
        says(&error, &["which was not asked for"]);
    }
    let untyped = [&(whole.len() as u64).to_le_bytes()[..], &whole].concat();
    says(&between.answer(untyped).unwrap_err(), &["Legacy", "which was not asked for"]);
    says(&between.answer(frame(0x80, &whole)).unwrap_err(), &["type byte 0x80"]);
    says(
        &between.answer(b"SSH-2.0-OpenSSH\r\n".to_vec()).unwrap_err(),
        &["a control frame announces"],
    );
    // One that is in pieces, and one that is followed by more, are answers.
    assert_eq!(between.answer([frame(METADATA, &whole), frame(PROBE, b"{}")].concat()).unwrap(), 1);
}

#[test]
fn the_longest_frame_is_taken_and_no_longer_one() {
    let between = Between::new();
    let mut body = descriptor_with("", None).into_bytes();
    body.resize(LIMIT - 1, b' ');
    assert_eq!(between.describe(&body).unwrap(), 1);
    body.push(b' ');
    let error = between.describe(&body).unwrap_err();
    says(&error, &["announces 16777217 bytes, expected 1 to 16777216"]);
}

#[test]
fn twenty_thousand_buffers_and_a_hundred_thousand_are_a_list() {
    for count in [20_000, 100_000] {
        let fake = Fake::new(|mut link| link.serve());
        let at = |i: u64| BASE + i * 8192;
        let list = (0..count).map(|i| BufferDescriptor { addr: at(i), len: 4096 }).collect();
        fake.publish(|d: &mut SegmentDescriptor| d.buffers = list);
        let e = engine(lanes(1, 1));
        let (segment, took) = timed(|| e.open(&fake.name()).unwrap());
        assert!(took < SOON, "{count}: {took:?}");
        let local = HostBuffer::zeroed(4096).unwrap();
        for i in [0, count / 2, count - 1] {
            start(&segment, Op::Read, &local, at(i)).wait().unwrap();
            assert!(local.read(0, 4096) == memory(at(i), 4096));
            assert_eq!(start(&segment, Op::Read, &local, at(i) + 1).wait().unwrap_err().code(), 9);
        }
    }
}

#[test]
fn buffers_that_overlap_harm_only_who_published_them() {
    let fake = Fake::new(|mut link| link.serve());
    let around = |addr, len| BufferDescriptor { addr, len };
    let list =
        vec![around(BASE, LEN), around(BASE + 100, 50), around(BASE, 10), around(1, u64::MAX - 1)];
    fake.publish(|d| d.buffers = list);
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    let local = HostBuffer::zeroed(16).unwrap();
    for addr in [BASE, BASE + 5, BASE + 110, BASE + 145, BASE + LEN - 16, 7] {
        match start(&segment, Op::Read, &local, addr).wait() {
            Ok(()) => assert!(local.read(0, 16) == memory(addr, 16)),
            Err(error) => assert_eq!(error.code(), 9, "{error}"),
        }
    }
}

/// What a peer says that has not been asked yet cannot always be told from the answer to what is asked meanwhile, since
/// answers have no ids. But it is one answer too many, and the lane ends with that.
#[test]
fn a_peer_that_speaks_first_is_not_listened_to_for_long() {
    let cases: [&[u8]; 4] = [
        &Status::Applied.encode(),
        &Status::Rejected.encode(),
        b"HTTP/1.1 400 Bad Request",
        &[0; 3],
    ];
    for said in cases.map(<[u8]>::to_vec) {
        let fake = Fake::new(move |mut link| {
            if link.number == 0 {
                link.send(&said);
            }
            link.serve();
        });
        let e = engine(lanes(1, 1));
        let segment = e.open(&fake.name()).unwrap();
        let local = HostBuffer::zeroed(100_000).unwrap();
        if let Err(error) = start(&segment, Op::Write, &local, BASE).wait() {
            assert!([8, 11, 16].contains(&error.code()), "{error}");
            says(&error, &[&fake.name()]);
        }
        for i in 0..4 {
            match start(&segment, Op::Read, &local, BASE + i).wait() {
                // The first one's may be off by what was said first.
                Ok(()) if i == 0 => {}
                Ok(()) => assert!(local.read(0, 100_000) == memory(BASE + i, 100_000)),
                Err(error) => assert!(i < 2 && error.code() == 16, "READ {i}: {error}"),
            }
        }
        assert_eq!(fake.connections(), 2, "the lane that is out of step is given up");
    }
}

/// What a peer does behind an answer.
type More = fn(&mut Link);

#[test]
fn what_follows_the_last_answer_ends_the_lane() {
    let cases: [(Op, More); 6] = [
        (Op::Read, |link| assert!(link.send(b"xy"))),
        (Op::Write, |link| assert!(link.send(b"x"))),
        (Op::Write, |link| assert!(link.status(Status::Applied))),
        (Op::Read, |link| assert!(link.status(Status::Rejected))),
        (Op::Read, |link| done(link.stream.shutdown(Shutdown::Write))),
        (Op::Write, |link| done(link.stream.shutdown(Shutdown::Write))),
    ];
    // Small batches may be sent by the thread that submits, large ones by an IO thread.
    for (op, more) in cases {
        for len in [5000, 600_000] {
            let there = Gate::default();
            let said = there.clone();
            let fake = Fake::new(move |mut link| {
                let first = link.number == 0;
                while let Some(header) = link.header() {
                    if !link.answer(&header) {
                        return;
                    }
                    if first {
                        more(&mut link);
                        link.await_arrival();
                        said.open();
                    }
                }
            });
            let e = engine(lanes(1, 1));
            let segment = e.open(&fake.name()).unwrap();
            let small = HostBuffer::zeroed(5000).unwrap();
            start(&segment, op, &small, BASE).wait().unwrap();
            there.wait();
            // It is there before the next request, so it is no answer to that, which goes on a new lane.
            for next in [Op::Write, Op::Read] {
                let local = HostBuffer::zeroed(len).unwrap();
                start(&segment, next, &local, BASE + 3).wait().unwrap();
                let right = next == Op::Write || local.read(0, len) == memory(BASE + 3, len as u64);
                assert!(right, "{next:?} of {len}, after {op:?}");
            }
            assert_eq!(fake.connections(), 2);
        }
    }
}

#[test]
fn a_payload_that_ends_early_is_no_payload() {
    let fake = Fake::new(|mut link| {
        while let Some(header) = link.header() {
            link.status(Status::Applied);
            link.send(&memory(header.addr, header.len - 1));
            done(link.stream.shutdown(std::net::Shutdown::Write));
        }
    });
    let e = engine(lanes(1, 1));
    let segment = e.open(&fake.name()).unwrap();
    for len in [1, 5000, 3 << 20] {
        let local = HostBuffer::zeroed(len).unwrap();
        let (result, took) = timed(|| start(&segment, Op::Read, &local, BASE).wait());
        let error = result.unwrap_err();
        assert_eq!(error.code(), 10, "{error}");
        says(&error, &[&fake.name(), "closed the connection"]);
        assert!(took < SOON, "{took:?}");
    }
}

#[test]
fn an_answer_that_is_no_success_is_none() {
    let between = Between::new();
    let Between { good, parrot, segment, .. } = &between;
    let probe = |e: &Engine| e.probe(&parrot.name).unwrap_err();
    let notify = || {
        let note = Notification::new("n", "m");
        segment.notify(&note).unwrap_err()
    };
    let deep = "[".repeat(20_000);
    let long = format!("{{\"status\":\"{0}\",\"notify_msg\":\"{0}\"}}", "success".repeat(300_000));
    let bodies = [
        "",
        "{}",
        "[]",
        "null",
        "0",
        "true",
        "\"success\"",
        "[\"success\"]",
        &deep,
        &long,
        "\u{ff}",
        r#"{"status":true,"notify_msg":true}"#,
        r#"{"status":"Success","notify_msg":"success "}"#,
        r#"{"status":["success"],"notify_msg":{"success":1}}"#,
        r#"{"status":"success","status":"failed","notify_msg":"success","notify_msg":"failed"}"#,
        r#"{"status":"success","notify_msg":"success"}x"#,
        r#"{"status":"success","notify_msg":"success""#,
    ];
    for body in bodies {
        parrot.says(frame(PROBE, body.as_bytes()));
        let (error, took) = timed(|| probe(&good.initiator));
        assert_eq!(error.code(), 17, "{body:.40}: {error}");
        says(&error, &[&parrot.name, "probe", "does not say success"]);
        assert!(took < SOON && error.to_string().len() < 1000);
        parrot.says(frame(NOTIFY, body.as_bytes()));
        let (error, took) = timed(notify);
        assert_eq!(error.code(), 18, "{body:.40}: {error}");
        says(&error, &[&parrot.name, "does not say success"]);
        assert!(took < SOON && error.to_string().len() < 1000);
    }
    // Of another kind, cut off, and nothing at all.
    let good_body = br#"{"status":"success","notify_msg":"success"}"#;
    let cut = frame(PROBE, good_body)[..20].to_vec();
    for answer in [frame(METADATA, good_body), cut, vec![0xff; 8], vec![0; 8], Vec::new()] {
        parrot.says(answer.clone());
        assert!([7, 17].contains(&probe(&good.initiator).code()), "{answer:?}");
        assert_eq!(notify().code(), 18, "{answer:?}");
    }
    between.goes_on();
}

#[test]
fn answers_that_do_not_end_are_held_up_to_a_bound() {
    alone("hostile::answers_that_do_not_end_alone");
}

/// So many send 15 MiB, and so many of those fit in what is held.
const PEERS: usize = 40;
const HELD: usize = 9;

#[test]
#[ignore = "counts memory of the process, so it is started by itself"]
fn answers_that_do_not_end_alone() {
    let mut config = Config::default();
    config.io_threads = 1;
    let e = engine(config);
    let good = engine(Config::default());
    e.open(good.name()).unwrap();
    let answer = Arc::new({
        let mut answer = (LIMIT as u64).to_le_bytes().to_vec();
        answer.push(METADATA);
        answer.resize(15 << 20, b' ');
        answer
    });
    let before = resident();
    let enough = Gate::default();
    let names: Vec<String> = (0..PEERS)
        .map(|_| {
            let (answer, enough) = (Arc::clone(&answer), enough.clone());
            control_only(move |mut stream| {
                control_request(&mut stream);
                done(stream.write_all(&answer));
                // It says no more, and stays.
                enough.wait();
            })
        })
        .collect();
    let mut most = 0;
    std::thread::scope(|threads| {
        let asking: Vec<_> =
            names.iter().map(|name| threads.spawn(|| e.open(name).map(|_| ()))).collect();
        // Those that are held have taken all the room; the others are told so.
        eventually("most are given up", || {
            most = most.max(resident());
            asking.iter().filter(|a| a.is_finished()).count() >= PEERS - HELD
        });
        enough.open();
        for (asked, name) in asking.into_iter().zip(&names) {
            let error = asked.join().unwrap().unwrap_err();
            assert_eq!(error.code(), 7, "{error}");
            says(&error, &[name]);
        }
    });
    let more = most.saturating_sub(before);
    eprintln!("{} MiB more, of {} that were sent", more >> 20, PEERS * 15);
    assert!(more < 250 << 20, "{more} bytes more");
    e.open(good.name()).unwrap();
}
