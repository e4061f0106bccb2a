//! The class `Segment`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use tensorferry::{OnFull, Op};

use crate::args::{Int, Ints, room};
use crate::face::buffer::Given as GivenMemory;
use crate::face::engine::Engine;
use crate::face::kept::{Objects, let_go};
use crate::face::loops;
use crate::face::options::Chosen;
use crate::face::raise;
use crate::face::transfer::Transfer;
use crate::face::values::{Buffer, Notification};
use crate::failure::Failure;
use crate::ready::{Lengths, Lists, Order};
use crate::waiting::aside;

/// The memory of a peer, by name: what `Engine.open` returns.
///
/// A local range is an object with a buffer, an array or tensor (as for `Engine.register`, but it need not be
/// registered), `(address, length)`, or an address. A remote one is an address in the peer's process, in a buffer that is
/// registered there. `length` is in bytes; without it, all of the local object is meant.
///
/// `timeout`: seconds until the transfer must be complete; without it, the setting `transfer_timeout`, and 10 ns per
/// byte. `stream`: a GPU stream (an object with `cuda_stream` or `__cuda_stream__`, or its handle) to start behind;
/// with `hold_stream=True`, work that is put on it later waits for the end of the transfer. `notify`: a message that the
/// peer gets when every byte is in place. `on_full`: if too much is queued for the peer, "wait" for room, "refuse" with
/// Busy, or wait for so many seconds. Where an event loop of asyncio runs, the methods that return a Transfer do not wait, but
/// refuse.
///
/// Objects are kept until the engine does not touch their memory any more. What fails is raised as an Error, one of
/// its subclasses; arguments of a wrong type as TypeError.
#[pyclass(frozen, weakref, module = "tensorferry")]
pub(crate) struct Segment {
    engine: Py<Engine>,
    inner: tensorferry::Segment,
}

/// The entries of a batch, and what keeps their local memory.
struct Entries {
    lists: Lists,
    objects: Objects,
}

#[pymethods]
impl Segment {
    /// The name that it was opened by.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// The engine that it was opened with.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<Engine> {
        self.engine.clone_ref(py)
    }

    /// The buffers that the peer has registered, asked for now. Raises what `Engine.open` does.
    fn buffers(&self, py: Python<'_>) -> PyResult<Vec<Buffer>> {
        raise(py, || {
            self.check()?;
            let inner = self.inner.clone();
            let buffers = aside(py, || self.check(), move || inner.buffers())??;
            Ok(buffers.into_iter().map(Buffer::from).collect())
        })
    }

    /// Copies bytes at `remote` to `local`, and waits until they are there.
    #[pyo3(
        signature = (local, remote, length=None, **options),
        text_signature = "($self, local, remote, length=None, *, timeout=None, stream=None, hold_stream=False, notify=None, on_full='wait')"
    )]
    fn read(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: Int,
        length: Option<Int>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        raise(py, || self.run(py, Op::Read, one(Op::Read, local, remote, length)?, options))
    }

    /// Copies the bytes of `local` to `remote`, and waits until they are there.
    #[pyo3(
        signature = (local, remote, length=None, **options),
        text_signature = "($self, local, remote, length=None, *, timeout=None, stream=None, hold_stream=False, notify=None, on_full='wait')"
    )]
    fn write(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: Int,
        length: Option<Int>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        raise(py, || self.run(py, Op::Write, one(Op::Write, local, remote, length)?, options))
    }

    /// As `read`, without waiting: the transfer can be waited for, awaited and cancelled.
    #[pyo3(
        signature = (local, remote, length=None, **options),
        text_signature = "($self, local, remote, length=None, *, timeout=None, stream=None, hold_stream=False, notify=None, on_full='wait')"
    )]
    fn read_async(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: Int,
        length: Option<Int>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Transfer> {
        raise(py, || self.begin(py, Op::Read, one(Op::Read, local, remote, length)?, options))
    }

    /// As `write`, without waiting: the transfer can be waited for, awaited and cancelled.
    #[pyo3(
        signature = (local, remote, length=None, **options),
        text_signature = "($self, local, remote, length=None, *, timeout=None, stream=None, hold_stream=False, notify=None, on_full='wait')"
    )]
    fn write_async(
        &self,
        py: Python<'_>,
        local: &Bound<'_, PyAny>,
        remote: Int,
        length: Option<Int>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Transfer> {
        raise(py, || self.begin(py, Op::Write, one(Op::Write, local, remote, length)?, options))
    }

    /// Starts many transfers at once, in any order, as one: `op` is "read" or "write".
    ///
    /// `locals` and `remotes` have an item for each, `lengths` too, or is one number for all. `locals` is a sequence of
    /// objects, or of addresses; without `lengths`, objects are meant as a whole. Integers are best given as arrays
    /// (numpy, `array`) of 8-byte integers, which are read without an object for each. One that fails does not stop the
    /// others: see `Transfer.failures()`.
    ///
    /// Waits only if `on_full` says so. Raises BadArgument if an entry cannot be meant; nothing is sent then.
    #[pyo3(
        signature = (op, locals, remotes, lengths=None, **options),
        text_signature = "($self, op, locals, remotes, lengths=None, *, timeout=None, stream=None, hold_stream=False, notify=None, on_full='wait')"
    )]
    fn submit(
        &self,
        py: Python<'_>,
        op: &str,
        locals: &Bound<'_, PyAny>,
        remotes: Ints<'_>,
        lengths: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Transfer> {
        raise(py, || {
            let op = match op {
                "read" => Op::Read,
                "write" => Op::Write,
                _ => {
                    return Err(Failure::new(format!("op={op:?}: expected \"read\" or \"write\"")));
                }
            };
            self.begin(py, op, many(op, locals, &remotes, lengths)?, options)
        })
    }

    /// Sends a message to the peer, and waits until it has it. Raises NotifyFailed.
    fn notify(&self, py: Python<'_>, notification: PyRef<'_, Notification>) -> PyResult<()> {
        let message = notification.to_send();
        drop(notification);
        raise(py, || {
            self.check()?;
            let inner = self.inner.clone();
            Ok(aside(py, || self.check(), move || inner.notify(&message))??)
        })
    }

    fn __repr__(&self) -> String {
        format!("<Segment {}>", self.name())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.engine)
    }
}

