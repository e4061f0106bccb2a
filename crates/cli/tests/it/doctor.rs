//! What the doctor says of machines in all states; the GPUs are simulated.

use std::process::Output;

use serde_json::Value;

use crate::{run, stderr, stdout, tensorferry};

/// What the tables have room for.
const COLUMNS: usize = 100;

/// The doctor with these variables, beside the arguments.
fn doctor(args: &[&str], env: &[(&str, &str)]) -> Output {
    tensorferry().arg("doctor").args(args).envs(env.iter().copied()).output().unwrap()
}

/// The document, and the exit code that came with it.
fn document(args: &[&str], env: &[(&str, &str)]) -> (Value, Option<i32>) {
    let output = doctor(&[args, &["--json"]].concat(), env);
    let document = serde_json::from_str(&stdout(&output));
    (document.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output))), output.status.code())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

#[test]
fn an_address_that_is_not_of_this_machine_is_a_problem() {
    let env = [("TENSORFERRY_BIND", "192.0.2.1"), ("TENSORFERRY_GPU", "off")];
    let output = doctor(&[], &env);
    assert_eq!(output.status.code(), Some(1));
    let says = stderr(&output);
    let expected =
        "tensorferry: host memory does not move: no engine starts: listening on 192.0.2.1";
    assert!(says.starts_with(expected), "{says}");
    let (document, _) = document(&[], &env);
    assert_eq!((&document["ok"], &document["proofs"][0]["moved"]), (&false.into(), &false.into()));
}

#[test]
fn a_range_without_room_is_a_problem_that_names_it() {
    // One port, and an engine needs two.
    let env = [("TENSORFERRY_PORTS", "15999-15999"), ("TENSORFERRY_GPU", "off")];
    let (document, code) = document(&[], &env);
    assert_eq!(code, Some(1));
    assert!(text(&document["problems"][0]).contains("15999-15999"), "{document}");
}

#[test]
fn the_sections_are_readable_and_end_with_the_verdict() {
    let output = run(&["doctor"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert_readable(&text);
    for part in ["127.0.0.1", "In short"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap();
    assert!(last.contains("verdict") && last.contains("host memory moves"), "{last}");
}

/// No line is wider than a terminal, unless one word is.
fn assert_readable(text: &str) {
    for line in text.lines() {
        let longest_word = line.split_whitespace().map(|word| word.chars().count()).max();
        let wide = line.chars().count() > COLUMNS && longest_word.unwrap_or(0) < COLUMNS / 2;
        assert!(!wide, "{line}");
    }
}
