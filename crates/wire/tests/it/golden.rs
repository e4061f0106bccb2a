//! Bytes that were captured from released peers (`tests/vectors`), whose keys are in byte order.

use serde_json::Value;
use tensorferry_wire::{
    DEFAULT_ACCEPT_LIMIT, DEFAULT_SEND_LIMIT, Expected, Frame, FrameKind, FrameReader, HEADER_LEN,
    Header, Inbound, MessageType, Notification, Op, ReplyEvent, ReplyReader, RequestReader,
    STATUS_LEN, SegmentDescriptor, Status, Version, WireError, check_connection_request,
    connection_reply, encode_frame, is_notify_success, is_probe_success, notify_reply, probe_reply,
    probe_request,
};

const BASE: u64 = 0x6000_0000_0000;

/// One file of vectors.
struct Vectors(Value);

impl Vectors {
    fn parse(text: &str) -> Self {
        Self(serde_json::from_str(text).unwrap())
    }

    fn all(&self) -> impl Iterator<Item = (&str, Vec<u8>)> {
        let vectors = self.0["vectors"].as_array().unwrap();
        vectors.iter().map(|vector| {
            (vector["name"].as_str().unwrap(), unhex(vector["hex"].as_str().unwrap()))
        })
    }

    fn get(&self, name: &str) -> Vec<u8> {
        self.all().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name}")).1
    }
}

