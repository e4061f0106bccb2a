//! What time it is, for all that may not wait for it: deadlines, timers, and how long something took.
//!
//! A call that blocks its caller reads the system's clock by itself; everything else asks here, so that the
//! simulation of the unit tests can have a clock of its own.

use std::time::{Duration, Instant};

/// The time.
#[inline]
pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(simulated) = crate::sim::now() {
        return simulated;
    }
    Instant::now()
}

/// How long ago `begin` was.
#[inline]
pub(crate) fn since(begin: Instant) -> Duration {
    now().saturating_duration_since(begin)
}
