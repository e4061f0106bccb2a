//! `scripts/simgpu` ends here: copies a built simulator under the vendors' names.

use std::env;
use std::io::{self, Write as _};
use std::path::Path;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [library, folder, names @ ..] = &arguments[..] else {
        return Err(io::Error::other("usage: install LIBRARY FOLDER [NAME...]"));
    };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut out = io::stdout().lock();
    for path in tensorferry_simgpu::install(Path::new(library), Path::new(folder), &names)? {
        writeln!(out, "{}", path.display())?;
    }
    Ok(())
}
