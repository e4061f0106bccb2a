use crate::MetadataError;

/// What selects [`MetadataServer::PeerToPeer`]; its case matters.
pub const P2P_HANDSHAKE: &str = "P2PHANDSHAKE";

const SCHEME_END: &str = "://";
/// What peers take `host:port` without a scheme for.
const DEFAULT_SCHEME: &str = "etcd";
const PEER_SCHEMES: [&str; 4] = ["etcd", "http", "https", "redis"];

/// Where segment descriptors are looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetadataServer {
    /// Nowhere but at the segment itself, whose name is the address of its control port.
    PeerToPeer,
}

impl MetadataServer {
    /// Reads the text with which a metadata server is configured.
    ///
    /// # Errors
    /// [`MetadataError::UnsupportedStore`] for the stores of peers, among them `host:port` without a
    /// scheme; [`MetadataError::UnknownStore`] for other schemes; [`MetadataError::NotPeerToPeer`] for
    /// everything else, such as a misspelt `P2PHANDSHAKE`.
    pub fn parse(text: &str) -> Result<Self, MetadataError> {
        if text == P2P_HANDSHAKE {
            return Ok(Self::PeerToPeer);
        }
        let scheme = match text.split_once(SCHEME_END) {
            Some((scheme, _)) => scheme,
            None if is_address(text) => DEFAULT_SCHEME,
            None => return Err(MetadataError::NotPeerToPeer { text: text.to_owned() }),
        };
        let (text, scheme) = (text.to_owned(), scheme.to_owned());
        Err(if PEER_SCHEMES.contains(&scheme.as_str()) {
            MetadataError::UnsupportedStore { text, scheme }
        } else {
            MetadataError::UnknownStore { text, scheme }
        })
    }
}

/// Whether a text is `host:port`, or several of them.
fn is_address(text: &str) -> bool {
    text.rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        MetadataServer::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn only_the_exact_word_is_peer_to_peer() {
        assert_eq!(MetadataServer::parse("P2PHANDSHAKE"), Ok(MetadataServer::PeerToPeer));
        for text in ["p2phandshake", " P2PHANDSHAKE", "P2PHANDSHAKE\n", "", "foo", "host:", ":1"] {
            let other = MetadataError::NotPeerToPeer { text: text.to_owned() };
            assert_eq!(MetadataServer::parse(text), Err(other));
        }
        assert_eq!(
            error("p2phandshake"),
            "\"p2phandshake\" is not P2PHANDSHAKE (capitals matter); this version knows no other \
             metadata server"
        );
    }

    #[test]
    fn the_stores_of_peers_are_told_from_the_unknown() {
        for scheme in PEER_SCHEMES {
            let text = format!("{scheme}://host:1");
            assert_eq!(
                error(&text),
                format!(
                    "metadata server \"{text}\": {scheme} stores are not supported; only \
                     P2PHANDSHAKE works in this version"
                )
            );
        }
        for text in ["10.0.0.1:2379", "10.0.0.1:2379,10.0.0.2:2379", "[::1]:2379"] {
            assert_eq!(
                error(text),
                format!(
                    "metadata server \"{text}\": etcd stores are not supported; only P2PHANDSHAKE \
                     works in this version"
                )
            );
        }
        assert_eq!(
            error("foo://x"),
            "metadata server \"foo://x\": unknown scheme \"foo\"; use P2PHANDSHAKE"
        );
    }
}
