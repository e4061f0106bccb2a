//! Moves the bytes and takes the time.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use tensorferry::{
    Access, Config, Engine, Op, OwnedRequest, RegisterOptions, Segment, Stats, SubmitOptions,
};

use super::plan::Plan;
use super::process::Target;
use crate::cpu;
use crate::interrupt::Interrupt;
use crate::measure::row::Row;
use crate::memory::Buffer;
use crate::pattern::{Mismatch, Pattern};

/// The engine, the memory and the peer that all rows share.
pub(crate) struct Initiator<'a> {
    engine: Engine,
    segment: Segment,
    memory: Buffer,
    target: Target,
    interrupt: &'a Interrupt,
    /// Drawn once, so that no run can pass on what an earlier one left.
    run: u64,
    rounds: u64,
}

/// What became of one row.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) row: Row,
    /// Batches in the measured time.
    pub(crate) batches: u64,
    /// The measured time.
    pub(crate) elapsed: Duration,
    /// How long each of the batches took, in nanoseconds.
    pub(crate) latency: Histogram<u64>,
    /// Processor time of the two processes in the measured time.
    pub(crate) initiator_cpu: Duration,
    pub(crate) target_cpu: Duration,
    /// Bytes that were moved and compared, those before the clock started among them.
    pub(crate) checked_bytes: u64,
    pub(crate) mismatch: Option<Mismatch>,
}

/// When a round ends.
#[derive(Clone, Copy)]
struct Limits {
    batches: usize,
    /// Not before its first batch.
    until: Instant,
}

/// The longest batch that the histogram tells from longer ones.
const LONGEST_NS: u64 = 3600 * 1_000_000_000;
/// How long an interrupt can go unnoticed.
const GLANCE: Duration = Duration::from_millis(50);

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
        let run = RandomState::new().build_hasher().finish();
        Ok(Self { engine, segment, memory, target, interrupt, run, rounds: 0 })
    }

    /// The names of the devices that the memories of both ends are on.
    pub(crate) fn devices(&self, plan: &Plan) -> [Option<String>; 2] {
        [plan.memory.initiator.device_name(&self.engine), self.target.device.clone()]
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
        let until = Instant::now() + share;
        let mut measured = Measured::new(row)?;
        let requests = self.requests(row)?;
        let mut batches = row.warm_up_batches();
        let mut round = self.round(&mut measured, &requests, Limits { batches, until })?;
        measured.forget_times();
        while measured.mismatch.is_none() && !self.interrupt.is_set() {
            batches = next_round(batches, round, until).min(row.round_batches());
            round = self.round(&mut measured, &requests, Limits { batches, until })?;
            tick();
            if Instant::now() >= until {
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
        let stats = self.engine.stats();
        self.engine.close();
        self.target.stop()?;
        Ok(stats)
    }

    /// The requests of one round, batch behind batch, each at its own place.
    fn requests(&self, row: Row) -> Result<Vec<OwnedRequest>> {
        let block = row.block as usize;
        (0..row.round_bytes())
            .step_by(block)
            .map(|at| {
                let remote = self.target.addr + at as u64;
                Ok(self.memory.request(row.op, at, remote, block)?)
            })
            .collect()
    }

    /// Fills both memories, moves batches with the clock running, compares what they moved, and says
    /// how long all of that took.
    fn round(
        &mut self,
        measured: &mut Measured,
        requests: &[OwnedRequest],
        limits: Limits,
    ) -> Result<Duration> {
        let began = Instant::now();
        let row = measured.row;
        self.rounds += 1;
        let pattern = Pattern::of_round(self.run, self.rounds);
        let (here, there) = match row.op {
            Op::Write => (pattern, pattern.complement()),
            Op::Read => (pattern.complement(), pattern),
        };
        let len = limits.batches * row.batch_bytes() as usize;
        self.target.fill(there, len)?;
        here.fill(&self.memory, len)?;
        self.target.filled()?;

        let moved = self.timed(measured, requests, limits)?;

        let len = moved as usize * row.batch_bytes() as usize;
        let mismatch = match row.op {
            Op::Write => self.target.check(pattern, len)?,
            Op::Read => pattern.check(&self.memory, len)?,
        };
        measured.checked_bytes += len as u64;
        measured.mismatch = measured.mismatch.or(mismatch);
        Ok(began.elapsed())
    }

    /// Moves batch after batch and says how many.
    fn timed(
        &mut self,
        measured: &mut Measured,
        requests: &[OwnedRequest],
        limits: Limits,
    ) -> Result<u64> {
        let per_batch = measured.row.batch as usize;
        let target_before = self.target.process_time()?;
        let before = cpu::process_time();
        let began = Instant::now();
        let (mut now, mut moved) = (began, 0);
        for batch in requests.chunks(per_batch).take(limits.batches) {
            if !self.run_batch(batch)? {
                break;
            }
            let then = std::mem::replace(&mut now, Instant::now());
            let took = u64::try_from((now - then).as_nanos()).unwrap_or(u64::MAX);
            measured.latency.saturating_record(took);
            moved += 1;
            if now >= limits.until || self.interrupt.is_set() {
                break;
            }
        }
        measured.elapsed += now - began;
        measured.initiator_cpu += cpu::process_time().saturating_sub(before);
        measured.target_cpu += self.target.process_time()?.saturating_sub(target_before);
        measured.batches += moved;
        Ok(moved)
    }

    /// Runs one batch; false if it was interrupted.
    fn run_batch(&self, requests: &[OwnedRequest]) -> Result<bool> {
        let batch = self.segment.submit_owned(requests, SubmitOptions::default())?;
        loop {
            if let Some(result) = batch.wait_timeout(GLANCE) {
                result?;
                return Ok(true);
            }
            if self.interrupt.is_set() {
                batch.cancel();
                return Ok(false);
            }
        }
    }
}

/// How many batches the next round may have if it is to end at `until`, after one of `batches` took
/// `took`: filling and comparing the memory of a round that is cut short would be time lost.
fn next_round(batches: usize, took: Duration, until: Instant) -> usize {
    /// The first rounds are slower than what follows, so little can be concluded from them.
    const GROWTH: usize = 8;
    let left = until.saturating_duration_since(Instant::now()).as_secs_f64();
    let fit = batches as f64 * left / took.as_secs_f64().max(1e-9);
    (fit as usize).clamp(1, batches.saturating_mul(GROWTH))
}

impl Measured {
    pub(super) fn new(row: Row) -> Result<Self> {
        Ok(Self {
            row,
            batches: 0,
            elapsed: Duration::ZERO,
            latency: Histogram::new_with_bounds(1, LONGEST_NS, 3)?,
            initiator_cpu: Duration::ZERO,
            target_cpu: Duration::ZERO,
            checked_bytes: 0,
            mismatch: None,
        })
    }

    /// Forgets the times, not what was checked.
    fn forget_times(&mut self) {
        self.batches = 0;
        self.elapsed = Duration::ZERO;
        self.latency.reset();
        self.initiator_cpu = Duration::ZERO;
        self.target_cpu = Duration::ZERO;
    }

    /// Bytes that were moved in the measured time.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.batches * self.row.batch_bytes()
    }

    /// Whether something was moved and every byte of it is right.
    pub(crate) fn is_verified(&self) -> bool {
        self.mismatch.is_none() && self.batches > 0
    }
}
