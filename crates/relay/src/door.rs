//! A port of a copy: who may come in, and what they are told.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};

use mio::net::{TcpListener, TcpStream};
use socket2::{Domain, Socket, Type};

use crate::Counts;
use crate::link::Idle;
use crate::rule::{Accept, Rule, Way};

const BACKLOG: i32 = 1024;

pub(crate) struct Door {
    pub(crate) address: SocketAddr,
    pub(crate) accept: Accept,
    pub(crate) to_target: Rule,
    pub(crate) to_initiator: Rule,
    pub(crate) idle: Option<Idle>,
    /// Of connections that are gone, and how many there have been.
    pub(crate) counts: Counts,
    /// Bound to the port and never listening: the port stays ours, and refuses, while nobody listens.
    _holder: Socket,
    listener: Option<TcpListener>,
    full: Option<Full>,
}

/// A listener that accepts nothing, and the connection that fills its queue.
struct Full {
    _filler: TcpStream,
    listener: StdListener,
}

impl Full {
    fn new(address: SocketAddr) -> io::Result<Self> {
        // One connection fits a queue of length zero. What comes later is dropped by the kernel.
        let listener = listening(address, 0)?;
        listener.set_nonblocking(true)?;
        let filler = TcpStream::connect(address)?;
        Ok(Self { _filler: filler, listener })
    }

    /// The same listener with room: were it closed, the kernel could reset whoever calls at that moment.
    fn let_in(self) -> io::Result<StdListener> {
        // The filler is the first in the queue.
        drop(self.listener.accept());
        socket2::SockRef::from(&self.listener).listen(BACKLOG)?;
        Ok(self.listener)
    }
}

impl Door {
    /// A door that is still closed, at a port that the kernel chooses.
    pub(crate) fn new(host: std::net::IpAddr) -> io::Result<Self> {
        let holder = bound(SocketAddr::new(host, 0))?;
        let address = holder.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            address,
            accept: Accept::Refuse,
            to_target: Rule::default(),
            to_initiator: Rule::default(),
            idle: None,
            counts: Counts::default(),
            _holder: holder,
            listener: None,
            full: None,
        })
    }

    pub(crate) fn listener(&mut self) -> Option<&mut TcpListener> {
        self.listener.as_mut()
    }

    /// Changes what happens to those who come.
    pub(crate) fn set_accept(&mut self, accept: Accept) -> io::Result<()> {
        let listens = matches!(accept, Accept::Pass | Accept::Silent);
        if !listens {
            self.listener = None;
        }
        if accept == Accept::Refuse {
            self.full = None;
        }
        if listens && self.listener.is_none() {
            let listener = match self.full.take() {
                Some(full) => full.let_in()?,
                None => listening(self.address, BACKLOG)?,
            };
            listener.set_nonblocking(true)?;
            self.listener = Some(TcpListener::from_std(listener));
        }
        if accept == Accept::Never && self.full.is_none() {
            self.full = Some(Full::new(self.address)?);
        }
        self.accept = accept;
        Ok(())
    }

    pub(crate) fn set_rule(&mut self, rule: &Rule) {
        if rule.is_for(Way::ToTarget) {
            self.to_target = rule.clone();
        }
        if rule.is_for(Way::ToInitiator) {
            self.to_initiator = rule.clone();
        }
    }
}

fn bound(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn listening(address: SocketAddr, backlog: i32) -> io::Result<StdListener> {
    let socket = bound(address)?;
    socket.listen(backlog)?;
    Ok(socket.into())
}
