//! Small stand-ins for the vendors' libraries, compiled when a test needs them.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::children::is_child;

/// File, soname, and what of `stub.c` is in it.
const STUBS: [(&str, &str, &[&str]); 9] = [
    ("a/libcuda.so.1", "libcuda.so.1", &["-DDRIVER"]),
    ("b/libcuda.so.1", "libcuda.so.1", &["-DDRIVER"]),
    ("lacking/libcuda.so.1", "libcuda.so.1", &["-DDRIVER", "-DLACKS_EVENT_QUERY"]),
    ("a/libcudart.so.12", "libcudart.so.12", &["-DRUNTIME"]),
    ("a/anything.so", "anything.so", &["-DRUNTIME"]),
    ("a/empty.so", "empty.so", &[]),
    ("a/slow.so", "slow.so", &["-DSLOW"]),
    ("a/libmusart.so.5", "libmusart.so.5", &["-DMUSA"]),
    ("a/libamdhip64.so.6", "libamdhip64.so.6", &["-DHIP"]),
];

/// Where the stubs are; `None`, with a line that says so, where there is no C compiler.
pub(crate) fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(build).as_deref()
}

/// The path of a stub; ends the test where there is no C compiler.
macro_rules! stub {
    ($name:literal) => {
        match crate::stubs::folder() {
            Some(folder) => folder.join($name),
            None => return,
        }
    };
}
pub(crate) use stub;

fn build() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stubs");
    if is_child() {
        return folder.exists().then_some(folder);
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/stub.c");
    for (file, soname, defines) in STUBS {
        let file = folder.join(file);
        std::fs::create_dir_all(file.parent()?).expect("the target folder can be written");
        let fresh = file.with_extension(std::process::id().to_string());
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(&fresh)
            .arg(format!("-Wl,-soname,{soname}"))
            .args(defines)
            .arg(&source)
            .output();
        match built {
            Err(error) => {
                eprintln!("skipped: cc cannot be run ({error})");
                return None;
            }
            Ok(built) => assert!(
                built.status.success(),
                "stub.c: {}",
                String::from_utf8_lossy(&built.stderr)
            ),
        }
        // A new file: another test's process may have the old one mapped.
        std::fs::rename(&fresh, &file).expect("the target folder can be written");
    }
    Some(folder)
}

/// A stub as its application sees it.
pub(crate) struct Stub(Library);

impl Stub {
    /// Maps the stub, as an application's framework would.
    pub(crate) fn open(file: &Path) -> Self {
        // SAFETY: a stub does nothing while it is loaded.
        Self(unsafe { Library::new(file) }.expect("a stub that was built can be opened"))
    }

    pub(crate) fn number(&self, name: &str) -> c_int {
        // SAFETY: called for functions of `stub.c` without arguments.
        let function = unsafe { self.0.get::<extern "C" fn() -> c_int>(name) };
        function.expect("stub.c has it")()
    }

    /// Calls `cuInit`, as a framework would.
    pub(crate) fn init(&self) -> c_int {
        // SAFETY: the type that `stub.c` gives it.
        let init = unsafe { self.0.get::<extern "C" fn(u32) -> c_int>("cuInit") };
        init.expect("stub.c has it")(0)
    }

    /// How often the library was initialised, or asked to be.
    pub(crate) fn inits(&self) -> c_int {
        self.number("stub_inits")
    }
}
