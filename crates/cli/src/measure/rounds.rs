//! Moves the bytes and takes the time.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hdrhistogram::Histogram;
use tensorferry::{Engine, Op, OwnedRequest, Segment, SubmitOptions};

use super::row::{PART_ALIGNMENT, Row};
use crate::cpu;
use crate::interrupt::Interrupt;
use crate::memory::Buffer;
use crate::pattern::{Mismatch, Pattern};

/// Whoever has the memory at the other end.
pub(crate) trait Remote {
    /// Has the first bytes of the memory filled; the answer is [`Remote::filled`].
    fn fill(&mut self, pattern: Pattern, len_bytes: usize) -> Result<()>;

    /// Waits until they are filled.
    fn filled(&mut self, len_bytes: usize) -> Result<()>;

    /// Has a part of the memory compared.
    fn check(&mut self, pattern: Pattern, part: Part) -> Result<Option<Mismatch>>;

    /// The processor time that the process there has used so far, if that can be known.
    fn process_time(&mut self) -> Result<Option<Duration>>;
}

/// A part of a memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Part {
    /// A multiple of eight.
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// The engine, the memory and the peer that all rows share.
pub(crate) struct Rounds<'a, R> {
    pub(crate) engine: Engine,
    pub(crate) segment: Segment,
    /// Of this process.
    pub(crate) memory: Buffer,
    pub(crate) remote: R,
    /// Where the memory at the other end begins.
    pub(crate) remote_addr: u64,
    pub(crate) interrupt: &'a Interrupt,
    /// Whether memory is filled before a round and compared after it.
    pub(crate) verify: bool,
    /// Drawn once, so that no run can pass on what an earlier one left.
    run: u64,
    rounds: u64,
}

/// The requests of a row: of each thread, batch behind batch, each at a place of its own.
pub(crate) struct Places {
    requests: Vec<Vec<OwnedRequest>>,
    /// From the memory of one thread to that of the next.
    stride: usize,
}

impl Places {
    /// Bytes of memory that `threads` threads with `batches` places each need.
    pub(crate) fn memory_bytes(row: Row, threads: usize, batches: usize) -> usize {
        let len = batches * row.batch_bytes() as usize;
        (threads - 1) * Self::stride(len) + len
    }

    fn stride(len: usize) -> usize {
        len.next_multiple_of(PART_ALIGNMENT as usize)
    }
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
    /// Processor time of the two processes in the measured time; of the other one, if it can be known.
    pub(crate) initiator_cpu: Duration,
    pub(crate) target_cpu: Option<Duration>,
    /// Bytes that were moved, those before the clock started among them.
    pub(crate) carried_bytes: u64,
    /// Bytes of these that were compared.
    pub(crate) checked_bytes: u64,
    pub(crate) mismatch: Option<Mismatch>,
}

/// When a round ends.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Of each thread.
    pub(crate) batches: usize,
    pub(crate) until: Until,
}

/// When a round ends that has not moved all of its batches; not before its first ones.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    Time(Instant),
    /// So long after its clock has started.
    Passed(Duration),
}

/// What the threads of a round have in common.
struct Runner<'a> {
    segment: &'a Segment,
    interrupt: &'a Interrupt,
    per_batch: usize,
    batches: usize,
    /// A batch of one of them has failed.
    failed: AtomicBool,
}

/// What one thread has moved.
struct Moved {
    batches: usize,
    latencies_ns: Vec<u64>,
    ended: Instant,
}

/// What the two processes had cost when the clock started.
struct Clock {
    target: Option<Duration>,
    initiator: Duration,
    began: Instant,
}

/// The longest batch that the histogram tells from longer ones.
const LONGEST_NS: u64 = 3600 * 1_000_000_000;
/// How long an interrupt can go unnoticed.
pub(crate) const GLANCE: Duration = Duration::from_millis(50);

impl<'a, R: Remote> Rounds<'a, R> {
    pub(crate) fn new(
        engine: Engine,
        segment: Segment,
        memory: Buffer,
        (remote, remote_addr): (R, u64),
        interrupt: &'a Interrupt,
    ) -> Self {
        let run = RandomState::new().build_hasher().finish();
        let verify = true;
        Self { engine, segment, memory, remote, remote_addr, interrupt, verify, run, rounds: 0 }
    }

