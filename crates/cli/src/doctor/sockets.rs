//! Ports, and the limits of the kernel and of this process that sockets meet.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use tensorferry::{Config, PortRange};

/// What cannot be found out is null.
#[derive(Debug, Serialize)]
pub(super) struct Sockets {
    pub(super) ports: Ports,
    /// The ports from which the kernel chooses for outgoing connections.
    pub(super) outgoing_ports: Option<OutgoingPorts>,
    /// Whether a socket for IPv6 can be bound here.
    pub(super) ipv6: bool,
    pub(super) open_files: Limit,
    /// Said because people ask: pinned memory of a GPU's driver is not bounded by it.
    pub(super) locked_memory_bytes: Limit,
    /// For sockets that set their own sizes, which the engine's do not.
    pub(super) rmem_max_bytes: Option<u64>,
    pub(super) wmem_max_bytes: Option<u64>,
    /// Least, first and largest size of a connection's buffers.
    pub(super) tcp_rmem_bytes: Option<[u64; 3]>,
    pub(super) tcp_wmem_bytes: Option<[u64; 3]>,
    pub(super) somaxconn: Option<u64>,
    pub(super) listen_backlog: u32,
}

/// The ports that engines choose from.
#[derive(Debug, Serialize)]
pub(super) struct Ports {
    pub(super) first: u16,
    pub(super) last: u16,
    /// Where it was tried to bind them: the address that an engine of any name would take.
    pub(super) address: IpAddr,
    pub(super) tried: usize,
    pub(super) free: usize,
    /// Why the others cannot be bound; the first reason that is not "in use".
    pub(super) refused: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct OutgoingPorts {
    pub(super) first: u16,
    pub(super) last: u16,
    /// How many ports of the engine's range are among them, without those that are reserved.
    pub(super) overlap: usize,
}

/// A limit of this process. Null is no limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub(super) struct Limit {
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

/// Of a longer range, ports at equal distances are tried.
const MOST_TRIED: usize = 4096;
/// However slow the machine is.
const TRY_FOR: Duration = Duration::from_millis(500);
/// With fewer, many engines on one machine run out of them.
const FEW_PORTS: usize = 16;
/// With fewer, hundreds of peers run out of them.
const FEW_FILES: u64 = 1024;

impl Sockets {
    pub(super) fn look(config: &Config) -> Self {
        let ipv6 = try_port(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))).is_ok();
        let all: IpAddr =
            if ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        Self {
            ports: Ports::try_out(config.ports, config.bind.unwrap_or(all)),
            outgoing_ports: OutgoingPorts::look(config.ports),
            ipv6,
            open_files: Limit::of(Resource::Nofile),
            locked_memory_bytes: Limit::of(Resource::Memlock),
            rmem_max_bytes: number("net/core/rmem_max"),
            wmem_max_bytes: number("net/core/wmem_max"),
            tcp_rmem_bytes: numbers("net/ipv4/tcp_rmem"),
            tcp_wmem_bytes: numbers("net/ipv4/tcp_wmem"),
            somaxconn: number("net/core/somaxconn"),
            listen_backlog: config.listen_backlog,
        }
    }

    /// What is likely to stand in the way one day, and what to do.
    pub(super) fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        let Ports { first, last, free, tried, .. } = self.ports;
        if free < FEW_PORTS {
            advice.push(format!(
                "only {free} of {tried} ports that were tried in {first}-{last} can be bound, and \
                 each engine needs two; choose another range with TENSORFERRY_PORTS"
            ));
        }
        if let Some(outgoing) = self.outgoing_ports.as_ref().filter(|ports| ports.overlap > 0) {
            advice.push(format!(
                "the kernel takes ports of outgoing connections from {}-{}, {} of which are in \
                 the range {first}-{last}; choose another one with TENSORFERRY_PORTS, or reserve \
                 these in net.ipv4.ip_local_reserved_ports",
                outgoing.first, outgoing.last, outgoing.overlap
            ));
        }
        let backlog = u64::from(self.listen_backlog);
        if let Some(most) = self.somaxconn.filter(|most| *most < backlog) {
            advice.push(format!(
                "net.core.somaxconn is {most}, so no more connections than that wait to be \
                 accepted (the engine asks for {backlog}); raise it where hundreds of peers \
                 connect at once"
            ));
        }
        if let Some(soft) = self.open_files.soft.filter(|soft| *soft < FEW_FILES) {
            advice.push(format!(
                "this process may have {soft} open files, and each connection is one; raise the \
                 limit (ulimit -n) where there are many peers"
            ));
        }
        advice
    }
}

impl Ports {
    fn try_out(range: PortRange, address: IpAddr) -> Self {
        let end = Instant::now() + TRY_FOR;
        let step = range.len().div_ceil(MOST_TRIED).max(1);
        let (mut tried, mut free, mut refused) = (0, 0, None);
        for port in (range.first..=range.last).step_by(step) {
            if tried > 0 && Instant::now() >= end {
                break;
            }
            tried += 1;
            match try_port(SocketAddr::new(address, port)) {
                Ok(()) => free += 1,
                Err(Errno::ADDRINUSE) => {}
                Err(why) => refused = refused.or(Some(std::io::Error::from(why).to_string())),
            }
        }
        Self { first: range.first, last: range.last, address, tried, free, refused }
    }

