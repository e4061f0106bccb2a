//! Which file is a vendor's library.

use std::path::Path;

use crate::device::Vendor;
use crate::discovery::{Lack, Table};
use crate::library::{self, Library};
use crate::settings::Settings;
use crate::state::{State, Tried};

/// What became of looking for a vendor's library.
pub(crate) struct Searched {
    /// Each file that was tried, in order; the one that was taken, if one was, is the last.
    pub(crate) tried: Vec<Tried>,
    /// The state says why there is none. No state: nothing of it is mapped, and that was all we
    /// asked.
    pub(crate) found: std::result::Result<Table, Option<Box<State>>>,
}

/// Takes the file that was chosen; else a copy that is mapped; else the first of the vendor's names
/// that can be used.
pub(crate) fn search(settings: &Settings, vendor: Vendor, only_mapped: bool) -> Searched {
    let chosen = settings.library(vendor);
    let mut search = Search { vendor, chosen: chosen.is_some(), tried: Vec::new(), unusable: None };
    let found = match chosen {
        Some(file) if only_mapped => search.mapped(file),
        Some(file) => search.open(file),
        None => {
            let mapped = library::mapped(library::stems(vendor));
            let mut found = mapped.iter().find_map(|file| search.mapped(file));
            if found.is_none() && !only_mapped {
                let mut names = library::names(vendor).iter();
                found = names.find_map(|name| search.open(name.as_ref()));
            }
            found
        }
    };
    let Search { tried, unusable, .. } = search;
    let missing = || Box::new(State::Missing { vendor, tried: tried.clone() });
    let found = found.ok_or_else(|| {
        let damaged = || tried.iter().find(|one| one.found).map(|one| damaged(vendor, one));
        let state = unusable.or_else(damaged);
        if only_mapped { state } else { state.or_else(|| Some(missing())) }
    });
    Searched { tried, found }
}

struct Search {
    vendor: Vendor,
    /// A user has named the file.
    chosen: bool,
    tried: Vec<Tried>,
    /// The first library that opens and cannot be used.
    unusable: Option<Box<State>>,
}

impl Search {
    /// The copy at `file`, if it is mapped and can be used.
    fn mapped(&mut self, file: &Path) -> Option<Table> {
        let library = library::open_mapped(file)?;
        self.take(file, library, "loaded already")
    }

    fn open(&mut self, name: &Path) -> Option<Table> {
        match library::open(name) {
            Ok(library) => self.take(name, library, "opened"),
            Err(tried) => {
                self.tried.push(tried);
                None
            }
        }
    }

    fn take(&mut self, name: &Path, library: &'static Library, how: &str) -> Option<Table> {
        let (answer, table) = match Table::of(self.vendor, library, self.chosen) {
            Ok(table) => (how.to_owned(), Some(table)),
            Err(Lack { why, name }) => {
                self.unusable.get_or_insert_with(|| {
                    let (file, why) = (library.file().to_owned(), why.clone());
                    let vendor = self.vendor;
                    Box::new(State::Unusable { vendor, file, why, missing: Some(name) })
                });
                (why, None)
            }
        };
        self.tried.push(Tried { name: name.to_owned(), answer, found: true });
        table
    }
}

/// A file that is there, and that the loader refuses.
fn damaged(vendor: Vendor, tried: &Tried) -> Box<State> {
    let (file, why) = (tried.name.clone(), tried.answer.clone());
    Box::new(State::Unusable { vendor, file, why, missing: None })
}
