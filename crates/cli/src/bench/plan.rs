//! What the initiator is going to do: the arguments, resolved.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tensorferry::Op;

use crate::args::{BenchInitiatorArgs, Operation};
use crate::measure::row::{Format, MOST_REQUESTS, Row, fits, pairs};
use crate::memory::Place;

/// Everything that is asked of one run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The segment name.
    pub(crate) target: String,
    pub(crate) rows: Vec<Row>,
    /// Nobody asked for these rows, so those that do not fit are left out.
    pub(crate) usual_rows: bool,
    pub(crate) threads: usize,
    /// The measured time of each row.
    pub(crate) seconds: Duration,
    pub(crate) verify: bool,
    pub(crate) sockets: Sockets,
    pub(crate) memory: Place,
    /// `None`: the address that leads to the target.
    pub(crate) host: Option<String>,
    pub(crate) overwrite: bool,
    pub(crate) format: Format,
    pub(crate) svg: Option<PathBuf>,
}

/// Whether plain sockets are measured beside the engine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sockets {
    WherePossible,
    Required,
    No,
}

impl BenchInitiatorArgs {
    /// # Errors
    /// Arguments that make no sense together.
    pub(crate) fn resolve(self) -> Result<Plan> {
        let mut ops: Vec<Op> = Vec::new();
        for op in self.op.iter().map(|op| op.op()) {
            if !ops.contains(&op) {
                ops.push(op);
            }
        }
        let mut rows = Vec::new();
        for (block, batch) in pairs(&self.sizes, &self.batches) {
            ensure!(
                fits(block, batch),
                "a batch of {batch} blocks of {block} bytes is more than is taken: at most 4 GiB and {MOST_REQUESTS} \
                 requests; choose smaller --sizes or --batches"
            );
            rows.extend(ops.iter().map(|op| Row { op: *op, block, batch }));
        }
        let folder = self.svg.as_deref().and_then(|file| file.parent());
        if let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty()) {
            ensure!(folder.is_dir(), "--svg: {} is no folder; make it first", folder.display());
        }
        if let Some(file) = self.svg.as_deref().filter(|file| file.is_dir()) {
            bail!("--svg: {} is a folder; name a file in it", file.display());
        }
        Ok(Plan {
            target: self.target,
            rows,
            usual_rows: self.sizes.is_empty() && self.batches.is_empty(),
            threads: self.threads.into(),
            seconds: self.seconds.duration(),
            verify: !self.no_verify,
            sockets: match (self.sockets, self.no_sockets) {
                (true, _) => Sockets::Required,
                (false, true) => Sockets::No,
                (false, false) => Sockets::WherePossible,
            },
            memory: self.memory,
            host: self.host,
            overwrite: self.overwrite,
            format: if self.json { Format::Json } else { Format::Table },
            svg: self.svg,
        })
    }
}

impl Operation {
    fn op(self) -> Op {
        match self {
            Self::Write => Op::Write,
            Self::Read => Op::Read,
        }
    }
}

impl Plan {
    /// Whether something is written to the target's memory.
    pub(crate) fn overwrites(&self) -> bool {
        self.verify || self.rows.iter().any(|row| row.op == Op::Write)
    }

    /// About how long `rows` rows take in all.
    pub(crate) fn expected(&self, rows: usize, sockets: bool) -> Duration {
        // Filling and comparing take about as long as moving does at the speed of one core's memory.
        let times = 1.1 + if self.verify { 1.5 } else { 0.0 } + if sockets { 1.1 } else { 0.0 };
        self.seconds.mul_f64(times * rows as f64)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchEnd, Cli, Command};

    fn plan(args: &str) -> Result<Plan> {
        let line = format!("tensorferry bench initiator {args}");
        let cli = Cli::try_parse_from(line.split_whitespace())?;
        match cli.command {
            Command::Bench(bench) => match bench.end {
                BenchEnd::Initiator(args) => args.resolve(),
                BenchEnd::Target(args) => panic!("{args:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn shown(args: &str) -> Vec<String> {
        plan(args).unwrap().rows.iter().map(Row::to_string).collect()
    }

    #[test]
    fn each_operation_is_measured_at_each_size() {
        assert_eq!(
            shown("a:1 --sizes 1,2 --batches 5"),
            ["write 1 B x 5", "read  1 B x 5", "write 2 B x 5", "read  2 B x 5"]
        );
        assert_eq!(shown("a:1 --sizes 1 --batches 5 --op read,read"), ["read  1 B x 5"]);
        assert_eq!(shown("a:1").len(), 10);
        assert!(plan("a:1").unwrap().usual_rows && !plan("a:1 --batches 2").unwrap().usual_rows);
    }

    #[test]
    fn the_target_is_left_as_it_is_only_if_nothing_is_written_or_verified() {
        assert!(plan("a:1 --op read").unwrap().overwrites());
        assert!(plan("a:1 --no-verify").unwrap().overwrites());
        assert!(!plan("a:1 --op read --no-verify").unwrap().overwrites());
    }

    #[test]
    fn what_makes_no_sense_says_what_would() {
        for (args, says) in [
            ("a:1 --sizes 4GiB --batches 2", "choose smaller --sizes or --batches"),
            ("a:1 --svg /nowhere/at/all.svg", "--svg: /nowhere/at is no folder"),
            ("a:1 --svg /", "--svg: / is a folder; name a file in it"),
            ("a:1 --sockets --no-sockets", "cannot be used with"),
            ("a:1 --threads 0", "1..=64"),
            ("a:1 --op both", "[possible values: write, read]"),
            ("", "<TARGET>"),
        ] {
            let text = plan(args).unwrap_err().to_string();
            assert!(text.contains(says), "{args}: {text}");
        }
    }

    #[test]
    fn the_time_that_is_announced_covers_all_rows() {
        let plan = plan("a:1 --seconds 2").unwrap();
        let all = plan.expected(10, true).as_secs_f64();
        assert!((all - 74.0).abs() < 0.01, "{all}");
        assert!(plan.expected(10, false) < plan.expected(10, true));
    }
}
