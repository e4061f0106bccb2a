//! One device in use: its slots, its copies, and the thread that carries them out.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tensorferry_gpu::{Context, DeviceId, GpuRuntime};

use crate::error::{Error, Result};
use crate::memory::Lent;
use crate::registry::Pin;
use crate::staging::ring::Taken;
use crate::staging::worker::{self, Order};
use crate::staging::{Bell, Fault, Gate, Loan, Ring, Turn};
use crate::sync::locked;
use crate::transfer::{Cause, Hold};

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    ToHost,
    ToDevice,
    OnDevice,
}

/// One range to be copied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Copy {
    /// In device memory.
    pub(crate) device: u64,
    /// In a slot, or for [`Way::OnDevice`] in device memory: where the bytes come from.
    pub(crate) other: u64,
    pub(crate) len: usize,
}

/// What a copy holds, beside its slot, until it has ended.
pub(crate) enum Keep {
    /// Its batch is not final.
    Hold(Hold),
    /// Its buffer is not unregistered.
    Pin(#[expect(dead_code, reason = "held, not looked at")] Pin),
    /// Its slot is not lent to anybody else.
    Slot(#[expect(dead_code, reason = "held, not looked at")] Arc<Loan>),
    /// Its memory is not freed.
    Lent(#[expect(dead_code, reason = "held, not looked at")] Lent),
}

/// Copies that are carried out, and are complete, together.
pub(crate) struct Job {
    pub(crate) way: Way,
    pub(crate) copies: Vec<Copy>,
    pub(crate) keep: Vec<Keep>,
    /// Rung when it has ended.
    pub(crate) bell: Option<Arc<dyn Bell>>,
}

/// Where a job stands. Shared by those who wait for it and those who carry it out.
pub(crate) struct Done {
    way: Way,
    state: AtomicU8,
    fault: OnceLock<Fault>,
    keep: Mutex<Vec<Keep>>,
    /// Since somebody first saw that a batch of it was told to stop.
    overrun: Mutex<Option<Overrun>>,
}

/// A job that goes on although a batch of it was told to stop.
struct Overrun {
    since: Instant,
    /// When its time was up, and how often the worker had begun to look by then.
    due: Option<(Instant, u64)>,
}

const RUNNING: u8 = 0;
const COMPLETE: u8 = 1;
const FAILED: u8 = 2;

/// A device that memory of this engine's requests lies on.
pub(crate) struct Stager {
    device: DeviceId,
    runtime: Arc<dyn GpuRuntime>,
    to_host: Arc<Ring>,
    to_device: Arc<Ring>,
    slots: usize,
    sweeper: Arc<dyn Bell>,
    orders: Mutex<Orders>,
    called: Condvar,
    /// Jobs that were given to the worker and have not ended.
    live: Mutex<HashMap<u64, Arc<Done>>>,
    gates: Mutex<Vec<Arc<Gate>>>,
    /// When a copy last ended, by [`Way`].
    moved: Mutex<[Option<Instant>; 3]>,
    next: AtomicU64,
    /// How often the worker has begun to look at all copies.
    looks: AtomicU64,
    ended: Mutex<bool>,
    end_seen: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Orders {
    waiting: Vec<Order>,
    /// The worker sleeps, so that it has to be called.
    asleep: bool,
    /// Why none is taken any more, but to free something.
    refusal: Option<Fault>,
    /// The worker takes none at all any more.
    gone: bool,
    /// A copy hangs, and what it may use is left to it.
    stuck: bool,
}

/// How long a copy may go on after its batch was told to stop, or after the device last ended one, before it counts as
/// hung. A slot is copied in a millisecond or less; this much more is for a device that others keep busy.
const GRACE: Duration = Duration::from_millis(60);
/// How much longer it may go on unseen: the worker may wait for a processor, or in a call of the library.
const UNSEEN: Duration = Duration::from_millis(340);
/// How soon it is asked again whether the worker has looked.
const AGAIN: Duration = Duration::from_millis(2);
/// How long a registration waits for the worker's first words: it may have to pin the slots.
const START: Duration = Duration::from_secs(30);

impl Stager {
    /// Starts the worker of a device. It uses the context that the process has there, or that of the
    /// memory that `context` names.
    pub(crate) fn start(
        device: DeviceId,
        runtime: Arc<dyn GpuRuntime>,
        context: Context,
        (slots, slot_bytes): (usize, usize),
        sweeper: &Arc<dyn Bell>,
    ) -> Result<Arc<Self>> {
        let stager = Arc::new(Self {
            device,
            runtime,
            to_host: Ring::new(slot_bytes),
            to_device: Ring::new(slot_bytes),
            slots,
            sweeper: Arc::clone(sweeper),
            orders: Mutex::default(),
            called: Condvar::new(),
            live: Mutex::default(),
            gates: Mutex::default(),
            moved: Mutex::default(),
            next: AtomicU64::new(1),
            looks: AtomicU64::new(0),
            ended: Mutex::default(),
            end_seen: Condvar::new(),
            thread: Mutex::default(),
        });
        let name = format!("ferry-{device}");
        let theirs = Arc::clone(&stager);
        let thread =
            std::thread::Builder::new().name(name).spawn(move || worker::run(theirs, context));
        let thread =
            thread.map_err(|e| Error::io(format!("starting the copy thread of {device}"), e))?;
        *locked(&stager.thread) = Some(thread);
        Ok(stager)
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// Whether it takes orders.
    pub(crate) fn is_open(&self) -> bool {
        locked(&self.orders).refusal.is_none()
    }

    pub(crate) fn runtime(&self) -> &Arc<dyn GpuRuntime> {
        &self.runtime
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn ring(&self, way: Way) -> &Arc<Ring> {
        match way {
            Way::ToDevice => &self.to_device,
            Way::ToHost | Way::OnDevice => &self.to_host,
        }
    }

    /// A slot for copies that go `way`, or a place in the line for one.
    ///
    /// # Errors
    /// There are none.
    pub(crate) fn slot(
        &self,
        way: Way,
        turn: &mut Option<Turn>,
        bell: &Arc<dyn Bell>,
    ) -> std::result::Result<Taken, Fault> {
        let ring = self.ring(way);
        if ring.begin_opening() {
            self.order(Order::Open(way));
        }
        ring.take(turn, bell)
    }

    /// A thread that is not an IO thread waits for a slot: an IO thread sees to it that others do not sit on theirs.
    pub(crate) fn wait_for_slot(&self) {
        self.sweeper.ring();
    }

    /// Waits until the worker is in the device's context and has pinned both rings.
    ///
    /// # Errors
    /// What the library refused.
    pub(crate) fn ready(&self) -> std::result::Result<(), Fault> {
        for way in [Way::ToHost, Way::ToDevice] {
            if self.ring(way).begin_opening() {
                self.order(Order::Open(way));
            }
        }
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        self.order(Order::Tell(tell));
        told.recv_timeout(START).unwrap_or_else(|_| Err(self.no_answer()))
    }

    pub(crate) fn no_answer(&self) -> Fault {
        Arc::new(Error::NoDeviceAnswer { device: self.device })
    }

    /// Has a job carried out.
    pub(crate) fn submit(&self, job: Job) -> Arc<Done> {
        let Job { way, copies, keep, bell } = job;
        let done = Arc::new(Done {
            way,
            state: AtomicU8::new(RUNNING),
            fault: OnceLock::new(),
            keep: Mutex::new(keep),
            overrun: Mutex::default(),
        });
        // Relaxed: a number that nothing else has.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        locked(&self.live).insert(number, Arc::clone(&done));
        self.order(Order::Copy(worker::Task {
            number,
            way,
            copies,
            bell,
            done: Arc::clone(&done),
        }));
        done
    }

    /// Has `gate` opened when the caller's stream has come to it.
    pub(crate) fn watch(&self, gate: Arc<Gate>) {
        locked(&self.gates).push(Arc::clone(&gate));
        self.order(Order::Gate(gate));
    }

    pub(super) fn order(&self, order: Order) {
        let mut orders = locked(&self.orders);
        let frees = matches!(order, Order::Free(_)) && !orders.gone;
        if let Some(why) = orders.refusal.clone().filter(|_| !frees) {
            drop(orders);
            return self.refuse(order, &why);
        }
        orders.waiting.push(order);
        let asleep = orders.asleep;
        drop(orders);
        if asleep {
            self.called.notify_one();
        }
    }

    pub(super) fn refuse(&self, order: Order, why: &Fault) {
        match order {
            Order::Open(way) => self.ring(way).fail(why, true),
            Order::Copy(task) => self.end(task, Some(Arc::clone(why))),
            Order::Gate(gate) => {
                self.gate_gone(&gate);
                gate.fail(why);
            }
            Order::Tell(tell) => drop(tell.send(Err(Arc::clone(why)))),
            Order::Alloc(_, tell) => drop(tell.send(Err(Arc::clone(why)))),
            Order::Free(_) if locked(&self.orders).stuck => {}
            Order::Free(addr) => worker::free_here(&self.runtime, self.device, addr),
        }
    }

    /// Nothing is begun any more.
    pub(super) fn shut(&self, why: &Fault) {
        let mut orders = locked(&self.orders);
        orders.refusal.get_or_insert_with(|| Arc::clone(why));
        let frees = |order: &Order| matches!(order, Order::Free(_));
        let (left, waiting) = std::mem::take(&mut orders.waiting).into_iter().partition(frees);
        orders.waiting = left;
        drop(orders);
        self.called.notify_one();
        for way in [Way::ToHost, Way::ToDevice] {
            self.ring(way).fail(why, true);
        }
        let waiting: Vec<Order> = waiting;
        waiting.into_iter().for_each(|order| self.refuse(order, why));
    }

    /// The last orders, which only free something: none comes after this. `stuck`: and to free anything would be to
    /// wait for a copy that hangs.
    pub(super) fn take_last_orders(&self, stuck: bool) -> Vec<Order> {
        let mut orders = locked(&self.orders);
        orders.gone = true;
        orders.stuck |= stuck;
        std::mem::take(&mut orders.waiting)
    }

    /// Waits for orders, at most for `patience`; `None`: until there are some. True if the worker is to end.
    pub(super) fn take_orders(&self, patience: Option<Duration>, into: &mut Vec<Order>) -> bool {
        let mut orders = locked(&self.orders);
        if orders.waiting.is_empty() && orders.refusal.is_none() && patience != Some(Duration::ZERO)
        {
            orders.asleep = true;
            orders = match patience {
                None => self.called.wait(orders).unwrap_or_else(PoisonError::into_inner),
                Some(time) => {
                    let waited = self.called.wait_timeout(orders, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
            orders.asleep = false;
        }
        into.append(&mut orders.waiting);
        orders.refusal.is_some()
    }

    /// The worker begins to look at all copies.
    pub(super) fn looks(&self) {
        // Relaxed: it only says that time has passed; what a look finds is published by `end`.
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    /// The worker's last word: it makes no call any more.
    pub(super) fn ended(&self) {
        *locked(&self.ended) = true;
        self.end_seen.notify_all();
    }

    /// The job has ended: whoever waits for it is told, and what it held is let go.
    pub(super) fn end(&self, task: worker::Task, fault: Option<Fault>) {
        locked(&self.live).remove(&task.number);
        locked(&self.moved)[task.way as usize] = Some(Instant::now());
        task.done.end(fault);
        if let Some(bell) = task.bell {
            bell.ring();
        }
    }

    pub(super) fn gate_gone(&self, gate: &Arc<Gate>) {
        locked(&self.gates).retain(|other| !Arc::ptr_eq(other, gate));
    }

    /// Gives up on copies that go on although their batch was told to stop, and on batches that wait
    /// for a stream; returns when to look again.
    pub(crate) fn sweep(&self, now: Instant) -> Option<Instant> {
        let live: Vec<_> = locked(&self.live).values().cloned().collect();
        let moved = *locked(&self.moved);
        let next =
            live.iter().filter_map(|done| done.sweep(self, now, moved[done.way as usize])).min();
        let gates: Vec<_> = locked(&self.gates).clone();
        let next_gate = gates.iter().filter_map(|gate| gate.sweep(now)).min();
        next.into_iter().chain(next_gate).min()
    }

    /// Has the batches that wait for a stream stop, if a local range of theirs pins the buffer at `addr`.
    pub(crate) fn revoke(&self, addr: u64) {
        for gate in &*locked(&self.gates) {
            gate.revoke(addr);
        }
    }

    /// Since when somebody waits for a slot and none has come back.
    pub(crate) fn starving_since(&self) -> Option<Instant> {
        self.to_host.starving_since().into_iter().chain(self.to_device.starving_since()).min()
    }

    /// Ends the worker. No copy is in progress when this returns; but one that hangs, whose buffers stay pinned.
    pub(crate) fn close(&self, until: Instant) {
        self.shut(&Arc::new(Error::Closed));
        let mut ended = locked(&self.ended);
        while !*ended {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            let waited = self.end_seen.wait_timeout(ended, left);
            ended = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if *ended && let Some(thread) = locked(&self.thread).take() {
            let _ = thread.join();
        }
        drop(ended);
        let live = std::mem::take(&mut *locked(&self.live));
        for done in live.into_values() {
            done.abandon(self.device, |_| true);
        }
    }
}

impl Done {
    /// Whether every byte is where it belongs; `None`: not yet.
    pub(crate) fn result(&self) -> Option<std::result::Result<(), Fault>> {
        // Acquire: pairs with the Release in `end`; the bytes are visible to whoever sees COMPLETE.
        match self.state.load(Ordering::Acquire) {
            RUNNING => None,
            COMPLETE => Some(Ok(())),
            _ => Some(Err(Arc::clone(self.fault.get().expect("it is set before the state")))),
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.state.load(Ordering::Acquire) == COMPLETE
    }

    pub(super) fn end(&self, fault: Option<Fault>) {
        let state = match &fault {
            None => COMPLETE,
            Some(fault) => {
                let _ = self.fault.set(Arc::clone(fault));
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
        let kept = std::mem::take(&mut *locked(&self.keep));
        for keep in kept {
            if let Keep::Hold(hold) = keep {
                hold.settle(match &fault {
                    None => Ok(()),
                    Some(fault) => Err(Cause::Device(Arc::clone(fault))),
                });
            }
        }
    }

    /// Gives up on a copy that goes on although its batch was told to stop; returns when to look again.
    /// `moved` is when the device last ended a copy in its direction.
    fn sweep(&self, stager: &Stager, now: Instant, moved: Option<Instant>) -> Option<Instant> {
        let (mut next, mut stopped) = (None::<Instant>, false);
        for keep in &*locked(&self.keep) {
            let Keep::Hold(hold) = keep else { continue };
            match hold.batch().stop_at(now) {
                Some(_) => stopped = true,
                None => {
                    let at = hold.batch().deadline;
                    next = Some(next.map_or(at, |next| next.min(at)));
                }
            }
        }
        if !stopped {
            return next;
        }
        let looks = stager.looks.load(Ordering::Relaxed);
        let again = locked(&self.overrun)
            .get_or_insert(Overrun { since: now, due: None })
            .look_again(now, moved, looks);
        if let Some(again) = again {
            return Some(next.map_or(again, |next| next.min(again)));
        }
        self.abandon(stager.device, |hold| hold.batch().stop_at(now).is_some());
        next
    }

    /// Settles those that wait for a copy which does not end. The copy may still touch their local memory, so the
    /// pins of their batch stay, and what was lent by value.
    fn abandon(&self, device: DeviceId, which: impl Fn(&Hold) -> bool) {
        let mut abandoned = Vec::new();
        let mut keep = locked(&self.keep);
        for one in std::mem::take(&mut *keep) {
            match one {
                Keep::Hold(hold) if which(&hold) => {
                    keep.extend(hold.pins().into_iter().map(Keep::Pin));
                    keep.extend(hold.lent().map(Keep::Lent));
                    abandoned.push(hold);
                }
                other => keep.push(other),
            }
        }
        drop(keep);
        for hold in abandoned {
            hold.settle(Err(Cause::DeviceStuck(device)));
        }
    }
}

impl Overrun {
    /// When to look at it again; `None`: it hangs. `looks`: how often the worker has begun to look at all copies.
    fn look_again(&mut self, now: Instant, moved: Option<Instant>, looks: u64) -> Option<Instant> {
        let due = moved.map_or(self.since, |moved| moved.max(self.since)) + GRACE;
        if now < due {
            self.due = None;
            return Some(due);
        }
        // It may have ended long ago, and the worker not have been there to see it. The second look that begins from
        // now on proves that the first one was a whole one.
        let (asked, seen) = *self.due.get_or_insert((now, looks));
        (looks < seen + 2 && now < asked + UNSEEN).then(|| now + AGAIN)
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stager").field(&self.device).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_copy_hangs_if_the_worker_has_looked_after_its_time_or_does_not_come_to_it() {
        let start = Instant::now();
        let overrun = || Overrun { since: start, due: None };
        let mut seen = overrun();
        assert_eq!(seen.look_again(start + 59 * MS, None, 5), Some(start + GRACE));
        let late = start + 70 * MS;
        assert_eq!(seen.look_again(late, None, 6), Some(late + AGAIN));
        assert_eq!(seen.look_again(late + MS, None, 7), Some(late + MS + AGAIN));
        assert_eq!(seen.look_again(late + MS, None, 8), None);

        let mut unseen = overrun();
        assert_eq!(unseen.look_again(start + 900 * MS, None, 6), Some(start + 900 * MS + AGAIN));
        let end = start + 900 * MS + UNSEEN;
        assert_eq!(unseen.look_again(end - MS, None, 7), Some(end - MS + AGAIN));
        assert_eq!(unseen.look_again(end, None, 7), None);
    }

    #[test]
    fn a_copy_has_time_while_the_device_ends_others() {
        let start = Instant::now();
        let mut overrun = Overrun { since: start, due: None };
        assert!(overrun.look_again(start + 60 * MS, None, 1).is_some());
        let moved = Some(start + 50 * MS);
        assert_eq!(overrun.look_again(start + 61 * MS, moved, 9), Some(start + 110 * MS));
        // What the worker had seen before that says nothing.
        assert!(overrun.look_again(start + 110 * MS, moved, 9).is_some());
        assert_eq!(overrun.look_again(start + 111 * MS, moved, 11), None);
    }
}
