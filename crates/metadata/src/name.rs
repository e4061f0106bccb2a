use std::fmt;
use std::net::Ipv6Addr;

use crate::MetadataError;

/// The control port of a segment whose name has none.
pub const DEFAULT_CONTROL_PORT: u16 = 12001;

/// Where the control port of a segment is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SegmentName {
    /// A host name or an IP address; an IPv6 address has no brackets, and may have a scope.
    pub host: String,
    /// The control port.
    pub port: u16,
}

impl SegmentName {
    /// Reads `host`, `host:port`, `[v6]`, `[v6]:port` or a bare IPv6 address.
    ///
    /// Slashes at the start are dropped. A text that is an IPv6 address as a whole has no port:
    /// `::1:1500` is the address, while `::1:15000` is port 15000 of `::1`. Brackets leave no doubt.
    ///
    /// # Errors
    /// [`MetadataError::BadPort`] for a port that is not a decimal number from 1 to 65535,
    /// [`MetadataError::EmptyName`] and [`MetadataError::BadName`]. There is no fallback: a typing
    /// mistake must not reach another service.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, MetadataError> {
        let (host, port) = split(text, text.trim_start_matches('/'))?;
        let port = match port {
            None => default_port,
            Some(port) => match decimal(port) {
                Some(port) if port > 0 => port,
                _ => return Err(bad_port(text, port)),
            },
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// The host of the name that an engine is given: without its port, and without brackets.
///
/// The port is not used, as for peers, but it must be a number.
///
/// # Errors
/// As for [`SegmentName::parse`], except that port 0 is taken.
pub fn local_host(text: &str) -> Result<String, MetadataError> {
    let (host, port) = split(text, text)?;
    match port {
        Some(port) if decimal(port).is_none() => Err(bad_port(text, port)),
        _ => Ok(host.to_owned()),
    }
}

/// Splits `name`, a part of `text`, into its host and the text of its port.
fn split<'a>(text: &str, name: &'a str) -> Result<(&'a str, Option<&'a str>), MetadataError> {
    let bad = |reason: &str| {
        Err(MetadataError::BadName { text: text.to_owned(), reason: reason.to_owned() })
    };
    let (host, port) = if let Some(rest) = name.strip_prefix('[') {
        let Some((host, rest)) = rest.split_once(']') else {
            return bad("the bracket is not closed");
        };
        let port = rest.strip_prefix(':');
        if port.is_none() && !rest.is_empty() {
            return bad("only a colon and a port may follow the bracket");
        }
        if !host.is_empty() && !is_ipv6(host) {
            return bad("what is in the brackets is not an IPv6 address");
        }
        (host, port)
    } else if is_ipv6(name) {
        (name, None)
    } else {
        name.rsplit_once(':').map_or((name, None), |(host, port)| (host, Some(port)))
    };
    if host.is_empty() {
        return Err(MetadataError::EmptyName { text: text.to_owned() });
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return bad("the host has a space or a control character in it");
    }
    if host.contains(':') && !is_ipv6(host) {
        return bad("the host has a colon in it, and is not an IPv6 address");
    }
    Ok((host, port))
}

/// Whether `text` is an IPv6 address, with or without a scope.
fn is_ipv6(text: &str) -> bool {
    let (address, scope) = split_scope(text);
    // A colon in a scope would make the port of `fe80::1%eth0:15000` a part of it, and a bracket the end of it.
    let scope_is_fine = scope.is_none_or(|s| !s.is_empty() && !s.contains([':', '[', ']']));
    scope_is_fine && address.parse::<Ipv6Addr>().is_ok()
}

pub(crate) fn split_scope(text: &str) -> (&str, Option<&str>) {
    text.split_once('%').map_or((text, None), |(address, scope)| (address, Some(scope)))
}

/// A number without a sign, which the parser of the standard library would take.
pub(crate) fn decimal(text: &str) -> Option<u16> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn bad_port(text: &str, port: &str) -> MetadataError {
    MetadataError::BadPort { text: text.to_owned(), port: port.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SegmentName, MetadataError> {
        SegmentName::parse(text, DEFAULT_CONTROL_PORT)
    }

    #[test]
    fn names_are_split_as_peers_split_them() {
        for (text, host, port) in [
            ("node-a", "node-a", 12001),
            ("node-a:15773", "node-a", 15773),
            ("/node-a:1", "node-a", 1),
            ("///10.0.0.1:65535", "10.0.0.1", 65535),
            ("10.0.0.1", "10.0.0.1", 12001),
            ("[::1]", "::1", 12001),
            ("[::1]:16659", "::1", 16659),
            ("::1", "::1", 12001),
            ("::1:1665", "::1:1665", 12001),
            ("::1:16659", "::1", 16659),
            ("fe80::1%eth0", "fe80::1%eth0", 12001),
            ("fe80::1%eth0:15000", "fe80::1%eth0", 15000),
            ("[fe80::1%2]:15000", "fe80::1%2", 15000),
            ("::ffff:10.0.0.1", "::ffff:10.0.0.1", 12001),
            ("bücher.example:007", "bücher.example", 7),
        ] {
            let name = SegmentName { host: host.to_owned(), port };
            assert_eq!(parse(text).as_ref(), Ok(&name), "{text}");
            assert_eq!(parse(&name.to_string()), Ok(name), "{text}");
        }
    }

    #[test]
    fn a_bad_port_is_never_replaced() {
        for (text, port) in [
            ("h:", ""),
            ("h:abc", "abc"),
            ("h:0", "0"),
            ("h:99999", "99999"),
            ("h:65536", "65536"),
            ("h:+1", "+1"),
            ("h:-1", "-1"),
            ("h: 1", " 1"),
            ("h:1 ", "1 "),
            ("h:0x10", "0x10"),
            ("h:1\0", "1\0"),
            ("h:１", "１"),
            ("[::1]:", ""),
            ("/[::1]:abc", "abc"),
        ] {
            assert_eq!(parse(text), Err(bad_port(text, port)), "{text:?}");
        }
        assert_eq!(
            parse("h:99999").unwrap_err().to_string(),
            "\"h:99999\": \"99999\" is not a port; write host:port with a decimal number from \
             1 to 65535, and brackets around an IPv6 address"
        );
    }

    #[test]
    fn a_name_needs_a_host() {
        for text in ["", "/", "///", ":1", "/:1", "[]", "[]:1"] {
            assert_eq!(parse(text), Err(MetadataError::EmptyName { text: text.to_owned() }));
        }
    }

    #[test]
    fn what_cannot_be_a_host_is_refused() {
        for (text, reason) in [
            ("a b:1", "the host has a space or a control character in it"),
            (" a:1", "the host has a space or a control character in it"),
            ("a\n:1", "the host has a space or a control character in it"),
            ("a\0b:1", "the host has a space or a control character in it"),
            ("a\u{a0}:1", "the host has a space or a control character in it"),
            ("::1%e\0:1", "the host has a space or a control character in it"),
            ("a:b:1", "the host has a colon in it, and is not an IPv6 address"),
            ("::1%:1", "the host has a colon in it, and is not an IPv6 address"),
            ("::1%lo]:7", "the host has a colon in it, and is not an IPv6 address"),
            ("[::1", "the bracket is not closed"),
            ("[::1]x", "only a colon and a port may follow the bracket"),
            ("[node-a]:1", "what is in the brackets is not an IPv6 address"),
            ("[10.0.0.1]:1", "what is in the brackets is not an IPv6 address"),
        ] {
            let (text, reason) = (text.to_owned(), reason.to_owned());
            let bad = MetadataError::BadName { text: text.clone(), reason };
            assert_eq!(parse(&text), Err(bad), "{text:?}");
        }
    }

    #[test]
    fn names_of_any_length_are_fine() {
        let host = "h".repeat(100_000);
        assert_eq!(parse(&format!("{host}:1")), Ok(SegmentName { host: host.clone(), port: 1 }));
        assert_eq!(local_host(&host), Ok(host));
        for part in [":", "[", "]", "/", "%", "1", "é", "::1%"] {
            let text = part.repeat(100_000);
            assert_eq!(parse(&text).is_ok(), ["]", "1", "%", "é"].contains(&part), "{part}");
        }
    }

    #[test]
    fn the_port_of_the_local_name_is_dropped() {
        for (text, host) in [
            ("node-a", "node-a"),
            ("node-a:12345", "node-a"),
            ("node-a:0", "node-a"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("[::1]:5", "::1"),
            ("fe80::1%eth0:5", "fe80::1%eth0"),
        ] {
            assert_eq!(local_host(text).as_deref(), Ok(host), "{text}");
        }
        assert_eq!(local_host("node-a:x"), Err(bad_port("node-a:x", "x")));
        assert_eq!(local_host(":1"), Err(MetadataError::EmptyName { text: ":1".to_owned() }));
    }
}
