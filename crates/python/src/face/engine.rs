//! The class `Engine`.
#![expect(unsafe_code, reason = "addresses from Python")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tensorferry::gpu::Location;
use tensorferry::{Access, Error, RegisterOptions};

use crate::args::Text;
use crate::face::buffer::Given;
use crate::face::raise;
use crate::face::registration::Registration;
use crate::face::segment::Segment;
use crate::face::settings::config;
use crate::face::values::{Buffer, Notification};
use crate::failure::Failure;
use crate::ready::{Ready, start};
use crate::stats;
use crate::waiting::aside;

/// A transfer engine: registered memory that peers can reach, and a way to reach theirs, over TCP.
///
/// `host` is the name or address that peers reach this machine by. An address of this machine is the only one that is
/// listened on; with a name, all interfaces are. The keyword arguments are settings, which win over the environment's
/// `TENSORFERRY_*`; docs/settings.md has each with its bounds. Times are in seconds, sizes in bytes; both may also be
/// texts such as "500ms" and "16MiB". `ports` is a pair, both included, or a text such as "15000-17000".
///
/// Use it in a `with` block, or call `close()`; it is closed with its last segment and transfer, too, and at the end
/// of the interpreter. Any method may be called from any thread, and other Python threads run while one waits.
///
/// Raises ConfigError for a malformed setting, PortsExhausted, BadName, and Error where the system refuses.
#[pyclass(frozen, weakref, module = "tensorferry")]
pub(crate) struct Engine {
    /// Dropped first, which closes the engine: before it lets go of the objects.
    ready: Arc<Ready>,
    /// Not shown to the garbage collector: what it finds in a cycle it empties in any order, and peers can reach this
    /// memory until the engine is closed. Locked with the interpreter lock held, and never across a call into Python.
    registered: Mutex<Registered>,
}

