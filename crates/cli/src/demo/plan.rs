//! What the demo is going to do: the arguments, resolved.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tensorferry::Op;
use tensorferry::gpu::{DeviceId, Vendor};

use crate::args::{Count, DemoArgs, Size, size_text};
use crate::memory::Place;

/// Everything that is asked of one run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) rows: Vec<Row>,
    /// For all rows, with everything around them.
    pub(crate) budget: Duration,
    pub(crate) host: String,
    pub(crate) memory: Ends,
    pub(crate) simulate: Option<Simulate>,
    pub(crate) format: Format,
}

/// Where the memory of each end is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Ends {
    pub(crate) initiator: Place,
    pub(crate) target: Place,
}

/// That GPUs are simulated, and with which library; `None`: it is to be looked for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Simulate(pub(crate) Option<PathBuf>);

/// One line of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Row {
    pub(crate) op: Op,
    /// Bytes of one request.
    pub(crate) block: u64,
    /// Requests of one batch.
    pub(crate) batch: u64,
}

/// How the result is shown.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    Table,
    Json,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Block and batch: one small request, KV blocks, bulk.
const USUAL: [(u64, u64); 5] =
    [(4 * KIB, 1), (4 * KIB, 128), (64 * KIB, 64), (MIB, 16), (64 * MIB, 1)];
const SIZES: [u64; 3] = [4 * KIB, 64 * KIB, MIB];
const BATCHES: [u64; 2] = [1, 16];
/// Both processes hold a batch in memory.
const LONGEST_BATCH: u64 = 4 << 30;
const MOST_REQUESTS: u64 = 1 << 20;

impl DemoArgs {
    /// # Errors
    /// A block and a batch size that are too much together.
    pub(crate) fn resolve(self) -> Result<Plan> {
        let format = if self.json { Format::Json } else { Format::Table };
        let mut rows = Vec::new();
        for (block, batch) in pairs(&self.sizes, &self.batches) {
            ensure!(
                fits(block, batch),
                "a batch of {batch} blocks of {block} bytes is more than this demo takes: at most 4 GiB and \
                 {MOST_REQUESTS} requests; choose smaller --sizes or --batches"
            );
            rows.extend([Op::Write, Op::Read].map(|op| Row { op, block, batch }));
        }
        let simulate = self.simulate.map(Simulate);
        let memory = Ends::resolve(&self.memory, simulate.is_some())?;
        Ok(Plan {
            rows,
            budget: self.seconds.duration(),
            host: self.host,
            memory,
            simulate,
            format,
        })
    }
}

impl Ends {
    const HOST: Self = Self { initiator: Place::Host, target: Place::Host };

    fn resolve(places: &[Place], simulated: bool) -> Result<Self> {
        let first = Place::Device(DeviceId::new(Vendor::Cuda, 0));
        let ends = match *places {
            [] if simulated => Self { initiator: first, target: first },
            [] => Self::HOST,
            [both] => Self { initiator: both, target: both },
            [initiator, target] => Self { initiator, target },
            _ => bail!(
                "--memory takes one place for both ends, or two: the initiator's and the target's"
            ),
        };
        ensure!(
            !simulated || ends != Self::HOST,
            "--simulate has nothing to simulate: --memory names no device; name one, such as cuda:0"
        );
        Ok(ends)
    }

    /// The vendors of both ends' devices.
    pub(crate) fn vendors(self) -> impl Iterator<Item = Vendor> {
        self.devices().map(|device| device.vendor)
    }

    /// The devices of both ends.
    pub(crate) fn devices(self) -> impl Iterator<Item = DeviceId> {
        [self.initiator, self.target].into_iter().filter_map(|place| match place {
            Place::Host => None,
            Place::Device(device) => Some(device),
        })
    }
}

fn pairs(sizes: &[Size], batches: &[Count]) -> Vec<(u64, u64)> {
    // What nobody asked for is left out where it does not fit. What was asked for stays, to be refused.
    let stays = |size: u64, batch: u64| match (sizes.is_empty(), batches.is_empty()) {
        (false, true) => batch == BATCHES[0] || fits(size, batch),
        (true, false) => size == SIZES[0] || fits(size, batch),
        _ => true,
    };
    if sizes.is_empty() && batches.is_empty() {
        return USUAL.to_vec();
    }
    let or = |given: Vec<u64>, usual: &[u64]| if given.is_empty() { usual.to_vec() } else { given };
    let all_sizes = or(sizes.iter().map(|s| s.bytes()).collect(), &SIZES);
    let all_batches = or(batches.iter().map(|b| b.get()).collect(), &BATCHES);
    let pairs =
        all_sizes.iter().flat_map(|size| all_batches.iter().map(move |batch| (*size, *batch)));
    pairs.filter(|(size, batch)| stays(*size, *batch)).collect()
}

fn fits(block: u64, batch: u64) -> bool {
    batch <= MOST_REQUESTS && block <= LONGEST_BATCH / batch
}

impl Plan {
    /// Bytes of memory that each process needs.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.rows.iter().map(|row| row.round_bytes()).max().unwrap_or(1)
    }
}

