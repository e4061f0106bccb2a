//! How a batch ends.

use super::*;

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
    let one = |&len: &u64| Request { op: Op::Write, local: 0x1000, remote: 0x2000, len };
    batch_of(lens.iter().map(one).collect())
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
fn an_entry_is_32_bytes() {
    assert_eq!(std::mem::size_of::<Entry>(), 32);
}

#[test]
fn the_last_slice_of_the_last_entry_ends_the_batch() {
    let b = batch(&[10, 0, 20]);
    let mut first = Slice::whole(&b.inner, 2);
    let second = first.split_off(10);
    assert_eq!((first.len, second.offset, second.len), (10, 10, 10));
    first.settle(Ok(()));
    Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
    assert_eq!(b.poll(), BatchState::Running);
    assert!(b.entry(0).unwrap().is_ok());
    assert!(b.entry(1).unwrap().is_ok());
    assert!(b.entry(2).is_none());
    second.settle(Ok(()));
    assert_eq!(b.poll(), BatchState::Completed);
    assert!(b.wait().is_ok());
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
fn a_dropped_slice_fails_its_entry() {
    let b = batch(&[10]);
    drop(Slice::new(&b.inner, 0, 0, 10));
    assert_eq!(b.poll(), BatchState::Failed);
}

#[test]
fn a_waiter_that_sleeps_is_woken() {
    let b = batch(&[10]);
    let waiter = {
        let b = b.clone();
        std::thread::spawn(move || b.wait())
    };
    while b.inner.sleepers.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
    assert!(waiter.join().unwrap().is_ok());
    assert!(b.wait_timeout(Duration::ZERO).unwrap().is_ok());
}

#[test]
fn a_wait_ends_at_its_timeout() {
    let b = batch(&[10]);
    assert!(b.wait_timeout(Duration::from_millis(5)).is_none());
    Slice::new(&b.inner, 0, 0, 10).settle(Ok(()));
}
