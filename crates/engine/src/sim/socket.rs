//! Sockets as the engine sees them in unit tests: the kernel's, or the simulation's.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crate::io::{KernelListener, KernelSocket, Pulse};
use crate::memory::Span;
use crate::sim::net::{self, EndId};

/// A TCP socket of one of the two kinds.
#[derive(Clone, Debug)]
pub(crate) enum Socket {
    Kernel(KernelSocket),
    Simulated(Arc<Handle>),
}

/// A listening TCP socket of one of the two kinds.
#[derive(Debug)]
pub(crate) enum Listener {
    Kernel(KernelListener),
    Simulated(usize),
}

/// An end of a simulated connection; it is closed with its handle.
#[derive(Debug)]
pub(crate) struct Handle {
    id: EndId,
}

impl Drop for Handle {
    fn drop(&mut self) {
        net::with_any(|net| net.close(self.id));
    }
}

impl Socket {
    pub(super) fn of(id: EndId) -> Self {
        Self::Simulated(Arc::new(Handle { id }))
    }

    pub(crate) fn connect(to: SocketAddr) -> io::Result<Self> {
        match net::with_any(|net| net.connect(to)) {
            Some(made) => made.map(Self::of),
            None => KernelSocket::connect(to).map(Self::Kernel),
        }
    }

    pub(crate) fn connected(&self) -> io::Result<bool> {
        match self {
            Self::Kernel(socket) => socket.connected(),
            Self::Simulated(end) => net::with(|net| net.connected(end.id)),
        }
    }

    pub(crate) fn send(&self, spans: &[Span]) -> io::Result<usize> {
        match self {
            Self::Kernel(socket) => socket.send(spans),
            Self::Simulated(end) => net::with(|net| net.send(end.id, spans)),
        }
    }

    /// # Safety
    /// As the kernel's.
    #[expect(unsafe_code, reason = "has the same promise as what it stands for")]
    pub(crate) unsafe fn receive(&self, spans: &[Span]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise is handed on.
            Self::Kernel(socket) => unsafe { socket.receive(spans) },
            Self::Simulated(end) => net::with(|net| net.receive(end.id, spans)),
        }
    }

    pub(crate) fn receive_bytes(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Kernel(socket) => socket.receive_bytes(bytes),
            Self::Simulated(end) => net::with(|net| net.receive(end.id, &[Span::of_mut(bytes)])),
        }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Kernel(socket) => socket.is_quiet(),
            Self::Simulated(end) => net::with(|net| net.is_quiet(end.id)),
        }
    }

    pub(crate) fn reset_on_close(&self) {
        match self {
            Self::Kernel(socket) => socket.reset_on_close(),
            Self::Simulated(end) => net::with(|net| net.reset_on_close(end.id)),
        }
    }

    pub(crate) fn half_close(&self) {
        match self {
            Self::Kernel(socket) => socket.half_close(),
            Self::Simulated(end) => net::with(|net| net.half_close(end.id)),
        }
    }

    pub(crate) fn take_error(&self) -> Option<io::Error> {
        match self {
            Self::Kernel(socket) => socket.take_error(),
            Self::Simulated(end) => net::with(|net| net.take_error(end.id)),
        }
    }

    pub(crate) fn peer_text(&self) -> String {
        match self {
            Self::Kernel(socket) => socket.peer_text(),
            Self::Simulated(end) => end.id.to_string(),
        }
    }

    pub(crate) fn peer_host(&self) -> String {
        match self {
            Self::Kernel(socket) => socket.peer_host(),
            Self::Simulated(end) => end.id.side.to_string(),
        }
    }

    pub(crate) fn pulse(&self) -> io::Result<Pulse> {
        match self {
            Self::Kernel(socket) => socket.pulse(),
            Self::Simulated(end) => Ok(net::with(|net| net.pulse(end.id))),
        }
    }

    pub(crate) fn ask_for_life(&self, idle: Duration, interval: Duration) {
        match self {
            Self::Kernel(socket) => socket.ask_for_life(idle, interval),
            // The simulation's kernels always do.
            Self::Simulated(_) => {}
        }
    }

    pub(crate) fn unacknowledged(&self) -> io::Result<u32> {
        match self {
            Self::Kernel(socket) => socket.unacknowledged(),
            Self::Simulated(end) => Ok(net::with(|net| net.unacknowledged(end.id))),
        }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Kernel(socket) => socket.as_raw_fd(),
            Self::Simulated(end) => net::end_fd(end.id),
        }
    }
}

impl Listener {
    pub(crate) fn bind(addr: SocketAddr, backlog: u32) -> io::Result<Self> {
        KernelListener::bind(addr, backlog).map(Self::Kernel)
    }

    pub(crate) fn accept(&self) -> io::Result<(Socket, Option<SocketAddr>)> {
        match self {
            Self::Kernel(listener) => {
                listener.accept().map(|(socket, from)| (Socket::Kernel(socket), from))
            }
            Self::Simulated(index) => {
                net::with(|net| net.accept(*index)).map(|id| (Socket::of(id), None))
            }
        }
    }

    pub(crate) fn is_anyone_waiting(&self) -> bool {
        match self {
            Self::Kernel(listener) => listener.is_anyone_waiting(),
            Self::Simulated(index) => net::with(|net| net.is_anyone_waiting(*index)),
        }
    }

    pub(crate) fn port(&self) -> io::Result<u16> {
        match self {
            Self::Kernel(listener) => listener.port(),
            Self::Simulated(_) => Ok(0),
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Kernel(listener) => listener.as_raw_fd(),
            Self::Simulated(index) => net::listener_fd(*index),
        }
    }
}
