//! How many connections there may be, and which are given up when no more can be had.
#![expect(unsafe_code, reason = "asking for a limit of the process")]

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mio::Token;

use crate::io::Socket;
use crate::io::conns::{Conn, Kind};
use crate::io::mailbox::Command;
use crate::io::thread::Reactor;
use crate::log::Kind as Line;

/// A quarter of the descriptors of the process, and at least so many, are never taken by connections from peers.
const SPARED: usize = 24;
/// So many connections from peers are served however few descriptors there are.
const FEWEST: usize = 8;
/// How many connections a thread gives up at once.
const AT_ONCE: usize = 16;
/// A connection from a peer that has sent no whole request for so long is the first to be given up.
const UNUSED: Duration = Duration::from_secs(1);
/// One that was idle for so long is the second.
const IDLE: Duration = Duration::from_secs(60);

/// How many connections from peers the process has descriptors for.
pub(super) fn most_connections() -> usize {
    let most = descriptor_limit();
    most.saturating_sub(SPARED.max(most / 4)).max(FEWEST)
}

fn descriptor_limit() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit, alive during the call.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // It cannot fail for a limit that there is; then every accept finds out by itself.
    if rc < 0 { usize::MAX } else { limit.rlim_cur.try_into().unwrap_or(usize::MAX) }
}

/// Whether an error says that there is no descriptor, or no port, left.
fn is_exhausted(error: &io::Error) -> bool {
    let all = [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS];
    error.raw_os_error().is_some_and(|code| all.contains(&code))
}

impl Reactor {
    /// Begins to connect. If there is no descriptor or port left for it, connections that nobody uses make room.
    pub(super) fn connect_to(&mut self, addr: SocketAddr) -> io::Result<Socket> {
        match Socket::connect(addr) {
            Err(e) if is_exhausted(&e) => {
                // Those of other threads come too late for this one, and in time for the next try.
                self.core.broadcast(|| Command::Spare);
                if self.spare_lanes() == 0 {
                    return Err(e);
                }
                Socket::connect(addr)
            }
            connecting => connecting,
        }
    }

    /// Whether one more connection from a peer would be too many.
    pub(super) fn is_crowded(&self) -> bool {
        self.core.serving.load(Ordering::Relaxed) >= most_connections()
    }

    /// Somebody waits for a connection, and there are too many: whoever has one without need loses it.
    pub(super) fn make_room(&mut self) {
        self.core.broadcast(|| Command::Spare);
        let open = self.core.serving.load(Ordering::Relaxed);
        self.core.log.warn(Line::DataCrowd, "", || {
            format!(
                "{open} data connections from peers are open, as many as the limit of the process for open files allows; \
                 more wait until one ends (ulimit -n raises it)"
            )
        });
    }

    /// Gives up what nobody needs.
    pub(super) fn spare(&mut self) {
        self.spare_lanes();
        let unused = self.longest_first(|conn, now| match &conn.kind {
            Kind::Serve(serve) => serve.unused_since().filter(|at| *at + UNUSED <= now),
            _ => None,
        });
        let idle = |conn: &Conn, now| match &conn.kind {
            Kind::Serve(serve) => serve.idle_since().filter(|at: &Instant| *at + IDLE <= now),
            _ => None,
        };
        let given_up = if unused.is_empty() { self.longest_first(idle) } else { unused };
        self.give_up(&given_up);
    }

    fn spare_lanes(&mut self) -> usize {
        self.claim_all();
        let idle = self.longest_first(|conn, _| match &conn.kind {
            Kind::Lane(lane) => lane.idle_since(),
            _ => None,
        });
        self.give_up(&idle);
        idle.len()
    }

    /// Some connections of those that have done nothing since an instant, the earliest first.
    fn longest_first(&self, since: impl Fn(&Conn, Instant) -> Option<Instant>) -> Vec<Token> {
        let mut all: Vec<_> =
            self.each().filter_map(|conn| Some((since(conn, self.now)?, conn.token))).collect();
        all.sort_unstable();
        all.into_iter().take(AT_ONCE).map(|(_, token)| token).collect()
    }

    fn give_up(&mut self, tokens: &[Token]) {
        for &token in tokens {
            if let Some(conn) = self.take(token) {
                self.close(conn);
            }
        }
    }
}
