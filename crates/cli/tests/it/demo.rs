//! The demo moves and verifies; nothing is left of it when it is gone.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{folder, run, simulator, stderr, stdout, tensorferry};

/// For whatever happens at all, on a machine that is busy.
const SOON: Duration = Duration::from_secs(60);

#[test]
fn every_row_is_verified_and_the_document_says_so() {
    let output = run(&["demo", "--seconds", "1", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["verified"], true);
    assert_eq!(document["interrupted"], false);
    assert_eq!(document["error"], Value::Null);
    assert_eq!(document["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["machine"]["usable_cores"].as_u64() > Some(0));
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 10);
    for row in rows {
        assert_eq!(row["verified"], true, "{row}");
        assert_eq!(row["mismatch"], Value::Null, "{row}");
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
        let bytes = number("block_bytes") * number("batch_requests") * number("measured_batches");
        assert_eq!(number("measured_bytes"), bytes, "{row}");
        assert!(number("verified_bytes") >= bytes, "{row}");
        assert!(number("gigabytes_per_second") > 0.0, "{row}");
        assert!(number("requests_per_second") > 0.0, "{row}");
        assert!(number("cpu_seconds_per_gigabyte") > 0.0, "{row}");
        let (p50, p99) = (number("batch_p50_microseconds"), number("batch_p99_microseconds"));
        assert!(0.0 < p50 && p50 <= p99, "{row}");
    }
    let progress = stderr(&output);
    assert_eq!(progress.lines().count(), 10, "one plain line for each row: {progress}");
    assert!(!progress.contains('\u{1b}'), "no bar where there is no terminal: {progress}");
}

#[test]
fn odd_sizes_are_moved_and_shown_in_a_table() {
    let output = run(&["demo", "--seconds", "0.5", "--sizes", "1,4095,65537", "--batches", "1,7"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let rows: Vec<String> =
        text.lines().map(squeezed).filter(|row| row.ends_with("| yes |")).collect();
    assert_eq!(rows.len(), 12, "{text}");
    assert!(rows.iter().any(|row| row.starts_with("| write | 4095 B | 7 |")), "{text}");
    assert!(text.contains("are verified, byte by byte."), "{text}");
}

#[test]
fn device_memory_is_moved_and_verified_between_all_kinds() {
    let Some(library) = simulator() else { return };
    let folder = folder("demo_pairs");
    for memory in ["cuda:0", "cpu,musa:1", "hip:0,cpu", "cuda:1,hip:0"] {
        let output = tensorferry()
            .args(["demo", "--seconds", "0.3", "--sizes", "1,4095,1MiB", "--batches", "1,3"])
            .args(["--json", "--memory", memory, "--simulate"])
            .arg(&library)
            .env("TMPDIR", &folder)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{memory}: {}", stderr(&output));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(document["verified"], true, "{document}");
        let settings = &document["settings"];
        let place = |end: &str| settings[end]["place"].as_str().unwrap();
        let (first, second) = memory.split_once(',').unwrap_or((memory, memory));
        assert_eq!((place("initiator_memory"), place("target_memory")), (first, second));
        assert_eq!(settings["simulated"], true);
        for end in ["initiator_memory", "target_memory"] {
            let named = settings[end]["device_name"].as_str().is_some_and(|n| n.contains("simgpu"));
            assert_eq!(named, place(end) != "cpu", "{settings}");
        }
    }
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "nothing is left of the simulator");
}

#[test]
fn what_was_simulated_is_said_first_and_last() {
    let Some(library) = simulator() else { return };
    let output = tensorferry()
        .args(["demo", "--seconds", "0.1", "--sizes", "4096", "--batches", "1", "--simulate"])
        .env("TENSORFERRY_SIMULATOR", library)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.starts_with("*** SIMULATED: no GPU was used. "), "{text}");
    assert!(text.contains("memory of cuda:0 (simgpu Cuda 0) over TCP"), "{text}");
    assert_eq!(text.matches("*** SIMULATED").count(), 2, "{text}");
    assert!(!stderr(&output).contains("TENSORFERRY_SIMULATOR"), "{}", stderr(&output));
}

#[test]
fn a_device_that_is_not_there_is_the_engines_own_error() {
    for memory in ["cuda:0", "cpu,cuda:0", "cuda:0,cpu"] {
        let output = tensorferry()
            .args(["demo", "--seconds", "0.1", "--json", "--memory", memory])
            .env("TENSORFERRY_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let says = "cuda:0 cannot be used: no CUDA library was found (tried \
                    /nowhere/libcuda.so.1; the first answered: no such file); install the \
                    vendor's driver, or name the file with TENSORFERRY_CUDA_LIBRARY";
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
        assert_eq!(stderr(&output).matches(says).count(), 1, "{}", stderr(&output));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert!(document["error"].as_str().unwrap().contains(says), "{document}");
    }
}

#[test]
fn a_device_that_fails_is_a_failure_that_says_so() {
    let Some(library) = simulator() else { return };
    let output = tensorferry()
        .args(["demo", "--seconds", "0.1", "--sizes", "1MiB", "--memory", "cuda:0,cpu"])
        .arg("--simulate")
        .arg(library)
        .env("SIMGPU_FAIL", "cuMemcpyDtoHAsync_v2:4:716")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains("cuMemcpyDtoHAsync_v2 answered 716"), "{text}");
}

#[test]
fn a_simulator_that_is_not_found_is_an_error_that_says_where_it_was_looked_for() {
    let folder = folder("demo_alone");
    let alone = folder.join("tensorferry");
    fs::hard_link(env!("CARGO_BIN_EXE_tensorferry"), &alone).unwrap();
    let output = Command::new(&alone)
        .args(["demo", "--simulate"])
        .env_remove("TENSORFERRY_SIMULATOR")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let beside = folder.join("libtensorferry_simgpu.so");
    let says = format!("the library of the simulator is not at {}; name it: ", beside.display());
    assert!(stderr(&output).contains(&says), "{}", stderr(&output));

    let Some(library) = simulator() else { return };
    fs::copy(library, beside).unwrap();
    let output = Command::new(&alone)
        .args(["demo", "--simulate", "--seconds", "0.1", "--sizes", "4096", "--batches", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_host_that_is_not_of_this_machine_is_a_failure_that_says_so() {
    for (host, says) in [
        ("no-such-host.invalid", "--host no-such-host.invalid: no address found ("),
        ("192.0.2.7", "--host 192.0.2.7 is not of this machine (192.0.2.7 cannot be bound)"),
    ] {
        let output = run(&["demo", "--seconds", "0.1", "--host", host, "--json"]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(document["verified"], false);
        assert!(document["error"].as_str().unwrap().starts_with(says), "{document}");
    }
}

#[test]
fn a_killed_initiator_leaves_no_target_behind() {
    let mut demo = Running::start(&["demo", "--seconds", "600"]);
    let target = demo.target();
    demo.child.kill().unwrap();
    demo.child.wait().unwrap();
    wait_until("the target is gone", || is_gone(target));
}

#[test]
fn an_interrupt_ends_both_and_shows_what_was_measured() {
    let mut demo = Running::start(&["demo", "--seconds", "600", "--json"]);
    let target = demo.target();
    demo.interrupt();
    let mut text = String::new();
    demo.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(demo.child.wait().unwrap().code(), Some(130));
    wait_until("the target is gone", || is_gone(target));
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["interrupted"], true);
    assert_eq!(document["verified"], false);
    assert_eq!(document["rows"][0]["mismatch"], Value::Null);
}

#[test]
fn a_killed_target_is_a_failure_that_says_so() {
    let mut demo = Running::start(&["demo", "--seconds", "600"]);
    signal("KILL", demo.target());
    assert_eq!(demo.child.wait().unwrap().code(), Some(1));
    let mut text = String::new();
    demo.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let said = text.lines().last().unwrap_or_default();
    assert!(said.starts_with("tensorferry: "), "{text}");
    assert!(said.contains("target process ended") || said.contains("127.0.0.1"), "{text}");
}

#[test]
fn the_target_ends_when_its_stdin_does() {
    let mut target = tensorferry()
        .args(["__target", "--host", "127.0.0.1", "--bytes", "4096", "--memory", "cpu"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(target.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(ready["answer"], "ready");
    drop(target.stdin.take());
    wait_until("the target has ended", || target.try_wait().unwrap().is_some());
    assert_eq!(target.wait().unwrap().code(), Some(0));
}

/// A demo that is killed when the test is over, whichever way.
struct Running {
    child: Child,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = tensorferry();
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { child: command.spawn().unwrap() }
    }

    /// The process that the demo has started, once it moves bytes.
    fn target(&mut self) -> u32 {
        let mut found = None;
        wait_until("a target runs", || {
            found = child_of(self.child.id());
            found.is_some_and(has_data_connection)
        });
        found.unwrap()
    }

    fn interrupt(&self) {
        signal("INT", self.child.id());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process that this test has started.
pub(crate) fn signal(name: &str, pid: u32) {
    let status = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < give_up, "{SOON:?} have passed, and still not: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// State and parent of a process.
fn state_of(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, so count from its end.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn child_of(parent: u32) -> Option<u32> {
    let mut pids = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| state_of(*pid).is_some_and(|(_, of)| of == parent))
}

/// Gone, or dead and waiting for whoever adopted it to notice.
fn is_gone(pid: u32) -> bool {
    state_of(pid).is_none_or(|(state, _)| matches!(state, 'Z' | 'X'))
}

/// Whether it holds more sockets than its two listeners.
fn has_data_connection(pid: u32) -> bool {
    let Ok(entries) = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else {
        return false;
    };
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("socket:")).count() > 2
}
