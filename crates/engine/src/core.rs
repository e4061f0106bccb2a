//! What all parts of one engine share.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tensorferry_wire::{
    BufferDescriptor, DEFAULT_SEND_LIMIT, FerryKey, FrameKind, MessageType, Notification,
    SegmentDescriptor, encode_frame,
};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::io::{Command, Descriptors, LaneReport, Mailbox, Names, Pool};
use crate::log::{Kind, Log};
use crate::memory::CopyMode;
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::spin::Spin;
use crate::staging::Devices;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use crate::sync::{Condvar, Mutex, locked};

pub(crate) struct Core {
    pub(crate) config: Config,
    /// `host:port` of the control port.
    pub(crate) name: Arc<str>,
    pub(crate) data_host: String,
    pub(crate) control_port: u16,
    pub(crate) data_port: u16,
    pub(crate) copy_mode: CopyMode,
    pub(crate) registry: Registry,
    pub(crate) devices: Devices,
    pub(crate) metrics: Metrics,
    pub(crate) log: Log,
    /// Reads descriptors.
    pub(crate) readers: Pool,
    /// Looks up the names that users hand in, and those that only descriptors have.
    pub(crate) names: Names,
    pub(crate) strangers: Names,
    pub(crate) mailboxes: Vec<Arc<Mailbox>>,
    pub(crate) descriptors: Descriptors,
    /// Data connections from peers that are open.
    pub(crate) serving: AtomicUsize,
    pub(crate) spin: Spin,
    incarnation: u64,
    closed: AtomicBool,
    /// The process that made the engine.
    pid: u32,
    inbox: Mutex<Inbox>,
    descriptor: Mutex<Option<Published>>,
    queued: Queued,
}

/// Bookkeeping bytes of all batches that are not final.
#[derive(Default)]
pub(crate) struct Queued {
    total: AtomicUsize,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    freed: Condvar,
}

#[derive(Default)]
struct Inbox {
    waiting: VecDeque<Notification>,
    bytes: usize,
}

struct Published {
    version: u64,
    frame: Arc<[u8]>,
}

/// How many descriptors are read at the same time.
const READERS: usize = 2;
/// What one request in a queue is counted as.
pub(crate) const REQUEST_BYTES: usize = 64;
/// The bound for all peers of an engine, in bounds of one.
const PEERS_SHARE: usize = 4;
/// How long is waited for IO threads to say how their lanes are.
const REPORT_PATIENCE: Duration = Duration::from_millis(200);
/// How many bytes of notifications wait for someone to take them.
const INBOX_BYTES: usize = 64 << 20;
/// What a notification counts beside its texts.
const NOTIFICATION_BYTES: usize = 64;

/// What the listeners of a new engine turned out to be.
pub(crate) struct Addresses {
    pub(crate) name: String,
    pub(crate) data_host: String,
    pub(crate) control_port: u16,
    pub(crate) data_port: u16,
}

impl Core {
    pub(crate) fn new(
        config: Config,
        addresses: Addresses,
        mailboxes: Vec<Arc<Mailbox>>,
    ) -> Result<Self> {
        let slots = (config.staging_slots, config.staging_slot_bytes);
        let devices = Devices::new(config.gpu.clone(), slots, Arc::clone(&mailboxes[0]) as _);
        let copy_mode = if config.safe_copy { CopyMode::Kernel } else { CopyMode::Direct };
        let spin = Spin::new(config.spin);
        Ok(Self {
            config,
            name: addresses.name.into(),
            data_host: addresses.data_host,
            control_port: addresses.control_port,
            data_port: addresses.data_port,
            copy_mode,
            registry: Registry::new(),
            devices,
            metrics: Metrics::default(),
            log: Log::default(),
            readers: Pool::start("ferry-read", 0..=READERS)?,
            names: Names::start("ferry-pool")?,
            strangers: Names::start("ferry-names")?,
            mailboxes,
            descriptors: Descriptors::new(),
            serving: AtomicUsize::new(0),
            spin,
            incarnation: random(),
            closed: AtomicBool::new(false),
            pid: std::process::id(),
            inbox: Mutex::default(),
            descriptor: Mutex::default(),
            queued: Queued::default(),
        })
    }

