//! What the schedule does to connections, and what it asks of them.

use std::time::Duration;

use super::{Conn, End, EndId, Net, Phase, StreamEnd, first};
use crate::sim::rng::Rng;

impl Net {
    /// The connecting of `conn` comes to its end.
    pub(in crate::sim) fn establish(&mut self, conn: usize) {
        let to = self.conns[conn].to;
        let listening = self.listeners.iter_mut().find(|l| l.open && l.addr == to);
        match listening {
            Some(listening) => {
                listening.waiting.push_back(conn);
                listening.edge = true;
                self.conns[conn].phase = Phase::Established;
            }
            None => self.fail_connect(conn, libc::ECONNREFUSED),
        }
        self.conns[conn].ends[0].edge = true;
        let phase = self.conns[conn].phase;
        self.note(|| format!("{}: {phase:?} to {to}", EndId { conn, side: 0 }));
    }

    pub(in crate::sim) fn fail_connect(&mut self, conn: usize, error: i32) {
        let conn = &mut self.conns[conn];
        conn.phase = Phase::Failed;
        conn.ends[1].open = false;
        let end = &mut conn.ends[0];
        (end.error, end.reset, end.edge) = (Some(error), true, true);
    }

    /// At most `most` bytes of what `from` has sent arrive, or the end of them; false if nothing does.
    pub(in crate::sim) fn deliver(&mut self, from: EndId, most: usize) -> bool {
        let to = EndId { side: 1 - from.side, ..from };
        let conn = &mut self.conns[from.conn];
        let pipe = &mut conn.pipes[from.side];
        let open = conn.ends[to.side].open && !conn.ends[to.side].reset;
        if !pipe.can_deliver() || conn.phase != Phase::Established {
            return false;
        }
        if pipe.cut == Some(0) {
            pipe.lost += pipe.sent.len();
            pipe.sent.clear();
            pipe.end = StreamEnd::FinArrived;
            conn.ends[to.side].edge |= conn.ends[to.side].open;
            self.note(|| format!("something between the ends hangs up on {to}"));
            return true;
        }
        if !pipe.sent.is_empty() {
            if !open {
                // Nobody is there: the answer is a reset, which comes at some other time.
                pipe.lost += pipe.sent.len();
                pipe.sent.clear();
                let back = &mut conn.pipes[to.side];
                let most = back.sent.len();
                back.sent.truncate(self.rng.below(most + 1));
                back.end = StreamEnd::Reset;
                return true;
            }
            let room = pipe.room_arrived.saturating_sub(pipe.arrived.len());
            let n = most.min(room).min(pipe.sent.len()).min(pipe.cut.unwrap_or(usize::MAX));
            if n == 0 {
                return false;
            }
            pipe.cut = pipe.cut.map(|left| left - n);
            pipe.arrived.extend(&first(&pipe.sent, n));
            pipe.sent.drain(..n);
            pipe.moved += n as u64;
            if pipe.full && pipe.sent.len() * 3 <= pipe.room_sent * 2 {
                pipe.full = false;
                conn.ends[from.side].edge = true;
            }
            conn.ends[to.side].edge = true;
            self.note(|| format!("{n} bytes arrive at {to}"));
            return true;
        }
        match pipe.end {
            StreamEnd::Open | StreamEnd::FinArrived => return false,
            StreamEnd::Fin => {
                pipe.end = StreamEnd::FinArrived;
                conn.ends[to.side].edge = true;
            }
            StreamEnd::Reset => {
                pipe.end = StreamEnd::FinArrived;
                self.reset(to, libc::ECONNRESET);
            }
        }
        self.note(|| format!("the end of the stream arrives at {to}"));
        true
    }

    /// `at` learns that the connection is no more.
    pub(in crate::sim) fn reset(&mut self, at: EndId, error: i32) {
        let conn = &mut self.conns[at.conn];
        if conn.ends[at.side].reset {
            return;
        }
        let end = &mut conn.ends[at.side];
        (end.error, end.reset, end.edge) = (Some(error), true, end.open);
        conn.pipes[at.side].sent.clear();
        // What had arrived may be read first, or is gone, as kernels differ.
        if self.rng.flip() {
            conn.pipes[1 - at.side].arrived.clear();
        }
        self.note(|| format!("{at} is reset"));
    }

