//! The one thread that owns all sockets of a relay.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Registry, Token};

use crate::answers::{Answers, Names};
use crate::door::Door;
use crate::link::{Idle, Link, Step, scratch};
use crate::rule::{Accept, Connections, Copies, End, Port, Rule};
use crate::{Address, CopyCounts, Counts, Error};

pub(crate) const WAKER: Token = Token(usize::MAX);
/// Tokens of doors lie below it, two to a copy; those of links above, two to a link.
const FIRST_LINK: usize = 1 << 32;
/// When accepting is tried again after the process had no descriptors left.
const LATER: Duration = Duration::from_millis(20);

/// What the thread is told to do.
pub(crate) enum Order {
    Rule(Rule),
    Accept(Option<Copies>, Port, Accept),
    Idle(Option<Copies>, Port, Option<Idle>),
    Kill(Option<Copies>, Option<Port>, End),
    Retarget(Option<Copies>, SocketAddr),
    Counts,
}

/// An order, and where what became of it is said.
pub(crate) type Task = (Order, Sender<Result<Vec<CopyCounts>, Error>>);

pub(crate) struct EventLoop {
    poll: Poll,
    tasks: Receiver<Task>,
    copies: Vec<Copy>,
    links: BTreeMap<usize, Link>,
    next_link: usize,
    /// Links with something to do at a time; it may be past.
    due: BTreeMap<usize, Instant>,
    /// Doors at which somebody may be waiting whom the poller will not tell of again.
    accept_again: Option<Instant>,
    scratch: Vec<u8>,
}

struct Copy {
    control: Door,
    data: Door,
    target: SocketAddr,
    /// The target's data port, as of the latest descriptor that has passed.
    target_data: Option<SocketAddr>,
}

impl EventLoop {
    pub(crate) fn new(
        poll: Poll,
        tasks: Receiver<Task>,
        host: IpAddr,
        target: SocketAddr,
        copies: usize,
    ) -> io::Result<Self> {
        let copy = |_| {
            let (control, data) = (Door::new(host)?, Door::new(host)?);
            Ok(Copy { control, data, target, target_data: None })
        };
        let mut made = Self {
            poll,
            tasks,
            copies: (0..copies).map(copy).collect::<io::Result<_>>()?,
            links: BTreeMap::new(),
            next_link: 0,
            due: BTreeMap::new(),
            accept_again: None,
            scratch: scratch(),
        };
        for copy in 0..copies {
            made.set_accept(copy, Port::Control, Accept::Pass)?;
            made.set_accept(copy, Port::Data, Accept::Pass)?;
        }
        Ok(made)
    }

    pub(crate) fn addresses(&self) -> Vec<Address> {
        let of = |copy: &Copy| Address { control: copy.control.address, data: copy.data.address };
        self.copies.iter().map(of).collect()
    }

