//! Finding the addresses of hosts, which a resolver may take any time for.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tensorferry_metadata::{resolve, resolve_literal};

use crate::error::{Error, Result};
use crate::io::Pool;
use crate::sync::locked;

/// A host is looked up once at a time, whoever asks: one that the resolver hangs at holds one thread, and nobody who
/// gives an address instead of a name. Whoever waits keeps his own deadline.
pub(crate) struct Names {
    pool: Pool,
    asked: Arc<Mutex<HashMap<String, Vec<Waiter>>>>,
}

type Waiter = Box<dyn FnOnce(Result<Vec<SocketAddr>>) + Send>;

/// How many names are looked up at the same time.
const THREADS: usize = 8;

impl Names {
    pub(crate) fn start(threads: &'static str) -> Result<Self> {
        Ok(Self { pool: Pool::start(threads, 0..=THREADS)?, asked: Arc::default() })
    }

    /// Calls `then` with the addresses of a host: now, if it is an address, else on a thread of the pool.
    pub(crate) fn find(
        &self,
        host: &str,
        port: u16,
        then: impl FnOnce(Result<Vec<SocketAddr>>) + Send + 'static,
    ) {
        if let Some(found) = resolve_literal(host, port) {
            return then(found.map_err(Error::from));
        }
        let waiter = move |found: Result<Vec<SocketAddr>>| {
            then(found.map(|mut all| {
                all.iter_mut().for_each(|addr| addr.set_port(port));
                all
            }));
        };
        let mut asked = locked(&self.asked);
        let waiters = asked.entry(host.to_owned()).or_default();
        waiters.push(Box::new(waiter));
        let first = waiters.len() == 1;
        drop(asked);
        if first && !self.look_up(host) {
            tell(&self.asked, host, &Err(Error::Closed));
        }
    }

    fn look_up(&self, host: &str) -> bool {
        let (asked, host) = (Arc::clone(&self.asked), host.to_owned());
        self.pool.run(move || {
            let found = resolve(&host, 0).map_err(Error::from);
            tell(&asked, &host, &found);
        })
    }

    /// As [`Pool::run_one`].
    #[cfg(test)]
    pub(crate) fn run_one(&self) -> bool {
        self.pool.run_one()
    }

    /// As [`Pool::close`]; whoever waits is told that it is over.
    pub(crate) fn close(&self, timeout: Duration) {
        let waiting = std::mem::take(&mut *locked(&self.asked));
        for waiter in waiting.into_values().flatten() {
            waiter(Err(Error::Closed));
        }
        self.pool.close(timeout);
    }
}

fn tell(asked: &Mutex<HashMap<String, Vec<Waiter>>>, host: &str, found: &Result<Vec<SocketAddr>>) {
    let waiters = locked(asked).remove(host).unwrap_or_default();
    for waiter in waiters {
        waiter(found.clone());
    }
}
