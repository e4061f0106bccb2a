//! `tensorferry doctor`: what can be moved here, and what stands in the way.

mod addresses;
mod gpus;
mod listening;
mod paths;
mod proof;
mod settings;
mod sockets;
mod text;

use std::fmt;
use std::io::{self, Write};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use tensorferry::Config;
use tensorferry::gpu;

use crate::args::DoctorArgs;
use crate::machine::Machine;
use crate::memory::Place;
use addresses::Addresses;
use gpus::{Device, Gpus, Vendor};
use paths::{Path, Staging};
use proof::Proof;
use settings::Settings;
use sockets::Sockets;

/// What must be usable.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Requirement {
    /// Any vendor's device.
    Gpu,
    Vendor(gpu::Vendor),
}

/// A text that is no requirement.
#[derive(Debug)]
pub(crate) struct NoRequirement;

/// Everything that was found, as `--json` prints it; docs/doctor.md describes it.
#[derive(Debug, Serialize)]
pub(crate) struct Document {
    program: &'static str,
    version: &'static str,
    /// Host memory moves, and so does what was required.
    ok: bool,
    /// Why not.
    problems: Vec<String>,
    /// What is not in the way today.
    advice: Vec<String>,
    machine: Machine,
    settings: Settings,
    gpu: Gpus,
    sockets: Sockets,
    addresses: Addresses,
    paths: Vec<Path>,
    /// How device memory is staged where it is.
    staging: Staging,
    /// What was moved to find out: host memory, and devices if that was asked for.
    proofs: Vec<Proof>,
}

/// How long each vendor's library may take to answer if nobody says: some drivers need seconds for each device.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Prints what was found.
///
/// # Errors
/// Host memory does not move, or what was required does not.
pub(crate) fn run(args: &DoctorArgs, config: &Config) -> Result<()> {
    let document = Document::examine(config, &args.require, args.moving, args.patience.duration());
    let text =
        if args.json { serde_json::to_string_pretty(&document)? } else { document.to_string() };
    let mut stdout = io::stdout().lock();
    let printed = writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush());
    let outcome = match &document.problems[..] {
        _ if printed.is_err() => printed.context("stdout cannot be written"),
        [] => Ok(()),
        problems => Err(anyhow!("{}", problems.join("\ntensorferry: "))),
    };
    if document.gpu.hang() {
        // The exit handlers of a library may wait for its call that does not end, and the loader's for one that is
        // being opened.
        signal_hook::low_level::exit(crate::exit_code(outcome));
    }
    outcome
}

/// The document for Python: with the settings of its process's environment.
///
/// # Errors
/// A malformed setting, or a requirement that is none.
pub(crate) fn document(require: &[String], moving: bool) -> Result<String> {
    let config = Config::from_env()?;
    let require: Vec<Requirement> = require
        .iter()
        .map(|text| text.parse().with_context(|| format!("{text:?} cannot be required")))
        .collect::<Result<_>>()?;
    Ok(serde_json::to_string(&Document::examine(&config, &require, moving, PATIENCE))?)
}

impl Document {
    fn examine(config: &Config, require: &[Requirement], moving: bool, patience: Duration) -> Self {
        let sockets = Sockets::look(config);
        let addresses = Addresses::look(config);
        let mut proofs = vec![proof::prove(config, Place::Host)];
        // Only now, since a library that hangs can take the whole process along.
        let gpu = Gpus::look(&config.gpu, patience);
        let mut problems = Vec::new();
        if let Some(error) = &proofs[0].error {
            problems.push(format!("host memory does not move: {error}"));
        }
        if moving {
            prove_all(&gpu, config, &mut proofs, &mut problems);
        }
        for requirement in require {
            problems.extend(requirement.unmet(&gpu, config, &mut proofs));
        }
        Self {
            program: "tensorferry doctor",
            version: tensorferry::VERSION,
            ok: problems.is_empty(),
            problems,
            advice: sockets.advice().into_iter().chain(addresses.advice()).collect(),
            machine: Machine::look(),
            settings: Settings::look(config),
            paths: paths::paths(&gpu),
            staging: Staging::new(config),
            gpu,
            sockets,
            addresses,
            proofs,
        }
    }
}

/// Moves memory of every device.
fn prove_all(gpu: &Gpus, config: &Config, proofs: &mut Vec<Proof>, problems: &mut Vec<String>) {
    for device in gpu.devices() {
        if let Some(error) = prove_once(device, gpu, config, proofs) {
            problems.push(format!("memory of {} does not move: {error}", device.device));
        }
    }
}

/// Moves memory of a device, unless that has been done; says why it does not move.
fn prove_once(
    device: &Device,
    gpu: &Gpus,
    config: &Config,
    proofs: &mut Vec<Proof>,
) -> Option<String> {
    if let Some(known) = proofs.iter().find(|proof| proof.memory == device.device) {
        return known.error.clone();
    }
    if gpu.is_opening() {
        return Some("not tried, as no engine starts while a library is being opened".to_owned());
    }
    let proof = proof::prove(config, Place::Device(device.id));
    let error = proof.error.clone();
    proofs.push(proof);
    error
}

impl Requirement {
    /// Why it is not met; its devices are tried one by one until the memory of one moves.
    fn unmet(self, gpu: &Gpus, config: &Config, proofs: &mut Vec<Proof>) -> Option<String> {
        let vendors: Vec<&Vendor> =
            gpu.vendors.iter().filter(|vendor| self.is_met_by(vendor.of)).collect();
        let mut why = Vec::new();
        for vendor in &vendors {
            for device in &vendor.devices {
                match prove_once(device, gpu, config, proofs) {
                    None => return None,
                    Some(error) => {
                        why.push(format!("memory of {} does not move: {error}", device.device))
                    }
                }
            }
            if vendor.devices.is_empty() {
                why.push(vendor.text.clone());
            }
        }
        Some(format!("--require {self}: no device can be used: {}", why.join("; ")))
    }

    fn is_met_by(self, vendor: gpu::Vendor) -> bool {
        match self {
            Self::Gpu => true,
            Self::Vendor(only) => only == vendor,
        }
    }
}

impl FromStr for Requirement {
    type Err = NoRequirement;

    fn from_str(text: &str) -> std::result::Result<Self, NoRequirement> {
        match text.trim() {
            "gpu" => Ok(Self::Gpu),
            vendor => vendor.parse().map(Self::Vendor).map_err(|_| NoRequirement),
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu => f.write_str("gpu"),
            Self::Vendor(vendor) => vendor.fmt(f),
        }
    }
}

impl fmt::Display for NoRequirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected cuda, musa, hip, or gpu for any of them")
    }
}

impl std::error::Error for NoRequirement {}