    /// Runs until nobody is left to give orders.
    pub(crate) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        loop {
            let timeout = self.timeout(Instant::now());
            if let Err(e) = self.poll.poll(&mut events, timeout)
                && e.kind() != io::ErrorKind::Interrupted
            {
                return;
            }
            let now = Instant::now();
            for event in &events {
                if event.token().0 >= FIRST_LINK && event.token() != WAKER {
                    let at = event.token().0 - FIRST_LINK;
                    if let Some(link) = self.links.get_mut(&(at / 2)) {
                        link.event(at % 2 == 1, event);
                        self.due.insert(at / 2, now);
                    }
                } else if event.token() != WAKER {
                    self.accept(event.token().0, now);
                }
            }
            if self.accept_again.is_some_and(|at| at <= now) {
                self.accept_again = None;
                (0..2 * self.copies.len()).for_each(|door| self.accept(door, now));
            }
            if !self.obey(now) {
                return;
            }
            self.step_due(now);
        }
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        let first = self.due.values().chain(&self.accept_again).min()?;
        // The poller counts in milliseconds and rounds up, so that nothing is early.
        Some(first.saturating_duration_since(now))
    }

    /// Does what it was told; false if nobody can tell it anything any more.
    fn obey(&mut self, now: Instant) -> bool {
        loop {
            match self.tasks.try_recv() {
                Ok((order, answer)) => {
                    // Whoever does not wait for the answer is not told.
                    let _ = answer.send(self.carry_out(order, now));
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn carry_out(&mut self, order: Order, now: Instant) -> Result<Vec<CopyCounts>, Error> {
        match order {
            Order::Rule(rule) => self.rule(&rule, now)?,
            Order::Accept(copies, port, accept) => {
                for copy in self.chosen(copies.as_ref())? {
                    self.set_accept(copy, port, accept).map_err(Error::Listen)?;
                }
            }
            Order::Idle(copies, port, idle) => {
                for copy in self.chosen(copies.as_ref())? {
                    self.door(copy, port).idle = idle;
                }
                self.due.extend(self.links.keys().map(|id| (*id, now)));
            }
            Order::Kill(copies, port, end) => {
                let chosen = self.chosen(copies.as_ref())?;
                let is_meant = |link: &Link| {
                    chosen.contains(&link.copy) && port.is_none_or(|port| port == link.port)
                };
                let meant: Vec<usize> = self
                    .links
                    .iter()
                    .filter(|(_, link)| is_meant(link))
                    .map(|(id, _)| *id)
                    .collect();
                for id in meant {
                    let step = self.links.get_mut(&id).map(|link| link.end(end, now));
                    self.after(id, step.unwrap_or_default(), now);
                }
            }
            Order::Retarget(copies, target) => {
                for copy in self.chosen(copies.as_ref())? {
                    self.copies[copy].target = target;
                }
            }
            Order::Counts => return Ok(self.counts()),
        }
        Ok(Vec::new())
    }

    fn rule(&mut self, rule: &Rule, now: Instant) -> Result<(), Error> {
        let chosen = self.chosen(rule.copies.as_ref())?;
        if rule.connections != Connections::Existing {
            for copy in &chosen {
                self.door(*copy, rule.port).set_rule(rule);
            }
        }
        if rule.connections != Connections::Future {
            for (id, link) in &mut self.links {
                if link.port == rule.port && chosen.contains(&link.copy) {
                    link.set_rule(rule);
                    self.due.insert(*id, now);
                }
            }
        }
        Ok(())
    }

    fn chosen(&self, copies: Option<&Copies>) -> Result<Vec<usize>, Error> {
        let chosen = match copies {
            None => (0..self.copies.len()).collect(),
            Some(Copies::One(copy)) => vec![*copy],
            Some(Copies::Some(copies)) => copies.clone(),
        };
        match chosen.iter().find(|copy| **copy >= self.copies.len()) {
            Some(copy) => Err(Error::NoSuchCopy { copy: *copy, copies: self.copies.len() }),
            None => Ok(chosen),
        }
    }

    fn door(&mut self, copy: usize, port: Port) -> &mut Door {
        match port {
            Port::Control => &mut self.copies[copy].control,
            Port::Data => &mut self.copies[copy].data,
        }
    }

    fn set_accept(&mut self, copy: usize, port: Port, accept: Accept) -> io::Result<()> {
        let listened = self.door(copy, port).listener().is_some();
        self.door(copy, port).set_accept(accept)?;
        let registry = self.poll.registry().try_clone()?;
        match self.door(copy, port).listener() {
            Some(listener) if !listened => {
                registry.register(listener, door_token(copy, port), Interest::READABLE)
            }
            _ => Ok(()),
        }
    }

    /// Lets everybody in who waits at a door.
    fn accept(&mut self, door: usize, now: Instant) {
        let (copy, port) = (door / 2, if door % 2 == 1 { Port::Data } else { Port::Control });
        loop {
            let Some(listener) = self.door(copy, port).listener() else { return };
            match listener.accept() {
                Ok((stream, _)) => {
                    // A target that cannot even be called is like one that refuses.
                    let _ = self.admit(copy, port, stream, now);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => {
                    self.accept_again = Some(now + LATER);
                    return;
                }
            }
        }
    }

    fn admit(
        &mut self,
        copy: usize,
        port: Port,
        stream: TcpStream,
        now: Instant,
    ) -> io::Result<()> {
        let names = self.copies[copy].names();
        let target = match port {
            Port::Control => Some(names.target),
            Port::Data => self.copies[copy].target_data,
        };
        let door = self.door(copy, port);
        door.counts.total += 1;
        let rules = (door.to_target.clone(), door.to_initiator.clone());
        let target = match (door.accept, target) {
            (Accept::Pass, Some(target)) => TcpStream::connect(target).map(Some),
            (Accept::Pass, None) => Err(io::ErrorKind::NotConnected.into()),
            _ => Ok(None),
        };
        let answers = (port == Port::Control).then(|| Answers::new(names));
        let refused = target.is_err();
        let sides = (stream, target.unwrap_or_default());
        let mut link = Link::new((copy, port), now, sides, rules, answers);
        if refused {
            link.end(End::Rst, now);
            return Ok(());
        }
        let id = self.next_link;
        self.next_link += 1;
        register(self.poll.registry(), id, &mut link)?;
        self.links.insert(id, link);
        Ok(())
    }

    fn step_due(&mut self, now: Instant) {
        let due: Vec<usize> =
            self.due.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect();
        for id in due {
            self.due.remove(&id);
            let Some(link) = self.links.get_mut(&id) else { continue };
            let copy = &mut self.copies[link.copy];
            let idle = if link.port == Port::Data { copy.data.idle } else { copy.control.idle };
            let step = link.step(now, idle, &mut self.scratch);
            if let Some(address) = link.data_port() {
                copy.target_data = Some(address);
            }
            self.after(id, step, now);
        }
    }

    /// A link has had its turn.
    fn after(&mut self, id: usize, step: Step, now: Instant) {
        if step.gone {
            self.due.remove(&id);
            if let Some(link) = self.links.remove(&id) {
                let (copy, port) = (link.copy, link.port);
                add(&mut self.door(copy, port).counts, &link);
            }
        } else if step.again {
            self.due.insert(id, now);
        } else if let Some(wake) = step.wake {
            self.due.insert(id, wake);
        }
    }

    fn counts(&self) -> Vec<CopyCounts> {
        let of = |copy: &Copy| CopyCounts { control: copy.control.counts, data: copy.data.counts };
        let mut all: Vec<CopyCounts> = self.copies.iter().map(of).collect();
        for link in self.links.values() {
            let counts = &mut all[link.copy];
            let counts =
                if link.port == Port::Data { &mut counts.data } else { &mut counts.control };
            counts.open += 1;
            add(counts, link);
        }
        all
    }
}

impl Copy {
    fn names(&self) -> Names {
        let (control, data) = (self.control.address, self.data.address);
        Names { control, data, target: self.target }
    }
}

fn add(counts: &mut Counts, link: &Link) {
    counts.to_target += link.to_target().given();
    counts.to_initiator += link.to_initiator().given();
    counts.corrupted += link.to_target().spoilt() + link.to_initiator().spoilt();
    counts.ended += u64::from(link.ended_by_rule);
}

fn door_token(copy: usize, port: Port) -> Token {
    Token(2 * copy + usize::from(port == Port::Data))
}

fn register(registry: &Registry, id: usize, link: &mut Link) -> io::Result<()> {
    let both = Interest::READABLE | Interest::WRITABLE;
    let (initiator, target) = link.streams();
    registry.register(initiator, Token(FIRST_LINK + 2 * id), both)?;
    match target {
        Some(target) => registry.register(target, Token(FIRST_LINK + 2 * id + 1), both),
        None => Ok(()),
    }
}
