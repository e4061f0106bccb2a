//! The way that bytes would take between each two kinds of memory.

use serde::Serialize;
use tensorferry::Config;

use super::gpus::{Gpus, Vendor};

/// One way, from the memory that is read to the memory that is written.
#[derive(Debug, Serialize)]
pub(super) struct Path {
    /// `cpu`, or a vendor's name.
    pub(super) from: &'static str,
    pub(super) to: &'static str,
    pub(super) engines: Engines,
    pub(super) moves: bool,
    /// How; `none` where it does not.
    pub(super) how: &'static str,
    /// Why it does not.
    why_not: Option<String>,
}

/// Whose memory the two are.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Engines {
    /// Two engines, on one machine or on two.
    Two,
    /// One and the same.
    One,
}

const CPU: &str = "cpu";

/// Every pair of kinds that this machine has, then the kinds that it has not.
pub(super) fn paths(gpus: &Gpus) -> Vec<Path> {
    let usable = gpus.vendors.iter().filter(|vendor| vendor.usable).map(|vendor| vendor.vendor);
    let kinds: Vec<&str> = [CPU].into_iter().chain(usable).collect();
    let pairs: Vec<(&str, &str)> =
        kinds.iter().flat_map(|from| kinds.iter().map(move |to| (*from, *to))).collect();
    let moving = |engines: Engines| {
        pairs.iter().map(move |(from, to)| {
            let how = match engines {
                Engines::Two => between(from, to),
                Engines::One => within(from, to),
            };
            Path { from, to, engines, moves: true, how, why_not: None }
        })
    };
    let absent = gpus.vendors.iter().filter(|vendor| !vendor.usable).flat_map(none);
    moving(Engines::Two).chain(moving(Engines::One)).chain(absent).collect()
}

/// Between two engines: what a peer elsewhere does at its end is the same.
fn between(from: &str, to: &str) -> &'static str {
    match (from == CPU, to == CPU) {
        (true, true) => "sockets, straight from memory and into memory",
        (false, true) => "staged where it is read, then sockets straight into memory",
        (true, false) => "sockets straight from memory, then staged where it is written",
        (false, false) => "staged at both ends, sockets between",
    }
}

/// Within one engine.
fn within(from: &str, to: &str) -> &'static str {
    match (from == CPU, to == CPU) {
        (true, true) => "one copy by the processor, no socket",
        (false, false) if from == to => "one copy by the device, no socket",
        _ => "staged, no socket",
    }
}

/// What "staged" means here.
#[derive(Debug, Serialize)]
pub(super) struct Staging {
    pub(super) slots: usize,
    pub(super) slot_bytes: usize,
}

impl Staging {
    pub(super) fn new(config: &Config) -> Self {
        Self { slots: config.staging_slots, slot_bytes: config.staging_slot_bytes }
    }
}

fn none(vendor: &Vendor) -> [Path; 2] {
    let path = |from, to| Path {
        from,
        to,
        engines: Engines::Two,
        moves: false,
        how: "none",
        why_not: Some(vendor.text.clone()),
    };
    [path(CPU, vendor.vendor), path(vendor.vendor, CPU)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tensorferry::gpu::{Choice, Settings};

    use super::*;

    #[test]
    fn without_a_gpu_only_host_memory_moves() {
        let settings = Settings::default().with_choice(Choice::Off);
        let all = paths(&Gpus::look(&settings, Duration::from_secs(60)));
        let moving: Vec<_> = all.iter().filter(|path| path.moves).collect();
        assert_eq!(moving.len(), 2);
        assert!(moving.iter().all(|path| (path.from, path.to) == (CPU, CPU)));
        let [first, .., last] = &all[2..] else { panic!("{all:?}") };
        assert_eq!((first.from, first.to, last.from, last.to), (CPU, "cuda", "hip", CPU));
        assert_eq!(all.len(), 8);
        assert_eq!(first.how, "none");
        let why = first.why_not.as_deref().unwrap();
        assert!(why.starts_with("CUDA was not looked for, because of"), "{why}");
    }

    #[test]
    fn device_memory_is_staged_where_it_is() {
        assert!(between(CPU, "cuda").ends_with("then staged where it is written"));
        assert!(between("hip", CPU).starts_with("staged where it is read, then sockets"));
        assert!(between("hip", "cuda").starts_with("staged at both ends"));
        assert_eq!(within("hip", "hip"), "one copy by the device, no socket");
        assert_eq!(within("hip", "cuda"), "staged, no socket");
    }
}
