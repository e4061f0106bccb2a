//! What the tests are made of.

use std::time::{Duration, Instant};

use tensorferry::{Batch, Config, Engine, HostBuffer, Op, RegisterOptions, Segment, SubmitOptions};

/// A target with one registered buffer, and an initiator that has opened it.
pub(crate) struct Pair {
    pub(crate) target: Engine,
    pub(crate) remote: HostBuffer,
    pub(crate) initiator: Engine,
    pub(crate) segment: Segment,
}

pub(crate) fn engine(config: Config) -> Engine {
    Engine::new("127.0.0.1", config).expect("loopback has free ports")
}

impl Pair {
    pub(crate) fn new(len: usize) -> Self {
        Self::with(len, Config::default())
    }

    /// `config` is the initiator's.
    pub(crate) fn with(len: usize, config: Config) -> Self {
        let target = engine(Config::default());
        let remote = HostBuffer::zeroed(len).unwrap();
        target.register_buffer(&remote, &RegisterOptions::default()).unwrap();
        let initiator = engine(config);
        let segment = initiator.open(target.name()).unwrap();
        Self { target, remote, initiator, segment }
    }

    /// One request over the first `len` bytes of `local`.
    pub(crate) fn start(&self, op: Op, local: &HostBuffer, remote: u64, len: usize) -> Batch {
        let request = local.request(op, 0, remote, len).unwrap();
        self.segment.submit_owned(&[request], SubmitOptions::default()).unwrap()
    }
}

/// Bytes that depend on their place and on `seed`.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn buffer(bytes: &[u8]) -> HostBuffer {
    let buffer = HostBuffer::zeroed(bytes.len()).unwrap();
    buffer.write(0, bytes);
    buffer
}

/// Waits for a condition, at most for ten seconds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::yield_now();
    }
}