    /// Something between the ends hangs up on whoever receives what `from` sends, and perhaps on `from`.
    pub(in crate::sim) fn cut(&mut self, from: EndId, rng: &mut Rng) {
        let pipe = self.pipe(from);
        if pipe.cut.is_some() || pipe.end == StreamEnd::FinArrived {
            return;
        }
        let after = rng.below(pipe.sent.len() + 1);
        pipe.cut = Some(after);
        self.note(|| format!("what {from} sends will end after {after} bytes"));
        if rng.flip() {
            self.reset(from, libc::ECONNRESET);
        }
    }

    /// A byte on its way from `from` changes, is lost, or comes twice.
    pub(in crate::sim) fn corrupt(&mut self, from: EndId, rng: &mut Rng) {
        let sent = &mut self.pipe(from).sent;
        if sent.is_empty() {
            return;
        }
        let at = rng.below(sent.len());
        match rng.below(4) {
            0 => drop(sent.remove(at)),
            1 => sent.insert(at, sent[at]),
            _ => sent[at] ^= 1 << rng.below(8),
        }
        self.note(|| format!("byte {at} on its way from {from} is changed"));
    }

    /// The process is no more, and all that it had is closed.
    pub(in crate::sim) fn kill(&mut self, process: usize) {
        for index in 0..self.listeners.len() {
            if self.listeners[index].owner.process == process {
                self.close_listener(index);
            }
        }
        for conn in 0..self.conns.len() {
            for side in 0..2 {
                let end = &self.conns[conn].ends[side];
                let exists = side == 0 || end.accepted;
                if exists && end.open && end.owner.process == process {
                    self.close(EndId { conn, side });
                }
            }
        }
    }

    fn close_listener(&mut self, index: usize) {
        let listening = &mut self.listeners[index];
        listening.open = false;
        for conn in std::mem::take(&mut listening.waiting) {
            self.reset_on_close(EndId { conn, side: 1 });
            self.close(EndId { conn, side: 1 });
        }
    }

    /// The connection falls silent for good: nothing passes, and neither end is told.
    pub(in crate::sim) fn silence(&mut self, conn: usize) {
        self.note(|| format!("{conn}< and {conn}> do not hear each other any more"));
        let now = self.now;
        self.conns[conn].silent_since.get_or_insert(now);
        self.conns[conn].pipes.iter_mut().for_each(|pipe| pipe.silent = true);
    }

    /// Ends that some process has.
    pub(in crate::sim) fn open_ends(&self) -> usize {
        let has = |side: usize, end: &End| end.open && (side == 0 || end.accepted);
        let ends = self.conns.iter().flat_map(|conn| conn.ends.iter().enumerate());
        ends.filter(|(side, end)| has(*side, end)).count()
    }

    pub(in crate::sim) fn is_any_silent(&self) -> bool {
        self.conns.iter().any(|conn| conn.silent_since.is_some())
    }

    /// An initiator's end of such a connection on which answers are owed.
    pub(in crate::sim) fn owed_in_silence(&self, time: Duration) -> Option<EndId> {
        let owed = |conn: &Conn| {
            let silent = conn.silent_since.is_some_and(|at| self.now >= at + time);
            let asked = conn.asked_at.is_some_and(|at| self.now >= at + time);
            silent && asked && conn.ends[0].open && conn.tap.owes()
        };
        let conn = self.conns.iter().position(owed)?;
        Some(EndId { conn, side: 0 })
    }

    /// An end that some process has of a connection that has been silent for so long.
    pub(in crate::sim) fn kept_in_silence(&self, time: Duration) -> Option<EndId> {
        let silent = |conn: &Conn| conn.silent_since.is_some_and(|at| self.now >= at + time);
        let all = self.conns.iter().enumerate().filter(|(_, conn)| silent(conn));
        let mut ends = all.flat_map(|(conn, _)| [0, 1].map(|side| EndId { conn, side }));
        ends.find(|id| self.end_ref(*id).open && (id.side == 0 || self.end_ref(*id).accepted))
    }
}
