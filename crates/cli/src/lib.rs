//! The program `tensorferry`, as a library: the binary and the Python package run the same [`main`].
//!
//! It only translates between people and the engine. It does not end the process by itself, unless a
//! GPU library hangs that its exit handlers would wait for; and bad input is an exit code and a text on
//! stderr, not a panic.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cpu;
mod demo;
mod doctor;
mod interrupt;
mod machine;
mod measure;
mod memory;
mod pattern;
mod plain;

use std::ffi::OsString;
use std::io::{self, IsTerminal};

use clap::Parser;
use tensorferry::{Config, LogLevel};
use tracing_subscriber::filter::LevelFilter;

use crate::args::{BenchEnd, Cli, Command};
use crate::interrupt::Interrupted;

/// Everything that was asked for was done.
const OK: i32 = 0;
/// Something failed; stderr says what.
const FAILED: i32 = 1;
/// The arguments or the environment could not be understood.
const USAGE: i32 = 2;
/// Ctrl-C or `kill` ended it; what shells say of a program that SIGINT has ended.
const INTERRUPTED: i32 = 130;

/// Runs the program with `args` (without the program's name) and returns its exit code: 0 if all
/// went well, 1 if something failed, 2 if the arguments or the environment make no sense, 130 if it
/// was interrupted.
///
/// `rerun` is the command that runs this same program again, for subcommands that need a second
/// process: the path of the binary, or Python's `[sys.executable, "-m", "tensorferry"]`.
#[must_use]
pub fn main(args: Vec<OsString>, rerun: Vec<OsString>) -> i32 {
    let cli = match Cli::try_parse_from(std::iter::once(OsString::from("tensorferry")).chain(args))
    {
        Ok(cli) => cli,
        Err(told) => {
            // Help and version are "errors" with exit code 0. A closed stdout is nobody's fault.
            let _ = told.print();
            return told.exit_code();
        }
    };
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => {
            complain(&error);
            return USAGE;
        }
    };
    log_to_stderr(config.log);
    let outcome = match cli.command {
        Command::Demo(args) => match args.resolve() {
            Ok(plan) => demo::run(&plan, config, &rerun),
            Err(error) => {
                complain(&error);
                return USAGE;
            }
        },
        Command::DemoTarget(args) => demo::serve(&args, config),
        Command::Bench(args) => match args.end {
            BenchEnd::Target(args) => bench::serve(&args, config),
            BenchEnd::Initiator(args) => match args.resolve() {
                Ok(plan) => bench::run(&plan, config),
                Err(error) => {
                    complain(&error);
                    return USAGE;
                }
            },
        },
        Command::Doctor(args) => doctor::run(&args, &config),
        Command::Plain => plain::serve(),
    };
    exit_code(outcome)
}

/// Says what went wrong, if something did.
pub(crate) fn exit_code(outcome: anyhow::Result<()>) -> i32 {
    match outcome {
        Ok(()) => OK,
        Err(error) => {
            complain(&chain(&error));
            if error.is::<Interrupted>() { INTERRUPTED } else { FAILED }
        }
    }
}

/// What `tensorferry doctor --json` prints, for programs that are this process; docs/doctor.md describes it.
/// `require` and `moving` are the options of these names.
///
/// # Errors
/// A text for people: a malformed setting in the environment, or something required that cannot be.
pub fn doctor(require: &[String], moving: bool) -> Result<String, String> {
    doctor::document(require, moving).map_err(|error| chain(&error))
}

fn complain(what: &dyn std::fmt::Display) {
    use std::io::Write;
    // A closed stderr leaves only the exit code to speak.
    let _ = writeln!(io::stderr(), "tensorferry: {what}");
}

/// What went wrong and why, in one line. An error of the engine quotes its cause, which is not said again.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if said.is_empty() {
            said = cause;
        } else if !said.contains(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said
}

/// Shows what the engine logs, unless whoever runs this program shows it already.
fn log_to_stderr(level: LogLevel) {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let shown = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // An error means that records are shown already.
    let _ = shown.try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_was_quoted_is_not_said_again() {
        let error = anyhow::anyhow!("no such file").context("open: no such file; is it there?");
        assert_eq!(
            chain(&error.context("while starting")),
            "while starting: open: no such file; is it there?"
        );
        let error = anyhow::anyhow!("no such file").context("the demo did not start");
        assert_eq!(chain(&error), "the demo did not start: no such file");
    }
}
