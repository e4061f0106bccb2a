//! Every peer that an engine knows, by name.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use tensorferry_metadata::SegmentName;

use crate::core::Core;
use crate::metrics::PeerCounters;
use crate::peer::Peer;

#[derive(Default)]
pub(crate) struct Peers {
    known: RwLock<Known>,
}

#[derive(Default)]
struct Known {
    /// Under the full name, and under others that they were opened by.
    by_name: HashMap<Box<str>, Arc<Peer>>,
    /// The number of the next peer.
    next: usize,
    /// With how many names it is looked for peers that nobody uses.
    full_at: usize,
    /// What was done with those that are not known any more.
    gone: PeerCounters,
}

/// Up to so many names are remembered though nobody uses them.
const REMEMBERED: usize = 1024;

impl Peers {
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Peer>> {
        self.read().by_name.get(name).cloned()
    }

    /// The peer at `address`, under `name` as well.
    pub(crate) fn open(&self, core: &Arc<Core>, name: &str, address: SegmentName) -> Arc<Peer> {
        let full = address.to_string();
        let mut known = self.write();
        known.make_room();
        let peer = known.by_name.get(full.as_str()).cloned().unwrap_or_else(|| {
            known.next += 1;
            let peer = Peer::new(Arc::clone(core), address, known.next - 1);
            known.by_name.insert(full.into(), Arc::clone(&peer));
            peer
        });
        known.by_name.entry(name.into()).or_insert_with(|| Arc::clone(&peer));
        peer
    }

    /// In the order in which they were first heard of.
    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        let mut all: Vec<_> = self.read().distinct().cloned().collect();
        all.sort_unstable_by_key(|peer| peer.number);
        all
    }

    /// What was done with all of them together, and with those that are not known any more.
    pub(crate) fn counters(&self) -> PeerCounters {
        self.read().counters()
    }

    /// The same without waiting for a lock, which a forked child may find locked for ever.
    pub(crate) fn try_counters(&self) -> Option<PeerCounters> {
        match self.known.try_read() {
            Ok(known) => Some(known.counters()),
            Err(TryLockError::Poisoned(known)) => Some(known.into_inner().counters()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn distinct(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.by_name.iter().filter(|(name, peer)| ***name == **peer.name()).map(|(_, peer)| peer)
    }

    fn counters(&self) -> PeerCounters {
        let mut sum = self.gone;
        self.distinct().for_each(|peer| sum.add(&peer.counters()));
        sum
    }

    /// Forgets peers that nobody uses, the oldest first, if there are many names.
    fn make_room(&mut self) {
        if self.by_name.len() < self.full_at.max(REMEMBERED) {
            return;
        }
        // Other names only save some parsing.
        self.by_name.retain(|name, peer| **name == **peer.name());
        // Handles, batches, lanes and questions all have the peer; so who has it alone knows that there are none, and,
        // with the map locked, that there will be none.
        let unused = self.by_name.values().filter(|peer| Arc::strong_count(peer) == 1);
        let mut unused: Vec<_> = unused.map(|p| (p.number, Arc::clone(p.name()))).collect();
        unused.sort_unstable_by_key(|(number, _)| *number);
        let too_many = self.by_name.len().saturating_sub(REMEMBERED / 4 * 3);
        for (_, name) in unused.into_iter().take(too_many) {
            match self.by_name.remove(&*name).map(Arc::try_unwrap) {
                Some(Ok(peer)) => self.gone.add(&peer.counters()),
                Some(Err(used)) => drop(self.by_name.insert((*name).into(), used)),
                None => {}
            }
        }
        // If most are in use, not every new name is a reason to look again.
        self.full_at = self.by_name.len() / 4 * 5;
    }
}
