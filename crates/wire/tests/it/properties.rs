//! TCP may cut a stream anywhere, and a peer may send anything.

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Map, Value};
use tensorferry_wire::{
    BufferDescriptor, DEFAULT_ACCEPT_LIMIT, Expected, FerryKey, Frame, FrameKind, FrameReader,
    Header, Inbound, MessageType, Notification, Op, ReplyEvent, ReplyReader, ReplyWant,
    RequestReader, SegmentDescriptor, Status, Version, WireError, check_connection_request,
    encode_frame, is_notify_success, is_probe_success,
};

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![Just(Op::Read), Just(Op::Write)]
}

fn version() -> impl Strategy<Value = Version> {
    prop_oneof![Just(Version::V1), Just(Version::V2)]
}

/// Lengths of the pieces in which a stream arrives; used in a cycle.
fn cuts() -> impl Strategy<Value = Vec<usize>> {
    vec(1usize..40, 1..20)
}

/// Cuts `stream` into pieces, and lets `take` consume each piece in as many steps as it likes.
fn deliver<E>(
    stream: &[u8],
    cuts: &[usize],
    mut take: impl FnMut(&[u8]) -> Result<usize, E>,
) -> Result<(), E> {
    let (mut rest, mut lens) = (stream, cuts.iter().copied().cycle());
    while !rest.is_empty() {
        let (mut piece, left) = rest.split_at(lens.next().unwrap().min(rest.len()));
        rest = left;
        while !piece.is_empty() {
            piece = &piece[take(piece)?..];
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq)]
enum Seen {
    Request(Header),
    Payload(Vec<u8>),
}

/// Reads requests; payload bytes that continue each other are joined.
fn read_requests(stream: &[u8], cuts: &[usize]) -> (Vec<Seen>, Option<WireError>, bool) {
    let (mut reader, mut seen) = (RequestReader::new(), Vec::new());
    let end = deliver(stream, cuts, |piece| {
        let (left, offset) = (reader.payload_left(), reader.payload_offset());
        let (taken, event) = reader.feed(piece)?;
        assert!(taken > 0, "nothing was consumed");
        match event {
            None => assert!(reader.header_pending()),
            Some(Inbound::Request(header)) => {
                assert_eq!(left, 0);
                seen.push(Seen::Request(header));
                seen.push(Seen::Payload(Vec::new()));
            }
            Some(Inbound::Payload { offset: at, bytes, last }) => {
                assert_eq!((at, bytes.len()), (offset, taken));
                assert_eq!(last, taken as u64 == left);
                let Some(Seen::Payload(payload)) = seen.last_mut() else { unreachable!() };
                assert_eq!(payload.len() as u64, at);
                payload.extend_from_slice(bytes);
            }
        }
        Ok(taken)
    });
    (seen, end.err(), reader.header_pending())
}

/// What an initiator makes of one answer.
type Answer = (ReplyEvent, Vec<u8>);

/// Reads the answers to `expected` until the stream or the list of requests ends.
fn read_replies(
    stream: &[u8],
    cuts: &[usize],
    expected: &[Expected],
) -> (Vec<Answer>, Option<WireError>) {
    let (mut reader, mut answers, mut payload) = (ReplyReader::new(), Vec::new(), Vec::new());
    let end = deliver(stream, cuts, |piece| {
        let Some(request) = expected.get(answers.len()) else { return Ok(piece.len()) };
        let (taken, event) = match reader.want(request) {
            ReplyWant::Nothing => (0, ReplyEvent::Applied),
            ReplyWant::Status { missing } => {
                let (taken, event) = reader.status_bytes(request, piece)?;
                assert_eq!(taken, missing.min(piece.len()));
                (taken, event)
            }
            ReplyWant::Payload { offset, len } => {
                assert_eq!(offset, payload.len() as u64);
                let taken = piece.len().min(usize::try_from(len).unwrap_or(usize::MAX));
                payload.extend_from_slice(&piece[..taken]);
                (taken, reader.advance_payload(request, taken as u64))
            }
        };
        if matches!(event, ReplyEvent::Applied | ReplyEvent::Rejected) {
            assert!(reader.idle());
            answers.push((event, std::mem::take(&mut payload)));
        }
        Ok(taken)
    });
    (answers, end.err())
}

fn read_frames(stream: &[u8], cuts: &[usize]) -> (Vec<Frame>, Option<WireError>, bool) {
    let (mut reader, mut frames) = (FrameReader::new(DEFAULT_ACCEPT_LIMIT), Vec::new());
    let end = deliver(stream, cuts, |piece| {
        let (taken, frame) = reader.feed(piece)?;
        assert!(taken > 0, "nothing was consumed");
        frames.extend(frame);
        Ok(taken)
    });
    (frames, end.err(), reader.started())
}

const WHOLE: &[usize] = &[usize::MAX];

fn requests_and_stream() -> impl Strategy<Value = Vec<u8>> {
    let request = (op(), version(), any::<u64>(), vec(any::<u8>(), 0..90));
    vec(request, 0..8).prop_map(|requests| {
        let mut stream = Vec::new();
        for (op, version, addr, payload) in requests {
            let header = Header { op, version, addr, len: payload.len() as u64 };
            stream.extend(header.encode());
            if op == Op::Write {
                stream.extend(payload);
            }
        }
        stream
    })
}

fn replies_and_stream() -> impl Strategy<Value = (Vec<Expected>, Vec<u8>)> {
    let reply = (op(), version(), any::<bool>(), vec(any::<u8>(), 0..60));
    vec(reply, 0..8).prop_map(|replies| {
        let (mut requests, mut stream) = (Vec::new(), Vec::new());
        for (op, version, rejected, payload) in replies {
            requests.push(Expected { op, version, len: payload.len() as u64 });
            let rejected = rejected && version == Version::V2;
            if version == Version::V2 {
                let status = if rejected { Status::Rejected } else { Status::Applied };
                stream.extend(status.encode());
            }
            if op == Op::Read && !rejected {
                stream.extend(payload);
            }
        }
        (requests, stream)
    })
}

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    let kind = prop_oneof![
        Just(FrameKind::Typed(MessageType::Connection)),
        Just(FrameKind::Typed(MessageType::Metadata)),
        Just(FrameKind::Typed(MessageType::Notify)),
        Just(FrameKind::Typed(MessageType::Probe)),
        Just(FrameKind::Legacy),
    ];
    let frame = (kind, vec(any::<u8>(), 0..700)).prop_map(|(kind, mut body)| {
        if kind == FrameKind::Legacy {
            body.insert(0, b'{');
        }
        Frame { kind, body }
    });
    vec(frame, 0..5)
}

