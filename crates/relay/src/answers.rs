//! What a control port answers, with the addresses in it changed to the relay's own.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use tensorferry_wire::{
    CONTROL_PREFIX_LEN, DEFAULT_ACCEPT_LIMIT, FrameKind, MessageType, encode_frame,
};

/// The type byte of an answer that has a descriptor in it.
const METADATA: u8 = 1;
const HEAD_LEN: usize = CONTROL_PREFIX_LEN + 1;

/// What the descriptor says instead of the target's own addresses.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    /// The copy's control port, which is the name of the segment.
    pub(crate) control: SocketAddr,
    pub(crate) data: SocketAddr,
    /// Where the target's control port is; its data port is on this host, if nothing else is said.
    pub(crate) target: SocketAddr,
}

/// Follows what a target's control port says. Descriptors are changed; all else passes as it is.
pub(crate) struct Answers {
    names: Names,
    state: State,
    /// The target's data port, as of the latest descriptor.
    pub(crate) data_port: Option<SocketAddr>,
}

enum State {
    /// The start of a frame, or a whole descriptor, is being collected.
    Collecting(Vec<u8>),
    /// So many bytes of another frame have still to pass.
    Passing(u64),
    /// The stream is not understood, and passes.
    Raw,
}

impl Answers {
    pub(crate) fn new(names: Names) -> Self {
        Self { names, state: State::Collecting(Vec::new()), data_port: None }
    }

    /// Takes what the target has said; returns what the initiator is told.
    pub(crate) fn pass(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            bytes = match &mut self.state {
                State::Raw => {
                    out.extend_from_slice(bytes);
                    &[]
                }
                State::Passing(left) => {
                    let n = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    out.extend_from_slice(&bytes[..n]);
                    *left -= n as u64;
                    if *left == 0 {
                        self.state = State::Collecting(Vec::new());
                    }
                    &bytes[n..]
                }
                State::Collecting(_) => self.collect(bytes, &mut out),
            };
        }
        out
    }

    /// The target has ended: what was being collected, as it is.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        match std::mem::replace(&mut self.state, State::Raw) {
            State::Collecting(bytes) => bytes,
            State::Passing(_) | State::Raw => Vec::new(),
        }
    }

    fn collect<'b>(&mut self, bytes: &'b [u8], out: &mut Vec<u8>) -> &'b [u8] {
        let State::Collecting(held) = &mut self.state else { return bytes };
        let wanted = if held.len() < HEAD_LEN { HEAD_LEN } else { frame_len(held) };
        let n = bytes.len().min(wanted - held.len());
        held.extend_from_slice(&bytes[..n]);
        if held.len() == HEAD_LEN {
            let counted = counted(held);
            if counted == 0 || counted > DEFAULT_ACCEPT_LIMIT {
                out.append(held);
                self.state = State::Raw;
            } else if held[CONTROL_PREFIX_LEN] != METADATA {
                out.append(held);
                self.state = match counted - 1 {
                    0 => State::Collecting(Vec::new()),
                    left => State::Passing(left),
                };
            }
        }
        if let State::Collecting(held) = &mut self.state
            && held.len() >= HEAD_LEN
            && held.len() == frame_len(held)
        {
            let frame = std::mem::take(held);
            out.extend_from_slice(&self.changed(frame));
        }
        &bytes[n..]
    }

    /// The frame with the relay's addresses; as it is, if there is no descriptor in it.
    fn changed(&mut self, frame: Vec<u8>) -> Vec<u8> {
        let Ok(Value::Object(mut keys)) = serde_json::from_slice(&frame[HEAD_LEN..]) else {
            return frame;
        };
        let port =
            keys.get("tcp_data_port").and_then(Value::as_u64).and_then(|p| p.try_into().ok());
        let Some(port) = port.filter(|port: &u16| *port > 0) else { return frame };
        let host = keys.get("tcp_data_host").and_then(Value::as_str).map(str::parse::<IpAddr>);
        let host = host.and_then(Result::ok).unwrap_or(self.names.target.ip());
        self.data_port = Some(SocketAddr::new(host, port));
        keys.insert("name".into(), self.names.control.to_string().into());
        keys.insert("tcp_data_host".into(), self.names.data.ip().to_string().into());
        keys.insert("tcp_data_port".into(), self.names.data.port().into());
        let json = format!("{}\n", Value::Object(keys));
        encode_frame(FrameKind::Typed(MessageType::Metadata), json.as_bytes())
    }
}

