//! Which address an engine listens on, and which one peers are told.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tensorferry_metadata::{SegmentName, local_host};

use crate::config::Config;
use crate::core::{Addresses, random};
use crate::error::{Error, Result};
use crate::io::Listener;

/// Binds the control and the data listener of an engine at `host`.
pub(crate) fn bind(host: &str, config: &Config) -> Result<(Listener, Listener, Addresses)> {
    let host = local_host(host)?;
    let advertised = config.advertise.clone().unwrap_or_else(|| host.clone());
    if advertised.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) {
        return Err(Error::bad_argument(format!(
            "{advertised} is no address that peers can connect to; give the address of this machine \
             (and TENSORFERRY_BIND={advertised} to listen on all interfaces)"
        )));
    }
    let mut last = None;
    for ip in candidates(&host, config) {
        match bind_two(ip, config) {
            Ok((control, data)) => {
                if ip.is_unspecified() && config.bind.is_none() {
                    tracing::info!(
                        "{host} is not the address of an interface of this machine: listening on all \
                         of them; TENSORFERRY_BIND chooses one"
                    );
                }
                let control_port = control.port().map_err(|e| Error::io("reading a port", e))?;
                let data_port = data.port().map_err(|e| Error::io("reading a port", e))?;
                let name = SegmentName { host: advertised.clone(), port: control_port }.to_string();
                let addresses = Addresses { name, data_host: advertised, control_port, data_port };
                return Ok((control, data, addresses));
            }
            // Only "no such address here" means the next one; a range without a free port does not make
            // an engine listen where it was not told to.
            Err(e) => {
                let elsewhere =
                    matches!(e.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT));
                last = Some((ip, e));
                if !elsewhere {
                    break;
                }
            }
        }
    }
    let (ip, e) = last.expect("there is at least one candidate");
    Err(match e.raw_os_error() {
        Some(libc::EADDRINUSE | libc::EACCES) => Error::PortsExhausted {
            range: config.ports,
            address: ip.to_string(),
            why: format!("{e}; an engine needs two ports"),
        },
        _ => Error::io(format!("listening on {ip}"), e),
    })
}

/// The addresses to try, best first.
fn candidates(host: &str, config: &Config) -> Vec<IpAddr> {
    if let Some(ip) = config.bind {
        return vec![ip];
    }
    let mut all = Vec::new();
    if host.eq_ignore_ascii_case("localhost") {
        // Peers look it up as IPv4, and nobody else is meant to come in.
        all.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    all.extend(host.parse::<IpAddr>());
    // Both families; a machine without IPv6 has only the second.
    all.extend([IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)]);
    all
}

/// A range of fewer ports is meant for a process of its own, or a few.
const MANY_PORTS: usize = 64;

/// The control and the data listener. Few ports are taken from the first one on, so that a process that is started again
/// has the same ones, and nobody who knew it before takes its control port for its data port. Of many, any are taken:
/// processes that start at once are not all in each other's way.
fn bind_two(ip: IpAddr, config: &Config) -> io::Result<(Listener, Listener)> {
    let range = config.ports;
    let start = if range.len() < MANY_PORTS { 0 } else { random() as usize % range.len() };
    let mut ports = (0..range.len()).map(|i| range.first + ((start + i) % range.len()) as u16);
    let mut next = || -> io::Result<Listener> {
        let mut last = io::Error::from_raw_os_error(libc::EADDRINUSE);
        for port in ports.by_ref() {
            match Listener::bind(SocketAddr::new(ip, port), config.listen_backlog) {
                Ok(listener) => return Ok(listener),
                Err(e) if matches!(e.raw_os_error(), Some(libc::EADDRINUSE | libc::EACCES)) => {
                    last = e
                }
                Err(e) => return Err(e),
            }
        }
        Err(last)
    };
    Ok((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorferry_metadata::PortRange;

    #[test]
    fn an_address_of_this_machine_is_bound_and_another_means_all() {
        let config = Config::default();
        let (_, _, a) = bind("127.0.0.1:9", &config).unwrap();
        assert_eq!(a.name, format!("127.0.0.1:{}", a.control_port));
        let (_, _, a) = bind("192.0.2.1", &config).unwrap();
        assert_eq!(
            (a.name, a.data_host.as_str()),
            (format!("192.0.2.1:{}", a.control_port), "192.0.2.1")
        );
        let (_, _, a) = bind("no-such-name.example", &config).unwrap();
        assert!(a.name.starts_with("no-such-name.example:"));
    }

    #[test]
    fn localhost_is_for_this_machine_only() {
        let (_control, data, a) = bind("localhost", &Config::default()).unwrap();
        assert_eq!(a.name, format!("localhost:{}", a.control_port));
        let port = data.port().unwrap();
        std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let elsewhere = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        std::net::TcpStream::connect((elsewhere, port)).unwrap_err();
    }

    #[test]
    fn ports_come_from_the_range_and_its_end_is_an_error_that_names_it() {
        // A range of four ports that the kernel has just shown to be free, of an address that nobody else uses.
        let base = Listener::bind("127.0.0.3:0".parse().unwrap(), 1).unwrap().port().unwrap();
        let first = base.clamp(1024, 65_000);
        let ports = PortRange { first, last: first + 3 };
        let config = Config { ports, ..Config::default() };
        let one = bind("127.0.0.3", &config).unwrap();
        for port in [one.2.control_port, one.2.data_port] {
            assert!(ports.contains(port));
        }
        let two = bind("127.0.0.3", &config);
        let three = bind("127.0.0.3", &config);
        let error = three.err().or(two.err()).expect("five ports do not fit four").to_string();
        assert!(
            error.contains(&ports.to_string()) && error.contains("TENSORFERRY_PORTS"),
            "{error}"
        );
    }

    #[test]
    fn a_process_that_has_few_ports_to_itself_comes_back_at_the_same_ones() {
        let base = Listener::bind("127.0.0.4:0".parse().unwrap(), 1).unwrap().port().unwrap();
        let first = base.clamp(1024, 65_000);
        let config = Config { ports: PortRange { first, last: first + 7 }, ..Config::default() };
        let ports = || {
            let (_control, _data, a) = bind("127.0.0.4", &config).unwrap();
            (a.control_port, a.data_port)
        };
        let before = ports();
        assert!(before.0 < before.1);
        for _ in 0..20 {
            assert_eq!(ports(), before);
        }
    }

    #[test]
    fn an_address_that_nobody_can_connect_to_is_refused() {
        for host in ["0.0.0.0", "::", "[::]:80"] {
            let error = bind(host, &Config::default()).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("TENSORFERRY_BIND"), "{error}");
        }
        let config = Config { advertise: Some("10.1.2.3".into()), ..Config::default() };
        assert!(bind("0.0.0.0", &config).unwrap().2.name.starts_with("10.1.2.3:"));
    }
}