    /// The requests of a row of which `threads` threads move up to `batches` batches in a round.
    ///
    /// # Errors
    /// The memory is too small for them.
    pub(crate) fn places(&self, row: Row, threads: usize, batches: usize) -> Result<Places> {
        let block = row.block as usize;
        let len = batches * row.batch_bytes() as usize;
        let stride = Places::stride(len);
        let of_thread = |thread: usize| -> Result<Vec<OwnedRequest>> {
            let first = thread * stride;
            (first..first + len)
                .step_by(block)
                .map(|at| {
                    let remote = self.remote_addr + at as u64;
                    Ok(self.memory.request(row.op, at, remote, block)?)
                })
                .collect()
        };
        let requests = (0..threads).map(of_thread).collect::<Result<_>>()?;
        Ok(Places { requests, stride })
    }

    /// A round before the clock of a row starts: it is compared, and not measured.
    pub(crate) fn warm_up(
        &mut self,
        measured: &mut Measured,
        places: &Places,
        limits: Limits,
    ) -> Result<Duration> {
        let mut aside = Measured::new(measured.row)?;
        let took = self.round(&mut aside, places, limits)?;
        measured.carried_bytes += aside.carried_bytes;
        measured.checked_bytes += aside.checked_bytes;
        measured.mismatch = measured.mismatch.or(aside.mismatch);
        Ok(took)
    }

    /// Fills both memories, moves batches with the clock running, compares what they moved, and says
    /// how long all of that took.
    pub(crate) fn round(
        &mut self,
        measured: &mut Measured,
        places: &Places,
        limits: Limits,
    ) -> Result<Duration> {
        let began = Instant::now();
        let batch_bytes = measured.row.batch_bytes() as usize;
        self.rounds += 1;
        let pattern = Pattern::of_round(self.run, self.rounds);
        if self.verify {
            let others = places.stride * (places.requests.len() - 1);
            self.fill(measured.row.op, pattern, others + limits.batches * batch_bytes)?;
        }
        let moved = self.timed(measured, places, limits)?;
        for (thread, batches) in moved.into_iter().enumerate() {
            let part = Part { offset: thread * places.stride, len: batches * batch_bytes };
            measured.carried_bytes += part.len as u64;
            if self.verify && part.len > 0 {
                let mismatch = self.check(measured.row.op, pattern, part)?;
                measured.checked_bytes += part.len as u64;
                measured.mismatch = measured.mismatch.or(mismatch);
            }
        }
        Ok(began.elapsed())
    }

    /// Fills what is sent from with the pattern, and what is sent to with its complement.
    fn fill(&mut self, op: Op, pattern: Pattern, len: usize) -> Result<()> {
        let (here, there) = match op {
            Op::Write => (pattern, pattern.complement()),
            Op::Read => (pattern.complement(), pattern),
        };
        self.remote.fill(there, len)?;
        here.fill(&self.memory, len)?;
        self.remote.filled(len)
    }

    fn check(&mut self, op: Op, pattern: Pattern, part: Part) -> Result<Option<Mismatch>> {
        match op {
            Op::Write => self.remote.check(pattern, part),
            Op::Read => Ok(pattern.check_part(&self.memory, part.offset, part.len)?),
        }
    }

    /// Moves batch after batch with the clock running, and says how many each thread has moved.
    fn timed(
        &mut self,
        measured: &mut Measured,
        places: &Places,
        limits: Limits,
    ) -> Result<Vec<usize>> {
        let segment = self.segment.clone();
        let runner = Runner {
            segment: &segment,
            interrupt: self.interrupt,
            per_batch: measured.row.batch as usize,
            batches: limits.batches,
            failed: AtomicBool::new(false),
        };
        let (clock, moved) = match &places.requests[..] {
            [one] => {
                let clock = Clock::start(&mut self.remote)?;
                let moved = runner.run(one, limits.until.from(clock.began));
                (clock, vec![moved])
            }
            many => self.together(&runner, many, limits.until)?,
        };
        let moved = moved.into_iter().collect::<Result<Vec<Moved>>>()?;
        clock.stop(measured, &moved, &mut self.remote)?;
        Ok(moved.into_iter().map(|moved| moved.batches).collect())
    }

