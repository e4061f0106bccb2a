//! A simulated GPU runtime, so that whatever finds its vendor's library by `dlopen` can be tested
//! on a machine without a GPU.
//!
//! One shared library answers to the names of the CUDA driver API, of the CUDA runtime (11, 12,
//! 13), of MUSA (4, 5) and of HIP (5, 6, 7); each copy is what its file name says. Device memory
//! of it gives EFAULT to system calls and SIGSEGV to the host, copies are asynchronous and as slow
//! as they are told to be, calls are counted, and any of them can be told to fail. `docs/simgpu.md`
//! is its manual.
//!
//! The Rust library beside it makes the copies ([`install`]) and controls a loaded one
//! ([`Control`]). It is not allowed to know anything of the engine, and the engine not of it: what
//! they share is the vendors' C ABI.
//!
//! ```
//! use tensorferry_simgpu::{Control, Memory, install, library};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # if library().is_none() { return Ok(()) } // a doc test runs far from the shared library
//! let folder = std::env::temp_dir().join(format!("simgpu-{}", std::process::id()));
//! let files = install(&library().unwrap(), &folder, &["libcuda.so.1"])?;
//! let gpu = Control::open(&files[0])?;
//! let addr = gpu.alloc(0, 4096, Memory::Device).unwrap();
//! gpu.write(addr, b"from the host, past all streams").expect("the memory is there");
//! assert_eq!(gpu.count("contexts.0"), 1);
//! assert_eq!(gpu.calls("cuInit"), 0);
//! # Ok(())
//! # }
//! ```
//!
//! Only on Linux with the GNU C library: what it imitates is nowhere else.
#![cfg(target_os = "linux")]
#![expect(
    unsafe_code,
    reason = "it is C's side of an FFI: exported symbols, mappings, the dynamic loader"
)]

mod call;
mod capture;
mod code;
mod config;
mod context;
mod control;
mod core;
mod device;
mod driver;
mod exports;
mod install;
mod memory;
mod pointer;
mod runtime;
mod stream;
mod sys;
mod variant;

pub use control::{Control, Memory, NotSimulated, library};
pub use install::install;
pub use variant::{FILE_NAMES, Variant};
