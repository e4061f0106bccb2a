//! Linker settings of the shared library, and the stamp by which two copies of one build know each
//! other.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::{env, fs, path::Path};

fn main() {
    // `install` writes the vendor's name over this one; it is longer than any of theirs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtensorferry_simgpu.so");
    // Worker threads outlive every handle, as the vendors' own do.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Another copy in the same process must never answer for this one.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Many copies are made of it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-debug");
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=build.rs");

    let mut stamp = DefaultHasher::new();
    for name in ["OPT_LEVEL", "DEBUG", "PROFILE", "TARGET", "CARGO_PKG_VERSION", "RUSTC"] {
        env::var(name).unwrap_or_default().hash(&mut stamp);
    }
    let source = Path::new("src");
    let mut files: Vec<_> = fs::read_dir(source)
        .expect("a crate has a folder src")
        .map(|entry| entry.expect("src can be listed").path())
        .collect();
    files.sort();
    for file in files {
        fs::read(file).expect("a file of src can be read").hash(&mut stamp);
    }
    println!("cargo:rustc-env=SIMGPU_BUILD={}", stamp.finish());
}
