//! The port that orders come to: where it is, and what is said there first.

use std::io::{self, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::io::Errno;
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use tensorferry::{Engine, PortRange, SegmentName};

use crate::measure::figures::Memory;
use crate::measure::link::{read_line, write_line};

/// The first line of a connection.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "open", rename_all = "snake_case")]
pub(crate) enum Opening {
    /// I am an initiator and am going to give orders.
    Orders { protocol: u32, version: String },
    /// This is the plain stream of the initiator with this token.
    Plain { token: String },
}

/// The answer.
#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Admission {
    Welcome(Welcome),
    /// There is another initiator.
    Busy {
        why: String,
    },
    Refused {
        why: String,
    },
}

/// Who welcomes.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Welcome {
    /// For the plain stream.
    pub(crate) token: String,
    /// Of the program.
    pub(crate) version: String,
    pub(crate) memory: Memory,
    /// The machine, as documents have it and as people read it.
    pub(crate) machine: serde_json::Value,
    pub(crate) machine_text: String,
}

/// How long somebody may take to say the first line, or to answer it.
pub(crate) const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long the other end's kernel may take in all to show that it is there.
const SILENCE: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// A stream that is read until an instant, and no longer however slowly it comes.
pub(crate) struct Within<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) until: Instant,
}

impl Read for Within<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        match stream.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            read => read,
        }
    }
}

/// Reads the one line that whoever is at the other end says before it waits for an answer.
///
/// # Errors
/// It says none in time, or goes.
pub(crate) fn first_line(stream: &TcpStream) -> io::Result<String> {
    let until = Instant::now() + INTRODUCTION;
    // Byte by byte, as what comes behind the line is for somebody else.
    let line = read_line(&mut BufReader::with_capacity(1, Within { stream, until }))?;
    stream.set_read_timeout(None)?;
    line.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Listens where `engine` does that was given `host`, on another port of its range.
///
/// # Errors
/// No port of the range is free.
pub(crate) fn listen(engine: &Engine, host: &str) -> Result<TcpListener> {
    let range = engine.config().ports;
    let mut last = None;
    for ip in addresses(engine, host)? {
        match bind(ip, range, engine.data_port()) {
            Ok(listener) => return Ok(listener),
            Err(error) => {
                let elsewhere = [Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT].map(Errno::raw_os_error);
                let go_on = error.raw_os_error().is_some_and(|code| elsewhere.contains(&code));
                last = Some((ip, error));
                if !go_on {
                    break;
                }
            }
        }
    }
    let (ip, error) = last.context("there is no address to listen on")?;
    Err(anyhow!(
        "no port of {range} is free on {ip} for the orders of initiators ({error}); `bench target` needs three ports: \
         widen TENSORFERRY_PORTS"
    ))
}

/// The addresses to try: those that the engine has tried, in its order.
fn addresses(engine: &Engine, host: &str) -> Result<Vec<IpAddr>> {
    if let Some(ip) = engine.config().bind {
        return Ok(vec![ip]);
    }
    let host = SegmentName::parse(host, engine.control_port())?.host;
    let local = host.eq_ignore_ascii_case("localhost").then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let all = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    Ok(local.into_iter().chain(host.parse::<IpAddr>()).chain(all).collect())
}

/// The next free port of the range after `after`.
fn bind(ip: IpAddr, range: PortRange, after: u16) -> io::Result<TcpListener> {
    let len = range.len();
    let start = usize::from(after.saturating_sub(range.first)) + 1;
    let mut last = io::Error::from(Errno::ADDRINUSE);
    for port in (0..len).map(|at| range.first + ((start + at) % len) as u16) {
        match TcpListener::bind(SocketAddr::new(ip, port)) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied
                ) =>
            {
                last = error;
            }
            bound => return bound,
        }
    }
    Err(last)
}

/// Connects to a port of a host, by whichever of its addresses that goes.
///
/// # Errors
/// None does.
pub(crate) fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    let to = SegmentName { host: host.to_owned(), port };
    let addresses = (host, port).to_socket_addrs().with_context(|| format!("{to} is not found"))?;
    let mut last = anyhow!("{to} has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = anyhow!("{to} cannot be connected to: {error}"),
        }
    }
    Err(last)
}

