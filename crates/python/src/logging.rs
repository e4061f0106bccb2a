//! What the engine has to say, handed to Python's `logging`.
//!
//! Threads of the engine never take the interpreter lock, and never wait for whoever reads a log: they
//! put records into a bounded queue, and a daemon thread of Python's takes them out. What a caller's own
//! thread has to say is logged at once.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tensorferry::{Error, LogLevel};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record as SpanRecord};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::face;

/// Records that wait; further ones are counted and dropped.
const LONGEST_QUEUE: usize = 4096;
/// A method that keeps failing with one peer is logged this often.
const REPEAT: Duration = Duration::from_secs(1);
/// So many methods and peers have a measure of their own at the same time; the others of a method share one.
const MEASURES: usize = 256;
/// Texts that are said once are remembered, up to so many.
const MOST_SAID: usize = 256;
const FACE: &str = "tensorferry.mooncake";
/// The logger of failures that nobody asked about.
const UNSEEN: &str = "tensorferry.transfer";
/// The target of what the engine says of failures that callers are told of.
const TOLD: &str = "tensorferry::failure";

/// Whether the interpreter is on its way out, when nothing is logged any more.
static EXITING: AtomicBool = AtomicBool::new(false);
/// Whether the daemon thread is there. It is not in a forked child.
static STARTED: AtomicBool = AtomicBool::new(false);
static LEVEL: AtomicU8 = AtomicU8::new(2);

struct Record {
    level: Level,
    target: &'static str,
    text: String,
}

struct Queue {
    state: Mutex<Waiting>,
    news: Condvar,
    /// Made by a child right after the fork, when it has no other thread.
    next: OnceLock<Box<Self>>,
}

struct Waiting {
    records: VecDeque<Record>,
    dropped: u64,
    /// A transfer has ended whose objects somebody has to let go of.
    sweep: bool,
    stopped: bool,
}

/// Has the daemon thread let go of objects that are not needed any more. From any thread, also one that may not take
/// the interpreter lock.
pub(crate) fn sweep() {
    let queue = Queue::current();
    queue.lock().sweep = true;
    queue.news.notify_one();
}

/// A fork can happen while another thread has the lock of a queue, which is then locked for ever in the
/// child; so each generation of children has its own, the next of its parent's.
static FIRST: Queue = Queue::new();
static GENERATION: AtomicUsize = AtomicUsize::new(0);

impl Queue {
    const fn new() -> Self {
        let waiting =
            Waiting { records: VecDeque::new(), dropped: 0, sweep: false, stopped: false };
        Self { state: Mutex::new(waiting), news: Condvar::new(), next: OnceLock::new() }
    }

    fn current() -> &'static Self {
        let next = |queue: &'static Self| queue.next.get().map(Box::as_ref);
        let queues = std::iter::successors(Some(&FIRST), |queue| next(queue));
        queues.take(GENERATION.load(Ordering::Relaxed) + 1).last().unwrap_or(&FIRST)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, record: Record) {
        let mut waiting = self.lock();
        if waiting.records.len() < LONGEST_QUEUE {
            waiting.records.push_back(record);
            drop(waiting);
            self.news.notify_one();
        } else {
            waiting.dropped += 1;
        }
    }

    /// Waits for records, or for the end.
    fn wait(&self) -> Waiting {
        let mut waiting = self.lock();
        while waiting.records.is_empty() && !waiting.sweep && !waiting.stopped {
            waiting = self.news.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        take(&mut waiting)
    }

    fn stop(&self) {
        self.lock().stopped = true;
        self.news.notify_all();
    }
}

fn take(waiting: &mut Waiting) -> Waiting {
    let (records, dropped) = (std::mem::take(&mut waiting.records), waiting.dropped);
    waiting.dropped = 0;
    let sweep = std::mem::take(&mut waiting.sweep);
    Waiting { records, dropped, sweep, stopped: waiting.stopped }
}

/// Has everything ready by which engines are heard. Called for each engine; cheap after the first.
pub(crate) fn start(py: Python<'_>, level: LogLevel) -> PyResult<()> {
    static SUBSCRIBER: Once = Once::new();
    let level = match level {
        LogLevel::Error => 1,
        LogLevel::Warning => 2,
        LogLevel::Info => 3,
        LogLevel::Debug => 4,
        LogLevel::Trace => 5,
    };
    let before = LEVEL.swap(level, Ordering::Relaxed);
    SUBSCRIBER.call_once(|| {
        // Somebody else's is as good.
        let _ = tracing::subscriber::set_global_default(Forwarder);
    });
    if before != level {
        tracing::callsite::rebuild_interest_cache();
    }
    if STARTED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    start_thread(py).inspect_err(|_| STARTED.store(false, Ordering::Relaxed))
}

