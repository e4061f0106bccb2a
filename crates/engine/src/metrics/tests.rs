//! The page of metrics has what there is, and nothing else.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tensorferry_wire::Version;

use super::*;
use crate::error::Error;
use crate::log::Log;
use crate::peer::{Account, LaneState, LaneStats, PeerState};

const PAGE: &str = include_str!("../../../../docs/metrics.md");

/// The part of the page below a heading of the second level.
fn section(heading: &str) -> &'static str {
    let begin = PAGE.find(&format!("\n## {heading}\n")).expect("the page has the heading") + 1;
    let rest = &PAGE[begin + 3..];
    &rest[..rest.find("\n## ").unwrap_or(rest.len())]
}

/// The first cells of a section's table whose first column has this head, and none is without a meaning.
fn rows(heading: &str, head: &str) -> Vec<&'static str> {
    let text = section(heading);
    let begin = text.find(&format!("| {head} |")).expect("the section has the table");
    let table = text[begin..].lines().take_while(|line| line.starts_with('|')).skip(2);
    table
        .map(|row| {
            let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
            assert!(cells.last().is_some_and(|meaning| meaning.len() > 5), "{row}");
            cells[0].trim_matches('`')
        })
        .collect()
}

/// The fields of a struct, as its derived `Debug` names them.
fn fields(of: &impl Debug) -> Vec<String> {
    let shown = format!("{of:#?}");
    let own = shown.lines().filter_map(|line| line.strip_prefix("    "));
    let named = own.filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    named.filter_map(|line| line.split_once(':')).map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn every_counter_is_on_the_page_where_it_belongs() {
    let names = |pairs: Vec<(&'static str, u64)>| -> Vec<_> {
        pairs.into_iter().map(|(name, _)| name).collect()
    };
    let by_peer = names(PeerCounters::default().to_pairs());
    assert_eq!(rows("Counters by peer", "name"), by_peer);
    let all = names(Stats::default().to_pairs());
    assert_eq!(rows("Counters of the engine", "name"), all[by_peer.len()..]);
}

#[test]
fn every_field_of_a_peer_a_lane_and_a_failure_is_on_the_page() {
    let account = Account::default();
    account.told(&Log::default(), "10.0.0.2:15773", &Error::Closed);
    let peer = account.stats(&Arc::from("10.0.0.2:15773"), PeerState::Idle);
    assert_eq!(rows("A peer", "field"), fields(&peer));
    let failure = peer.last_error.expect("it was told");
    assert_eq!(rows("The last failure", "field"), fields(&failure));
    let lane = LaneStats {
        address: ([10, 0, 0, 2], 15_774).into(),
        version: Version::V2,
        state: LaneState::Idle,
        closing: None,
        io_thread: 0,
        slices_in_flight: 0,
        bytes_in_flight: 0,
        slices_done: 0,
        bytes_done: 0,
        quiet_for: Duration::ZERO,
    };
    assert_eq!(rows("A lane", "field"), fields(&lane));
}

#[test]
fn every_state_is_on_the_page() {
    use {LaneState as L, PeerState as P};
    let peers =
        [P::Unknown, P::Resolving, P::Idle, P::Connecting, P::Connected, P::Unreachable, P::Local];
    // Does not compile when there is a new one: put it above, and on the page.
    let known = |state: P| match state {
        P::Unknown | P::Resolving | P::Idle | P::Connecting => state.as_str(),
        P::Connected | P::Unreachable | P::Local => state.as_str(),
    };
    assert_eq!(rows("A peer", "state"), peers.map(known));
    let known = |state: L| match state {
        L::Connecting | L::Idle | L::Busy | L::Stalled => state.as_str(),
    };
    let lanes = [L::Connecting, L::Idle, L::Busy, L::Stalled];
    assert_eq!(rows("A lane", "state"), lanes.map(known));
}