/// Connects and says a first line; the stream if it is welcome, and what was said to it.
///
/// # Errors
/// Nobody is there, or whoever is does not want it.
pub(crate) fn enter(
    host: &str,
    port: u16,
    timeout: Duration,
    opening: &Opening,
) -> Result<(TcpStream, Welcome)> {
    let stream = connect(host, port, timeout).context(
        "the target's order port cannot be used; does its firewall let TCP through to TENSORFERRY_PORTS?",
    )?;
    let at = SegmentName { host: host.to_owned(), port };
    stream.set_write_timeout(Some(INTRODUCTION))?;
    let said = write_line(&mut &stream, opening);
    let line = said.and_then(|()| first_line(&stream));
    let line = line.with_context(|| format!("the target's order port {at} does not answer"))?;
    match serde_json::from_str(&line) {
        Ok(Admission::Welcome(welcome)) => Ok((stream, welcome)),
        Ok(Admission::Busy { why }) => bail!("the target is busy: {why}; try again later"),
        Ok(Admission::Refused { why }) => bail!("the target refused: {why}"),
        Err(why) => bail!("the target's order port {at} said {line:?}, which is no answer: {why}"),
    }
}

/// Has the kernel find out that the other end's is not there any more.
pub(crate) fn watch(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE / 2)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE / 2 / PROBES)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use tensorferry::Config;

    use super::*;

    #[test]
    fn the_port_is_one_of_the_engines_range() {
        let engine = Engine::new("127.0.0.1", Config::default()).unwrap();
        let listener = listen(&engine, "127.0.0.1").unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(address.ip(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert!(engine.config().ports.contains(address.port()), "{address}");
        assert!(![engine.control_port(), engine.data_port()].contains(&address.port()));
    }

    #[test]
    fn a_range_without_a_third_port_is_an_error_that_names_it() {
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let first = free().clamp(1024, 65_000);
        let mut config = Config::default();
        config.ports = PortRange { first, last: first + 1 };
        // Somebody else may have one of the two.
        let Ok(engine) = Engine::new("127.0.0.1", config) else { return };
        let text = listen(&engine, "127.0.0.1").unwrap_err().to_string();
        let range = format!("no port of {first}-{} is free on 127.0.0.1 for", first + 1);
        assert!(text.starts_with(&range) && text.contains("widen TENSORFERRY_PORTS"), "{text}");
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn a_line_in_pieces_is_read_and_one_that_never_ends_is_not_waited_for() {
        let (mut says, hears) = pair();
        let saying = thread::spawn(move || {
            for piece in ["{\"a\":", "1}", "\n"] {
                says.write_all(piece.as_bytes()).unwrap();
            }
            says
        });
        assert_eq!(first_line(&hears).unwrap(), "{\"a\":1}");
        let mut says = saying.join().unwrap();
        says.write_all(b"one\ntwo\n").unwrap();
        assert_eq!(
            (first_line(&hears).unwrap(), first_line(&hears).unwrap()),
            ("one".into(), "two".into())
        );
        drop(says);
        assert_eq!(first_line(&hears).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);

        let (mut says, hears) = pair();
        says.write_all(b"x").unwrap();
        let until = Instant::now() + Duration::from_millis(20);
        let read = read_line(&mut BufReader::new(Within { stream: &hears, until }));
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_no_order_port_is_an_error_that_says_so() {
        let refused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let opening = Opening::Plain { token: "t".into() };
        let enter = |port| enter("127.0.0.1", port, INTRODUCTION, &opening).map(|_| ());
        let text = format!("{:#}", enter(refused).unwrap_err());
        assert!(text.contains(&format!("127.0.0.1:{refused} cannot be connected to")), "{text}");

        for (says, expected) in [
            ("SSH-2.0\n", "said \"SSH-2.0\", which is no answer"),
            ("", "does not answer"),
            ("{\"answer\":\"busy\",\"why\":\"somebody\"}\n", "the target is busy: somebody; try"),
            ("{\"answer\":\"refused\",\"why\":\"no\"}\n", "the target refused: no"),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let answering = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                first_line(&stream).unwrap();
                stream.write_all(says.as_bytes()).unwrap();
            });
            let text = format!("{:#}", enter(port).unwrap_err());
            assert!(text.contains(expected), "{text}");
            answering.join().unwrap();
        }
    }
}
