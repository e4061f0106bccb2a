//! The copy worker of a device: the only thread of an engine that copies there.
#![expect(unsafe_code, reason = "calls into the GPU library, on memory that users have lent")]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use tensorferry_gpu::{
    Context, DeviceId, Entered, Event, GpuError, GpuRuntime, Pinned, Stream, Thread,
};

use crate::error::Error;
use crate::staging::{Bell, Copy, Done, Fault, Gate, Stager, Way};

/// What the worker is told.
pub(crate) enum Order {
    /// Pin the slots of one direction.
    Open(Way),
    Copy(Task),
    /// Watch a caller's stream.
    Gate(Arc<Gate>),
    /// Say when everything before this is done, and how the pinning went.
    Tell(SyncSender<Result<(), Fault>>),
    /// Allocate device memory.
    Alloc(usize, SyncSender<Result<u64, Fault>>),
    /// Free device memory.
    Free(u64),
}

/// A job with its number.
pub(crate) struct Task {
    pub(super) number: u64,
    pub(super) way: Way,
    pub(super) copies: Vec<Copy>,
    pub(super) bell: Option<Arc<dyn Bell>>,
    pub(super) done: Arc<Done>,
}

/// A task that the device works on.
struct Flight {
    task: Task,
    /// `None`: nothing is in progress, it failed at once.
    event: Option<Event>,
    fault: Option<Fault>,
}

struct Worker<'a> {
    stager: &'a Stager,
    runtime: &'a dyn GpuRuntime,
    inside: Entered<'a>,
    lines: [Line; 3],
    events: Vec<Event>,
    pinned: Vec<Pinned>,
    gates: Vec<Arc<Gate>>,
    /// How many pieces of device memory were made and not freed.
    allocated: usize,
}

/// A direction: its stream, and what is on it, in its order.
#[derive(Default)]
struct Line {
    stream: Option<Stream>,
    flights: VecDeque<Flight>,
}

/// How long the worker sleeps between two looks at copies in progress: at first, and at most.
const FIRST_NAP: Duration = Duration::from_micros(2);
const NAP: Duration = Duration::from_micros(32);
/// The same after so many looks that found nothing new. With nothing in progress it then sleeps until it is called;
/// not sooner, since waking up takes longer than many a copy.
const LONGEST_NAP: Duration = Duration::from_micros(500);
const PATIENT: u32 = 60;
/// How long the worker looks out for the end of copies when its engine closes.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// One piece of pinned memory is not longer: the library may hold its own locks while it pins.
const PINNED_AT_ONCE: usize = 64 << 20;

pub(super) fn run(stager: Arc<Stager>, context: Context) {
    if catch_unwind(AssertUnwindSafe(|| work(&stager, context))).is_err() {
        tracing::error!("the copy thread of {} panicked, which is a bug", stager.device());
        stager.shut(&stager.no_answer());
    }
    stager.ended();
}

fn work(stager: &Stager, context: Context) {
    sharpen_naps();
    let runtime = &**stager.runtime();
    // A capture of a graph elsewhere in the process neither minds our calls nor fails them.
    let relaxed = runtime.relax_capture();
    if let Err(error) = &relaxed {
        tracing::warn!("{error}; graph captures may fail while {} is in use", stager.device());
    }
    match runtime.enter(stager.device().ordinal, context, Thread::Ours) {
        Err(error) => stager.shut(&Arc::new(error.into())),
        Ok(inside) => Worker {
            stager,
            runtime,
            inside,
            lines: Default::default(),
            events: Vec::new(),
            pinned: Vec::new(),
            gates: Vec::new(),
            allocated: 0,
        }
        .work(),
    }
}

