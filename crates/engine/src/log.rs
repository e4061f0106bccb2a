//! What the engine has to say to operators: one line per event, and few of a kind.
//!
//! What fails a batch is one WARN when the batch ends, since its caller is told as well; what the engine gets over by
//! itself is INFO; the rest is DEBUG. A fault that goes on is said again after 1, 2, 4 … 64 seconds, with a count of
//! what was not said. Each peer and each kind has its own measure, so none hides another's line.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::clock;
use crate::sync::locked;

/// The target of lines about what a caller is told as well.
pub(crate) const FAILURE: &str = "tensorferry::failure";
/// The target of all other lines that can come in floods.
pub(crate) const EVENT: &str = "tensorferry::event";

/// What a line is about. Lines of different kinds do not displace each other.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Kind {
    /// A failure that a caller is told of, by its [`crate::Error::code`].
    Failure(u32),
    /// A peer can be reached that could not.
    Reachable,
    /// A peer has restarted, or has moved.
    Moved,
    /// A connection to a peer was lost, and everything on it is sent again.
    LaneLost,
    /// A peer sent what nobody had asked for.
    Violation,
    /// A connection to this engine's data port is closed for what came on it.
    Stranger,
    /// A request for the control port is refused, or is none.
    ControlRequest,
    /// A peer may not have the range that it asked for.
    RangeRefused,
    /// A peer cannot have what it asked for, since registered memory or its device fails.
    ServingMemory,
    /// A connection could not be accepted, or not be watched.
    Accepting,
    /// As many data connections from peers as the process has descriptors for.
    DataCrowd,
    /// More control connections than are served.
    ControlCrowd,
    /// A connection was closed because the buffer that it moved was unregistered.
    Revoked,
    /// More buffers than a descriptor holds.
    DescriptorFull,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Level {
    Warn,
    Info,
}

#[derive(Default)]
pub(crate) struct Log {
    measures: Mutex<HashMap<(Kind, Box<str>), Throttle>>,
}

/// How many kinds and peers have a measure of their own at the same time; the others of a kind share one.
const MEASURES: usize = 256;
const FIRST_QUIET: Duration = Duration::from_secs(1);
const LONGEST_QUIET: Duration = Duration::from_secs(64);

impl Log {
    /// Something that somebody has to look at; `who`: the peer that it is about, or nobody.
    #[cold]
    pub(crate) fn warn(&self, kind: Kind, who: &str, text: impl FnOnce() -> String) {
        self.say(Level::Warn, kind, who, text);
    }

    /// Something that the engine got over, or that is the business of others.
    #[cold]
    pub(crate) fn info(&self, kind: Kind, who: &str, text: impl FnOnce() -> String) {
        self.say(Level::Info, kind, who, text);
    }

    fn say(&self, level: Level, kind: Kind, who: &str, text: impl FnOnce() -> String) {
        // The lock is given back before the line goes to a subscriber, which may take long.
        let Some(unsaid) = self.turn(kind, who, clock::now()) else { return };
        let mut text = text();
        if unsaid > 0 {
            text += &format!(" ({unsaid} more lines of this kind were not logged)");
        }
        match (level, kind) {
            (_, Kind::Failure(code)) => tracing::warn!(target: FAILURE, code, "{text}"),
            (Level::Warn, _) => tracing::warn!(target: EVENT, "{text}"),
            (Level::Info, _) => tracing::info!(target: EVENT, "{text}"),
        }
    }

    /// Whether a line may be logged now, and how many were not since the last one.
    fn turn(&self, kind: Kind, who: &str, now: Instant) -> Option<u64> {
        let mut measures = locked(&self.measures);
        if let Some(measure) = measures.get_mut(&(kind, who.into())) {
            return measure.turn(now);
        }
        if measures.len() >= MEASURES {
            measures.retain(|_, measure| !measure.is_over(now));
        }
        let who = if measures.len() < MEASURES { who } else { "" };
        measures.entry((kind, who.into())).or_default().turn(now)
    }
}

#[derive(Debug, Default)]
struct Throttle {
    quiet_until: Option<Instant>,
    quiet: Duration,
    unsaid: u64,
}

impl Throttle {
    fn turn(&mut self, now: Instant) -> Option<u64> {
        if self.quiet_until.is_some_and(|until| now < until) {
            self.unsaid += 1;
            return None;
        }
        let goes_on = self.unsaid > 0;
        self.quiet = if goes_on { (self.quiet * 2).min(LONGEST_QUIET) } else { FIRST_QUIET };
        self.quiet_until = Some(now + self.quiet);
        Some(std::mem::take(&mut self.unsaid))
    }

    /// Whether forgetting it changes little: its time is over. What it did not say is not said then.
    fn is_over(&self, now: Instant) -> bool {
        self.quiet_until.is_none_or(|until| until <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(log: &Log, kind: Kind, who: &str, ms: impl Iterator<Item = u64>) -> Vec<u64> {
        let begin = Instant::now();
        ms.filter_map(|ms| log.turn(kind, who, begin + Duration::from_millis(ms))).collect()
    }

    #[test]
    fn a_fault_that_goes_on_is_said_ever_less_often_with_a_count() {
        let log = Log::default();
        // At 0, 1, 3, 7, 15, 31, 63, 127 and 191 seconds.
        let said = turns(&log, Kind::LaneLost, "a:1", 0..200_000);
        assert_eq!(said, [0, 999, 1999, 3999, 7999, 15_999, 31_999, 63_999, 63_999]);
    }

    #[test]
    fn a_fault_that_comes_back_after_a_while_is_said_at_once() {
        let said =
            turns(&Log::default(), Kind::LaneLost, "a:1", [0, 10, 5000, 5010, 8000].into_iter());
        assert_eq!(said, [0, 1, 1]);
        let said = turns(&Log::default(), Kind::LaneLost, "a:1", [0, 2000, 4000].into_iter());
        assert_eq!(said, [0, 0, 0]);
    }

    #[test]
    fn a_flood_of_one_hides_nobody_else() {
        let log = Log::default();
        let now = Instant::now();
        for _ in 0..1000 {
            log.turn(Kind::LaneLost, "noisy:1", now);
        }
        assert_eq!(log.turn(Kind::LaneLost, "quiet:1", now), Some(0));
        assert_eq!(log.turn(Kind::Moved, "noisy:1", now), Some(0));
        assert_eq!(log.turn(Kind::Failure(7), "noisy:1", now), Some(0));
        assert_eq!(log.turn(Kind::Failure(8), "noisy:1", now), Some(0));
    }

    #[test]
    fn more_names_than_are_remembered_share_one_line() {
        let log = Log::default();
        let now = Instant::now();
        let all = (0..10_000).filter(|i| log.turn(Kind::Stranger, &i.to_string(), now).is_some());
        assert_eq!(all.count(), MEASURES + 1);
        assert!(locked(&log.measures).len() <= MEASURES + 13);
        // When theirs is over, others have their turn.
        assert_eq!(log.turn(Kind::Stranger, "new", now + FIRST_QUIET), Some(0));
    }
}
