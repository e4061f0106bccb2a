//! Models: the engine's own code where threads agree, in every order that they can take, and with every value that
//! they can see.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tensorferry --lib loom` runs them, with a target folder of its own. A thread
//! that sleeps and is woken by nobody is a deadlock, which ends a model. Not modelled: reference counts (`std::sync::Arc`),
//! timeouts (a wait ends only when it is woken), the eventfd that wakes an IO thread ([`crate::sync::Waker`] stands for
//! it), and spinning.

use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::cell::UnsafeCell;
use loom::thread;
use tensorferry_metadata::SegmentName;
use tensorferry_wire::Op;

use crate::control::Question;
use crate::core::Queued;
use crate::error::Error;
use crate::io::{Command, Mailbox};
use crate::registry::{Access, BufferInfo, Range, Registry};
use crate::spin::Spin;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Call, Mutex, locked};
use crate::transfer::{
    BatchInner, BatchState, Cause, Held, Order, Owner, Places, Request, Slice, Stop,
};

fn model(work: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // Faults of order show with few; more take minutes.
    builder.preemption_bound = Some(3);
    builder.check(work);
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Counts how often a batch ends.
struct Account {
    peer: Arc<str>,
    finished: AtomicUsize,
    spin: Spin,
}

impl Owner for Account {
    fn peer(&self) -> &Arc<str> {
        &self.peer
    }
    fn deliver(self: Arc<Self>, _: &Arc<BatchInner>) {}
    fn stopped(&self, _: &Arc<BatchInner>) {}
    fn finished(&self, _: &BatchInner) {
        self.finished.fetch_add(1, Ordering::Relaxed);
    }
    fn spin(&self) -> &Spin {
        &self.spin
    }
}

fn batch(requests: usize) -> (Arc<Account>, Arc<BatchInner>) {
    let (finished, spin) = (AtomicUsize::new(0), Spin::new(Duration::ZERO));
    let account = Arc::new(Account { peer: "peer:1".into(), finished, spin });
    let request = Request { op: Op::Write, local: 0x1000, remote: 0x2000, len: 8 };
    let order = Order {
        requests: vec![request; requests],
        held: Held::default(),
        places: Places::default(),
        notification: None,
        started: Instant::now(),
        deadline: far(),
        word: None,
    };
    (Arc::clone(&account), BatchInner::new(account, order))
}

#[test]
fn a_waiter_is_woken_by_the_last_slice_and_the_batch_ends_once() {
    model(|| {
        let (account, batch) = batch(2);
        let settle = |entry| {
            let slice = Slice::whole(&batch, entry);
            thread::spawn(move || slice.settle(Ok(())))
        };
        let threads = [settle(0), settle(1)];
        assert!(batch.sleep(far()));
        assert_eq!(batch.state(), BatchState::Completed);
        assert_eq!(account.finished.load(Ordering::Relaxed), 1);
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn a_batch_that_is_cancelled_as_it_completes_ends_once_and_is_one_of_the_two() {
    model(|| {
        let (account, batch) = batch(1);
        let slice = Slice::whole(&batch, 0);
        // An IO thread: the answer comes, or the sweep that `cancel` asks for.
        let io = thread::spawn(move || match slice.batch.stop_at(Instant::now()) {
            None => slice.settle(Ok(())),
            Some(stop) => slice.settle(Err(Cause::Stopped { stop, stage: "", sent: true })),
        });
        batch.request_stop(Stop::Cancelled);
        assert!(batch.sleep(far()));
        assert!(matches!(batch.state(), BatchState::Completed | BatchState::Cancelled));
        assert_eq!(account.finished.load(Ordering::Relaxed), 1);
        io.join().unwrap();
    });
}

#[test]
fn parts_of_an_entry_settle_it_once_and_a_failure_among_them_is_not_lost() {
    model(|| {
        let (account, batch) = batch(1);
        let mut first = Slice::whole(&batch, 0);
        let second = first.split_off(4);
        let good = thread::spawn(move || first.settle(Ok(())));
        second.settle(Err(Cause::Refused));
        assert!(batch.sleep(far()));
        assert_eq!(batch.state(), BatchState::Failed);
        assert_eq!(account.finished.load(Ordering::Relaxed), 1);
        good.join().unwrap();
    });
}

/// Memory of which the model knows who touches it when.
struct Memory(UnsafeCell<u8>);

#[expect(unsafe_code, reason = "the model looks after it: an unordered access fails it")]
// SAFETY: loom finds two accesses that are not ordered.
unsafe impl Sync for Memory {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: as above.
unsafe impl Send for Memory {}

#[test]
fn unregister_returns_when_the_last_pin_is_gone_and_not_before() {
    model(|| {
        let registry = Arc::new(Registry::new());
        let range = Range::host(BufferInfo { addr: 100, len: 50 }, Access::ReadWrite);
        registry.register(vec![range], Default::default(), None).unwrap();
        let memory = Arc::new(Memory(UnsafeCell::new(0)));
        let (peer, touched) = (Arc::clone(&registry), Arc::clone(&memory));
        let io = thread::spawn(move || {
            if let Some(pin) = peer.find(Op::Write, 100, 50) {
                let again = pin.again();
                touched.0.with_mut(|_| ());
                drop(pin);
                touched.0.with_mut(|_| ());
                drop(again);
            }
        });
        registry.unregister(&[100], |_| panic!("nobody keeps a pin")).unwrap();
        memory.0.with_mut(|_| ());
        assert!(registry.find(Op::Write, 100, 50).is_none());
        io.join().unwrap();
    });
}

#[test]
fn a_question_is_answered_once_whoever_comes_first() {
    model(|| {
        let answers = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&answers);
        let name = SegmentName::parse("10.0.0.1:7000", 7000).unwrap();
        let answer = move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        let to = (&Arc::from("peer:1"), &name);
        let question = Arc::new(Question::new(to, "probe", Vec::new(), far(), || false, answer));
        let (one, two) = (Arc::clone(&question), Arc::clone(&question));
        let threads = [
            thread::spawn(move || one.settle(Err(Error::Closed))),
            thread::spawn(move || {
                if !two.is_answered() {
                    two.settle(Err(Error::Closed));
                }
            }),
        ];
        drop(question);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(answers.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn no_kick_is_lost_between_two_looks_and_a_sleep() {
    model(|| {
        let (mailbox, alarm) = Mailbox::modelled();
        let queue = Arc::new((Mutex::new(0_u32), Call::new()));
        let submit = || {
            let (mailbox, queue) = (Arc::clone(&mailbox), Arc::clone(&queue));
            thread::spawn(move || {
                *locked(&queue.0) += 1;
                if queue.1.make() {
                    mailbox.post(Command::Sweep);
                }
            })
        };
        let threads = [submit(), submit()];
        let mut taken = 0;
        while taken < 2 {
            for _ in mailbox.take() {
                queue.1.answer();
                taken += std::mem::take(&mut *locked(&queue.0));
            }
            if taken < 2 && mailbox.sleep() {
                alarm.wait();
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

#[test]
fn no_command_is_lost_between_a_look_and_a_sleep() {
    model(|| {
        let (mailbox, alarm) = Mailbox::modelled();
        let post = || {
            let mailbox = Arc::clone(&mailbox);
            thread::spawn(move || mailbox.post(Command::Sweep))
        };
        let threads = [post(), post()];
        let mut taken = 0;
        while taken < 2 {
            taken += mailbox.take().len();
            if taken < 2 && mailbox.sleep() {
                alarm.wait();
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

const LIMITS: (usize, usize) = (2, 3);

#[test]
fn who_waits_for_room_is_woken_and_no_bound_is_passed() {
    model(|| {
        let queue = Arc::new((Queued::default(), AtomicUsize::new(0)));
        let submit = |queue: &Arc<(Queued, AtomicUsize)>| {
            let queue = Arc::clone(queue);
            move || {
                let (queued, used) = &*queue;
                while !queued.try_reserve(used, 2, LIMITS) {
                    assert!(queued.wait(far(), || queued.has_room(used, 2, LIMITS)));
                }
                assert!(used.load(Ordering::SeqCst) <= LIMITS.0);
                queued.release(used, 2);
            }
        };
        let other = thread::spawn(submit(&queue));
        submit(&queue)();
        other.join().unwrap();
        assert_eq!(queue.1.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn who_needs_little_is_not_left_asleep_by_one_who_tried_for_much() {
    model(|| {
        let queue = Arc::new((Queued::default(), AtomicUsize::new(0)));
        // Another peer's batch takes most of the room of all, and goes on for long.
        let others = AtomicUsize::new(0);
        assert!(queue.0.try_reserve(&others, 2, LIMITS));
        let much = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || assert!(!queue.0.try_reserve(&queue.1, 2, LIMITS)))
        };
        let (queued, used) = &*queue;
        while !queued.try_reserve(used, 1, LIMITS) {
            assert!(queued.wait(far(), || queued.has_room(used, 1, LIMITS)));
        }
        much.join().unwrap();
    });
}
