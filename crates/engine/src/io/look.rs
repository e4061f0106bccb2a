//! Looking after connections: which lanes do not move, whose peer is gone, and which nobody needs any more.
//!
//! Nothing of it is done for a request. Lanes that owe an answer are looked at a few times a second, and what the kernel
//! counts says what has become of them; connections from peers every half a minute.

use std::time::{Duration, Instant};

use crate::io::conns::{Conn, Kind};
use crate::io::lane::End;
use crate::io::thread::Reactor;
use crate::io::{Pulse, Socket};
use crate::sync::locked;
use crate::tcp::Lane;
use crate::transfer::FOREVER;

/// How often lanes are looked at while one of them is owed something.
pub(super) const LOOK: Duration = Duration::from_millis(250);
/// A lane that is owed something and has not moved for so long takes nothing on until it does.
const STALLED: Duration = Duration::from_secs(1);
/// A sign of life is recent if it came since the last look, or a little earlier.
const RECENTLY: Duration = Duration::from_secs(1);
/// How long the other end of a connection from a peer may give no sign of life, in silences of a lane: nobody waits for
/// it here. It is looked at twice as often.
const SERVE_SILENCES: u32 = 6;
/// How often the kernel at the other end of a lane that does not move is asked for a sign of life, the shortest time
/// that there is for it.
const ASK: Duration = Duration::from_secs(1);

/// What the looks at one lane have found.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Bytes that had moved at the last look, and since when no others have; `None`: nothing was owed.
    still: Option<(Moved, Instant)>,
    /// It takes nothing on, and does not count as one of those that do.
    sidelined: bool,
    /// It was sidelined because it does not move.
    stalled: bool,
    /// The peer has answered on it.
    heard: bool,
    /// Segments that had been sent again when the last sign of life came.
    sent_again: u32,
    /// The kernel asks for signs of life.
    asks: bool,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Moved {
    received: u64,
    acknowledged: u64,
}

/// What becomes of a lane after a look.
enum Verdict {
    /// It is to be looked at again by then, if ever.
    Keep(Option<Instant>),
    Close,
}

impl Watch {
    pub(super) fn is_sidelined(&self) -> bool {
        self.sidelined
    }

    /// Whether an answer would be news.
    pub(super) fn is_expectant(&self) -> bool {
        !self.heard || self.stalled
    }

    /// Whether the peer has left it without an answer that was due.
    pub(super) fn is_silent(&self, lane: &Lane) -> bool {
        self.stalled || (!self.heard && lane.has_timed_out())
    }

    /// Since when it has not moved; `leaving`: the request that is to be answered first has not arrived as a whole.
    fn still_since(&mut self, pulse: &Pulse, leaving: bool, now: Instant) -> Instant {
        let (before, since) = self.still.unwrap_or((Moved::default(), now));
        // What the peer's kernel takes in behind that request is no progress: it goes on doing so when the process is
        // frozen, or stuck.
        let acknowledged = if leaving { pulse.acknowledged } else { before.acknowledged };
        let moved = Moved { received: pulse.received, acknowledged };
        let since = if moved == before { since } else { now };
        self.still = Some((moved, since));
        since
    }

    /// Whether the peer's kernel is gone, or the way to it.
    fn is_gone(&mut self, mut pulse: Pulse, limit: Duration) -> bool {
        if pulse.silent < RECENTLY {
            self.sent_again = pulse.sent_again;
        }
        // What is sent again while the window is shut is in no count but the one since the beginning.
        let again = pulse.sent_again.wrapping_sub(self.sent_again);
        pulse.unanswered = pulse.unanswered.max(again.try_into().unwrap_or(u8::MAX));
        pulse.is_gone_for(limit)
    }
}

impl Reactor {
    pub(super) fn look_by(&mut self, at: Instant) {
        self.next_look = Some(self.next_look.map_or(at, |next| next.min(at)));
    }

    /// Something is owed on a lane from now on.
    pub(super) fn look_soon(&mut self) {
        self.look_by(self.now + LOOK);
    }

    /// The peer has answered where it had not for long, or never.
    #[cold]
    pub(super) fn lane_answers(&mut self, conn: &mut Conn) {
        let lane = conn.lane();
        lane.watch.heard = true;
        let back = lane.watch.stalled && !lane.lane.is_closing();
        if lane.watch.stalled {
            tracing::debug!("a lane to {} moves again", lane.peer.name());
            lane.watch.stalled = false;
            lane.lane.go_on();
        }
        lane.watch.sidelined &= !back;
        lane.peer.lane_answers(back);
    }

