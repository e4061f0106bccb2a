//! A peer made of plain sockets, that does what a test says; and a client that says what it likes.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};
use tensorferry_wire::{
    BufferDescriptor, FerryKey, Frame, FrameKind, FrameReader, HEADER_LEN, Header, MessageType, Op,
    STATUS_LEN, SegmentDescriptor, Status, Version, encode_frame, notify_reply, probe_reply,
};

/// Where the memory of fake peers is said to be. Nothing is there: they answer from patterns.
pub(crate) const BASE: u64 = 0x5000_0000_0000;
pub(crate) const LEN: u64 = 1 << 40;

/// A peer whose control port answers as a peer does, and whose data port does what the test says.
pub(crate) struct Fake {
    shared: Arc<Shared>,
    control: u16,
    data: Mutex<Vec<u16>>,
}

struct Shared {
    descriptor: Mutex<SegmentDescriptor>,
    /// How often the descriptor was asked for.
    asked: AtomicUsize,
    /// How many data connections were accepted.
    connections: AtomicUsize,
    /// How many of them have ended.
    ended: AtomicUsize,
    /// Every complete header that [`Link::header`] has read.
    seen: Mutex<Vec<Header>>,
    notify: Mutex<OnNotify>,
    /// Whether the control port is silent now.
    hushed: Mutex<Option<Box<dyn Fn() -> bool + Send>>>,
    /// Something has come that [`Link::hang`] leaves unread.
    unread: AtomicBool,
    gone: AtomicBool,
}

/// What a fake peer does with a notification.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum OnNotify {
    #[default]
    Answer,
    HangUp,
    Silence,
}

/// A data connection, as the fake peer has it.
pub(crate) struct Link {
    pub(crate) stream: TcpStream,
    /// Which connection it is, from 0.
    pub(crate) number: usize,
    shared: Arc<Shared>,
}

impl Fake {
    /// `behave` has each data connection on a thread of its own.
    pub(crate) fn new(behave: impl Fn(Link) + Send + Sync + 'static) -> Self {
        let descriptor = SegmentDescriptor {
            name: "fake".into(),
            buffers: vec![BufferDescriptor { addr: BASE, len: LEN }],
            tcp_data_host: Some("127.0.0.1".into()),
            tcp_proto_version: 2,
            ..SegmentDescriptor::default()
        };
        let shared = Arc::new(Shared {
            descriptor: Mutex::new(descriptor),
            asked: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            seen: Mutex::default(),
            notify: Mutex::default(),
            hushed: Mutex::default(),
            unread: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        });
        let answering = Arc::clone(&shared);
        let control = listen(Arc::clone(&shared), move |stream| control_port(&answering, stream));
        let fake = Self { shared, control, data: Mutex::default() };
        fake.move_data_port(behave);
        fake
    }

    /// Opens another data port and publishes that one; connections to the old one stay as they are.
    pub(crate) fn move_data_port(&self, behave: impl Fn(Link) + Send + Sync + 'static) {
        let shared = Arc::clone(&self.shared);
        let port = listen(Arc::clone(&self.shared), move |stream| {
            let number = shared.connections.fetch_add(1, Ordering::SeqCst);
            behave(Link { stream, number, shared: Arc::clone(&shared) });
            shared.ended.fetch_add(1, Ordering::SeqCst);
        });
        self.data.lock().unwrap().push(port);
        self.publish(|d| d.tcp_data_port = port);
    }

    /// Changes what the control port says.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut SegmentDescriptor)) {
        change(&mut self.shared.descriptor.lock().unwrap());
    }

    /// Publishes only the first gibibyte, and says that there is more.
    pub(crate) fn truncate(&self) {
        self.publish(|d| {
            d.buffers[0].len = 1 << 30;
            d.tensorferry =
                Some(FerryKey { version: "0".into(), incarnation: 1, buffers_truncated: true });
        });
    }

    /// The control port says nothing while `when` says so.
    pub(crate) fn hush(&self, when: impl Fn() -> bool + Send + 'static) {
        *self.shared.hushed.lock().unwrap() = Some(Box::new(when));
    }

    pub(crate) fn on_notify(&self, what: OnNotify) {
        *self.shared.notify.lock().unwrap() = what;
    }

    /// The data port that is published.
    pub(crate) fn data_port(&self) -> u16 {
        self.shared.descriptor.lock().unwrap().tcp_data_port
    }

    pub(crate) fn name(&self) -> String {
        format!("127.0.0.1:{}", self.control)
    }

    pub(crate) fn asked(&self) -> usize {
        self.shared.asked.load(Ordering::SeqCst)
    }

    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// How many data connections the peer has done with.
    pub(crate) fn hung_up(&self) -> usize {
        self.shared.ended.load(Ordering::SeqCst)
    }

    /// Whether something has arrived at a peer that hangs.
    pub(crate) fn has_unread(&self) -> bool {
        self.shared.unread.load(Ordering::SeqCst)
    }

    /// The headers that have arrived.
    pub(crate) fn seen(&self) -> Vec<Header> {
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.gone.store(true, Ordering::SeqCst);
        for port in self.data.lock().unwrap().iter().chain([&self.control]) {
            // An accept that waits sees the flag when something comes.
            let _ = TcpStream::connect(("127.0.0.1", *port));
        }
    }
}