    /// Whether the engine can be used, in this process.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.is_forked() {
            Err(Error::ForkedProcess { parent: self.pid })
        } else if self.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Whether this is a child of the process that made the engine: its threads are not here.
    pub(crate) fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }

    /// Nothing is begun after this, and whoever waits for room is told.
    pub(crate) fn begin_close(&self) {
        self.mark_closed();
        self.queued.wake();
    }

    /// The same without a lock.
    pub(crate) fn mark_closed(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Tells every IO thread.
    pub(crate) fn broadcast(&self, command: impl Fn() -> Command) {
        for mailbox in &self.mailboxes {
            mailbox.post(command());
        }
    }

    /// How the lanes of all IO threads are; false: some thread has not said so in time.
    pub(crate) fn lanes(&self) -> (Vec<LaneReport>, bool) {
        let (tell, told) = sync_channel(self.mailboxes.len());
        self.broadcast(|| Command::Report(tell.clone()));
        drop(tell);
        let until = Instant::now() + REPORT_PATIENCE;
        let (mut lanes, mut known) = (Vec::new(), true);
        for _ in &self.mailboxes {
            let left = until.saturating_duration_since(Instant::now());
            match told.recv_timeout(left) {
                Ok(some) => lanes.extend(some),
                // An engine that is closed has none.
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => known = false,
            }
        }
        (lanes, known)
    }

    /// Reserves room in the queue to a peer for `requests` requests; `used` counts that peer's bytes.
    /// A batch may be larger than the bound: it waits until half of that is free.
    pub(crate) fn reserve(
        &self,
        peer: &Arc<str>,
        used: &AtomicUsize,
        requests: usize,
        wait_until: Option<Instant>,
    ) -> Result<()> {
        let bytes = requests * REQUEST_BYTES;
        let limit = self.config.queue_bytes;
        let limits = (limit, limit.saturating_mul(PEERS_SHARE));
        let busy =
            || Error::Busy { peer: Arc::clone(peer), queued: used.load(Ordering::Relaxed), limit };
        while !self.queued.try_reserve(used, bytes, limits) {
            let until = wait_until.ok_or_else(busy)?;
            self.check_usable()?;
            let go = || self.is_closed() || self.queued.has_room(used, bytes, limits);
            if !self.queued.wait(until, go) {
                return Err(busy());
            }
        }
        Ok(())
    }

    /// Bytes of bookkeeping of all batches that are not final.
    #[cfg(test)]
    pub(crate) fn reserved(&self) -> usize {
        self.queued.total.load(Ordering::SeqCst)
    }

    pub(crate) fn release(&self, used: &AtomicUsize, requests: usize) {
        self.queued.release(used, requests * REQUEST_BYTES);
    }

    /// Keeps a notification until it is asked for, or says why not.
    pub(crate) fn take_in(&self, notification: Notification) -> std::result::Result<(), String> {
        let bytes = notification.name.len() + notification.message.len() + NOTIFICATION_BYTES;
        let mut inbox = locked(&self.inbox);
        if inbox.bytes + bytes > INBOX_BYTES {
            return Err(format!("{} notifications wait to be taken already", inbox.waiting.len()));
        }
        inbox.bytes += bytes;
        inbox.waiting.push_back(notification);
        self.metrics.notifications_received.add(1);
        Ok(())
    }

    pub(crate) fn take_notifications(&self) -> Vec<Notification> {
        std::mem::take(&mut *locked(&self.inbox)).waiting.into()
    }

    /// The frame that publishes the descriptor, made anew when registrations have changed. It may be long, and everybody
    /// who asks is sent the same one: how many do, and do not take it, costs nothing.
    pub(crate) fn descriptor_frame(&self) -> Arc<[u8]> {
        let version = self.registry.version();
        let mut published = locked(&self.descriptor);
        if let Some(p) = published.as_ref().filter(|p| p.version == version) {
            return Arc::clone(&p.frame);
        }
        let descriptor = self.descriptor();
        let encoded = descriptor.to_json(DEFAULT_SEND_LIMIT);
        let (written, all) = (encoded.buffers_written, descriptor.buffers.len());
        if written < all {
            self.log.warn(Kind::DescriptorFull, "", || {
                format!(
                    "the descriptor holds {written} of {all} buffers, as many as peers accept; \
                     ranges in the others are tried one at a time; register fewer, larger buffers"
                )
            });
        }
        let kind = FrameKind::Typed(MessageType::Metadata);
        let frame: Arc<[u8]> = encode_frame(kind, &encoded.json).into();
        *published = Some(Published { version, frame: Arc::clone(&frame) });
        frame
    }

    fn descriptor(&self) -> SegmentDescriptor {
        let buffers = self.registry.published().into_iter();
        SegmentDescriptor {
            name: self.name.to_string(),
            buffers: buffers.map(|b| BufferDescriptor { addr: b.addr, len: b.len }).collect(),
            tcp_data_host: Some(self.data_host.clone()),
            tcp_data_port: self.data_port,
            tcp_proto_version: 2,
            timestamp: timestamp(SystemTime::now()),
            tensorferry: Some(FerryKey {
                version: crate::VERSION.to_owned(),
                incarnation: self.incarnation,
                buffers_truncated: false,
            }),
            ..SegmentDescriptor::default()
        }
    }
}

