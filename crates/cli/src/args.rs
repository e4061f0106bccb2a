//! What can be typed. Parsing happens here and is typed; what it means is resolved in the
//! subcommand's own folder.

use std::fmt;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::doctor::{PATIENCE, Requirement};
use crate::memory::Place;

/// Moves tensors and KV-cache blocks between the memories of machines over plain TCP.
#[derive(Debug, Parser)]
#[command(
    name = "tensorferry",
    version = tensorferry::VERSION,
    arg_required_else_help = true,
    after_help = "Settings come from the environment (TENSORFERRY_*); docs/settings.md lists them.\n\
                  Exit codes: 0 done, 1 something failed, 2 the arguments or settings make no sense, \
                  130 interrupted (Ctrl-C or kill)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Moves memory between two processes of this machine, and checks every byte
    ///
    /// A second process is started as the target. This one, the initiator, writes to it and reads
    /// from it at several block and batch sizes over TCP. What arrived is compared byte by byte,
    /// outside of the measured time.
    ///
    /// The exit code is 0 only if every line was measured and every byte was right. Ctrl-C ends it with what was
    /// measured so far and the exit code 130; the document of --json then says "interrupted": true.
    Demo(DemoArgs),
    /// Measures transfers between two machines, or two processes, and checks every byte
    ///
    /// `bench target` on one machine lends memory and prints what to type on the other one; `bench initiator` there
    /// writes to it and reads from it at several block and batch sizes. docs/bench.md says how it measures.
    Bench(BenchArgs),
    /// Says what can be moved on this machine, and what stands in the way
    ///
    /// Looks for the GPU libraries of all vendors and initialises what it finds, binds ports, starts engines on
    /// this machine's addresses, and moves host memory between two of them over TCP. Nothing is allocated on a
    /// GPU, unless --require or --move asks for it.
    ///
    /// The exit code is 0 if host memory moves, and what was required.
    Doctor(DoctorArgs),
    /// The second process of `demo`; it obeys orders on stdin and ends when stdin does
    #[command(name = "__target", hide = true)]
    DemoTarget(DemoTargetArgs),
    /// One of two processes that show what sockets alone move, for scripts/compare; it obeys orders on stdin
    #[command(name = "__plain", hide = true)]
    Plain,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// About how many seconds it takes in all, the checks included; each line gets at least one round, however long
    #[arg(long, value_name = "N", default_value = "10", allow_negative_numbers = true)]
    pub(crate) seconds: Seconds,
    /// Block sizes, such as 4KiB,1MiB; each is combined with each of --batches
    ///
    /// A batch is at most 4 GiB. Without --batches, each size is moved in batches of 1 and, where they fit, of 16.
    /// Without --sizes and --batches: 4KiB x 1, 4KiB x 128, 64KiB x 64, 1MiB x 16, 64MiB x 1.
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub(crate) sizes: Vec<Size>,
    /// Batch sizes in requests, such as 1,128; each is combined with each of --sizes
    ///
    /// At most 1048576. Without --sizes, the blocks are 4KiB, 64KiB and 1MiB, as far as such batches fit 4 GiB.
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub(crate) batches: Vec<Count>,
    /// Where the memory is: cpu, cuda:N, musa:N or hip:N; one for both ends, or INITIATOR,TARGET [default: cpu]
    #[arg(long, value_name = "PLACE", value_delimiter = ',')]
    pub(crate) memory: Vec<Place>,
    /// Use simulated GPUs, whose figures say nothing about real ones; without --memory, cuda:0 at both ends
    ///
    /// The library of the simulator is LIBRARY, or the one that TENSORFERRY_SIMULATOR names, or
    /// libtensorferry_simgpu.so beside this program. docs/simgpu.md has the variables that set its behaviour.
    #[arg(long, value_name = "LIBRARY", num_args = 0..=1)]
    pub(crate) simulate: Option<Option<PathBuf>>,
    /// The address or name that both processes use; it must be one of this machine
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Print one JSON document instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) end: BenchEnd,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchEnd {
    /// Lends memory to initiators, one after the other, until Ctrl-C
    ///
    /// Whoever reaches its ports can read and write the memory that it has made for this: use it on networks that you
    /// trust. It listens on three ports, all of TENSORFERRY_PORTS (15000-17000): two of the engine's, and one on which
    /// the initiator says what to fill and compare.
    Target(BenchTargetArgs),
    /// Measures transfers to and from TARGET, and prints a table
    ///
    /// TARGET is what `bench target` prints, or the segment name of any other engine that lends memory. The contents of
    /// the target's memory are OVERWRITTEN: what `bench target` lends was made for that, with anything else --overwrite has
    /// to be given.
    ///
    /// The exit code is 0 only if every line was measured and every byte was right. Ctrl-C ends it with what was
    /// measured so far and the exit code 130; the document of --json then says "interrupted": true.
    Initiator(BenchInitiatorArgs),
}

