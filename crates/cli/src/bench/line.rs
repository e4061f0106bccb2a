//! What the benchmark tells of one row.

use serde::Serialize;

use super::beside::{Pairs, Ratio};
use crate::measure::figures::three_digits;
use crate::measure::rounds::Measured;
use crate::pattern::Mismatch;

/// One row, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) operation: &'static str,
    pub(crate) block_bytes: u64,
    pub(crate) batch_requests: u64,
    threads: usize,
    pub(crate) measured_batches: u64,
    measured_bytes: u64,
    measured_seconds: f64,
    pub(crate) gigabytes_per_second: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) batch_p50_microseconds: f64,
    pub(crate) batch_p90_microseconds: f64,
    pub(crate) batch_p99_microseconds: f64,
    pub(crate) batch_max_microseconds: f64,
    initiator_cpu_seconds: f64,
    target_cpu_seconds: Option<f64>,
    pub(crate) initiator_cpu_seconds_per_gigabyte: f64,
    pub(crate) target_cpu_seconds_per_gigabyte: Option<f64>,
    cpu_seconds_per_gigabyte: Option<f64>,
    /// What was moved before the clock started as well.
    moved_bytes: u64,
    pub(crate) verified: bool,
    pub(crate) verified_bytes: u64,
    pub(crate) mismatch: Option<Mismatch>,
    plain_sockets: Option<Plain>,
}

#[derive(Debug, Serialize)]
struct Plain {
    gigabytes_per_second: f64,
    pairs: usize,
    /// The engine's throughput divided by that of plain sockets: of at least five pairs, or `null`.
    ratio_median: Option<f64>,
    ratio_low: Option<f64>,
    ratio_high: Option<f64>,
    /// One block one way and eight bytes back, for batches of one block of up to 64 KiB.
    ping_p50_microseconds: Option<f64>,
    pings: u64,
}

impl Line {
    /// Of so many threads, and whether bytes were compared.
    pub(crate) fn of(
        measured: &Measured,
        (threads, verify): (usize, bool),
        pairs: Option<&Pairs>,
    ) -> Self {
        let secs = measured.elapsed.as_secs_f64();
        let bytes = measured.moved_bytes();
        let gigabytes = bytes as f64 / 1e9;
        let per = |amount: f64, whole: f64| if whole > 0.0 { amount / whole } else { 0.0 };
        let micros = |quantile| measured.latency.value_at_quantile(quantile) as f64 / 1e3;
        let requests = (measured.batches * measured.row.batch) as f64;
        let initiator_cpu = measured.initiator_cpu.as_secs_f64();
        let target_cpu = measured.target_cpu.map(|cpu| cpu.as_secs_f64());
        let verified = verify && measured.is_verified();
        Self {
            operation: measured.row.operation(),
            block_bytes: measured.row.block,
            batch_requests: measured.row.batch,
            threads,
            measured_batches: measured.batches,
            measured_bytes: bytes,
            measured_seconds: secs,
            gigabytes_per_second: per(gigabytes, secs),
            requests_per_second: per(requests, secs),
            batch_p50_microseconds: micros(0.50),
            batch_p90_microseconds: micros(0.90),
            batch_p99_microseconds: micros(0.99),
            batch_max_microseconds: measured.latency.max() as f64 / 1e3,
            initiator_cpu_seconds: initiator_cpu,
            target_cpu_seconds: target_cpu,
            initiator_cpu_seconds_per_gigabyte: per(initiator_cpu, gigabytes),
            target_cpu_seconds_per_gigabyte: target_cpu.map(|cpu| per(cpu, gigabytes)),
            cpu_seconds_per_gigabyte: target_cpu.map(|cpu| per(cpu + initiator_cpu, gigabytes)),
            moved_bytes: measured.carried_bytes,
            verified,
            verified_bytes: if measured.mismatch.is_none() { measured.checked_bytes } else { 0 },
            mismatch: measured.mismatch,
            plain_sockets: pairs.map(Plain::of),
        }
    }

    pub(crate) fn ratio(&self) -> String {
        let plain = self.plain_sockets.as_ref();
        or_dash(plain.and_then(|plain| {
            let (median, low, high) = (plain.ratio_median?, plain.ratio_low?, plain.ratio_high?);
            let [median, low, high] = [median, low, high].map(three_digits);
            Some(format!("{median} ({low} to {high})"))
        }))
    }

    pub(crate) fn ping(&self) -> String {
        let plain = self.plain_sockets.as_ref();
        or_dash(plain.and_then(|plain| Some(format!("{:.1}", plain.ping_p50_microseconds?))))
    }

    pub(crate) fn verdict(&self) -> String {
        match self.mismatch {
            _ if self.verified => "yes",
            Some(_) => "NO",
            None => "–",
        }
        .to_owned()
    }
}

impl Plain {
    fn of(pairs: &Pairs) -> Self {
        let ratio = pairs.ratio();
        let part = |part: fn(Ratio) -> f64| ratio.map(part);
        let secs = pairs.elapsed.as_secs_f64();
        let pings = pairs.pings.as_ref();
        Self {
            gigabytes_per_second: if secs > 0.0 { pairs.bytes as f64 / 1e9 / secs } else { 0.0 },
            pairs: pairs.ratios.len(),
            ratio_median: part(|ratio| ratio.median),
            ratio_low: part(|ratio| ratio.low),
            ratio_high: part(|ratio| ratio.high),
            ping_p50_microseconds: pings.map(|pings| pings.value_at_quantile(0.5) as f64 / 1e3),
            pings: pings.map_or(0, |pings| pings.len()),
        }
    }
}

/// What is not known is shown so.
pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "–".to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use tensorferry::Op;

    use super::super::beside::tests::pairs;
    use super::*;
    use crate::measure::row::Row;

    /// A row in which each byte that was moved was compared.
    pub(crate) fn measured(batches: u64) -> Measured {
        let row = Row { op: Op::Write, block: 4096, batch: 2 };
        let elapsed = Duration::from_millis(4);
        let mut measured = Measured { batches, elapsed, ..Measured::new(row).unwrap() };
        measured.latency.saturating_record(2_000_000);
        measured.initiator_cpu = Duration::from_millis(3);
        measured.target_cpu = Some(Duration::from_millis(5));
        measured.checked_bytes = batches * row.batch_bytes();
        measured.carried_bytes = measured.checked_bytes;
        measured
    }

    #[test]
    fn units_are_what_the_names_say() {
        let line = Line::of(&measured(1000), (1, true), Some(&pairs(&[2.0; 5])));
        assert_eq!((line.measured_bytes, line.verified_bytes), (8_192_000, 8_192_000));
        assert_eq!(line.gigabytes_per_second, 0.008_192 / 0.004);
        assert_eq!(line.requests_per_second, 500_000.0);
        assert!((line.batch_max_microseconds - 2000.0).abs() < 2.0);
        assert_eq!(line.initiator_cpu_seconds_per_gigabyte, 0.003 / 0.008_192);
        assert_eq!(line.cpu_seconds_per_gigabyte, Some(0.008 / 0.008_192));
        let plain = line.plain_sockets.as_ref().unwrap();
        assert_eq!((plain.pairs, plain.ratio_median), (5, Some(2.0)));
        assert_eq!(plain.gigabytes_per_second, 1.0);
        assert_eq!((line.ratio(), line.ping()), ("2.00 (2.00 to 2.00)".into(), "–".into()));
    }
}
