//! Whether memory moves, found out by moving some.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tensorferry::{Access, Config, Engine, Op, RegisterOptions, SubmitOptions};

use crate::memory::{Buffer, Place};
use crate::pattern::Pattern;

/// What became of a WRITE and a READ between two engines of this process.
#[derive(Debug, Serialize)]
pub(super) struct Proof {
    /// Where the memory of both was.
    pub(super) memory: String,
    /// Both engines listened there; the bytes went through sockets.
    pub(super) host: String,
    pub(super) moved: bool,
    /// Of each of the two.
    pub(super) bytes: usize,
    pub(super) milliseconds: f64,
    pub(super) error: Option<String>,
}

/// More than a socket takes at once, and no multiple of anything.
const HOST_BYTES: usize = (256 << 10) + 13;
/// For each request, connecting included.
const PATIENCE: Duration = Duration::from_secs(5);

/// Moves memory of `place` between two engines over TCP, and compares every byte.
pub(super) fn prove(config: &Config, place: Place) -> Proof {
    let bytes = match place {
        Place::Host => HOST_BYTES,
        // More than one staging slot.
        Place::Device(_) => config.staging_slot_bytes + 13,
    };
    let mut config = config.clone();
    config.io_threads = 1;
    config.notices.clear();
    config.connect_timeout = config.connect_timeout.min(PATIENCE);
    // Both are here, so what peers elsewhere are told does not matter.
    config.advertise = None;
    let bound = config.bind.filter(|ip| !ip.is_unspecified());
    let host = bound.unwrap_or(IpAddr::from([127, 0, 0, 1])).to_string();
    let began = Instant::now();
    let outcome = move_both_ways(&host, &config, place, bytes);
    Proof {
        memory: place.to_string(),
        host,
        moved: outcome.is_ok(),
        bytes,
        milliseconds: began.elapsed().as_secs_f64() * 1e3,
        error: outcome.err().map(|error| crate::chain(&error)),
    }
}

fn move_both_ways(host: &str, config: &Config, place: Place, bytes: usize) -> Result<()> {
    let target = Engine::new(host, config.clone()).context("no engine starts")?;
    let initiator = Engine::new(host, config.clone()).context("no second engine starts")?;
    let remote = Buffer::new(&target, place, bytes)?;
    remote.register(&target, &RegisterOptions::default())?;
    let local = |engine| {
        let buffer = Buffer::new(engine, place, bytes)?;
        let options = RegisterOptions::default().with_access(Access::Local);
        buffer.register(engine, &options).map(|()| buffer)
    };
    let (source, back) = (local(&initiator)?, local(&initiator)?);

    let pattern = Pattern::of_round(RandomState::new().build_hasher().finish(), 1);
    pattern.fill(&source, bytes)?;
    for empty in [&remote, &back] {
        pattern.complement().fill(empty, bytes)?;
    }
    let segment = initiator.open(target.name())?;
    for (op, buffer, arrived) in [(Op::Write, &source, &remote), (Op::Read, &back, &back)] {
        let request = buffer.request(op, 0, remote.addr(), bytes)?;
        let options = SubmitOptions::default().with_timeout(PATIENCE);
        segment.submit_owned(&[request], options)?.wait()?;
        if let Some(mismatch) = pattern.check(arrived, bytes)? {
            bail!("after a {op:?} {mismatch}; please report this");
        }
    }
    initiator.close();
    target.close();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_moves() {
        let proof = prove(&Config::default(), Place::Host);
        assert_eq!(proof.error, None);
        assert!(proof.moved && proof.milliseconds > 0.0);
        assert_eq!((proof.memory.as_str(), proof.host.as_str()), ("cpu", "127.0.0.1"));
    }

    #[test]
    fn the_address_that_was_chosen_is_the_one_that_is_tried() {
        let mut config = Config::default();
        config.bind = Some("127.0.0.2".parse().unwrap());
        config.advertise = Some("elsewhere.invalid".into());
        let proof = prove(&config, Place::Host);
        assert_eq!((proof.host.as_str(), proof.error), ("127.0.0.2", None));

        config.bind = Some("192.0.2.1".parse().unwrap());
        let proof = prove(&config, Place::Host);
        assert!(!proof.moved);
        let error = proof.error.unwrap();
        assert!(error.starts_with("no engine starts: listening on 192.0.2.1: "), "{error}");
    }
}
