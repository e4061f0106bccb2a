//! Bad input: exit code 2, and a text that says what would be right.

use crate::{run, stderr, stdout, tensorferry};

#[test]
fn bad_arguments_exit_with_2_and_say_what_would_be_right() {
    for (args, says) in [
        (&["demo", "--sizes", "64KB"][..], "the units are B, KiB (1024 bytes), MiB and GiB"),
        (&["demo", "--sizes", "4KiB,,1"], "such as 4096, 64KiB or 1MiB"),
        (&["demo", "--sizes", "0"], "expected a size of at least one byte"),
        (&["demo", "--sizes", "-4096"], "expected a size of at least one byte"),
        (&["demo", "--batches", "-3"], "expected a whole number of requests, at least 1"),
        (&["demo", "--batches", "9223372036854775808", "--sizes", "1MiB"], "choose smaller"),
        (&["demo", "--seconds", "0"], "expected seconds from 0.1 to 86400"),
        (&["demo", "--seconds", "-1"], "expected seconds from 0.1 to 86400"),
        (&["demo", "--seconds"], "--seconds"),
        (&["demo", "--second", "1"], "--seconds"),
        (&["demo", "--memory", "gpu"], "expected cpu, or a device such as cuda:0"),
        (&["demo", "--memory", "cpu,cpu,cpu"], "takes one place for both ends, or two"),
        (&["demo", "--memory", "cpu", "--simulate"], "--simulate has nothing to simulate"),
        (&["bench"], "Usage: tensorferry bench <COMMAND>"),
        (&["bench", "initiator"], "<TARGET>"),
        (&["bench", "initiator", "a:1", "--threads", "0"], "0 is not in 1..=64"),
        (&["bench", "initiator", "a:1", "--op", "both"], "[possible values: write, read]"),
        (&["bench", "initiator", "a:1", "--seconds", "0"], "expected seconds from 0.1 to 86400"),
        (&["bench", "initiator", "a:1", "--sizes", "1MiB", "--batches", "99999"], "choose smaller"),
        (&["bench", "initiator", "a:1", "--svg", "/nowhere/a.svg"], "/nowhere is no folder"),
        (&["bench", "initiator", "a:1", "--memory", "gpu"], "expected cpu, or a device such as"),
        (&["bench", "target", "--size", "0"], "expected a size of at least one byte"),
        (&["bench", "target", "more"], "unexpected argument"),
        (&["dmeo"], "demo"),
        (&["demo", "more"], "unexpected argument"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(says), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}

#[test]
fn without_a_subcommand_the_help_is_shown() {
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("demo"), "{}", stderr(&output));
}

#[test]
fn help_and_version_exit_with_0() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("Exit codes: 0 done"), "{}", stdout(&help));
    for hidden in ["__target", "__plain"] {
        assert!(!stdout(&help).contains(hidden), "{hidden} is nobody's subcommand");
    }
    let version = run(&["--version"]);
    assert_eq!(version.status.code(), Some(0));
    assert_eq!(stdout(&version), format!("tensorferry {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_malformed_setting_is_named() {
    let output = tensorferry().arg("demo").env("TENSORFERRY_PORTS", "9-1").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(
        text.starts_with("tensorferry: TENSORFERRY_PORTS=9-1: expected a port range"),
        "{text}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn an_argument_that_is_no_text_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    for args in [&["demo", "--host"][..], &["demo", "--seconds"], &[]] {
        let output = tensorferry().args(args).arg(OsStr::from_bytes(b"\xff")).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
}
