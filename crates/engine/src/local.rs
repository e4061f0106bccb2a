//! Transfers whose target is this very engine: a copy, not a socket.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use tensorferry_wire::Op;

use crate::core::Core;
use crate::memory::copy_within;
use crate::transfer::{BatchInner, Cause, Owner, Slice};

/// The engine as its own peer.
pub(crate) struct Local {
    core: Arc<Core>,
}

/// Up to so many bytes are copied by the submitting thread; more by a thread of the pool.
const INLINE: u64 = 256 << 10;
/// How much is copied between two looks at the clock and at `cancel`.
const PIECE: u64 = 16 << 20;

impl Local {
    pub(crate) fn new(core: Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core })
    }

    pub(crate) fn submit(self: &Arc<Self>, batch: Arc<BatchInner>) {
        let entries = 0..batch.len() as u32;
        let bytes = entries.map(|e| batch.request(e).len).fold(0, u64::saturating_add);
        if bytes <= INLINE {
            return self.copy_all(&batch);
        }
        let (local, held) = (Arc::clone(self), Arc::clone(&batch));
        if !self.core.pool.run(move || local.copy_all(&held)) {
            self.copy_all(&batch);
        }
    }

    fn copy_all(&self, batch: &Arc<BatchInner>) {
        for entry in 0..batch.len() as u32 {
            let request = batch.request(entry);
            if request.len > 0 {
                let slice = Slice::new(batch, entry, 0, request.len);
                let verdict = self.copy(&slice);
                slice.settle(verdict);
            }
        }
    }

    fn copy(&self, slice: &Slice) -> Result<(), Cause> {
        let (op, local, remote, len) = (slice.op(), slice.local(), slice.remote(), slice.len);
        let pin = self.core.registry.find(op, remote, len).ok_or(Cause::NotPublished)?;
        let registered = slice.batch.pins_range(local, len);
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        let pieces = len.div_ceil(PIECE);
        for i in 0..pieces {
            let now = Instant::now();
            if let Some(stop) = slice.batch.stop_at(now) {
                let stage = "it was being copied within the process";
                return Err(Cause::Stopped { stop, stage, sent: i > 0 });
            }
            // Back to front if the destination is behind the source, so that overlap does no harm.
            let at = if to > from { pieces - 1 - i } else { i } * PIECE;
            let piece = PIECE.min(len - at);
            copy_within(&pin, (from + at, to + at, piece), registered)
                .map_err(|_| Cause::BadAddress)?;
        }
        self.core.metrics.bytes_copied_locally.add(len);
        Ok(())
    }
}

impl Owner for Local {
    fn peer(&self) -> &Arc<str> {
        &self.core.name
    }

    fn deliver(self: Arc<Self>, batch: &Arc<BatchInner>) {
        let kept = batch.notification.clone().map_or(Ok(()), |n| self.core.take_in(n));
        batch.finish(kept.err().map(|why| crate::error::Error::NotifyFailed {
            peer: Arc::clone(&self.core.name),
            why,
        }));
    }

    fn stopped(&self, _: &Arc<BatchInner>) {
        // The copying thread looks by itself.
    }

    fn finished(&self, batch: &BatchInner) {
        batch.count(&self.core.metrics);
    }

    fn spinners(&self) -> &AtomicUsize {
        &self.core.spinners
    }
}
