//! The program `tensorferry`. Everything is in the library, so that Python can run it, too.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    let rerun = std::env::current_exe().map_or_else(|_| Vec::new(), |path| vec![path.into()]);
    let code = tensorferry_cli::main(std::env::args_os().skip(1).collect(), rerun);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
