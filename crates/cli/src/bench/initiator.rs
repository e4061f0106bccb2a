//! Measures the rows, one after the other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tensorferry::{Access, Config, Engine, RegisterOptions, SegmentName, Stats};

use super::beside::{Beside, Pairs};
use super::peer::Peer;
use super::plan::{Plan, Sockets};
use super::report::Report;
use crate::args::size_text;
use crate::interrupt::{Interrupt, Interrupted};
use crate::measure::progress::Progress;
use crate::measure::rounds::{Limits, Measured, Places, Rounds, Until, next_round};
use crate::measure::row::Row;
use crate::memory::{Buffer, Place};

/// What all rows share.
struct Initiator<'a> {
    plan: &'a Plan,
    rounds: Rounds<'a, Peer>,
    beside: Option<Beside>,
    /// The rows that fit the target's memory, and how many batches each thread has in a round of it.
    rows: Vec<(Row, usize)>,
}

/// How many pairs of the engine and plain sockets a row has at least, if its batches are short...
const PAIRS: u32 = 8;
/// ...and how long each of them is at most: lanes that are idle for longer are connected anew.
const LONGEST_TURN: Duration = Duration::from_millis(200);
/// What is left of a row's time that is not worth another round.
const CRUMB: u32 = 10;
const LONGEST_PINGING: Duration = Duration::from_millis(500);
/// A round could go on for as long as its row if nothing is verified, or the link is slow. Between rounds the target hears
/// that the initiator is still there, and the latencies of batches, each of which is kept until then, are summed up.
const LONGEST_ROUND: Duration = Duration::from_secs(10);

/// Runs the benchmark and prints what it found, also if it fails on the way.
///
/// # Errors
/// A transfer failed, a byte was wrong, or it was interrupted.
pub(crate) fn run(plan: &Plan, config: Config) -> Result<()> {
    let interrupt = Interrupt::listen().context("SIGINT cannot be listened for")?;
    let began = Instant::now();
    let mut report = Report::new(plan, &config);
    let outcome = measure_all(plan, config, &interrupt, &mut report);
    report.error = outcome.as_ref().err().map(crate::chain);
    report.interrupted = interrupt.is_set();
    report.close(began.elapsed(), outcome.as_ref().ok().copied());
    // Each of them whatever becomes of the others.
    let printed = report.print(plan.format);
    let drawn = plan.svg.as_deref().map_or(Ok(()), |file| report.draw(file));
    match outcome {
        // Most likely it is what the signal has led to.
        Err(error) if report.interrupted => return Err(error.context(Interrupted)),
        outcome => _ = outcome?,
    }
    if report.has_wrong_bytes() {
        bail!("what arrived is not what was sent; please report this with the output above")
    }
    if report.interrupted {
        return Err(Interrupted.into());
    }
    printed.and(drawn)?;
    ensure!(
        report.complete,
        "not every line was measured; please report this with the output above"
    );
    Ok(())
}

fn measure_all(
    plan: &Plan,
    config: Config,
    interrupt: &Interrupt,
    report: &mut Report,
) -> Result<Stats> {
    let mut initiator = Initiator::start(plan, config, interrupt, report)?;
    let rows = initiator.rows.clone();
    let expected = plan.expected(rows.len(), initiator.beside.is_some());
    let progress = Progress::begin(expected);
    progress.say(&format!(
        "{} lines of {:.1} s each; with all around them about {:.0} s",
        rows.len(),
        plan.seconds.as_secs_f64(),
        expected.as_secs_f64()
    ));
    for (row, batches) in rows {
        if interrupt.is_set() {
            break;
        }
        progress.row(&row.to_string());
        let (measured, pairs) = initiator
            .measure(row, batches, &|| progress.tick())
            .with_context(|| format!("while measuring {row}"))?;
        progress.done(&report.add(&measured, pairs.as_ref()));
    }
    let engine = initiator.rounds.engine;
    let stats = engine.stats();
    engine.close();
    Ok(stats)
}

