//! The class `TransferEngine`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyType};
use tensorferry::gpu::Location;
use tensorferry::{BatchId, BatchState, Error, Op, P2P_HANDSHAKE};

use crate::args::{Data, Int, Ints, Text, room};
use crate::failure::{FAILED, Failure, TIMED_OUT, raise, settle};
use crate::ready::{Lengths, Lists, Ready, make};
use crate::types::{InnerTransferEngine, TransferNotify, TransferOpcode};
use crate::waiting::aside;
use crate::{last_error, logging, stats, topology};

/// The answers of `send_probe`.
const PROBE_NO_ADDRESS: i32 = -101;
const PROBE_UNREACHABLE: i32 = -102;
const PROBE_OTHER: i32 = -200;

/// Memory that peers can READ and WRITE by name, and a way to theirs, over TCP.
///
/// Addresses and lengths are integers, in bytes. Calls that return a code return 0 for success and a
/// negative number for failure; calls that return an id or an address return 0 for failure. A failed
/// call leaves the reason in `TransferEngine.last_error()`, and one ERROR per second and method on the
/// logger `tensorferry.mooncake`. An argument of a wrong type, or an integer that is negative or above
/// 2**64 - 1, is a TypeError. Any method may be called from any thread, and other Python threads run
/// while one waits.
///
/// Memory that is handed over, by address, must stay mapped: registered memory until
/// `unregister_memory` has returned, the local memory of a transfer until the transfer has ended.
///
/// An address may be memory of a GPU. Its bytes must be there when a call is made, which a program that has
/// kernels running on a stream makes sure of by synchronising it, or by the methods `..._on_cuda`.
#[pyclass(frozen, subclass, weakref, module = "tensorferry.mooncake")]
pub(crate) struct TransferEngine {
    /// Locked with the interpreter lock held, and never while it is released.
    state: Mutex<State>,
}

enum State {
    New,
    /// `initialize` is at work in some thread of this process.
    Starting(u32),
    Ready(Arc<Ready>),
    Closed,
}

#[pymethods]
impl TransferEngine {
    #[new]
    fn new() -> Self {
        Self { state: Mutex::new(State::New) }
    }

    /// The opcodes of `transfer_sync` and `batch_transfer_sync`.
    #[classattr]
    #[pyo3(name = "TransferOpcode")]
    fn opcode_class(py: Python<'_>) -> Py<PyType> {
        py.get_type::<TransferOpcode>().unbind()
    }

    /// Starts the engine: it listens, and has a name, `host:port`, that peers open.
    ///
    /// `local_hostname` is the host name or address that peers reach this machine by. It is not looked up: a
    /// name that leads nowhere is found out by peers. An address of this machine is the only one that is listened
    /// on; with a name, all interfaces are. A port behind it is ignored, the one that was chosen is
    /// `get_rpc_port()`. `metadata_server` is "P2PHANDSHAKE".
    /// `protocol` is "tcp"; others ("rdma") are accepted, TCP is used, and the log says so once; "xgmi"
    /// fails. `device_name` has no effect.
    ///
    /// Returns 0, or -1: a text that can be no host, another metadata server, no free port, a malformed
    /// TENSORFERRY_* variable, or an engine that was initialized before, which is left as it is.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, /))]
    fn initialize(
        &self,
        py: Python<'_>,
        local_hostname: Text,
        metadata_server: Text,
        protocol: Text,
        device_name: Text,
    ) -> PyResult<i32> {
        let _ = device_name;
        settle(py, "initialize", code, || {
            self.start(py, &local_hostname.0, &metadata_server.0, &protocol.0)
        })
    }

