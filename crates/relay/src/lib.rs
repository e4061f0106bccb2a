//! A relay that stands before an engine and misbehaves on command.
//!
//! An initiator opens the segment by the relay's control port instead of the engine's own. The
//! relay passes on what is asked and answered there, but says in descriptors that the data port is
//! its own; so all bytes of READs and WRITEs come through it as well. What it does with them can be
//! changed at any time: they come late, slowly, one by one or wrong, connections end in the middle,
//! or nobody answers at all.
//!
//! ```no_run
//! use tensorferry_relay::{End, Relay, Rule, Way};
//!
//! let relay = Relay::start("127.0.0.1:15773", 1)?;
//! // The eighth byte of the answers is the last that arrives.
//! relay.rule(Rule::new(Way::ToInitiator).after(8, End::Rst))?;
//! println!("open {} instead", relay.name(0));
//! # Ok::<(), tensorferry_relay::Error>(())
//! ```
#![forbid(unsafe_code)]

mod answers;
mod command;
mod door;
mod event_loop;
mod link;
mod pipe;
mod rule;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::{Poll, Waker};
use serde::Serialize;

pub use command::{Answer, Command};
use event_loop::{EventLoop, Order, Task, WAKER};
use link::Idle;
pub use rule::{Accept, After, Connections, Copies, Corrupt, End, Port, Rule, Way};

/// Why a relay does not start, or does not do what it was told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The target's name leads nowhere.
    #[error("{name:?} is no address of a control port, host:port: {source}")]
    Target {
        /// The name as given.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A port cannot be listened at.
    #[error("the relay cannot listen: {0}")]
    Listen(#[source] io::Error),
    /// There are not so many copies.
    #[error("there is no copy {copy}: there are {copies}, counted from 0")]
    NoSuchCopy {
        /// The one that was meant.
        copy: usize,
        /// How many there are.
        copies: usize,
    },
    /// The relay's thread has ended.
    #[error("the relay has ended")]
    Gone,
}

/// Where a copy listens.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Address {
    /// The control port: what initiators open.
    pub control: SocketAddr,
    /// The data port.
    pub data: SocketAddr,
}

/// What has happened at a port of a copy.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Counts {
    /// Connections that are open.
    pub open: u64,
    /// Connections that were accepted so far.
    pub total: u64,
    /// Connections that a rule or a kill has ended, wholly or one way.
    pub ended: u64,
    /// Bytes given to the target.
    pub to_target: u64,
    /// Bytes given to initiators.
    pub to_initiator: u64,
    /// Bytes passed on wrong.
    pub corrupted: u64,
}

/// What has happened at a copy.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct CopyCounts {
    /// At its control port.
    pub control: Counts,
    /// At its data port.
    pub data: Counts,
}

/// A running relay; it ends when it is dropped.
#[derive(Debug)]
pub struct Relay {
    addresses: Vec<Address>,
    tasks: Option<Sender<Task>>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// So many copies before the engine whose control port is at `target`, on ports of 127.0.0.1
    /// that the kernel chooses.
    ///
    /// # Errors
    /// [`Error::Target`] and [`Error::Listen`].
    pub fn start(target: &str, copies: usize) -> Result<Self, Error> {
        Self::start_on(Ipv4Addr::LOCALHOST.into(), target, copies)
    }

    /// The same, on an address of this machine.
    ///
    /// # Errors
    /// [`Error::Target`] and [`Error::Listen`].
    pub fn start_on(host: IpAddr, target: &str, copies: usize) -> Result<Self, Error> {
        let target = address(target)?;
        let poll = Poll::new().map_err(Error::Listen)?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER).map_err(Error::Listen)?);
        let (tasks, received) = channel();
        let event_loop =
            EventLoop::new(poll, received, host, target, copies).map_err(Error::Listen)?;
        let addresses = event_loop.addresses();
        let thread = std::thread::Builder::new()
            .name("relay".into())
            .spawn(move || event_loop.run())
            .map_err(Error::Listen)?;
        Ok(Self { addresses, tasks: Some(tasks), waker, thread: Some(thread) })
    }

    /// Where the copies listen.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The name by which initiators open the segment through a copy.
    ///
    /// # Panics
    /// If there is no such copy.
    #[must_use]
    pub fn name(&self, copy: usize) -> String {
        self.addresses[copy].control.to_string()
    }

    /// From now on bytes are treated like this. It takes the place of the rule that was there.
    ///
    /// # Errors
    /// [`Error::NoSuchCopy`] and [`Error::Gone`].
    pub fn rule(&self, rule: Rule) -> Result<(), Error> {
        self.order(Order::Rule(rule)).map(drop)
    }

    /// From now on those who connect are treated like this.
    ///
    /// # Errors
    /// [`Error::NoSuchCopy`], [`Error::Listen`] and [`Error::Gone`].
    pub fn accept(&self, copies: Option<Copies>, port: Port, how: Accept) -> Result<(), Error> {
        self.order(Order::Accept(copies, port, how)).map(drop)
    }

    /// From now on connections end like this when nothing has moved on them for so long; `None`
    /// keeps them.
    ///
    /// # Errors
    /// [`Error::NoSuchCopy`] and [`Error::Gone`].
    pub fn idle(
        &self,
        copies: Option<Copies>,
        port: Port,
        idle: Option<(Duration, End)>,
    ) -> Result<(), Error> {
        let idle = idle.map(|(after, end)| Idle { after, end });
        self.order(Order::Idle(copies, port, idle)).map(drop)
    }

    /// Ends the connections that are open now; of both ports, if none is named.
    ///
    /// # Errors
    /// [`Error::NoSuchCopy`] and [`Error::Gone`].
    pub fn kill(&self, copies: Option<Copies>, port: Option<Port>, how: End) -> Result<(), Error> {
        self.order(Order::Kill(copies, port, how)).map(drop)
    }

    /// From now on the copies stand before another engine. Its data port is known when its
    /// descriptor has been asked for; until then data connections still go to the old one.
    ///
    /// # Errors
    /// [`Error::Target`], [`Error::NoSuchCopy`] and [`Error::Gone`].
    pub fn retarget(&self, copies: Option<Copies>, target: &str) -> Result<(), Error> {
        self.order(Order::Retarget(copies, address(target)?)).map(drop)
    }

    /// What has happened so far, for each copy.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub fn counts(&self) -> Result<Vec<CopyCounts>, Error> {
        self.order(Order::Counts)
    }

    /// Has the thread carry out an order, and waits until it has.
    fn order(&self, order: Order) -> Result<Vec<CopyCounts>, Error> {
        let (answer, answered) = channel();
        let tasks = self.tasks.as_ref().ok_or(Error::Gone)?;
        tasks.send((order, answer)).map_err(|_| Error::Gone)?;
        self.waker.wake().map_err(|_| Error::Gone)?;
        answered.recv().map_err(|_| Error::Gone)?
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.tasks = None;
        // If it cannot be woken it has ended.
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

fn address(name: &str) -> Result<SocketAddr, Error> {
    let failed = |source| Error::Target { name: name.to_owned(), source };
    let mut found = name.to_socket_addrs().map_err(failed)?;
    found.next().ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}
