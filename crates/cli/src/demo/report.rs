//! What the demo tells: a table for people, a document for programs.

use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use tensorferry::{Config, Stats};

use super::plan::Plan;
use crate::args::size_text;
use crate::machine::Machine;
use crate::measure::figures::{self, Memory, three_digits};
use crate::measure::rounds::Measured;
use crate::measure::row::Format;
use crate::pattern::Mismatch;

/// One run, as `--json` prints it. A gigabyte is 10^9 bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    program: &'static str,
    version: &'static str,
    /// Every row was measured, and every byte of every batch was right.
    pub(crate) verified: bool,
    pub(crate) interrupted: bool,
    pub(crate) error: Option<String>,
    machine: Machine,
    settings: Settings,
    wall_seconds: f64,
    rows: Vec<Line>,
    /// The initiator's counters at the end.
    initiator_counters: serde_json::Map<String, serde_json::Value>,
}

#[derive(Debug, Serialize)]
struct Settings {
    host: String,
    budget_seconds: f64,
    transport: &'static str,
    /// GPUs were simulated, so the figures say nothing about real ones.
    simulated: bool,
    initiator_memory: Memory,
    target_memory: Memory,
    lanes_per_peer: usize,
    io_threads: usize,
}

#[derive(Debug, Serialize)]
struct Line {
    operation: &'static str,
    block_bytes: u64,
    batch_requests: u64,
    measured_batches: u64,
    measured_bytes: u64,
    measured_seconds: f64,
    gigabytes_per_second: f64,
    requests_per_second: f64,
    batch_p50_microseconds: f64,
    batch_p99_microseconds: f64,
    cpu_seconds_per_gigabyte: f64,
    initiator_cpu_seconds: f64,
    target_cpu_seconds: f64,
    verified: bool,
    verified_bytes: u64,
    mismatch: Option<Mismatch>,
}

/// So that nobody takes a figure for one of a GPU.
const SIMULATED: &str =
    "*** SIMULATED: no GPU was used. These figures say nothing about a real one. ***\n";

impl Report {
    pub(crate) fn new(plan: &Plan, config: &Config) -> Self {
        Self {
            program: "tensorferry demo",
            version: tensorferry::VERSION,
            verified: false,
            interrupted: false,
            error: None,
            machine: Machine::look(),
            settings: Settings {
                host: plan.host.clone(),
                budget_seconds: plan.budget.as_secs_f64(),
                transport: "tcp",
                simulated: plan.simulate.is_some(),
                initiator_memory: Memory::at(plan.memory.initiator),
                target_memory: Memory::at(plan.memory.target),
                lanes_per_peer: config.lanes_per_peer,
                io_threads: config.io_threads,
            },
            wall_seconds: 0.0,
            rows: Vec::new(),
            initiator_counters: serde_json::Map::new(),
        }
    }

    /// Notes the names of the devices of initiator and target.
    pub(crate) fn name_devices(&mut self, [initiator, target]: [Option<String>; 2]) {
        self.settings.initiator_memory.device_name = initiator;
        self.settings.target_memory.device_name = target;
    }

    /// Adds a row and says it in one line.
    pub(crate) fn add(&mut self, measured: &Measured) -> String {
        let line = Line::of(measured);
        let verdict = match line.mismatch {
            None if line.verified => "every byte verified".to_owned(),
            None => "not measured".to_owned(),
            Some(mismatch) => format!("WRONG BYTES: {mismatch}"),
        };
        let said = format!(
            "{}: {} GB/s, {verdict}",
            measured.row,
            three_digits(line.gigabytes_per_second)
        );
        self.rows.push(line);
        said
    }

    /// Notes how the run ended. `planned` rows make a whole one.
    pub(crate) fn close(&mut self, planned: usize, wall: Duration, counters: Option<Stats>) {
        self.wall_seconds = wall.as_secs_f64();
        let whole = self.rows.len() == planned && self.rows.iter().all(|row| row.verified);
        self.verified = whole && self.error.is_none();
        let pairs = counters.iter().flat_map(Stats::to_pairs);
        self.initiator_counters =
            pairs.map(|(name, value)| (name.to_owned(), value.into())).collect();
    }

    pub(crate) fn has_wrong_bytes(&self) -> bool {
        self.rows.iter().any(|row| row.mismatch.is_some())
    }

