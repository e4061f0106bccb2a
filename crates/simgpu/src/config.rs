//! Settings: the environment at first use, and `simgpu_set` afterwards.

use std::env;

use crate::core::Fault;
use crate::sys::Access;

/// What a copy reads and writes, as an index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    HostToDevice = 0,
    DeviceToHost = 1,
    WithinDevices = 2,
}

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    /// Bytes of memory of each device.
    pub(crate) memory: u64,
    /// Bytes per second by [`Way`]; 0 is without limit.
    pub(crate) rate: [u64; 3],
    /// Bytes per second of a copy with pageable memory at one end.
    pub(crate) pageable_rate: u64,
    pub(crate) latency_ns: u64,
    /// What the host may do with device memory.
    pub(crate) access: Access,
    pub(crate) init_error: i32,
    /// How long initialising takes, whatever it answers.
    pub(crate) init_delay_ns: u64,
    pub(crate) driver_version: i32,
    /// Copies wait as long as this is set.
    pub(crate) hang: bool,
    /// Set `hang` when so many more copies have been carried out; `u64::MAX` is never.
    pub(crate) hang_after: u64,
    /// All calls answer this.
    pub(crate) sticky: i32,
    /// Pointer queries need a current context.
    pub(crate) query_needs_context: bool,
    pub(crate) faults: Vec<Fault>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 2,
            memory: 16 << 30,
            rate: [0; 3],
            pageable_rate: 3_000_000_000,
            latency_ns: 8_000,
            access: Access::None,
            init_error: 0,
            init_delay_ns: 0,
            driver_version: 13_000,
            hang: false,
            hang_after: u64::MAX,
            sticky: 0,
            query_needs_context: false,
            faults: Vec::new(),
        }
    }
}

impl Config {
    /// Ends the process at a bad value: a test that runs under other settings than it asked for
    /// proves nothing.
    pub(crate) fn from_environment() -> Self {
        Self::from(|name| env::var(name).ok()).unwrap_or_else(|text| {
            eprintln!("simgpu: {text}");
            std::process::abort()
        })
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let mut config = Self::default();
        let number = |name: &str, least: u64, most: u64| -> Result<Option<u64>, String> {
            let Some(text) = get(name) else { return Ok(None) };
            let value = text.parse::<u64>().ok().filter(|value| (least..=most).contains(value));
            let expected = || format!("{name}={text}: expected a number from {least} to {most}");
            value.map(Some).ok_or_else(expected)
        };
        if let Some(devices) = number("SIMGPU_DEVICES", 0, 64)? {
            config.devices = devices as usize;
        }
        if let Some(memory) = number("SIMGPU_MEMORY", 2 << 20, 1 << 40)? {
            config.memory = memory.next_multiple_of(2 << 20);
        }
        for (name, way) in [
            ("SIMGPU_H2D_BYTES_PER_SECOND", Way::HostToDevice),
            ("SIMGPU_D2H_BYTES_PER_SECOND", Way::DeviceToHost),
            ("SIMGPU_D2D_BYTES_PER_SECOND", Way::WithinDevices),
        ] {
            config.rate[way as usize] = number(name, 0, u64::MAX)?.unwrap_or_default();
        }
        if let Some(latency) = number("SIMGPU_LATENCY_NS", 0, 60_000_000_000)? {
            config.latency_ns = latency;
        }
        if let Some(code) = number("SIMGPU_INIT_ERROR", 0, 9999)? {
            config.init_error = code as i32;
        }
        if let Some(delay) = number("SIMGPU_INIT_DELAY_NS", 0, 3_600_000_000_000)? {
            config.init_delay_ns = delay;
        }
        if let Some(version) = number("SIMGPU_DRIVER_VERSION", 1, 99_999)? {
            config.driver_version = version as i32;
        }
        match get("SIMGPU_ACCESS").as_deref() {
            None | Some("none") => {}
            Some("host") => config.access = Access::ReadWrite,
            Some(other) => return Err(format!("SIMGPU_ACCESS={other}: expected none or host")),
        }
        if let Some(text) = get("SIMGPU_FAIL") {
            for item in text.split(',') {
                let fault = Self::fault(item).ok_or_else(|| {
                    format!("SIMGPU_FAIL={text}: expected CALL:N:CODE, N the call or *, at {item}")
                })?;
                config.faults.push(fault);
            }
        }
        Ok(config)
    }

    fn fault(item: &str) -> Option<Fault> {
        let (call, rest) = item.trim().split_once(':')?;
        let (nth, code) = rest.split_once(':')?;
        let (pass, fail) = match nth {
            "*" => (0, u64::MAX),
            nth => (nth.parse::<u64>().ok()?.checked_sub(1)?, 1),
        };
        Some(Fault { call: call.to_owned(), pass, fail, code: code.parse().ok()? })
    }

    /// Changes a setting while the process runs. False: there is no such setting.
    pub(crate) fn set(&mut self, name: &str, value: u64) -> bool {
        match name {
            "h2d_bytes_per_second" => self.rate[Way::HostToDevice as usize] = value,
            "d2h_bytes_per_second" => self.rate[Way::DeviceToHost as usize] = value,
            "d2d_bytes_per_second" => self.rate[Way::WithinDevices as usize] = value,
            "pageable_bytes_per_second" => self.pageable_rate = value,
            "latency_ns" => self.latency_ns = value,
            "init_error" => self.init_error = value as i32,
            "init_delay_ns" => self.init_delay_ns = value,
            "hang" => self.hang = value != 0,
            "hang_after" => self.hang_after = value,
            "sticky" => self.sticky = value as i32,
            "query_needs_context" => self.query_needs_context = value != 0,
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<Config, String> {
        Config::from(|name| {
            let found = pairs.iter().find(|(key, _)| *key == name)?;
            Some(found.1.to_owned())
        })
    }

    #[test]
    fn the_environment_is_read() {
        let config = config(&[
            ("SIMGPU_DEVICES", "8"),
            ("SIMGPU_D2H_BYTES_PER_SECOND", "500000000"),
            ("SIMGPU_ACCESS", "host"),
            ("SIMGPU_INIT_DELAY_NS", "5000000000"),
            ("SIMGPU_FAIL", "cuInit:*:100, cuMemAlloc_v2:3:2"),
        ])
        .unwrap();
        assert_eq!((config.devices, config.rate), (8, [0, 500_000_000, 0]));
        assert_eq!((config.access, config.init_delay_ns), (Access::ReadWrite, 5_000_000_000));
        let faults: Vec<_> = config.faults.iter().map(|f| (&f.call[..], f.pass, f.code)).collect();
        assert_eq!(faults, [("cuInit", 0, 100), ("cuMemAlloc_v2", 2, 2)]);
    }

    #[test]
    fn a_bad_value_is_named() {
        let text = config(&[("SIMGPU_DEVICES", "two")]).unwrap_err();
        assert_eq!(text, "SIMGPU_DEVICES=two: expected a number from 0 to 64");
        let text = config(&[("SIMGPU_FAIL", "cuInit:0:100")]).unwrap_err();
        assert_eq!(
            text,
            "SIMGPU_FAIL=cuInit:0:100: expected CALL:N:CODE, N the call or *, at cuInit:0:100"
        );
    }
}