impl Segment {
    pub(crate) fn new(engine: Py<Engine>, inner: tensorferry::Segment) -> Self {
        Self { engine, inner }
    }

    fn check(&self) -> Result<(), Failure> {
        self.engine.get().check()
    }

    fn run(
        &self,
        py: Python<'_>,
        op: Op,
        entries: Entries,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<(), Failure> {
        self.check()?;
        let ready = self.engine.get().ready();
        let Chosen { options, stream: _stream } = Chosen::of(ready, options)?;
        let order = Order { segment: &self.inner, lists: &entries.lists, op, options };
        // What raises, such as Ctrl-C, has cancelled the batch, so that its memory is left alone.
        let (batch, result) = ready.complete(py, &order)?;
        let_go(&batch, entries.objects);
        Ok(result?)
    }

    fn begin(
        &self,
        py: Python<'_>,
        op: Op,
        entries: Entries,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<Transfer, Failure> {
        self.check()?;
        let ready = self.engine.get().ready();
        let Chosen { mut options, stream } = Chosen::of(ready, options)?;
        let on_full = std::mem::replace(&mut options.on_full, OnFull::Refuse);
        let mut order = Order { segment: &self.inner, lists: &entries.lists, op, options };
        let batch = match ready.submit(py, &order, |batch| batch) {
            Err(full) if full.is_busy() && on_full != OnFull::Refuse => {
                if loops::is_running(py)? {
                    return Err(full.with_text(format!("the queue to {} {HOLDS_UP}", self.name())));
                }
                order.options.on_full = on_full;
                ready.submit(py, &order, |batch| batch)?
            }
            tried => tried?,
        };
        let mut objects = entries.objects;
        objects.extend(stream.map(Bound::unbind));
        Ok(Transfer::new(self.engine.clone_ref(py), batch, objects))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.engine.get().is_forked() {
            // Its memory may have been in change at the fork: never looked at again.
            std::mem::forget(self.inner.clone());
        }
    }
}

/// Why nobody waits for room in the thread of an event loop.
const HOLDS_UP: &str = "is full, and waiting for room would hold up the event loop of this thread; await earlier \
    transfers first, or start this one with asyncio.to_thread, where it waits";

/// One range.
fn one(
    op: Op,
    local: &Bound<'_, PyAny>,
    Int(remote): Int,
    length: Option<Int>,
) -> Result<Entries, Failure> {
    let mut objects = Objects::new();
    let length = length.map(|Int(length)| length);
    let (addr, length) = range(op, GivenMemory::of(local)?, length, &mut objects)?;
    Ok(Entries { lists: Lists::of(vec![addr], vec![remote], vec![length]), objects })
}

/// The address and the length of a local range; what keeps it is put to the others.
fn range(
    op: Op,
    given: GivenMemory<'_>,
    length: Option<u64>,
    objects: &mut Objects,
) -> Result<(u64, u64), Failure> {
    let memory = match (given, length) {
        (GivenMemory::Address(addr), Some(length)) => return Ok((addr, length)),
        (given, _) => given.memory()?,
    };
    if op == Op::Read && memory.readonly == Some(true) {
        return Err(Failure::new(
            "the local memory of a READ is written, and this object is read-only",
        ));
    }
    let length = length.unwrap_or(memory.nbytes);
    if length > memory.nbytes {
        return Err(Failure::new(format!(
            "length={length}: the local object has {} bytes",
            memory.nbytes
        )));
    }
    objects.extend(memory.keep.map(Bound::unbind));
    Ok((memory.addr, length))
}

/// The entries of a batch.
fn many(
    op: Op,
    locals: &Bound<'_, PyAny>,
    remotes: &Ints<'_>,
    lengths: Option<&Bound<'_, PyAny>>,
) -> Result<Entries, Failure> {
    let py = locals.py();
    let lengths = lengths.map(Lengths::of).transpose()?;
    if let Some(locals) = objects_of(locals)? {
        return of_objects(py, op, &locals, remotes, lengths);
    }
    let locals: Ints<'_> = locals.extract()?;
    let Some(lengths) = lengths else {
        return Err(PyTypeError::new_err(
            "lengths is needed where locals are addresses: a sequence, or one number for all",
        )
        .into());
    };
    let lists = Lists::new(py, &locals, remotes, &lengths, ["locals", "remotes"])?;
    Ok(Entries { lists, objects: Objects::new() })
}

/// The items of a sequence of objects; `None` for one of addresses.
fn objects_of<'py>(locals: &Bound<'py, PyAny>) -> Result<Option<Vec<Bound<'py, PyAny>>>, Failure> {
    let items: Vec<Bound<'py, PyAny>> = if let Ok(list) = locals.cast::<PyList>() {
        match list.iter().next() {
            Some(first) if is_address(&first) => return Ok(None),
            _ => list.iter().collect(),
        }
    } else if let Ok(tuple) = locals.cast::<PyTuple>() {
        match tuple.iter().next() {
            Some(first) if is_address(&first) => return Ok(None),
            _ => tuple.iter().collect(),
        }
    } else {
        return Ok(None);
    };
    Ok(Some(items))
}

