//! Locks, and what else threads agree by. Under `cfg(loom)` the tests model it: every order of the threads, and every
//! value that an ordering allows to be read, is tried.

#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic,
};

#[cfg(all(loom, test))]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic,
};

use atomic::{AtomicBool, Ordering};

/// Locks what a panic elsewhere does not poison: whatever is guarded here is whole between any two
/// statements of ours, and a panic is a bug that ends its own thread's work only.
#[cfg(not(all(loom, test)))]
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The same for locks that are modelled and locks that are not.
#[cfg(all(loom, test))]
pub(crate) fn locked<L: model::Lock>(mutex: &L) -> L::Guard<'_> {
    mutex.locked()
}

/// A call to look at something, which is made once until it is answered.
#[derive(Debug)]
pub(crate) struct Call {
    made: AtomicBool,
}

impl Call {
    pub(crate) fn new() -> Self {
        Self { made: AtomicBool::new(false) }
    }

    /// True: the caller has to pass it on. Whatever is to be looked at is there before.
    pub(crate) fn make(&self) -> bool {
        !self.made.swap(true, Ordering::SeqCst)
    }

    /// Whoever was called looks now; what comes after this is a call of its own.
    pub(crate) fn answer(&self) {
        self.made.store(false, Ordering::SeqCst);
    }
}

#[cfg(all(loom, test))]
pub(crate) use model::{Alarm, Waker};

#[cfg(all(loom, test))]
mod model {
    use std::sync::{Arc, PoisonError};

    /// Stands for an eventfd and the poll that it ends.
    #[derive(Default)]
    pub(crate) struct Waker {
        pub(crate) alarm: Arc<Alarm>,
    }

    #[derive(Default)]
    pub(crate) struct Alarm {
        rung: loom::sync::Mutex<bool>,
        changed: loom::sync::Condvar,
    }

    impl Waker {
        pub(crate) fn new(_: &mio::Registry, _: mio::Token) -> std::io::Result<Self> {
            Ok(Self::default())
        }

        pub(crate) fn wake(&self) -> std::io::Result<()> {
            *self.alarm.rung.locked() = true;
            self.alarm.changed.notify_one();
            Ok(())
        }
    }

    impl Alarm {
        /// Sleeps until it has rung since the last call.
        pub(crate) fn wait(&self) {
            let mut rung = self.rung.locked();
            while !std::mem::take(&mut *rung) {
                rung = self.changed.wait(rung).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    pub(crate) trait Lock {
        type Guard<'a>
        where
            Self: 'a;
        fn locked(&self) -> Self::Guard<'_>;
    }

    impl<T> Lock for std::sync::Mutex<T> {
        type Guard<'a>
            = std::sync::MutexGuard<'a, T>
        where
            T: 'a;
        fn locked(&self) -> Self::Guard<'_> {
            self.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<L: Lock> Lock for Arc<L> {
        type Guard<'a>
            = L::Guard<'a>
        where
            L: 'a;
        fn locked(&self) -> Self::Guard<'_> {
            (**self).locked()
        }
    }

    impl<L: Lock> Lock for std::sync::LazyLock<L> {
        type Guard<'a>
            = L::Guard<'a>
        where
            L: 'a;
        fn locked(&self) -> Self::Guard<'_> {
            (**self).locked()
        }
    }

    impl<T> Lock for loom::sync::Mutex<T> {
        type Guard<'a>
            = loom::sync::MutexGuard<'a, T>
        where
            T: 'a;
        fn locked(&self) -> Self::Guard<'_> {
            self.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}
