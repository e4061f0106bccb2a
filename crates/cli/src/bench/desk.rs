//! Where initiators come to: one at a time is obeyed, the others are told so.
//!
//! Nobody is obeyed before they have said who they are, and nobody waits behind those who do not.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::BufReader;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::card::PROTOCOL;
use super::port::{Admission, INTRODUCTION, Opening, Welcome, first_line, watch};
use crate::measure::link::write_line;
use crate::measure::obey::obey;
use crate::measure::orders::Answer;
use crate::memory::Buffer;
use crate::plain::Plain;

/// What initiators share, one after the other.
pub(crate) struct Desk {
    pub(crate) memory: Buffer,
    /// What an initiator is told first.
    pub(crate) ready: Answer,
    /// The same for all but the token.
    pub(crate) welcome: Welcome,
    pub(crate) news: Sender<News>,
    pub(crate) state: State,
}

#[derive(Default)]
pub(crate) struct State {
    guest: Mutex<Option<Guest>>,
    /// Connections that have not said yet what they are.
    strangers: AtomicUsize,
    closing: AtomicBool,
}

/// What is worth a line.
#[derive(Debug)]
pub(crate) enum News {
    Came { who: SocketAddr, version: String },
    Went { who: SocketAddr, after: Duration, why: Option<String> },
    TurnedAway { who: SocketAddr, why: String },
}

/// The initiator that is obeyed.
struct Guest {
    who: SocketAddr,
    since: Instant,
    token: String,
    /// Copies of its streams, by which they can be ended.
    streams: Vec<TcpStream>,
}

/// How many connections may be there that have not said what they are. Each of them goes after [`INTRODUCTION`].
const STRANGERS: usize = 32;
/// An initiator that says nothing for so long has hung.
pub(crate) const IDLE: Duration = Duration::from_secs(600);
/// Host memory that plain sockets may take beside that which is lent.
const LARGEST_FOOTPRINT: u64 = 4 << 30;

