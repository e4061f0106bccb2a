//! TCP sockets as the engine uses them: non-blocking, close-on-exec, without SIGPIPE.
#![expect(unsafe_code, reason = "vectored IO on memory that users have lent")]

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, TcpKeepalive, Type};

use crate::memory::Span;

/// The kernel's limit for the pieces of one call.
pub(crate) const MAX_SPANS: usize = 1024;

/// A connected or connecting TCP socket. Clones are the same socket; it is closed with the last.
#[derive(Clone, Debug)]
pub(crate) struct Socket {
    inner: Arc<socket2::Socket>,
}

/// A listening TCP socket.
#[derive(Debug)]
pub(crate) struct Listener {
    inner: socket2::Socket,
}

/// What the kernel knows of how a connection goes on.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Pulse {
    /// Bytes that the peer's kernel has acknowledged.
    pub(crate) acknowledged: u64,
    /// Bytes that have arrived.
    pub(crate) received: u64,
    /// How often, in a row, the peer's kernel was asked for a sign of life and gave none.
    pub(crate) unanswered: u8,
    /// How many segments were sent again since the beginning.
    pub(crate) sent_again: u32,
    /// How long ago the last sign of life came.
    pub(crate) silent: Duration,
    /// The connection has ended, by a reset or because the kernel gave it up.
    pub(crate) over: bool,
}

/// So many signs of life that do not come are no accident.
const UNANSWERED: u8 = 3;

impl Pulse {
    /// Whether the peer's kernel is gone, or the way to it: that of a peer that is merely frozen answers.
    pub(crate) fn is_gone_for(self, limit: Duration) -> bool {
        self.unanswered >= UNANSWERED && self.silent >= limit
    }
}

/// The start of the kernel's `tcp_info`, which grows at its end from version to version.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TcpInfo {
    state: u8,
    ca_state: u8,
    /// Retransmissions in a row.
    retransmits: u8,
    /// Window probes, or keep-alive probes, in a row.
    probes: u8,
    other: [u8; 4],
    rto: u32,
    ato: u32,
    mss: [u32; 2],
    segments: [u32; 5],
    last: [u32; 3],
    /// Milliseconds.
    last_ack_received: u32,
    path: [u32; 10],
    sent_again: u32,
    pacing: [u64; 2],
    bytes_acked: u64,
    bytes_received: u64,
}

/// `TCP_CLOSE`, as the kernel numbers the states of a connection.
const STATE_CLOSED: u8 = 7;

impl Socket {
    /// Begins to connect; the socket is writable when that has ended.
    pub(crate) fn connect(to: SocketAddr) -> io::Result<Self> {
        let socket = new_socket(Domain::for_address(to))?;
        socket.set_tcp_nodelay(true)?;
        match socket.connect(&SockAddr::from(to)) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        Ok(Self { inner: Arc::new(socket) })
    }

