//! `tensorferry._native`: the engine as Python sees it.
//!
//! It translates, and nothing else: arguments into the engine's types, the engine's errors into exceptions (`face`), or
//! into the integers that programs for existing engines expect. The interpreter lock is released wherever bytes
//! move or a peer is waited for, no panic gets out, and no thread of the engine ever takes that lock.

mod args;
mod engine;
mod face;
mod failure;
mod interpreter;
mod last_error;
mod lifetime;
mod logging;
mod managed;
mod program;
mod ready;
mod stats;
mod streamed;
mod support;
mod topology;
mod types;
mod waiting;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::engine::TransferEngine;
    #[pymodule_export]
    use crate::face::{Buffer, Engine, Notification, Registration, Segment, Transfer, Wakeups};
    #[pymodule_export]
    use crate::program::{doctor, main};
    #[pymodule_export]
    use crate::support::supports;
    #[pymodule_export]
    use crate::types::{InnerTransferEngine, TransferNotify, TransferOpcode};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::interpreter::check(module.py())?;
        module.add("__version__", tensorferry::VERSION)?;
        module.add("Read", TransferOpcode::READ)?;
        module.add("Write", TransferOpcode::WRITE)?;
        Ok(())
    }
}