impl Desk {
    /// Takes connections on, until [`Desk::close`].
    pub(crate) fn take_on(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let taken = listener.accept();
            if self.state.closing.load(Ordering::Relaxed) {
                return;
            }
            let Ok((stream, who)) = taken else {
                // Out of descriptors, most likely; some strangers will go.
                thread::sleep(INTRODUCTION / 50);
                continue;
            };
            if self.state.strangers.fetch_add(1, Ordering::Relaxed) >= STRANGERS {
                self.state.strangers.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let desk = Arc::clone(self);
            let spawned = thread::Builder::new().spawn(move || desk.greet(stream, who));
            if spawned.is_err() {
                self.state.strangers.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Ends everything. `at` is where [`Desk::take_on`] listens.
    pub(crate) fn close(&self, at: SocketAddr) {
        self.state.closing.store(true, Ordering::Relaxed);
        if let Some(guest) = self.guest().as_ref() {
            guest.end();
        }
        // Wakes whoever waits for a connection; if that cannot be, it ends with the process.
        let _ = TcpStream::connect_timeout(&at, INTRODUCTION);
    }

    fn greet(&self, stream: TcpStream, who: SocketAddr) {
        let line = first_line(&stream);
        self.state.strangers.fetch_sub(1, Ordering::Relaxed);
        let Ok(line) = line else { return };
        let refusal = match serde_json::from_str(&line) {
            Ok(Opening::Orders { protocol: PROTOCOL, version }) => {
                return self.receive(stream, who, version);
            }
            Ok(Opening::Plain { token }) => match self.join(&stream, &token) {
                Ok(()) => return self.serve_plain(stream),
                Err(why) => why,
            },
            Ok(Opening::Orders { protocol, version }) => format!(
                "the initiator (version {version}) speaks version {protocol} of the benchmark's orders, this target \
                 (version {}) version {PROTOCOL}; run the same version of tensorferry at both ends",
                tensorferry::VERSION
            ),
            Err(_) => "this port is for `tensorferry bench initiator`".to_owned(),
        };
        self.turn_away(stream, who, Admission::Refused { why: refusal.clone() }, refusal);
    }

    fn turn_away(&self, mut stream: TcpStream, who: SocketAddr, answer: Admission, why: String) {
        let _ = stream.set_write_timeout(Some(INTRODUCTION));
        // Whoever has gone already needs no answer.
        let _ = write_line(&mut stream, &answer);
        let _ = self.news.send(News::TurnedAway { who, why });
    }

    /// Obeys an initiator, if there is no other.
    fn receive(&self, stream: TcpStream, who: SocketAddr, version: String) {
        let token = format!("{:016x}", RandomState::new().build_hasher().finish());
        if let Err(why) = self.admit(&stream, who, &token) {
            return self.turn_away(stream, who, Admission::Busy { why: why.clone() }, why);
        }
        let leaving = Leaving(self);
        let _ = self.news.send(News::Came { who, version });
        let since = Instant::now();
        let outcome = self.serve_orders(&stream, token);
        drop(leaving);
        let why = outcome.err().map(|error| crate::chain(&error));
        let _ = self.news.send(News::Went { who, after: since.elapsed(), why });
    }

    fn serve_orders(&self, stream: &TcpStream, token: String) -> Result<()> {
        stream.set_nodelay(true)?;
        watch(stream)?;
        stream.set_write_timeout(Some(INTRODUCTION))?;
        stream.set_read_timeout(Some(IDLE))?;
        let welcome = Welcome { token, ..self.welcome.clone() };
        write_line(&mut &*stream, &Admission::Welcome(welcome))?;
        let mut orders = BufReader::new(stream);
        obey(&self.memory, self.ready.clone(), &mut orders, &mut &*stream)
            .context("the connection of its orders failed")
    }

    fn serve_plain(&self, mut stream: TcpStream) {
        let most = LARGEST_FOOTPRINT.min(self.memory.len() as u64);
        let welcomed = write_line(&mut stream, &Admission::Welcome(self.welcome.clone()));
        // The initiator has the other end, and says what went wrong.
        let _ = welcomed.and_then(|()| Plain::new(stream)?.serve(most));
    }

    /// Takes an initiator on, or says who is there instead.
    fn admit(&self, stream: &TcpStream, who: SocketAddr, token: &str) -> Result<(), String> {
        let copy = stream.try_clone().map_err(|error| error.to_string())?;
        let mut guest = self.guest();
        if let Some(other) = guest.as_ref() {
            let (who, secs) = (other.who, other.since.elapsed().as_secs());
            return Err(format!("{who} has been measuring with it for {secs} s"));
        }
        let (token, streams) = (token.to_owned(), vec![copy]);
        *guest = Some(Guest { who, since: Instant::now(), token, streams });
        Ok(())
    }

    /// Notes a second stream of the initiator that is there.
    fn join(&self, stream: &TcpStream, token: &str) -> Result<(), String> {
        let copy = stream.try_clone().map_err(|error| error.to_string())?;
        match self.guest().as_mut() {
            Some(guest) if guest.token == token && guest.streams.len() == 1 => {
                guest.streams.push(copy);
                Ok(())
            }
            _ => Err("this is not the plain stream of the initiator that measures now".to_owned()),
        }
    }

    fn guest(&self) -> MutexGuard<'_, Option<Guest>> {
        self.state.guest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guest {
    fn end(&self) {
        for stream in &self.streams {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Makes room for the next initiator when it is dropped, whichever way the last one went.
struct Leaving<'a>(&'a Desk);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if let Some(guest) = self.0.guest().take() {
            guest.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::JoinHandle;

    use tensorferry::HostBuffer;

    use super::super::port::enter;
    use super::*;
    use crate::measure::figures::Memory;
    use crate::memory::Place;
    use crate::plain::{Turn, Way};

    const SOON: Duration = Duration::from_secs(60);

    struct Open {
        desk: Arc<Desk>,
        news: Receiver<News>,
        at: SocketAddr,
        taking_on: JoinHandle<()>,
    }

    fn open() -> Open {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let (sender, news) = channel();
        let memory = Buffer::Host(HostBuffer::zeroed(1 << 16).unwrap());
        let ready = Answer::Ready { segment: "a:1".into(), addr: memory.addr(), device: None };
        let welcome = Welcome {
            token: String::new(),
            version: "1".into(),
            memory: Memory::at(Place::Host),
            machine: serde_json::Value::Null,
            machine_text: String::new(),
        };
        let state = State::default();
        let desk = Arc::new(Desk { memory, ready, welcome, news: sender, state });
        let taking_on = thread::spawn({
            let desk = Arc::clone(&desk);
            move || desk.take_on(&listener)
        });
        Open { desk, news, at, taking_on }
    }

    impl Open {
        fn enter(&self, opening: &Opening) -> Result<(TcpStream, Welcome)> {
            enter("127.0.0.1", self.at.port(), SOON, opening)
        }

        fn initiator(&self) -> Result<(TcpStream, Welcome)> {
            self.enter(&Opening::Orders { protocol: PROTOCOL, version: "1".into() })
        }

        fn close(self) {
            self.desk.close(self.at);
            self.taking_on.join().unwrap();
        }
    }

    #[test]
    fn one_initiator_at_a_time_and_the_next_one_after_it() {
        let open = open();
        let (first, welcome) = open.initiator().unwrap();
        assert_eq!(welcome.token.len(), 16);
        assert!(matches!(open.news.recv_timeout(SOON).unwrap(), News::Came { .. }));

        let text = open.initiator().unwrap_err().to_string();
        let who = first.local_addr().unwrap();
        let busy = format!("the target is busy: {who} has been measuring with it for ");
        assert!(text.starts_with(&busy) && text.ends_with("; try again later"), "{text}");
        assert!(matches!(open.news.recv_timeout(SOON).unwrap(), News::TurnedAway { .. }));

        // What is not read when it is closed resets a connection.
        assert!(first_line(&first).unwrap().contains("\"answer\":\"ready\""));
        drop(first);
        let went = open.news.recv_timeout(SOON).unwrap();
        assert!(matches!(went, News::Went { why: None, .. }), "{went:?}");
        open.initiator().unwrap();
        open.close();
    }

    #[test]
    fn strangers_who_say_nothing_are_in_nobodys_way() {
        let open = open();
        let silent: Vec<TcpStream> =
            (0..STRANGERS / 2).map(|_| TcpStream::connect(open.at).unwrap()).collect();
        let (_stream, _) = open.initiator().unwrap();
        drop(silent);
        open.close();
    }

    #[test]
    fn who_says_something_else_is_told_what_the_port_is_for() {
        let open = open();
        let text = open.enter(&Opening::Plain { token: "made up".into() }).unwrap_err().to_string();
        assert!(text.starts_with("the target refused: this is not the plain stream"), "{text}");
        let old = Opening::Orders { protocol: 99, version: "9.9".into() };
        let text = open.enter(&old).unwrap_err().to_string();
        assert!(text.contains("the initiator (version 9.9) speaks version 99"), "{text}");
        let mut stream = TcpStream::connect(open.at).unwrap();
        write_line(&mut stream, &"GET / HTTP/1.1").unwrap();
        let line = first_line(&stream).unwrap();
        assert!(line.contains("this port is for `tensorferry bench initiator`"), "{line}");
        open.close();
    }

    #[test]
    fn the_plain_stream_ends_with_the_orders() {
        let open = open();
        let (orders, welcome) = open.initiator().unwrap();
        let opening = Opening::Plain { token: welcome.token };
        let (stream, _) = open.enter(&opening).unwrap();
        let text = open.enter(&opening).unwrap_err().to_string();
        assert!(text.contains("is not the plain stream"), "a second one: {text}");
        let mut plain = Plain::new(stream).unwrap();
        let (way, chunk, footprint) = (Way::Send, 1000, 1 << 16);
        let turn = Turn { way, pings: false, chunk, footprint, amount: 10_000 };
        plain.run(turn, SOON, &mut |_| {}).unwrap();
        drop(orders);
        while !matches!(open.news.recv_timeout(SOON).unwrap(), News::Went { .. }) {}
        plain.run(turn, SOON, &mut |_| {}).unwrap_err();
        open.close();
    }
}
