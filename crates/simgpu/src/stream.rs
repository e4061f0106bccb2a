//! Streams and events. Each stream has a thread that carries its operations out in order; a copy
//! reads and writes when its time is over, not when it is submitted.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, PoisonError};
use std::time::{Duration, Instant};

use crate::code::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURED_EVENT, Done, ILLEGAL_ADDRESS, INVALID_HANDLE,
    INVALID_VALUE, NOT_READY,
};
use crate::config::Way;
use crate::core::{Core, Guard, State, variant};
use crate::memory::Kind;
use crate::sys::{self, HostFunction, StreamCallback};

/// How many operations a stream holds before submitting waits.
const QUEUE: usize = 1000;
/// How often a stream looks at the word that it waits for.
const LOOK: Duration = Duration::from_micros(20);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Copy { to: u64, from: u64, len: u64, way: Way, device: usize, pageable: bool },
    Fill { to: u64, byte: u8, len: u64, after: Duration },
    Record { event: u64, turn: u64 },
    WaitEvent { event: u64, turn: u64 },
    WaitStream { stream: u64, turn: u64 },
    Call { function: HostFunction, user: u64 },
    Callback { function: StreamCallback, user: u64, stream: u64 },
    WaitValue { addr: u64, value: u32, flags: u32, mask: u32 },
    WriteValue { addr: u64, value: u32 },
    Free { addr: u64 },
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) device: usize,
    pub(crate) legacy: bool,
    /// Whether the legacy stream and this one wait for each other.
    blocking: bool,
    pub(crate) capture: Option<u64>,
    queue: VecDeque<(Operation, Instant)>,
    submitted: u64,
    done: u64,
    /// When the last operation was complete, by the model's clock.
    ready_at: Instant,
    wake: Arc<Condvar>,
    started: bool,
    closed: bool,
}

impl Stream {
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.wake.notify_all();
    }

    fn pending(&self) -> bool {
        self.done < self.submitted
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    device: usize,
    timing: bool,
    /// How often it was recorded, and which of those has been reached.
    recorded: u64,
    reached: u64,
    reached_at: Option<Instant>,
    /// The capture that it was last recorded in.
    capture: Option<u64>,
}

impl State {
    pub(crate) fn create_stream(
        &mut self,
        context: u64,
        flags: u32,
        legacy: bool,
    ) -> Result<u64, i32> {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let device = self.living(context)?.device;
        let handle = self.handle();
        let stream = Stream {
            context,
            device,
            legacy,
            blocking: flags == 0,
            capture: None,
            queue: VecDeque::new(),
            submitted: 0,
            done: 0,
            ready_at: Instant::now(),
            wake: Arc::default(),
            started: false,
            closed: false,
        };
        self.streams.insert(handle, stream);
        Ok(handle)
    }

    /// The stream that a handle means to the calling thread in `context`.
    pub(crate) fn stream(&mut self, core: &Core, handle: u64, context: u64) -> Result<u64, i32> {
        match handle {
            0 | 1 => {
                let known = self.living(context)?.legacy_stream;
                if known != 0 {
                    return Ok(known);
                }
                let made = self.create_stream(context, 0, true)?;
                if let Some(context) = self.contexts.get_mut(&context) {
                    context.legacy_stream = made;
                }
                Ok(made)
            }
            2 => {
                let known = core.thread(|thread| thread.streams.get(&context).copied());
                if let Some(known) = known.filter(|known| self.streams.contains_key(known)) {
                    return Ok(known);
                }
                let made = self.create_stream(context, 0, false)?;
                core.thread(|thread| thread.streams.insert(context, made));
                Ok(made)
            }
            _ => match self.streams.get(&handle) {
                Some(stream) if !stream.closed => Ok(handle),
                _ => Err(INVALID_HANDLE),
            },
        }
    }

    pub(crate) fn close_stream(&mut self, handle: u64) -> Done {
        let stream = self.streams.get_mut(&handle).filter(|stream| !stream.closed);
        let stream = stream.ok_or(INVALID_HANDLE)?;
        stream.close();
        if !stream.started {
            self.streams.remove(&handle);
        }
        Ok(())
    }

    pub(crate) fn create_event(&mut self, device: usize, flags: u32) -> Result<u64, i32> {
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        let handle = self.handle();
        let timing = flags & 2 == 0;
        let event =
            Event { device, timing, recorded: 0, reached: 0, reached_at: None, capture: None };
        self.events.insert(handle, event);
        Ok(handle)
    }

