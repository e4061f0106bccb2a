//! The addresses of this machine, and what an engine makes of the hosts that people give it.

use std::fs;
use std::io;
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use if_addrs::get_if_addrs;
use serde::Serialize;
use tensorferry::{Config, Engine};

use super::listening;

#[derive(Debug, Serialize)]
pub(super) struct Addresses {
    pub(super) hostname: Option<String>,
    pub(super) interfaces: Vec<Interface>,
    /// Why the interfaces are not known.
    pub(super) interfaces_error: Option<String>,
    /// The value of `TENSORFERRY_BIND`.
    pub(super) bind: Option<IpAddr>,
    /// The value of `TENSORFERRY_ADVERTISE`.
    pub(super) advertise: Option<String>,
    pub(super) hosts: Vec<Host>,
}

/// One address of one interface.
#[derive(Debug, Serialize)]
pub(super) struct Interface {
    pub(super) interface: String,
    pub(super) address: IpAddr,
    pub(super) mtu_bytes: Option<u64>,
    /// As the driver says it; virtual interfaces have none.
    pub(super) megabits_per_second: Option<u64>,
}

/// What an engine that is given this host does.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    pub(super) host: String,
    /// `loopback`, `hostname`, or `route`: the address that packets to other networks leave from.
    pub(super) what: &'static str,
    /// The name that its segment had when this was tried; the port is another one each time.
    pub(super) segment: Option<String>,
    /// Where it listened.
    pub(super) listens_on: Option<IpAddr>,
    /// What this machine finds when it looks up the name that peers are told.
    pub(super) looked_up: Vec<IpAddr>,
    /// Why no engine starts there, or no address was found.
    pub(super) error: Option<String>,
}

/// Name servers may take their time.
const LOOK_UP_FOR: Duration = Duration::from_secs(3);
/// Addresses of documentation. Nothing is sent to them: a datagram socket that is connected has only been routed.
const ELSEWHERE: [(&str, &str); 2] = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];

impl Addresses {
    pub(super) fn look(config: &Config) -> Self {
        let hostname = fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let hostname = hostname.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
        let (interfaces, interfaces_error) = match interfaces() {
            Ok(interfaces) => (interfaces, None),
            Err(why) => (Vec::new(), Some(why.to_string())),
        };
        let loopback = Some(("loopback", "127.0.0.1".to_owned()));
        let named = hostname.clone().map(|name| ("hostname", name));
        let routed = routed().map(|ip| ("route", ip.to_string()));
        let hosts = [loopback, named, routed].into_iter().flatten();
        Self {
            hosts: hosts.map(|(what, host)| Host::try_out(what, host, config)).collect(),
            hostname,
            interfaces,
            interfaces_error,
            bind: config.bind,
            advertise: config.advertise.clone(),
        }
    }

    /// What is likely to surprise, and what to do.
    pub(super) fn advice(&self) -> Vec<String> {
        let surprises = |host: &&Host| {
            let only_here = !host.looked_up.is_empty()
                && host.looked_up.iter().all(IpAddr::is_loopback)
                && host.listens_on.is_some_and(|ip| !ip.is_loopback());
            host.what == "hostname" && only_here
        };
        let one = |host: &Host| {
            format!(
                "this machine looks up {} as {}, an address that only it can reach; a peer \
                 elsewhere that does so finds itself: give engines an address of an interface, or \
                 set TENSORFERRY_ADVERTISE",
                host.advertised(),
                host.looked_up.first().map_or_else(String::new, IpAddr::to_string)
            )
        };
        self.hosts.iter().filter(surprises).map(one).collect()
    }
}

impl Host {
    fn try_out(what: &'static str, host: String, config: &Config) -> Self {
        let mut config = config.clone();
        config.io_threads = 1;
        config.notices.clear();
        let nothing = |error: String| Self {
            host: host.clone(),
            what,
            segment: None,
            listens_on: None,
            looked_up: Vec::new(),
            error: Some(error),
        };
        let engine = match Engine::new(&host, config) {
            Ok(engine) => engine,
            Err(error) => return nothing(error.to_string()),
        };
        let mut tried = Self {
            segment: Some(engine.name().to_owned()),
            listens_on: listening::address_of(engine.control_port()),
            error: None,
            ..nothing(String::new())
        };
        engine.close();
        match look_up(tried.advertised()) {
            Ok(found) => tried.looked_up = found,
            Err(why) => {
                tried.error = Some(format!("{} cannot be looked up: {why}", tried.advertised()))
            }
        }
        tried
    }

