use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};

use crate::MetadataError;
use crate::name::split_scope;

const INTERFACES: &str = "/sys/class/net";

/// The address that a host is, if it is one and not a name; then nothing has to be looked up.
///
/// # Errors
/// [`MetadataError::Unresolved`]: it has a scope that is not an interface's.
pub fn resolve_literal(host: &str, port: u16) -> Option<Result<Vec<SocketAddr>, MetadataError>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(Ok(vec![SocketAddr::new(ip, port)]));
    }
    let (address, Some(scope)) = split_scope(host) else { return None };
    let ip = address.parse::<Ipv6Addr>().ok()?;
    let unresolved = |reason| MetadataError::Unresolved { host: host.to_owned(), reason };
    let scope = scope_id(scope).map_err(unresolved);
    Some(scope.map(|scope| vec![SocketAddrV6::new(ip, port, 0, scope).into()]))
}

/// Finds the addresses of a host: those of IPv4 first, each of them once.
///
/// An IP address, with or without a scope, is not looked up. A name is, and that may block for as
/// long as the system's resolver likes.
///
/// # Errors
/// [`MetadataError::Unresolved`].
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, MetadataError> {
    let unresolved = |reason: String| MetadataError::Unresolved { host: host.to_owned(), reason };
    if let Some(found) = resolve_literal(host, port) {
        return found;
    }
    if host.is_empty() {
        return Err(unresolved("the name is empty".to_owned()));
    }
    let found = (host, port).to_socket_addrs().map_err(|error| unresolved(error.to_string()))?;
    let addresses = ordered(found);
    if addresses.is_empty() {
        return Err(unresolved("the name has no addresses".to_owned()));
    }
    Ok(addresses)
}

/// IPv4 first, because peers listen on it unless they are told otherwise.
fn ordered(found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for address in found {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses.sort_by_key(SocketAddr::is_ipv6);
    addresses
}

/// The index of a network interface that is given by number or by name.
fn scope_id(scope: &str) -> Result<u32, String> {
    if !scope.is_empty() && scope.bytes().all(|b| b.is_ascii_digit()) {
        return scope.parse().map_err(|_| format!("scope {scope:.20} is past 32 bits"));
    }
    // The name becomes a part of a path, and must not lead elsewhere.
    if matches!(scope, "" | "." | "..") || scope.contains(['/', '\0']) {
        return Err("the scope is not the name of an interface".to_owned());
    }
    let index = fs::read_to_string(format!("{INTERFACES}/{scope}/ifindex"));
    index.ok().and_then(|text| text.trim_end().parse().ok()).ok_or_else(|| {
        let shown: String = scope.chars().take(20).collect();
        format!("there is no interface {shown:?} here")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn reason(host: &str) -> String {
        match resolve(host, 1) {
            Err(MetadataError::Unresolved { host: named, reason }) => {
                assert_eq!(named, host);
                reason
            }
            other => panic!("{host:.40} gave {other:?}"),
        }
    }

    #[test]
    fn addresses_are_taken_as_they_are() {
        assert_eq!(resolve("127.0.0.1", 5), Ok(vec![address("127.0.0.1:5")]));
        assert_eq!(resolve("::1", 5), Ok(vec![address("[::1]:5")]));
        assert_eq!(resolve("fe80::1%7", 5), Ok(vec![address("[fe80::1%7]:5")]));
    }

    #[test]
    fn a_scope_may_be_the_name_of_an_interface() {
        let Ok(index) = fs::read_to_string(format!("{INTERFACES}/lo/ifindex")) else {
            eprintln!("skipped: this machine has no {INTERFACES}/lo");
            return;
        };
        let expected = address(&format!("[fe80::1%{}]:5", index.trim()));
        assert_eq!(resolve("fe80::1%lo", 5), Ok(vec![expected]));
    }

    #[test]
    fn a_bad_scope_is_named() {
        assert_eq!(reason("fe80::1%nope0"), "there is no interface \"nope0\" here");
        assert_eq!(reason("fe80::1%4294967296"), "scope 4294967296 is past 32 bits");
        for scope in ["", ".", "..", "../lo", "a/b", "lo\0"] {
            let got = reason(&format!("fe80::1%{scope}"));
            assert_eq!(got, "the scope is not the name of an interface", "{scope:?}");
        }
        let long = "x".repeat(100_000);
        let shown = "x".repeat(20);
        let got = reason(&format!("fe80::1%{long}"));
        assert_eq!(got, format!("there is no interface \"{shown}\" here"));
    }

    #[test]
    fn names_are_looked_up() {
        let found = resolve("localhost", 5).unwrap();
        assert!(!found.is_empty());
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 5));
    }

    #[test]
    fn what_cannot_be_looked_up_is_an_error_with_a_reason() {
        assert_eq!(reason(""), "the name is empty");
        // None of these reaches a name server, whose answer could take its time.
        for host in ["nul\0inside", &"h".repeat(64), &"h".repeat(100_000)] {
            assert!(!reason(host).is_empty());
        }
        let error = MetadataError::Unresolved { host: "h".to_owned(), reason: "why".to_owned() };
        assert_eq!(
            error.to_string(),
            "\"h\": no address found (why); check the name, or use an IP address"
        );
    }

    #[test]
    fn ipv4_comes_first_and_each_address_once() {
        let found = ["[::1]:1", "10.0.0.2:1", "[::1]:1", "10.0.0.1:1", "10.0.0.2:1"].map(address);
        let expected = ["10.0.0.2:1", "10.0.0.1:1", "[::1]:1"].map(address);
        assert_eq!(ordered(found.into_iter()), expected);
    }
}
