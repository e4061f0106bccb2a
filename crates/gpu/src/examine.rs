//! What there is to say to people about a vendor, found out within a time.

use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::device::Vendor;
use crate::discovery::Discovery;
use crate::settings::Settings;
use crate::state::{State, Tried};

/// What was found of one vendor.
#[derive(Clone, Debug)]
pub struct Examined {
    /// What became of its library, and the devices.
    pub state: State,
    /// As [`Discovery::tried`]; empty where opening a file does not end.
    pub tried: Vec<Tried>,
}

/// Looks for a vendor's library if the settings allow it, and initialises it: for reports to people.
///
/// That is done on a thread of its own. A library that has not answered when `patience` is over is
/// [`State::NoAnswer`], and the thread is left to it, as nothing can end it. Whoever needs this vendor
/// in this process then waits, too. As long as it is being opened (there is no file), so does every
/// thread that begins or ends, and the end of the process, as the loader lets none pass.
#[must_use]
pub fn examine(settings: &Settings, vendor: Vendor, patience: Duration) -> Examined {
    let discovery = Discovery::new(settings.clone());
    if let Some(state) = discovery.closed(vendor) {
        return Examined { state, tried: Vec::new() };
    }
    let until = Instant::now() + patience;
    let (tell, told) = channel();
    let theirs = tell.clone();
    let looking = move || look(&discovery, vendor, &theirs);
    if thread::Builder::new().name(format!("ferry-{vendor}")).spawn(looking).is_err() {
        // Without a thread there is no limit.
        look(&Discovery::new(settings.clone()), vendor, &tell);
    }
    let mut opened = None;
    loop {
        match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(found) if matches!(found.state, State::Mapped { .. }) => opened = Some(found),
            Ok(found) => return found,
            Err(_) => break,
        }
    }
    let (file, tried) = opened.map_or((None, Vec::new()), |found: Examined| {
        (found.state.file().map(ToOwned::to_owned), found.tried)
    });
    Examined { state: State::NoAnswer { vendor, file, after: patience }, tried }
}

/// Tells what is known when a library is open, if one is, and what is known in the end.
fn look(discovery: &Discovery, vendor: Vendor, tell: &Sender<Examined>) {
    let known = || Examined { state: discovery.state(vendor), tried: discovery.tried(vendor) };
    if discovery.supports(vendor) {
        // Whoever does not listen any more has been told that there was no answer.
        let _ = tell.send(known());
        let _ = discovery.require(vendor);
    }
    let _ = tell.send(known());
}
