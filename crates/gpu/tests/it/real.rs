//! Vendors' own libraries, where somebody has put them: `TENSORFERRY_TEST_LIBRARIES` names files,
//! separated by colons, whose vendor their names tell. On a machine without a device each has to
//! end in a state with a reason, once.

use std::path::Path;
use std::time::{Duration, Instant};

use tensorferry_gpu::{Discovery, Location, Memory, Settings, Vendor};

use crate::children::child_test;

child_test! {
    fn libraries_of_the_vendors_end_in_a_state() {
        let Ok(files) = std::env::var("TENSORFERRY_TEST_LIBRARIES") else {
            eprintln!("skipped: TENSORFERRY_TEST_LIBRARIES names no library");
            return;
        };
        for file in files.split(':').map(Path::new) {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let chosen = Some(file.to_owned());
            let (vendor, settings) = if name.contains("cuda") {
                (Vendor::Cuda, Settings { cuda_library: chosen, ..Settings::default() })
            } else if name.contains("musa") {
                (Vendor::Musa, Settings { musa_library: chosen, ..Settings::default() })
            } else {
                (Vendor::Hip, Settings { hip_library: chosen, ..Settings::default() })
            };
            let discovery = Discovery::new(settings);
            let begun = Instant::now();
            let usable = discovery.require(vendor).is_ok();
            let first = begun.elapsed();
            let state = discovery.peek(vendor);
            eprintln!("{name}: {first:?}: {}: {state}", state.word());
            let reasons = ["no-driver", "no-device", "driver-too-old", "init-failed"];
            assert!(usable || reasons.contains(&state.word()));
            assert!(usable || first < Duration::from_millis(100), "{first:?}");
            let begun = Instant::now();
            assert_eq!(discovery.require(vendor).is_ok(), usable);
            assert!(begun.elapsed() < Duration::from_millis(5), "it is asked once");
            assert_eq!(discovery.classify(Location::Any, 0x1000, 8).ok(), Some(Memory::Host));
        }
    }
}