fn listen(shared: Arc<Shared>, behave: impl Fn(TcpStream) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let behave = Arc::new(behave);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if shared.gone.load(Ordering::SeqCst) {
                return;
            }
            let (stream, behave) = (stream.unwrap(), Arc::clone(&behave));
            stream.set_nodelay(true).unwrap();
            std::thread::spawn(move || behave(stream));
        }
    });
    port
}

/// A control port that gives each connection to `behave`; the name of the peer.
pub(crate) fn control_only(behave: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let behave = Arc::new(behave);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let behave = Arc::clone(&behave);
            std::thread::spawn(move || behave(stream.unwrap()));
        }
    });
    name
}

/// Reads one control frame.
pub(crate) fn control_request(stream: &mut TcpStream) -> Option<Frame> {
    let mut reader = FrameReader::new(16 << 20);
    let mut bytes = [0; 4096];
    loop {
        let n = stream.read(&mut bytes).ok().filter(|n| *n > 0)?;
        if let Some(frame) = reader.feed(&bytes[..n]).ok()?.1 {
            return Some(frame);
        }
    }
}

fn control_port(shared: &Shared, mut stream: TcpStream) {
    let Some(frame) = control_request(&mut stream) else { return };
    let hushed = shared.hushed.lock().unwrap().as_ref().is_some_and(|when| when());
    if hushed {
        return silent(stream);
    }
    let json = match frame.kind {
        FrameKind::Typed(MessageType::Metadata) => {
            shared.asked.fetch_add(1, Ordering::SeqCst);
            shared.descriptor.lock().unwrap().to_json(16 << 20).json
        }
        FrameKind::Typed(MessageType::Notify) => {
            let what = *shared.notify.lock().unwrap();
            match what {
                OnNotify::Answer => notify_reply().to_vec(),
                OnNotify::HangUp => return,
                // Until the other side hangs up.
                OnNotify::Silence => return drop(stream.read(&mut [0])),
            }
        }
        FrameKind::Typed(MessageType::Probe) => probe_reply().to_vec(),
        _ => return,
    };
    let _ = stream.write_all(&encode_frame(frame.kind, &json));
}

impl Link {
    /// The next header, or nothing at the end of the stream.
    pub(crate) fn header(&mut self) -> Option<Header> {
        let mut bytes = [0; HEADER_LEN];
        self.stream.read_exact(&mut bytes).ok()?;
        let header = Header::parse(&bytes).unwrap();
        self.shared.seen.lock().unwrap().push(header);
        Some(header)
    }