fn counted(held: &[u8]) -> u64 {
    let mut prefix = [0; CONTROL_PREFIX_LEN];
    prefix.copy_from_slice(&held[..CONTROL_PREFIX_LEN]);
    u64::from_le_bytes(prefix)
}

/// Length of the frame whose head is there; no more than [`DEFAULT_ACCEPT_LIMIT`] and the prefix.
fn frame_len(held: &[u8]) -> usize {
    CONTROL_PREFIX_LEN + usize::try_from(counted(held)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorferry_wire::{BufferDescriptor, FrameReader, SegmentDescriptor, notify_reply};

    fn answers() -> Answers {
        let address = |text: &str| text.parse().unwrap();
        Answers::new(Names {
            control: address("127.0.0.1:1111"),
            data: address("127.0.0.1:2222"),
            target: address("127.0.0.9:3333"),
        })
    }

    fn metadata(json: &[u8]) -> Vec<u8> {
        encode_frame(FrameKind::Typed(MessageType::Metadata), json)
    }

    fn descriptor() -> SegmentDescriptor {
        SegmentDescriptor {
            name: "127.0.0.9:3333".into(),
            buffers: vec![BufferDescriptor { addr: u64::MAX - 9, len: 8 }],
            tcp_data_host: Some("127.0.0.8".into()),
            tcp_data_port: 4444,
            tcp_proto_version: 2,
            ..SegmentDescriptor::default()
        }
    }

    fn in_parts(stream: &[u8], cuts: usize) -> (Vec<u8>, Answers) {
        let mut answers = answers();
        let mut out: Vec<u8> = stream.chunks(cuts).flat_map(|part| answers.pass(part)).collect();
        out.extend(answers.rest());
        (out, answers)
    }

    #[test]
    fn only_the_addresses_of_a_descriptor_change() {
        let json = descriptor().to_json(1 << 20).json;
        let mut with_more: serde_json::Value = serde_json::from_slice(&json).unwrap();
        with_more["x_new"] = serde_json::json!({"a": [1, 2.5, "ü"]});
        let stream = metadata(with_more.to_string().as_bytes());
        for cuts in 1..=stream.len() {
            let (out, answers) = in_parts(&stream, cuts);
            let (taken, frame) = FrameReader::new(1 << 20).feed(&out).unwrap();
            assert_eq!(taken, out.len());
            let body = frame.unwrap().body;
            let expected = SegmentDescriptor {
                name: "127.0.0.1:1111".into(),
                tcp_data_host: Some("127.0.0.1".into()),
                tcp_data_port: 2222,
                ..descriptor()
            };
            assert_eq!(SegmentDescriptor::parse(&body).unwrap(), expected);
            let keys: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(keys["x_new"], with_more["x_new"]);
            assert_eq!(answers.data_port, Some("127.0.0.8:4444".parse().unwrap()));
        }
    }

    #[test]
    fn a_descriptor_without_a_host_is_of_the_control_ports_host() {
        let (_, answers) = in_parts(&metadata(br#"{"tcp_data_port":77}"#), 5);
        assert_eq!(answers.data_port, Some("127.0.0.9:77".parse().unwrap()));
        let (_, answers) = in_parts(&metadata(br#"{"tcp_data_port":77,"tcp_data_host":"n"}"#), 5);
        assert_eq!(answers.data_port, Some("127.0.0.9:77".parse().unwrap()));
    }

    #[test]
    fn all_else_passes_as_it_is() {
        let notify = encode_frame(FrameKind::Typed(MessageType::Notify), notify_reply());
        let probe = encode_frame(FrameKind::Typed(MessageType::Probe), b"");
        let legacy = encode_frame(FrameKind::Legacy, b"{\"tcp_data_port\":1}");
        for stream in [
            [&notify[..], &probe, &legacy, &notify].concat(),
            metadata(b"not JSON"),
            metadata(b"null"),
            metadata(b"{\"tcp_data_port\":\"x\"}"),
            metadata(&[]),
            [&u64::MAX.to_le_bytes()[..], b"what is this"].concat(),
            [&0u64.to_le_bytes()[..], &notify].concat(),
            metadata(b"{\"tcp_data_port\":1}")[..15].to_vec(),
            vec![1, 2, 3],
        ] {
            for cuts in 1..=stream.len() {
                assert_eq!(in_parts(&stream, cuts).0, stream);
            }
        }
    }
}