impl Worker<'_> {
    fn work(mut self) {
        let mut orders = Vec::new();
        let (mut looks, mut last) = (0, None);
        loop {
            let nap = nap(looks);
            let patience = if self.is_idle() && looks > PATIENT { None } else { Some(nap) };
            let ending = self.stager.take_orders(patience, &mut orders);
            looks = if orders.is_empty() { looks + 1 } else { 0 };
            let mut ended = self.look();
            for order in orders.drain(..) {
                self.obey(order);
                // What has ended meanwhile need not wait for the rest of the orders.
                ended |= self.look();
            }
            if ended {
                looks = 0;
            }
            if ending {
                let until = *last.get_or_insert_with(|| Instant::now() + LAST_WAIT);
                if self.lines.iter().all(|line| line.flights.is_empty()) || Instant::now() > until {
                    break;
                }
                std::thread::sleep(nap);
            }
        }
        self.clean_up();
    }

    fn is_idle(&self) -> bool {
        self.gates.is_empty() && self.lines.iter().all(|line| line.flights.is_empty())
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Open(way) => self.open(way),
            Order::Copy(task) => self.begin(task),
            Order::Gate(gate) => self.gates.push(gate),
            // Dropped, whoever asked has gone.
            Order::Tell(tell) => drop(tell.send(self.openings())),
            Order::Alloc(len, tell) => {
                let addr = self.runtime.alloc_device(&self.inside, len);
                self.allocated += usize::from(addr.is_ok());
                drop(tell.send(addr.map_err(|e| Arc::new(e.into()))));
            }
            Order::Free(addr) => {
                free(self.runtime, &self.inside, addr);
                self.allocated -= 1;
            }
        }
    }

    /// Pins the slots of one direction.
    fn open(&mut self, way: Way) {
        let ring = self.stager.ring(way);
        let len = ring.slot_bytes();
        let at_once = (PINNED_AT_ONCE / len).clamp(1, self.stager.slots());
        let mut left = self.stager.slots();
        while left > 0 {
            let slots = left.min(at_once);
            match self.runtime.alloc_pinned(&self.inside, slots * len) {
                Ok(pinned) => {
                    self.pinned.push(pinned);
                    ring.add((0..slots).map(|i| pinned.addr() + (i * len) as u64));
                    left -= slots;
                }
                // Fewer slots are slower; none at all is an error.
                Err(error) if left < self.stager.slots() => {
                    tracing::warn!(
                        "{} has {left} staging slots less than wanted: {error}",
                        self.stager.device()
                    );
                    return;
                }
                Err(error) => return ring.fail(&Arc::new(error.into()), false),
            }
        }
    }

    fn openings(&self) -> Result<(), Fault> {
        let failure = |way| self.stager.ring(way).failure().map_or(Ok(()), Err);
        failure(Way::ToHost).and_then(|()| failure(Way::ToDevice))
    }

    /// Puts a task's copies on their stream.
    fn begin(&mut self, task: Task) {
        let begun = self.stream(task.way).and_then(|stream| {
            let event = self.event()?;
            Ok((stream, event))
        });
        let (stream, event) = match begun {
            Ok(both) => both,
            Err(error) => return self.stager.end(task, Some(Arc::new(error.into()))),
        };
        let copied = task.copies.iter().try_for_each(|copy| self.copy(task.way, *copy, stream));
        // SAFETY: both are ours and alive.
        let recorded = unsafe { self.runtime.record_event(event, stream.handle()) };
        let fault = copied.and(recorded.clone()).err().map(|error| Arc::new(Error::from(error)));
        let event = match recorded {
            Ok(()) => Some(event),
            Err(_) => {
                self.events.push(event);
                None
            }
        };
        self.lines[index(task.way)].flights.push_back(Flight { task, event, fault });
    }

    fn copy(&self, way: Way, copy: Copy, stream: Stream) -> Result<(), GpuError> {
        let Copy { device, other, len } = copy;
        // For all three: `other` is in a slot that the task holds until it has ended, or device memory. Device memory is
        // a local range of a request that is not final, or of a registered buffer that is pinned (`Keep`); their
        // owners promised `Segment::submit` and `Engine::register` to leave it allocated until then. The stream is
        // ours, and of the device that owns the memory.
        match way {
            // SAFETY: as above.
            Way::ToHost => unsafe { self.runtime.copy_to_host(other, device, len, stream) },
            // SAFETY: as above.
            Way::ToDevice => unsafe { self.runtime.copy_to_device(device, other, len, stream) },
            // SAFETY: as above.
            Way::OnDevice => unsafe { self.runtime.copy_on_device(device, other, len, stream) },
        }
    }

    fn stream(&mut self, way: Way) -> Result<Stream, GpuError> {
        let line = &mut self.lines[index(way)];
        if let Some(stream) = line.stream {
            return Ok(stream);
        }
        let stream = self.runtime.create_stream(&self.inside)?;
        line.stream = Some(stream);
        Ok(stream)
    }

    fn event(&mut self) -> Result<Event, GpuError> {
        self.events.pop().map_or_else(|| self.runtime.create_event(&self.inside), Ok)
    }

    /// Ends the tasks whose copies are complete; whether there was one.
    fn look(&mut self) -> bool {
        let mut any = false;
        for line in &mut self.lines {
            while let Some(flight) = line.flights.front() {
                // SAFETY: the event is ours and alive.
                let asked =
                    flight.event.map_or(Ok(true), |e| unsafe { self.runtime.query_event(e) });
                let fault = match asked {
                    Ok(false) => break,
                    Ok(true) => None,
                    // What is asked for is not known any more: the device has given up.
                    Err(error) => Some(Arc::new(Error::from(error))),
                };
                let flight = line.flights.pop_front().expect("it was looked at");
                self.events.extend(flight.event);
                self.stager.end(flight.task, flight.fault.or(fault));
                any = true;
            }
        }
        self.gates.retain(|gate| {
            let open = gate.look(self.runtime);
            if open {
                self.stager.gate_gone(gate);
            }
            any |= open;
            !open
        });
        any
    }

    /// Gives everything back; but not what a copy that hangs may still touch, and nothing at all to a library
    /// that is being unloaded.
    fn clean_up(mut self) {
        for gate in std::mem::take(&mut self.gates) {
            self.stager.gate_gone(&gate);
            gate.fail(&Arc::new(Error::Closed));
        }
        if self.lines.iter().any(|line| !line.flights.is_empty()) {
            tracing::warn!(
                "a copy on {} does not end: its staging slots are left to it",
                self.stager.device()
            );
            return;
        }
        let (wanted, mut first) = (self.pinned.iter().map(|p| p.len()).sum::<usize>(), None);
        let rings = [Way::ToHost, Way::ToDevice].map(|way| self.stager.ring(way));
        let back = rings.iter().map(|ring| ring.free() * ring.slot_bytes()).sum::<usize>();
        let mut note = |result: Result<(), GpuError>| first = first.take().or(result.err());
        for event in self.events.drain(..) {
            // SAFETY: ours, and used by nothing: no flight is left.
            note(unsafe { self.runtime.destroy_event(event) });
        }
        for stream in self.lines.iter().filter_map(|line| line.stream) {
            // SAFETY: as above.
            note(unsafe { self.runtime.destroy_stream(stream) });
        }
        for pinned in self.pinned.drain(..).filter(|_| back == wanted) {
            // SAFETY: ours, and every slot of it has come back; the rings lend none any more.
            note(unsafe { self.runtime.free_pinned(&self.inside, pinned) });
        }
        if let Some(error) = first.filter(|error| !error.is_unloading()) {
            tracing::debug!("{error}");
        }
        if self.allocated > 0 {
            // The last user of a context takes its memory along, whose addresses are then given out anew: to somebody
            // who would lose them when these buffers are dropped. So the context stays, for the rest of the process.
            std::mem::forget(self.inside);
        }
    }
}

