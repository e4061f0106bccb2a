//! A target made of plain sockets, with a relay before it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensorferry_relay::{CopyCounts, Relay};
use tensorferry_wire::{
    BufferDescriptor, Frame, FrameKind, FrameReader, MessageType, SegmentDescriptor, encode_frame,
    notify_reply,
};

/// Nothing in these tests takes so long, unless it never ends.
pub(crate) const LONG: Duration = Duration::from_secs(10);

/// A control port that says where `data` is, and a relay that has heard of it.
pub(crate) struct Stand {
    pub(crate) relay: Relay,
    pub(crate) data: TcpListener,
    pub(crate) control: SocketAddr,
    descriptor: Arc<Mutex<SegmentDescriptor>>,
}

impl Stand {
    pub(crate) fn new() -> Self {
        Self::with_copies(1)
    }

    pub(crate) fn with_copies(copies: usize) -> Self {
        let data = TcpListener::bind("127.0.0.1:0").unwrap();
        let descriptor = Arc::new(Mutex::new(descriptor(&data)));
        let control = control_port(Arc::clone(&descriptor));
        let relay = Relay::start(&control.to_string(), copies).unwrap();
        let stand = Self { relay, data, control, descriptor };
        (0..copies).for_each(|copy| drop(stand.ask(copy)));
        // What a test rules is not for these.
        let open = || stand.relay.counts().unwrap().iter().any(|copy| copy.control.open > 0);
        eventually("the relay has done with who has asked", || !open());
        stand
    }

    /// What a copy's control port says about the segment.
    pub(crate) fn ask(&self, copy: usize) -> SegmentDescriptor {
        let answer = ask(self.relay.addresses()[copy].control, MessageType::Metadata, b"{}");
        SegmentDescriptor::parse(&answer.unwrap().body).unwrap()
    }

    /// The target is now at another data port, which its control port says.
    pub(crate) fn move_data(&mut self) {
        self.data = TcpListener::bind("127.0.0.1:0").unwrap();
        *self.descriptor.lock().unwrap() = descriptor(&self.data);
    }

    /// A data connection through a copy, as both sides have it.
    pub(crate) fn connect_to(&self, copy: usize) -> (TcpStream, TcpStream) {
        let initiator = self.dial(copy);
        let target = self.data.accept().unwrap().0;
        (initiator, patient(target))
    }

    pub(crate) fn connect(&self) -> (TcpStream, TcpStream) {
        self.connect_to(0)
    }

    /// The initiator's side alone.
    pub(crate) fn dial(&self, copy: usize) -> TcpStream {
        patient(TcpStream::connect(self.relay.addresses()[copy].data).unwrap())
    }

    pub(crate) fn counts(&self) -> CopyCounts {
        self.relay.counts().unwrap()[0]
    }
}

/// A stream on which nothing waits for ever.
fn patient(stream: TcpStream) -> TcpStream {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream
}

fn descriptor(data: &TcpListener) -> SegmentDescriptor {
    SegmentDescriptor {
        name: "plain".into(),
        buffers: vec![BufferDescriptor { addr: 4096, len: 4096 }],
        tcp_data_host: Some("127.0.0.1".into()),
        tcp_data_port: data.local_addr().unwrap().port(),
        ..SegmentDescriptor::default()
    }
}

/// Answers descriptors and notifications, until the test program ends.
fn control_port(descriptor: Arc<Mutex<SegmentDescriptor>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = patient(stream.unwrap());
            let Some(frame) = read_frame(&mut stream) else { continue };
            let body = match frame.kind {
                FrameKind::Typed(MessageType::Metadata) => {
                    descriptor.lock().unwrap().to_json(1 << 20).json
                }
                _ => notify_reply().to_vec(),
            };
            let _ = stream.write_all(&encode_frame(frame.kind, &body));
        }
    });
    address
}

/// Asks a control port, as a peer does.
pub(crate) fn ask(control: SocketAddr, what: MessageType, body: &[u8]) -> Option<Frame> {
    let mut stream = patient(TcpStream::connect(control).ok()?);
    stream.write_all(&encode_frame(FrameKind::Typed(what), body)).ok()?;
    read_frame(&mut stream)
}

fn read_frame(stream: &mut TcpStream) -> Option<Frame> {
    let mut reader = FrameReader::new(1 << 20);
    let mut bytes = [0; 4096];
    loop {
        let n = stream.read(&mut bytes).ok().filter(|n| *n > 0)?;
        if let Some(frame) = reader.feed(&bytes[..n]).ok()?.1 {
            return Some(frame);
        }
    }
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Over {
    Fin,
    Rst,
    /// It had not, for a while.
    Open,
}

/// Reads to the end.
pub(crate) fn read_all(stream: &mut TcpStream) -> (Vec<u8>, Over) {
    let (mut got, mut bytes) = (Vec::new(), [0; 65536]);
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return (got, Over::Fin),
            Ok(n) => got.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return (got, Over::Rst),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return (got, Over::Open),
            Err(e) => panic!("{e}"),
        }
    }
}

/// What is there for so long, on a stream that may stay open.
pub(crate) fn read_for(stream: &mut TcpStream, time: Duration) -> (Vec<u8>, Over) {
    stream.set_read_timeout(Some(time)).unwrap();
    let read = read_all(stream);
    stream.set_read_timeout(Some(LONG)).unwrap();
    read
}

pub(crate) fn read_exactly(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

pub(crate) fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 2_654_435_761) >> 7) as u8).collect()
}

pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::park_timeout(Duration::from_micros(200));
    }
}

pub(crate) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}