    /// `initialize` with the kind of the metadata server, for one whose text has no `kind://`.
    ///
    /// Returns 0, or -1 as `initialize` does.
    #[pyo3(signature = (local_hostname, metadata_server, protocol, device_name, metadata_type, /))]
    fn initialize_ext(
        &self,
        py: Python<'_>,
        local_hostname: Text,
        metadata_server: Text,
        protocol: Text,
        device_name: Text,
        metadata_type: Text,
    ) -> PyResult<i32> {
        let _ = device_name;
        let (server, kind) = (metadata_server.0, metadata_type.0);
        let has_kind = server == P2P_HANDSHAKE || server.contains("://") || kind.is_empty();
        let server = if has_kind {
            server
        } else if kind == P2P_HANDSHAKE {
            kind
        } else {
            format!("{kind}://{server}")
        };
        settle(py, "initialize_ext", code, || {
            self.start(py, &local_hostname.0, &server, &protocol.0)
        })
    }

    /// The control port: the port of the name that peers open.
    ///
    /// Raises RuntimeError before `initialize` and after `close`.
    fn get_rpc_port(&self) -> PyResult<u16> {
        raise(|| Ok(self.made()?.engine().control_port()))
    }

    /// Lets peers READ and WRITE `capacity` bytes at `buffer_addr`.
    ///
    /// Memory that cannot be written, such as a file mapped read-only, can be READ only.
    ///
    /// `location` is "*" (find out), "cpu", "cpu:N", or a GPU: "cuda:N", "musa:N", "hip:N". Anything else counts
    /// as "*", and so does a GPU that the memory is not on; the log says so once. "*" is right for all memory
    /// that the process uses; a named GPU is looked for, and its library initialised, if nobody has done that.
    ///
    /// Returns 0; -7 if the range overlaps a registered one; -1 for a length of 0, address 0, a range
    /// that wraps, memory that neither this process nor a GPU library in use knows, a named GPU that is not there.
    #[pyo3(
        signature = (buffer_addr, capacity, location=Text::default()),
        text_signature = "($self, buffer_addr, capacity, location='*')"
    )]
    fn register_memory(
        &self,
        py: Python<'_>,
        buffer_addr: Int,
        capacity: Int,
        location: Text,
    ) -> PyResult<i32> {
        settle(py, "register_memory", code, || {
            let ready = self.ready()?;
            let location = location_of(py, &location.0)?;
            ready.register(py, &[(buffer_addr.0, capacity.0)], location)?;
            Ok(0)
        })
    }

    /// Ends what `register_memory` began. When this returns 0, no peer and no transfer touches the memory.
    ///
    /// Takes the exact address that was registered. Returns 0; -3 if no buffer starts there (managed
    /// buffers do not count); -1 if the buffer is still in use after a while.
    #[pyo3(signature = (addr, /))]
    fn unregister_memory(&self, py: Python<'_>, addr: Int) -> PyResult<i32> {
        settle(py, "unregister_memory", code, || {
            let ready = self.ready()?;
            ready.refuse_managed(&[addr.0])?;
            let engine = ready.engine().clone();
            aside(py, || ready.check(), move || engine.unregister(addr.0))??;
            Ok(0)
        })
    }

    /// Registers all of the ranges, or, if one is refused, none of them.
    ///
    /// `buffer_addresses` and `capacities` are sequences of the same length. Returns 0, also for empty
    /// ones; else -1 or -7 as `register_memory` does.
    #[pyo3(
        signature = (buffer_addresses, capacities, location=Text::default()),
        text_signature = "($self, buffer_addresses, capacities, location='*')"
    )]
    fn batch_register_memory(
        &self,
        py: Python<'_>,
        buffer_addresses: Ints<'_>,
        capacities: Ints<'_>,
        location: Text,
    ) -> PyResult<i32> {
        settle(py, "batch_register_memory", code, || {
            let ranges = ranges(py, &buffer_addresses, &capacities)?;
            let ready = self.ready()?;
            let location = location_of(py, &location.0)?;
            ready.register(py, &ranges, location)?;
            Ok(0)
        })
    }

    /// Unregisters all of the buffers, or, if one address is unknown, none of them.
    ///
    /// Returns 0, also for an empty sequence; else -3 or -1 as `unregister_memory` does.
    #[pyo3(signature = (addrs, /))]
    fn batch_unregister_memory(&self, py: Python<'_>, addrs: Ints<'_>) -> PyResult<i32> {
        settle(py, "batch_unregister_memory", code, || {
            let addrs = addrs.read(py, "addrs")?;
            let ready = self.ready()?;
            ready.refuse_managed(&addrs)?;
            let engine = ready.engine().clone();
            aside(py, || ready.check(), move || engine.unregister_all(&addrs))??;
            Ok(0)
        })
    }

    /// Copies `length` bytes from local memory at `buffer` to `peer_buffer_address` in the memory of the
    /// peer `target_hostname`, and waits until they are there.
    ///
    /// The peer's range must lie in one buffer that is registered there; the local one need not be
    /// registered. `transport_hint` has no effect. Returns 0, or -1: see `last_error()`.
    #[pyo3(
        signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, transport_hint='')"
    )]
    fn transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "transfer_sync_write", code, || {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            self.ready()?.run(py, &target_hostname.0, &lists, Op::Write, None)
        })
    }

    /// Copies `length` bytes at `peer_buffer_address` in the memory of the peer `target_hostname` to local
    /// memory at `buffer`, and waits until they are there.
    ///
    /// Otherwise as `transfer_sync_write`.
    #[pyo3(
        signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, transport_hint='')"
    )]
    fn transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "transfer_sync_read", code, || {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            self.ready()?.run(py, &target_hostname.0, &lists, Op::Read, None)
        })
    }

    /// `transfer_sync_read` or `transfer_sync_write`, as `opcode` says, and then a message to the peer.
    ///
    /// `notify` is sent when every byte is in place. Returns 0, or -1; -1 also if the bytes are in place
    /// and the message was not delivered. A message that is too long is refused before a byte moves.
    #[pyo3(
        signature = (
            target_hostname, buffer, peer_buffer_address, length, opcode, notify=None,
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, opcode, notify=None, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        opcode: PyRef<'_, TransferOpcode>,
        notify: Option<PyRef<'_, TransferNotify>>,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "transfer_sync", code, || {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            let (op, notify) = (op_of(*opcode)?, notify.map(|n| n.notification()).transpose()?);
            self.ready()?.run(py, &target_hostname.0, &lists, op, notify)
        })
    }

    /// `transfer_sync_write` for many ranges at once: three sequences of the same length.
    ///
    /// The ranges are written in any order. Returns 0 if all of them are in place, also for empty
    /// sequences; else -1, and some of them may be in place. Sequences of different lengths: -1, and
    /// nothing is sent.
    #[pyo3(
        signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')"
    )]
    fn batch_transfer_sync_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "batch_transfer_sync_write", code, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            self.ready()?.run(py, &target_hostname.0, &lists, Op::Write, None)
        })
    }

    /// `transfer_sync_read` for many ranges at once: three sequences of the same length.
    ///
    /// Otherwise as `batch_transfer_sync_write`.
    #[pyo3(
        signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')"
    )]
    fn batch_transfer_sync_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "batch_transfer_sync_read", code, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            self.ready()?.run(py, &target_hostname.0, &lists, Op::Read, None)
        })
    }

    /// `transfer_sync` for many ranges at once: three sequences of the same length, one message.
    ///
    /// Returns 0, or -1 as `batch_transfer_sync_write` and `transfer_sync` do.
    #[pyo3(
        signature = (
            target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify=None,
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify=None, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn batch_transfer_sync(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        opcode: PyRef<'_, TransferOpcode>,
        notify: Option<PyRef<'_, TransferNotify>>,
        transport_hint: Text,
    ) -> PyResult<i32> {
        let _ = transport_hint;
        settle(py, "batch_transfer_sync", code, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            let (op, notify) = (op_of(*opcode)?, notify.map(|n| n.notification()).transpose()?);
            self.ready()?.run(py, &target_hostname.0, &lists, op, notify)
        })
    }

    /// Starts what `batch_transfer_sync_write` does, and does not wait for it.
    ///
    /// Returns an id for `transfer_check_status` and `get_batch_transfer_status`, or 0: the peer cannot be
    /// reached, or the arguments make no sense. The first call for a peer waits up to 250 ms to find out
    /// whether it is there.
    #[pyo3(
        signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')"
    )]
    fn batch_transfer_async_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        transport_hint: Text,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        settle(py, "batch_transfer_async_write", no_id, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            self.ready()?.begin(py, &target_hostname.0, &lists, Op::Write)
        })
    }

    /// Starts what `batch_transfer_sync_read` does, and does not wait for it.
    ///
    /// Returns an id or 0, as `batch_transfer_async_write` does.
    #[pyo3(
        signature = (target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')"
    )]
    fn batch_transfer_async_read(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        transport_hint: Text,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        settle(py, "batch_transfer_async_read", no_id, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            self.ready()?.begin(py, &target_hostname.0, &lists, Op::Read)
        })
    }

    /// `batch_transfer_async_read` or `batch_transfer_async_write`, as `opcode` says.
    ///
    /// Returns an id or 0, as those do.
    #[pyo3(
        signature = (
            target_hostname, buffers, peer_buffer_addresses, lengths, opcode,
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn batch_transfer_async(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        opcode: PyRef<'_, TransferOpcode>,
        transport_hint: Text,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        settle(py, "batch_transfer_async", no_id, || {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            let op = op_of(*opcode)?;
            self.ready()?.begin(py, &target_hostname.0, &lists, op)
        })
    }

    /// Starts what `transfer_sync_write` does, and does not wait for it.
    ///
    /// Returns an id or 0, as `batch_transfer_async_write` does.
    #[pyo3(
        signature = (target_hostname, buffer, peer_buffer_address, length, transport_hint=Text::default()),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, transport_hint='')"
    )]
    fn transfer_submit_write(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        transport_hint: Text,
    ) -> PyResult<u64> {
        let _ = transport_hint;
        settle(py, "transfer_submit_write", no_id, || {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            self.ready()?.begin(py, &target_hostname.0, &lists, Op::Write)
        })
    }

    /// Where the whole batch with this id stands. Never waits.
    ///
    /// Returns 0 while it runs, 1 when every byte is in place, -2 if its time was up, -1 if it failed or
    /// the id is unknown. An answer other than 0 ends the id.
    #[pyo3(signature = (batch_id, /))]
    fn transfer_check_status(&self, py: Python<'_>, batch_id: Int) -> PyResult<i32> {
        settle(py, "transfer_check_status", code, || {
            let ready = self.ready()?;
            let (table, id) = (ready.engine().batches(), BatchId::from_raw(batch_id.0));
            if table.get(id)?.poll() == BatchState::Running {
                return Ok(0);
            }
            let batch = table.take(id)?;
            match batch.result() {
                None => Ok(0),
                Some(Ok(())) => Ok(1),
                Some(Err(error)) => {
                    let timed_out = batch.poll() == BatchState::TimedOut;
                    let failure = Failure::from(error);
                    Err(failure.with_code(if timed_out { TIMED_OUT } else { FAILED }))
                }
            }
        })
    }

    /// Waits until all batches with these ids have ended, and ends the ids.
    ///
    /// Returns 0 if every byte of all of them is in place; -1 if one failed, or an id is unknown.
    #[pyo3(signature = (batch_ids, /))]
    fn get_batch_transfer_status(&self, py: Python<'_>, batch_ids: Ints<'_>) -> PyResult<i32> {
        settle(py, "get_batch_transfer_status", code, || {
            let ids = batch_ids.read(py, "batch_ids")?;
            if ids.is_empty() {
                return Ok(0);
            }
            let ready = self.ready()?;
            let table = ready.engine().batches();
            let (mut batches, mut first) = (Vec::new(), None);
            for &id in &ids {
                match table.take(BatchId::from_raw(id)) {
                    Ok(batch) => batches.push(batch),
                    Err(error) => first = first.or(Some(error)),
                }
            }
            for batch in &batches {
                if let Err(error) = ready.wait(py, batch, &batches)? {
                    first = first.or(Some(error));
                }
            }
            first.map_or(Ok(0), |error| Err(Failure::from(error).with_code(FAILED)))
        })
    }

    /// Allocates at least `length` bytes that peers can READ and WRITE at once.
    ///
    /// Returns the address, or 0. The memory is aligned to pages, and holds zeroes or what it held before it
    /// was freed.
    #[pyo3(signature = (length, /))]
    fn allocate_managed_buffer(&self, py: Python<'_>, length: Int) -> PyResult<u64> {
        settle(py, "allocate_managed_buffer", no_id, || {
            let ready = self.ready()?;
            py.detach(|| ready.managed().allocate(ready.engine(), length.0))
        })
    }

    /// Frees what `allocate_managed_buffer` gave for `length` bytes. Peers cannot reach it any more.
    ///
    /// Returns 0; -1 if no managed buffer starts at `addr` (it was freed already, for instance), if it was
    /// allocated with another length, or if it is still in use after a while.
    #[pyo3(signature = (addr, length, /))]
    fn free_managed_buffer(&self, py: Python<'_>, addr: Int, length: Int) -> PyResult<i32> {
        settle(py, "free_managed_buffer", code, || {
            let ready = self.ready()?;
            let (managed, engine) = (Arc::clone(ready.managed()), ready.engine().clone());
            aside(py, || ready.check(), move || managed.free(&engine, addr.0, length.0))??;
            Ok(0)
        })
    }

    /// Copies the first `length` bytes of `data` to `addr`, inside one registered or managed buffer.
    ///
    /// `data` is bytes, any buffer, or a str, which is written in UTF-8. Returns 0; -1 if `data` is
    /// shorter, or the range is not inside a buffer.
    #[pyo3(signature = (addr, data, length, /))]
    fn write_bytes_to_buffer(
        &self,
        py: Python<'_>,
        addr: Int,
        data: Data<'_>,
        length: Int,
    ) -> PyResult<i32> {
        settle(py, "write_bytes_to_buffer", code, || {
            let ready = self.ready()?;
            let given = data.len()?;
            if length.0 > given {
                return Err(Failure::new(format!(
                    "{} bytes of {given} cannot be written",
                    length.0
                )));
            }
            let to = py.detach(|| ready.find(addr.0, length.0))?;
            let len = length.0 as usize;
            let bytes = data.first(len)?;
            ready.write(py, &to, &bytes.as_bytes()[..len])?;
            Ok(0)
        })
    }

    /// The `length` bytes at `addr`, inside one registered or managed buffer.
    ///
    /// Raises RuntimeError if the range is not inside one.
    #[pyo3(signature = (addr, length, /))]
    fn read_bytes_from_buffer<'py>(
        &self,
        py: Python<'py>,
        addr: Int,
        length: Int,
    ) -> PyResult<Bound<'py, PyBytes>> {
        raise(|| {
            let ready = self.ready()?;
            let from = py.detach(|| ready.find(addr.0, length.0))?;
            ready.read(py, &from, length.0)
        })
    }

    /// The address of the first buffer that the segment's owner has registered, of this engine itself or
    /// of a peer.
    ///
    /// Returns 0 if there is none, or the peer cannot be reached.
    #[pyo3(signature = (segment_name, /))]
    fn get_first_buffer_address(&self, py: Python<'_>, segment_name: Text) -> PyResult<u64> {
        settle(py, "get_first_buffer_address", no_id, || {
            let ready = self.ready()?;
            let (engine, name) = (ready.engine().clone(), segment_name.0);
            let buffers = if name == engine.name() {
                py.detach(|| engine.buffers())
            } else {
                aside(py, || ready.check(), move || engine.open(&name)?.buffers())??
            };
            Ok(buffers.first().map_or(0, |buffer| buffer.addr))
        })
    }

    /// The messages that peers have sent since the last call, in the order of their arrival.
    ///
    /// Raises RuntimeError before `initialize` and after `close`.
    fn get_notifies(&self, py: Python<'_>) -> PyResult<Vec<TransferNotify>> {
        raise(|| {
            let ready = self.ready()?;
            let notifications = py.detach(|| ready.engine().take_notifications());
            Ok(notifications.into_iter().map(TransferNotify::of).collect())
        })
    }

    /// Asks a peer's control port whether it is alive.
    ///
    /// Returns 0 if it is; -101 if the name has no address, -102 if the peer cannot be reached, -200 if it
    /// answers something else; -1 before `initialize`.
    fn send_probe(&self, py: Python<'_>, peer_server_name: Text) -> PyResult<i32> {
        settle(py, "send_probe", code, || {
            let ready = self.ready()?;
            let engine = ready.engine().clone();
            let probe = move || engine.probe(&peer_server_name.0);
            let Err(error) = aside(py, || ready.check(), probe)? else { return Ok(0) };
            let answer = match error {
                Error::Name(_) => PROBE_NO_ADDRESS,
                Error::PeerUnreachable { .. } => PROBE_UNREACHABLE,
                Error::Closed => FAILED,
                _ => PROBE_OTHER,
            };
            Err(Failure::from(error).with_code(answer))
        })
    }

    /// The memory nodes of this machine, as the JSON text of an object: for each a list of preferred and a
    /// list of available network devices, which are empty for TCP.
    ///
    /// Needs no `initialize`. `device_name` has no effect.
    #[pyo3(signature = (device_name=None))]
    fn get_local_topology(&self, py: Python<'_>, device_name: Option<Text>) -> PyResult<String> {
        let _ = device_name;
        raise(|| Ok(py.detach(topology::describe)))
    }

    /// Does nothing: TCP has nothing to warm up. Returns 0.
    fn warmup_efa_segment(&self, segment_name: Text) -> i32 {
        let _ = segment_name;
        0
    }

    /// An object that stands for the engine where a native extension asks for one, or None before
    /// `initialize`.
    ///
    /// Extensions that are built for another engine refuse it.
    fn get_engine(&self) -> Option<InnerTransferEngine> {
        let ready = self.made().ok()?;
        Some(InnerTransferEngine { name: ready.engine().name().to_owned() })
    }

    /// A number that is this engine's alone in this process, or 0 before `initialize`.
    ///
    /// It is not a pointer: nothing lies at that address.
    fn get_engine_ptr(&self) -> u64 {
        self.made().map_or(0, |ready| ready.number)
    }

    /// Starts what `transfer_sync_write` does, in order with a stream, and does not wait for it.
    ///
    /// It begins when the work is done that is on the stream now, and work that is put on the stream later waits
    /// until it has ended. `stream_ptr` is a `cudaStream_t` as an integer (of torch: `stream.cuda_stream`); 0, 1
    /// and 2 are the default streams. Where MUSA or HIP is what the process uses, it is a stream of theirs. The
    /// stream must not be destroyed before it has gone on behind the transfer.
    ///
    /// Returns None. Raises RuntimeError where nothing can be started: the name or the lists make no sense, the stream
    /// is being captured, there is no GPU, the engine is not initialized. A transfer that fails later lets the
    /// stream go on. It is an ERROR on the logger `tensorferry.mooncake`, counts as `on_cuda_failed` in `stats()`,
    /// and is raised, once, by the next of these four methods, which then starts nothing.
    #[pyo3(
        signature = (
            target_hostname, buffer, peer_buffer_address, length, stream_ptr=Int::default(),
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn transfer_write_on_cuda(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        stream_ptr: Int,
        transport_hint: Text,
    ) -> PyResult<()> {
        let _ = transport_hint;
        raise(|| {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            let order = (&*target_hostname.0, &lists, Op::Write, stream_ptr);
            self.begin_on_stream(py, "transfer_write_on_cuda", order)
        })
    }

    /// Starts what `transfer_sync_read` does, in order with a stream, and does not wait for it.
    ///
    /// Otherwise as `transfer_write_on_cuda`.
    #[pyo3(
        signature = (
            target_hostname, buffer, peer_buffer_address, length, stream_ptr=Int::default(),
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn transfer_read_on_cuda(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffer: Int,
        peer_buffer_address: Int,
        length: Int,
        stream_ptr: Int,
        transport_hint: Text,
    ) -> PyResult<()> {
        let _ = transport_hint;
        raise(|| {
            let lists = Lists::one(buffer, peer_buffer_address, length);
            let order = (&*target_hostname.0, &lists, Op::Read, stream_ptr);
            self.begin_on_stream(py, "transfer_read_on_cuda", order)
        })
    }

    /// `transfer_write_on_cuda` for many ranges at once: three sequences of the same length.
    ///
    /// The ranges are written in any order; the stream goes on when all of them are in place, or one has failed and
    /// the rest has ended.
    #[pyo3(
        signature = (
            target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=Int::default(),
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=0, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn batch_transfer_write_on_cuda(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        stream_ptr: Int,
        transport_hint: Text,
    ) -> PyResult<()> {
        let _ = transport_hint;
        raise(|| {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            let order = (&*target_hostname.0, &lists, Op::Write, stream_ptr);
            self.begin_on_stream(py, "batch_transfer_write_on_cuda", order)
        })
    }

    /// `transfer_read_on_cuda` for many ranges at once: three sequences of the same length.
    ///
    /// Otherwise as `batch_transfer_write_on_cuda`.
    #[pyo3(
        signature = (
            target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=Int::default(),
            transport_hint=Text::default()
        ),
        text_signature = "($self, target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=0, transport_hint='')"
    )]
    #[expect(clippy::too_many_arguments, reason = "programs pass them")]
    fn batch_transfer_read_on_cuda(
        &self,
        py: Python<'_>,
        target_hostname: Text,
        buffers: Ints<'_>,
        peer_buffer_addresses: Ints<'_>,
        lengths: Ints<'_>,
        stream_ptr: Int,
        transport_hint: Text,
    ) -> PyResult<()> {
        let _ = transport_hint;
        raise(|| {
            let lists = lists(py, &buffers, &peer_buffer_addresses, lengths)?;
            let order = (&*target_hostname.0, &lists, Op::Read, stream_ptr);
            self.begin_on_stream(py, "batch_transfer_read_on_cuda", order)
        })
    }

    /// Ends the engine now: running transfers fail, peers cannot reach its memory, its sockets are closed.
    ///
    /// Happens by itself when the object is collected and when the interpreter ends. A closed engine cannot
    /// be initialized again. Closing twice does no harm.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        raise(|| {
            let before = {
                let mut state = self.lock();
                if matches!(*state, State::Starting(pid) if pid == std::process::id()) {
                    return Err(Failure::new("initialize is at work in another thread"));
                }
                std::mem::replace(&mut *state, State::Closed)
            };
            if let State::Ready(ready) = before {
                ready.close(py);
            }
            Ok(())
        })
    }

    /// Why this thread's last call failed, in words, or None if it did not. Calls that cannot fail do not
    /// count.
    #[staticmethod]
    fn last_error() -> Option<String> {
        last_error::get()
    }

    /// What the engine has done so far: its counters by name, `"protocol"`, which is "tcp", and
    /// `"requested_protocol"`, which is what `initialize` was given. `"on_cuda_failed"` is how many transfers failed
    /// that are in order with a stream. `"peers"` has a dict for every peer by its name: the same counters for it
    /// alone, `"state"`, `"lanes"`, what is queued, and `"last_error"`. Times are in seconds.
    ///
    /// Raises RuntimeError before `initialize` and after `close`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        raise(|| {
            let ready = self.made()?;
            let stats = stats::all(py, ready.engine())?;
            stats.set_item("protocol", "tcp")?;
            stats.set_item("requested_protocol", &ready.protocol)?;
            if ready.check().is_ok() {
                stats.set_item("on_cuda_failed", ready.streamed_failures())?;
            }
            Ok(stats)
        })
    }
}