    /// How the connecting ended; `Ok(false)` if it has not.
    pub(crate) fn connected(&self) -> io::Result<bool> {
        if let Some(error) = self.inner.take_error()? {
            return Err(error);
        }
        match self.inner.peer_addr() {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Sends from the spans, which the kernel checks: memory that is not mapped is `EFAULT`.
    pub(crate) fn send(&self, spans: &[Span]) -> io::Result<usize> {
        let message = message(spans);
        // SAFETY: `message` and the spans live during the call. The kernel only reads what the spans name.
        let n = unsafe { libc::sendmsg(self.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Receives into the spans; 0 is the end of the stream.
    ///
    /// # Safety
    /// Each span is memory of the engine's own, or lent to the engine for this very use: registered and
    /// pinned, or the local memory of a READ that is not final. Spans that are not mapped are `EFAULT`.
    pub(crate) unsafe fn receive(&self, spans: &[Span]) -> io::Result<usize> {
        let mut message = message(spans);
        // SAFETY: `message` and the spans live during the call; the kernel writes only where the caller
        // vouches that the engine may.
        let n = unsafe { libc::recvmsg(self.as_raw_fd(), &raw mut message, 0) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Receives into bytes of the engine's own.
    pub(crate) fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `bytes` is ours alone during the call.
        unsafe { self.receive(&[Span::of_mut(bytes)]) }
    }

    /// Whether nothing has arrived that was not received: no byte, no end of the stream, no error. The kernel tells an
    /// error once; whoever asks and hears "no" leaves the connection to its IO thread, to which it has just ended then.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = 0_u8;
        // SAFETY: `byte` is ours alone during the call.
        let n = unsafe {
            libc::recv(
                self.as_raw_fd(),
                (&raw mut byte).cast(),
                1,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        };
        n < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
    }

    /// The address of the peer, for people: where it can be told no more, that is said.
    pub(crate) fn peer_text(&self) -> String {
        let addr = self.inner.peer_addr().ok().and_then(|addr| addr.as_socket());
        addr.map_or_else(|| "a peer that has gone".to_owned(), |addr| addr.to_string())
    }

    /// The host of the peer, for the measure of what is logged about it.
    pub(crate) fn peer_host(&self) -> String {
        let addr = self.inner.peer_addr().ok().and_then(|addr| addr.as_socket());
        addr.map_or_else(String::new, |addr| addr.ip().to_string())
    }

    /// Has the peer see a reset instead of an orderly end when the socket is closed.
    pub(crate) fn reset_on_close(&self) {
        let _ = self.inner.set_linger(Some(std::time::Duration::ZERO));
    }

    /// Says that nothing more will be sent.
    pub(crate) fn half_close(&self) {
        // It fails only if the connection is gone already, which the next receive tells.
        let _ = self.inner.shutdown(std::net::Shutdown::Write);
    }

    /// The error that the kernel keeps for this socket, if any.
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        self.inner.take_error().unwrap_or_else(Some)
    }

    /// How the connection goes on.
    pub(crate) fn pulse(&self) -> io::Result<Pulse> {
        let mut info = TcpInfo::default();
        let mut len = size_of::<TcpInfo>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `info`, any bytes of which are a valid `TcpInfo`.
        let rc = unsafe {
            libc::getsockopt(
                self.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                (&raw mut info).cast(),
                &raw mut len,
            )
        };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Pulse {
            acknowledged: info.bytes_acked,
            received: info.bytes_received,
            unanswered: info.retransmits.max(info.probes),
            sent_again: info.sent_again,
            silent: Duration::from_millis(info.last_ack_received.into()),
            over: info.state == STATE_CLOSED,
        })
    }

    /// Has the kernel ask the peer's for a sign of life every `interval` when nothing has come for `idle`, if nothing
    /// else is on its way that it has to answer. (Not `TCP_USER_TIMEOUT`: it ends connections to peers that live and
    /// do not read.)
    pub(crate) fn ask_for_life(&self, idle: Duration, interval: Duration) {
        let often = TcpKeepalive::new().with_time(idle).with_interval(interval);
        // Most that the kernel takes: who looks after the connection decides when it is enough.
        let _ = self.inner.set_tcp_keepalive(&often.with_retries(127));
    }

    /// Bytes (and the end of the stream, as one) that the peer's kernel has not acknowledged.
    pub(crate) fn unacknowledged(&self) -> io::Result<u32> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: SIOCOUTQ (TIOCOUTQ) writes one int.
        let rc = unsafe { libc::ioctl(self.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.max(0).unsigned_abs()) }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

impl Listener {
    /// Binds and listens, so that a port is known to be ours before it is published.
    pub(crate) fn bind(addr: SocketAddr, backlog: u32) -> io::Result<Self> {
        let socket = new_socket(Domain::for_address(addr))?;
        if addr.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
            socket.set_only_v6(false)?;
        }
        // Ports in TIME_WAIT are free for us; a port that somebody listens on is not.
        socket.set_reuse_address(true)?;
        socket.bind(&SockAddr::from(addr))?;
        socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
        Ok(Self { inner: socket })
    }

    /// The next connection; `WouldBlock` if there is none.
    pub(crate) fn accept(&self) -> io::Result<(Socket, Option<SocketAddr>)> {
        let (socket, from) = self.inner.accept()?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        Ok((Socket { inner: Arc::new(socket) }, from.as_socket()))
    }

    /// Whether a connection waits to be accepted.
    pub(crate) fn is_anyone_waiting(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, alive during the call, which does not wait.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    pub(crate) fn port(&self) -> io::Result<u16> {
        Ok(self.inner.local_addr()?.as_socket().map_or(0, |a| a.port()))
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

fn new_socket(domain: Domain) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn message(spans: &[Span]) -> libc::msghdr {
    debug_assert!(spans.len() <= MAX_SPANS, "the kernel takes no more at once");
    // SAFETY: a msghdr of zeroes is an empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // A span is laid out as an iovec (checked in memory.rs); the kernel does not write iovecs.
    message.msg_iov = spans.as_ptr().cast_mut().cast();
    message.msg_iovlen = spans.len() as _;
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HostBuffer;

    fn pair() -> (Socket, Socket) {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), 8).unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], listener.port().unwrap()));
        let a = Socket::connect(to).unwrap();
        let b = loop {
            match listener.accept() {
                Ok((b, _)) => break b,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) => panic!("{e}"),
            }
        };
        while !a.connected().unwrap() {
            std::thread::yield_now();
        }
        (a, b)
    }

    fn receive(socket: &Socket, span: Span) -> io::Result<usize> {
        loop {
            // SAFETY: the tests pass their own buffers, or addresses that are never mapped.
            match unsafe { socket.receive(&[span]) } {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    #[test]
    fn spans_go_out_and_come_in() {
        let (a, b) = pair();
        let buffer = HostBuffer::zeroed(100).unwrap();
        buffer.write(0, b"hello world");
        let spans =
            [Span { addr: buffer.addr() + 6, len: 5 }, Span { addr: buffer.addr(), len: 5 }];
        assert_eq!(a.send(&spans).unwrap(), 10);
        assert_eq!(receive(&b, Span { addr: buffer.addr() + 50, len: 10 }).unwrap(), 10);
        assert_eq!(buffer.read(50, 10), b"worldhello");
        a.half_close();
        assert_eq!(receive(&b, Span { addr: buffer.addr(), len: 1 }).unwrap(), 0);
    }

    #[test]
    fn what_has_arrived_breaks_the_quiet_and_stays_to_be_received() {
        let (a, b) = pair();
        assert!(a.is_quiet());
        b.send(&[Span::of(b"x")]).unwrap();
        while a.is_quiet() {
            std::thread::yield_now();
        }
        let buffer = HostBuffer::zeroed(1).unwrap();
        assert_eq!(receive(&a, Span { addr: buffer.addr(), len: 1 }).unwrap(), 1);
        assert!(a.is_quiet() && buffer.read(0, 1) == b"x");
        b.half_close();
        while a.is_quiet() {
            std::thread::yield_now();
        }
        let (a, b) = pair();
        b.reset_on_close();
        drop(b);
        while a.is_quiet() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn unmapped_memory_is_an_error_both_ways() {
        let (a, b) = pair();
        let nowhere = Span { addr: 4096, len: 8 };
        assert_eq!(a.send(&[nowhere]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        b.send(&[Span::of(b"12345678")]).unwrap();
        assert_eq!(receive(&a, nowhere).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn a_refused_connect_says_so() {
        let port = Listener::bind("127.0.0.1:0".parse().unwrap(), 8).unwrap().port().unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let error = match Socket::connect(to) {
            Err(e) => e,
            Ok(socket) => loop {
                match socket.connected() {
                    Ok(false) => std::thread::yield_now(),
                    Ok(true) => panic!("nobody listens"),
                    Err(e) => break e,
                }
            },
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn the_kernel_tells_how_a_connection_goes_on() {
        assert_eq!(std::mem::offset_of!(TcpInfo, last_ack_received), 56);
        assert_eq!(std::mem::offset_of!(TcpInfo, sent_again), 100);
        assert_eq!(std::mem::offset_of!(TcpInfo, bytes_acked), 120);
        let (a, b) = pair();
        let before = a.pulse().unwrap();
        a.send(&[Span::of(&[1; 1000])]).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while a.unacknowledged().unwrap() > 0 {
            assert!(std::time::Instant::now() < until, "it is acknowledged");
        }
        let now = a.pulse().unwrap();
        assert_eq!(now.acknowledged, before.acknowledged + 1000);
        assert_eq!(b.pulse().unwrap().received, 1000);
        assert!(!now.over && !now.is_gone_for(Duration::ZERO));
        b.reset_on_close();
        drop(b);
        while !a.pulse().unwrap().over {
            assert!(std::time::Instant::now() < until, "the reset arrives");
        }
    }

    #[test]
    fn two_listeners_do_not_share_a_port() {
        let first = Listener::bind("127.0.0.1:0".parse().unwrap(), 8).unwrap();
        let same = SocketAddr::from(([127, 0, 0, 1], first.port().unwrap()));
        assert_eq!(Listener::bind(same, 8).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