    pub(super) fn look_at_lanes(&mut self) {
        self.next_look = None;
        for token in self.lane_tokens() {
            let Some(mut conn) = self.take(token) else { continue };
            match self.look_at_lane(&mut conn) {
                Verdict::Close => self.close(conn),
                Verdict::Keep(next) => {
                    self.offer(&mut conn);
                    self.put_back(conn);
                    next.into_iter().for_each(|at| self.look_by(at));
                }
            }
        }
    }

    fn look_at_lane(&mut self, conn: &mut Conn) -> Verdict {
        self.claim(conn);
        let (socket, now) = (conn.socket.clone(), self.now);
        let lane = conn.lane();
        if !lane.is_open() {
            return Verdict::Keep(None);
        }
        let Some(behind) = lane.lane.sent_behind_owed(&mut locked(&lane.half)) else {
            lane.watch.still = None;
            if !lane.lane.is_idle() {
                // Its requests wait for our own devices.
                return Verdict::Keep(Some(now + LOOK));
            }
            let due = lane.active + self.core.config.lane_keep.min(FOREVER);
            return if now < due { Verdict::Keep(Some(due)) } else { Verdict::Close };
        };
        let Ok(pulse) = socket.pulse() else { return Verdict::Keep(Some(now + LOOK)) };
        let leaving = socket.unacknowledged().is_ok_and(|bytes| u64::from(bytes) > behind);
        let since = lane.watch.still_since(&pulse, leaving, now);
        if lane.watch.is_gone(pulse, self.core.config.silence_timeout) {
            let silent = pulse.silent;
            let why = format!(
                "its machine has given no sign of life for {silent:?}, or the way to it is cut"
            );
            lane.end = End::Lost(why);
            return Verdict::Close;
        }
        if now - since >= STALLED && !lane.watch.stalled {
            self.stall(conn, &socket);
        }
        self.sideline(conn)
    }

    /// The lane is not trusted with more, until it moves.
    fn stall(&mut self, conn: &mut Conn, socket: &Socket) {
        let lane = conn.lane();
        tracing::debug!("a lane to {} has not moved for {STALLED:?}", lane.peer.name());
        lane.watch.stalled = true;
        lane.lane.hold(&mut locked(&lane.half), &mut self.scratch.requeue);
        if !std::mem::replace(&mut lane.watch.asks, true) {
            socket.ask_for_life(ASK, ASK);
        }
        lane.peer.requeue(&mut self.scratch.requeue);
    }

    /// A lane that takes nothing on must not keep others from being made; one on which nobody waits for anything is
    /// given up.
    fn sideline(&mut self, conn: &mut Conn) -> Verdict {
        let lane = conn.lane();
        if lane.watch.stalled && !lane.lane.has_live() {
            lane.lane.retire("it does not move, and nobody waits for it");
            return Verdict::Close;
        }
        let apart = lane.watch.stalled || lane.lane.is_closing();
        if apart && !std::mem::replace(&mut lane.watch.sidelined, true) {
            lane.peer.lane_sidelined();
            lane.peer.kick();
        }
        Verdict::Keep(Some(self.now + LOOK))
    }

    /// A connection from a peer is looked after from now on.
    pub(super) fn watch_over(&mut self, socket: &Socket) {
        let silence = self.serve_silence();
        socket.ask_for_life(silence, self.core.config.silence_timeout.max(ASK));
        let at = self.now + silence / 2;
        self.next_serve_look.get_or_insert(at);
    }

    fn serve_silence(&self) -> Duration {
        let silence = self.core.config.silence_timeout.saturating_mul(SERVE_SILENCES);
        silence.clamp(ASK, FOREVER)
    }

    /// Closes connections whose peer is gone without a word: its machine, or its process while nothing is read here
    /// because a device hangs.
    pub(super) fn look_at_serving(&mut self) {
        self.next_serve_look = None;
        let silence = self.serve_silence();
        let gone = |conn: &&Conn| {
            let is_gone = |pulse: Pulse| pulse.over || pulse.is_gone_for(silence);
            matches!(conn.kind, Kind::Serve(_)) && conn.socket.pulse().is_ok_and(is_gone)
        };
        let gone: Vec<_> = self.each().filter(gone).map(|conn| conn.token).collect();
        for token in gone {
            if let Some(conn) = self.take(token) {
                tracing::debug!(
                    "a connection from a peer is closed: its machine gives no sign of life"
                );
                self.close(conn);
            }
        }
        if self.each().any(|conn| matches!(conn.kind, Kind::Serve(_))) {
            self.next_serve_look = Some(self.now + silence / 2);
        }
    }
}
