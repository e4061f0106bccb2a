/// How much of a text that was handed in an error quotes.
const QUOTED_CHARS: usize = 80;

/// Why a text names nothing that can be reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The metadata server is neither [`crate::P2P_HANDSHAKE`] nor the address of anything.
    #[error(
        "{} is not {} (capitals matter); this version knows no other metadata server",
        quoted(text),
        crate::P2P_HANDSHAKE
    )]
    NotPeerToPeer {
        /// What was handed in.
        text: String,
    },
    /// The metadata server is of a kind that peers know, and that is not served here.
    #[error(
        "metadata server {}: {scheme} stores are not supported; only {} works in this version",
        quoted(text),
        crate::P2P_HANDSHAKE
    )]
    UnsupportedStore {
        /// What was handed in.
        text: String,
        /// Its scheme; `etcd` for `host:port`, as for peers.
        scheme: String,
    },
    /// The metadata server is of no known kind.
    #[error(
        "metadata server {}: unknown scheme {}; use {}",
        quoted(text),
        quoted(scheme),
        crate::P2P_HANDSHAKE
    )]
    UnknownStore {
        /// What was handed in.
        text: String,
        /// What stands before its `://`.
        scheme: String,
    },
    /// The part after a host's colon is not a port.
    #[error(
        "{}: {} is not a port; write host:port with a decimal number from 1 to 65535, and brackets \
         around an IPv6 address",
        quoted(text),
        quoted(port)
    )]
    BadPort {
        /// What was handed in.
        text: String,
        /// The part in the port's place.
        port: String,
    },
    /// There is no host in a name.
    #[error("{}: the host is missing; write host:port", quoted(text))]
    EmptyName {
        /// What was handed in.
        text: String,
    },
    /// What stands in a host's place cannot be one.
    #[error("{}: {reason}; write host:port, or [address]:port for IPv6", quoted(text))]
    BadName {
        /// What was handed in.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A host has no address.
    #[error("{}: no address found ({reason}); check the name, or use an IP address", quoted(host))]
    Unresolved {
        /// The host that was looked up.
        host: String,
        /// What the lookup said.
        reason: String,
    },
    /// A text is not a range of ports.
    #[error(
        "{}: not a range of ports; write first-last, such as 15000-17000, from 1 to 65535",
        quoted(text)
    )]
    BadPortRange {
        /// What was handed in.
        text: String,
    },
}

/// Quotes a text so that one of any length and of any characters fits a line of a log.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_stays_on_a_line_whatever_was_handed_in() {
        let text = format!("\n\0{}", "é".repeat(100_000));
        let error = MetadataError::EmptyName { text };
        let start = format!("\"\\n\\0{}\"…", "é".repeat(QUOTED_CHARS - 2));
        assert_eq!(error.to_string(), format!("{start}: the host is missing; write host:port"));
    }
}
