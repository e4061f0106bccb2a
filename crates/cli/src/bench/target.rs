//! The target: an engine that lends memory, and a desk that initiators come to.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tensorferry::{Config, Engine, RegisterOptions};

use super::card::Card;
use super::desk::{Desk, News, State};
use super::port::{self, Welcome};
use crate::args::{BenchTargetArgs, size_text};
use crate::interrupt::{Interrupt, Interrupted};
use crate::machine::Machine;
use crate::measure::figures::Memory;
use crate::measure::orders::Answer;
use crate::measure::rounds::GLANCE;
use crate::memory::Buffer;

/// What `--json` says when the target is ready.
#[derive(Serialize)]
struct Ready<'a> {
    program: &'static str,
    version: &'static str,
    segment: &'a str,
    /// What to type on the other machine.
    command: String,
    control_port: u16,
    data_port: u16,
    orders_port: u16,
    memory: &'a Memory,
    memory_bytes: usize,
}

/// Lends memory until it is interrupted, or until the first initiator has gone if there is to be only one.
///
/// # Errors
/// No engine, no memory, no port; or it was interrupted.
pub(crate) fn serve(args: &BenchTargetArgs, config: Config) -> Result<()> {
    let interrupt = Interrupt::listen().context("SIGINT cannot be listened for")?;
    let engine = Engine::new(&args.host, config).context("the target's engine did not start")?;
    let bytes = usize::try_from(args.size.bytes()).context("more bytes than addresses")?;
    let memory = Buffer::new(&engine, args.memory, bytes)
        .context("there is no memory to lend; use a smaller --size, or another --memory")?;
    memory.register(&engine, &RegisterOptions::default())?;
    let listener = port::listen(&engine, &args.host)?;
    let at = listener.local_addr().context("the order port cannot be read")?;

    let device = args.memory.device_name(&engine);
    let machine = Machine::look();
    let welcome = Welcome {
        token: String::new(),
        version: tensorferry::VERSION.to_owned(),
        memory: Memory { place: args.memory.to_string(), device_name: device.clone() },
        machine: serde_json::to_value(&machine)?,
        machine_text: machine.to_string(),
    };
    let card = Card {
        version: tensorferry::VERSION.to_owned(),
        orders_port: at.port(),
        addr: memory.addr(),
        len_bytes: bytes as u64,
    };
    card.publish(&engine)?;
    announce(args, &engine, at, &welcome.memory)?;
    let ready = Answer::Ready { segment: engine.name().to_owned(), addr: memory.addr(), device };
    let (sender, news) = channel();
    let desk = Arc::new(Desk { memory, ready, welcome, news: sender, state: State::default() });
    thread::spawn({
        let desk = Arc::clone(&desk);
        move || desk.take_on(&listener)
    });
    let outcome = loop {
        if interrupt.is_set() {
            break Err(Interrupted.into());
        }
        match news.recv_timeout(GLANCE) {
            Ok(news) => {
                tell(&news);
                if args.once && matches!(news, News::Went { .. }) {
                    break Ok(());
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the order port is not served any more"),
        }
    };
    desk.close(at);
    engine.close();
    outcome
}

/// Says what to type on the other machine.
fn announce(
    args: &BenchTargetArgs,
    engine: &Engine,
    orders: SocketAddr,
    memory: &Memory,
) -> Result<()> {
    let command = format!("tensorferry bench initiator {}", engine.name());
    let text = if args.json {
        serde_json::to_string(&Ready {
            program: "tensorferry bench target",
            version: tensorferry::VERSION,
            segment: engine.name(),
            command,
            control_port: engine.control_port(),
            data_port: engine.data_port(),
            orders_port: orders.port(),
            memory,
            memory_bytes: args.size.bytes() as usize,
        })?
    } else {
        let only_here = if orders.ip().is_loopback() {
            "\n(Only this machine can reach it; with --host ADDRESS others can.)"
        } else {
            ""
        };
        format!(
            "tensorferry {} lends {} of {}, which initiators overwrite. On the other machine, type:\n\n    {command}\n\n\
             TCP ports {}, {} and {} have to be reachable from there. Ctrl-C ends it.{only_here}",
            tensorferry::VERSION,
            size_text(args.size.bytes()),
            memory.text(),
            engine.control_port(),
            engine.data_port(),
            orders.port(),
        )
    };
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).context("stdout cannot be written")
}

fn tell(news: &News) {
    let line = match news {
        News::Came { who, version } => format!("{who} measures (version {version})"),
        News::Went { who, after, why: None } => {
            format!("{who} has gone after {:.1} s", after.as_secs_f64())
        }
        News::Went { who, after, why: Some(why) } => {
            format!("{who} was lost after {:.1} s: {why}", after.as_secs_f64())
        }
        News::TurnedAway { who, why } => format!("{who} was turned away: {why}"),
    };
    // What a stranger has said may hold anything. Without a stderr there is nobody to tell.
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let _ = writeln!(io::stderr(), "{line}");
}
