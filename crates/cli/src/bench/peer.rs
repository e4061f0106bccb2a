//! The target, as the initiator sees it: one that takes orders, or one that does not.

use std::io::{self, BufReader};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tensorferry::{Engine, Segment, SegmentName};

use super::card::{Card, PROTOCOL};
use super::foreign::Foreign;
use super::plan::Plan;
use super::port::{Opening, Welcome, enter, watch};
use crate::measure::link::{Link, Lost, Obedient, unexpected};
use crate::measure::orders::{Answer, Order};
use crate::measure::rounds::{Part, Remote};
use crate::pattern::{Mismatch, Pattern};
use crate::plain::Plain;

/// The other end.
pub(crate) enum Peer {
    Bench(Box<BenchTarget>),
    Foreign(Foreign),
}

/// A `bench target` that has taken this initiator on.
pub(crate) struct BenchTarget {
    link: Link,
    /// By which the connection is ended.
    stream: TcpStream,
    /// Its segment name.
    name: String,
    /// Where its order port is.
    host: String,
    card: Card,
    pub(crate) welcome: Welcome,
}

/// How long an order may take that is about no bytes...
const PATIENCE: Duration = Duration::from_secs(30);
/// ...and how much longer for each byte that is filled or compared.
const PATIENCE_PER_BYTE: Duration = Duration::from_nanos(20);

impl Peer {
    /// Finds out what the target is, and makes it ready.
    ///
    /// # Errors
    /// It is busy, it cannot be reached, or it is none that may be overwritten.
    pub(crate) fn meet(plan: &Plan, engine: &Engine, segment: &Segment) -> Result<Self> {
        let buffers = segment.buffers()?;
        match Card::find(segment, &buffers)? {
            Some(card) => {
                let target = BenchTarget::meet(engine, segment, card)?;
                Ok(Self::Bench(Box::new(target)))
            }
            None => {
                let overwriting = (plan.overwrites(), plan.overwrite);
                Foreign::choose(segment, &buffers, overwriting).map(Self::Foreign)
            }
        }
    }

    /// Where its memory is, and how much of it there is.
    pub(crate) fn memory(&self) -> (u64, u64) {
        match self {
            Self::Bench(target) => (target.card.addr, target.card.len_bytes),
            Self::Foreign(target) => (target.buffer().addr, target.buffer().len),
        }
    }
}

impl BenchTarget {
    fn meet(engine: &Engine, segment: &Segment, card: Card) -> Result<Self> {
        let host = SegmentName::parse(segment.name(), engine.config().control_port)?.host;
        let version = tensorferry::VERSION.to_owned();
        let opening = Opening::Orders { protocol: PROTOCOL, version };
        let timeout = engine.config().connect_timeout;
        let (stream, welcome) = enter(&host, card.orders_port, timeout, &opening)?;
        watch(&stream).context("the order connection takes no settings")?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let link = Link::new(stream.try_clone()?, BufReader::new(stream.try_clone()?));
        let name = segment.name().to_owned();
        let mut target = Self { link, stream, name, host, card, welcome };
        match target.answer(0)? {
            Answer::Ready { addr, .. } => ensure!(
                addr == target.card.addr,
                "the order port is not that of {}: it has other memory; start the target again",
                target.name
            ),
            other => return Err(unexpected(&other)),
        }
        Ok(target)
    }

    /// A plain stream to its process.
    ///
    /// # Errors
    /// It cannot be connected to.
    pub(crate) fn plain(&self, timeout: Duration) -> Result<Plain> {
        let opening = Opening::Plain { token: self.welcome.token.clone() };
        let (stream, _) = enter(&self.host, self.card.orders_port, timeout, &opening)?;
        Ok(Plain::new(stream)?)
    }

    #[cold]
    fn lost(&self, lost: Lost) -> anyhow::Error {
        let Self { name, host, card, .. } = self;
        let port = card.orders_port;
        match lost {
            Lost::Finished => anyhow!("{name} was told that there are no more orders"),
            Lost::Gone(why) => anyhow!(
                "the target {name} is gone: its order connection ({host} port {port}) has ended{}; does it still run?",
                cause(why)
            ),
            Lost::Unreadable(why) => anyhow!(
                "the target {name} is lost: its order connection ({host} port {port}) cannot be read{}; does it still run?",
                cause(Some(why))
            ),
            Lost::Silent(patience) => anyhow!(
                "the target {name} has not answered an order for {patience:?}; is its machine overloaded, or was the \
                 process stopped?"
            ),
            Lost::Garbled { line, why } => {
                anyhow!("the target {name} said {line:?}, which is no answer: {why}")
            }
            Lost::Refused { why } => anyhow!("the target {name} refused an order: {why}"),
        }
    }
}

fn cause(why: Option<io::Error>) -> String {
    why.map_or_else(String::new, |why| format!(" ({why})"))
}

impl Obedient for BenchTarget {
    fn order(&mut self, order: Order) -> Result<()> {
        self.link.order(&order).map_err(|lost| self.lost(lost))
    }

    fn answer(&mut self, len_bytes: usize) -> Result<Answer> {
        let bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        let patience = PATIENCE + PATIENCE_PER_BYTE * bytes;
        self.link.answer(patience).map_err(|lost| self.lost(lost))
    }
}

impl Drop for BenchTarget {
    fn drop(&mut self) {
        // The thread that reads answers has a copy of the stream, which alone would keep it open.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Remote for Peer {
    fn fill(&mut self, pattern: Pattern, len_bytes: usize) -> Result<()> {
        match self {
            Self::Bench(target) => target.fill(pattern, len_bytes),
            Self::Foreign(target) => target.fill(pattern, len_bytes),
        }
    }

    fn filled(&mut self, len_bytes: usize) -> Result<()> {
        match self {
            Self::Bench(target) => target.filled(len_bytes),
            Self::Foreign(target) => target.filled(len_bytes),
        }
    }

    fn check(&mut self, pattern: Pattern, part: Part) -> Result<Option<Mismatch>> {
        match self {
            Self::Bench(target) => target.check(pattern, part),
            Self::Foreign(target) => target.check(pattern, part),
        }
    }

    fn process_time(&mut self) -> Result<Option<Duration>> {
        match self {
            Self::Bench(target) => target.process_time(),
            Self::Foreign(target) => target.process_time(),
        }
    }
}
