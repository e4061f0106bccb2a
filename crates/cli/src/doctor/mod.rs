//! `tensorferry doctor`: what can be moved here, and what stands in the way.

mod gpus;
mod proof;
mod settings;
mod text;

use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tensorferry::Config;
use tensorferry::gpu::Discovery;

use crate::args::DoctorArgs;
use crate::machine::Machine;
use crate::memory::Place;
use gpus::Gpus;
use proof::Proof;
use settings::Settings;

/// Everything that was found, as `--json` prints it; docs/doctor.md describes it.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    program: &'static str,
    version: &'static str,
    /// Host memory moves.
    ok: bool,
    /// Why not.
    problems: Vec<String>,
    machine: Machine,
    settings: Settings,
    gpu: Gpus,
    /// What was moved to find out: host memory.
    proofs: Vec<Proof>,
}

/// Prints what was found.
///
/// # Errors
/// Host memory does not move.
pub(crate) fn run(args: &DoctorArgs, config: &Config) -> Result<()> {
    let document = Document::examine(config);
    let text =
        if args.json { serde_json::to_string_pretty(&document)? } else { document.to_string() };
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", text.trim_end())
        .and_then(|()| stdout.flush())
        .context("stdout cannot be written")?;
    if !document.problems.is_empty() {
        bail!("{}", document.problems.join("\ntensorferry: "))
    }
    Ok(())
}

impl Document {
    pub(crate) fn examine(config: &Config) -> Self {
        let states = Discovery::new(config.gpu.clone()).examine();
        let gpu = Gpus::new(&config.gpu, &states);
        let proofs = vec![proof::prove(config, Place::Host)];
        let mut problems = Vec::new();
        if let Some(error) = &proofs[0].error {
            problems.push(format!("host memory does not move: {error}"));
        }
        Self {
            program: "tensorferry doctor",
            version: tensorferry::VERSION,
            ok: problems.is_empty(),
            problems,
            machine: Machine::look(),
            settings: Settings::look(config),
            gpu,
            proofs,
        }
    }
}
