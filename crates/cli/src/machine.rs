//! Facts about the machine that a figure is worth nothing without.

use std::{fmt, fs};

use serde::Serialize;

/// Where something was measured. What cannot be found out is absent.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu_model: Option<String>,
    pub(crate) usable_cores: Option<usize>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) operating_system: &'static str,
    pub(crate) kernel: Option<String>,
    pub(crate) architecture: &'static str,
}

impl Machine {
    pub(crate) fn look() -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").ok();
        Self {
            cpu_model: field("/proc/cpuinfo", "model name"),
            usable_cores: std::thread::available_parallelism().ok().map(usize::from),
            memory_bytes: field("/proc/meminfo", "MemTotal").and_then(|text| kib(&text)),
            operating_system: std::env::consts::OS,
            kernel: kernel.map(|text| text.trim().to_owned()),
            architecture: std::env::consts::ARCH,
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} cores, {} {}",
            self.cpu_model.as_deref().unwrap_or("unknown processor"),
            self.usable_cores.map_or_else(|| "?".to_owned(), |n| n.to_string()),
            self.operating_system,
            self.kernel.as_deref().unwrap_or(""),
        )
    }
}

/// The value of the first line `name : value`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

fn kib(text: &str) -> Option<u64> {
    text.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