/// How long to sleep after so many looks in which nothing had ended.
fn nap(looks: u32) -> Duration {
    if looks > PATIENT { LONGEST_NAP } else { (FIRST_NAP * (1 << looks.min(8))).min(NAP) }
}

/// Frees what [`Order::Alloc`] made, and that is given up now.
fn free(runtime: &dyn GpuRuntime, inside: &Entered<'_>, addr: u64) {
    // SAFETY: its owner gives it up once, when no registration, batch or copy uses it any more.
    if let Err(error) = unsafe { runtime.free_device(inside, addr) } {
        tracing::debug!("{error}");
    }
}

/// [`free`] when there is no worker any more: on a thread that is then gone, so that the caller's is left alone.
pub(super) fn free_here(runtime: &Arc<dyn GpuRuntime>, device: DeviceId, addr: u64) {
    let runtime = Arc::clone(runtime);
    let freeing = move || {
        let _relaxed = runtime.relax_capture();
        match runtime.enter(device.ordinal, Context::InUse, Thread::Ours) {
            Ok(inside) => free(&*runtime, &inside, addr),
            Err(error) => tracing::debug!("{error}"),
        }
    };
    match std::thread::Builder::new().name("ferry-free".to_owned()).spawn(freeing) {
        Ok(thread) => drop(thread.join()),
        Err(error) => tracing::debug!("memory of {device} is left allocated: {error}"),
    }
}

fn index(way: Way) -> usize {
    match way {
        Way::ToHost => 0,
        Way::ToDevice => 1,
        Way::OnDevice => 2,
    }
}

/// Has this thread's sleeps end when they are due, and not up to 50 µs later.
fn sharpen_naps() {
    // SAFETY: takes numbers, and concerns this thread's own timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0, 0, 0) };
}