    /// Prints the document, or the table if there is anything in it.
    ///
    /// # Errors
    /// Stdout cannot be written.
    pub(crate) fn print(&self, format: Format) -> Result<()> {
        let text = (!self.rows.is_empty()).then(|| self.text());
        figures::print(self, text, format)
    }

    fn text(&self) -> String {
        let simulated = if self.settings.simulated { SIMULATED } else { "" };
        format!(
            "{simulated}tensorferry {} on {}\n\
             two processes on {}, {} over TCP; each: lanes per peer {}, IO threads {}\n\n\
             {}\n\n\
             GB: 10^9 bytes. p50 and p99: of one batch, submit to completion. CPU s/GB: user and system time\n\
             of both processes. Filling and checking the memory is outside of all of these.\n\
             {simulated}{}",
            self.version,
            self.machine,
            self.settings.host,
            self.settings.memories(),
            self.settings.lanes_per_peer,
            self.settings.io_threads,
            self.table(),
            self.verdict(),
        )
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_header([
            "operation",
            "block",
            "batch",
            "GB/s",
            "requests/s",
            "p50 µs",
            "p99 µs",
            "CPU s/GB",
            "verified",
        ]);
        table.add_rows(self.rows.iter().map(Line::cells));
        for column in table.column_iter_mut().skip(1).take(7) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    fn verdict(&self) -> String {
        let bytes: u64 = self.rows.iter().map(|row| row.verified_bytes).sum();
        let (moved, unit) = match bytes as f64 {
            many if many >= 1e9 => (many / 1e9, "GB"),
            few => (few / 1e6, "MB"),
        };
        let seconds = self.wall_seconds;
        if self.verified {
            return format!(
                "All {moved:.2} {unit} that were moved in {seconds:.1} s are verified, byte by byte."
            );
        }
        let wrong = self.rows.iter().filter_map(|row| row.mismatch);
        let wrong: Vec<String> = wrong.map(|mismatch| mismatch.to_string()).collect();
        match (self.interrupted, &wrong[..]) {
            (_, [first, ..]) => format!("NOT verified: {first}"),
            (true, []) => format!("Interrupted after {seconds:.1} s."),
            (false, []) => format!("Failed after {seconds:.1} s."),
        }
    }
}

impl Settings {
    /// What is moved, for people.
    fn memories(&self) -> String {
        match (self.initiator_memory.text(), self.target_memory.text()) {
            (initiator, target) if initiator != target => {
                format!("{initiator} of the initiator and {target} of the target")
            }
            (both, _) => both,
        }
    }
}

impl Line {
    fn of(measured: &Measured) -> Self {
        let secs = measured.elapsed.as_secs_f64();
        let bytes = measured.moved_bytes();
        let gigabytes = bytes as f64 / 1e9;
        let per = |amount: f64, whole: f64| if whole > 0.0 { amount / whole } else { 0.0 };
        let target_cpu = measured.target_cpu.unwrap_or_default();
        let cpu = measured.initiator_cpu + target_cpu;
        let micros = |quantile| measured.latency.value_at_quantile(quantile) as f64 / 1e3;
        let requests = (measured.batches * measured.row.batch) as f64;
        Self {
            operation: measured.row.operation(),
            block_bytes: measured.row.block,
            batch_requests: measured.row.batch,
            measured_batches: measured.batches,
            measured_bytes: bytes,
            measured_seconds: secs,
            gigabytes_per_second: per(gigabytes, secs),
            requests_per_second: per(requests, secs),
            batch_p50_microseconds: micros(0.50),
            batch_p99_microseconds: micros(0.99),
            cpu_seconds_per_gigabyte: per(cpu.as_secs_f64(), gigabytes),
            initiator_cpu_seconds: measured.initiator_cpu.as_secs_f64(),
            target_cpu_seconds: target_cpu.as_secs_f64(),
            verified: measured.is_verified(),
            verified_bytes: if measured.mismatch.is_none() { measured.checked_bytes } else { 0 },
            mismatch: measured.mismatch,
        }
    }

