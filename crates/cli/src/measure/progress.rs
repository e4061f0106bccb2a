//! Something to look at while it runs, on stderr: a bar on a terminal, plain lines elsewhere.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    began: Instant,
}

impl Progress {
    pub(crate) fn begin(budget: Duration) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let length = u64::try_from(budget.as_millis()).unwrap_or(u64::MAX);
            let bar = ProgressBar::new(length);
            if let Ok(style) = ProgressStyle::with_template("{bar:30} {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, began: Instant::now() }
    }

    /// Something that is worth a line of its own, on a terminal, too.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            // Without a stderr there is nobody to tell.
            None => _ = writeln!(io::stderr(), "{text}"),
        }
    }

    /// `row` is being measured now.
    pub(crate) fn row(&self, row: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(row.to_owned());
        }
        self.tick();
    }

    /// Time has passed.
    pub(crate) fn tick(&self) {
        if let Some(bar) = &self.bar {
            let passed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
            bar.set_position(passed.min(bar.length().unwrap_or(passed)));
        }
    }

    /// A row is done; `said` is its result.
    pub(crate) fn done(&self, said: &str) {
        if self.bar.is_none() {
            // Without a stderr there is nobody to tell.
            let _ = writeln!(io::stderr(), "{said}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
