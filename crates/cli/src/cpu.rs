//! What this process has cost so far.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time that all threads of this process have spent on processors, in user and in kernel mode.
///
/// From the kernel's own clock: `/proc/self/stat` counts in hundredths of a second, and the
/// `schedstat` of a running thread is up to one tick old.
pub(crate) fn process_time() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    let (secs, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    Duration::from_secs(secs) + Duration::from_nanos(nanos)
}
