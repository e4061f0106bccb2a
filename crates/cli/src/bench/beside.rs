//! Plain sockets beside the engine: the same operation at the same size, in turns with it.

use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use tensorferry::Op;

use crate::measure::row::Row;
use crate::plain::{LARGEST_CHUNK, Plain, Turn, Way};

/// A plain stream to the target's process.
pub(crate) struct Beside {
    pub(crate) plain: Plain,
    /// Of the target, for errors.
    pub(crate) name: String,
}

/// What was measured beside one row.
#[derive(Clone, Debug)]
pub(crate) struct Pairs {
    turn: Turn,
    /// What is expected of the next turn.
    bytes_per_second: f64,
    /// The engine's throughput divided by that of the plain stream right after it.
    pub(crate) ratios: Vec<f64>,
    /// All that the plain stream has moved in the measured time.
    pub(crate) bytes: u64,
    pub(crate) elapsed: Duration,
    /// How long pings took, in nanoseconds, where there were any.
    pub(crate) pings: Option<Histogram<u64>>,
}

/// The median of what was measured in pairs, and its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// From so few pairs nothing is concluded.
const FEWEST: usize = 5;
/// A turn that is long enough to tell how fast the stream is.
const TELLING: Duration = Duration::from_millis(5);
/// What moves before the clock of a turn starts: connections grow cold in the pauses.
const RUN_UP: Duration = Duration::from_millis(10);
/// So much of the stream tells how fast it is, also where a batch of the engine takes longer than that.
const ENOUGH: Duration = Duration::from_secs(2);
/// How long a turn may take, which is far more than expected of any.
const PATIENCE: Duration = Duration::from_secs(30);
/// The largest block that is sent to and fro.
const LARGEST_PING: u64 = 64 << 10;
/// Pings between two looks at the time.
const PINGS: u64 = 16;
const LONGEST_PING_NS: u64 = 60 * 1_000_000_000;

impl Beside {
    /// Finds out how fast the stream is for a row that walks so much memory.
    ///
    /// # Errors
    /// The target is gone, or does not go on.
    pub(crate) fn begin(&mut self, row: Row, footprint: usize) -> Result<Pairs> {
        /// Enough for anybody, and no surprise for who pays for traffic.
        const MOST: u64 = 1 << 30;
        let way = match row.op {
            Op::Write => Way::Send,
            Op::Read => Way::Receive,
        };
        let chunk = row.block.min(LARGEST_CHUNK as u64) as usize;
        let (footprint, amount) = (footprint as u64, chunk as u64);
        let mut turn = Turn { way, pings: false, chunk, footprint, amount };
        loop {
            let took = self.turn(turn)?;
            let bytes_per_second = turn.amount as f64 / took.as_secs_f64().max(1e-9);
            if took >= TELLING || turn.amount >= MOST {
                let (ratios, elapsed) = (Vec::new(), Duration::ZERO);
                return Ok(Pairs {
                    turn,
                    bytes_per_second,
                    ratios,
                    bytes: 0,
                    elapsed,
                    pings: None,
                });
            }
            turn.amount *= 4;
        }
    }

    /// Measures for about as long as the engine was just measured, which moved so many bytes.
    ///
    /// # Errors
    /// The target is gone, or does not go on.
    pub(crate) fn pair(
        &mut self,
        pairs: &mut Pairs,
        (bytes, elapsed): (u64, Duration),
    ) -> Result<()> {
        self.turn(pairs.lasting(RUN_UP.min(elapsed / 10)))?;
        let turn = pairs.lasting(elapsed);
        let took = self.turn(turn)?;
        pairs.add((bytes, elapsed), (turn.amount, took));
        Ok(())
    }