/// Objects that keep registered memory, by the number of the registration; nothing for plain addresses.
#[derive(Default)]
struct Registered {
    last: u64,
    objects: HashMap<u64, Option<Py<PyAny>>>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(
        signature = (
            host="127.0.0.1", *, bind=None, advertise=None, ports=None, lanes_per_peer=None, io_threads=None,
            transfer_timeout=None, connect_timeout=None, queue_bytes=None, lane_idle_probe=None, lane_keep=None,
            silence_timeout=None, spin=None, safe_copy=None, gpu=None, staging_slots=None, staging_slot_bytes=None, log=None
        )
    )]
    #[expect(clippy::too_many_arguments, reason = "one for each setting")]
    fn new(
        py: Python<'_>,
        host: &str,
        bind: Option<Bound<'_, PyAny>>,
        advertise: Option<Bound<'_, PyAny>>,
        ports: Option<Bound<'_, PyAny>>,
        lanes_per_peer: Option<Bound<'_, PyAny>>,
        io_threads: Option<Bound<'_, PyAny>>,
        transfer_timeout: Option<Bound<'_, PyAny>>,
        connect_timeout: Option<Bound<'_, PyAny>>,
        queue_bytes: Option<Bound<'_, PyAny>>,
        lane_idle_probe: Option<Bound<'_, PyAny>>,
        lane_keep: Option<Bound<'_, PyAny>>,
        silence_timeout: Option<Bound<'_, PyAny>>,
        spin: Option<Bound<'_, PyAny>>,
        safe_copy: Option<Bound<'_, PyAny>>,
        gpu: Option<Bound<'_, PyAny>>,
        staging_slots: Option<Bound<'_, PyAny>>,
        staging_slot_bytes: Option<Bound<'_, PyAny>>,
        log: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        raise(py, || {
            let config = config(&[
                ("bind", bind),
                ("advertise", advertise),
                ("ports", ports),
                ("lanes_per_peer", lanes_per_peer),
                ("io_threads", io_threads),
                ("transfer_timeout", transfer_timeout),
                ("connect_timeout", connect_timeout),
                ("queue_bytes", queue_bytes),
                ("lane_idle_probe", lane_idle_probe),
                ("lane_keep", lane_keep),
                ("silence_timeout", silence_timeout),
                ("spin", spin),
                ("safe_copy", safe_copy),
                ("gpu", gpu),
                ("staging_slots", staging_slots),
                ("staging_slot_bytes", staging_slot_bytes),
                ("log", log),
            ])?;
            Ok(Self { ready: start(py, host, config, "tcp")?, registered: Mutex::default() })
        })
    }

    /// The name that peers open: "host:port".
    #[getter]
    fn name(&self) -> &str {
        self.ready.engine().name()
    }

    /// The port of the name: peers ask there for buffers, probe and notify.
    #[getter]
    fn control_port(&self) -> u16 {
        self.ready.engine().control_port()
    }

    /// The port that data connections go to.
    #[getter]
    fn data_port(&self) -> u16 {
        self.ready.engine().data_port()
    }

    /// Whether `close()` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.ready.engine().is_closed()
    }

    /// Lets peers READ and WRITE the memory of an object.
    ///
    /// `obj` is anything with a buffer (bytes, bytearray, memoryview, array, numpy), with `__cuda_array_interface__`
    /// or `__dlpack__` (tensors, on a GPU or not), or `(address, length)` in bytes. It must be contiguous; its bytes
    /// move as they lie in memory. What is read-only can only be READ, and so can everything with `readonly=True`.
    ///
    /// `location` is "*" (find out), "cpu", or a GPU such as "cuda:0", whose library is then initialised.
    ///
    /// The object is kept until `unregister()`, or until the engine is closed. The very same range can be registered
    /// again, and needs as many `unregister()`. Raises Overlap, BadLocalAddress, BadArgument, DeviceError.
    #[pyo3(
        signature = (obj, *, readonly=false, location=None),
        text_signature = "($self, obj, *, readonly=False, location='*')"
    )]
    fn register(
        slf: &Bound<'_, Self>,
        obj: &Bound<'_, PyAny>,
        readonly: bool,
        location: Option<Text>,
    ) -> PyResult<Registration> {
        let py = slf.py();
        raise(py, || {
            let engine = slf.get();
            engine.check()?;
            let location = match location {
                None => Location::Any,
                Some(text) => text.0.parse().map_err(|e| Failure::new(format!("location: {e}")))?,
            };
            let memory = Given::of(obj)?.memory()?;
            let access = match memory.readonly {
                _ if readonly => Access::ReadOnly,
                Some(true) => Access::ReadOnly,
                Some(false) => Access::ReadWrite,
                None => Access::AsMapped,
            };
            let options = RegisterOptions::default().with_access(access).with_location(location);
            engine.enter(py, memory.addr, memory.nbytes, &options)?;
            let number = engine.keep(memory.keep.map(Bound::unbind));
            let device = engine.device_of(py, memory.addr, memory.nbytes);
            let (addr, nbytes, engine) = (memory.addr, memory.nbytes, slf.clone().unbind());
            Ok(Registration { engine, number, addr, nbytes, device })
        })
    }

    /// The buffers that are registered here, in the order of their registration.
    fn buffers(&self, py: Python<'_>) -> PyResult<Vec<Buffer>> {
        raise(py, || {
            self.check()?;
            let buffers = py.detach(|| self.ready.engine().buffers());
            Ok(buffers.into_iter().map(Buffer::from).collect())
        })
    }

    /// Opens the memory of the peer called `name`, "host:port": asks it for its buffers, unless that is known.
    ///
    /// Raises BadName, PeerUnreachable, ProtocolError.
    fn open(slf: &Bound<'_, Self>, py: Python<'_>, name: Text) -> PyResult<Segment> {
        raise(py, || {
            let engine = slf.get();
            engine.check()?;
            let inner = engine.ready.engine().clone();
            let segment = aside(py, || engine.check(), move || inner.open(&name.0))??;
            Ok(Segment::new(slf.clone().unbind(), segment))
        })
    }

    /// As `open`, without asking: the first transfer finds out whether the peer is there. Never waits.
    fn segment(slf: &Bound<'_, Self>, py: Python<'_>, name: Text) -> PyResult<Segment> {
        raise(py, || {
            let engine = slf.get();
            engine.check()?;
            let segment = engine.ready.engine().segment(&name.0)?;
            Ok(Segment::new(slf.clone().unbind(), segment))
        })
    }

    /// Asks the peer called `name` whether it is alive. Raises what `open` does if it is not.
    fn probe(&self, py: Python<'_>, name: Text) -> PyResult<()> {
        raise(py, || {
            self.check()?;
            let inner = self.ready.engine().clone();
            Ok(aside(py, || self.check(), move || inner.probe(&name.0))??)
        })
    }

    /// The messages that peers have sent since the last call, in the order of their arrival.
    fn notifications(&self, py: Python<'_>) -> PyResult<Vec<Notification>> {
        raise(py, || {
            self.check()?;
            let arrived = py.detach(|| self.ready.engine().take_notifications());
            Ok(arrived.into_iter().map(Notification::arrived).collect())
        })
    }

    /// What the engine has done so far: its counters by name. `"peers"` has a dict for every peer by its name: the same
    /// counters for it alone, `"state"`, `"lanes"`, what is queued, and `"last_error"`. Times are in seconds.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        raise(py, || {
            self.check()?;
            Ok(stats::all(py, self.ready.engine())?)
        })
    }

    /// Ends the engine now: running transfers fail as Closed, peers cannot reach its memory, its sockets are closed,
    /// and it lets go of what was registered. Closing twice does no harm.
    fn close(&self, py: Python<'_>) {
        self.ready.close(py);
        let objects = std::mem::take(&mut self.lock().objects);
        drop(objects);
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { ", closed" } else { "" };
        format!("<Engine {}{state}>", self.name())
    }
}

