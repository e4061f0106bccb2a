//! The benchmark between processes: what it measures is verified, who it measures with is told apart, and no end of it
//! waits for another that is gone.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tensorferry::{Config, Engine, HostBuffer, RegisterOptions};

use crate::demo::{signal, wait_until};
use crate::{folder, run, simulator, stderr, stdout, tensorferry};

/// Until an initiator has given up a target that is gone, on a machine that is busy.
const GIVEN_UP: Duration = Duration::from_secs(45);

/// A `bench target`, which is killed when the test is over.
struct Target {
    child: Child,
    news: BufReader<ChildStderr>,
    ready: Value,
}

impl Target {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[])
    }

    fn start_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut child = tensorferry()
            .args(["bench", "target", "--json"])
            .args(args)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let news = BufReader::new(child.stderr.take().unwrap());
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        Self { child, news, ready }
    }

    fn segment(&self) -> &str {
        self.ready["segment"].as_str().unwrap()
    }

    /// The next line that it says to people.
    fn said(&mut self) -> String {
        let mut line = String::new();
        self.news.read_line(&mut line).unwrap();
        line
    }

    fn measure(&self, args: &[&str]) -> Output {
        run(&[&["bench", "initiator", self.segment()][..], args].concat())
    }

    /// Starts an initiator that goes on and on, and waits until it has measured its first row.
    fn measured_for_long(&mut self) -> Initiator {
        let sizes: Vec<String> = (0..500).map(|at| (65_536 + at).to_string()).collect();
        let mut child = tensorferry()
            .args(["bench", "initiator", self.segment(), "--json", "--seconds", "0.3"])
            .args(["--batches", "4", "--sizes", &sizes.join(",")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        assert!(self.said().contains(" measures (version "));
        let mut progress = BufReader::new(child.stderr.take().unwrap());
        for expected in ["1000 lines of 0.3 s each", "write 64 KiB x 4: "] {
            let mut line = String::new();
            progress.read_line(&mut line).unwrap();
            assert!(line.starts_with(expected), "{line}");
        }
        Initiator { child, progress }
    }
}

/// An initiator in mid-run, which is killed when the test is over.
struct Initiator {
    child: Child,
    progress: BufReader<ChildStderr>,
}

impl Initiator {
    /// All that it prints until it ends, on stdout and on stderr.
    fn rest(&mut self) -> (String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        self.progress.read_to_string(&mut err).unwrap();
        (out, err)
    }
}

impl Drop for Initiator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn document(output: &Output) -> Value {
    serde_json::from_str(&stdout(output))
        .unwrap_or_else(|error| panic!("{error}: {} {}", stdout(output), stderr(output)))
}

fn rows(document: &Value) -> &Vec<Value> {
    document["rows"].as_array().unwrap()
}

#[test]
fn every_row_is_verified_and_has_plain_sockets_beside_it() {
    let target = Target::start(&["--size", "16MiB"]);
    let svg = folder("bench_svg").join("chart.svg");
    let args = ["--json", "--seconds", "0.4", "--sizes", "4095,1MiB", "--batches", "1,3"];
    let more = ["--threads", "2", "--svg", svg.to_str().unwrap()];
    let output = target.measure(&[&args[..], &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&output);
    assert_eq!(document["verified"], true);
    assert_eq!(document["complete"], true);
    assert_eq!(document["error"], Value::Null);
    assert_eq!(document["target"]["kind"], "bench");
    assert_eq!(document["target"]["memory_bytes"], 16 << 20);
    assert_eq!(document["target"]["memory"]["place"], "cpu");
    assert!(document["target"]["machine"]["usable_cores"].as_u64() > Some(0), "{document}");
    assert_eq!(rows(&document).len(), 8);
    for row in rows(&document) {
        assert_eq!(row["verified"], true, "{row}");
        assert_eq!(row["threads"], 2);
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
        let bytes = number("block_bytes") * number("batch_requests") * number("measured_batches");
        assert_eq!(number("measured_bytes"), bytes, "{row}");
        assert!(number("moved_bytes") > bytes, "{row}");
        assert_eq!(number("verified_bytes"), number("moved_bytes"), "{row}");
        assert!(number("measured_seconds") > 0.35, "{row}");
        let rate = bytes / 1e9 / number("measured_seconds");
        assert!((number("gigabytes_per_second") / rate - 1.0).abs() < 1e-9, "{row}");
        let latencies =
            ["p50", "p90", "p99", "max"].map(|q| number(&format!("batch_{q}_microseconds")));
        assert!(latencies[0] > 0.0 && latencies.is_sorted(), "{row}");
        let cpu = number("initiator_cpu_seconds") + number("target_cpu_seconds");
        assert!(number("target_cpu_seconds") > 0.0 && cpu > 0.0, "{row}");
        let plain = &row["plain_sockets"];
        let ratio = |name: &str| plain[name].as_f64();
        assert!(ratio("gigabytes_per_second") > Some(0.0), "{row}");
        // On a machine that is busy, one batch can take longer than a turn.
        let range = ["ratio_low", "ratio_median", "ratio_high"].map(ratio);
        match plain["pairs"].as_u64().unwrap() {
            0..5 => assert_eq!(range, [None; 3], "{row}"),
            _ => assert!(range[0] > Some(0.0) && range.is_sorted(), "{row}"),
        }
        let pinged = row["batch_requests"] == 1 && row["block_bytes"] == 4095;
        assert_eq!(
            plain["ping_p50_microseconds"].as_f64().is_some_and(|p50| p50 > 0.0),
            pinged,
            "{row}"
        );
    }
    let drawn = fs::read_to_string(svg).unwrap();
    for expected in ["<svg", "WRITE, batches of 3", "READ p99", "1 MiB", "tensorferry "] {
        assert!(drawn.contains(expected), "{expected}");
    }
}

#[test]
fn the_table_says_what_was_measured_and_how() {
    let target = Target::start(&["--size", "2MiB"]);
    let output = target.measure(&["--seconds", "0.2", "--sizes", "64KiB", "--op", "read"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains(&format!("target {}: tensorferry ", target.segment())), "{text}");
    assert!(text.contains("\nhost memory at both ends, over TCP; threads 1, lanes"), "{text}");
    assert!(text.contains("of plain sockets") && text.contains("Ping: one block"), "{text}");
    assert!(text.contains("are verified, byte by byte."), "{text}");
    let read =
        text.lines().filter(|line| line.starts_with("| read ") && line.ends_with("yes      |"));
    assert_eq!(read.count(), 2, "{text}");
    assert!(!text.contains("| write"), "{text}");
    let progress = stderr(&output);
    assert!(
        progress.starts_with("2 lines of 0.2 s each; with all around them about "),
        "{progress}"
    );
    assert_eq!(progress.lines().count(), 3, "{progress}");
}

#[test]
fn what_is_not_verified_is_measured_and_says_so() {
    let target = Target::start(&["--size", "1MiB"]);
    let args = ["--json", "--seconds", "0.2", "--sizes", "4KiB", "--batches", "1,8"];
    let output = target.measure(&[&args[..], &["--no-verify", "--no-sockets"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&output);
    assert_eq!((&document["complete"], &document["verified"]), (&true.into(), &false.into()));
    for row in rows(&document) {
        assert_eq!((&row["verified"], &row["verified_bytes"]), (&false.into(), &0.into()), "{row}");
        assert_eq!(row["plain_sockets"], Value::Null, "{row}");
        assert!(row["measured_seconds"].as_f64() > Some(0.15), "{row}");
    }
}

#[test]
fn rows_that_do_not_fit_are_left_out_or_refused() {
    let target = Target::start(&["--size", "1MiB"]);
    let output = target.measure(&["--seconds", "0.1", "--no-sockets", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&output);
    let left_out: Vec<&str> =
        document["left_out"].as_array().unwrap().iter().map(|row| row.as_str().unwrap()).collect();
    assert_eq!(rows(&document).len(), 4, "{document}");
    assert!(left_out.contains(&"write 64 MiB x 1") && left_out.len() == 6, "{left_out:?}");

    let output = target.measure(&["--sizes", "64KiB", "--batches", "8", "--threads", "3"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(
        text.contains("a batch of 64 KiB x 8 for each of 3 threads does not fit the 1 MiB"),
        "{text}"
    );
}

#[test]
fn memory_of_another_engine_is_overwritten_only_with_leave() {
    let engine = Engine::new("127.0.0.1", Config::default()).unwrap();
    let memory = HostBuffer::zeroed(1 << 20).unwrap();
    memory.write(0, b"somebody's cache");
    engine.register_buffer(&memory, &RegisterOptions::default()).unwrap();
    let measure = |args: &[&str]| {
        let common = ["--json", "--seconds", "0.2", "--sizes", "4KiB,64KiB", "--batches", "2"];
        run(&[&["bench", "initiator", engine.name()][..], &common, args].concat())
    };

    let output = measure(&[]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("is no `tensorferry bench target`, and measuring overwrites"), "{text}");
    assert!(text.contains("(1048576 bytes at 0x") && text.contains("add --overwrite"), "{text}");
    assert!(document(&output)["error"].as_str().is_some_and(|error| text.contains(error)));
    let output = measure(&["--op", "read", "--no-verify"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(document(&output)["target"]["overwritten_bytes"], Value::Null);
    assert_eq!(memory.read(0, 16), b"somebody's cache");

    let output = measure(&["--overwrite", "--sockets"]);
    assert_eq!(output.status.code(), Some(1));
    let says = "--sockets: plain sockets cannot be measured beside, since the target is no";
    assert!(stderr(&output).contains(says), "{}", stderr(&output));

    let output = measure(&["--overwrite", "--threads", "2"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&output);
    assert_eq!(document["verified"], true);
    assert_eq!(document["target"]["kind"], "foreign");
    assert_eq!(document["target"]["version"], Value::Null);
    for row in rows(&document) {
        for name in ["target_cpu_seconds", "cpu_seconds_per_gigabyte", "plain_sockets"] {
            assert_eq!(row[name], Value::Null, "{name}: {row}");
        }
        assert_eq!(row["verified_bytes"], row["moved_bytes"], "{row}");
        assert!(row["initiator_cpu_seconds"].as_f64() > Some(0.0), "{row}");
    }
    assert_ne!(memory.read(0, 16), b"somebody's cache");
}

#[test]
fn memory_of_a_device_is_measured_without_plain_sockets() {
    let Some(library) = simulator() else { return };
    let folder = folder("bench_device");
    let files = tensorferry_simgpu::install(&library, &folder, &["libcuda.so.1"]).unwrap();
    let file = files[0].to_str().unwrap();
    let env = [("TENSORFERRY_CUDA_LIBRARY", file)];
    let target = Target::start_with(&["--size", "4MiB", "--memory", "cuda:1"], &env);
    for memory in ["cpu", "cuda:0"] {
        let output = tensorferry()
            .args(["bench", "initiator", target.segment(), "--json", "--memory", memory])
            .args(["--seconds", "0.2", "--sizes", "4095,1MiB", "--batches", "1"])
            .envs(env)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let document = document(&output);
        assert_eq!((&document["verified"], &document["sockets"]), (&true.into(), &false.into()));
        assert_eq!(document["target"]["memory"]["place"], "cuda:1");
        assert_eq!(document["target"]["memory"]["device_name"], "simgpu Cuda 1");
        assert_eq!(document["settings"]["initiator_memory"]["place"], memory);
    }
}

#[test]
fn a_second_initiator_is_told_that_the_target_is_busy_and_later_it_is_not() {
    let mut target = Target::start(&["--size", "64MiB"]);
    let mut first = target.measured_for_long();
    let output = target.measure(&["--seconds", "0.1", "--sizes", "4KiB"]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    let says = "tensorferry: the target is busy: 127.0.0.1:";
    assert!(text.contains(says) && text.contains(" has been measuring with it for "), "{text}");
    assert!(target.said().contains(" was turned away: 127.0.0.1:"));

    signal("INT", first.child.id());
    let (text, _) = first.rest();
    assert_eq!(first.child.wait().unwrap().code(), Some(130));
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["interrupted"], true);
    assert_eq!((&document["complete"], &document["verified"]), (&false.into(), &false.into()));
    assert_eq!(document["rows"][0]["verified"], true, "what was measured is shown");
    assert!(target.said().contains(" has gone after "));

    let output = target.measure(&["--seconds", "0.1", "--sizes", "4KiB", "--batches", "1"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_killed_target_is_a_failure_that_names_it() {
    let mut target = Target::start(&["--size", "64MiB"]);
    let mut initiator = target.measured_for_long();
    let segment = target.segment().to_owned();
    let began = Instant::now();
    target.child.kill().unwrap();
    let (_, text) = initiator.rest();
    assert_eq!(initiator.child.wait().unwrap().code(), Some(1));
    assert!(began.elapsed() < GIVEN_UP, "{:?}", began.elapsed());
    let said = text.lines().last().unwrap_or_default();
    assert!(said.starts_with("tensorferry: while measuring "), "{text}");
    assert!(said.contains(&segment), "{text}");
}

#[test]
fn a_killed_initiator_makes_room_for_the_next_one() {
    let mut target = Target::start(&["--size", "64MiB", "--once"]);
    let mut initiator = target.measured_for_long();
    initiator.child.kill().unwrap();
    initiator.child.wait().unwrap();
    wait_until("the target has ended", || target.child.try_wait().unwrap().is_some());
    assert_eq!(target.child.wait().unwrap().code(), Some(0), "it was to serve one");
}

#[test]
fn ctrl_c_ends_a_target_and_whoever_measures_with_it_is_told() {
    let mut target = Target::start(&["--size", "64MiB"]);
    let mut initiator = target.measured_for_long();
    signal("INT", target.child.id());
    wait_until("the target has ended", || target.child.try_wait().unwrap().is_some());
    assert_eq!(target.child.wait().unwrap().code(), Some(130));
    let (_, text) = initiator.rest();
    assert_eq!(initiator.child.wait().unwrap().code(), Some(1));
    assert!(text.contains(target.segment()), "{text}");
}

#[test]
fn a_target_that_is_not_there_is_a_failure_that_names_it() {
    let gone = {
        let engine = Engine::new("127.0.0.1", Config::default()).unwrap();
        engine.name().to_owned()
    };
    let output = run(&["bench", "initiator", &gone, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains(&gone), "{}", stderr(&output));
    assert_eq!(rows(&document(&output)).len(), 0);
}

#[test]
fn a_target_says_what_to_type_and_who_can_reach_it() {
    let mut child = tensorferry()
        .args(["bench", "target", "--size", "4KiB"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let first = next();
    assert!(first.contains("lends 4 KiB of host memory, which initiators overwrite."), "{first}");
    next();
    let command = next();
    next();
    let ports = next();
    assert!(ports.contains("have to be reachable from there"), "{ports}");
    assert!(next().contains("with --host ADDRESS others can"));
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    assert_eq!(words[..2], ["bench", "initiator"], "{command}");
    let args = ["--seconds", "0.1", "--sizes", "4KiB", "--batches", "1", "--no-sockets"];
    let output = run(&[&words[..], &args].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    signal("INT", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn every_name_of_the_document_is_described() {
    let target = Target::start(&["--size", "1MiB"]);
    let args = ["--json", "--seconds", "0.3", "--sizes", "4KiB", "--batches", "1", "--op", "read"];
    let output = target.measure(&args);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&output);
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/bench.md")).unwrap();
    let mut values = vec![&target.ready, &document, &document["settings"], &document["target"]];
    values.extend([&rows(&document)[0], &rows(&document)[0]["plain_sockets"]]);
    let names = values.iter().flat_map(|value| value.as_object().unwrap().keys());
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "docs/bench.md does not have {name}");
    }
}
