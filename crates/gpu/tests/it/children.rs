//! Tests that run in a process of their own.

use std::path::Path;
use std::process::Command;

const CHILD: &str = "TENSORFERRY_GPU_TEST";

/// Whether this is the process of one test.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs `body` in a new process with `env` set before it starts, as the loader reads its path only
/// then. `path` is the name of the test.
pub(crate) fn in_child(path: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    // The binary's own name is not part of a test's name.
    let test = path.split_once("::").map_or(path, |(_, rest)| rest);
    if std::env::var(CHILD).as_deref() == Ok(test) {
        body();
        return;
    }
    // They are made before the process that uses them, once for all.
    let _ = crate::stubs::folder();
    let binary = std::env::current_exe().expect("a test knows its own file");
    let ran = Command::new(binary)
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(CHILD, test)
        .envs(env.iter().copied())
        .output()
        .expect("a test can start its own file");
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{test}: {}\n{out}\n{err}", ran.status);
    assert!(out.contains("1 passed"), "{test} did not run:\n{out}\n{err}");
}

/// `body` as a test with this name, in a process of its own.
macro_rules! child_test {
    ($(#[$meta:meta])* fn $name:ident($($key:ident = $value:expr),*) $body:block) => {
        $(#[$meta])*
        #[test]
        fn $name() {
            let owned: Vec<(&str, String)> = vec![$((stringify!($key), $value.to_string())),*];
            let env: Vec<(&str, &str)> = owned.iter().map(|(k, v)| (*k, v.as_str())).collect();
            let path = concat!(module_path!(), "::", stringify!($name));
            crate::children::in_child(path, &env, || $body);
        }
    };
}
pub(crate) use child_test;

/// Runs `body` in a fork of this process, and gives what it returns (0 to 100; 101: it panicked).
pub(crate) fn in_fork(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `body` on its one thread and leaves without unwinding or exit
    // handlers.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0, "fork failed");
    let mut status = 0;
    // SAFETY: waits for the child made above; writes one int.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert!(libc::WIFEXITED(status), "the child died of signal {}", libc::WTERMSIG(status));
    libc::WEXITSTATUS(status)
}

/// The files of mapped libraries whose path contains `part`.
pub(crate) fn mapped(part: &str) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has /proc");
    let mut files: Vec<String> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|file| file.contains(part))
        .map(str::to_owned)
        .collect();
    files.dedup();
    files
}

/// The text of a path in a test's folder.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("the tests' folders have plain names")
}
