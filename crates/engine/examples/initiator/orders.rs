//! What the initiator can be told.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tensorferry::{Batch, Engine, Error, Op, Request, SubmitOptions};

use crate::Failure;
use crate::area::Area;

/// An order and its arguments. Places in local memory count from its start; those of the peer are addresses.
#[derive(Deserialize)]
#[serde(tag = "do", content = "args", rename_all = "snake_case")]
pub(crate) enum Order {
    /// Starts batches, as close together as can be. Answers their numbers, once all are started.
    Submit { batches: Vec<Wanted>, timeout_ms: Option<u64> },
    /// Waits for batches, at most for so long; answers what became of each.
    Outcome { batches: Vec<usize>, seconds: f64 },
    /// Starts a batch, cancels it after a while, and takes its memory away at once.
    Cancel { batch: Wanted, after_us: u64 },
    /// Lets the process touch memory, or not.
    Protect { at: usize, len: usize, open: bool },
    /// Writes a pattern.
    Fill { at: usize, len: usize, seed: u64 },
    /// Where memory is not a pattern.
    Differs { at: usize, len: usize, seed: u64 },
    /// The engine's counters, and the descriptors and threads of the process.
    Stats {},
}

/// A batch of `count` requests side by side.
#[derive(Clone, Deserialize)]
pub(crate) struct Wanted {
    peer: String,
    op: Mix,
    local: usize,
    remote: u64,
    len: u64,
    count: u64,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mix {
    Read,
    Write,
    /// READs and WRITEs by turns, the first of them a WRITE.
    Both,
}

/// What became of a batch.
#[derive(Serialize)]
struct Outcome {
    state: String,
    /// From the submission to the final state.
    seconds: f64,
    completed: usize,
    /// How many entries failed with each code.
    codes: BTreeMap<u32, usize>,
    /// Entries that have no result although the batch is final, or had another one when asked again.
    undecided: usize,
    /// A text of a failure that does not name the peer, the operation and the length.
    vague: Option<String>,
    /// The text of the first failure.
    text: Option<String>,
}

pub(crate) struct Orders {
    engine: Engine,
    area: Area,
    batches: Mutex<HashMap<usize, Arc<Running>>>,
}

struct Running {
    batch: Batch,
    wanted: Wanted,
    begun: Instant,
    ended: Mutex<Option<Instant>>,
    has_ended: Condvar,
}

impl Orders {
    pub(crate) fn new(engine: Engine, area: Area) -> Self {
        Self { engine, area, batches: Mutex::default() }
    }

    pub(crate) fn obey(&self, order: Order) -> Result<Value, Failure> {
        Ok(match order {
            Order::Submit { batches, timeout_ms } => json!(self.submit(&batches, timeout_ms)?),
            Order::Outcome { batches, seconds } => json!(self.outcomes(&batches, seconds)?),
            Order::Cancel { batch, after_us } => self.cancel(&batch, after_us)?,
            Order::Protect { at, len, open } => json!(self.area.protect(at, len, open)?),
            Order::Fill { at, len, seed } => json!(self.area.fill(at, len, seed)?),
            Order::Differs { at, len, seed } => json!(self.area.difference(at, len, seed)?),
            Order::Stats {} => self.stats()?,
        })
    }

    fn submit(&self, wanted: &[Wanted], timeout_ms: Option<u64>) -> Result<Vec<usize>, Failure> {
        let mut numbers = Vec::new();
        for one in wanted {
            let timeout = timeout_ms.map(Duration::from_millis);
            let running = Running::start(one, self.start(one, timeout)?);
            let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
            let number = batches.len();
            batches.insert(number, running);
            numbers.push(number);
        }
        Ok(numbers)
    }

