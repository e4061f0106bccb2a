//! Every setting, its default, and the one reader of the environment.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tensorferry_gpu as gpu;
use tensorferry_metadata::{DEFAULT_CONTROL_PORT, PortRange};
use tensorferry_wire::{DEFAULT_ACCEPT_LIMIT, Version};

/// How an engine behaves. [`Config::default`] needs no environment; [`Config::from_env`] reads it.
///
/// ```
/// # use std::time::Duration;
/// use tensorferry::Config;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut config = Config::default();
/// config.ports = "21000-21063".parse()?;
/// config.transfer_timeout = Duration::from_secs(5);
///
/// // What a process's environment would say.
/// let vars = [("TENSORFERRY_LANES_PER_PEER".to_owned(), "2".to_owned())];
/// assert_eq!(Config::from_vars(vars)?.lanes_per_peer, 2);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The address both listeners are bound to. `None`: the engine's host if that is an address of
    /// this machine, else all interfaces.
    pub bind: Option<IpAddr>,
    /// The host that peers are told to connect to. `None`: the engine's host.
    pub advertise: Option<String>,
    /// The ports that both listeners are chosen from.
    pub ports: PortRange,
    /// How many connections to one peer carry requests at the same time, 1 to 64.
    pub lanes_per_peer: usize,
    /// How many threads move bytes, 1 to 64.
    pub io_threads: usize,
    /// The fixed part of a batch's default deadline; 10 ns per byte are added.
    pub transfer_timeout: Duration,
    /// How long one connection attempt may take.
    pub connect_timeout: Duration,
    /// How many bytes of bookkeeping (64 per request) may wait for one peer; four times that for
    /// all peers of an engine.
    pub queue_bytes: usize,
    /// A lane that was idle for longer is replaced before it is used.
    pub lane_idle_probe: Duration,
    /// A lane that was idle for so long is closed.
    pub lane_keep: Duration,
    /// How long a thread that waits for a small batch spins before it sleeps, and an IO thread that waits for the next
    /// request or answer (a fifth of that within payloads); zero: not at all. None does while waits usually take longer than
    /// twice that, or while others want its processor.
    pub spin: Duration,
    /// Copy into registered memory through the kernel, so that a buffer that its owner has
    /// unmapped fails the request and not the process.
    pub safe_copy: bool,
    /// Which GPU vendors are looked for, and which library files are taken.
    pub gpu: gpu::Settings,
    /// How many staging slots each device has for each direction, 2 to 1024.
    pub staging_slots: usize,
    /// The length of a staging slot in bytes of pinned host memory, 64 KiB to 64 MiB, whole pages.
    pub staging_slot_bytes: usize,
    /// The newest protocol version that is spoken as initiator.
    pub newest_version: Version,
    /// A lane that owes an answer and makes no progress for so long is closed. `None`: never, the
    /// batch's deadline rules.
    pub progress_timeout: Option<Duration>,
    /// A lane that owes an answer is closed when the peer's machine has given no sign of life for so long, though it
    /// was asked for one. A peer that is frozen or busy keeps its lanes.
    pub silence_timeout: Duration,
    /// The longest control frame that is accepted, in bytes.
    pub control_accept_limit: u64,
    /// The control port of a segment name that has none.
    pub control_port: u16,
    /// How many connections wait to be accepted, per listener.
    pub listen_backlog: u32,
    /// The least severe log records that Python and the program show.
    pub log: LogLevel,
    /// Things in the environment that had no effect, to be logged once.
    pub notices: Vec<Notice>,
}

/// A log level by its usual name.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum LogLevel {
    /// Only what failed.
    Error,
    /// What failed or is doubtful.
    Warning,
    /// One line per rare event.
    Info,
    /// For whoever looks for a fault.
    Debug,
    /// Everything.
    Trace,
}

/// Something in the environment that the user should hear about once.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Notice {
    /// A value that could not be understood; the default is used.
    Warning(String),
    /// A name that is accepted without effect.
    Debug(String),
}

