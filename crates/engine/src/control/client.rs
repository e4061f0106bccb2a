//! Exchanges with a peer's control port, on a thread that may block.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorferry_metadata::{SegmentName, resolve};
use tensorferry_wire::{
    Frame, FrameKind, FrameReader, MessageType, Notification, SegmentDescriptor, WireError,
    encode_frame, is_notify_success, is_probe_success, probe_request,
};

use crate::core::Core;
use crate::error::{Error, Result};
use crate::io::{Patience, Socket, WaitError};
use crate::memory::Span;
use crate::peer::Route;
use crate::transfer::BatchInner;

/// How long a peer that was reached may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks a peer for its descriptor, and finds the addresses of its data port.
pub(crate) fn fetch(
    core: &Core,
    peer: &Arc<str>,
    name: &SegmentName,
    stop: &dyn Fn() -> bool,
) -> Result<Route> {
    let began = Instant::now();
    let request = encode_frame(FrameKind::Typed(MessageType::Metadata), b"{}\n");
    let frame = exchange(core, peer, name, "descriptor", &request, began + ANSWER_TIMEOUT, stop)?;
    let descriptor = SegmentDescriptor::parse(&frame.body)
        .map_err(|fault| bad_answer(peer, "descriptor", fault))?;
    if descriptor.tcp_data_port == 0 {
        let what = "the descriptor has no tcp_data_port, expected 1 to 65535".to_owned();
        return Err(bad_answer(peer, "descriptor", WireError::Shape { what }));
    }
    let host = descriptor.tcp_data_host.as_deref().unwrap_or(&name.host);
    let addrs = resolve(host, descriptor.tcp_data_port)?;
    core.metrics.descriptors_fetched.add(1);
    Ok(Route::new(&descriptor, addrs, core.config.newest_version, began))
}

/// Asks a peer's control port whether it is alive.
pub(crate) fn probe(core: &Core, peer: &Arc<str>, name: &SegmentName) -> Result<()> {
    let request = encode_frame(FrameKind::Typed(MessageType::Probe), probe_request());
    let until = Instant::now() + ANSWER_TIMEOUT;
    let frame = exchange(core, peer, name, "probe", &request, until, &|| false)?;
    if is_probe_success(&frame.body) {
        return Ok(());
    }
    let what = "the answer does not say success".to_owned();
    Err(bad_answer(peer, "probe", WireError::Shape { what }))
}

/// Sends a notification and waits for its acknowledgement.
pub(crate) fn notify(
    core: &Core,
    peer: &Arc<str>,
    name: &SegmentName,
    notification: &Notification,
    deadline: Instant,
    stop: &dyn Fn() -> bool,
) -> Result<()> {
    let request = encode_frame(FrameKind::Typed(MessageType::Notify), &notification.to_json());
    let failed = |why: String| Error::NotifyFailed { peer: Arc::clone(peer), why };
    let frame = exchange(core, peer, name, "notify", &request, deadline, stop)
        .map_err(|e| failed(e.to_string()))?;
    if !is_notify_success(&frame.body) {
        return Err(failed("its answer does not say success".to_owned()));
    }
    core.metrics.notifications_sent.add(1);
    Ok(())
}

/// Delivers the notification of a batch whose bytes are applied; the batch is final after that.
pub(crate) fn deliver(core: &Core, peer: &Arc<str>, name: &SegmentName, batch: &Arc<BatchInner>) {
    let result = match &batch.notification {
        None => Ok(()),
        Some(notification) => {
            let stop = || batch.stop_at(Instant::now()).is_some();
            notify(core, peer, name, notification, batch.deadline, &stop)
        }
    };
    batch.finish(result.err());
}

fn bad_answer(peer: &Arc<str>, what: &'static str, fault: WireError) -> Error {
    Error::BadAnswer { peer: Arc::clone(peer), what, fault }
}

/// One request, one answer, one connection.
fn exchange(
    core: &Core,
    peer: &Arc<str>,
    name: &SegmentName,
    what: &'static str,
    request: &[u8],
    deadline: Instant,
    stop: &dyn Fn() -> bool,
) -> Result<Frame> {
    let began = Instant::now();
    let stop = || core.is_closed() || stop();
    let unreachable = |addr: Option<SocketAddr>, step: &str, why: WaitError| match why {
        WaitError::Stopped if core.is_closed() => Error::Closed,
        why => {
            let at = addr.map(|a| format!(" at {a}")).unwrap_or_default();
            let what = format!("{step} its control port{at} {}", Reason(why));
            Error::PeerUnreachable { peer: Arc::clone(peer), what, after: began.elapsed() }
        }
    };
    let addrs = resolve(&name.host, name.port)?;
    let mut last = None;
    for addr in addrs {
        let connect_until = deadline.min(Instant::now() + core.config.connect_timeout);
        match connect(addr, &Patience { deadline: connect_until, stop: &stop }) {
            Err(why) => last = Some(unreachable(Some(addr), "connecting to", why)),
            Ok(socket) => {
                let patience = Patience { deadline, stop: &stop };
                send(&socket, request, &patience)
                    .map_err(|why| unreachable(Some(addr), "sending to", why))?;
                return receive(&socket, core.config.control_accept_limit, &patience)
                    .map_err(|why| unreachable(Some(addr), "waiting for", why))?
                    .map_err(|fault| bad_answer(peer, what, fault));
            }
        }
    }
    Err(last.unwrap_or_else(|| unreachable(None, "finding", WaitError::Stopped)))
}

fn connect(addr: SocketAddr, patience: &Patience<'_>) -> std::result::Result<Socket, WaitError> {
    let socket = Socket::connect(addr).map_err(WaitError::Io)?;
    loop {
        patience.writable(&socket)?;
        if socket.connected().map_err(WaitError::Io)? {
            return Ok(socket);
        }
    }
}

fn send(
    socket: &Socket,
    mut bytes: &[u8],
    patience: &Patience<'_>,
) -> std::result::Result<(), WaitError> {
    while !bytes.is_empty() {
        match socket.send(&[Span::of(bytes)]) {
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => patience.writable(socket)?,
            Err(e) => return Err(WaitError::Io(e)),
        }
    }
    Ok(())
}

fn receive(
    socket: &Socket,
    limit: u64,
    patience: &Patience<'_>,
) -> std::result::Result<std::result::Result<Frame, WireError>, WaitError> {
    let mut reader = FrameReader::new(limit);
    let mut buffer = vec![0; 64 << 10];
    loop {
        match socket.receive_bytes(&mut buffer) {
            Ok(0) => {
                let text = "it closed the connection without an answer";
                return Err(WaitError::Io(io::Error::new(io::ErrorKind::UnexpectedEof, text)));
            }
            Ok(n) => match reader.feed(&buffer[..n]) {
                Err(e) => return Ok(Err(e)),
                Ok((_, Some(frame))) => return Ok(Ok(frame)),
                Ok((_, None)) => {}
            },
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => patience.readable(socket)?,
            Err(e) => return Err(WaitError::Io(e)),
        }
    }
}

struct Reason(WaitError);

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            WaitError::TimedOut => f.write_str("took too long"),
            WaitError::Stopped => f.write_str("was given up"),
            WaitError::Io(e) => write!(f, "failed ({e})"),
        }
    }
}