    pub(crate) fn event(&self, handle: u64) -> Result<Event, i32> {
        self.events.get(&handle).copied().ok_or(INVALID_HANDLE)
    }

    pub(crate) fn query_event(&self, handle: u64) -> Done {
        let event = self.event(handle)?;
        match event.capture {
            Some(_) => Err(CAPTURED_EVENT),
            None if event.reached < event.recorded => Err(NOT_READY),
            None => Ok(()),
        }
    }

    pub(crate) fn elapsed_ms(&self, from: u64, to: u64) -> Result<f32, i32> {
        let (from, to) = (self.event(from)?, self.event(to)?);
        if !from.timing || !to.timing {
            return Err(INVALID_HANDLE);
        }
        match (from.reached_at, to.reached_at) {
            (Some(from), Some(to)) => {
                let forwards = to.saturating_duration_since(from);
                let backwards = from.saturating_duration_since(to);
                Ok((forwards.as_secs_f32() - backwards.as_secs_f32()) * 1000.0)
            }
            _ => Err(NOT_READY),
        }
    }

    pub(crate) fn query_stream(&self, stream: u64) -> Done {
        match self.streams.get(&stream) {
            Some(stream) if stream.pending() => Err(NOT_READY),
            Some(_) => Ok(()),
            None => Err(INVALID_HANDLE),
        }
    }