    /// Sends blocks to and fro for about `budget`, if the row is one of single small blocks.
    ///
    /// # Errors
    /// The target is gone, or does not go on.
    pub(crate) fn ping(&mut self, pairs: &mut Pairs, row: Row, budget: Duration) -> Result<()> {
        if row.batch != 1 || row.block > LARGEST_PING {
            return Ok(());
        }
        let turn = Turn { pings: true, amount: PINGS, ..pairs.turn };
        // As with the engine: what comes first is not counted.
        self.turn(turn)?;
        let mut took = Duration::ZERO;
        let mut pings = Histogram::new_with_bounds(1, LONGEST_PING_NS, 3)?;
        while took < budget {
            let mut each = |ping: Duration| {
                took += ping;
                pings.saturating_record(u64::try_from(ping.as_nanos()).unwrap_or(u64::MAX));
            };
            let ran = self.plain.run(turn, PATIENCE, &mut each);
            ran.with_context(|| self.failed())?;
        }
        pairs.pings = Some(pings);
        Ok(())
    }

    fn turn(&mut self, turn: Turn) -> Result<Duration> {
        self.plain.run(turn, PATIENCE, &mut |_| {}).with_context(|| self.failed())
    }

    fn failed(&self) -> String {
        format!(
            "the plain stream to the target {} failed; does it still run? --no-sockets goes without",
            self.name
        )
    }
}

impl Pairs {
    /// A turn of about this length, if that is not too long, of whole chunks.
    fn lasting(&self, time: Duration) -> Turn {
        let chunk = self.turn.chunk as u64;
        let amount = (self.bytes_per_second * time.min(ENOUGH).as_secs_f64()) as u64;
        Turn { amount: amount.div_ceil(chunk).max(1) * chunk, ..self.turn }
    }

    fn add(&mut self, engine: (u64, Duration), plain: (u64, Duration)) {
        let rate = |(bytes, time): (u64, Duration)| bytes as f64 / time.as_secs_f64().max(1e-9);
        self.bytes_per_second = rate(plain);
        self.ratios.push(rate(engine) / rate(plain));
        self.bytes += plain.0;
        self.elapsed += plain.1;
    }

    /// What the pairs come to, if there are enough.
    pub(crate) fn ratio(&self) -> Option<Ratio> {
        let mut sorted = self.ratios.clone();
        sorted.sort_by(f64::total_cmp);
        let (Some(low), Some(high)) = (sorted.first(), sorted.last()) else { return None };
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        (sorted.len() >= FEWEST).then_some(Ratio { median, low: *low, high: *high })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Of a stream that moves 1 GB/s, beside an engine with these ratios to it.
    pub(crate) fn pairs(ratios: &[f64]) -> Pairs {
        let (way, chunk, footprint) = (Way::Send, 4096, 1 << 20);
        let turn = Turn { way, pings: false, chunk, footprint, amount: 4096 };
        let (bytes_per_second, elapsed) = (1e9, Duration::ZERO);
        let mut pairs =
            Pairs { turn, bytes_per_second, ratios: Vec::new(), bytes: 0, elapsed, pings: None };
        for ratio in ratios {
            let engine = ((ratio * 1e6) as u64, Duration::from_millis(1));
            pairs.add(engine, (1_000_000, Duration::from_millis(1)));
        }
        pairs
    }

    #[test]
    fn a_ratio_is_the_median_of_at_least_five_pairs() {
        assert_eq!(pairs(&[]).ratio(), None);
        assert_eq!(pairs(&[1.0, 1.0, 1.0, 1.0]).ratio(), None);
        let ratio = pairs(&[0.5, 3.0, 1.0, 2.0, 0.25]).ratio().unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high), (1.0, 0.25, 3.0));
        assert_eq!(pairs(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).ratio().unwrap().median, 3.5);
    }

    #[test]
    fn a_turn_lasts_as_long_as_the_engines_and_has_whole_chunks() {
        let pairs = pairs(&[1.0]);
        assert_eq!((pairs.bytes, pairs.elapsed), (1_000_000, Duration::from_millis(1)));
        assert_eq!(pairs.lasting(Duration::from_millis(1)).amount, 245 * 4096);
        assert_eq!(pairs.lasting(Duration::ZERO).amount, 4096);
        let frozen = pairs.lasting(Duration::from_secs(3600)).amount;
        assert!(frozen <= 2_000_000_000 + 4096, "a batch that hung is not made up for: {frozen}");
    }
}
