//! Waiting for one socket on a thread that may block: with a deadline, and an ear for "stop".
#![expect(unsafe_code, reason = "poll(2)")]

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long a blocking exchange may go on.
pub(crate) struct Patience<'a> {
    pub(crate) deadline: Instant,
    /// Asked every [`STEP`]: whether the exchange is not wanted any more.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

/// Why a wait ended early.
#[derive(Debug)]
pub(crate) enum WaitError {
    TimedOut,
    Stopped,
    Io(io::Error),
}

const STEP: Duration = Duration::from_millis(20);

impl Patience<'_> {
    pub(crate) fn readable(&self, socket: &impl AsRawFd) -> Result<(), WaitError> {
        self.ready(socket, libc::POLLIN)
    }

    pub(crate) fn writable(&self, socket: &impl AsRawFd) -> Result<(), WaitError> {
        self.ready(socket, libc::POLLOUT)
    }

    fn ready(&self, socket: &impl AsRawFd, events: libc::c_short) -> Result<(), WaitError> {
        loop {
            if (self.stop)() {
                return Err(WaitError::Stopped);
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            let step = left.min(STEP).as_millis().max(1) as libc::c_int;
            let mut fd = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
            // SAFETY: one pollfd, alive during the call; the socket is borrowed, so its descriptor is open.
            match unsafe { libc::poll(&raw mut fd, 1, step) } {
                0 => {}
                1.. => return Ok(()),
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(WaitError::Io(error));
                    }
                }
            }
        }
    }
}