fn start_thread(py: Python<'_>) -> PyResult<()> {
    // `logging` is imported first, so that its own end comes after ours.
    py.import("logging")?;
    let arguments = PyDict::new(py);
    arguments.set_item("target", wrap_pyfunction!(hand_over_for_ever, py)?)?;
    arguments.set_item("name", "tensorferry-logging")?;
    arguments.set_item("daemon", true)?;
    let thread = py.import("threading")?.getattr("Thread")?.call((), Some(&arguments))?;
    thread.call_method0("start")?;
    let before = THREAD.lock().unwrap_or_else(PoisonError::into_inner).replace(thread.unbind());
    drop(before);
    Ok(())
}

/// The daemon thread, for whoever joins it. Locked with the interpreter lock held, and never across a
/// call into Python.
static THREAD: Mutex<Option<Py<PyAny>>> = Mutex::new(None);

/// Hands over what is left, and ends the thread. Nothing is logged after this.
pub(crate) fn stop(py: Python<'_>) -> PyResult<()> {
    EXITING.store(true, Ordering::Relaxed);
    Queue::current().stop();
    let thread = THREAD.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let (Some(thread), true) = (thread, STARTED.swap(false, Ordering::Relaxed)) {
        thread.bind(py).call_method1("join", (1.0,))?;
    }
    Ok(())
}

/// In a forked child: the thread stayed with the parent.
pub(crate) fn after_in_child() {
    let _ = Queue::current().next.set(Box::new(Queue::new()));
    GENERATION.fetch_add(1, Ordering::Relaxed);
    STARTED.store(false, Ordering::Relaxed);
}

#[pyfunction]
fn hand_over_for_ever(py: Python<'_>) {
    let queue = Queue::current();
    loop {
        let waiting = py.detach(|| queue.wait());
        let (sweep, stopped) = (waiting.sweep, waiting.stopped);
        if sweep {
            face::sweep_kept(py);
        }
        if let Err(error) = hand_over(py, waiting) {
            error.write_unraisable(py, None);
        }
        if stopped {
            // What there was to say of objects that were let go of.
            let rest = take(&mut queue.lock());
            if let Err(error) = hand_over(py, rest) {
                error.write_unraisable(py, None);
            }
            return;
        }
    }
}

fn hand_over(py: Python<'_>, waiting: Waiting) -> PyResult<()> {
    for Record { level, target, text } in waiting.records {
        log(py, &target.replace("::", "."), number(level), &text)?;
    }
    if waiting.dropped > 0 {
        let text = format!(
            "{} records were dropped: they came faster than they were logged",
            waiting.dropped
        );
        log(py, "tensorferry", number(Level::WARN), &text)?;
    }
    Ok(())
}

/// The level as `logging` numbers it.
fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// Logs, which runs Python code: whatever signal has come meanwhile is raised in there. Fails with what wants
/// out of the program, such as Ctrl-C, and with nothing else.
fn log(py: Python<'_>, name: &str, level: u8, text: &str) -> PyResult<()> {
    let logged = || -> PyResult<()> {
        let logger = py.import("logging")?.call_method1("getLogger", (name,))?;
        logger.call_method1("log", (level, "%s", text))?;
        Ok(())
    };
    let Err(error) = logged() else { return Ok(()) };
    if !error.is_instance_of::<PyException>(py) {
        return Err(error);
    }
    // A filter or a handler of the user's raised. A record is no reason to fail a call.
    error.write_unraisable(py, None);
    Ok(())
}

