//! `tensorferry demo`: two processes, real sockets, every byte compared.

mod host;
mod initiator;
mod plan;
mod process;
mod report;
mod simulator;
mod target;

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tensorferry::{Config, Stats};

use crate::interrupt::{Interrupt, Interrupted};
use crate::measure::progress::Progress;
use initiator::Initiator;
pub(crate) use plan::Plan;
use plan::Simulate;
use process::Target;
use report::Report;
use simulator::Simulator;
pub(crate) use target::serve;

/// Runs the demo and prints what it found, also if it fails on the way.
///
/// # Errors
/// A transfer failed, a byte was wrong, or it was interrupted.
pub(crate) fn run(plan: &Plan, config: Config, rerun: &[OsString]) -> Result<()> {
    let interrupt = Interrupt::listen().context("SIGINT cannot be listened for")?;
    let began = Instant::now();
    let mut report = Report::new(plan, &config);
    let outcome = measure_all(plan, config, rerun, &interrupt, &mut report);
    report.error = outcome.as_ref().err().map(crate::chain);
    report.interrupted = interrupt.is_set();
    report.close(plan.rows.len(), began.elapsed(), outcome.as_ref().ok().copied());
    let printed = report.print(plan.format);
    match outcome {
        // Most likely it is what the signal has led to.
        Err(error) if report.interrupted => return Err(error.context(Interrupted)),
        outcome => _ = outcome?,
    }
    if report.has_wrong_bytes() {
        bail!("what arrived is not what was sent; please report this with the output above")
    }
    if report.interrupted {
        return Err(Interrupted.into());
    }
    printed?;
    ensure!(
        report.verified,
        "not every line was measured; please report this with the output above"
    );
    Ok(())
}

fn measure_all(
    plan: &Plan,
    mut config: Config,
    rerun: &[OsString],
    interrupt: &Interrupt,
    report: &mut Report,
) -> Result<Stats> {
    let end = Instant::now() + plan.budget;
    let progress = Progress::begin(plan.budget);
    if config.bind.is_none() && config.advertise.is_none() {
        host::check(&plan.host)?;
    }
    let simulator = plan
        .simulate
        .as_ref()
        .map(|Simulate(library)| Simulator::install(library.as_deref(), plan.memory.vendors()));
    let simulator = simulator.transpose()?;
    if let Some(simulator) = &simulator {
        simulator.choose(&mut config);
    }
    progress.row("starting the target");
    let mut target = Target::command(plan, rerun)?;
    target.envs(simulator.iter().flat_map(Simulator::variables));
    let mut initiator = Initiator::start(plan, config, target, interrupt)?;
    report.name_devices(initiator.devices(plan));
    for (at, row) in plan.rows.iter().enumerate() {
        if interrupt.is_set() {
            break;
        }
        progress.row(&row.to_string());
        let share = share(end, plan.rows.len() - at);
        let measured = initiator
            .measure(*row, share, &|| progress.tick())
            .with_context(|| format!("while measuring {row}"))?;
        progress.done(&report.add(&measured));
    }
    initiator.stop()
}

/// What one of `rows` rows may take, if they end together at `end`.
fn share(end: Instant, rows: usize) -> Duration {
    let left = end.saturating_duration_since(Instant::now());
    left / u32::try_from(rows).unwrap_or(u32::MAX).max(1)
}