macro_rules! vectors {
    ($file:literal) => {
        Vectors::parse(include_str!(concat!("../vectors/", $file, ".json")))
    };
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn request(op: Op, version: Version, addr: u64, len: u64) -> Header {
    Header { op, version, addr, len }
}

/// Reads a stream of requests into headers and their payloads.
fn requests(stream: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let (mut reader, mut rest, mut all) = (RequestReader::new(), stream, Vec::new());
    while !rest.is_empty() {
        let (taken, event) = reader.feed(rest).unwrap();
        rest = &rest[taken..];
        match event.unwrap() {
            Inbound::Request(header) => all.push((header, Vec::new())),
            Inbound::Payload { bytes, .. } => all.last_mut().unwrap().1.extend_from_slice(bytes),
        }
    }
    all
}

/// Checks that a vector is one request, and that its header is written in the same way.
fn check_request(bytes: &[u8], header: Header, payload: &[u8]) {
    assert_eq!(requests(bytes), [(header, payload.to_vec())]);
    assert_eq!([&header.encode(), payload].concat(), bytes);
}

#[test]
fn data_v1() {
    let vectors = vectors!("data_v1");
    let write = request(Op::Write, Version::V1, BASE, 16);
    check_request(&vectors.get("v1_write_16_request"), write, b"hello mooncake!!");
    let read = request(Op::Read, Version::V1, BASE + 0x100, 16);
    check_request(&vectors.get("v1_read_16_request"), read, b"");
    assert_eq!(vectors.get("v1_read_16_response"), b"target-data-0123");
    let unregistered = request(Op::Write, Version::V1, 0x1000, 16);
    check_request(&vectors.get("v1_write_unregistered_request"), unregistered, b"hello mooncake!!");
}

#[test]
fn data_v2() {
    let vectors = vectors!("data_v2");
    for (name, op, addr, payload) in [
        ("v2_write_16_request", Op::Write, BASE, &b"hello mooncake!!"[..]),
        ("v2_write_1_request", Op::Write, BASE + 7, b"e"),
        ("v2_write_4_request", Op::Write, BASE, b"hell"),
    ] {
        let header = request(op, Version::V2, addr, payload.len() as u64);
        check_request(&vectors.get(name), header, payload);
    }
    let read = request(Op::Read, Version::V2, BASE + 0x100, 16);
    check_request(&vectors.get("v2_read_16_request"), read, b"");
    for name in ["v2_write_16_ack", "v2_write_1_ack", "v2_write_4_ack"] {
        assert_eq!(vectors.get(name), Status::Applied.encode());
    }

    let response = vectors.get("v2_read_16_response");
    let expected = Expected { op: Op::Read, version: Version::V2, len: 16 };
    let mut reader = ReplyReader::new();
    let served = Ok((STATUS_LEN, ReplyEvent::PayloadNext));
    assert_eq!(reader.status_bytes(&expected, &response), served);
    assert_eq!(&response[STATUS_LEN..], b"target-data-0123");
    assert_eq!(reader.advance_payload(&expected, 16), ReplyEvent::Applied);
}

#[test]
fn data_v2_raw_client() {
    let vectors = vectors!("data_v2_raw_client");
    let pipelined = requests(&vectors.get("v2_pipelined_write_write_read_request"));
    assert_eq!(
        pipelined,
        [
            (request(Op::Write, Version::V2, BASE, 4), b"AAAA".to_vec()),
            (request(Op::Write, Version::V2, BASE + 4, 4), b"BBBB".to_vec()),
            (request(Op::Read, Version::V2, BASE, 8), Vec::new()),
        ]
    );
    let applied = Status::Applied.encode();
    assert_eq!(
        vectors.get("v2_pipelined_write_write_read_response"),
        [&applied[..], &applied, &applied, b"AAAABBBB"].concat()
    );

    // Released peers serve this as a READ, as its response shows; it is refused here.
    let unknown = vectors.get("v2_unknown_opcode_request");
    let refused = WireError::UnknownOpcode { byte: 0xff };
    assert_eq!(RequestReader::new().feed(&unknown), Err(refused));
    let response = vectors.get("v2_unknown_opcode_response");
    assert_eq!(response, [&applied[..], b"AAAA"].concat());
}

#[test]
fn data_reject() {
    let vectors = vectors!("data_reject");
    for (name, op, addr, len, payload) in [
        ("v2_read_unregistered", Op::Read, 0x1000, 16, &b""[..]),
        ("v2_write_unregistered", Op::Write, 0x1000, 4, b"hell"),
        ("v2_zero_length_write", Op::Write, BASE, 0, b""),
        ("v2_overflow_read", Op::Read, BASE, u64::MAX, b""),
    ] {
        let header = request(op, Version::V2, addr, len);
        check_request(&vectors.get(&format!("{name}_request")), header, payload);
    }
    let responses = vectors.all().filter(|(name, _)| name.ends_with("_response"));
    assert_eq!(responses.map(|(_, bytes)| assert_rejected(&bytes)).count(), 4);
}

fn assert_rejected(bytes: &[u8]) {
    assert_eq!(bytes, Status::Rejected.encode());
    let expected = Expected { op: Op::Write, version: Version::V2, len: 4 };
    let rejected = Ok((STATUS_LEN, ReplyEvent::Rejected));
    assert_eq!(ReplyReader::new().status_bytes(&expected, bytes), rejected);
    assert_eq!(bytes.len() + 2 * STATUS_LEN, HEADER_LEN);
}

/// Reads a vector that is one frame, and checks that it is written in the same way.
fn frame(bytes: &[u8]) -> Frame {
    let (taken, frame) = FrameReader::new(DEFAULT_ACCEPT_LIMIT).feed(bytes).unwrap();
    let frame = frame.unwrap();
    assert_eq!(taken, bytes.len());
    assert_eq!(encode_frame(frame.kind, &frame.body), bytes);
    frame
}

#[test]
fn control_messages() {
    let vectors = vectors!("control");
    let typed = |message, name: &str| {
        let frame = frame(&vectors.get(name));
        assert_eq!(frame.kind, FrameKind::Typed(message), "{name}");
        frame.body
    };
    let notification = Notification { name: "nm".to_owned(), message: "hello".to_owned() };
    let body = typed(MessageType::Notify, "notify_request");
    assert_eq!(notification.to_json(), body);
    assert_eq!(notification.frame_len(), 0x24);
    assert_eq!(Notification::parse(&body), Ok(notification));
    assert_eq!(typed(MessageType::Notify, "notify_reply"), notify_reply());
    assert!(is_notify_success(notify_reply()));

    assert_eq!(typed(MessageType::Probe, "probe_request"), probe_request());
    assert_eq!(typed(MessageType::Probe, "probe_reply"), probe_reply());
    assert!(is_probe_success(probe_reply()));

    let handshake = typed(MessageType::Connection, "connection_request");
    assert_eq!(check_connection_request(&handshake), Ok(()));
    assert_eq!(typed(MessageType::Connection, "connection_reply"), connection_reply());

    let legacy = frame(&vectors.get("oldproto_request"));
    assert_eq!(legacy.kind, FrameKind::Legacy);
    assert_eq!(check_connection_request(&legacy.body), Ok(()));
    let reply = Frame { kind: FrameKind::Legacy, body: connection_reply().to_vec() };
    assert_eq!(frame(&vectors.get("oldproto_reply")), reply);

    assert_eq!(typed(MessageType::Metadata, "metadata_request_http_mode"), b"{}\n");
    let null = typed(MessageType::Metadata, "metadata_reply_http_mode");
    let error = SegmentDescriptor::parse(&null).unwrap_err();
    assert_eq!(error.to_string(), "the descriptor is null, expected an object");
}

#[test]
fn control_descriptors_of_the_newest_peer_are_written_alike() {
    let vectors = vectors!("control");
    for name in ["metadata_request", "metadata_reply"] {
        let body = frame(&vectors.get(name)).body;
        let descriptor = SegmentDescriptor::parse(&body).unwrap();
        let encoded = descriptor.to_json(DEFAULT_SEND_LIMIT);
        assert_eq!(str::from_utf8(&encoded.json), str::from_utf8(&body), "{name}");
        assert_eq!(encoded.buffers_written, 1);
        assert_eq!(descriptor.tcp_data_host.as_deref(), Some("127.0.0.1"));
        assert_eq!(descriptor.tcp_proto_version, 2);
        assert_eq!(descriptor.tensorferry, None);
    }
}

#[test]
fn control_descriptors_of_older_peers_have_defaults() {
    let vectors = vectors!("control");
    for (release, port, version, addr) in [
        ("0.3.9", 16737, 1, 94_234_217_191_072),
        ("0.3.11.post1", 16342, 1, 93_887_933_082_576),
        ("0.3.12.post1", 15314, 2, 94_142_000_731_744),
    ] {
        let body = frame(&vectors.get(&format!("metadata_reply_{release}"))).body;
        let got = SegmentDescriptor::parse(&body).unwrap();
        assert_eq!((got.tcp_data_port, got.tcp_proto_version), (port, version), "{release}");
        assert_eq!((got.buffers[0].addr, got.buffers[0].len), (addr, 4096), "{release}");
        assert_eq!((got.tcp_data_host, got.buffers.len()), (None, 1), "{release}");
    }
}

#[test]
fn store_values_are_descriptors() {
    let etcd = vectors!("etcd");
    let got = SegmentDescriptor::parse(&etcd.get("etcd_segment_value")).unwrap();
    assert_eq!((got.name.as_str(), got.tcp_data_port), ("node-a:12345", 15232));

    let mut buffers = Vec::new();
    for (_, message) in vectors!("http").all() {
        let text = str::from_utf8(&message).unwrap();
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        if body.starts_with("{\"buffers\"") {
            let got = SegmentDescriptor::parse(body.as_bytes()).unwrap();
            assert!(got.name.starts_with("node-"));
            let encoded = got.to_json(DEFAULT_SEND_LIMIT);
            assert_eq!(encoded.json, format!("{body}\n").as_bytes());
            buffers.push(got.buffers.len());
        }
    }
    assert_eq!(buffers, [0, 1, 0, 1, 1]);
}
