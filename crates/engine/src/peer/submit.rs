//! Taking batches on: by the queue, or at once on an idle lane that is offered to the thread that submits.

use std::sync::Arc;
use std::time::Instant;

use crate::io::Offer;
use crate::peer::Peer;
use crate::sync::locked;
use crate::transfer::{BatchInner, Stop};

impl Peer {
    /// Takes a batch on, and sends it if it is small and a lane is idle. Never blocks on the network.
    pub(crate) fn submit(self: &Arc<Self>, batch: Arc<BatchInner>) {
        let (now, deadline) = (batch.started, batch.deadline);
        let small = batch.fits(Offer::ROOM.requests, Offer::ROOM.bytes);
        self.enqueue(batch);
        if !(small && self.send_here(now, deadline)) {
            self.kick();
        }
        self.settle_if_closed();
    }

    /// The same, with all of the work left to the IO threads.
    pub(crate) fn submit_aside(self: &Arc<Self>, batch: Arc<BatchInner>) {
        self.enqueue(batch);
        self.kick();
        self.settle_if_closed();
    }

    fn enqueue(self: &Arc<Self>, batch: Arc<BatchInner>) {
        let mut state = self.lock();
        state.queue.push(batch);
        if state.route.is_none() {
            self.ask(&mut state);
        }
    }

    /// Sends what waits on the lane that is offered; false: none is, so an IO thread has to look at the queue.
    fn send_here(self: &Arc<Self>, now: Instant, deadline: Instant) -> bool {
        let mut offered = locked(&self.offered);
        let Some(offer) = offered.take_if(|offer| offer.is_good_for(now, deadline)) else {
            return false;
        };
        let half = Arc::clone(&offer.half);
        let Ok(mut half) = half.try_lock() else {
            *offered = Some(offer);
            return false;
        };
        drop(offered);
        if half.is_shut() || !offer.is_quiet() {
            return false;
        }
        let mut slices = std::mem::take(&mut half.slices);
        let (pulled, failed) = self.sort_out(Offer::ROOM, now, &mut slices);
        let next = slices.iter().map(|slice| slice.batch.deadline).min();
        slices.drain(..).for_each(|slice| half.launch(slice));
        half.slices = slices;
        if pulled.left || pulled.more {
            self.kick();
        }
        offer.send(&mut half, next);
        drop(half);
        // What is told of failures may do anything, and the lane may be closed meanwhile.
        drop(offer);
        failed.settle();
        true
    }

    /// Has a submitting thread send on an idle lane; false: there is another one already.
    pub(crate) fn offer(&self, offer: Offer) -> bool {
        let mut offered = locked(&self.offered);
        let first = offered.is_none();
        offered.get_or_insert(offer);
        first
    }

    /// Takes an offer back; false: somebody has taken it.
    pub(crate) fn withdraw(&self, is_it: impl Fn(&Offer) -> bool) -> bool {
        locked(&self.offered).take_if(|offer| is_it(offer)).is_some()
    }

    fn settle_if_closed(&self) {
        if self.core.is_closed() {
            // The threads may have gone before the batch came; then nobody else would settle it.
            self.stop_all(Stop::Closed);
        }
    }
}
