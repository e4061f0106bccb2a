//! Stream capture, as far as it gets in the way of others: what is recorded is not kept.

use std::thread::{self, ThreadId};

use crate::code::{
    CAPTURE_INVALIDATED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, Done,
    INVALID_VALUE,
};
use crate::core::{Core, State};
use crate::variant::Family;

const GLOBAL: i32 = 0;
const RELAXED: i32 = 2;

#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) id: u64,
    mode: i32,
    begun_by: ThreadId,
    origin: u64,
    pub(crate) invalidated: bool,
}

impl State {
    pub(crate) fn begin_capture(&mut self, stream: u64, mode: i32) -> Done {
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        let id = self.handle();
        let origin = self.streams.get_mut(&stream).ok_or(INVALID_VALUE)?;
        if origin.legacy {
            return Err(CAPTURE_UNSUPPORTED);
        }
        if origin.capture.is_some() {
            return Err(INVALID_VALUE);
        }
        origin.capture = Some(id);
        let begun_by = thread::current().id();
        self.captures.push(Capture { id, mode, begun_by, origin: stream, invalidated: false });
        self.add("captures_begun", 1);
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: u64) -> Done {
        let id = self.streams.get(&stream).and_then(|stream| stream.capture);
        let place = self.captures.iter().position(|capture| Some(capture.id) == id);
        let place = place.ok_or(INVALID_VALUE)?;
        let capture = &self.captures[place];
        if capture.origin != stream {
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.begun_by != thread::current().id() {
            return Err(CAPTURE_WRONG_THREAD);
        }
        let capture = self.captures.swap_remove(place);
        for stream in self.streams.values_mut() {
            stream.capture.take_if(|id| *id == capture.id);
        }
        if capture.invalidated { Err(CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// 0 not capturing, 1 capturing, 2 invalidated.
    pub(crate) fn capture_status(&self, stream: u64) -> i32 {
        let id = self.streams.get(&stream).and_then(|stream| stream.capture);
        let found = self.captures.iter().find(|capture| Some(capture.id) == id);
        found.map_or(0, |capture| 1 + i32::from(capture.invalidated))
    }

    pub(crate) fn invalidate(&mut self, which: impl Fn(&Capture) -> bool) {
        let mut broken = 0;
        for capture in &mut self.captures {
            if which(capture) && !capture.invalidated {
                capture.invalidated = true;
                broken += 1;
            }
        }
        self.add("captures_invalidated", broken);
    }

    pub(crate) fn invalidate_capture_of(&mut self, stream: u64) {
        let id = self.streams.get(&stream).and_then(|stream| stream.capture);
        self.invalidate(|capture| Some(capture.id) == id);
    }

    /// What a call that a capture does not allow comes to on this thread.
    pub(crate) fn check_capture(&mut self, core: &Core, family: Family) -> Done {
        if self.captures.is_empty() {
            return Ok(());
        }
        let mode = core.thread(|thread| thread.capture_mode);
        let me = thread::current().id();
        let forbids = |capture: &Capture| {
            let own = capture.begun_by == me && capture.mode != RELAXED;
            !capture.invalidated
                && mode != RELAXED
                && (own || mode == GLOBAL && capture.mode == GLOBAL)
        };
        if !self.captures.iter().any(forbids) {
            return Ok(());
        }
        // HIP's source invalidates every capture of the process.
        self.invalidate(|capture| family == Family::Hip || forbids(capture));
        Err(CAPTURE_UNSUPPORTED)
    }
}
