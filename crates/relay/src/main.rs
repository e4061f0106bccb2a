//! The program: a relay that is told what to do on standard input.
#![forbid(unsafe_code)]

use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use tensorferry_relay::{Answer, Command, Relay};

/// A TCP relay before an engine that misbehaves on command.
///
/// It takes orders as JSON lines on standard input and answers each with one line; docs/relay.md lists them. It
/// ends with its input.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The control port of the engine, host:port
    target: String,
    /// How many relays stand before it, each with ports of its own
    #[arg(long, default_value_t = 1)]
    copies: usize,
    /// The address of this machine to listen at
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
}

fn main() -> ExitCode {
    let args = Args::parse();
    more_descriptors();
    match Relay::start_on(args.host, &args.target, args.copies) {
        Ok(relay) => match serve(&relay) {
            Ok(()) => ExitCode::SUCCESS,
            // Whoever gave the orders is gone.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("tensorferry-relay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Many copies have more sockets than a process may usually have.
fn more_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If it fails it goes on with what there is.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

fn serve(relay: &Relay) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", json!({ "ready": relay.addresses() }))?;
    out.flush()?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let command = serde_json::from_str::<Command>(&line);
        let quit = matches!(command, Ok(Command::Quit {}));
        let answer = match command {
            Ok(command) => command.carry_out(relay),
            Err(error) => Answer::Error(error.to_string()),
        };
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
        if quit {
            break;
        }
    }
    Ok(())
}