    /// How many ports there are.
    pub(super) fn len(&self) -> usize {
        (self.first..=self.last).len()
    }
}

/// Binds a port as the engine does, and lets go of it. Nobody can connect to it meanwhile.
fn try_port(address: SocketAddr) -> Result<(), Errno> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)
}

impl OutgoingPorts {
    fn look(ours: PortRange) -> Option<Self> {
        let [first, last] = numbers("net/ipv4/ip_local_port_range")?;
        let reserved = read("net/ipv4/ip_local_reserved_ports").unwrap_or_default();
        Some(Self { first, last, overlap: overlap(ours, (first, last), &reserved) })
    }
}

/// How many ports of ours are from `first` to `last`, and not in the list `reserved`.
fn overlap(ours: PortRange, (first, last): (u16, u16), reserved: &str) -> usize {
    let port = |text: &str| text.trim().parse::<u16>().ok();
    let ranges: Vec<(u16, u16)> = reserved
        .split(',')
        .filter_map(|part| match part.split_once('-') {
            Some((from, to)) => Some((port(from)?, port(to)?)),
            None => port(part).map(|one| (one, one)),
        })
        .collect();
    let is_reserved = |port: &u16| ranges.iter().any(|(from, to)| (from..=to).contains(&port));
    (ours.first.max(first)..=ours.last.min(last)).filter(|port| !is_reserved(port)).count()
}

impl Limit {
    fn of(what: Resource) -> Self {
        let limit = getrlimit(what);
        Self { soft: limit.current, hard: limit.maximum }
    }
}

fn read(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/sys/{name}")).ok()
}

fn number(name: &str) -> Option<u64> {
    numbers::<u64, 1>(name).map(|[number]| number)
}

fn numbers<T: FromStr, const N: usize>(name: &str) -> Option<[T; N]> {
    let text = read(name)?;
    let numbers: Option<Vec<T>> = text.split_whitespace().map(|n| n.parse().ok()).collect();
    numbers?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn range(first: u16, last: u16) -> PortRange {
        PortRange { first, last }
    }

    #[test]
    fn a_port_that_somebody_listens_on_is_not_free() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let ports = Ports::try_out(range(port, port), Ipv4Addr::LOCALHOST.into());
        assert_eq!((ports.tried, ports.free, ports.refused), (1, 0, None));
        drop(listener);
        let ports = Ports::try_out(range(port, port), Ipv4Addr::LOCALHOST.into());
        assert_eq!((ports.tried, ports.free), (1, 1));
    }

    #[test]
    fn an_address_that_is_not_here_says_why() {
        let ports = Ports::try_out(range(15000, 15001), "192.0.2.1".parse().unwrap());
        assert_eq!((ports.tried, ports.free), (2, 0));
        assert!(ports.refused.unwrap().contains("Cannot assign"));
    }

    #[test]
    fn of_a_long_range_some_ports_are_tried() {
        let ports = Ports::try_out(range(1024, 65535), Ipv4Addr::LOCALHOST.into());
        assert_eq!(ports.len(), 64512);
        assert!((1..=MOST_TRIED).contains(&ports.tried), "{ports:?}");
        assert!(ports.free <= ports.tried);
    }

    #[test]
    fn reserved_ports_are_not_in_the_way() {
        let ours = range(15000, 17000);
        assert_eq!(overlap(ours, (32768, 60999), "\n"), 0);
        assert_eq!(overlap(ours, (1024, 60999), "\n"), 2001);
        assert_eq!(overlap(ours, (16000, 60999), "\n"), 1001);
        assert_eq!(overlap(ours, (1024, 60999), "15000-16000,17000,80\n"), 999);
        assert_eq!(overlap(ours, (1024, 60999), "14000-18000"), 0);
    }

    #[test]
    fn what_is_tight_is_said_with_what_to_do() {
        let tight = Sockets {
            ports: Ports {
                first: 15000,
                last: 15001,
                address: Ipv4Addr::UNSPECIFIED.into(),
                tried: 2,
                free: 1,
                refused: None,
            },
            outgoing_ports: Some(OutgoingPorts { first: 1024, last: 60999, overlap: 2 }),
            open_files: Limit { soft: Some(256), hard: None },
            somaxconn: Some(128),
            ..Sockets::look(&Config::default())
        };
        let advice = tight.advice();
        assert_eq!(advice.len(), 4, "{advice:?}");
        assert!(advice[0].starts_with("only 1 of 2 ports that were tried in 15000-15001 can"));
        assert!(advice[1].contains("from 1024-60999, 2 of which are in the range 15000-15001"));
        assert!(advice[2].starts_with("net.core.somaxconn is 128, so no more connections"));
        assert!(advice[3].starts_with("this process may have 256 open files"));
    }
}