impl TransferEngine {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_on_stream(
        &self,
        py: Python<'_>,
        method: &'static str,
        (peer, lists, op, stream): (&str, &Lists, Op, Int),
    ) -> Result<(), Failure> {
        self.ready()?.begin_on_stream(py, method, peer, lists, (op, stream.0))
    }

    /// The engine of this process.
    fn ready(&self) -> Result<Arc<Ready>, Failure> {
        let ready = self.made()?;
        ready.check()?;
        Ok(ready)
    }

    /// The engine, also in a forked child, where only what never changes may be looked at.
    fn made(&self) -> Result<Arc<Ready>, Failure> {
        match &*self.lock() {
            State::Ready(ready) => Ok(Arc::clone(ready)),
            State::New => Err(Failure::new("the engine is not initialized; call initialize first")),
            &State::Starting(pid) => Err(at_work(pid, "initialize has not returned yet")),
            State::Closed => Err(Failure::new("the engine is closed; make a new TransferEngine")),
        }
    }

    fn start(
        &self,
        py: Python<'_>,
        host: &str,
        server: &str,
        protocol: &str,
    ) -> Result<i32, Failure> {
        {
            let mut state = self.lock();
            match &*state {
                State::New => *state = State::Starting(std::process::id()),
                &State::Starting(pid) => {
                    return Err(at_work(pid, "initialize is at work in another thread"));
                }
                State::Ready(ready) => {
                    ready.check()?;
                    return Err(Failure::new(
                        "the engine is initialized already, and stays as it is; make a new TransferEngine",
                    ));
                }
                State::Closed => {
                    return Err(Failure::new("the engine is closed; make a new TransferEngine"));
                }
            }
        }
        let mut back = Back { engine: self, armed: true };
        let ready = make(py, host, server, protocol)?;
        back.armed = false;
        *self.lock() = State::Ready(ready);
        Ok(0)
    }
}