/// A setting of ours that could not be understood.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{name}={value}: expected {expected}; correct it or unset it")]
#[non_exhaustive]
pub struct ConfigError {
    /// The variable.
    pub name: String,
    /// Its value.
    pub value: String,
    /// What it may be.
    pub expected: &'static str,
}

const MIB: usize = 1 << 20;
const FILE: &str = "the name or path of a library file";
/// The shortest transfer timeout that `MC_TRANSFER_TIMEOUT` can set.
const MC_SHORTEST_TIMEOUT_SECS: i64 = 5;
/// The kernel's own range for outgoing connections, which listeners have no business in.
const EPHEMERAL_PORTS: std::ops::RangeInclusive<u16> = 32768..=60999;

impl Default for Config {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bind: None,
            advertise: None,
            ports: PortRange::default(),
            lanes_per_peer: 4,
            io_threads: (cores / 2).clamp(1, 4),
            transfer_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            queue_bytes: 16 * MIB,
            lane_idle_probe: Duration::from_millis(500),
            lane_keep: Duration::from_secs(60),
            spin: if cores > 1 { Duration::from_micros(100) } else { Duration::ZERO },
            safe_copy: false,
            gpu: gpu::Settings::default(),
            staging_slots: 8,
            staging_slot_bytes: MIB,
            newest_version: Version::V2,
            progress_timeout: None,
            silence_timeout: Duration::from_secs(10),
            control_accept_limit: DEFAULT_ACCEPT_LIMIT,
            control_port: DEFAULT_CONTROL_PORT,
            listen_backlog: 4096,
            log: LogLevel::Warning,
            notices: Vec::new(),
        }
    }
}