#[derive(Debug, Args)]
pub(crate) struct BenchTargetArgs {
    /// The address or name of this machine that the initiator reaches it by; the default is for this machine only
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// How much memory is lent; a batch of each of the initiator's threads has to fit
    #[arg(long, value_name = "BYTES", default_value = "256MiB", allow_negative_numbers = true)]
    pub(crate) size: Size,
    /// Where the memory is: cpu, cuda:N, musa:N or hip:N
    #[arg(long, value_name = "PLACE", default_value = "cpu")]
    pub(crate) memory: Place,
    /// End when the first initiator has gone
    #[arg(long)]
    pub(crate) once: bool,
    /// Print one line of JSON when it is ready, instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchInitiatorArgs {
    /// The target's segment name, HOST:PORT
    pub(crate) target: String,
    /// What is measured
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "write,read")]
    pub(crate) op: Vec<Operation>,
    /// Block sizes, such as 4KiB,1MiB; each is combined with each of --batches
    ///
    /// A batch is at most 4 GiB. Without --batches, each size is moved in batches of 1 and, where they fit, of 16.
    /// Without --sizes and --batches: 4KiB x 1, 4KiB x 128, 64KiB x 64, 1MiB x 16, 64MiB x 1.
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub(crate) sizes: Vec<Size>,
    /// Batch sizes in requests, such as 1,128; each is combined with each of --sizes
    ///
    /// At most 1048576. Without --sizes, the blocks are 4KiB, 64KiB and 1MiB, as far as such batches fit 4 GiB.
    #[arg(long, value_name = "LIST", value_delimiter = ',', allow_negative_numbers = true)]
    pub(crate) batches: Vec<Count>,
    /// How many threads move batches at the same time, each in a part of the memory of its own; figures are of all
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) threads: u16,
    /// Seconds of measured time for each line; filling, comparing and plain sockets take about as long again or more
    #[arg(long, value_name = "N", default_value = "2", allow_negative_numbers = true)]
    pub(crate) seconds: Seconds,
    /// Where the memory of this end is: cpu, cuda:N, musa:N or hip:N
    #[arg(long, value_name = "PLACE", default_value = "cpu")]
    pub(crate) memory: Place,
    /// The address or name of this machine for its own engine [default: the address that leads to the target]
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// Neither fill the memory before a round nor compare it afterwards
    #[arg(long)]
    pub(crate) no_verify: bool,
    /// Fail if plain sockets cannot be measured beside; without this they are where they can be
    ///
    /// That is between host memory of both ends, and with `bench target` at the other one.
    #[arg(long, conflicts_with = "no_sockets")]
    pub(crate) sockets: bool,
    /// Do not measure plain sockets beside
    #[arg(long)]
    pub(crate) no_sockets: bool,
    /// Allow the memory of a target that is no `bench target` to be OVERWRITTEN
    ///
    /// Its largest buffer is used from its first byte on. Do not point this at a server whose cache somebody needs.
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Print one JSON document instead of the table; docs/bench.md describes it
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw throughput and latency by block size into this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// What the initiator does.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Operation {
    Write,
    Read,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Fail unless memory of such a device moves: cuda, musa, hip, or gpu for any of them
    ///
    /// It is moved to find out, as with --move, on one device after the other until it has moved on one.
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    pub(crate) require: Vec<Requirement>,
    /// Move memory of each device that is found, too, and fail where it does not move
    ///
    /// This makes a context on each of them, which takes hundreds of MiB of its memory until the program ends.
    #[arg(long = "move")]
    pub(crate) moving: bool,
    /// How many seconds each vendor's GPU library may take to answer; one that takes longer is not used
    #[arg(long, value_name = "SECONDS", default_value_t = Seconds(PATIENCE), allow_negative_numbers = true)]
    pub(crate) patience: Seconds,
    /// Print one JSON document instead of the tables; docs/doctor.md describes it
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DemoTargetArgs {
    #[arg(long)]
    pub(crate) host: String,
    #[arg(long)]
    pub(crate) bytes: Size,
    #[arg(long)]
    pub(crate) memory: Place,
}

