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
        match self.turn(now) {
            None => {}
            Some(0) => tracing::warn!("{text}"),
            Some(n) => tracing::warn!("{text} ({n} more warnings of this kind were not logged)"),
        }
    }

    /// Whether a line may be logged now, and how many were not since the last one.
    fn turn(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.unsaid += 1;
            return None;
        }
        self.quiet_until = Some(now + QUIET);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_second_and_a_count() {
        let begin = Instant::now();
        let mut throttle = Throttle::default();
        let said: Vec<u64> =
            (0..5000).filter_map(|ms| throttle.turn(begin + Duration::from_millis(ms))).collect();
        assert_eq!(said, [0, 999, 999, 999, 999]);
    }
}
