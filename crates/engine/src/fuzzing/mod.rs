//! What peers can send, for fuzzing: each function takes any bytes, and panics only if something is wrong with us.
//!
//! They are compiled for tests and with `--cfg fuzzing`; `fuzz/` gives them to libFuzzer. The first byte of an input
//! says how its stream is cut, so that one stream is many inputs.

mod replies;
mod requests;
mod texts;

pub use replies::replies;
pub use requests::requests;
pub use texts::{descriptor, frames, messages, names};

/// One of the functions here.
type Target = fn(&[u8]);

/// Every target, by the name of its program in `fuzz/`.
pub const TARGETS: [(&str, Target); 6] = [
    ("descriptor", descriptor),
    ("frames", frames),
    ("messages", messages),
    ("names", names),
    ("replies", replies),
    ("requests", requests),
];

/// Lengths of pieces that depend on one byte of the input. With 0 there is one piece.
struct Cuts(u32);

impl Cuts {
    fn new(seed: u8) -> Self {
        Self(u32::from(seed).wrapping_mul(0x9e37_79b9))
    }

    fn draw(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    /// From 1 to `most`, often little.
    fn next(&mut self, most: usize) -> usize {
        if self.0 == 0 {
            return most;
        }
        let limit = [1, 9, 30, 100, 5000, usize::MAX][self.draw() as usize % 6];
        1 + self.draw() as usize % limit.min(most)
    }

    fn flip(&mut self) -> bool {
        self.0 != 0 && self.draw() & 64 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Inputs that once went wrong, and some of each kind that must not.
    #[test]
    fn every_regression_is_replayed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/regressions");
        for (name, target) in TARGETS {
            let folder = root.join(name);
            let files = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
            let mut replayed = 0;
            for file in files {
                let path = file.unwrap().path();
                let input = fs::read(&path).unwrap();
                // The same stream, cut in every way.
                for seed in 0..=u8::MAX {
                    let input = [&[seed], input.get(1..).unwrap_or_default()].concat();
                    let ran = std::panic::catch_unwind(|| target(&input));
                    assert!(ran.is_ok(), "{}, cut by {seed}", path.display());
                }
                replayed += 1;
            }
            assert!(replayed > 0, "{folder:?} is empty");
        }
    }
}
