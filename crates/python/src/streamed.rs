//! Transfers that are ordered with a stream of the caller's. The call that submits one has returned when it
//! ends, so what became of it is noticed here: failures are logged, counted, and kept for the next such call.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Wake};
use std::thread::{self, JoinHandle};

use tensorferry::{Batch, BatchState, Completion};

use crate::failure::Failure;
use crate::logging::{self, Limiter};

/// The transfers of one engine that are ordered with a stream.
///
/// Its thread never takes the interpreter lock, so it may be waited for with that lock held; in a forked child
/// nothing here may be touched, since a lock may have been held at the fork.
#[derive(Default)]
pub(crate) struct Streamed {
    state: Mutex<State>,
    news: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
    failed: AtomicU64,
}

#[derive(Default)]
struct State {
    running: Vec<Running>,
    /// The first failure since one was taken, and how many came after it.
    failure: Option<(String, u64)>,
    limiter: Limiter,
    /// Some batch has ended since the thread looked.
    news: bool,
    ended: bool,
}

struct Running {
    method: &'static str,
    batch: Batch,
    /// Has the thread look when the batch is final.
    _completion: Completion,
}

struct Bell(Weak<Streamed>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        if let Some(streamed) = self.0.upgrade() {
            streamed.lock().news = true;
            streamed.news.notify_one();
        }
    }
}

impl Streamed {
    /// Looks after a batch that `method` has submitted.
    pub(crate) fn add(self: &Arc<Self>, method: &'static str, batch: Batch) {
        let bell = Arc::new(Bell(Arc::downgrade(self))).into();
        let mut completion = (&batch).into_future();
        let (is_final, ended) = {
            // Held until the batch is in the list, so that it is there when its bell rings.
            let mut state = self.lock();
            let polled = Pin::new(&mut completion).poll(&mut Context::from_waker(&bell));
            state.running.push(Running { method, batch, _completion: completion });
            (polled.is_ready(), state.ended)
        };
        if is_final || ended {
            return self.look();
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let this = Arc::clone(self);
            let named = thread::Builder::new().name("tensorferry-streamed".to_owned());
            // Without a thread, a failure is logged when somebody asks next.
            *thread = named.spawn(move || this.look_until_the_end()).ok();
        }
    }

    /// Why earlier transfers failed, unless that was asked before.
    pub(crate) fn take_failure(&self) -> Result<(), Failure> {
        self.look();
        let Some((text, more)) = self.lock().failure.take() else { return Ok(()) };
        let more = match more {
            0 => String::new(),
            n => format!(" ({n} more failed after it)"),
        };
        Err(Failure::new(format!(
            "an earlier transfer failed: {text}{more}; this call has started nothing: make it again, once \
             what depends on the earlier one is put right"
        )))
    }

    /// How many have failed so far.
    pub(crate) fn failures(&self) -> u64 {
        self.look();
        self.failed.load(Ordering::Relaxed)
    }

    /// Ends the thread. The engine is closed, so every batch is final.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.news.notify_one();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It does not panic; if it did, its work is done below.
            let _ = thread.join();
        }
        self.look();
        let rest = self.lock().limiter.rest();
        rest.into_iter().for_each(logging::error);
    }

    fn look_until_the_end(&self) {
        let mut state = self.lock();
        while !state.ended {
            if std::mem::take(&mut state.news) {
                drop(state);
                self.look();
                state = self.lock();
            } else {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Forgets the batches that are final, and says which of them failed.
    fn look(&self) {
        let mut lines = Vec::new();
        let mut state = self.lock();
        let State { running, failure, limiter, .. } = &mut *state;
        let is_final = |running: &mut Running| running.batch.poll() != BatchState::Running;
        for Running { method, batch, .. } in running.extract_if(.., is_final) {
            let Some(Err(error)) = batch.result() else { continue };
            self.failed.fetch_add(1, Ordering::Relaxed);
            let text = error.to_string();
            lines.extend(limiter.line(method, error.peer(), &text));
            match failure {
                Some((_, more)) => *more += 1,
                None => *failure = Some((format!("{method}: {text}"), 0)),
            }
        }
        // Whoever listens to the log may take any time.
        drop(state);
        lines.into_iter().for_each(logging::error);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
