//! Why an entry failed, small enough to keep one for each of many entries; and what is said of its batch.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tensorferry_gpu::DeviceId;
use tensorferry_wire::WireError;

use crate::error::{Error, Subject};
use crate::staging::Fault;

/// Why a batch is told to stop.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum Stop {
    Cancelled = 1,
    TimedOut = 2,
    /// A local buffer of it was unregistered.
    Unregistered = 3,
    /// The engine was closed.
    Closed = 4,
}

/// Why an entry failed. [`Cause::describe`] makes the error that people see.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    Refused,
    NotPublished,
    /// A READ's connection was lost.
    Lost(Arc<str>),
    /// A WRITE's outcome is not known.
    Unknown(Arc<str>),
    /// The kernel cannot touch the local memory; what the GPU libraries say.
    BadAddress(Arc<str>),
    /// A copy from or to a device failed, or there was no staging slot for it.
    Device(Fault),
    DeviceStuck(DeviceId),
    Stopped {
        stop: Stop,
        stage: &'static str,
        sent: bool,
    },
    Protocol(SocketAddr, Arc<WireError>),
    /// The same error for every entry, such as a peer that cannot be reached.
    Whole(Arc<Error>),
}

/// What there is to say of a batch that failed.
pub(crate) struct FailedBatch {
    pub(super) failed: usize,
    pub(super) of: usize,
    pub(crate) first: Error,
}

impl Stop {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Cancelled),
            2 => Some(Self::TimedOut),
            3 => Some(Self::Unregistered),
            4 => Some(Self::Closed),
            _ => None,
        }
    }
}

impl Cause {
    #[cold]
    pub(crate) fn describe(&self, subject: Subject) -> Error {
        let subject = Box::new(subject);
        match self {
            Self::Refused => Error::Refused(subject),
            Self::NotPublished => Error::RangeNotPublished(subject),
            Self::Lost(why) => Error::ConnectionLost { subject, why: why.to_string() },
            Self::Unknown(why) => Error::OutcomeUnknown { subject, why: why.to_string() },
            Self::BadAddress(gpus) => Error::BadLocalAddress { subject, gpus: gpus.to_string() },
            Self::Device(why) => match &**why {
                Error::Closed => Error::Closed,
                why => Error::DeviceCopy { subject, why: why.to_string() },
            },
            &Self::DeviceStuck(device) => Error::DeviceStuck { subject: Some(subject), device },
            &Self::Stopped { stop, stage, sent } => match stop {
                Stop::Cancelled => Error::Cancelled { subject, sent },
                Stop::TimedOut => Error::TimedOut { subject, stage, sent },
                Stop::Unregistered => Error::Unregistered(subject),
                Stop::Closed => Error::Closed,
            },
            Self::Protocol(peer_addr, fault) => {
                Error::Protocol { subject, peer_addr: *peer_addr, fault: fault.as_ref().clone() }
            }
            Self::Whole(error) => error.as_ref().clone().about(subject),
        }
    }
}

impl FailedBatch {
    /// Somebody wanted it to end, so that there is nothing to look at.
    pub(crate) fn is_wanted(&self) -> bool {
        matches!(self.first, Error::Cancelled { .. } | Error::Closed)
    }
}

impl fmt::Display for FailedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.failed > 0 && self.of > 1 {
            write!(f, "{} of {} requests of a batch failed; the first: ", self.failed, self.of)?;
        }
        write!(f, "{}", self.first)
    }
}