    fn cells(&self) -> [String; 9] {
        [
            self.operation.to_owned(),
            size_text(self.block_bytes),
            self.batch_requests.to_string(),
            three_digits(self.gigabytes_per_second),
            format!("{:.0}", self.requests_per_second),
            format!("{:.1}", self.batch_p50_microseconds),
            format!("{:.1}", self.batch_p99_microseconds),
            three_digits(self.cpu_seconds_per_gigabyte),
            if self.verified { "yes" } else { "NO" }.to_owned(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::Ends;
    use super::*;
    use crate::measure::row::Row;
    use crate::memory::Place;
    use tensorferry::Op;

    fn report() -> Report {
        let rows = vec![Row { op: Op::Write, block: 4096, batch: 2 }];
        let budget = Duration::from_secs(1);
        let memory = Ends { initiator: Place::Host, target: Place::Host };
        let (host, simulate, format) = ("127.0.0.1".into(), None, Format::Json);
        let plan = Plan { rows, budget, host, memory, simulate, format };
        Report::new(&plan, &Config::default())
    }

    fn measured(batches: u64, mismatch: Option<Mismatch>) -> Measured {
        let row = Row { op: Op::Write, block: 4096, batch: 2 };
        let elapsed = Duration::from_millis(4);
        let mut measured = Measured { batches, elapsed, mismatch, ..Measured::new(row).unwrap() };
        measured.latency.saturating_record(2_000_000);
        measured.initiator_cpu = Duration::from_millis(3);
        measured.target_cpu = Some(Duration::from_millis(5));
        measured.checked_bytes = batches * row.batch_bytes();
        measured
    }

    #[test]
    fn units_are_what_the_names_say() {
        let line = Line::of(&measured(1000, None));
        assert_eq!((line.measured_bytes, line.verified_bytes), (8_192_000, 8_192_000));
        assert_eq!(line.gigabytes_per_second, 0.008_192 / 0.004);
        assert_eq!(line.requests_per_second, 500_000.0);
        assert!((line.batch_p50_microseconds - 2000.0).abs() < 2.0);
        assert_eq!(line.cpu_seconds_per_gigabyte, 0.008 / 0.008_192);
    }

    #[test]
    fn only_a_whole_run_without_a_wrong_byte_is_verified() {
        let wrong = Mismatch {
            wrong_bytes: 1,
            checked_bytes: 8192,
            first_offset_bytes: 4,
            expected: 1,
            found: 0,
        };
        let verdict = |rows: &[Measured], planned: usize, error: Option<&str>| {
            let mut report = report();
            let said: Vec<String> = rows.iter().map(|row| report.add(row)).collect();
            report.error = error.map(str::to_owned);
            report.close(planned, Duration::from_secs(1), None);
            (report.verified, said.concat(), report.verdict())
        };
        let (verified, said, text) = verdict(&[measured(1, None)], 1, None);
        assert!(verified && said.ends_with("every byte verified"), "{said}");
        assert_eq!(text, "All 0.01 MB that were moved in 1.0 s are verified, byte by byte.");

        let (verified, said, text) = verdict(&[measured(1, Some(wrong))], 1, None);
        let mismatch =
            "1 of 8192 bytes are wrong; the first one, at offset 4, is 0x00 instead of 0x01";
        assert!(!verified && said.ends_with(&format!("WRONG BYTES: {mismatch}")), "{said}");
        assert_eq!(text, format!("NOT verified: {mismatch}"));

        assert!(!verdict(&[measured(1, None)], 2, None).0, "a row is missing");
        assert!(!verdict(&[measured(0, None)], 1, None).0, "nothing was measured");
        assert!(!verdict(&[measured(1, None)], 1, Some("the target is gone")).0);
    }

    #[test]
    fn the_header_says_what_was_moved_and_that_it_was_simulated() {
        let mut report = report();
        let header = |report: &Report| report.text().lines().nth(1).unwrap().to_owned();
        assert!(header(&report).starts_with("two processes on 127.0.0.1, host memory over TCP;"));
        assert!(!report.text().contains("SIMULATED"));
        report.settings.target_memory.place = "cuda:1".into();
        report.name_devices([None, Some("a GPU".into())]);
        let says = "host memory of the initiator and memory of cuda:1 (a GPU) of the target over";
        assert!(header(&report).contains(says), "{}", header(&report));
        report.settings.simulated = true;
        assert!(report.text().starts_with("*** SIMULATED: no GPU was used."));
        assert_eq!(report.text().matches("*** SIMULATED").count(), 2);
    }
}