impl<'a> Initiator<'a> {
    /// Starts an engine, finds out what the target is, and makes memory.
    fn start(
        plan: &'a Plan,
        config: Config,
        interrupt: &'a Interrupt,
        report: &mut Report,
    ) -> Result<Self> {
        let host = plan.host.clone().unwrap_or_else(|| host_for(&plan.target, &config));
        let engine = Engine::new(&host, config).context("the initiator's engine did not start")?;
        let segment = engine.open(&plan.target)?;
        ensure!(
            segment.name() != engine.name(),
            "{} is this program itself; give the name of another process",
            plan.target
        );
        let mut peer = Peer::meet(plan, &engine, &segment)?;
        let (addr, there) = peer.memory();
        let rows = fitting(plan, there, report)?;
        let needed =
            |(row, batches): &(Row, usize)| Places::memory_bytes(*row, plan.threads, *batches);
        let bytes = rows.iter().map(needed).max().unwrap_or(1);
        let memory = Buffer::for_demo(&engine, plan.memory, bytes)?;
        let local = RegisterOptions::default().with_access(Access::Local);
        memory.register(&engine, &local)?;
        if let Peer::Foreign(target) = &mut peer
            && plan.verify
        {
            target.prepare(&engine, bytes)?;
        }
        let beside = plain_stream(plan, &engine, &peer)?;
        let overwritten = plan.overwrites().then_some(bytes as u64);
        report.met(&engine, &peer, plan.memory.device_name(&engine), overwritten);
        report.sockets = beside.is_some();
        let mut rounds = Rounds::new(engine, segment, memory, (peer, addr), interrupt);
        rounds.verify = plan.verify;
        Ok(Self { plan, rounds, beside, rows })
    }

    /// Measures one row.
    ///
    /// # Errors
    /// A transfer that failed, a target that is gone. Wrong bytes are a result, not an error.
    fn measure(
        &mut self,
        row: Row,
        places_each: usize,
        tick: &dyn Fn(),
    ) -> Result<(Measured, Option<Pairs>)> {
        let threads = self.plan.threads;
        let footprint = Places::memory_bytes(row, threads, places_each);
        let places = self.rounds.places(row, threads, places_each)?;
        let mut measured = Measured::new(row)?;
        let warm_up =
            Limits { batches: places_each.min(3), until: Until::Passed(self.plan.seconds) };
        self.rounds.warm_up(&mut measured, &places, warm_up)?;
        let mut pairs =
            self.beside.as_mut().map(|beside| beside.begin(row, footprint)).transpose()?;
        let turn = (self.plan.seconds / PAIRS).min(LONGEST_TURN);
        // As if it had taken no time: the next rounds grow until it is known how long one takes.
        let mut last = (warm_up.batches, Duration::ZERO);
        while self.goes_on(&measured, self.plan.seconds, turn) {
            let before = (measured.moved_bytes(), measured.elapsed);
            let end = match &pairs {
                Some(_) => (measured.elapsed + turn).min(self.plan.seconds),
                None => self.plan.seconds,
            };
            while self.goes_on(&measured, end, turn) {
                last = self.round(&mut measured, (&places, places_each), last, end)?;
                tick();
            }
            let moved = (measured.moved_bytes() - before.0, measured.elapsed - before.1);
            if let (Some(beside), Some(pairs)) = (&mut self.beside, &mut pairs)
                && moved.0 > 0
                && !self.rounds.interrupt.is_set()
            {
                beside.pair(pairs, moved)?;
                self.rounds.warm_up(&mut measured, &places, warm_up)?;
            }
        }
        if let (Some(beside), Some(pairs)) = (&mut self.beside, &mut pairs)
            && !self.rounds.interrupt.is_set()
        {
            beside.ping(pairs, row, (self.plan.seconds / 4).min(LONGEST_PINGING))?;
        }
        Ok((measured, pairs))
    }

    /// One round that is to end when the row has been measured for `end`; how many batches each thread has moved in it, and
    /// how long that took. `last` is the same of the round before it.
    fn round(
        &mut self,
        measured: &mut Measured,
        (places, most): (&Places, usize),
        last: (usize, Duration),
        end: Duration,
    ) -> Result<(usize, Duration)> {
        let before = (measured.batches, measured.elapsed);
        let left = end.saturating_sub(measured.elapsed);
        let batches = match self.plan.verify {
            true => next_round(last.0, last.1, left).min(most),
            // What is not verified may be moved again and again.
            false => usize::MAX,
        };
        let until = Until::Passed(lasting(left));
        self.rounds.round(measured, places, Limits { batches, until })?;
        let moved = (measured.batches - before.0) as usize / self.plan.threads;
        Ok((moved, measured.elapsed.saturating_sub(before.1)))
    }