/// Which failures are logged: one per method, peer and [`REPEAT`].
#[derive(Default)]
pub(crate) struct Limiter {
    /// When a method was logged last for a peer, and how many of its failures were not since.
    logged: HashMap<(&'static str, Box<str>), (Instant, u64)>,
}

impl Limiter {
    /// What to log about a failure of `method`; nothing if it was logged a moment ago.
    pub(crate) fn line(
        &mut self,
        method: &'static str,
        peer: Option<&str>,
        text: &str,
    ) -> Option<String> {
        let now = Instant::now();
        let mut key = (method, peer.unwrap_or_default().into());
        if self.logged.len() >= MEASURES && !self.logged.contains_key(&key) {
            // What these did not log is not told any more, unless it would be within this second.
            self.logged.retain(|_, (last, _)| now.duration_since(*last) < REPEAT);
            if self.logged.len() >= MEASURES {
                key.1 = "".into();
            }
        }
        let missed = match self.logged.get_mut(&key) {
            Some((last, missed)) if now.duration_since(*last) < REPEAT => {
                *missed += 1;
                return None;
            }
            before => before.map_or(0, |(_, missed)| *missed),
        };
        self.logged.insert(key, (now, 0));
        let mut line = format!("{method}: {text}");
        if missed > 0 {
            let _ = write!(line, " ({missed} more failures of {method} were not logged)");
        }
        Some(line)
    }

    /// What was not logged and will not be, since this is the end.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        let missed = self.logged.drain().filter(|(_, (_, missed))| *missed > 0);
        missed
            .map(|((method, _), (_, missed))| {
                format!("{method}: {missed} more failures were not logged")
            })
            .collect()
    }
}

/// Logs an error from any thread, also one that may not take the interpreter lock.
pub(crate) fn error(text: String) {
    Queue::current().push(Record { level: Level::ERROR, target: FACE, text });
}

/// Logs that a transfer failed that nobody holds, and of which nobody has asked how it ended; once a second for each
/// peer. By the daemon thread, since whoever drops the last reference to it may be in the middle of anything.
#[cold]
pub(crate) fn unseen(error: &Error) {
    static LIMITER: LazyLock<Mutex<Limiter>> = LazyLock::new(Mutex::default);
    if EXITING.load(Ordering::Relaxed) || Level::WARN > level() {
        return;
    }
    let text = format!(
        "it failed, and nobody asked how it ended (await it, or call wait() or result()): {error}"
    );
    let mut limiter = LIMITER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = limiter.line("Transfer", error.peer(), &text) {
        Queue::current().push(Record { level: Level::WARN, target: UNSEEN, text });
    }
}

/// Logs that `method` failed, unless it has done so with the same peer within the last second.
#[cold]
pub(crate) fn failed(
    py: Python<'_>,
    method: &'static str,
    peer: Option<&str>,
    text: &str,
) -> PyResult<()> {
    static LIMITER: LazyLock<Mutex<Limiter>> = LazyLock::new(Mutex::default);
    if EXITING.load(Ordering::Relaxed) {
        return Ok(());
    }
    // A signal that has come during the call is not to be raised where a handler's errors are.
    py.check_signals()?;
    let line = LIMITER.lock().unwrap_or_else(PoisonError::into_inner).line(method, peer, text);
    let Some(line) = line else { return Ok(()) };
    if !STARTED.load(Ordering::Relaxed) {
        // A forked child has no thread for what the engine has to say.
        let left = take(&mut Queue::current().lock());
        hand_over(py, left)?;
    }
    log(py, FACE, number(Level::ERROR), &line)
}

/// Logs a warning the first time that it is asked for.
pub(crate) fn warn_once(py: Python<'_>, text: String) -> PyResult<()> {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if EXITING.load(Ordering::Relaxed) {
        return Ok(());
    }
    py.check_signals()?;
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() >= MOST_SAID || !said.insert(text.clone()) {
        return Ok(());
    }
    drop(said);
    log(py, FACE, number(Level::WARN), &text)
}

/// Puts events into the queue. Spans are not kept: the engine's events say for themselves what they are about.
struct Forwarder;

impl Subscriber for Forwarder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= level()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(level())
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &SpanRecord<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        // What callers are told as well is in the records of their calls.
        let told = metadata.target() == TOLD;
        let severity = if told { Level::DEBUG } else { *metadata.level() };
        if severity > level() {
            return;
        }
        let mut line = Line { message: String::new(), rest: String::new() };
        event.record(&mut line);
        let text = line.message + &line.rest;
        Queue::current().push(Record { level: severity, target: metadata.target(), text });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn level() -> LevelFilter {
    match LEVEL.load(Ordering::Relaxed) {
        1 => LevelFilter::ERROR,
        2 => LevelFilter::WARN,
        3 => LevelFilter::INFO,
        4 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    }
}

/// An event as one line: its message, then its fields.
struct Line {
    message: String,
    rest: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.rest, " {}={value:?}", field.name())
        };
    }
}
