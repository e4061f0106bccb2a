//! Whether `--host` is of this machine, where both processes run.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use anyhow::{Result, bail};

/// # Errors
/// No address of `host` is one of this machine. (An engine would listen on all interfaces, and the two would then
/// look for each other on another machine.)
pub(crate) fn check(host: &str) -> Result<()> {
    let mut addresses = match look_up(host) {
        Ok(addresses) => addresses,
        Err(why) => bail!(
            "--host {host}: no address found ({why}); both processes run here, so give an address or a name of this \
             machine, such as 127.0.0.1"
        ),
    };
    // Whoever may bind a port there, has the address.
    if addresses.iter().any(|address| TcpListener::bind(address).is_ok()) {
        return Ok(());
    }
    addresses.dedup();
    let shown: Vec<String> = addresses.iter().map(|address| address.ip().to_string()).collect();
    bail!(
        "--host {host} is not of this machine ({} cannot be bound), and both processes run here; give an address or \
         a name of this machine, such as 127.0.0.1",
        shown.join(", ")
    )
}

fn look_up(host: &str) -> io::Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, 0)]);
    }
    Ok((bare, 0).to_socket_addrs()?.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_will_do() {
        for host in ["127.0.0.1", "127.0.0.2", "localhost"] {
            assert!(check(host).is_ok(), "{host}");
        }
        let text = check("192.0.2.7").unwrap_err().to_string();
        assert!(
            text.starts_with("--host 192.0.2.7 is not of this machine (192.0.2.7 cannot be bound)"),
            "{text}"
        );
        for host in ["no-such-host.invalid", "127.0.0.1:80", ""] {
            let text = check(host).unwrap_err().to_string();
            assert!(text.starts_with(&format!("--host {host}: no address found (")), "{text}");
        }
    }
}