fn fits(used: &AtomicUsize, bytes: usize, limit: usize) -> bool {
    has_room(used.load(Ordering::SeqCst), bytes, limit)
}

/// A queue that is at most half full takes a batch of any size, so that a large one does not wait for
/// ever behind many small ones.
fn has_room(used: usize, bytes: usize, limit: usize) -> bool {
    used <= limit / 2 || used.saturating_add(bytes) <= limit
}

impl Queued {
    /// Takes room for `bytes` within the limits of a peer, whose bytes `used` counts, and of all.
    pub(crate) fn try_reserve(
        &self,
        used: &AtomicUsize,
        bytes: usize,
        (limit, all): (usize, usize),
    ) -> bool {
        let add = |counter: &AtomicUsize, limit: usize| {
            let next = |n: usize| has_room(n, bytes, limit).then_some(n + bytes);
            counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
        };
        if !add(used, limit) {
            return false;
        }
        if !add(&self.total, all) {
            used.fetch_sub(bytes, Ordering::SeqCst);
            // Somebody who needs less may have found the peer's room taken meanwhile.
            self.wake();
            return false;
        }
        true
    }

    /// Whether `try_reserve` would succeed.
    pub(crate) fn has_room(
        &self,
        used: &AtomicUsize,
        bytes: usize,
        (limit, all): (usize, usize),
    ) -> bool {
        fits(used, bytes, limit) && fits(&self.total, bytes, all)
    }

    pub(crate) fn release(&self, used: &AtomicUsize, bytes: usize) {
        used.fetch_sub(bytes, Ordering::SeqCst);
        self.total.fetch_sub(bytes, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until something was freed; false if `until` came first.
    pub(crate) fn wait(&self, until: Instant, go: impl Fn() -> bool) -> bool {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // A fence as well, as in `wake`: loom knows the order of fences only.
        fence(Ordering::SeqCst);
        let mut guard = locked(&self.lock);
        let mut in_time = true;
        // Looked at once before sleeping: what was freed before the waiter was counted woke nobody.
        let mut go_now = go();
        while !go_now && in_time {
            let left = until.saturating_duration_since(Instant::now());
            let (next, timeout) =
                self.freed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner);
            guard = next;
            in_time = !timeout.timed_out();
            go_now = true;
        }
        drop(guard);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        in_time
    }

    fn wake(&self) {
        // SeqCst: pairs with the count in `wait`; either it is seen here, or `go` sees the room.
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(locked(&self.lock));
            self.freed.notify_all();
        }
    }
}

/// Sixty-four bits that differ from engine to engine.
pub(crate) fn random() -> u64 {
    #[cfg(test)]
    if let Some(simulated) = crate::sim::random() {
        return simulated;
    }
    RandomState::new().hash_one(SystemTime::now())
}

/// `YYYY-MM-DD HH:MM:SS.uuuuuu` in UTC. Peers keep it and do not read it.
fn timestamp(now: SystemTime) -> String {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, secs) = ((since.as_secs() / 86_400) as i64, since.as_secs() % 86_400);
    // The proleptic Gregorian calendar in eras of 400 years that begin on 1 March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (h, m, s) = (secs / 3600, secs / 60 % 60, secs % 60);
    format!("{year:04}-{month:02}-{day:02} {h:02}:{m:02}:{s:02}.{:06}", since.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_calendar_dates() {
        let at = |secs, micros| {
            timestamp(UNIX_EPOCH + Duration::from_secs(secs) + Duration::from_micros(micros))
        };
        assert_eq!(at(0, 0), "1970-01-01 00:00:00.000000");
        assert_eq!(at(951_782_399, 7), "2000-02-28 23:59:59.000007");
        assert_eq!(at(951_868_800, 0), "2000-03-01 00:00:00.000000");
        assert_eq!(at(1_796_038_934, 659_060), "2026-11-30 11:42:14.659060");
    }
}