    fn finished(&self, stream: u64, turn: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.done >= turn)
    }

    /// What a copy of these ranges is: its direction, its device, and whether it has a pageable end.
    fn describe(&self, to: u64, from: u64, len: u64) -> Result<Operation, i32> {
        self.space.pairs(to, from, len)?;
        let on_device = |addr| self.space.find(addr).filter(|found| !found.kind.is_host());
        let unknown = |addr| self.space.find(addr).is_none();
        let (way, device) = match (on_device(to), on_device(from)) {
            (Some(_), Some(from)) => (Way::WithinDevices, from.device),
            (Some(to), None) => (Way::HostToDevice, to.device),
            (None, Some(from)) => (Way::DeviceToHost, from.device),
            (None, None) => (Way::WithinDevices, 0),
        };
        let pageable = unknown(to) || unknown(from);
        Ok(Operation::Copy { to, from, len, way, device, pageable })
    }

    /// Refuses a copy whose ends are not what its call says, by the runtime's numbers.
    pub(crate) fn check_kind(&self, to: u64, from: u64, kind: i32) -> Done {
        let on_device = |addr| self.space.find(addr).is_some();
        let fits = match kind {
            0 | 4 => true,
            1 => on_device(to),
            2 => on_device(from),
            3 => on_device(to) && on_device(from),
            _ => return Err(crate::code::INVALID_COPY_DIRECTION),
        };
        if fits { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

/// Puts an operation on a stream; returns its turn there, or None if a capture took it.
pub(crate) fn submit(
    core: &'static Core,
    state: Guard,
    handle: u64,
    operation: Operation,
) -> Result<(Guard, Option<u64>), i32> {
    let mut state = state;
    let stream = state.streams.get(&handle).ok_or(INVALID_HANDLE)?;
    let (context, legacy, blocking) = (stream.context, stream.legacy, stream.blocking);
    if let Some(id) = stream.capture {
        state.add("captured_operations", 1);
        let broken = state.captures.iter().any(|capture| capture.id == id && capture.invalidated);
        return if broken { Err(CAPTURE_INVALIDATED) } else { Ok((state, None)) };
    }
    if legacy {
        state.add("legacy_stream_operations", 1);
        let joined: Vec<_> = state
            .streams
            .values()
            .filter(|other| other.context == context && other.blocking)
            .filter_map(|other| other.capture)
            .collect();
        if !joined.is_empty() {
            state.invalidate(|capture| joined.contains(&capture.id));
            return Err(CAPTURE_IMPLICIT);
        }
    }
    if legacy || blocking {
        let before: Vec<_> = state
            .streams
            .iter()
            .filter(|(_, other)| other.context == context && other.legacy != legacy)
            .filter(|(_, other)| other.blocking && other.pending())
            .map(|(handle, other)| (*handle, other.submitted))
            .collect();
        for (stream, turn) in before {
            state = push(core, state, handle, Operation::WaitStream { stream, turn })?;
        }
    }
    state = push(core, state, handle, operation)?;
    let turn = state.streams.get(&handle).map(|stream| stream.submitted);
    Ok((state, turn))
}

fn push(
    core: &'static Core,
    state: Guard,
    handle: u64,
    operation: Operation,
) -> Result<Guard, i32> {
    let mut state = state;
    loop {
        let stream = state.streams.get_mut(&handle).ok_or(INVALID_HANDLE)?;
        if stream.queue.len() < QUEUE {
            break;
        }
        state = core.wait(state);
    }
    let stream = state.streams.get_mut(&handle).ok_or(INVALID_HANDLE)?;
    stream.queue.push_back((operation, Instant::now()));
    stream.submitted += 1;
    stream.wake.notify_all();
    if !stream.started {
        stream.started = true;
        std::thread::Builder::new()
            .name("simgpu".to_owned())
            .spawn(move || work(core, handle))
            .map_err(|_| crate::code::OPERATING_SYSTEM)?;
    }
    Ok(state)
}

/// Waits until a stream has carried out its operation number `turn`.
pub(crate) fn wait_turn(
    core: &'static Core,
    state: Guard,
    stream: u64,
    turn: u64,
) -> (Guard, Done) {
    let mut state = state;
    while !state.finished(stream, turn) {
        state = core.wait(state);
    }
    let sticky = state.config.sticky;
    (state, if sticky == 0 { Ok(()) } else { Err(sticky) })
}

/// Waits for everything that is on one stream now.
pub(crate) fn wait_stream(core: &'static Core, state: Guard, stream: u64) -> Done {
    let turn = state.streams.get(&stream).map_or(0, |stream| stream.submitted);
    wait_turn(core, state, stream, turn).1
}

/// Waits for everything that is on these streams now.
pub(crate) fn wait_idle(
    core: &'static Core,
    state: Guard,
    which: impl Fn(&Stream) -> bool,
) -> (Guard, Done) {
    let chosen = state.streams.iter().filter(|(_, stream)| which(stream));
    let turns: Vec<_> = chosen.map(|(handle, stream)| (*handle, stream.submitted)).collect();
    let mut waited = (state, Ok(()));
    for (stream, turn) in turns {
        waited = wait_turn(core, waited.0, stream, turn);
    }
    let sticky = waited.0.config.sticky;
    (waited.0, if sticky == 0 { Ok(()) } else { Err(sticky) })
}

/// Copies on a stream; a copy with pageable memory, or one that is asked to, waits for its end.
pub(crate) fn copy(
    core: &'static Core,
    state: Guard,
    stream: u64,
    range: (u64, u64, u64),
    wait: bool,
) -> Done {
    let mut state = state;
    let (to, from, len) = range;
    if len == 0 {
        return Ok(());
    }
    let operation = state.describe(to, from, len)?;
    let pageable = matches!(operation, Operation::Copy { pageable: true, .. });
    if pageable {
        state.check_capture(core, variant().family())?;
        state.add("pageable_copies", 1);
    }
    let (mut state, turn) = submit(core, state, stream, operation)?;
    if turn.is_some() {
        state.add("copies_in_flight", 1);
        let flying = state.value("copies_in_flight");
        state.raise("copies_in_flight_max", flying);
    }
    match turn {
        Some(turn) if wait || pageable => wait_turn(core, state, stream, turn).1,
        _ => Ok(()),
    }
}

pub(crate) fn fill(
    core: &'static Core,
    state: Guard,
    stream: u64,
    to: (u64, u8, u64),
    after: Duration,
) -> Result<(Guard, Option<u64>), i32> {
    let (to, byte, len) = to;
    state.space.find(to).ok_or(INVALID_VALUE)?;
    state.space.pieces(to, len)?;
    submit(core, state, stream, Operation::Fill { to, byte, len, after })
}

pub(crate) fn record(core: &'static Core, state: Guard, event: u64, stream: u64) -> Done {
    let mut state = state;
    let place = state.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    let (device, capture) = (place.device, place.capture);
    let entry = state.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
    if entry.device != device {
        return Err(INVALID_HANDLE);
    }
    entry.capture = capture;
    if capture.is_none() {
        entry.recorded += 1;
    }
    let turn = entry.recorded;
    submit(core, state, stream, Operation::Record { event, turn }).map(|_| ())
}

pub(crate) fn wait_event(core: &'static Core, state: Guard, stream: u64, event: u64) -> Done {
    let mut state = state;
    let entry = state.event(event)?;
    if let Some(capture) = entry.capture {
        // The stream joins the capture, if that is still going on.
        if !state.captures.iter().any(|running| running.id == capture) {
            return Err(CAPTURED_EVENT);
        }
        state.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?.capture = Some(capture);
        return Ok(());
    }
    if entry.reached >= entry.recorded {
        return Ok(());
    }
    let operation = Operation::WaitEvent { event, turn: entry.recorded };
    submit(core, state, stream, operation).map(|_| ())
}

pub(crate) fn synchronize_event(core: &'static Core, state: Guard, event: u64) -> Done {
    let mut state = state;
    let turn = state.event(event)?.recorded;
    loop {
        if state.config.sticky != 0 {
            return Err(state.config.sticky);
        }
        match state.events.get(&event) {
            Some(entry) if entry.capture.is_some() => return Err(CAPTURED_EVENT),
            Some(entry) if entry.reached < turn => state = core.wait(state),
            _ => return Ok(()),
        }
    }
}

/// `StreamWaitValue32` and `StreamWriteValue32` take memory that both sides reach.
pub(crate) fn check_word(state: &State, addr: u64) -> Done {
    if !addr.is_multiple_of(4) {
        return Err(INVALID_VALUE);
    }
    state.space.find(addr).map(|_| ()).ok_or(INVALID_VALUE)
}

/// A stream's thread.
fn work(core: &'static Core, handle: u64) {
    sys::prepare_worker();
    let mut state = core.lock();
    loop {
        let Some(stream) = state.streams.get_mut(&handle) else { return };
        let Some((operation, at)) = stream.queue.front().copied() else {
            if stream.closed {
                state.streams.remove(&handle);
                core.progress.notify_all();
                return;
            }
            let wake = Arc::clone(&stream.wake);
            state = wake.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        if state.config.sticky == 0 {
            state = carry_out(core, state, handle, operation, at);
        }
        if let Operation::Record { event, turn } = operation
            && let Some(event) = state.events.get_mut(&event)
        {
            event.reached = event.reached.max(turn);
            event.reached_at = Some(Instant::now());
        }
        if matches!(operation, Operation::Copy { .. }) {
            state.subtract("copies_in_flight", 1);
        }
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.queue.pop_front();
            stream.done += 1;
        }
        core.progress.notify_all();
    }
}

fn carry_out(
    core: &'static Core,
    state: Guard,
    handle: u64,
    operation: Operation,
    at: Instant,
) -> Guard {
    let mut state = state;
    match operation {
        Operation::Copy { to, from, len, .. } => {
            state = take_time(core, state, handle, operation, at);
            if state.config.sticky != 0 {
                return state;
            }
            if let Some(code) = state.fault("copy") {
                return fail(core, state, code);
            }
            move_bytes(core, state, (to, from, len), operation)
        }
        Operation::Fill { to, byte, len, after } => {
            state = sleep(state, handle, Instant::now() + after);
            if state.config.sticky != 0 {
                return state;
            }
            let Ok(pieces) = state.space.pieces(to, len) else {
                return fail(core, state, ILLEGAL_ADDRESS);
            };
            drop(state);
            pieces.into_iter().for_each(|(at, len)| sys::fill(at, byte, len));
            core.lock()
        }
        Operation::Record { .. } => state,
        Operation::WaitEvent { event, turn } => until(core, state, |state| {
            state.events.get(&event).is_none_or(|event| event.reached >= turn)
        }),
        Operation::WaitStream { stream, turn } => {
            until(core, state, |state| state.finished(stream, turn))
        }
        Operation::Call { function, user } => host_function(core, state, || {
            function(std::ptr::with_exposed_provenance_mut(user as usize));
        }),
        Operation::Callback { function, user, stream } => host_function(core, state, || {
            function(stream, 0, std::ptr::with_exposed_provenance_mut(user as usize));
        }),
        Operation::WaitValue { addr, value, flags, mask } => {
            while state.config.sticky == 0 {
                let Ok(place) = state.space.pieces(addr, 4) else {
                    return fail(core, state, ILLEGAL_ADDRESS);
                };
                drop(state);
                let reached = reached(sys::load(place[0].0) & mask, value & mask, flags);
                if !reached {
                    std::thread::sleep(LOOK);
                }
                state = core.lock();
                if reached {
                    break;
                }
            }
            state
        }
        Operation::WriteValue { addr, value } => match state.space.pieces(addr, 4) {
            Ok(place) => {
                sys::store(place[0].0, value);
                state
            }
            Err(_) => fail(core, state, ILLEGAL_ADDRESS),
        },
        Operation::Free { addr } => {
            // Freed by somebody else in the meantime: the simulator has no complaint to make.
            let _ = state.space.free(addr, &[Kind::Pool]);
            state
        }
    }
}

/// Whether a word satisfies a wait: 0 at least (cyclic), 1 equal, 2 any common bit, 3 nor.
fn reached(word: u32, value: u32, flags: u32) -> bool {
    match flags & 3 {
        0 => word.wrapping_sub(value).cast_signed() >= 0,
        1 => word == value,
        2 => word & value != 0,
        _ => !(word | value) != 0,
    }
}

/// A device fault: every later call repeats it.
fn fail(core: &'static Core, state: Guard, code: i32) -> Guard {
    let mut state = state;
    state.config.sticky = code;
    core.progress.notify_all();
    state
}

fn until(core: &'static Core, state: Guard, reached: impl Fn(&State) -> bool) -> Guard {
    let mut state = state;
    while state.config.sticky == 0 && !reached(&state) {
        state = core.wait(state);
    }
    state
}

fn host_function(core: &'static Core, state: Guard, run: impl FnOnce()) -> Guard {
    let mut state = state;
    state.add("host_functions", 1);
    drop(state);
    core.thread(|thread| thread.in_host_function = true);
    run();
    core.thread(|thread| thread.in_host_function = false);
    core.lock()
}

fn sleep(state: Guard, handle: u64, until: Instant) -> Guard {
    let mut state = state;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let Some(stream) = state.streams.get(&handle) else { return state };
        if left.is_zero() || state.config.sticky != 0 {
            return state;
        }
        let wake = Arc::clone(&stream.wake);
        let waited = wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        state = waited.0;
    }
}

/// Waits as long as a copy takes: one at a time in each direction of a device. The times are the
/// model's, so a thread that wakes late does not make the link slower.
fn take_time(
    core: &'static Core,
    state: Guard,
    handle: u64,
    operation: Operation,
    at: Instant,
) -> Guard {
    let mut state = state;
    let Operation::Copy { len, way, device, pageable, .. } = operation else { return state };
    let rate = match (state.config.rate[way as usize], pageable) {
        (0, false) => 0,
        (0, true) => state.config.pageable_rate,
        (rate, false) => rate,
        (rate, true) => rate.min(state.config.pageable_rate.max(1)),
    };
    let takes = match rate {
        0 => Duration::ZERO,
        rate => Duration::from_secs_f64(len as f64 / rate as f64),
    };
    let latency = Duration::from_nanos(state.config.latency_ns);
    let ready_at = state.streams.get(&handle).map_or(at, |stream| stream.ready_at);
    let engine = &mut state.devices[device].free_at[way as usize];
    let start = at.max(ready_at).max(engine.unwrap_or(at));
    *engine = Some(start + takes);
    let end = start + takes + latency;
    state = sleep(state, handle, end);
    if let Some(stream) = state.streams.get_mut(&handle) {
        stream.ready_at = end;
    }
    if state.config.hang_after == 0 {
        state.config.hang = true;
    }
    until(core, state, |state| !state.config.hang)
}

/// How much is copied before others on the same processor get their turn.
const AT_ONCE: u64 = 64 << 10;

fn move_bytes(
    core: &'static Core,
    state: Guard,
    range: (u64, u64, u64),
    operation: Operation,
) -> Guard {
    let Operation::Copy { way, device, .. } = operation else { return state };
    let (to, from, len) = range;
    let Ok(pairs) = state.space.pairs(to, from, len) else {
        return fail(core, state, ILLEGAL_ADDRESS);
    };
    drop(state);
    for (to, from, len) in pairs {
        for at in (0..len).step_by(AT_ONCE as usize) {
            sys::copy(to + at, from + at, AT_ONCE.min(len - at));
            // A real copy engine takes no processor from the threads that wait for it.
            std::thread::yield_now();
        }
    }
    let mut state = core.lock();
    state.add("copies", 1);
    state.devices[device].bytes[way as usize] += len;
    if state.config.hang_after != u64::MAX {
        state.config.hang_after = state.config.hang_after.saturating_sub(1);
    }
    state
}
