//! A batch as its users hold it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::transfer::{BatchInner, FOREVER, Stop};

/// Where a batch stands.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum BatchState {
    /// At least one entry is not settled.
    Running,
    /// Every byte of every entry is in place, and the notification, if any, was delivered.
    Completed,
    /// At least one entry failed, or the notification was not delivered.
    Failed,
    /// The deadline passed before every entry was settled.
    TimedOut,
    /// The batch was cancelled before every entry was settled.
    Cancelled,
}

/// A running or final batch. Clones are the same batch; dropping the last one does not stop it.
///
/// It can be waited for by a thread, or awaited in any runtime ([`crate::Completion`]).
///
/// ```
/// use tensorferry::{BatchState, Config, Engine, HostBuffer, Op, RegisterOptions, SubmitOptions};
///
/// # fn main() -> tensorferry::Result<()> {
/// # let engine = Engine::new("127.0.0.1", Config::default())?;
/// # let (local, remote) = (HostBuffer::zeroed(4096)?, HostBuffer::zeroed(4096)?);
/// # engine.register_buffer(&remote, &RegisterOptions::default())?;
/// # let segment = engine.open(engine.name())?;
/// let good = local.request(Op::Write, 0, remote.addr(), 4096)?;
/// let bad = local.request(Op::Write, 0, remote.addr() + 4096, 4096)?;
/// let batch = segment.submit_owned(&[good, bad], SubmitOptions::default())?;
/// // Entries fail alone: the first error is the batch's, and `failures` has all of them.
/// assert!(batch.wait().is_err());
/// assert_eq!(batch.poll(), BatchState::Failed);
/// assert!(matches!(batch.entry(0), Some(Ok(()))));
/// assert_eq!(batch.failures().iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "only the batch says whether the bytes are in place: wait for it, await it, or ask for its result"]
pub struct Batch {
    pub(crate) inner: Arc<BatchInner>,
}

impl Batch {
    /// Where the batch stands.
    #[must_use]
    pub fn poll(&self) -> BatchState {
        self.inner.state()
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len()
    }

    /// Whether the batch has no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.len() == 0
    }

    /// Waits until the batch is final, which it is by its deadline.
    ///
    /// # Errors
    /// The error of the first entry that failed, or that of the notification.
    pub fn wait(&self) -> Result<()> {
        loop {
            if let Some(result) = self.wait_timeout(Duration::from_secs(3600)) {
                return result;
            }
        }
    }

    /// Waits until the batch is final, at most for `timeout`; `None` if it is still running then.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<()>> {
        if !self.inner.is_final() {
            let begin = Instant::now();
            let spin = self.inner.owner().spin();
            spin.wait(begin, timeout, || self.inner.is_final());
            let over = self.inner.is_final() || self.inner.sleep(begin + timeout.min(FOREVER));
            spin.learn(begin.elapsed());
            if !over {
                return None;
            }
        }
        self.result()
    }

    /// The result, or `None` while the batch is running.
    #[must_use]
    pub fn result(&self) -> Option<Result<()>> {
        match self.poll() {
            BatchState::Running => None,
            BatchState::Completed => Some(Ok(())),
            _ => Some(Err(self.inner.first_error())),
        }
    }

    /// The result of one entry, or `None` while it is not known.
    #[must_use]
    pub fn entry(&self, index: usize) -> Option<Result<()>> {
        self.inner.outcome(index)
    }

    /// The entries that have failed so far, by index, and why.
    #[must_use]
    pub fn failures(&self) -> Vec<(usize, Error)> {
        self.inner.failed_entries()
    }

    /// Stops the batch: unsent entries are not sent, the rest is let go. When this returns the
    /// batch is final and the engine does not touch its local memory. Bytes of a WRITE that had
    /// left can still arrive at the peer.
    pub fn cancel(&self) {
        self.request_cancel();
        let _ = self.wait();
    }

    /// [`Batch::cancel`] without the wait: the engine may touch local memory until the batch is final, which it is soon.
    pub fn request_cancel(&self) {
        if !self.inner.is_final() {
            self.inner.request_stop(Stop::Cancelled);
            self.inner.owner().stopped(&self.inner);
        }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("peer", self.inner.owner().peer())
            .field("entries", &self.inner.len())
            .field("state", &self.poll())
            .finish()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::spin::Spin;
    use crate::transfer::{Cause, Held, Order, Owner, Places, Request, Slice};

    struct Nobody(Arc<str>, Spin);

    impl Owner for Nobody {
        fn peer(&self) -> &Arc<str> {
            &self.0
        }
        fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
            batch.finish(None);
        }
        fn spin(&self) -> &Spin {
            &self.1
        }
        fn stopped(&self, _: &Arc<BatchInner>) {}
        fn finished(&self, _: &BatchInner) {}
    }

    /// A zero-length batch is settled at once; somebody has to say so.
    pub(crate) fn complete(batch: &Batch) {
        assert!(batch.inner.is_settled());
        batch.inner.all_settled();
    }

    pub(crate) fn batch(lens: &[u64]) -> Batch {
        batch_of(lens.iter().map(|&len| Request::write(0x1000, 0x2000, len)).collect())
    }

    /// A batch that nobody moves.
    pub(crate) fn batch_of(requests: Vec<Request>) -> Batch {
        let now = Instant::now();
        let owner = Arc::new(Nobody("peer:1".into(), Spin::new(Duration::ZERO)));
        let order = Order {
            requests,
            held: Held::default(),
            places: Places::default(),
            notification: None,
            started: now,
            deadline: now + Duration::from_secs(9),
            word: None,
        };
        Batch { inner: BatchInner::new(owner, order) }
    }

    #[test]
    fn one_bad_entry_fails_alone_and_names_itself() {
        let b = batch(&[10, 20, 30]);
        Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
        Slice::new(&b.inner, 1, 0, 20).settle(Err(Cause::Refused));
        Slice::new(&b.inner, 2, 0, 30).settle(Ok(()));
        assert_eq!(b.poll(), BatchState::Failed);
        assert!(b.entry(0).unwrap().is_ok());
        assert!(b.entry(2).unwrap().is_ok());
        let failures = b.failures();
        assert_eq!(failures.len(), 1);
        let text = failures[0].1.to_string();
        assert!(text.contains("WRITE of 20 bytes to 0x2000 at peer:1"), "{text}");
        assert_eq!(b.wait().unwrap_err().code(), 8);
    }

    #[test]
    fn a_wait_ends_at_its_timeout() {
        let b = batch(&[10]);
        assert!(b.wait_timeout(Duration::from_millis(5)).is_none());
        Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
    }
}
