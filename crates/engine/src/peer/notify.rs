//! Notifications to a peer: one after the other, each behind the bytes of its batch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::clock;
use crate::control;
use crate::error::{Error, Result};
use crate::io::Command;
use crate::peer::Peer;
use crate::sync::locked;
use crate::transfer::{BatchInner, Stop};

/// Batches whose bytes are applied and whose notifications are to be sent, in order.
#[derive(Default)]
pub(super) struct Notifications {
    waiting: VecDeque<Arc<BatchInner>>,
    sending: bool,
}

impl Notifications {
    /// How many wait for earlier ones.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits, and none is being delivered.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && !self.sending
    }
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
        self.send_next_notification();
    }

    /// Has the home thread deliver the next notification; the one after it follows its answer.
    fn send_next_notification(self: &Arc<Self>) {
        if self.core.is_closed() {
            return self.drop_notifications();
        }
        let mut notifications = locked(&self.notifications);
        let next = notifications.waiting.pop_front();
        notifications.sending = next.is_some();
        drop(notifications);
        let Some(batch) = next else { return };
        let notification = batch.notification.clone().unwrap_or_default();
        let (peer, stopping) = (Arc::clone(self), Arc::clone(&batch));
        let stop = move || stopping.stop_at(clock::now()).is_some();
        let deadline = batch.deadline;
        let answer = move |result: Result<()>| {
            peer.account.metrics.notifications_sent.add(u64::from(result.is_ok()));
            batch.finish(result.err());
            peer.send_next_notification();
        };
        let to = (&self.name, &self.address);
        let question = control::notify_question(to, &notification, deadline, stop, answer);
        self.core.mailboxes[self.home].post(Command::Ask(Arc::new(question)));
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
