//! What a peer's descriptor says, ready for use.

use std::net::SocketAddr;
use std::time::Instant;

use tensorferry_wire::{SegmentDescriptor, Version};

use crate::registry::BufferInfo;

/// How much of a request moves on one lane at a time.
pub(super) const SLICE: u64 = 1 << 20;

/// What a descriptor said, ready for use.
pub(crate) struct Route {
    pub(crate) version: Version,
    /// Where the data port may be; never empty.
    pub(crate) addrs: Vec<SocketAddr>,
    /// As published.
    pub(super) buffers: Vec<BufferInfo>,
    /// By address.
    sorted: Vec<BufferInfo>,
    /// The peer has more buffers than it could list.
    pub(super) truncated: bool,
    /// Which run of the peer's program it is of, if that was said.
    incarnation: Option<u64>,
    /// When the asking began: what was registered before is in it.
    pub(super) asked: Instant,
}

impl Route {
    pub(crate) fn new(
        descriptor: &SegmentDescriptor,
        addrs: Vec<SocketAddr>,
        newest: Version,
        asked: Instant,
    ) -> Self {
        let spoken = if descriptor.tcp_proto_version >= 2 { Version::V2 } else { Version::V1 };
        let buffers: Vec<BufferInfo> =
            descriptor.buffers.iter().map(|b| BufferInfo { addr: b.addr, len: b.len }).collect();
        let mut sorted = buffers.clone();
        sorted.sort_unstable_by_key(|b| b.addr);
        let truncated = descriptor.tensorferry.as_ref().is_some_and(|f| f.buffers_truncated);
        let incarnation = descriptor.tensorferry.as_ref().map(|f| f.incarnation);
        let version = spoken.min(newest);
        Self { version, addrs, buffers, sorted, truncated, incarnation, asked }
    }

    /// What has become of the peer since `before`, apart from its buffers, in words; `None`: nothing.
    pub(super) fn news_since(&self, before: &Self) -> Option<String> {
        let restarted = self.incarnation != before.incarnation;
        if self.addrs == before.addrs {
            return restarted.then(|| "has restarted".to_owned());
        }
        let what = if restarted { "has restarted, with its" } else { "has moved its" };
        let (old, new) = (&before.addrs, &self.addrs);
        Some(format!("{what} data port from {old:?} to {new:?}"))
    }

    /// Whether a newer one says something else.
    pub(super) fn differs_from(&self, newer: &Self) -> bool {
        self.addrs != newer.addrs || self.version != newer.version || self.buffers != newer.buffers
    }

    /// Whether one published buffer contains the range. `hint` remembers which.
    pub(crate) fn covers(&self, addr: u64, len: u64, hint: &mut usize) -> bool {
        let inside =
            |b: &BufferInfo| addr >= b.addr && len <= b.len && addr - b.addr <= b.len - len;
        if self.sorted.get(*hint).is_some_and(inside) {
            return true;
        }
        let after = self.sorted.partition_point(|b| b.addr <= addr);
        *hint = after.wrapping_sub(1);
        self.sorted.get(*hint).is_some_and(inside)
    }

    /// How a request is cut.
    pub(super) fn slice_len(&self) -> u64 {
        // A v1 slice costs a connection.
        if self.version == Version::V1 { u64::MAX } else { SLICE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorferry_wire::BufferDescriptor;

    fn route(ranges: &[(u64, u64)]) -> Route {
        let buffers = ranges.iter().map(|&(addr, len)| BufferDescriptor { addr, len }).collect();
        let descriptor = SegmentDescriptor { buffers, ..SegmentDescriptor::default() };
        Route::new(&descriptor, Vec::new(), Version::V2, Instant::now())
    }

    #[test]
    fn only_a_range_inside_one_buffer_is_covered() {
        let r = route(&[(300, 50), (100, 50), (150, 50), (u64::MAX - 10, 10)]);
        for start in [0, 1, 2, 3, 4, usize::MAX] {
            let covers = |addr, len| r.covers(addr, len, &mut start.clone());
            for (addr, len) in [(100, 50), (149, 1), (150, 50), (349, 1), (u64::MAX - 10, 10)] {
                assert!(covers(addr, len), "{addr} {len}");
            }
            for (addr, len) in [
                (99, 2),
                (149, 2),
                (100, 51),
                (200, 1),
                (350, 1),
                (0, 1),
                (120, u64::MAX),
                (u64::MAX, 1),
            ] {
                assert!(!covers(addr, len), "{addr} {len}");
            }
        }
    }
}
