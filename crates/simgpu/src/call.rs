//! What every vendor's call has in common: counted, made to fail, refused when it may not be made.

use std::time::Duration;

use crate::code::{Done, INSUFFICIENT_DRIVER, NOT_INITIALIZED, NOT_PERMITTED, OPERATING_SYSTEM};
use crate::core::{Core, core, variant};
use crate::sys;
use crate::variant::Family;

/// What has to be so before a call may be made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Rule {
    /// Nothing.
    Free,
    /// It is the initialisation itself.
    Init,
    /// Initialised before.
    Driver,
    /// The same, and it may not be made while a stream captures.
    DriverUnsafe,
    /// Initialises by itself, and keeps its error as the thread's last.
    Runtime,
    /// The same, and it may not be made while a stream captures.
    RuntimeUnsafe,
}

impl Rule {
    fn is_runtime(self) -> bool {
        matches!(self, Self::Runtime | Self::RuntimeUnsafe)
    }
}

/// One call by its exported name.
pub(crate) fn call(
    name: &'static str,
    rule: Rule,
    body: impl FnOnce(&'static Core) -> Done,
) -> i32 {
    let core = core();
    let code = admit(core, name, rule).and_then(|()| body(core)).err().unwrap_or(0);
    if rule.is_runtime() && code != 0 {
        core.thread(|thread| thread.last_error = code);
    }
    code
}

fn admit(core: &'static Core, name: &'static str, rule: Rule) -> Done {
    if core.forked() {
        return match rule {
            Rule::Free => Ok(()),
            Rule::Init if variant().family() != Family::Hip => Err(OPERATING_SYSTEM),
            _ => Err(NOT_INITIALIZED),
        };
    }
    let mut state = core.lock();
    state.count_call(name);
    if let Some(code) = state.fault(name) {
        return Err(code);
    }
    match rule {
        Rule::Free => return Ok(()),
        Rule::Init => {}
        Rule::Driver | Rule::DriverUnsafe if core.initialised() => {}
        Rule::Driver | Rule::DriverUnsafe => return Err(NOT_INITIALIZED),
        Rule::Runtime | Rule::RuntimeUnsafe => {
            if !core.initialised() {
                drop(state);
                initialise(core, true)?;
                state = core.lock();
            }
        }
    }
    if state.config.sticky != 0 {
        return Err(state.config.sticky);
    }
    if core.thread(|thread| thread.in_host_function) {
        return Err(NOT_PERMITTED);
    }
    if matches!(rule, Rule::DriverUnsafe | Rule::RuntimeUnsafe) {
        state.check_capture(core, variant().family())?;
    }
    Ok(())
}

/// `cuInit` and its like. The driver tries again and pays again; a runtime remembers.
pub(crate) fn initialise(core: &'static Core, by_runtime: bool) -> Done {
    const NO_DEVICE: i32 = 100;
    if core.initialised() {
        return Ok(());
    }
    let variant = variant();
    if by_runtime && variant.family() == Family::Cuda {
        let major = |version: i32| version / 1000;
        if major(core.driver_version) < major(variant.version()) {
            return Err(INSUFFICIENT_DRIVER);
        }
    }
    let delay = core.lock().config.init_delay_ns;
    std::thread::sleep(Duration::from_nanos(delay));
    let mut state = core.lock();
    let mut code = state.config.init_error;
    if code == 0 && state.devices.is_empty() {
        code = NO_DEVICE;
    }
    if code == 0 {
        core.own();
        return Ok(());
    }
    if by_runtime && state.init_failed {
        return Err(code);
    }
    state.init_failed = true;
    state.add("failed_initialisations", 1);
    drop(state);
    // A failing initialisation of the real driver is slow and leaks: whoever repeats it, notices.
    for _ in 0..4 {
        sys::leak_descriptor();
    }
    std::thread::sleep(Duration::from_millis(10));
    Err(code)
}

/// Exports functions under a prefix: `rule name "Suffix"(arguments) => |core| body;`
macro_rules! api {
    ($prefix:literal $( $rule:ident $name:ident $suffix:literal
        ($($arg:ident: $ty:ty),* $(,)?) => $body:expr; )*) => { $(
        #[unsafe(export_name = concat!($prefix, $suffix))]
        extern "C" fn $name($($arg: $ty),*) -> i32 {
            $crate::call::call(concat!($prefix, $suffix), $crate::call::Rule::$rule, $body)
        }
    )* };
}
pub(crate) use api;