impl Config {
    /// The defaults, changed by this process's environment.
    ///
    /// # Errors
    /// A malformed `TENSORFERRY_*` variable. (A malformed `MC_*` is a [`Notice`], and the default.)
    pub fn from_env() -> std::result::Result<Self, ConfigError> {
        Self::from_vars(std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            Some((name, value.to_string_lossy().into_owned()))
        }))
    }

    /// The defaults, changed by the given variables.
    ///
    /// # Errors
    /// A malformed `TENSORFERRY_*` variable.
    pub fn from_vars(
        vars: impl IntoIterator<Item = (String, String)>,
    ) -> std::result::Result<Self, ConfigError> {
        let vars: BTreeMap<String, String> = vars
            .into_iter()
            .filter(|(name, _)| name.starts_with("MC_") || name.starts_with("TENSORFERRY_"))
            .collect();
        let mut config = Self::default();
        config.apply_peer_vars(&vars);
        config.apply_our_vars(&vars)?;
        Ok(config)
    }

    /// What a batch of `bytes` bytes is given if the caller sets no deadline.
    #[must_use]
    pub fn default_timeout(&self, bytes: u64) -> Duration {
        self.transfer_timeout + Duration::from_nanos(bytes.saturating_mul(10))
    }

    fn apply_our_vars(
        &mut self,
        vars: &BTreeMap<String, String>,
    ) -> std::result::Result<(), ConfigError> {
        for (name, value) in vars.iter().filter(|(name, _)| name.starts_with("TENSORFERRY_")) {
            let set = |expected: &'static str, done: Option<()>| {
                done.ok_or_else(|| ConfigError {
                    name: name.clone(),
                    value: value.clone(),
                    expected,
                })
            };
            let v = value.trim();
            match &name["TENSORFERRY_".len()..] {
                "BIND" => set("an IP address", v.parse().ok().map(|ip| self.bind = Some(ip)))?,
                "ADVERTISE" => set(
                    "a host name or an IP address",
                    host(v).map(|host| self.advertise = Some(host)),
                )?,
                "PORTS" => {
                    set(
                        "a port range such as 15000-17000",
                        v.parse().ok().map(|p| self.ports = p),
                    )?;
                }
                "LANES_PER_PEER" => {
                    set("a count from 1 to 64", count(v, 1..=64).map(|n| self.lanes_per_peer = n))?;
                }
                "IO_THREADS" => {
                    set("a count from 1 to 64", count(v, 1..=64).map(|n| self.io_threads = n))?;
                }
                "TRANSFER_TIMEOUT" => set(
                    "a time such as 30s or 500ms",
                    duration(v).map(|t| self.transfer_timeout = t),
                )?,
                "CONNECT_TIMEOUT" => set(
                    "a time such as 5s or 500ms",
                    duration(v).map(|t| self.connect_timeout = t),
                )?,
                "QUEUE_BYTES" => set(
                    "a size of at least 64KiB, such as 16MiB",
                    bytes(v).filter(|n| *n >= 64 << 10).map(|n| self.queue_bytes = n),
                )?,
                "LANE_IDLE_PROBE" => {
                    set("a time such as 500ms", duration(v).map(|t| self.lane_idle_probe = t))?
                }
                "LANE_KEEP" => set("a time such as 60s", duration(v).map(|t| self.lane_keep = t))?,
                "SILENCE_TIMEOUT" => set(
                    "a time from 500ms to 60m, such as 10s",
                    duration(v).filter(is_a_while).map(|t| self.silence_timeout = t),
                )?,
                "SPIN" => {
                    set("0, or a time up to 10ms, such as 50us", spin(v).map(|t| self.spin = t))?
                }
                "SAFE_COPY" => set("0 or 1", flag(v).map(|on| self.safe_copy = on))?,
                "GPU" => set(
                    "one of auto, off, cuda, musa, hip",
                    v.parse().ok().map(|choice| self.gpu.choice = choice),
                )?,
                "CUDA_LIBRARY" => set(FILE, file(v).map(|f| self.gpu.cuda_library = Some(f)))?,
                "MUSA_LIBRARY" => set(FILE, file(v).map(|f| self.gpu.musa_library = Some(f)))?,
                "HIP_LIBRARY" => set(FILE, file(v).map(|f| self.gpu.hip_library = Some(f)))?,
                "STAGING_SLOTS" => {
                    set(
                        "a count from 2 to 1024",
                        count(v, 2..=1024).map(|n| self.staging_slots = n),
                    )?;
                }
                "STAGING_SLOT_BYTES" => set(
                    "a size from 64KiB to 64MiB in steps of 4KiB, such as 1MiB",
                    bytes(v).filter(is_slot).map(|n| self.staging_slot_bytes = n),
                )?,
                "LOG" => set(
                    "one of error, warning, info, debug, trace",
                    level(v).map(|level| self.log = level),
                )?,
                // The program's, which finds its simulator by it.
                "SIMULATOR" => {}
                _ => self.notices.push(Notice::Warning(format!(
                    "{name} is no setting of this version and has no effect; is it spelt right?"
                ))),
            }
        }
        Ok(())
    }

    fn apply_peer_vars(&mut self, vars: &BTreeMap<String, String>) {
        let mut ignored = Vec::new();
        for (name, value) in vars.iter().filter(|(name, _)| name.starts_with("MC_")) {
            let v = value.trim();
            let done =
                match name.as_str() {
                    // Looked at together, below.
                    "MC_MIN_RPC_PORT" | "MC_MAX_RPC_PORT" | "MC_MIN_PRC_PORT"
                    | "MC_MAX_PRC_PORT" => Some(()),
                    "MC_TCP_LANES_PER_PEER" => count(v, 1..=16).map(|n| self.lanes_per_peer = n),
                    "MC_TCP_MAX_CONNECTIONS_PER_PEER" => {
                        if vars.contains_key("MC_TCP_LANES_PER_PEER") {
                            Some(())
                        } else {
                            count(v, 1..=16).map(|n| self.lanes_per_peer = n)
                        }
                    }
                    "MC_TRANSFER_TIMEOUT" => leading_integer(v).map(|n| {
                        let secs = n.max(MC_SHORTEST_TIMEOUT_SECS).unsigned_abs();
                        self.transfer_timeout = Duration::from_secs(secs);
                    }),
                    "MC_HANDSHAKE_CONNECT_TIMEOUT" => count(v, 1..=3599)
                        .map(|n| self.connect_timeout = Duration::from_secs(n as u64)),
                    "MC_HANDSHAKE_MAX_LENGTH" => count(v, MIB..=128 * MIB)
                        .map(|n| self.control_accept_limit = (n as u64).max(DEFAULT_ACCEPT_LIMIT)),
                    "MC_HANDSHAKE_PORT" => {
                        v.parse().ok().filter(|p| *p != 0).map(|p| self.control_port = p)
                    }
                    "MC_HANDSHAKE_LISTEN_BACKLOG" => {
                        count(v, 1..=i32::MAX as usize).map(|n| self.listen_backlog = n as u32)
                    }
                    "MC_TCP_STATUS_TIMEOUT_SEC" | "MC_TCP_PROGRESS_TIMEOUT_SEC" => {
                        count(v, 1..=86_400 * 365).map(|n| {
                            let t = Duration::from_secs(n as u64);
                            self.progress_timeout =
                                Some(self.progress_timeout.map_or(t, |before| before.min(t)));
                        })
                    }
                    "MC_TCP_PROTO" => {
                        if v == "1" {
                            self.newest_version = Version::V1;
                        }
                        Some(())
                    }
                    "MC_LOG_LEVEL" => level(v).map(|level| self.log = level),
                    // TCP is all there is, so forcing it is honoured as it stands.
                    "MC_FORCE_TCP" => Some(()),
                    // Peers advertise it, in store modes only, and so did never listen there alone.
                    "MC_TCP_BIND_ADDRESS" => {
                        self.notices.push(bind_address_notice(value));
                        Some(())
                    }
                    // Among these MC_METADATA_CLUSTER_ID, which names keys in a store.
                    _ => {
                        ignored.push(name.as_str());
                        Some(())
                    }
                };
            if done.is_none() {
                self.warn(name, value);
            }
        }
        self.apply_peer_ports(vars);
        if !ignored.is_empty() {
            self.notices
                .push(Notice::Debug(format!("accepted without effect: {}", ignored.join(", "))));
        }
    }

    fn apply_peer_ports(&mut self, vars: &BTreeMap<String, String>) {
        let one = |right: &str, misspelt: &str, default: u16| {
            let name = if vars.contains_key(right) { right } else { misspelt };
            match vars.get(name) {
                None => Ok(default),
                Some(text) => text
                    .trim()
                    .parse::<u16>()
                    .ok()
                    .filter(|p| *p >= 1024 && !EPHEMERAL_PORTS.contains(p))
                    .ok_or_else(|| (name.to_owned(), text.clone())),
            }
        };
        let default = PortRange::default();
        let first = one("MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT", default.first);
        let last = one("MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT", default.last);
        match (first, last) {
            (Ok(first), Ok(last)) if first <= last => self.ports = PortRange { first, last },
            (Ok(first), Ok(last)) => self.notices.push(Notice::Warning(format!(
                "MC_MIN_RPC_PORT={first} is above MC_MAX_RPC_PORT={last}: the default {default} is used"
            ))),
            (first, last) => {
                for (name, value) in [first, last].into_iter().filter_map(std::result::Result::err) {
                    self.warn(&name, &value);
                }
            }
        }
    }

    fn warn(&mut self, name: &str, value: &str) {
        let (expected, default) = peer_bounds(name);
        self.notices.push(Notice::Warning(format!(
            "{name}={value}: expected {expected}; the default, {default}, is used"
        )));
    }
}