fn is_address(item: &Bound<'_, PyAny>) -> bool {
    matches!(GivenMemory::of(item), Ok(GivenMemory::Address(_)))
}

fn of_objects(
    py: Python<'_>,
    op: Op,
    locals: &[Bound<'_, PyAny>],
    remotes: &Ints<'_>,
    lengths: Option<Lengths<'_>>,
) -> Result<Entries, Failure> {
    let count = locals.len();
    let lengths = lengths.map(|lengths| lengths.read(py, count)).transpose()?;
    let remotes = remotes.read(py, "remotes")?;
    let length_count = lengths.as_ref().map_or(count, Vec::len);
    Lists::check_lengths([count, remotes.len(), length_count])?;
    let (mut addrs, mut sizes, mut objects) = (room(count)?, room(count)?, room(count)?);
    for (at, local) in locals.iter().enumerate() {
        let length = lengths.as_ref().map(|lengths| lengths[at]);
        let at_item = |failure: Failure| failure.before(py, &format!("item {at} of locals: "));
        let given = GivenMemory::of(local).map_err(at_item)?;
        let (addr, size) = range(op, given, length, &mut objects).map_err(at_item)?;
        addrs.push(addr);
        sizes.push(size);
    }
    Ok(Entries { lists: Lists::of(addrs, remotes, sizes), objects })
}