impl Row {
    /// A round walks at most so many bytes, so that blocks come from memory and not only from a cache...
    const ROUND_BYTES: u64 = 64 * MIB;
    /// ...and at most so many requests, which are made before the clock starts.
    const ROUND_REQUESTS: u64 = 1 << 17;
    const ROUND_BATCHES: u64 = 1 << 10;

    pub(crate) fn batch_bytes(&self) -> u64 {
        self.block * self.batch
    }

    /// Each batch of a round has its own place in memory, so that every one of them is checked.
    pub(crate) fn round_batches(&self) -> usize {
        let batches = (Self::ROUND_BYTES / self.batch_bytes())
            .min(Self::ROUND_REQUESTS / self.batch)
            .clamp(1, Self::ROUND_BATCHES);
        batches as usize
    }

    pub(crate) fn round_bytes(&self) -> usize {
        self.round_batches() * self.batch_bytes() as usize
    }

    /// Batches before the clock starts: connections are made and caches filled.
    pub(crate) fn warm_up_batches(&self) -> usize {
        self.round_batches().min(3)
    }

    pub(crate) fn operation(&self) -> &'static str {
        match self.op {
            Op::Read => "read",
            Op::Write => "write",
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:5} {} x {}", self.operation(), size_text(self.block), self.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Seconds;

    fn plan(sizes: &[u64], batches: &[u64]) -> Result<Plan> {
        let args = DemoArgs {
            seconds: "1".parse::<Seconds>().unwrap(),
            sizes: sizes.iter().map(|n| Size::new(*n)).collect(),
            batches: batches.iter().map(|n| Count::new(*n)).collect(),
            host: "127.0.0.1".into(),
            memory: Vec::new(),
            simulate: None,
            json: false,
        };
        args.resolve()
    }

    #[test]
    fn both_ends_have_their_memory_somewhere() {
        let ends = |places: &[&str], simulated| -> Result<String> {
            let places: Vec<Place> = places.iter().map(|text| text.parse().unwrap()).collect();
            let Ends { initiator, target } = Ends::resolve(&places, simulated)?;
            Ok(format!("{initiator} {target}"))
        };
        for (places, simulated, expected) in [
            (&[][..], false, "cpu cpu"),
            (&[], true, "cuda:0 cuda:0"),
            (&["hip:1"], false, "hip:1 hip:1"),
            (&["cpu", "musa:0"], true, "cpu musa:0"),
        ] {
            assert_eq!(ends(places, simulated).unwrap(), expected);
        }
        let text = ends(&["cpu"], true).unwrap_err().to_string();
        assert!(text.starts_with("--simulate has nothing to simulate"), "{text}");
        let text = ends(&["cpu", "cpu", "cpu"], false).unwrap_err().to_string();
        assert!(text.starts_with("--memory takes one place for both ends, or two"), "{text}");
    }

    #[test]
    fn each_pair_is_written_and_read() {
        assert_eq!(plan(&[], &[]).unwrap().rows.len(), 2 * USUAL.len());
        let rows = plan(&[1, 2], &[5]).unwrap().rows;
        let shown: Vec<String> = rows.iter().map(Row::to_string).collect();
        assert_eq!(shown, ["write 1 B x 5", "read  1 B x 5", "write 2 B x 5", "read  2 B x 5"]);
        assert_eq!(plan(&[7], &[]).unwrap().rows.len(), 2 * BATCHES.len());
        assert_eq!(plan(&[], &[7]).unwrap().rows.len(), 2 * SIZES.len());
    }

    #[test]
    fn what_nobody_asked_for_does_not_have_to_fit() {
        let shown = |sizes: &[u64], batches: &[u64]| -> Vec<(u64, u64)> {
            let rows = plan(sizes, batches).unwrap().rows;
            rows.iter().step_by(2).map(|row| (row.block, row.batch)).collect()
        };
        assert_eq!(shown(&[4 << 30], &[]), [(4 << 30, 1)]);
        assert_eq!(
            shown(&[256 << 20, 1 << 30], &[]),
            [(256 << 20, 1), (256 << 20, 16), (1 << 30, 1)]
        );
        assert_eq!(shown(&[], &[1 << 20]), [(4 << 10, 1 << 20)]);
        for (sizes, batches) in [(&[4096, 5 << 30][..], &[][..]), (&[], &[1, (1 << 20) + 1])] {
            assert!(plan(sizes, batches).is_err(), "what was asked for is not left out");
        }
    }

    #[test]
    fn a_batch_that_does_not_fit_is_refused() {
        assert!(plan(&[4 << 30], &[1]).is_ok());
        for (size, batch) in [(4 << 30, 2), (u64::MAX, 1), (u64::MAX, u64::MAX), (1, (1 << 20) + 1)]
        {
            let text = plan(&[size], &[batch]).unwrap_err().to_string();
            assert!(text.contains("choose smaller --sizes or --batches"), "{text}");
        }
    }

    #[test]
    fn a_round_is_bounded_but_never_empty() {
        for (block, batch) in [(1, 1), (1, 1 << 20), (4 << 30, 1), (4096, 128), (64 << 20, 1)] {
            let row = Row { op: Op::Read, block, batch };
            assert!((1..=1024).contains(&row.round_batches()));
            assert!(row.round_bytes() as u64 <= row.batch_bytes().max(64 << 20));
            assert!((1..=3).contains(&row.warm_up_batches()));
        }
    }
}