    /// The host that peers are told.
    pub(super) fn advertised(&self) -> &str {
        let segment = self.segment.as_deref().unwrap_or(&self.host);
        let host = segment.rsplit_once(':').map_or(segment, |(host, _port)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

/// The addresses of a name; none for what is an address already.
fn look_up(host: &str) -> Result<Vec<IpAddr>, String> {
    if host.parse::<IpAddr>().is_ok() {
        return Ok(Vec::new());
    }
    let (sender, found) = mpsc::channel();
    let name = host.to_owned();
    // A thread that is not waited for: the system's resolver cannot be told to stop.
    thread::spawn(move || {
        let _ = sender.send((name.as_str(), 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    });
    let found = match found.recv_timeout(LOOK_UP_FOR) {
        Ok(found) => found.map_err(|why| why.to_string())?,
        Err(_) => return Err(format!("no answer within {LOOK_UP_FOR:?}")),
    };
    let mut ips: Vec<IpAddr> = found.into_iter().map(|address| address.ip()).collect();
    ips.dedup();
    Ok(ips)
}

fn interfaces() -> io::Result<Vec<Interface>> {
    let one = |found: if_addrs::Interface| Interface {
        address: found.ip(),
        mtu_bytes: property(&found.name, "mtu"),
        megabits_per_second: property(&found.name, "speed"),
        interface: found.name,
    };
    let mut all: Vec<Interface> = get_if_addrs()?.into_iter().map(one).collect();
    all.sort_by(|a, b| (&a.interface, a.address).cmp(&(&b.interface, b.address)));
    Ok(all)
}

/// What the kernel says of an interface. Drivers without a speed say -1, or nothing.
fn property(interface: &str, name: &str) -> Option<u64> {
    // An alias of an address, `eth0:1`, belongs to the interface before the colon.
    let interface = interface.split(':').next()?;
    fs::read_to_string(format!("/sys/class/net/{interface}/{name}")).ok()?.trim().parse().ok()
}

/// The address that packets to other networks leave from.
fn routed() -> Option<IpAddr> {
    ELSEWHERE.into_iter().find_map(|(from, to)| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        let ip = socket.local_addr().ok()?.ip();
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(config: &Config, host: &str) -> Host {
        Host::try_out("hostname", host.to_owned(), config)
    }

    #[test]
    fn an_engine_listens_where_it_is_said_to() {
        let config = Config::default();
        let tried = host(&config, "127.0.0.1");
        assert!(tried.segment.as_ref().unwrap().starts_with("127.0.0.1:"));
        assert_eq!(tried.listens_on, Some("127.0.0.1".parse().unwrap()));
        assert_eq!((tried.looked_up.len(), tried.error), (0, None));

        let tried = host(&config, "192.0.2.9");
        assert!(tried.listens_on.unwrap().is_unspecified(), "{tried:?}");
        assert_eq!(tried.advertised(), "192.0.2.9");
    }

    #[test]
    fn bind_and_advertise_have_their_effect() {
        let mut config = Config::default();
        config.bind = Some("127.0.0.3".parse().unwrap());
        config.advertise = Some("localhost".into());
        let tried = host(&config, "10.1.2.3");
        assert_eq!(tried.advertised(), "localhost");
        assert_eq!(tried.listens_on, Some("127.0.0.3".parse().unwrap()));
        assert!(tried.looked_up.iter().all(IpAddr::is_loopback) && !tried.looked_up.is_empty());

        config.bind = Some("192.0.2.1".parse().unwrap());
        let tried = host(&config, "127.0.0.1");
        assert_eq!(tried.listens_on, None);
        assert!(tried.error.unwrap().starts_with("listening on 192.0.2.1"));
    }

    #[test]
    fn a_name_that_only_this_machine_reaches_is_said() {
        let mut here = host(&Config::default(), "127.0.0.1");
        here.segment = Some("here:15000".into());
        here.listens_on = Some("0.0.0.0".parse().unwrap());
        here.looked_up = vec!["127.0.1.1".parse().unwrap()];
        let mut addresses = Addresses {
            hostname: None,
            interfaces: Vec::new(),
            interfaces_error: None,
            bind: None,
            advertise: None,
            hosts: vec![here],
        };
        let [advice] = &addresses.advice()[..] else { panic!("{addresses:?}") };
        assert!(advice.starts_with("this machine looks up here as 127.0.1.1, "), "{advice}");
        addresses.hosts[0].looked_up.push("10.0.0.1".parse().unwrap());
        assert!(addresses.advice().is_empty());
    }

    #[test]
    fn loopback_is_an_interface() {
        let all = interfaces().unwrap();
        assert!(all.iter().any(|one| one.address.is_loopback()), "{all:?}");
    }
}
