//! An engine as its own peer: long copies end by deadline, cancel, unregister and close like any other transfer.

use std::time::{Duration, Instant};

use tensorferry::{Batch, BatchState, Config, Engine, HostBuffer, Op, SubmitOptions};

use crate::common::{PROMPT, engine, ms, timed, within};

/// An engine with a buffer that takes a while to copy, and to whom the copies go.
struct Own {
    engine: Engine,
    from: HostBuffer,
    to: HostBuffer,
}

const LEN: usize = 256 << 20;
/// So many copies of `LEN` bytes take seconds.
const MANY: usize = 100;

impl Own {
    fn new() -> Self {
        let engine = engine(Config::default());
        let (from, to) = (HostBuffer::zeroed(LEN).unwrap(), HostBuffer::zeroed(LEN).unwrap());
        for buffer in [&from, &to] {
            engine.register_buffer(buffer, &Default::default()).unwrap();
        }
        Self { engine, from, to }
    }

    fn copies(&self, count: usize, options: SubmitOptions) -> Batch {
        let request = self.from.request(Op::Write, 0, self.to.addr(), LEN).unwrap();
        let segment = self.engine.open(self.engine.name()).unwrap();
        segment.submit_owned(&vec![request; count], options).unwrap()
    }
}

#[test]
fn a_copy_ends_at_its_deadline_also_behind_others() {
    let own = Own::new();
    let begin = Instant::now();
    let batches: Vec<Batch> = (0..6).map(|_| own.copies(MANY, within(ms(300)))).collect();
    for batch in batches {
        assert_eq!(batch.wait().unwrap_err().code(), 13);
    }
    assert!(begin.elapsed() >= ms(300) && begin.elapsed() < PROMPT, "{:?}", begin.elapsed());
}

#[test]
fn a_copy_can_be_cancelled_while_it_runs_and_while_it_waits() {
    let own = Own::new();
    let batches: Vec<Batch> = (0..6).map(|_| own.copies(MANY, within(ms(20_000)))).collect();
    for batch in batches.into_iter().rev() {
        let ((), took) = timed(|| batch.cancel());
        assert_eq!(batch.poll(), BatchState::Cancelled);
        assert!(took < PROMPT, "{took:?}");
    }
}

#[test]
fn a_buffer_that_is_copied_can_be_unregistered() {
    for local in [true, false] {
        let own = Own::new();
        let batches: Vec<Batch> = (0..4).map(|_| own.copies(MANY, within(ms(20_000)))).collect();
        let addr = if local { own.from.addr() } else { own.to.addr() };
        let (result, took) = timed(|| own.engine.unregister(addr));
        result.unwrap();
        assert!(took < PROMPT, "{took:?}");
        for batch in batches {
            assert!([9, 15].contains(&batch.wait().unwrap_err().code()));
        }
    }
}

#[test]
fn closing_ends_copies_and_is_quiet_when_it_returns() {
    let own = Own::new();
    let batches: Vec<Batch> = (0..6).map(|_| own.copies(MANY, within(ms(20_000)))).collect();
    let ((), took) = timed(|| own.engine.close());
    assert!(took < PROMPT, "{took:?}");
    for batch in batches {
        let result = batch.wait_timeout(Duration::ZERO).expect("final when close has returned");
        assert_eq!(result.unwrap_err().code(), 23);
    }
    own.to.write(0, &[7; 4096]);
    assert_eq!(own.to.read(0, 4096), [7; 4096]);
}

#[test]
fn waits_may_be_as_long_as_a_duration_can_be() {
    let own = Own::new();
    let batch = own.copies(1, SubmitOptions::default().with_timeout(Duration::MAX));
    batch.wait_timeout(Duration::MAX).unwrap().unwrap();
}