    /// Takes `len` bytes of payload; false at the end of the stream.
    pub(crate) fn swallow(&mut self, len: u64) -> bool {
        let copied = std::io::copy(&mut (&mut self.stream).take(len), &mut std::io::sink());
        copied.is_ok_and(|n| n == len)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    pub(crate) fn status(&mut self, status: Status) -> bool {
        self.send(&status.encode())
    }

    /// Waits until the other side's kernel has acknowledged all that was sent, so that it is there, or has hung up.
    pub(crate) fn await_arrival(&self) {
        let port = |addr: SocketAddr| format!("0100007F:{:04X}", addr.port());
        let (own, Ok(other)) = (self.stream.local_addr().unwrap(), self.stream.peer_addr()) else {
            return;
        };
        let (own, other) = (port(own), port(other));
        let unacknowledged = || {
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
            let mut rows = table.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
            let row = rows.find(|row| row[1] == own && row[2] == other);
            row.is_some_and(|row| !row[4].starts_with("00000000:"))
        };
        while unacknowledged() {
            std::thread::yield_now();
        }
    }

    /// Answers one request as a good peer does.
    pub(crate) fn answer(&mut self, header: &Header) -> bool {
        match header.op {
            Op::Write => self.swallow(header.len) && self.status(Status::Applied),
            Op::Read => self.status(Status::Applied) && self.send(&memory(header.addr, header.len)),
        }
    }

    /// Serves as a good peer does, until the stream ends.
    pub(crate) fn serve(&mut self) {
        while let Some(header) = self.header() {
            if !self.answer(&header) {
                return;
            }
        }
    }

    /// Reads nothing and says nothing until the other side has hung up or reset, or 20 s have passed.
    pub(crate) fn hang(&mut self) {
        self.stream.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until && !self.shared.gone.load(Ordering::SeqCst) {
            let mut byte = [0];
            match self.stream.peek(&mut byte) {
                Ok(0) => return,
                // Something waits that is not to be read: `peek` would return at once again.
                Ok(_) => {
                    self.shared.unread.store(true, Ordering::SeqCst);
                    std::thread::park_timeout(Duration::from_millis(10));
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                // The process was stopped for a while.
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Lets little be on its way that is not read.
    pub(crate) fn narrow(&self) {
        socket2::SockRef::from(&self.stream).set_recv_buffer_size(16 << 10).unwrap();
    }

    /// Nothing that the other side sends arrives any more, and so nothing is acknowledged, as if this machine had gone.
    pub(crate) fn vanish(&self) {
        vanish(&self.stream);
    }

    /// Waits until something has come, and leaves it there.
    pub(crate) fn await_bytes(&self) {
        done(self.stream.peek(&mut [0]));
    }

    /// Takes what comes and says nothing until the other side has hung up or reset.
    pub(crate) fn swallow_all(&mut self) {
        done(std::io::copy(&mut self.stream, &mut std::io::sink()));
    }

    /// Hangs up with a reset.
    pub(crate) fn reset(self) {
        let socket = socket2::Socket::from(self.stream);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// Has the kernel drop whatever arrives for the connection.
pub(crate) fn vanish(stream: &TcpStream) {
    // The filter's only instruction: accept nothing of the segment (BPF_RET | BPF_K, 0).
    let drop_all = socket2::SockFilter::new(0x06, 0, 0, 0);
    socket2::SockRef::from(stream).attach_filter(&[drop_all]).unwrap();
}

/// What fake peers have in their memory.
pub(crate) fn memory(addr: u64, len: u64) -> Vec<u8> {
    (addr..addr + len).map(|a| (a ^ (a >> 8) ^ (a >> 16)) as u8).collect()
}

/// A port that takes no more connections: its backlog is full.
pub(crate) struct Full {
    pub(crate) port: u16,
    _held: (Socket, Vec<Socket>),
}

impl Full {
    pub(crate) fn new() -> Self {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
        listener.listen(0).unwrap();
        let addr = listener.local_addr().unwrap();
        let port = addr.as_socket().unwrap().port();
        let mut clients = Vec::new();
        // The first that does not get through shows that no other will.
        loop {
            let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            let through = client.connect_timeout(&addr, Duration::from_millis(50)).is_ok();
            clients.push(client);
            if !through {
                return Self { port, _held: (listener, clients) };
            }
        }
    }
}

/// Opens once, for ever.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap()
    }

    pub(crate) fn wait(&self) {
        let guard = self.0.0.lock().unwrap();
        let limit = Duration::from_secs(20);
        let open = self.0.1.wait_timeout_while(guard, limit, |open| !*open).unwrap().0;
        assert!(*open, "nobody has opened the gate in {limit:?}");
    }
}

/// A client at a data port.
pub(crate) struct Raw {
    pub(crate) stream: TcpStream,
}

/// What came where a status was expected.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Answer {
    Applied,
    Rejected,
    End,
    Reset,
}

impl Raw {
    pub(crate) fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self { stream }
    }

    pub(crate) fn header(op: Op, addr: u64, len: u64) -> [u8; HEADER_LEN] {
        Header { op, version: Version::V2, addr, len }.encode()
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub(crate) fn write(&mut self, addr: u64, bytes: &[u8]) {
        self.send(&Self::header(Op::Write, addr, bytes.len() as u64));
        self.send(bytes);
    }

    pub(crate) fn ask(&mut self, addr: u64, len: u64) {
        self.send(&Self::header(Op::Read, addr, len));
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn answer(&mut self) -> Answer {
        let mut frame = [0; STATUS_LEN];
        match self.stream.read_exact(&mut frame) {
            Ok(()) => match Status::parse(&frame).unwrap() {
                Status::Applied => Answer::Applied,
                Status::Rejected => Answer::Rejected,
            },
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => Answer::End,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Answer::Reset,
            Err(e) => panic!("{e}"),
        }
    }

    pub(crate) fn half_close(&self) {
        // The other end may have reset the connection already.
        done(self.stream.shutdown(Shutdown::Write));
    }
}

/// For behaviours whose last step may fail without harm.
pub(crate) fn done<T>(_: T) {}

/// A control port that takes everything and says nothing.
pub(crate) fn silent(mut stream: TcpStream) {
    done(std::io::copy(&mut stream, &mut std::io::sink()));
}
