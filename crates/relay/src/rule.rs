//! What a relay can be told.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A port of a copy: the one that is asked about buffers, or the one where bytes move.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Port {
    /// The port that the segment is opened by.
    Control,
    /// The port of READs and WRITEs.
    #[default]
    Data,
}

/// Which way bytes flow.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// From the initiator to the target.
    ToTarget,
    /// From the target to the initiator.
    ToInitiator,
    /// Both.
    #[default]
    Both,
}

/// Which connections a rule is for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connections {
    /// Those that are open now.
    Existing,
    /// Those that are made from now on.
    Future,
    /// Both.
    #[default]
    All,
}

/// Which copies are meant: one, several, or all if there is none.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Copies {
    /// This one, counted from 0.
    One(usize),
    /// These.
    Some(Vec<usize>),
}

/// How a connection, or one way of it, ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Both sides are told that nothing more will come. What they still send is thrown away, until
    /// they close as well, for a second at most.
    Fin,
    /// Both sides are reset.
    Rst,
    /// Nothing passes any more and nothing is read, and neither side is told of anything, not even
    /// that the other one has closed: what a lost route or a frozen host looks like.
    #[serde(alias = "vanish", alias = "blackhole")]
    Silence,
    /// The receiver of this way is told that nothing more will come; the other way goes on.
    HalfClose,
    /// Nothing more is read from the sender of this way, so that it has to wait; the other way goes
    /// on.
    Stall,
}

/// An end that comes after some bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct After {
    /// How many bytes are passed on first, counted from the start of the connection.
    pub bytes: u64,
    /// What happens then.
    pub end: End,
}

/// Which bytes are passed on wrong. Offsets count from the start of the connection.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Corrupt {
    /// The bytes at these offsets.
    pub at: Vec<u64>,
    /// One of so many bytes; the last of them, if there is no seed.
    pub every: Option<u64>,
    /// With `every`: which of them is drawn from this, the same ones each time.
    pub seed: Option<u64>,
    /// The bits that are flipped in such a byte; the lowest if this is zero.
    pub mask: u8,
}

/// What becomes of the bytes that flow one way. The default passes them on.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    /// The copies it is for; all if there is none.
    pub copies: Option<Copies>,
    /// The port it is for.
    pub port: Port,
    /// The way it is for.
    pub way: Way,
    /// The connections it is for.
    pub connections: Connections,
    /// Each byte arrives so many milliseconds late.
    pub delay_ms: u64,
    /// So many bytes a second, and no more.
    pub rate: Option<u64>,
    /// Each byte leaves in a send of its own.
    pub single_bytes: bool,
    /// Nothing is read from the sender, so that it has to wait, until another rule comes.
    pub stall: bool,
    /// What is passed on wrong.
    pub corrupt: Option<Corrupt>,
    /// An end after some bytes.
    pub after: Option<After>,
}

/// What a port does with those who connect to it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accept {
    /// They are connected with the target.
    #[default]
    Pass,
    /// Nobody listens: they are refused.
    Refuse,
    /// They are accepted, and nothing is read from them or said to them.
    Silent,
    /// The queue of those who wait to be accepted is full: they get no answer at all.
    Never,
}

impl Rule {
    /// Passes everything on, on the data port; the start of a rule.
    #[must_use]
    pub fn new(way: Way) -> Self {
        Self { way, ..Self::default() }
    }

    /// The same for these copies only.
    #[must_use]
    pub fn copy(self, copy: usize) -> Self {
        Self { copies: Some(Copies::One(copy)), ..self }
    }

    /// The same for this port.
    #[must_use]
    pub fn port(self, port: Port) -> Self {
        Self { port, ..self }
    }

    /// The same for these connections only.
    #[must_use]
    pub fn connections(self, connections: Connections) -> Self {
        Self { connections, ..self }
    }

