//! Notifications to a peer: one after the other, each behind the bytes of its batch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::control;
use crate::error::Error;
use crate::peer::Peer;
use crate::sync::locked;
use crate::transfer::{BatchInner, Stop};

/// Batches whose bytes are applied and whose notifications are to be sent, in order.
#[derive(Default)]
pub(super) struct Notifications {
    waiting: VecDeque<Arc<BatchInner>>,
    sending: bool,
}

impl Peer {
    /// Has the notification of a batch whose bytes are applied sent, behind all earlier ones.
    pub(super) fn send_behind(self: &Arc<Self>, batch: &Arc<BatchInner>) {
        let mut notifications = locked(&self.notifications);
        notifications.waiting.push_back(Arc::clone(batch));
        let behind = std::mem::replace(&mut notifications.sending, true);
        drop(notifications);
        if behind {
            // The home thread sees to it that a deadline is kept while others are delivered.
            self.lock().queue.note(batch.deadline);
            return self.kick();
        }
        let peer = Arc::clone(self);
        if !self.core.pool.run(move || peer.send_notifications()) {
            self.drop_notifications();
        }
    }

    fn send_notifications(self: &Arc<Self>) {
        loop {
            let next = {
                let mut notifications = locked(&self.notifications);
                let next = notifications.waiting.pop_front();
                notifications.sending = next.is_some();
                next
            };
            let Some(batch) = next else { return };
            control::deliver(&self.core, &self.name, &self.address, &batch);
        }
    }

    /// Ends what is to stop and still waits for earlier notifications to be delivered.
    pub(super) fn sweep_notifications(&self, now: Instant) -> Option<Instant> {
        let mut notifications = locked(&self.notifications);
        let all = std::mem::take(&mut notifications.waiting);
        let (stopped, waiting): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|b| b.stop_at(now).is_some());
        let next = waiting.iter().map(|b| b.deadline).min();
        notifications.waiting = waiting.into();
        drop(notifications);
        for batch in stopped {
            let why = match batch.stop_at(now) {
                Some(Stop::TimedOut) => "its deadline passed while earlier ones were delivered",
                _ => "it was cancelled while earlier ones were delivered",
            };
            batch.finish(Some(Error::NotifyFailed {
                peer: Arc::clone(&self.name),
                why: why.into(),
            }));
        }
        next
    }

    /// The engine is closed: nothing more is sent.
    pub(super) fn drop_notifications(&self) {
        let dropped = std::mem::take(&mut *locked(&self.notifications)).waiting;
        for batch in dropped {
            batch.finish(Some(Error::Closed));
        }
    }
}
