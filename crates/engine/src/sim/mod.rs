//! A deterministic simulation: whole engines on a simulated network, on one thread, with a clock of their own.
//!
//! What runs is what runs in production: submission, queues, routes, lanes, the target's side, control ports, and
//! the IO threads between two polls ([`crate::io::Reactor::turn`]). What is replaced is what only the kernel has: the
//! clock ([`crate::clock`]), sockets and listeners ([`socket`], [`net`]), and the threads themselves, of which a
//! schedule runs one turn after the other, in any order. Without: memory of devices, names that have to be looked up,
//! and what blocks its caller (`wait`, `unregister`, a full queue), whose halves are called one after the other.
//!
//! A seed is a [`plan::Plan`] and a schedule. It fails if one of the rules in [`check`] or [`guard`] is broken:
//!
//! - every batch is final by its deadline, once told to stop at once, once and for ever; nobody sleeps through it;
//! - complete means that the bytes are in place now; what failed unsent has changed nothing, now and later;
//! - a WRITE of which bytes were given to a socket is not sent again, but behind a refusal;
//! - memory is touched within requests that run and buffers that are registered, and nowhere else;
//! - with healthy links everything is done, also after faults; nobody turns round and round without effect;
//! - at the end counters add up, and no socket, no lane and nothing reserved is left.
//!
//! That these rules see something was tried by breaking the engine by hand; so many seeds were run until one failed:
//!
//! | what was broken | seeds |
//! |---|---|
//! | a WRITE that was touched is sent again | 11 |
//! | an answer settles the last request in flight, not the first | 2 |
//! | lanes are not looked through for deadlines; queues are not | 81; 4 |
//! | a WRITE is acknowledged when its header has come; before its last part is in place | 9; 1 |
//! | what a lost lane gives back is dropped; what a swept one does | 41; 232 |
//! | a WRITE that is cancelled goes on being sent | 102 |
//! | requests stay set aside when the descriptor has come | 78 |
//! | a buffer is handed back while a READ of it leaves | 1362 |
//! | a lane beyond its progress timeout is kept | 415 |
//! | a lane is kept whose peer is silent; a connection from such a peer is | 672; 385 |
//! | the end of a v1 stream counts before all is acknowledged; before all is sent | 2994; 41 |
//!
//! `TENSORFERRY_SIM_SEED=n` replays one seed, `TENSORFERRY_SIM_SCHEDULES=n` runs so many (both: so many from that on).

mod check;
mod guard;
mod machine;
mod memory;
mod net;
mod plan;
mod rng;
mod socket;
mod stories;
mod tap;
mod trace;
mod world;

pub(crate) use net::{now, random, watch};
pub(crate) use socket::{Listener, Socket};

use std::panic::{AssertUnwindSafe, catch_unwind};

use memory::Arena;
use net::Net;
use plan::Plan;
use world::World;

/// How many schedules a test run has.
const SCHEDULES: u64 = 4000;

/// Runs one schedule; how many events it had, or what went wrong and what had happened.
fn run(seed: u64, arena: &Arena) -> Result<usize, String> {
    let plan = Plan::of(seed);
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed, plan.clone(), arena);
        let result = run_all(&mut world);
        (result, world)
    }));
    let (result, world) = match ran {
        Ok((result, world)) => (result, Some(world)),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            (Err(format!("a panic: {}", text.unwrap_or_default())), None)
        }
    };
    drop(world);
    let net = Net::finish().expect("begun above");
    match result {
        Ok(()) => Ok(net.trace.count()),
        Err(why) => Err(format!("{why}\n{plan:?}\n{}", net.trace.to_text())),
    }
}

fn run_all(world: &mut World<'_>) -> world::Outcome {
    world.run()?;
    world.heal();
    world.check_recovery()?;
    world.check_books()?;
    world.close_all()?;
    world.check_end()
}

fn explain(seed: u64, arena: &Arena) -> String {
    trace::keep(true);
    let again = run(seed, arena);
    trace::keep(false);
    match again {
        Err(why) => why,
        Ok(_) => "it is not to be had again: the simulation is not deterministic".to_owned(),
    }
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value}: expected a number")))
}

#[test]
fn schedules_of_many_seeds_keep_the_rules() {
    let arena = Arena::new();
    let first = number("TENSORFERRY_SIM_SEED");
    let usual = if first.is_some() { 1 } else { SCHEDULES };
    let (first, count) = (first.unwrap_or(0), number("TENSORFERRY_SIM_SCHEDULES").unwrap_or(usual));
    for seed in first..first + count {
        if run(seed, &arena).is_err() {
            let why = explain(seed, &arena);
            panic!("seed {seed} (TENSORFERRY_SIM_SEED={seed} replays it): {why}");
        }
    }
}

#[test]
fn a_seed_has_the_same_schedule_each_time() {
    let arena = Arena::new();
    for seed in 0..50 {
        let first = run(seed, &arena);
        assert_eq!(first, run(seed, &arena), "seed {seed}");
    }
}

/// Requests outside of all buffers, one batch after the other, while the descriptor is not asked for again for a while.
#[test]
fn nobody_turns_in_circles_while_a_descriptor_is_not_asked_for_again() {
    let arena = Arena::new();
    for seed in 0..20 {
        let mut plan = Plan::of(seed).made_calm();
        plan.faults.stray = 500;
        let mut world = World::new(seed, plan, &arena);
        let result = run_all(&mut world);
        drop(world);
        let net = Net::finish().expect("begun above");
        assert!(result.is_ok(), "seed {seed}: {result:?}\n{}", net.trace.to_text());
    }
}
