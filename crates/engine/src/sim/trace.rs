//! What happened last in a schedule.

use std::collections::VecDeque;
use std::time::Duration;

/// The last events, kept as text only if somebody will read it.
pub(super) struct Trace {
    events: VecDeque<(Duration, String)>,
    /// Events so far.
    count: usize,
    kept: bool,
}

const MOST: usize = 120;

thread_local! {
    static KEPT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Has schedules on this thread keep their events as text.
pub(super) fn keep(yes: bool) {
    KEPT.with(|kept| kept.set(yes));
}

impl Trace {
    pub(super) fn new() -> Self {
        Self { events: VecDeque::new(), count: 0, kept: KEPT.with(std::cell::Cell::get) }
    }

    pub(super) fn note(&mut self, at: Duration, text: impl FnOnce() -> String) {
        self.count += 1;
        if !self.kept {
            return;
        }
        if self.events.len() == MOST {
            self.events.pop_front();
        }
        self.events.push_back((at, text()));
    }

    /// How many events there were, which is another number if a schedule went another way.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    pub(super) fn to_text(&self) -> String {
        let line = |(at, text): &(Duration, String)| format!("{:>12.6} {text}\n", at.as_secs_f64());
        let skipped = self.count.saturating_sub(self.events.len());
        let first = format!("({skipped} earlier events)\n");
        first + &self.events.iter().map(line).collect::<String>()
    }
}
