//! `tensorferry::fuzzing::frames` under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tensorferry::fuzzing::frames(input));
