//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks what a panic elsewhere does not poison: whatever is guarded here is whole between any two
/// statements of ours, and a panic is a bug that ends its own thread's work only.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