/// Undoes `Starting` unless `initialize` succeeds, whichever way it is left.
struct Back<'a> {
    engine: &'a TransferEngine,
    armed: bool,
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if self.armed {
            *self.engine.lock() = State::New;
        }
    }
}

/// Why a call fails while `initialize` is at work in the process `pid`.
fn at_work(pid: u32, text: &str) -> Failure {
    if pid == std::process::id() {
        Failure::new(text)
    } else {
        Error::ForkedProcess { parent: pid }.into()
    }
}

/// The ranges of two lists of the same length.
fn ranges(
    py: Python<'_>,
    addresses: &Ints<'_>,
    capacities: &Ints<'_>,
) -> Result<Vec<(u64, u64)>, Failure> {
    let differ = |addresses: usize, capacities: usize| {
        if addresses == capacities {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the lists differ in length: {addresses} addresses, {capacities} capacities; nothing was \
             registered"
        )))
    };
    differ(addresses.len(), capacities.len())?;
    let addresses = addresses.read(py, "buffer_addresses")?;
    let capacities = capacities.read(py, "capacities")?;
    // Reading one list can run code that changes another.
    differ(addresses.len(), capacities.len())?;
    let mut ranges = room(addresses.len())?;
    ranges.extend(addresses.into_iter().zip(capacities));
    Ok(ranges)
}