impl Engine {
    pub(crate) fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.ready.is_forked()
    }

    /// Fails in a forked child of the process that made the engine.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.ready.check()
    }

    fn enter(
        &self,
        py: Python<'_>,
        addr: u64,
        nbytes: u64,
        options: &RegisterOptions,
    ) -> Result<(), Failure> {
        let engine = self.ready.engine();
        // SAFETY: the object that owns the range is kept until the range is unregistered or the engine is closed; for
        // a range that was given by its address, the caller does that, as the documentation asks.
        Ok(py.detach(|| unsafe { engine.register(addr, nbytes, options) })?)
    }

    fn keep(&self, object: Option<Py<PyAny>>) -> u64 {
        let mut registered = self.lock();
        registered.last += 1;
        let number = registered.last;
        registered.objects.insert(number, object);
        number
    }

    fn device_of(&self, py: Python<'_>, addr: u64, nbytes: u64) -> String {
        let gpus = self.ready.engine().gpus();
        let memory = py.detach(|| gpus.classify(Location::Any, addr, nbytes));
        let device = memory.ok().and_then(|memory| memory.staged_on());
        device.map_or_else(|| "cpu".to_owned(), |device| device.to_string())
    }

    pub(crate) fn unregister(&self, py: Python<'_>, number: u64, addr: u64) -> Result<(), Failure> {
        self.check()?;
        // Taken first, so that of two calls at the same time one does nothing.
        let Some(object) = self.lock().objects.remove(&number) else { return Ok(()) };
        let inner = self.ready.engine().clone();
        let unregistered = aside(py, || self.check(), move || inner.unregister(addr));
        let failure = match unregistered {
            Ok(Ok(()) | Err(Error::Closed)) => return Ok(()),
            Ok(Err(error)) => error.into(),
            Err(failure) => failure,
        };
        self.lock().objects.insert(number, object);
        Err(failure)
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
