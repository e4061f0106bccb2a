//! What a seed makes of a schedule.

use std::time::Duration;

use tensorferry_wire::Version;

use crate::sim::rng::Rng;

/// How a schedule is set up, and what may go wrong in it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) machines: usize,
    /// The first of them submit, the last of them are submitted to; those in the middle do both.
    pub(super) initiators: usize,
    pub(super) threads: usize,
    pub(super) lanes: usize,
    pub(super) version: Version,
    pub(super) steps: usize,
    pub(super) batches: usize,
    pub(super) sizes: Sizes,
    /// At most so many bytes arrive at once.
    pub(super) chunk: usize,
    pub(super) timeouts: (Duration, Duration),
    pub(super) queue_bytes: usize,
    pub(super) progress_timeout: Option<Duration>,
    /// How long an idle lane is trusted, and offered to those who submit.
    pub(super) probe: Duration,
    pub(super) faults: Faults,
    /// Nothing can go wrong, so that every good request must complete.
    pub(super) calm: bool,
}

/// How long requests are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sizes {
    Small,
    Mixed,
    /// Longer than a slice.
    Big,
    /// More in a batch than a lane has in flight, or a target answers at once.
    Many,
}

/// What happens, in 1000 steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) reset: u32,
    pub(super) fin: u32,
    /// A connection falls silent for good.
    pub(super) silence: u32,
    /// A direction stops for a while.
    pub(super) stall: u32,
    pub(super) corrupt: u32,
    pub(super) kill: u32,
    pub(super) close: u32,
    pub(super) unregister: u32,
    pub(super) cancel: u32,
    /// All processes stand still for seconds.
    pub(super) leap: u32,
    /// In 1000 requests: outside of all buffers; local memory that is not there.
    pub(super) stray: u32,
    pub(super) unmapped: u32,
    /// In 1000 calls.
    pub(super) unconnectable: u32,
    pub(super) interrupted: u32,
    /// In 1000 connections: refused, or never answered.
    pub(super) refused: u32,
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let r = &mut rng;
        let faults = if r.permille(150) { Faults::default() } else { Faults::some(r) };
        let version = if r.permille(250) { Version::V1 } else { Version::V2 };
        let sizes = match r.below(100) {
            0..60 => Sizes::Small,
            60..95 => Sizes::Mixed,
            95..97 => Sizes::Big,
            _ => Sizes::Many,
        };
        let short = Duration::from_micros(r.spread(100, 5_000_000) as u64);
        let timeouts = if r.flip() { (short, short * 20) } else { (LONG, LONG) };
        Self {
            machines: r.between(2, 3),
            initiators: r.between(1, 2),
            threads: *r.pick(&[1, 1, 2, 3]),
            lanes: r.between(1, 4),
            version,
            steps: r.between(40, 500),
            batches: r.between(1, 14),
            sizes,
            chunk: if sizes == Sizes::Big { 1 << 20 } else { r.spread(1, 1 << 17) },
            timeouts: if faults.is_calm() { (LONG, LONG) } else { timeouts },
            queue_bytes: if r.permille(200) { 64 * r.between(1, 8) } else { 1 << 20 },
            progress_timeout: r.permille(100).then_some(Duration::from_secs(2)),
            probe: Duration::from_millis(*r.pick(&[500, 500, 20, 10_000])),
            calm: faults.is_calm(),
            faults,
        }
    }
}

impl Plan {
    /// The same without faults, and with time for all.
    pub(super) fn made_calm(self) -> Self {
        let (faults, timeouts) = (Faults::default(), (LONG, LONG));
        Self { faults, timeouts, calm: true, batches: 12, sizes: Sizes::Small, ..self }
    }
}

/// Longer than any schedule takes that moves at all.
const LONG: Duration = Duration::from_secs(300);

impl Faults {
    /// Each kind is in some of the schedules, often or rarely.
    fn some(r: &mut Rng) -> Self {
        let mut now_and_then = |often: usize, chance: u32| {
            if r.permille(chance) { r.spread(1, often) as u32 } else { 0 }
        };
        Self {
            reset: now_and_then(30, 300),
            fin: now_and_then(30, 250),
            silence: now_and_then(20, 200),
            stall: now_and_then(50, 300),
            corrupt: now_and_then(30, 120),
            kill: now_and_then(15, 200),
            close: now_and_then(4, 80),
            unregister: now_and_then(25, 250),
            cancel: now_and_then(60, 350),
            leap: now_and_then(15, 150),
            stray: now_and_then(300, 250),
            unmapped: now_and_then(200, 120),
            unconnectable: now_and_then(100, 100),
            interrupted: now_and_then(200, 200),
            refused: now_and_then(300, 200),
        }
    }

    fn is_calm(&self) -> bool {
        let Self { reset, fin, silence, stall, corrupt, kill, close, unregister, .. } = *self;
        let links = reset + fin + silence + stall + corrupt + kill + close + unregister;
        let Self { cancel, leap, unmapped, unconnectable, refused, .. } = *self;
        links + cancel + leap + unmapped + unconnectable + refused == 0
    }
}
