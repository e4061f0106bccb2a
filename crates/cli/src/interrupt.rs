//! Ctrl-C and `kill`, as a flag that is looked at where stopping is clean.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Set by the first SIGINT or SIGTERM; the second one ends the process at once.
#[derive(Debug)]
pub(crate) struct Interrupt {
    set: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

/// The error of what such a signal has ended, and of nothing else.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Interrupt {
    pub(crate) fn listen() -> io::Result<Self> {
        let mut this = Self { set: Arc::default(), registered: Vec::new() };
        for signal in [SIGINT, SIGTERM] {
            // In this order, so that the first signal finds the flag not yet set.
            let second = flag::register_conditional_default(signal, Arc::clone(&this.set))?;
            let first = flag::register(signal, Arc::clone(&this.set))?;
            this.registered.extend([second, first]);
        }
        Ok(this)
    }

    pub(crate) fn is_set(&self) -> bool {
        self.set.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}
