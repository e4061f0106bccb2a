//! How long something that has failed is not tried again.

use std::time::{Duration, Instant};

use crate::clock;

/// A pause that grows with each failure in a row, and ends with the first success. It is never the same twice, so that
/// those who have lost a peer together do not come back together.
#[derive(Debug)]
pub(super) struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    pub(super) const fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, failures: 0, until: None }
    }

    /// It failed once more.
    pub(super) fn grow(&mut self, now: Instant) {
        self.grow_by(now, crate::core::random());
    }

    fn grow_by(&mut self, now: Instant, random: u64) {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        let longest = self.first.saturating_mul(factor).min(self.most);
        self.failures = self.failures.saturating_add(1);
        let jitter = longest.mul_f64(random as f64 / u64::MAX as f64 / 2.0);
        self.until = Some(now + longest - jitter);
    }

    /// It went well.
    pub(super) fn reset(&mut self) {
        (self.failures, self.until) = (0, None);
    }

    /// Until when nothing is to be tried, if that is still to come.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.until.filter(|at| clock::now() < *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_are_never_alike_and_end_with_a_success() {
        let (first, most) = (Duration::from_millis(25), Duration::from_millis(800));
        let (mut pause, begin) = (Backoff::new(first, most), Instant::now());
        assert_eq!(pause.rests_until(), None);
        for round in 0..40 {
            let longest = first.saturating_mul(1 << round.min(20)).min(most);
            for (random, shortest, longest) in
                [(0, longest, longest), (u64::MAX, longest / 2, longest / 2)]
            {
                let mut one = Backoff { failures: round, ..Backoff::new(first, most) };
                one.grow_by(begin, random);
                let until = one.until.unwrap() - begin;
                assert!(until >= shortest && until <= longest, "{round}: {until:?}");
            }
            pause.grow(begin);
        }
        assert!(pause.until.unwrap() >= begin + most / 2);
        pause.reset();
        assert_eq!(pause.rests_until(), None);
        pause.grow(begin);
        assert!(pause.until.unwrap() <= begin + first);
    }
}