    /// Each byte arrives so much later, in whole milliseconds.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Self { delay_ms, ..self }
    }

    /// So many bytes a second.
    #[must_use]
    pub fn rate(self, bytes_per_second: u64) -> Self {
        Self { rate: Some(bytes_per_second), ..self }
    }

    /// Each byte leaves in a send of its own.
    #[must_use]
    pub fn single_bytes(self) -> Self {
        Self { single_bytes: true, ..self }
    }

    /// Nothing is read from the sender.
    #[must_use]
    pub fn stall(self) -> Self {
        Self { stall: true, ..self }
    }

    /// The lowest bit of the byte at `offset` is flipped.
    #[must_use]
    pub fn corrupt_at(self, offset: u64) -> Self {
        let mut corrupt = self.corrupt.clone().unwrap_or_default();
        corrupt.at.push(offset);
        Self { corrupt: Some(corrupt), ..self }
    }

    /// After `bytes` bytes of a connection it ends like this.
    #[must_use]
    pub fn after(self, bytes: u64, end: End) -> Self {
        Self { after: Some(After { bytes, end }), ..self }
    }

    pub(crate) fn is_for(&self, way: Way) -> bool {
        self.way == Way::Both || self.way == way
    }
}

impl Corrupt {
    /// Spoils the bytes of a stream that start at `offset`; returns how many it has spoilt.
    pub(crate) fn apply(&self, offset: u64, bytes: &mut [u8]) -> u64 {
        let mask = if self.mask == 0 { 1 } else { self.mask };
        let end = offset + bytes.len() as u64;
        let mut spoilt = 0;
        let mut spoil = |at: u64| {
            if (offset..end).contains(&at) {
                bytes[(at - offset) as usize] ^= mask;
                spoilt += 1;
            }
        };
        self.at.iter().copied().for_each(&mut spoil);
        if let Some(every) = self.every.filter(|every| *every > 0) {
            (offset / every..=end / every).for_each(|n| spoil(n * every + self.drawn(n, every)));
        }
        spoilt
    }

    /// Which byte of the `n`-th group of `every` bytes is spoilt.
    fn drawn(&self, n: u64, every: u64) -> u64 {
        let Some(seed) = self.seed else { return every - 1 };
        // Steele's splittable generator: neighbours come out unrelated.
        let mut x = seed ^ n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % every
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spoilt(corrupt: &Corrupt, len: usize, cuts: usize) -> Vec<usize> {
        let mut stream = vec![0; len];
        let mut at = 0;
        for part in stream.chunks_mut(cuts) {
            corrupt.apply(at, part);
            at += part.len() as u64;
        }
        (0..len).filter(|i| stream[*i] != 0).collect()
    }

    #[test]
    fn corruption_does_not_depend_on_where_the_stream_is_cut() {
        let at = Corrupt { at: vec![3, 17], ..Corrupt::default() };
        let every = Corrupt { every: Some(10), ..Corrupt::default() };
        let drawn = Corrupt { every: Some(10), seed: Some(7), ..Corrupt::default() };
        for cuts in 1..40 {
            assert_eq!(spoilt(&at, 40, cuts), [3, 17]);
            assert_eq!(spoilt(&every, 40, cuts), [9, 19, 29, 39]);
            let places = spoilt(&drawn, 40, cuts);
            assert_eq!(places, spoilt(&drawn, 40, 40));
            assert_eq!(places.iter().map(|p| p / 10).collect::<Vec<_>>(), [0, 1, 2, 3]);
        }
    }

    #[test]
    fn a_seed_changes_the_places() {
        let places = |seed| {
            spoilt(&Corrupt { every: Some(100), seed: Some(seed), ..Corrupt::default() }, 800, 64)
        };
        assert_eq!(places(1), places(1));
        assert_ne!(places(1), places(2));
    }

    #[test]
    fn the_mask_says_which_bits() {
        let mut byte = [0b1010_0000];
        Corrupt { at: vec![5], mask: 0b1100_0000, ..Corrupt::default() }.apply(5, &mut byte);
        assert_eq!(byte, [0b0110_0000]);
    }
}
