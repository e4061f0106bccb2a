//! Which memory may be touched at this moment, and by whom.

use std::collections::BTreeMap;

use tensorferry_wire::Op;

use crate::transfer::{Batch, BatchState};

/// The memory of all machines is one arena, of which each range has one use.
pub(super) struct Guards {
    arena: (u64, u64),
    /// Local ranges of requests, by address.
    local: BTreeMap<u64, Local>,
    /// Registered buffers: length, process, whether peers may reach it.
    registered: BTreeMap<u64, (u64, usize)>,
}

struct Local {
    len: u64,
    process: usize,
    op: Op,
    /// `None`: it is being submitted.
    batch: Option<Batch>,
}

impl Guards {
    pub(super) fn new(arena: (u64, u64)) -> Self {
        Self { arena, local: BTreeMap::new(), registered: BTreeMap::new() }
    }

    /// The local memory of a request, for a batch that is about to be submitted.
    pub(super) fn lend(&mut self, (addr, len): (u64, u64), process: usize, op: Op) {
        self.local.insert(addr, Local { len, process, op, batch: None });
    }

    /// What was lent at `addr` is for `batch`; `None`: it was not submitted after all.
    pub(super) fn lent(&mut self, addr: u64, batch: Option<&Batch>) {
        match batch {
            None => drop(self.local.remove(&addr)),
            Some(batch) => {
                let local = self.local.get_mut(&addr).expect("it was lent");
                local.batch = Some(batch.clone());
            }
        }
    }

    pub(super) fn register(&mut self, (addr, len): (u64, u64), process: usize) {
        self.registered.insert(addr, (len, process));
    }

    /// From now on nobody touches it.
    pub(super) fn unregister(&mut self, addr: u64) {
        self.registered.remove(&addr);
    }

    /// The process is no more.
    pub(super) fn forget(&mut self, process: usize) {
        self.registered.retain(|_, (_, owner)| *owner != process);
        self.local.retain(|_, local| local.process != process);
    }

    pub(super) fn may_read(&self, process: usize, addr: u64, len: usize) -> Result<(), String> {
        self.check(process, addr, len, Op::Write)
    }

    pub(super) fn may_write(&self, process: usize, addr: u64, len: usize) -> Result<(), String> {
        self.check(process, addr, len, Op::Read)
    }

    /// A socket of `process` works with a range, as it would for an `op` of its own or for a peer's request.
    fn check(&self, process: usize, addr: u64, len: usize, op: Op) -> Result<(), String> {
        let (base, size) = self.arena;
        if len == 0 || addr.wrapping_sub(base) >= size {
            return Ok(());
        }
        let end = addr + len as u64;
        let registered = self.registered.range(..=addr).next_back();
        if registered.is_some_and(|(at, (len, by))| end <= at + len && *by == process) {
            return Ok(());
        }
        let at = addr - base;
        let local = self.local.range(..=addr).next_back();
        let Some((_, local)) = local.filter(|(at, local)| end <= *at + local.len) else {
            return Err(format!("[{at:#x}, +{len}) is touched, which is nobody's"));
        };
        if local.process != process || local.op != op {
            return Err(format!("[{at:#x}, +{len}) is touched, which is lent for something else"));
        }
        match local.batch.as_ref().map_or(BatchState::Running, Batch::poll) {
            BatchState::Running => Ok(()),
            state => Err(format!("[{at:#x}, +{len}) is touched, though its batch is {state:?}")),
        }
    }
}
