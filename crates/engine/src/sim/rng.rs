//! Numbers that look random and are the same for the same seed.

/// A splitmix64 generator: one addition per number, and a mix of its bits.
pub(super) struct Rng {
    state: u64,
}

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        // Seeds in a row would begin with states in a row.
        let mut rng = Self { state: seed.wrapping_mul(0xd134_2543_de82_ef95) };
        rng.next();
        rng
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub(super) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True `n` times of 1000.
    pub(super) fn permille(&mut self, n: u32) -> bool {
        self.next() % 1000 < u64::from(n)
    }

    pub(super) fn flip(&mut self) -> bool {
        self.permille(500)
    }

    /// A number from `low` to `high`, small ones as likely as large ones.
    pub(super) fn spread(&mut self, low: usize, high: usize) -> usize {
        let doublings = (high / low.max(1)).max(1).ilog2() as usize;
        let top = low.max(1) << self.between(0, doublings + 1).min(60);
        self.between(low, top.clamp(low, high))
    }

    pub(super) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

#[test]
fn a_seed_gives_the_same_numbers_again_and_another_gives_others() {
    let numbers = |seed| {
        let mut rng = Rng::new(seed);
        (0..100).map(|_| rng.between(3, 900)).collect::<Vec<_>>()
    };
    assert_eq!(numbers(7), numbers(7));
    assert_ne!(numbers(7), numbers(8));
    assert!(numbers(9).iter().all(|n| (3..=900).contains(n)));
}