fn bind_address_notice(value: &str) -> Notice {
    Notice::Debug(format!(
        "MC_TCP_BIND_ADDRESS={value} has no effect with P2PHANDSHAKE; TENSORFERRY_BIND restricts what is listened \
         on, TENSORFERRY_ADVERTISE sets what peers are told"
    ))
}

/// What one of the peers' variables may be, and its default here.
fn peer_bounds(name: &str) -> (&'static str, String) {
    let default = Config::default();
    match name {
        "MC_TCP_LANES_PER_PEER" | "MC_TCP_MAX_CONNECTIONS_PER_PEER" => {
            ("a count from 1 to 16", default.lanes_per_peer.to_string())
        }
        "MC_TRANSFER_TIMEOUT" => {
            ("a whole number of seconds", format!("{:?}", default.transfer_timeout))
        }
        "MC_HANDSHAKE_CONNECT_TIMEOUT" => {
            ("seconds from 1 to 3599", format!("{:?}", default.connect_timeout))
        }
        "MC_HANDSHAKE_MAX_LENGTH" => {
            ("bytes from 1048576 to 134217728", default.control_accept_limit.to_string())
        }
        "MC_HANDSHAKE_PORT" => ("a port from 1 to 65535", default.control_port.to_string()),
        "MC_HANDSHAKE_LISTEN_BACKLOG" => {
            ("a count from 1 to 2147483647", default.listen_backlog.to_string())
        }
        "MC_TCP_STATUS_TIMEOUT_SEC" | "MC_TCP_PROGRESS_TIMEOUT_SEC" => {
            ("seconds from 1 to 31536000", "no limit but the batch's deadline".into())
        }
        "MC_LOG_LEVEL" => ("error, warning, info, debug or trace", "warning".into()),
        // The four names of the two ends of the range of ports.
        _ => ("a port from 1024 to 65535 and not from 32768 to 60999", default.ports.to_string()),
    }
}

