//! What the benchmark tells: a table for people, a document for programs, a chart.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use tensorferry::{Config, Engine, Stats};

use super::beside::Pairs;
use super::chart::{Chart, Point, Series};
use super::line::{Line, or_dash};
use super::peer::Peer;
use super::plan::Plan;
use crate::args::size_text;
use crate::machine::Machine;
use crate::measure::figures::{self, Memory, three_digits};
use crate::measure::rounds::Measured;
use crate::measure::row::Format;

/// One run, as `--json` prints it. A gigabyte is 10^9 bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    program: &'static str,
    version: &'static str,
    /// Every row was measured.
    pub(crate) complete: bool,
    /// Besides, every byte of every batch was right.
    pub(crate) verified: bool,
    pub(crate) interrupted: bool,
    pub(crate) error: Option<String>,
    machine: Machine,
    settings: Settings,
    /// `null` until there is a connection to it.
    target: Option<Target>,
    /// Whether plain sockets were measured beside.
    pub(crate) sockets: bool,
    /// Usual rows that did not fit the target's memory.
    pub(crate) left_out: Vec<String>,
    wall_seconds: f64,
    rows: Vec<Line>,
    /// The initiator's counters at the end.
    initiator_counters: serde_json::Map<String, serde_json::Value>,
    #[serde(skip)]
    planned: usize,
}

#[derive(Debug, Serialize)]
struct Settings {
    target: String,
    /// The initiator's segment name.
    initiator: Option<String>,
    seconds_per_row: f64,
    threads: usize,
    transport: &'static str,
    verify: bool,
    initiator_memory: Memory,
    lanes_per_peer: usize,
    io_threads: usize,
}

/// What is known of the other end.
#[derive(Debug, Serialize)]
struct Target {
    /// `bench`: `tensorferry bench target`; `foreign`: any other engine.
    kind: &'static str,
    /// The rest is known of the first kind only, but for the last two.
    version: Option<String>,
    memory: Option<Memory>,
    machine: Option<serde_json::Value>,
    #[serde(skip)]
    machine_text: Option<String>,
    memory_bytes: u64,
    /// How many bytes of it may have been written to; `null` if none.
    overwritten_bytes: Option<u64>,
}