    fn goes_on(&self, measured: &Measured, end: Duration, turn: Duration) -> bool {
        measured.mismatch.is_none()
            && !self.rounds.interrupt.is_set()
            && measured.elapsed + turn / CRUMB < end
    }
}

/// How long a round may last of a row that has so much time left.
fn lasting(left: Duration) -> Duration {
    left.min(LONGEST_ROUND)
}

/// The rows that fit the target's memory; those that nobody asked for are left out if they do not.
fn fitting(plan: &Plan, there: u64, report: &mut Report) -> Result<Vec<(Row, usize)>> {
    let mut rows = Vec::new();
    for row in &plan.rows {
        match row.batches_of_thread(plan.threads, there) {
            Some(batches) => rows.push((*row, batches)),
            None if plan.usual_rows => report.left_out.push(row.to_string()),
            None => bail!(
                "a batch of {} x {} for each of {} threads does not fit the {} that {} lends; start `tensorferry bench \
                 target` with a larger --size, or choose smaller --sizes or --batches or fewer --threads",
                size_text(row.block),
                row.batch,
                plan.threads,
                size_text(there),
                plan.target
            ),
        }
    }
    ensure!(
        !rows.is_empty(),
        "no line fits the {} that {} lends; choose --sizes and --batches that do",
        size_text(there),
        plan.target
    );
    Ok(rows)
}

/// The stream for plain sockets, where they can be measured beside.
fn plain_stream(plan: &Plan, engine: &Engine, peer: &Peer) -> Result<Option<Beside>> {
    let host_memory = |place: &str| place == Place::Host.to_string();
    let why_not = match peer {
        Peer::Foreign(_) => Some("the target is no `tensorferry bench target`"),
        _ if plan.memory != Place::Host => Some("the memory of this end is not the host's"),
        Peer::Bench(target) if !host_memory(&target.welcome.memory.place) => {
            Some("the memory of the target is not the host's")
        }
        Peer::Bench(_) => None,
    };
    match (plan.sockets, why_not, peer) {
        (Sockets::No, ..) | (Sockets::WherePossible, Some(_), _) => Ok(None),
        (Sockets::Required, Some(why), _) => {
            bail!("--sockets: plain sockets cannot be measured beside, since {why}")
        }
        (_, None, Peer::Bench(target)) => {
            let plain = target.plain(engine.config().connect_timeout)?;
            Ok(Some(Beside { plain, name: plan.target.clone() }))
        }
        (_, None, Peer::Foreign(_)) => Ok(None),
    }
}

/// The address of this machine that leads to the target. Nothing is sent to find it out: a datagram socket that is
/// connected has only been routed.
fn host_for(target: &str, config: &Config) -> String {
    let local = |to: SocketAddr| {
        let any = match to {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    };
    let named = SegmentName::parse(target, config.control_port).ok();
    let found = named.and_then(|name| (name.host.as_str(), name.port).to_socket_addrs().ok());
    let ip = found.and_then(|mut addresses| addresses.find_map(local));
    // What is wrong with the target's name, opening it says.
    ip.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::desk::IDLE;
    use super::*;

    #[test]
    fn a_round_ends_long_before_the_target_takes_its_initiator_for_hung() {
        let (moment, day) = (Duration::from_millis(50), Duration::from_secs(86_400));
        assert_eq!(lasting(moment), moment);
        assert!(lasting(day) * 10 < IDLE);
    }

    #[test]
    fn the_initiators_host_is_the_address_that_leads_to_the_target() {
        let config = Config::default();
        for (target, host) in
            [("127.0.0.1:15000", "127.0.0.1"), ("localhost:1", "127.0.0.1"), ("", "127.0.0.1")]
        {
            assert_eq!(host_for(target, &config), host, "{target}");
        }
    }
}