    /// Runs a thread for each of `parts`. The clock starts when all of them are there.
    fn together(
        &mut self,
        runner: &Runner<'_>,
        parts: &[Vec<OwnedRequest>],
        until: Until,
    ) -> Result<(Clock, Vec<Result<Moved>>)> {
        // When they start; they wait while it is being written, and go home if it was not.
        let start = RwLock::new(None);
        let run = |part: &[OwnedRequest]| match start.read().map(|began| *began) {
            Ok(Some(began)) => runner.run(part, until.from(began)),
            _ => bail!("the round did not start"),
        };
        let run = &run;
        thread::scope(|scope| {
            let mut gate = start.write().map_err(|_| anyhow!("a thread has panicked"))?;
            let mut running = Vec::with_capacity(parts.len());
            for part in parts {
                let spawned = thread::Builder::new().spawn_scoped(scope, move || run(part));
                running.push(spawned.context("a thread did not start; use fewer --threads")?);
            }
            let clock = Clock::start(&mut self.remote)?;
            *gate = Some(clock.began);
            drop(gate);
            let joined = running.into_iter().map(|thread| match thread.join() {
                Ok(moved) => moved,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            Ok((clock, joined.collect()))
        })
    }
}

impl Clock {
    fn start(remote: &mut impl Remote) -> Result<Self> {
        let target = remote.process_time()?;
        let initiator = cpu::process_time();
        Ok(Self { target, initiator, began: Instant::now() })
    }

    /// The measured time ends with the last batch of any thread.
    fn stop(
        self,
        measured: &mut Measured,
        moved: &[Moved],
        remote: &mut impl Remote,
    ) -> Result<()> {
        let ended = moved.iter().map(|moved| moved.ended).max().unwrap_or(self.began);
        measured.elapsed += ended - self.began;
        measured.initiator_cpu += cpu::process_time().saturating_sub(self.initiator);
        let target = self.target.zip(remote.process_time()?);
        let target = target.map(|(before, after)| after.saturating_sub(before));
        measured.target_cpu = measured.target_cpu.zip(target).map(|(sum, more)| sum + more);
        for moved in moved {
            measured.batches += moved.batches as u64;
            for latency in &moved.latencies_ns {
                measured.latency.saturating_record(*latency);
            }
        }
        Ok(())
    }
}

impl Runner<'_> {
    /// Moves batch after batch of `requests`, from the first one again after the last.
    fn run(&self, requests: &[OwnedRequest], until: Instant) -> Result<Moved> {
        /// More than a verified round has.
        const MANY: usize = 4096;
        let mut now = Instant::now();
        let latencies_ns = Vec::with_capacity(self.batches.min(MANY));
        let mut moved = Moved { batches: 0, latencies_ns, ended: now };
        for batch in requests.chunks(self.per_batch).cycle().take(self.batches) {
            match self.run_batch(batch) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
            let then = std::mem::replace(&mut now, Instant::now());
            moved.latencies_ns.push(u64::try_from((now - then).as_nanos()).unwrap_or(u64::MAX));
            moved.batches += 1;
            moved.ended = now;
            if now >= until || self.is_over() {
                break;
            }
        }
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
            if self.is_over() {
                batch.cancel();
                return Ok(false);
            }
        }
    }

    fn is_over(&self) -> bool {
        self.interrupt.is_set() || self.failed.load(Ordering::Relaxed)
    }
}

impl Until {
    fn from(self, began: Instant) -> Instant {
        match self {
            Self::Time(instant) => instant,
            Self::Passed(duration) => began + duration,
        }
    }
}

/// How many batches the next round may have if it is to end in `left`, after one of `batches` took
/// `took`: filling and comparing the memory of a round that is cut short would be time lost.
pub(crate) fn next_round(batches: usize, took: Duration, left: Duration) -> usize {
    /// The first rounds are slower than what follows, so little can be concluded from them.
    const GROWTH: usize = 8;
    let fit = batches as f64 * left.as_secs_f64() / took.as_secs_f64().max(1e-9);
    (fit as usize).clamp(1, batches.saturating_mul(GROWTH).max(1))
}

impl Measured {
    pub(crate) fn new(row: Row) -> Result<Self> {
        Ok(Self {
            row,
            batches: 0,
            elapsed: Duration::ZERO,
            latency: Histogram::new_with_bounds(1, LONGEST_NS, 3)?,
            initiator_cpu: Duration::ZERO,
            target_cpu: Some(Duration::ZERO),
            carried_bytes: 0,
            checked_bytes: 0,
            mismatch: None,
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_follows_is_as_long_as_there_is_time_for() {
        let secs = Duration::from_secs;
        assert_eq!(next_round(10, secs(1), secs(2)), 20);
        assert_eq!(next_round(10, secs(1), secs(100)), 80, "but little is known from one round");
        assert_eq!(next_round(10, secs(1), Duration::ZERO), 1);
        assert_eq!(next_round(0, secs(1), secs(1)), 1);
    }
}