/// A number of bytes that is not zero: `4096`, `4KiB`, `1MiB`.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Size(NonZeroU64);

/// A number of things that is not zero.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Count(NonZeroU64);

/// A time from 0.1 s to a day.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Seconds(Duration);

/// Why a text is none of the above; clap adds which argument it was for.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Unparsed(String);

const UNITS: [(&str, u32); 4] = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

impl Size {
    pub(crate) fn bytes(self) -> u64 {
        self.0.get()
    }

    #[cfg(test)]
    pub(crate) fn new(bytes: u64) -> Self {
        Self(NonZeroU64::new(bytes).unwrap())
    }
}

impl Count {
    pub(crate) fn get(self) -> u64 {
        self.0.get()
    }

    #[cfg(test)]
    pub(crate) fn new(count: u64) -> Self {
        Self(NonZeroU64::new(count).unwrap())
    }
}

impl Seconds {
    pub(crate) fn duration(self) -> Duration {
        self.0
    }
}

impl FromStr for Size {
    type Err = Unparsed;

    fn from_str(text: &str) -> Result<Self, Unparsed> {
        let expected =
            || Unparsed("expected a size of at least one byte, such as 4096, 64KiB or 1MiB".into());
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
            .unwrap_or((text, 0));
        if number.ends_with(|c: char| c.is_ascii_alphabetic()) {
            return Err(Unparsed("the units are B, KiB (1024 bytes), MiB and GiB".into()));
        }
        let number: NonZeroU64 = number.trim().parse().map_err(|_| expected())?;
        let bytes = number.get().checked_mul(1 << shift).and_then(NonZeroU64::new);
        bytes.map(Self).ok_or_else(expected)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&size_text(self.bytes()))
    }
}

/// The shortest exact form: `64 KiB`, `1 MiB`, `4095 B`.
pub(crate) fn size_text(bytes: u64) -> String {
    let whole = |shift: u32| bytes.trailing_zeros() >= shift;
    let (unit, shift) = UNITS.into_iter().find(|(_, shift)| whole(*shift)).unwrap_or(("B", 0));
    format!("{} {unit}", bytes >> shift)
}

impl FromStr for Count {
    type Err = Unparsed;

    fn from_str(text: &str) -> Result<Self, Unparsed> {
        let count = text
            .trim()
            .parse()
            .map_err(|_| Unparsed("expected a whole number of requests, at least 1".into()))?;
        Ok(Self(count))
    }
}

impl FromStr for Seconds {
    type Err = Unparsed;

    fn from_str(text: &str) -> Result<Self, Unparsed> {
        let number = text.strip_suffix('s').unwrap_or(text).trim().parse::<f64>();
        match number {
            Ok(secs) if (0.1..=86_400.0).contains(&secs) => Ok(Self(Duration::from_secs_f64(secs))),
            _ => Err(Unparsed("expected seconds from 0.1 to 86400, such as 10 or 0.5".into())),
        }
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_secs_f64().fmt(f)
    }
}

impl fmt::Display for Unparsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unparsed {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_shown_alike() {
        for (text, bytes, shown) in [
            ("1", 1, "1 B"),
            ("4095", 4095, "4095 B"),
            ("4096B", 4096, "4 KiB"),
            ("64KiB", 65536, "64 KiB"),
            ("64 KiB", 65536, "64 KiB"),
            ("1024KiB", 1 << 20, "1 MiB"),
            ("3GiB", 3 << 30, "3 GiB"),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, shown), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_what_would_be() {
        let unit = "the units are B, KiB (1024 bytes), MiB and GiB";
        let size = "expected a size of at least one byte, such as 4096, 64KiB or 1MiB";
        for (text, why) in [
            ("64KB", unit),
            ("64k", unit),
            ("1Mib", unit),
            ("", size),
            ("KiB", size),
            ("0", size),
            ("0KiB", size),
            ("-1", size),
            ("1.5MiB", size),
            ("17179869184GiB", size),
            ("99999999999999999999", size),
        ] {
            assert_eq!(text.parse::<Size>(), Err(Unparsed(why.into())), "{text}");
        }
    }

    #[test]
    fn seconds_have_bounds() {
        assert_eq!("0.5".parse(), Ok(Seconds(Duration::from_millis(500))));
        assert_eq!("10s".parse(), Ok(Seconds(Duration::from_secs(10))));
        for text in ["0", "-1", "nan", "inf", "1e9", "", "ten"] {
            assert!(text.parse::<Seconds>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_definition_of_the_arguments_is_sound() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
