//! What initiator and target say to each other while they measure, one JSON object per line.

use serde::{Deserialize, Serialize};

use crate::pattern::{Mismatch, Pattern};

/// From the initiator. Each is answered before the next one is read.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(crate) enum Order {
    /// Fill the first bytes of your memory.
    Fill { pattern: Pattern, len_bytes: usize },
    /// Compare the first bytes of your memory.
    Check { pattern: Pattern, len_bytes: usize },
    /// Compare bytes from a multiple of eight on.
    CheckPart { pattern: Pattern, offset_bytes: usize, len_bytes: usize },
    /// Say what you have cost so far.
    Cost,
}

/// From the target.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The first line, said without being asked: where the memory is, and the name of the device that it is on.
    Ready { segment: String, addr: u64, device: Option<String> },
    /// In its place: there is no engine or no memory, and no order will be obeyed.
    Failed { why: String },
    /// The memory is filled.
    Filled,
    /// The memory was compared.
    Checked { mismatch: Option<Mismatch> },
    /// Processor time of all threads.
    Cost { cpu_ns: u64 },
    /// The order could not be understood or obeyed.
    Refused { why: String },
}