fn count(text: &str, range: std::ops::RangeInclusive<usize>) -> Option<usize> {
    text.parse().ok().filter(|n| range.contains(n))
}

fn flag(text: &str) -> Option<bool> {
    match text {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

fn level(text: &str) -> Option<LogLevel> {
    match text.to_ascii_lowercase().as_str() {
        "error" => Some(LogLevel::Error),
        "warning" | "warn" => Some(LogLevel::Warning),
        "info" => Some(LogLevel::Info),
        "debug" => Some(LogLevel::Debug),
        "trace" => Some(LogLevel::Trace),
        _ => None,
    }
}

fn file(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| text.into())
}

/// Short enough for the kernel to keep, and long enough to be asked three times.
fn is_a_while(time: &Duration) -> bool {
    (Duration::from_millis(500)..=Duration::from_secs(3600)).contains(time)
}

fn is_slot(bytes: &usize) -> bool {
    (64 << 10..=64 * MIB).contains(bytes) && bytes.is_multiple_of(4 << 10)
}

fn host(text: &str) -> Option<String> {
    let unspecified = text.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified());
    let host = tensorferry_metadata::local_host(text).ok()?;
    (!unspecified && host == text).then_some(host)
}

/// The number that a text starts with, as existing peers read `MC_TRANSFER_TIMEOUT` (`7.9` is 7).
fn leading_integer(text: &str) -> Option<i64> {
    let end = text
        .char_indices()
        .find(|(at, c)| !(c.is_ascii_digit() || (*at == 0 && *c == '-')))
        .map_or(text.len(), |(at, _)| at);
    text[..end].parse().ok()
}

/// `500ms`, `30s`, `2m`, or a number of seconds; more than nothing and at most ten years.
fn duration(text: &str) -> Option<Duration> {
    let (number, scale) = match text {
        t if t.ends_with("ms") => (&t[..t.len() - 2], 1e-3),
        t if t.ends_with('s') => (&t[..t.len() - 1], 1.0),
        t if t.ends_with('m') => (&t[..t.len() - 1], 60.0),
        t => (t, 1.0),
    };
    let secs = number.trim().parse::<f64>().ok()? * scale;
    (secs > 0.0 && secs <= 10.0 * 365.0 * 86_400.0).then(|| Duration::from_secs_f64(secs))
}

