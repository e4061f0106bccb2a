//! What the tests are made of.

use std::time::{Duration, Instant};

use tensorferry::{
    Batch, Config, Engine, Error, HostBuffer, Op, OwnedRequest, RegisterOptions, Segment,
    SubmitOptions,
};

/// A target with one registered buffer, and an initiator that has opened it.
pub(crate) struct Pair {
    pub(crate) target: Engine,
    pub(crate) remote: HostBuffer,
    pub(crate) initiator: Engine,
    pub(crate) segment: Segment,
}

pub(crate) fn engine(config: Config) -> Engine {
    Engine::new("127.0.0.1", config).expect("loopback has free ports")
}

impl Pair {
    pub(crate) fn new(len: usize) -> Self {
        Self::with(len, Config::default())
    }

    /// `config` is the initiator's.
    pub(crate) fn with(len: usize, config: Config) -> Self {
        let target = engine(Config::default());
        let remote = HostBuffer::zeroed(len).unwrap();
        target.register_buffer(&remote, &RegisterOptions::default()).unwrap();
        let initiator = engine(config);
        let segment = initiator.open(target.name()).unwrap();
        Self { target, remote, initiator, segment }
    }

    /// One request over the first `len` bytes of `local`.
    pub(crate) fn start(&self, op: Op, local: &HostBuffer, remote: u64, len: usize) -> Batch {
        let request = local.request(op, 0, remote, len).unwrap();
        self.segment.submit_owned(&[request], SubmitOptions::default()).unwrap()
    }
}

/// Bytes that depend on their place and on `seed`.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        bytes.extend_from_slice(&x.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn buffer(bytes: &[u8]) -> HostBuffer {
    let buffer = HostBuffer::zeroed(bytes.len()).unwrap();
    buffer.write(0, bytes);
    buffer
}

/// Waits for a condition, at most for ten seconds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        // Not in a tight loop: other tests, and what is waited for, need the processors.
        std::thread::park_timeout(Duration::from_micros(100));
    }
}

/// What asking a thread takes at most, on a machine that is so busy that a thread may not run for a second. Work that
/// waits for something that is not coming takes much longer.
pub(crate) const PROMPT: Duration = Duration::from_secs(3);

/// What is promised to take less than `limit` has three tries: others who work on the machine may hold one up, and what
/// waits for something that is not coming is late each time.
pub(crate) fn promptly(limit: Duration, what: &str, mut attempt: impl FnMut() -> Duration) {
    let mut tries = [Duration::ZERO; 3];
    let kept = tries.iter_mut().any(|took| {
        *took = attempt();
        *took < limit
    });
    assert!(kept, "{what} takes less than {limit:?}: {tries:?}");
}

pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = f();
    (result, begin.elapsed())
}

pub(crate) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// So many lanes, and so many IO threads. No lane is replaced because the machine has left it idle for a while.
pub(crate) fn lanes(lanes: usize, io_threads: usize) -> Config {
    let mut config = Config::default();
    (config.lanes_per_peer, config.io_threads) = (lanes, io_threads);
    config.transfer_timeout = Duration::from_secs(8);
    config.lane_idle_probe = Duration::from_secs(60);
    config
}

pub(crate) fn within(timeout: Duration) -> SubmitOptions {
    SubmitOptions::default().with_timeout(timeout)
}

/// One request over all of `local`.
pub(crate) fn start(segment: &Segment, op: Op, local: &HostBuffer, remote: u64) -> Batch {
    start_within(segment, op, local, remote, Duration::from_secs(8))
}

pub(crate) fn start_within(
    segment: &Segment,
    op: Op,
    local: &HostBuffer,
    remote: u64,
    timeout: Duration,
) -> Batch {
    let request = local.request(op, 0, remote, local.len()).unwrap();
    segment.submit_owned(&[request], within(timeout)).unwrap()
}

/// `count` requests of `len` bytes each, one after the other in `local` and in `remote`.
pub(crate) fn row(
    op: Op,
    local: &HostBuffer,
    remote: u64,
    len: usize,
    count: usize,
) -> Vec<OwnedRequest> {
    let one = |i: usize| local.request(op, i * len, remote + (i * len) as u64, len).unwrap();
    (0..count).map(one).collect()
}

/// The error's text, checked to have all of `parts`.
pub(crate) fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// Runs a test of this program that is marked to be ignored in a process of its own: one that counts what the
/// whole process has.
pub(crate) fn alone(test: &str) {
    let program = std::env::current_exe().unwrap();
    let args = [test, "--exact", "--ignored", "--nocapture", "--test-threads=1"];
    let output = std::process::Command::new(program).args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Numbers by chance, the same in every run.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.roll() % n
    }

    pub(crate) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// A test of this program that is marked to be ignored, in a process of its own that goes on beside this one.
pub(crate) struct Beside {
    child: std::process::Child,
    output: std::io::BufReader<std::process::ChildStdout>,
}

impl Beside {
    pub(crate) fn start(test: &str) -> Self {
        let args = [test, "--exact", "--ignored", "--test-threads=1", "--nocapture"];
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(args)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// What it says next with [`tell`].
    pub(crate) fn told(&mut self) -> Vec<u64> {
        let mut line = String::new();
        loop {
            line.clear();
            let n = std::io::BufRead::read_line(&mut self.output, &mut line).unwrap();
            assert!(n > 0, "it has ended");
            if let Some((_, words)) = line.split_once(TOLD) {
                return words.split_whitespace().map(|word| word.parse().unwrap()).collect();
            }
        }
    }

    /// Processor time of it so far, in hundredths of a second.
    pub(crate) fn ticks(&self) -> u64 {
        ticks_in(&format!("/proc/{}/stat", self.child.id()))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // It ends with its input; were it stuck, it would not.
        drop(self.child.stdin.take());
        let until = Instant::now() + Duration::from_secs(10);
        while Instant::now() < until && self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const TOLD: &str = "told:";

/// Says some numbers to whoever has started this process with [`Beside`].
#[allow(clippy::print_stdout, reason = "the other process reads it")]
pub(crate) fn tell(words: &[u64]) {
    let words: Vec<String> = words.iter().map(u64::to_string).collect();
    println!("{TOLD}{}", words.join(" "));
}

/// Waits until whoever has started this process with [`Beside`] is done with it.
pub(crate) fn until_dismissed() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// Resident memory of this process in bytes.
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Sets how many descriptors the process may have.
#[expect(unsafe_code, reason = "setrlimit")]
pub(crate) fn limit_descriptors(n: u64) {
    let limit = libc::rlimit { rlim_cur: n, rlim_max: 4096 };
    // SAFETY: one rlimit, alive during the call.
    let rc = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(rc, 0);
}

/// Processor time of this process so far, in hundredths of a second.
pub(crate) fn ticks() -> u64 {
    ticks_in("/proc/self/stat")
}

/// The same of this thread: what it takes does not depend on how busy the machine is.
pub(crate) fn own_ticks() -> u64 {
    ticks_in("/proc/thread-self/stat")
}

fn ticks_in(file: &str) -> u64 {
    let stat = std::fs::read_to_string(file).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split(' ').collect();
    fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
}
