//! The rows of the demo, one after the other.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tensorferry::{Access, Config, Engine, RegisterOptions, Stats};

use super::plan::Plan;
use super::process::Target;
use crate::interrupt::Interrupt;
use crate::measure::rounds::{Limits, Measured, Rounds, Until, next_round};
use crate::measure::row::Row;
use crate::memory::Buffer;

/// The engine, the memory and the target process that all rows share.
pub(crate) struct Initiator<'a> {
    rounds: Rounds<'a, Target>,
}

impl<'a> Initiator<'a> {
    /// Starts the target process and an engine, and opens the target's segment.
    pub(crate) fn start(
        plan: &Plan,
        config: Config,
        target: Command,
        interrupt: &'a Interrupt,
    ) -> Result<Self> {
        let target = Target::start(target)?;
        let engine =
            Engine::new(&plan.host, config).context("the initiator's engine did not start")?;
        let memory = Buffer::for_demo(&engine, plan.memory.initiator, plan.memory_bytes())
            .context("the initiator did not start")?;
        let local = RegisterOptions::default().with_access(Access::Local);
        memory.register(&engine, &local)?;
        let segment = engine.open(&target.segment)?;
        let addr = target.addr;
        Ok(Self { rounds: Rounds::new(engine, segment, memory, (target, addr), interrupt) })
    }

    /// The names of the devices that the memories of both ends are on.
    pub(crate) fn devices(&self, plan: &Plan) -> [Option<String>; 2] {
        let Rounds { engine, remote, .. } = &self.rounds;
        [plan.memory.initiator.device_name(engine), remote.device.clone()]
    }

    /// Measures one row for about `share`, checks included; at least one batch is moved.
    ///
    /// `tick` is called between rounds.
    ///
    /// # Errors
    /// A transfer that failed, a target that is gone. Wrong bytes are a result, not an error.
    pub(crate) fn measure(
        &mut self,
        row: Row,
        share: Duration,
        tick: &dyn Fn(),
    ) -> Result<Measured> {
        let end = Instant::now() + share;
        let until = Until::Time(end);
        let mut measured = Measured::new(row)?;
        let places = self.rounds.places(row, 1, row.round_batches())?;
        let mut batches = row.warm_up_batches();
        let mut round = self.rounds.warm_up(&mut measured, &places, Limits { batches, until })?;
        while measured.mismatch.is_none() && !self.rounds.interrupt.is_set() {
            let left = end.saturating_duration_since(Instant::now());
            batches = next_round(batches, round, left).min(row.round_batches());
            round = self.rounds.round(&mut measured, &places, Limits { batches, until })?;
            tick();
            if Instant::now() >= end {
                break;
            }
        }
        Ok(measured)
    }

    /// Ends engine and target.
    ///
    /// # Errors
    /// The target failed at its end.
    pub(crate) fn stop(self) -> Result<Stats> {
        let Rounds { engine, remote, .. } = self.rounds;
        let stats = engine.stats();
        engine.close();
        remote.stop()?;
        Ok(stats)
    }
}
