use crate::MetadataError;

/// What selects [`MetadataServer::PeerToPeer`]; its case matters.
pub const P2P_HANDSHAKE: &str = "P2PHANDSHAKE";

const SCHEME_END: &str = "://";
/// What peers take a text without a scheme for.
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
    /// [`MetadataError::UnsupportedStore`] for the stores of peers, among them everything without a
    /// scheme, and [`MetadataError::UnknownStore`] for other schemes.
    pub fn parse(text: &str) -> Result<Self, MetadataError> {
        if text == P2P_HANDSHAKE {
            return Ok(Self::PeerToPeer);
        }
        let scheme = text.split_once(SCHEME_END).map_or(DEFAULT_SCHEME, |(scheme, _)| scheme);
        let (text, scheme) = (text.to_owned(), scheme.to_owned());
        Err(if PEER_SCHEMES.contains(&scheme.as_str()) {
            MetadataError::UnsupportedStore { text, scheme }
        } else {
            MetadataError::UnknownStore { text, scheme }
        })
    }
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
        for text in ["p2phandshake", " P2PHANDSHAKE", "P2PHANDSHAKE\n", ""] {
            let scheme = "etcd".to_owned();
            let unsupported = MetadataError::UnsupportedStore { text: text.to_owned(), scheme };
            assert_eq!(MetadataServer::parse(text), Err(unsupported));
        }
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
        assert_eq!(
            error("foo://x"),
            "metadata server \"foo://x\": unknown scheme \"foo\"; use P2PHANDSHAKE"
        );
    }
}