fn descriptor() -> impl Strategy<Value = SegmentDescriptor> {
    let buffer = (1..u64::MAX)
        .prop_flat_map(|addr| (Just(addr), 1..=u64::MAX - addr))
        .prop_map(|(addr, len)| BufferDescriptor { addr, len });
    let ferry = (any::<String>(), any::<u64>(), any::<bool>()).prop_map(
        |(version, incarnation, buffers_truncated)| FerryKey {
            version,
            incarnation,
            buffers_truncated,
        },
    );
    let texts = (any::<String>(), any::<String>(), any::<String>());
    let numbers = (any::<u16>(), any::<u32>());
    let host = prop::option::of("[^\0]+");
    (texts, numbers, vec(buffer, 0..20), host, prop::option::of(ferry)).prop_map(
        |((name, rdma_server_name, timestamp), numbers, buffers, tcp_data_host, tensorferry)| {
            SegmentDescriptor {
                name,
                protocol: "tcp".to_owned(),
                buffers,
                tcp_data_host,
                tcp_data_port: numbers.0,
                tcp_proto_version: numbers.1,
                rdma_server_name,
                timestamp,
                tensorferry,
            }
        },
    )
}

/// JSON whose keys are often ones that are looked for.
fn json() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        prop::sample::select(vec![
            "name",
            "notify_msg",
            "status",
            "buffers",
            "addr",
            "length",
            "protocol",
            "tcp_data_host",
            "tcp_data_port",
            "tcp_proto_version",
            "tensorferry",
            "incarnation",
            "version",
            "buffers_truncated",
            "qp_num",
            "local_lid",
            "payload",
        ])
        .prop_map(str::to_owned),
        ".{0,6}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        Just(Value::from("tcp")),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Value::from),
            vec((key.clone(), inner), 0..6)
                .prop_map(|entries| Value::from(entries.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

/// Every parser of a body; what they return matters only to the parsers themselves.
fn parse_all(body: &[u8]) {
    if let Ok(descriptor) = SegmentDescriptor::parse(body) {
        let again = descriptor.to_json(u64::MAX);
        assert_eq!(SegmentDescriptor::parse(&again.json), Ok(descriptor));
    }
    if let Ok(notification) = Notification::parse(body) {
        assert_eq!(Notification::parse(&notification.to_json()), Ok(notification));
    }
    let _ = check_connection_request(body);
    let _ = (is_notify_success(body), is_probe_success(body));
}

proptest! {
    #[test]
    fn cuts_do_not_change_requests(stream in requests_and_stream(), cuts in cuts()) {
        let whole = read_requests(&stream, WHOLE);
        prop_assert_eq!((&whole.1, whole.2), (&None, false));
        prop_assert_eq!(read_requests(&stream, &cuts), whole);
    }

    #[test]
    fn a_payload_in_place_ends_as_a_payload_that_was_fed(
        len in 1u64..=u64::MAX,
        parts in vec(any::<u64>(), 1..20),
    ) {
        let header = Header { op: Op::Write, version: Version::V2, addr: 1, len };
        let mut reader = RequestReader::new();
        reader.feed(&header.encode()).unwrap();
        let mut done = 0;
        for part in parts {
            prop_assert_eq!((reader.payload_offset(), reader.payload_left()), (done, len - done));
            let n = part.min(len - done);
            done += n;
            if reader.advance_payload(n) {
                prop_assert_eq!(done, len);
                prop_assert_eq!((reader.payload_offset(), reader.payload_left()), (0, 0));
                break;
            }
            prop_assert!(done < len);
        }
    }

    #[test]
    fn cuts_do_not_change_replies((expected, stream) in replies_and_stream(), cuts in cuts()) {
        let whole = read_replies(&stream, WHOLE, &expected);
        prop_assert_eq!(&whole.1, &None);
        prop_assert_eq!(read_replies(&stream, &cuts, &expected), whole);
    }

    #[test]
    fn cuts_do_not_change_frames(frames in frames(), cuts in cuts()) {
        let stream: Vec<u8> =
            frames.iter().flat_map(|frame| encode_frame(frame.kind, &frame.body)).collect();
        prop_assert_eq!(read_frames(&stream, WHOLE), (frames.clone(), None, false));
        prop_assert_eq!(read_frames(&stream, &cuts), (frames, None, false));
    }

    #[test]
    fn no_bytes_make_a_reader_panic(
        stream in vec(any::<u8>(), 0..600),
        expected in vec((op(), version(), any::<u64>()), 0..20),
        cuts in cuts(),
    ) {
        prop_assert_eq!(read_requests(&stream, WHOLE), read_requests(&stream, &cuts));
        prop_assert_eq!(read_frames(&stream, WHOLE), read_frames(&stream, &cuts));
        let expected: Vec<_> =
            expected.into_iter().map(|(op, version, len)| Expected { op, version, len }).collect();
        prop_assert_eq!(
            read_replies(&stream, WHOLE, &expected),
            read_replies(&stream, &cuts, &expected)
        );
    }

    #[test]
    fn no_bytes_make_a_parser_panic(body in vec(any::<u8>(), 0..600)) {
        parse_all(&body);
    }

    #[test]
    fn no_json_makes_a_parser_panic(value in json()) {
        parse_all(value.to_string().as_bytes());
    }

    #[test]
    fn headers_survive_the_wire(op in op(), version in version(), addr: u64, len: u64) {
        let header = Header { op, version, addr, len };
        prop_assert_eq!(Header::parse(&header.encode()), Ok(header));
    }

    #[test]
    fn notifications_survive_the_wire(name: String, message: String) {
        let notification = Notification { name, message };
        let json = notification.to_json();
        prop_assert_eq!(notification.frame_len(), json.len() as u64 + 1);
        prop_assert_eq!(Notification::parse(&json), Ok(notification));
    }

    #[test]
    fn descriptors_survive_the_wire(descriptor in descriptor(), limit in 0u64..4000) {
        let whole = descriptor.to_json(u64::MAX);
        prop_assert_eq!(whole.buffers_written, descriptor.buffers.len());
        prop_assert_eq!(&SegmentDescriptor::parse(&whole.json).unwrap(), &descriptor);
        let cut = descriptor.to_json(limit);
        let got = SegmentDescriptor::parse(&cut.json).unwrap();
        prop_assert_eq!(&got.buffers[..], &descriptor.buffers[..cut.buffers_written]);
        prop_assert!(cut.buffers_written == 0 || (cut.json.len() as u64) < limit);
    }
}
