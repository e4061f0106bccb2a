//! Batches as futures, of no runtime in particular.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::error::Result;
use crate::transfer::Batch;

/// Ready when its batch is final, with the result of [`Batch::wait`].
///
/// Whoever polls it is woken once, by a thread of the engine, which a waker must not hold up. Dropping it does not stop
/// the batch, and does not make it safe to free memory that was lent with `unsafe`: see [`Batch::cancel`].
///
/// It needs no runtime, and works in every one; `examples/async.rs` awaits many with thirty lines of its own.
///
/// ```
/// # use std::pin::pin;
/// # use std::sync::Arc;
/// # use std::task::{Context, Poll, Wake, Waker};
/// # use std::thread::{self, Thread};
/// # use tensorferry::{Config, Engine, HostBuffer, Op, RegisterOptions, Result, SubmitOptions};
/// # struct Unpark(Thread);
/// # impl Wake for Unpark {
/// #     fn wake(self: Arc<Self>) {
/// #         self.0.unpark();
/// #     }
/// # }
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let waker = Waker::from(Arc::new(Unpark(thread::current())));
/// #     let mut future = pin!(future);
/// #     loop {
/// #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
/// #             Poll::Ready(output) => return output,
/// #             Poll::Pending => thread::park(),
/// #         }
/// #     }
/// # }
/// async fn fetch(engine: &Engine, peer: &str, remote: u64) -> Result<HostBuffer> {
///     let local = HostBuffer::zeroed(4096)?;
///     let request = local.request(Op::Read, 0, remote, 4096)?;
///     // Names the peer without asking it, which would block.
///     let segment = engine.segment(peer)?;
///     segment.submit_owned(&[request], SubmitOptions::default())?.await?;
///     Ok(local)
/// }
/// # fn main() -> Result<()> {
/// # let target = Engine::new("127.0.0.1", Config::default())?;
/// # let memory = HostBuffer::zeroed(4096)?;
/// # memory.write(0, b"hello");
/// # target.register_buffer(&memory, &RegisterOptions::default())?;
/// # let engine = Engine::new("127.0.0.1", Config::default())?;
/// # let fetched = block_on(fetch(&engine, target.name(), memory.addr()))?;
/// # assert_eq!(fetched.read(0, 5), b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct Completion {
    batch: Batch,
    /// By which the batch knows the waker.
    key: Option<u64>,
}

impl Future for Completion {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(result) = self.batch.result() {
            return Poll::Ready(result);
        }
        let Self { batch, key } = &mut *self;
        if batch.inner.wake(context.waker(), key) {
            // What `wake` has seen is final stays so.
            return batch.result().map_or(Poll::Pending, Poll::Ready);
        }
        Poll::Pending
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.batch.inner.forget_waker(key);
        }
    }
}

impl IntoFuture for Batch {
    type Output = Result<()>;
    type IntoFuture = Completion;

    fn into_future(self) -> Completion {
        Completion { batch: self, key: None }
    }
}

impl IntoFuture for &Batch {
    type Output = Result<()>;
    type IntoFuture = Completion;

    fn into_future(self) -> Completion {
        self.clone().into_future()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::task::Wake;

    use super::*;
    use crate::transfer::Cause;
    use crate::transfer::Slice;
    use crate::transfer::batch::tests::batch;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn poll(future: Pin<&mut Completion>, count: &Arc<Count>) -> Poll<Result<()>> {
        let waker = Arc::clone(count).into();
        future.poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn whoever_polled_last_is_woken_once() {
        let b = batch(&[10]);
        let (first, second) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let mut future = pin!((&b).into_future());
        assert!(poll(future.as_mut(), &first).is_pending());
        assert!(poll(future.as_mut(), &second).is_pending());
        Slice::whole(&b.inner, 0).settle(Ok(()));
        assert_eq!((first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst)), (0, 1));
        assert!(matches!(poll(future.as_mut(), &first), Poll::Ready(Ok(()))));
    }

    #[test]
    fn every_future_of_a_batch_is_woken_and_dropped_ones_are_forgotten() {
        let b = batch(&[10]);
        let counts: [Arc<Count>; 3] = Default::default();
        let mut futures: Vec<_> = counts.iter().map(|_| Box::pin((&b).into_future())).collect();
        for (future, count) in futures.iter_mut().zip(&counts) {
            assert!(poll(future.as_mut(), count).is_pending());
        }
        drop(futures.remove(1));
        assert_eq!(Arc::strong_count(&counts[1]), 1);
        Slice::whole(&b.inner, 0).settle(Err(Cause::Refused));
        assert_eq!(counts.each_ref().map(|count| count.0.load(Ordering::SeqCst)), [1, 0, 1]);
        let result = poll(futures[1].as_mut(), &counts[2]);
        assert!(matches!(result, Poll::Ready(Err(error)) if error.code() == 8));
    }

    /// A task that is polled by somebody else from now on: what goes with its waker is another future of the batch.
    #[test]
    fn a_waker_that_is_replaced_may_own_a_future_of_the_same_batch() {
        struct Owns(#[expect(dead_code, reason = "dropped with it")] Mutex<Pin<Box<Completion>>>);
        impl Wake for Owns {
            fn wake(self: Arc<Self>) {}
        }
        let b = batch(&[10]);
        let count = Arc::new(Count::default());
        let mut other = Box::pin((&b).into_future());
        assert!(poll(other.as_mut(), &count).is_pending());
        let mut future = Box::pin((&b).into_future());
        let owner = Arc::new(Owns(Mutex::new(other))).into();
        assert!(future.as_mut().poll(&mut Context::from_waker(&owner)).is_pending());
        drop(owner);
        assert!(poll(future.as_mut(), &count).is_pending());
        assert_eq!(Arc::strong_count(&count), 2);
        Slice::whole(&b.inner, 0).settle(Ok(()));
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_final_batch_is_ready_at_once() {
        let b = batch(&[10]);
        Slice::whole(&b.inner, 0).settle(Ok(()));
        let count = Arc::new(Count::default());
        assert!(matches!(poll(pin!(b.into_future()).as_mut(), &count), Poll::Ready(Ok(()))));
        assert_eq!(Arc::strong_count(&count), 1);
    }

    /// The end of the batch and the first poll at the same time: either the poll sees the end, or the end the waker.
    #[test]
    fn no_wake_up_is_lost() {
        for _ in 0..500 {
            let b = batch(&[10]);
            let slice = Slice::whole(&b.inner, 0);
            let end = std::thread::spawn(move || slice.settle(Ok(())));
            let count = Arc::new(Count::default());
            let mut future = Box::pin((&b).into_future());
            let ready = poll(future.as_mut(), &count).is_ready();
            end.join().unwrap();
            assert!(ready || count.0.load(Ordering::SeqCst) == 1);
            assert!(poll(future.as_mut(), &count).is_ready());
        }
    }
}
