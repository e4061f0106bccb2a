//! What the demo is going to do: the arguments, resolved.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tensorferry::Op;
use tensorferry::gpu::{DeviceId, Vendor};

use crate::args::DemoArgs;
use crate::measure::row::{Format, MOST_REQUESTS, Row, fits, pairs};
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

impl Plan {
    /// Bytes of memory that each process needs.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.rows.iter().map(|row| row.round_bytes()).max().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Count, Seconds, Size};
    use crate::measure::row::{BATCHES, SIZES, USUAL};

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
}
