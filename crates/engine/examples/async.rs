//! Awaits many batches at once, on one thread, with no runtime: all that it takes is a waker that unparks the thread.
//! In a runtime (tokio, smol, …) the same `batch.await` works as it is.

#![allow(clippy::print_stdout, reason = "it is a program")]

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use tensorferry::{
    Config, Engine, HostBuffer, Op, RegisterOptions, Result, Segment, SubmitOptions,
};

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 32;

pub(crate) fn main() -> Result<()> {
    let target = Engine::new("127.0.0.1", Config::default())?;
    let memory = HostBuffer::zeroed(BLOCK * BLOCKS)?;
    target.register_buffer(&memory, &RegisterOptions::default())?;
    let initiator = Engine::new("127.0.0.1", Config::default())?;
    // Names the peer, and does not ask it anything; the first transfer does, without blocking.
    let segment = initiator.segment(target.name())?;
    let copies: Vec<_> =
        (0..BLOCKS).map(|i| copy(&segment, i as u8, memory.addr() + (i * BLOCK) as u64)).collect();
    for result in block_on(all(copies)) {
        result?;
    }
    for i in 0..BLOCKS {
        assert_eq!(memory.read(i * BLOCK, BLOCK), vec![i as u8; BLOCK]);
    }
    println!("{BLOCKS} blocks are written and read back");
    Ok(())
}

/// Writes a block to the peer and reads it back.
async fn copy(segment: &Segment, fill: u8, remote: u64) -> Result<()> {
    let (there, back) = (HostBuffer::zeroed(BLOCK)?, HostBuffer::zeroed(BLOCK)?);
    there.write(0, &[fill; BLOCK]);
    let write = there.request(Op::Write, 0, remote, BLOCK)?;
    segment.submit_owned(&[write], SubmitOptions::default())?.await?;
    let read = back.request(Op::Read, 0, remote, BLOCK)?;
    segment.submit_owned(&[read], SubmitOptions::default())?.await?;
    assert_eq!(back.read(0, BLOCK), [fill; BLOCK]);
    Ok(())
}

/// Runs a future to its end on this thread, which sleeps while there is nothing to do.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// All of the futures, at the same time: their outputs, in their order.
async fn all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut running: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, output) in running.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(value) = future.as_mut().poll(context)
            {
                *output = Some(value);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
