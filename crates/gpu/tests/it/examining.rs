//! Reports, also about libraries that hang.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tensorferry_gpu::{Choice, Examined, Settings, Tried, Vendor, examine};

use crate::children::child_test;
use crate::stubs::stub;

/// Longer than anything that ends takes.
const LONG: Duration = Duration::from_secs(60);
/// Long enough for a library to be opened, on a machine that is busy.
const SHORT: Duration = Duration::from_secs(2);

fn with_cuda(file: PathBuf) -> Settings {
    Settings::default().with_library(Vendor::Cuda, file)
}

/// What is said of a library that hangs, and that it was said in time.
fn hangs(settings: &Settings) -> Examined {
    let began = Instant::now();
    let found = examine(settings, Vendor::Cuda, SHORT);
    assert!((SHORT..LONG / 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    assert_eq!(found.state.word(), "no-answer", "{}", found.state);
    found
}

child_test! {
    fn a_library_that_answers_is_told_as_it_is(STUB_DELAY = 1) {
        let file = stub!("a/libcuda.so.1");
        let found = examine(&with_cuda(file.clone()), Vendor::Cuda, LONG);
        assert_eq!(found.state.ready().unwrap().devices.len(), 2, "{}", found.state);
        assert_eq!(found.tried, [Tried { name: file, answer: "opened".into(), found: true }]);
    }
}

child_test! {
    fn what_cannot_be_used_is_told_as_it_is() {
        let file = stub!("a/empty.so");
        let missing = file.with_file_name("libno.so");
        for (file, word, answer) in [
            (file, "unusable", "it has neither cuInit (a driver) nor cudaGetDeviceCount (a runtime)"),
            (missing, "missing", "no such file"),
        ] {
            let found = examine(&with_cuda(file), Vendor::Cuda, LONG);
            assert_eq!((found.state.word(), found.tried.len()), (word, 1));
            assert_eq!(found.tried[0].answer, answer);
        }
        let settings = Settings::default().with_choice(Choice::Only(Vendor::Hip));
        let found = examine(&settings, Vendor::Cuda, LONG);
        assert_eq!((found.state.word(), found.tried.len()), ("not-looked-for", 0));
    }
}

child_test! {
    fn a_first_call_that_does_not_end_is_told_with_its_file(STUB_DELAY = 3600) {
        let file = stub!("a/libcuda.so.1");
        let settings = with_cuda(file.clone());
        let found = hangs(&settings);
        assert_eq!(
            found.state.to_string(),
            format!(
                "CUDA does not answer: the first call of {} has not ended within 2s; if the \
                 vendor's own tools hang, too, restart the driver or the machine, and until then \
                 keep engines from it with TENSORFERRY_GPU=off",
                file.display()
            )
        );
        assert_eq!(found.state.file(), Some(file.as_path()));
        assert_eq!((found.tried.len(), found.tried[0].answer.as_str()), (1, "opened"));
        // Whoever asks again waits behind the first, and no longer than was said.
        hangs(&settings);
        // Another vendor's library is none the worse for it.
        let hip = settings.with_library(Vendor::Hip, stub!("a/libamdhip64.so.6"));
        assert_eq!(examine(&hip, Vendor::Hip, LONG).state.word(), "ready");
    }
}

child_test! {
    fn opening_that_does_not_end_in_time_is_told() {
        let file = stub!("a/slow.so");
        let found = hangs(&with_cuda(file));
        let says = found.state.to_string();
        let expected = "CUDA does not answer: opening its library, or another one before, has not \
                        ended within 2s; if the vendor's own tools hang, too, ";
        assert!(says.starts_with(expected), "{says}");
        assert_eq!((found.state.file(), found.tried.len()), (None, 0));
    }
}
