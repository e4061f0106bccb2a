//! What an address turned out to be.

use crate::device::DeviceId;

/// Where the memory at an address is, and how it is to be moved.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Memory {
    /// Host memory that no GPU runtime knows: a socket takes it as it is.
    Host,
    /// Host memory that a GPU runtime pinned or registered: a socket takes it as it is.
    PinnedHost {
        /// The device it was pinned for.
        device: DeviceId,
        /// Where the host reads it; differs from the address asked about where the device has an
        /// address of its own.
        host: u64,
        /// The host reads it uncached: staging is faster than reading.
        write_combined: bool,
    },
    /// Memory of a device: it has to be staged.
    Device {
        /// Whose memory it is.
        device: DeviceId,
        /// Unique per allocation in this process, where the runtime has such a number: another one
        /// at the same address means that the allocation is another one.
        buffer_id: Option<u64>,
        /// Start of the range that is known to belong together.
        base: u64,
        /// Its length. For virtual memory (expandable segments), pools and HIP these two are the
        /// range that was asked about: the reservation around it may be terabytes, and mapped in
        /// part only.
        size: u64,
    },
    /// Managed memory: the host could touch it, but the pages would migrate, or fault while a
    /// kernel runs.
    Managed {
        /// Where it lives at first.
        device: DeviceId,
        /// As for [`Memory::Device`].
        buffer_id: Option<u64>,
    },
}

impl Memory {
    /// The device whose copy engine has to move this memory; `None`: a socket can take it directly.
    /// (Reading write-combined memory is slow enough that a caller may stage it all the same.)
    #[must_use]
    pub fn staged_on(self) -> Option<DeviceId> {
        match self {
            Self::Host | Self::PinnedHost { .. } => None,
            Self::Device { device, .. } | Self::Managed { device, .. } => Some(device),
        }
    }

    /// The number of the allocation, where there is one.
    #[must_use]
    pub fn buffer_id(self) -> Option<u64> {
        match self {
            Self::Host | Self::PinnedHost { .. } => None,
            Self::Device { buffer_id, .. } | Self::Managed { buffer_id, .. } => buffer_id,
        }
    }

    /// Whether two ends of one range can be copied as one.
    pub(crate) fn continues_as(self, end: Self) -> bool {
        match (self, end) {
            (Self::Host, Self::Host)
            | (Self::PinnedHost { .. }, Self::PinnedHost { .. })
            | (Self::Host, Self::PinnedHost { .. })
            | (Self::PinnedHost { .. }, Self::Host) => true,
            (Self::Device { device: a, .. }, Self::Device { device: b, .. })
            | (Self::Managed { device: a, .. }, Self::Managed { device: b, .. }) => a == b,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Vendor;

    #[test]
    fn host_memory_is_not_staged() {
        let device = DeviceId::new(Vendor::Cuda, 1);
        assert_eq!(Memory::Host.staged_on(), None);
        let pinned = Memory::PinnedHost { device, host: 0x1000, write_combined: false };
        assert_eq!(pinned.staged_on(), None);
        assert_eq!(Memory::Managed { device, buffer_id: None }.staged_on(), Some(device));
    }

    #[test]
    fn a_range_does_not_go_on_in_another_kind_of_memory() {
        let on = |ordinal| Memory::Device {
            device: DeviceId::new(Vendor::Hip, ordinal),
            buffer_id: Some(7),
            base: 0,
            size: 1,
        };
        assert!(on(0).continues_as(on(0)));
        assert!(!on(0).continues_as(on(1)));
        assert!(!on(0).continues_as(Memory::Host));
    }
}
