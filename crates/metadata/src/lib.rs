//! How a segment name becomes addresses.
//!
//! Peer to peer, the only way in this version, a segment's name is the address of its control
//! port. This crate reads such names, looks up their hosts, and reads what an engine is configured
//! with: its metadata server, its own name, its ports.
//!
//! It opens no connection and binds no port, and there is no default for what is mistyped: each
//! text is either understood or refused with what to do about it.
//!
//! ```
//! use tensorferry_metadata::{DEFAULT_CONTROL_PORT, MetadataServer, SegmentName, resolve};
//!
//! assert_eq!(MetadataServer::parse("P2PHANDSHAKE")?, MetadataServer::PeerToPeer);
//! let name = SegmentName::parse("[::1]:15000", DEFAULT_CONTROL_PORT)?;
//! assert_eq!((name.host.as_str(), name.port), ("::1", 15000));
//! assert_eq!(resolve(&name.host, name.port)?, ["[::1]:15000".parse().unwrap()]);
//! # Ok::<(), tensorferry_metadata::MetadataError>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod name;
mod ports;
mod resolve;
mod server;

pub use error::MetadataError;
pub use name::{DEFAULT_CONTROL_PORT, SegmentName, local_host};
pub use ports::PortRange;
pub use resolve::{resolve, resolve_literal};
pub use server::{MetadataServer, P2P_HANDSHAKE};
