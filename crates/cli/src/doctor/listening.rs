//! Where a socket of this process listens, as the kernel tells it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The state LISTEN in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// The address on which this process listens at `port`; `None` if that cannot be found out.
pub(super) fn address_of(port: u16) -> Option<IpAddr> {
    let ours = sockets()?;
    ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter().find_map(|table| {
        let text = fs::read_to_string(table).ok()?;
        let mut listening = text.lines().filter_map(listener);
        listening.find(|one| one.port == port && ours.contains(&one.inode)).map(|one| one.ip)
    })
}

struct Listener {
    ip: IpAddr,
    port: u16,
    inode: u64,
}

/// The sockets of this process, by the number of their inode.
fn sockets() -> Option<Vec<u64>> {
    let links = fs::read_dir("/proc/self/fd").ok()?;
    let links = links.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let inode = |link: std::path::PathBuf| {
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    Some(links.filter_map(inode).collect())
}

/// A line of the table, if it is of a socket that listens.
fn listener(line: &str) -> Option<Listener> {
    let mut fields = line.split_whitespace().skip(1);
    let (address, port) = fields.next()?.split_once(':')?;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?.parse().ok()?;
    let ip = address_text(address)?;
    let port = u16::from_str_radix(port, 16).ok()?;
    (state == LISTEN).then_some(Listener { ip, port, inode })
}

/// The kernel prints 32-bit words as this machine reads them from memory.
fn address_text(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let word = u32::from_str_radix(hex.get(8 * at..8 * at + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn own_listeners_are_found_and_no_others() {
        for host in ["127.0.0.2", "0.0.0.0", "::1", "::"] {
            let ip: IpAddr = host.parse().unwrap();
            let Ok(listener) = TcpListener::bind((ip, 0)) else {
                eprintln!("skipped: {host} cannot be bound here");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            assert_eq!(address_of(port), Some(ip), "{host}");
        }
        assert_eq!(address_of(0), None);
    }

    #[test]
    fn a_line_that_is_no_listener_is_left_out() {
        let line = "   0: 0100007F:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  \
                    0        0 1588 1 000000007e6c48e5 100 0 0 10 0";
        let found = listener(line).unwrap();
        assert_eq!((found.port, found.inode), (2024, 1588));
        if cfg!(target_endian = "little") {
            assert_eq!(found.ip.to_string(), "127.0.0.1");
        }
        assert!(listener(&line.replace(" 0A ", " 01 ")).is_none());
        for line in ["", "  sl  local_address rem_address   st tx_queue", "0: zz:1 0:0 0A"] {
            assert!(listener(line).is_none(), "{line}");
        }
    }
}
