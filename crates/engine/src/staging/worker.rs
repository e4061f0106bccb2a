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
    /// `None`: it could not be recorded. What had been submitted goes on, so that is tried again.
    event: Option<Event>,
    fault: Option<Fault>,
    /// Since when the device does not say whether it has ended.
    doubted: Option<Instant>,
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

/// How long the worker sleeps between two looks at copies in progress. (Less would keep a processor busy that others
/// need to send what was copied.)
const NAP: Duration = Duration::from_micros(25);
/// The same after so many looks that found nothing new.
const LONGEST_NAP: Duration = Duration::from_micros(500);
const PATIENT: u32 = 60;
/// After so many looks with nothing in progress it sleeps until it is called; not sooner (about 10 ms), since being
/// woken up takes longer than many a copy.
const LINGER: u32 = 300;
/// How long the worker looks out for the end of copies when its engine closes.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// One piece of pinned memory is not longer: the library may hold its own locks while it pins.
const PINNED_AT_ONCE: usize = 64 << 20;

pub(super) fn run(stager: Arc<Stager>, context: Context) {
    if catch_unwind(AssertUnwindSafe(|| work(&stager, context))).is_err() {
        tracing::error!("the copy thread of {} panicked, which is a bug", stager.device());
        stager.shut(&stager.no_answer());
    }
    // Nobody is there to free anything, if it was not freed.
    for order in stager.take_last_orders(false) {
        stager.refuse(order, &stager.no_answer());
    }
    stager.ended();
}

fn work(stager: &Stager, context: Context) {
    sharpen_naps();
    let runtime = &**stager.runtime();
    if let Some(node) = numa_node(runtime, stager.device()) {
        prefer_memory_of(node);
    }
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
            let idle = self.is_idle();
            let nap = if idle || looks <= PATIENT { NAP } else { LONGEST_NAP };
            let patience = if idle && looks > LINGER { None } else { Some(nap) };
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
        let flight = Flight { task, event, fault, doubted: None };
        self.lines[index(flight.task.way)].flights.push_back(flight);
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
        self.stager.looks();
        let mut any = false;
        for line in 0..self.lines.len() {
            while let Some(ended) = self.first_ended(line) {
                let flight = self.lines[line].flights.pop_front().expect("it was looked at");
                self.events.extend(flight.event.filter(|_| ended.is_ok()));
                let fault = ended.err().map(|error| Arc::new(Error::from(error)));
                self.stager.end(flight.task, flight.fault.or(fault));
                any = true;
            }
        }
        self.gates.retain(|gate| {
            let open = gate.look();
            if open {
                self.stager.gate_gone(gate);
            }
            any |= open;
            !open
        });
        any
    }

    /// Whether the first task of a line has ended; `None`: not yet. An error: the device has given up.
    fn first_ended(&mut self, line: usize) -> Option<Result<(), GpuError>> {
        let event = self.lines[line].flights.front()?.event;
        let asked = match event {
            // SAFETY: the event is ours and alive.
            Some(event) => unsafe { self.runtime.query_event(event) },
            None => self.record_first(line).map(|()| false),
        };
        match asked {
            Ok(done) => done.then_some(Ok(())),
            Err(error) => {
                let flight = self.lines[line].flights.front_mut()?;
                let since = *flight.doubted.get_or_insert_with(Instant::now);
                // A device that answers nothing any more copies nothing. Any other answer is no news of the copies,
                // which may still use their slot, and is believed only if it is repeated.
                let silent = error.is_sticky() || error.is_unloading();
                (silent || since.elapsed() > LAST_WAIT).then_some(Err(error))
            }
        }
    }

    /// Marks the end of a line's first task, or a later one, which is as good.
    fn record_first(&mut self, line: usize) -> Result<(), GpuError> {
        let event = self.event()?;
        let stream = self.lines[line].stream.expect("a task was put on it");
        // SAFETY: both are ours and alive.
        let recorded = unsafe { self.runtime.record_event(event, stream.handle()) };
        if let Some(flight) = self.lines[line].flights.front_mut().filter(|_| recorded.is_ok()) {
            flight.event = Some(event);
        } else {
            self.events.push(event);
        }
        recorded
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
            // And whatever else it keeps: to free that would be to wait for the copy, or worse.
            std::mem::forget(std::mem::take(&mut self.lines));
            drop(self.stager.take_last_orders(true));
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
        for order in self.stager.take_last_orders(false) {
            self.obey(order);
        }
        if self.allocated > 0 {
            // The last user of a context takes its memory along, whose addresses are then given out anew: to somebody
            // who would lose them when these buffers are dropped. So the context stays, for the rest of the process.
            std::mem::forget(self.inside);
        }
    }
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

/// The NUMA node that the device is at, if the machine has several.
fn numa_node(runtime: &dyn GpuRuntime, device: DeviceId) -> Option<u32> {
    let address = runtime.device(device.ordinal).ok()?.pci_address?;
    let node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{address}/numa_node")).ok()?;
    // -1: the machine has but one.
    node.trim().parse().ok()
}

/// Has the memory that this thread allocates come from a NUMA node, as far as it has some: the slots are to be near
/// their device.
fn prefer_memory_of(node: u32) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let Some(mask) = 1_u64.checked_shl(node) else { return };
    let bits: libc::c_ulong = u64::BITS.into();
    // SAFETY: reads one word of `mask`; concerns this thread's own allocations. A system that forbids it says so, and
    // memory comes from anywhere.
    unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, &raw const mask, bits) };
}

/// Has this thread's sleeps end when they are due, and not up to 50 µs later.
fn sharpen_naps() {
    // SAFETY: takes numbers, and concerns this thread's own timers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0, 0, 0) };
}
