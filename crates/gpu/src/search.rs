//! Which file is a vendor's library.

use crate::device::Vendor;
use crate::discovery::Table;
use crate::library;
use crate::settings::Settings;
use crate::state::{State, Tried};

/// Finds the library; if there is none, the state says why. No state: nothing of it is mapped, and that was all we asked.
pub(crate) fn search(
    settings: &Settings,
    vendor: Vendor,
    only_mapped: bool,
) -> std::result::Result<Table, Option<Box<State>>> {
    let mut tried = Vec::new();
    let mut unusable = None;
    let mut usable = |library, chosen| match Table::of(vendor, library, chosen) {
        Ok(table) => Some(table),
        Err(state) => {
            unusable.get_or_insert(state);
            None
        }
    };
    let found = if let Some(file) = settings.library(vendor) {
        if only_mapped {
            library::open_mapped(file).and_then(|library| usable(library, true))
        } else {
            match library::open(file) {
                Ok(library) => usable(library, true),
                Err(answer) => {
                    tried.push(answer);
                    None
                }
            }
        }
    } else {
        let mapped = library::mapped(library::stems(vendor));
        let mapped = mapped.iter().filter_map(|file| library::open_mapped(file));
        let mut found = mapped.into_iter().find_map(|library| usable(library, false));
        if found.is_none() && !only_mapped {
            for name in library::names(vendor) {
                match library::open(name.as_ref()) {
                    Ok(library) => found = usable(library, false),
                    Err(answer) => tried.push(answer),
                }
                if found.is_some() {
                    break;
                }
            }
        }
        found
    };
    found.ok_or_else(|| {
        let damaged = || tried.iter().find(|one| one.found).map(|one| damaged(vendor, one));
        let state = unusable.or_else(damaged);
        if only_mapped { state } else { state.or(Some(Box::new(State::Missing { vendor, tried }))) }
    })
}

/// A file that is there, and that the loader refuses.
fn damaged(vendor: Vendor, tried: &Tried) -> Box<State> {
    let (file, why) = (tried.name.clone(), tried.answer.clone());
    Box::new(State::Unusable { vendor, file, why, missing: None })
}
