//! Why the last call of this thread failed: the text behind a bare -1.

use std::cell::RefCell;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A call of this thread failed.
pub(crate) fn set(text: String) {
    LAST.with_borrow_mut(|last| *last = Some(text));
}

/// A call of this thread that can fail did not.
pub(crate) fn clear() {
    LAST.with_borrow_mut(|last| *last = None);
}

/// The text of the last call that can fail, if it failed.
pub(crate) fn get() -> Option<String> {
    LAST.with_borrow(Clone::clone)
}