    #[expect(
        unsafe_code,
        reason = "the memory is this program's, and it keeps what `submit` asks for"
    )]
    fn start(
        &self,
        wanted: &Wanted,
        timeout: Option<Duration>,
    ) -> Result<(Batch, Instant), Failure> {
        let Wanted { peer, op, local, remote, len, count } = wanted;
        let local = self.area.range(*local, usize::try_from(len * count)?)?;
        let request = |i: u64| {
            let (local, remote) = (local + i * len, remote + i * len);
            Request { op: op.op(i), local, remote, len: *len }
        };
        let requests: Vec<Request> = (0..*count).map(request).collect();
        let segment = self.engine.segment(peer)?;
        let mut options = SubmitOptions::default();
        options.timeout = timeout;
        let begun = Instant::now();
        // SAFETY: the area is mapped for the life of the program; it is taken from the process only after the end of
        // a batch, and nobody but the kernel touches it meanwhile.
        Ok((unsafe { segment.submit(requests, options) }?, begun))
    }

    fn outcomes(&self, numbers: &[usize], seconds: f64) -> Result<Vec<Option<Outcome>>, Failure> {
        let until = Instant::now() + Duration::try_from_secs_f64(seconds)?;
        let one = |number: &usize| {
            let batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
            let running = Arc::clone(batches.get(number).ok_or("no batch has this number")?);
            drop(batches);
            Ok(running.outcome(until))
        };
        numbers.iter().map(one).collect()
    }

    fn cancel(&self, wanted: &Wanted, after_us: u64) -> Result<Value, Failure> {
        let (batch, begun) = self.start(wanted, None)?;
        // Not only asleep: what is to be met is any moment of a transfer of some milliseconds.
        std::thread::sleep(Duration::from_micros(after_us.saturating_sub(200)));
        while begun.elapsed() < Duration::from_micros(after_us) {
            std::hint::spin_loop();
        }
        let cancelled = Instant::now();
        batch.cancel();
        let took = cancelled.elapsed();
        let len = usize::try_from(wanted.len * wanted.count)?;
        self.area.protect(wanted.local, len, false)?;
        let code = batch.result().and_then(Result::err).map(|error| error.code());
        let state = format!("{:?}", batch.poll());
        Ok(json!({"state": state, "seconds": took.as_secs_f64(), "code": code}))
    }

    fn stats(&self) -> Result<Value, Failure> {
        let counters: BTreeMap<_, _> = self.engine.stats().to_pairs().into_iter().collect();
        let count = |folder: &str| std::fs::read_dir(folder).map(Iterator::count);
        let (files, threads) = (count("/proc/self/fd")?, count("/proc/self/task")?);
        Ok(json!({"counters": counters, "files": files, "threads": threads}))
    }
}

impl Running {
    /// A thread of its own notes when the batch ends.
    fn start(wanted: &Wanted, (batch, begun): (Batch, Instant)) -> Arc<Self> {
        let (ended, has_ended) = (Mutex::default(), Condvar::new());
        let running = Arc::new(Self { batch, wanted: wanted.clone(), begun, ended, has_ended });
        let watched = Arc::clone(&running);
        std::thread::spawn(move || {
            // What it came to is asked for later.
            let _ = watched.batch.wait();
            let now = Instant::now();
            *watched.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
            watched.has_ended.notify_all();
        });
        running
    }

    /// What became of it; `None` if it has not ended by then.
    fn outcome(&self, until: Instant) -> Option<Outcome> {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        while ended.is_none() {
            let left = until.checked_duration_since(Instant::now())?;
            let waited = self.has_ended.wait_timeout(ended, left);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(Outcome::of(self, ended.unwrap_or(self.begun) - self.begun))
    }
}

impl Mix {
    fn op(self, entry: u64) -> Op {
        match self {
            Self::Read => Op::Read,
            Self::Write => Op::Write,
            Self::Both if entry.is_multiple_of(2) => Op::Write,
            Self::Both => Op::Read,
        }
    }
}

impl Wanted {
    /// Whether a text says to whom, what and how much.
    fn is_named_by(&self, entry: usize, error: &Error) -> bool {
        let text = error.to_string();
        let op = match self.op.op(entry as u64) {
            Op::Read => "READ",
            Op::Write => "WRITE",
        };
        let what = format!("{op} of {} bytes", self.len);
        text.contains(&self.peer) && text.contains(&what)
    }
}

impl Outcome {
    fn of(running: &Running, after: Duration) -> Self {
        let Running { batch, wanted, .. } = running;
        let listed: HashMap<usize, Error> = batch.failures().into_iter().collect();
        let mut outcome = Self {
            state: format!("{:?}", batch.poll()),
            seconds: after.as_secs_f64(),
            completed: 0,
            codes: BTreeMap::new(),
            undecided: 0,
            vague: None,
            text: batch.result().and_then(Result::err).map(|error| error.to_string()),
        };
        for i in 0..batch.len() {
            match (batch.entry(i), listed.get(&i)) {
                (Some(Ok(())), None) => outcome.completed += 1,
                (Some(Err(error)), Some(same)) if error.code() == same.code() => {
                    *outcome.codes.entry(error.code()).or_default() += 1;
                    if !wanted.is_named_by(i, &error) {
                        outcome.vague.get_or_insert_with(|| error.to_string());
                    }
                }
                _ => outcome.undecided += 1,
            }
        }
        outcome
    }
}