/// `0`, `50us`, `1ms`: up to 10 ms.
fn spin(text: &str) -> Option<Duration> {
    let time = match text.strip_suffix("us") {
        _ if text == "0" => Duration::ZERO,
        Some(number) => Duration::from_micros(number.trim().parse().ok()?),
        None => duration(text)?,
    };
    (time <= Duration::from_millis(10)).then_some(time)
}

/// `64KiB`, `16MiB`, `1GiB`, or a number of bytes.
fn bytes(text: &str) -> Option<usize> {
    let (number, shift) = match text {
        t if t.ends_with("KiB") => (&t[..t.len() - 3], 10),
        t if t.ends_with("MiB") => (&t[..t.len() - 3], 20),
        t if t.ends_with("GiB") => (&t[..t.len() - 3], 30),
        t => (t, 0),
    };
    number.trim().parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> std::result::Result<Config, ConfigError> {
        Config::from_vars(vars.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())))
    }

    #[test]
    fn an_empty_environment_is_the_default() {
        assert_eq!(from(&[]), Ok(Config::default()));
        assert_eq!(from(&[("PATH", "/bin")]), Ok(Config::default()));
    }

    #[test]
    fn ours_wins_over_the_peers() {
        let c = from(&[
            ("MC_TRANSFER_TIMEOUT", "60"),
            ("TENSORFERRY_TRANSFER_TIMEOUT", "1500ms"),
            ("MC_MIN_RPC_PORT", "20000"),
            ("MC_MAX_RPC_PORT", "20010"),
            ("TENSORFERRY_PORTS", "21000-21001"),
        ])
        .unwrap();
        assert_eq!(c.transfer_timeout, Duration::from_millis(1500));
        assert_eq!(c.ports, PortRange { first: 21000, last: 21001 });
        assert!(c.notices.is_empty());
    }

    #[test]
    fn a_name_of_ours_that_is_unknown_is_a_warning_and_the_programs_own_is_not() {
        let c = from(&[("TENSORFERRY_SIMULATOR", "x.so"), ("TENSORFERRY_BINDD", "::")]).unwrap();
        let warning = "TENSORFERRY_BINDD is no setting of this version and has no effect; is it spelt \
                       right?";
        assert_eq!(c.notices, [Notice::Warning(warning.into())]);
        assert_eq!(Config { notices: Vec::new(), ..c }, Config::default());
    }

    #[test]
    fn a_spin_is_a_short_time_or_none() {
        for (text, micros) in [("0", 0), ("50us", 50), ("1ms", 1000), ("0.01", 10_000)] {
            let spin = from(&[("TENSORFERRY_SPIN", text)]).unwrap().spin;
            assert_eq!(spin, Duration::from_micros(micros), "{text}");
        }
    }

    #[test]
    fn a_malformed_setting_of_ours_is_an_error_that_names_it() {
        for (name, value) in [
            ("TENSORFERRY_BIND", "everywhere"),
            ("TENSORFERRY_ADVERTISE", "0.0.0.0"),
            ("TENSORFERRY_PORTS", "9-1"),
            ("TENSORFERRY_LANES_PER_PEER", "0"),
            ("TENSORFERRY_IO_THREADS", "65"),
            ("TENSORFERRY_TRANSFER_TIMEOUT", "-1"),
            ("TENSORFERRY_TRANSFER_TIMEOUT", "inf"),
            ("TENSORFERRY_CONNECT_TIMEOUT", "soon"),
            ("TENSORFERRY_QUEUE_BYTES", "64x"),
            ("TENSORFERRY_LANE_IDLE_PROBE", ""),
            ("TENSORFERRY_LANE_KEEP", "0"),
            ("TENSORFERRY_SILENCE_TIMEOUT", "100ms"),
            ("TENSORFERRY_SPIN", "11ms"),
            ("TENSORFERRY_SPIN", "-1us"),
            ("TENSORFERRY_SAFE_COPY", "maybe"),
            ("TENSORFERRY_GPU", "yes"),
            ("TENSORFERRY_CUDA_LIBRARY", ""),
            ("TENSORFERRY_STAGING_SLOTS", "1"),
            ("TENSORFERRY_STAGING_SLOT_BYTES", "100000"),
            ("TENSORFERRY_LOG", "loud"),
        ] {
            let error = from(&[(name, value)]).unwrap_err();
            assert_eq!((error.name.as_str(), error.value.as_str()), (name, value));
            assert!(error.to_string().starts_with(&format!("{name}={value}: expected ")));
        }
    }

    #[test]
    fn a_malformed_setting_of_the_peers_is_one_warning_and_the_default() {
        for (name, value) in [
            ("MC_MIN_RPC_PORT", "80"),
            ("MC_MAX_RPC_PORT", "40000"),
            ("MC_MIN_PRC_PORT", "x"),
            ("MC_TCP_LANES_PER_PEER", "17"),
            ("MC_TRANSFER_TIMEOUT", "abc"),
            ("MC_HANDSHAKE_CONNECT_TIMEOUT", "3600"),
            ("MC_HANDSHAKE_MAX_LENGTH", "5"),
            ("MC_HANDSHAKE_PORT", "0"),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "0"),
            ("MC_LOG_LEVEL", "LOUD"),
        ] {
            let c = from(&[(name, value)]).unwrap();
            let defaults = Config { notices: c.notices.clone(), ..Config::default() };
            assert_eq!(c, defaults);
            let [Notice::Warning(text)] = c.notices.as_slice() else {
                panic!("{name}={value}: {:?}", c.notices)
            };
            assert!(text.starts_with(&format!("{name}={value}: expected ")), "{text}");
            assert!(text.ends_with(" is used"), "{text}");
        }
    }

    #[test]
    fn a_warning_says_the_bounds_and_the_default() {
        let said = |name: &str, value: &str| from(&[(name, value)]).unwrap().notices;
        for (name, value, rest) in [
            (
                "MC_TCP_LANES_PER_PEER",
                "17",
                "expected a count from 1 to 16; the default, 4, is used",
            ),
            (
                "MC_TRANSFER_TIMEOUT",
                "abc",
                "expected a whole number of seconds; the default, 30s, is used",
            ),
            (
                "MC_MAX_RPC_PORT",
                "40000",
                "expected a port from 1024 to 65535 and not from 32768 to 60999; the default, \
                 15000-17000, is used",
            ),
        ] {
            assert_eq!(said(name, value), [Notice::Warning(format!("{name}={value}: {rest}"))]);
        }
    }

    #[test]
    fn what_concerns_stores_only_is_without_effect_and_says_so() {
        let c =
            from(&[("MC_TCP_BIND_ADDRESS", "10.1.2.3"), ("MC_METADATA_CLUSTER_ID", "a")]).unwrap();
        let [Notice::Debug(address), Notice::Debug(rest)] = c.notices.as_slice() else {
            panic!("{:?}", c.notices)
        };
        assert!(address.starts_with("MC_TCP_BIND_ADDRESS=10.1.2.3 has no effect"), "{address}");
        assert!(address.contains("TENSORFERRY_BIND"), "{address}");
        assert_eq!(rest, "accepted without effect: MC_METADATA_CLUSTER_ID");
        assert_eq!(Config { notices: Vec::new(), ..c }, Config::default());
    }

    #[test]
    fn timeouts_are_read_as_peers_read_them() {
        for (text, secs) in [("7.9", 7), ("4", 5), ("0", 5), ("-1", 5), ("31", 31)] {
            let c = from(&[("MC_TRANSFER_TIMEOUT", text)]).unwrap();
            assert_eq!(c.transfer_timeout, Duration::from_secs(secs), "{text}");
        }
    }

    #[test]
    fn other_names_of_the_peers_are_listed_in_one_line() {
        let c = from(&[("MC_GID_INDEX", "3"), ("MC_TCP_SLICE_SIZE", "1")]).unwrap();
        assert_eq!(
            c.notices,
            [Notice::Debug("accepted without effect: MC_GID_INDEX, MC_TCP_SLICE_SIZE".into())]
        );
    }
}