/// A column: its title, whether it is shown, what stands in it.
type Column = (&'static str, bool, fn(&Line) -> String);

impl Report {
    pub(crate) fn new(plan: &Plan, config: &Config) -> Self {
        Self {
            program: "tensorferry bench initiator",
            version: tensorferry::VERSION,
            complete: false,
            verified: false,
            interrupted: false,
            error: None,
            machine: Machine::look(),
            settings: Settings {
                target: plan.target.clone(),
                initiator: None,
                seconds_per_row: plan.seconds.as_secs_f64(),
                threads: plan.threads,
                transport: "tcp",
                verify: plan.verify,
                initiator_memory: Memory::at(plan.memory),
                lanes_per_peer: config.lanes_per_peer,
                io_threads: config.io_threads,
            },
            target: None,
            sockets: false,
            left_out: Vec::new(),
            wall_seconds: 0.0,
            rows: Vec::new(),
            initiator_counters: serde_json::Map::new(),
            planned: plan.rows.len(),
        }
    }

    /// Notes who is at the two ends.
    pub(crate) fn met(
        &mut self,
        engine: &Engine,
        peer: &Peer,
        device: Option<String>,
        overwritten_bytes: Option<u64>,
    ) {
        self.settings.initiator = Some(engine.name().to_owned());
        self.settings.initiator_memory.device_name = device;
        let memory_bytes = peer.memory().1;
        self.target = Some(match peer {
            Peer::Bench(target) => {
                let Memory { place, device_name } = &target.welcome.memory;
                let device_name = device_name.as_deref().map(printable);
                Target {
                    kind: "bench",
                    version: Some(printable(&target.welcome.version)),
                    memory: Some(Memory { place: printable(place), device_name }),
                    machine: Some(target.welcome.machine.clone()),
                    machine_text: Some(printable(&target.welcome.machine_text)),
                    memory_bytes,
                    overwritten_bytes,
                }
            }
            Peer::Foreign(_) => Target {
                kind: "foreign",
                version: None,
                memory: None,
                machine: None,
                machine_text: None,
                memory_bytes,
                overwritten_bytes,
            },
        });
    }

    /// Adds a row and says it in one line.
    pub(crate) fn add(&mut self, measured: &Measured, pairs: Option<&Pairs>) -> String {
        let line = Line::of(measured, (self.settings.threads, self.settings.verify), pairs);
        let verdict = match line.mismatch {
            _ if line.measured_batches == 0 => "not measured".to_owned(),
            None if line.verified => "every byte verified".to_owned(),
            None => "not verified".to_owned(),
            Some(mismatch) => format!("WRONG BYTES: {mismatch}"),
        };
        let rate = three_digits(line.gigabytes_per_second);
        self.rows.push(line);
        format!("{}: {rate} GB/s, {verdict}", measured.row)
    }

    /// Notes how the run ended.
    pub(crate) fn close(&mut self, wall: Duration, counters: Option<Stats>) {
        self.wall_seconds = wall.as_secs_f64();
        let measured = self.rows.iter().filter(|row| row.measured_batches > 0).count();
        self.complete = measured > 0
            && measured + self.left_out.len() == self.planned
            && !self.interrupted
            && self.error.is_none();
        self.verified = self.complete && self.rows.iter().all(|row| row.verified);
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

    /// Draws the chart, if there is anything to be drawn.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn draw(&self, file: &Path) -> Result<()> {
        let chart = self.chart();
        if chart.series.is_empty() {
            return Ok(());
        }
        let text = chart.to_svg()?;
        fs::write(file, text)
            .with_context(|| format!("--svg: {} cannot be written", file.display()))
    }

    fn chart(&self) -> Chart {
        let mut series: Vec<Series> = Vec::new();
        for row in self.rows.iter().filter(|row| row.measured_batches > 0) {
            let name = match row.batch_requests {
                1 => row.operation.to_uppercase(),
                many => format!("{}, batches of {many}", row.operation.to_uppercase()),
            };
            let point = Point {
                block_bytes: row.block_bytes,
                gigabytes_per_second: row.gigabytes_per_second,
                p50_microseconds: row.batch_p50_microseconds,
                p99_microseconds: row.batch_p99_microseconds,
            };
            match series.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => series.push(Series { name, points: vec![point] }),
            }
        }
        for series in &mut series {
            series.points.sort_by_key(|point| point.block_bytes);
        }
        let caption = vec![
            format!("tensorferry {} on {}", self.version, self.machine),
            self.other_end(),
            self.between(),
            "GB: 10^9 bytes of payload. Latency: of one batch, from submission to completion."
                .to_owned(),
        ];
        Chart { caption, series }
    }

    /// Who is at the other end.
    fn other_end(&self) -> String {
        let who = match &self.target {
            Some(Target { version: Some(version), machine_text: Some(machine), .. }) => {
                format!("tensorferry {version} on {machine}")
            }
            _ => "no `bench target`".to_owned(),
        };
        format!("target {}: {who}", self.settings.target)
    }

    /// What is moved, and how.
    fn between(&self) -> String {
        let Settings { threads, lanes_per_peer, io_threads, .. } = &self.settings;
        let here = self.settings.initiator_memory.text();
        let there = self.target.as_ref().and_then(|target| target.memory.as_ref());
        let memory = match there.map(Memory::text) {
            Some(there) if there == here => format!("{here} at both ends"),
            Some(there) => format!("{here} here and {there} there"),
            None => format!("{here} here and the target's memory"),
        };
        format!(
            "{memory}, over TCP; threads {threads}, lanes per peer {lanes_per_peer}, IO threads {io_threads}"
        )
    }

    fn text(&self) -> String {
        let mut text = format!(
            "tensorferry {} on {}\n{}\n{}\n\n{}\n\nGB: 10^9 bytes of batches that were complete in the measured time. p50 to \
             max: of one batch, submit to completion.\nCPU s/GB: user and system time of each process.",
            self.version,
            self.machine,
            self.other_end(),
            self.between(),
            self.table(),
        );
        if self.settings.verify {
            text += " Filling and checking the memory is outside of all of these.";
        }
        if self.sockets {
            text += "\nOf plain sockets: the engine's GB/s by those of one plain TCP stream in turns with it, median of at \
                     least five pairs (lowest to highest).\nPing: one block one way and 8 bytes back on that stream, p50.";
        }
        if let Some(foreign) = self.target.as_ref().filter(|target| target.kind == "foreign") {
            text += "\nThe target is no `bench target`: its processor time is not known, and plain sockets were not measured.";
            if self.settings.verify {
                text += " What arrived there was read back\nwith the engine to be compared.";
            }
            if let Some(bytes) = foreign.overwritten_bytes {
                text += &format!(
                    " The first {} of its largest buffer were overwritten.",
                    size_text(bytes)
                );
            }
        }
        if !self.left_out.is_empty() {
            text += &format!(
                "\nLeft out, as the target lends only {}: {}.",
                self.target.as_ref().map_or_else(String::new, |t| size_text(t.memory_bytes)),
                self.left_out.join(", ")
            );
        }
        format!("{text}\n{}", self.verdict())
    }

    fn table(&self) -> Table {
        let columns: [Column; 14] = [
            ("operation", true, |row| row.operation.to_owned()),
            ("block", true, |row| size_text(row.block_bytes)),
            ("batch", true, |row| row.batch_requests.to_string()),
            ("GB/s", true, |row| three_digits(row.gigabytes_per_second)),
            ("requests/s", true, |row| format!("{:.0}", row.requests_per_second)),
            ("p50 µs", true, |row| format!("{:.1}", row.batch_p50_microseconds)),
            ("p90 µs", true, |row| format!("{:.1}", row.batch_p90_microseconds)),
            ("p99 µs", true, |row| format!("{:.1}", row.batch_p99_microseconds)),
            ("max µs", true, |row| format!("{:.1}", row.batch_max_microseconds)),
            ("CPU s/GB here", true, |row| three_digits(row.initiator_cpu_seconds_per_gigabyte)),
            ("there", true, |row| or_dash(row.target_cpu_seconds_per_gigabyte.map(three_digits))),
            ("of plain sockets", self.sockets, Line::ratio),
            ("ping µs", self.sockets, Line::ping),
            ("verified", true, Line::verdict),
        ];
        let shown: Vec<Column> = columns.into_iter().filter(|(_, shown, _)| *shown).collect();
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(shown.iter().map(|(title, ..)| *title));
        table.add_rows(
            self.rows
                .iter()
                .map(|row| shown.iter().map(|(.., cell)| cell(row)).collect::<Vec<_>>()),
        );
        for column in table.column_iter_mut().skip(1).take(shown.len() - 2) {
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
        let wrong = self.rows.iter().find_map(|row| row.mismatch);
        match (wrong, self.interrupted, self.complete) {
            (Some(wrong), ..) => format!("NOT verified: {wrong}"),
            (None, true, _) => format!("Interrupted after {seconds:.1} s."),
            (None, false, true) => format!("Done in {seconds:.1} s. NOT verified: --no-verify."),
            (None, false, false) => format!("Failed after {seconds:.1} s."),
        }
    }
}

/// What another machine has said, as a line that a terminal can be shown.
fn printable(text: &str) -> String {
    const LONGEST: usize = 200;
    text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use tensorferry::Op;

    use super::super::beside::tests::pairs;
    use super::super::line::tests::measured;
    use super::super::plan::Sockets;
    use super::*;
    use crate::measure::row::Row;
    use crate::memory::Place;
    use crate::pattern::Mismatch;

    fn plan(verify: bool) -> Plan {
        Plan {
            target: "10.0.0.1:15012".into(),
            rows: vec![Row { op: Op::Write, block: 4096, batch: 2 }],
            usual_rows: false,
            threads: 2,
            seconds: Duration::from_secs(1),
            verify,
            sockets: Sockets::WherePossible,
            memory: Place::Host,
            host: None,
            overwrite: false,
            format: Format::Json,
            svg: None,
        }
    }

    fn report(verify: bool) -> Report {
        Report::new(&plan(verify), &Config::default())
    }

    fn foreign() -> Target {
        Target {
            kind: "foreign",
            version: None,
            memory: None,
            machine: None,
            machine_text: None,
            memory_bytes: 1 << 20,
            overwritten_bytes: Some(8192),
        }
    }

    #[test]
    fn what_cannot_be_known_of_a_target_is_null_and_a_dash() {
        let mut report = report(true);
        report.target = Some(foreign());
        let mut measured = measured(1);
        measured.target_cpu = None;
        report.add(&measured, None);
        report.close(Duration::from_secs(1), None);
        let document = serde_json::to_value(&report).unwrap();
        let row = &document["rows"][0];
        for name in ["target_cpu_seconds", "cpu_seconds_per_gigabyte", "plain_sockets"] {
            assert!(row[name].is_null(), "{name}: {row}");
        }
        assert_eq!(document["target"]["kind"], "foreign");
        let text = report.text();
        assert!(text.contains("its processor time is not known"), "{text}");
        assert!(text.contains("The first 8 KiB of its largest buffer were overwritten."), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with("| write") && line.contains("–")),
            "{text}"
        );
    }

    #[test]
    fn only_a_whole_run_is_complete_and_only_with_checks_it_is_verified() {
        let verdict = |verify: bool, batches: u64, planned: usize, error: Option<&str>| {
            let mut report = report(verify);
            report.planned = planned;
            report.add(&measured(batches), None);
            report.error = error.map(str::to_owned);
            report.close(Duration::from_secs(1), None);
            (report.complete, report.verified, report.verdict())
        };
        let all = "All 0.01 MB that were moved in 1.0 s are verified, byte by byte.";
        assert_eq!(verdict(true, 1, 1, None), (true, true, all.into()));
        let done = "Done in 1.0 s. NOT verified: --no-verify.";
        assert_eq!(verdict(false, 1, 1, None), (true, false, done.into()));
        for (batches, planned, error) in [(0, 1, None), (1, 2, None), (1, 1, Some("gone"))] {
            let (complete, verified, text) = verdict(true, batches, planned, error);
            assert!(!complete && !verified && text == "Failed after 1.0 s.", "{text}");
        }
        let mut report = report(true);
        let wrong = Mismatch {
            wrong_bytes: 1,
            checked_bytes: 8192,
            first_offset_bytes: 4,
            expected: 1,
            found: 0,
        };
        let said = report.add(&Measured { mismatch: Some(wrong), ..measured(1) }, None);
        report.close(Duration::from_secs(1), None);
        assert!(said.contains("WRONG BYTES: 1 of 8192 bytes are wrong"), "{said}");
        assert!(report.has_wrong_bytes() && report.verdict().starts_with("NOT verified: 1 of"));
    }

    #[test]
    fn columns_of_plain_sockets_are_there_if_they_were_measured() {
        let mut report = report(true);
        report.add(&measured(1), Some(&pairs(&[1.0; 5])));
        assert!(!report.text().contains("of plain sockets"));
        report.sockets = true;
        let text = report.text();
        assert!(
            text.contains("of plain sockets") && text.contains("1.00 (1.00 to 1.00)"),
            "{text}"
        );
    }

    #[test]
    fn rows_of_one_operation_and_batch_size_are_one_series() {
        let mut report = report(true);
        for block in [1 << 20, 4096] {
            for (op, batch) in [(Op::Write, 1), (Op::Read, 16)] {
                let row = Row { op, block, batch };
                report.add(&Measured { row, ..measured(3) }, None);
            }
        }
        report.add(&measured(0), None);
        let chart = report.chart();
        let names: Vec<&str> = chart.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["WRITE", "READ, batches of 16"], "what was not measured is not drawn");
        let blocks: Vec<u64> = chart.series[0].points.iter().map(|p| p.block_bytes).collect();
        assert_eq!(blocks, [4096, 1 << 20]);
        assert!(chart.caption[0].starts_with("tensorferry "), "{:?}", chart.caption);
    }

    #[test]
    fn what_a_target_says_cannot_command_a_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a [2Jb ");
        assert_eq!(printable(&"x".repeat(1000)).len(), 200);
    }
}
