//! Log lines that strangers can cause: one a second, and a count of the others.

use std::time::{Duration, Instant};

#[derive(Default)]
pub(crate) struct Throttle {
    quiet_until: Option<Instant>,
    unsaid: u64,
}

const QUIET: Duration = Duration::from_secs(1);

impl Throttle {
    pub(crate) fn warn(&mut self, now: Instant, text: &str) {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.unsaid += 1;
            return;
        }
        self.quiet_until = Some(now + QUIET);
        match std::mem::take(&mut self.unsaid) {
            0 => tracing::warn!("{text}"),
            n => tracing::warn!("{text} ({n} more warnings of this kind were not logged)"),
        }
    }
}