/// The ranges of a batch.
fn lists(
    py: Python<'_>,
    buffers: &Ints<'_>,
    peer_buffer_addresses: &Ints<'_>,
    lengths: Ints<'_>,
) -> Result<Lists, Failure> {
    let names = ["buffers", "peer_buffer_addresses"];
    Lists::new(py, buffers, peer_buffer_addresses, &Lengths::Each(lengths), names)
}

/// Where the caller says that memory is; a text that says nothing to us counts as nothing said.
fn location_of(py: Python<'_>, text: &str) -> Result<Location, Failure> {
    if let Ok(location) = text.parse() {
        return Ok(location);
    }
    let node = text.strip_prefix("cpu:").unwrap_or_default();
    if !node.is_empty() && node.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(Location::Cpu);
    }
    if !text.is_empty() {
        logging::warn_once(py, format!("location {text:?} is unknown: \"*\" is used"))?;
    }
    Ok(Location::Any)
}

fn op_of(opcode: TransferOpcode) -> Result<Op, Failure> {
    opcode
        .op()
        .ok_or_else(|| Failure::new("opcode must be TransferOpcode.Read or TransferOpcode.Write"))
}

/// The answer of calls that return a code.
fn code(code: i32) -> i32 {
    code
}

/// The answer of calls that return an id or an address.
fn no_id(_: i32) -> u64 {
    0
}
