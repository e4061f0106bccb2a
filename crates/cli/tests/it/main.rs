//! The program as people run it: the built binary, its exit codes, its output, and what is left
//! when it is gone.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bench;
mod demo;
mod doctor;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The built program, with no setting of this environment.
fn tensorferry() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tensorferry"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("MC_") || text.starts_with("TENSORFERRY_") {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    tensorferry().args(args).output().unwrap()
}

/// The simulator's library; `None`, with a line that says so, where it was not built.
fn simulator() -> Option<PathBuf> {
    let built = tensorferry_simgpu::library();
    if built.is_none() {
        eprintln!("skipped: the simulator was not built");
    }
    built
}

/// A new and empty folder of one test's own.
fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}
