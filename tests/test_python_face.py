"""The class TransferEngine by itself: what it takes, what it answers, what it says about failures. One process."""

from __future__ import annotations

import array
import ctypes
import gc
import inspect
import mmap
import pickle
import threading
import time
import weakref

import numpy as np
import pytest

import tensorferry
from dropin_kit import Memory, engine, name_of
from tensorferry import mooncake
from tensorferry.mooncake import TransferEngine, TransferNotify, TransferOpcode

METHODS = {
    "allocate_managed_buffer": "(length, /)",
    "batch_register_memory": "(buffer_addresses, capacities, location='*')",
    "batch_transfer_async": "(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint='')",
    "batch_transfer_async_read": "(target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')",
    "batch_transfer_async_write": "(target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')",
    "batch_transfer_read_on_cuda": "(target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=0, transport_hint='')",
    "batch_transfer_sync": "(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify=None, transport_hint='')",
    "batch_transfer_sync_read": "(target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')",
    "batch_transfer_sync_write": "(target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint='')",
    "batch_transfer_write_on_cuda": "(target_hostname, buffers, peer_buffer_addresses, lengths, stream_ptr=0, transport_hint='')",
    "batch_unregister_memory": "(addrs, /)",
    "close": "()",
    "free_managed_buffer": "(addr, length, /)",
    "get_batch_transfer_status": "(batch_ids, /)",
    "get_engine": "()",
    "get_engine_ptr": "()",
    "get_first_buffer_address": "(segment_name, /)",
    "get_local_topology": "(device_name=None)",
    "get_notifies": "()",
    "get_rpc_port": "()",
    "initialize": "(local_hostname, metadata_server, protocol, device_name, /)",
    "initialize_ext": "(local_hostname, metadata_server, protocol, device_name, metadata_type, /)",
    "last_error": "()",
    "read_bytes_from_buffer": "(addr, length, /)",
    "register_memory": "(buffer_addr, capacity, location='*')",
    "send_probe": "(peer_server_name)",
    "stats": "()",
    "transfer_check_status": "(batch_id, /)",
    "transfer_read_on_cuda": "(target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint='')",
    "transfer_submit_write": "(target_hostname, buffer, peer_buffer_address, length, transport_hint='')",
    "transfer_sync": "(target_hostname, buffer, peer_buffer_address, length, opcode, notify=None, transport_hint='')",
    "transfer_sync_read": "(target_hostname, buffer, peer_buffer_address, length, transport_hint='')",
    "transfer_sync_write": "(target_hostname, buffer, peer_buffer_address, length, transport_hint='')",
    "transfer_write_on_cuda": "(target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint='')",
    "unregister_memory": "(addr, /)",
    "warmup_efa_segment": "(segment_name)",
    "write_bytes_to_buffer": "(addr, data, length, /)",
}


# What is there


def test_every_method_has_the_known_signature_and_a_text():
    methods = {n for n in dir(TransferEngine) if not n.startswith("_")} - {"TransferOpcode"}
    assert methods == set(METHODS)
    for name, signature in METHODS.items():
        method = getattr(TransferEngine, name)
        shown = str(inspect.signature(method)).replace("self, /, ", "").replace("self, ", "").replace("self", "", 1)
        assert shown.replace("(/)", "()") == signature, name
        assert method.__doc__ and len(method.__doc__) > 20, name


def test_the_module_has_every_name():
    assert tensorferry.__version__
    for name in mooncake.__all__:
        assert hasattr(mooncake, name)
    for vendor in ("EFA", "INTRA_NVLINK", "MNNVL"):
        assert getattr(mooncake, f"SUPPORT_{vendor}") is False
    assert {"SUPPORT_CUDA", "SUPPORT_HIP", "SUPPORT_MUSA"} <= set(dir(mooncake))
    assert mooncake.Read == TransferOpcode.Read and mooncake.Write == TransferOpcode.Write
    assert TransferEngine.TransferOpcode is TransferOpcode


def test_the_opcode_is_an_enum_as_pybind11_makes_them():
    read, write = TransferOpcode.Read, TransferOpcode.Write
    assert (int(read), int(write), read.value, write.name) == (0, 1, 0, "Write")
    assert repr(read) == "<TransferOpcode.Read: 0>" and str(write) == "TransferOpcode.Write"
    assert read == TransferOpcode(0) and read != write and read != 0 and write is not None
    assert hash(write) == hash(TransferOpcode(1)) and {read: 1}[TransferOpcode(0)] == 1
    assert TransferOpcode.__members__ == {"Read": read, "Write": write}
    assert [10, 20][write] == 20
    assert pickle.loads(pickle.dumps(write)) == write
    assert repr(TransferOpcode(7)) == "<TransferOpcode.???: 7>"
    with pytest.raises(TypeError):
        TransferOpcode("x")
    with pytest.raises((AttributeError, TypeError)):
        read.value = 1


def test_a_notification_is_two_texts():
    message = TransferNotify()
    assert (message.name, message.msg) == ("", "")
    message.name, message.msg = b"n\xc3\xa4me", "m"
    assert (message.name, message.msg) == ("näme", "m")
    assert TransferNotify("a", msg="b").msg == "b"
    for bad in (1, None, 1.5):
        with pytest.raises(TypeError):
            TransferNotify(bad, "")
        with pytest.raises(TypeError):
            message.msg = bad
    with pytest.raises(UnicodeDecodeError):
        TransferNotify(b"\xff", "")


def test_the_class_can_be_subclassed_and_referred_to_weakly():
    class Mine(TransferEngine):
        pass

    mine = Mine()
    mine.extra = 1
    ref = weakref.ref(mine)
    del mine
    gc.collect()
    assert ref() is None


# Before initialize, after close


CALLS = [
    ("register_memory", (4096, 16), -1),
    ("unregister_memory", (4096,), -1),
    ("batch_register_memory", ([4096], [16]), -1),
    ("batch_unregister_memory", ([4096],), -1),
    ("transfer_sync_write", ("127.0.0.1:1", 1, 2, 3), -1),
    ("transfer_sync_read", ("127.0.0.1:1", 1, 2, 3), -1),
    ("transfer_sync", ("127.0.0.1:1", 1, 2, 3, TransferOpcode.Write), -1),
    ("batch_transfer_sync_write", ("127.0.0.1:1", [1], [2], [3]), -1),
    ("batch_transfer_sync_read", ("127.0.0.1:1", [1], [2], [3]), -1),
    ("batch_transfer_sync", ("127.0.0.1:1", [1], [2], [3], TransferOpcode.Read), -1),
    ("batch_transfer_async_write", ("127.0.0.1:1", [1], [2], [3]), 0),
    ("batch_transfer_async_read", ("127.0.0.1:1", [1], [2], [3]), 0),
    ("batch_transfer_async", ("127.0.0.1:1", [1], [2], [3], TransferOpcode.Read), 0),
    ("transfer_submit_write", ("127.0.0.1:1", 1, 2, 3), 0),
    ("transfer_check_status", (12345,), -1),
    ("get_batch_transfer_status", ([12345],), -1),
    ("allocate_managed_buffer", (16,), 0),
    ("free_managed_buffer", (12345, 300 << 20), -1),
    ("write_bytes_to_buffer", (4096, b"x", 1), -1),
    ("get_first_buffer_address", ("127.0.0.1:1",), 0),
    ("send_probe", ("127.0.0.1:1",), -1),
]


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_running_engine_every_call_answers(closed):
    engine = TransferEngine()
    if closed:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        engine.close()
        engine.close()
    for method, args, answer in CALLS:
        assert getattr(engine, method)(*args) == answer, method
        assert ("closed" if closed else "not initialized") in TransferEngine.last_error(), method
    for method, args in [("get_rpc_port", ()), ("get_notifies", ()), ("stats", ()), ("read_bytes_from_buffer", (4096, 5))]:
        with pytest.raises(RuntimeError, match="closed" if closed else "not initialized"):
            getattr(engine, method)(*args)
    assert engine.get_engine() is None and engine.get_engine_ptr() == 0
    assert engine.get_batch_transfer_status([]) == 0
    assert engine.warmup_efa_segment(segment_name="x") == 0
    assert '"cpu:0"' in engine.get_local_topology(None)
    if closed:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1


@pytest.mark.parametrize(
    ("host", "server", "protocol", "text"),
    [
        ("127.0.0.1", "foo://x", "tcp", "foo"),
        ("127.0.0.1", "redis://x", "tcp", "redis"),
        ("127.0.0.1", "http://x/metadata", "tcp", "http"),
        ("127.0.0.1", "1.2.3.4:2379", "tcp", "etcd"),
        ("127.0.0.1", "P2PHANDSHAKE", "xgmi", "xgmi"),
        ("127.0.0.1:port", "P2PHANDSHAKE", "tcp", "port"),
        ("", "P2PHANDSHAKE", "tcp", "host"),
    ],
)
def test_an_initialize_that_fails_can_be_done_again(host, server, protocol, text):
    engine = TransferEngine()
    assert engine.initialize(host, server, protocol, "") == -1
    assert text in TransferEngine.last_error()
    assert engine.register_memory(4096, 16) == -1
    assert engine.initialize("127.0.0.1:12345", "P2PHANDSHAKE", "tcp", "mlx5_0") == 0
    assert TransferEngine.last_error() is None
    port = engine.get_rpc_port()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert "already" in TransferEngine.last_error()
    assert engine.get_rpc_port() == port
    engine.close()


def test_initialize_ext_takes_the_kind_of_the_server():
    engine = TransferEngine()
    assert engine.initialize_ext("127.0.0.1", "1.2.3.4:2379", "tcp", "", "redis") == -1
    assert "redis" in TransferEngine.last_error()
    assert engine.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "tcp", "", "etcd") == 0
    engine.close()


def test_a_malformed_setting_of_ours_stops_the_engine(monkeypatch):
    monkeypatch.setenv("TENSORFERRY_PORTS", "9-1")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert "TENSORFERRY_PORTS=9-1" in TransferEngine.last_error()


def test_of_two_initializes_at_once_one_wins():
    engine, codes = TransferEngine(), []
    threads = [
        threading.Thread(target=lambda: codes.append(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [-1] * 7 + [0]
    engine.close()


# Memory


def test_registering_answers_as_existing_engines_do(engine):
    memory = Memory(1000)
    assert engine.register_memory(memory.addr, 500) == 0
    for addr, length in [(0, 500), (100, 10), (499, 2), (0, 1000)]:
        assert engine.register_memory(memory.addr + addr, length) == -7
        assert "overlaps" in TransferEngine.last_error()
    assert engine.register_memory(memory.addr + 500, 500, location="cpu:0") == 0
    assert engine.register_memory(0, 16) == -1
    assert engine.register_memory(memory.addr, 0) == -1
    assert engine.register_memory(2**64 - 10, 100) == -1
    for addr in (memory.addr + 1, memory.addr + 1000, 0):
        assert engine.unregister_memory(addr) == -3
    # All or nothing, both ways.
    assert engine.batch_unregister_memory([memory.addr, 4096]) == -3
    assert engine.register_memory(memory.addr, 500) == -7
    assert engine.batch_unregister_memory([memory.addr + 500, memory.addr]) == 0
    assert engine.batch_register_memory([memory.addr, memory.addr + 10], [20, 20]) == -7
    assert engine.register_memory(memory.addr, 1000) == 0
    assert engine.unregister_memory(memory.addr) == 0
    assert engine.unregister_memory(memory.addr) == -3


def of_calls(caplog) -> list[str]:
    """What was said of calls. What the engine has to say for itself comes when it comes, and may be of another test."""
    return [record.getMessage() for record in caplog.records if record.name == "tensorferry.mooncake"]


@pytest.mark.parametrize("location", ["*", "", "cpu", "cpu:0", "cpu:12", b"cpu:1"])
def test_locations_of_host_memory(engine, location, caplog):
    memory = Memory(16)
    assert engine.register_memory(memory.addr, 16, location) == 0
    assert engine.unregister_memory(memory.addr) == 0
    assert engine.batch_register_memory([memory.addr], [16], location=location) == 0
    assert of_calls(caplog) == []


@pytest.mark.parametrize("location", ["gpu:0", "cuda", "cuda:", "cuda:-1", "cpu:", "cpu:x", "CPU", "npu:3"])
def test_an_unknown_location_is_said_once(engine, location, caplog):
    memory = Memory(16)
    for _ in range(2):
        assert engine.register_memory(memory.addr, 16, location) == 0
        assert engine.unregister_memory(memory.addr) == 0
    assert of_calls(caplog) == [f'location "{location}" is unknown: "*" is used']


def test_managed_buffers_live_from_allocate_to_free(engine):
    own = name_of(engine)
    addr = engine.allocate_managed_buffer(5000)
    assert addr > 0 and addr % 4096 == 0
    assert engine.get_first_buffer_address(own) == addr
    data = bytes(range(256)) * 16
    assert engine.write_bytes_to_buffer(addr, data, len(data)) == 0
    assert engine.read_bytes_from_buffer(addr, len(data)) == data
    assert engine.write_bytes_to_buffer(addr + 3, "a\0ä", 4) == 0
    assert engine.read_bytes_from_buffer(addr + 3, 4) == "a\0ä".encode()
    assert engine.write_bytes_to_buffer(addr, memoryview(array.array("H", [1, 2])), 3) == 0
    assert engine.read_bytes_from_buffer(addr, 3) == b"\x01\0\x02"
    # It is registered, so nobody else may register it, and only free ends it.
    assert engine.register_memory(addr, 16) == -7
    assert engine.unregister_memory(addr) == -3
    assert "free_managed_buffer" in TransferEngine.last_error()
    assert engine.batch_unregister_memory([addr]) == -3
    assert engine.free_managed_buffer(addr, 50_000) == -1
    assert engine.free_managed_buffer(addr + 16, 5000) == -1
    assert engine.free_managed_buffer(addr, 5000) == 0
    assert engine.free_managed_buffer(addr, 5000) == -1
    assert engine.get_first_buffer_address(own) == 0
    with pytest.raises(RuntimeError):
        engine.read_bytes_from_buffer(addr, 1)
    assert engine.free_managed_buffer(12345, 300 << 20) == -1
    # The last block that was freed is the next of its class, and two blocks are never the same.
    assert engine.allocate_managed_buffer(8000) == addr
    others = {engine.allocate_managed_buffer(n) for n in (8000, 0, 1, 8192, 8193)}
    assert len(others) == 5 and addr not in others and 0 not in others


def test_large_managed_buffers(engine):
    large = (256 << 20) + 1
    addr = engine.allocate_managed_buffer(large)
    assert addr > 0
    assert engine.write_bytes_to_buffer(addr + large - 3, b"end", 3) == 0
    assert engine.write_bytes_to_buffer(addr + large - 3, b"ends", 4) == -1
    assert engine.free_managed_buffer(addr, 256 << 20) == -1
    assert engine.free_managed_buffer(addr, large) == 0
    for much in (1 << 50, (1 << 64) - 1, 1 << 63):
        assert engine.allocate_managed_buffer(much) == 0
        assert TransferEngine.last_error()


def test_bytes_go_only_where_a_buffer_is(engine):
    memory = Memory(100)
    memory.bytes[:] = b"." * 100
    for addr in (0, memory.addr):
        assert engine.write_bytes_to_buffer(addr, b"x", 1) == -1
        assert "no registered or managed buffer" in TransferEngine.last_error()
        with pytest.raises(RuntimeError, match="no registered or managed buffer"):
            engine.read_bytes_from_buffer(addr, 5)
    assert engine.register_memory(memory.addr + 10, 50) == 0
    assert engine.write_bytes_to_buffer(memory.addr + 10, b"abcdef", 3) == 0
    assert memory.bytes[9:15] == b".abc.."
    assert engine.read_bytes_from_buffer(memory.addr + 10, 4) == b"abc."
    assert engine.write_bytes_to_buffer(memory.addr + 10, b"x", 100) == -1
    assert engine.write_bytes_to_buffer(memory.addr + 59, b"xy", 2) == -1
    assert engine.write_bytes_to_buffer(memory.addr + 9, b"x", 1) == -1
    for bad in (1 << 40, 1 << 63, (1 << 64) - 1):
        with pytest.raises(RuntimeError):
            engine.read_bytes_from_buffer(memory.addr + 10, bad)
    assert engine.write_bytes_to_buffer(memory.addr + 10, b"", 0) == 0
    assert engine.read_bytes_from_buffer(memory.addr + 10, 0) == b""
    for bad in (None, 5, ["a"]):
        with pytest.raises(TypeError):
            engine.write_bytes_to_buffer(memory.addr + 10, bad, 1)


# Transfers within the process: what the class adds to the engine


def test_transfers_by_every_method(engine):
    own = name_of(engine)
    local, remote = Memory(64), Memory(64)
    local.bytes[:] = bytes(range(64))
    assert engine.register_memory(remote.addr, 64) == 0
    assert engine.transfer_sync_write(own, local.addr, remote.addr, 10) == 0
    assert remote.bytes[:11] == bytes(range(10)) + b"\0"
    assert engine.transfer_sync_read(target_hostname=own, buffer=local.addr + 20, peer_buffer_address=remote.addr, length=5) == 0
    assert local.bytes[19:26] == bytes([19, 0, 1, 2, 3, 4, 25])
    assert engine.batch_transfer_sync_write(own, [local.addr] * 2, (remote.addr + 10, remote.addr + 20), [3, 3]) == 0
    assert remote.bytes[20:24] == b"\0\1\2\0"
    assert engine.batch_transfer_sync_read(own, [local.addr], [remote.addr], [64], transport_hint="bogus") == 0
    assert local.bytes == remote.bytes
    for opcode in (TransferOpcode.Read, TransferOpcode.Write):
        assert engine.transfer_sync(own, local.addr, remote.addr, 5, opcode, TransferNotify("n", f"m{opcode.value}")) == 0
        assert engine.batch_transfer_sync(own, [local.addr], [remote.addr], [5], opcode=opcode, notify=None) == 0
        batch = engine.batch_transfer_async(own, [local.addr], [remote.addr], [5], opcode)
        assert 0 < batch < 1 << 63
        assert engine.get_batch_transfer_status([batch]) == 0
    assert [(n.name, n.msg) for n in engine.get_notifies()] == [("n", "m0"), ("n", "m1")]
    assert engine.get_notifies() == []
    batch = engine.transfer_submit_write(own, local.addr, remote.addr, 5)
    assert settled(engine, batch) == 1
    for args in ([], [], []), ([local.addr], [remote.addr], [0]):
        assert engine.batch_transfer_sync_write(own, *args) == 0
        batch = engine.batch_transfer_async_write(own, *args)
        assert batch > 0 and settled(engine, batch) == 1


def settled(engine, batch: int) -> int:
    end = time.monotonic() + 20
    while (status := engine.transfer_check_status(batch)) == 0:
        assert time.monotonic() < end
        time.sleep(0.001)
    return status


def test_an_id_is_used_once(engine):
    own = name_of(engine)
    memory = Memory(16)
    assert engine.register_memory(memory.addr, 16) == 0
    good = [engine.transfer_submit_write(own, memory.addr, memory.addr, 16) for _ in range(4)]
    assert settled(engine, good[0]) == 1
    assert engine.transfer_check_status(good[0]) == -1
    assert "unknown" in TransferEngine.last_error()
    assert engine.get_batch_transfer_status([good[1]]) == 0
    assert TransferEngine.last_error() is None
    assert engine.get_batch_transfer_status([good[1]]) == -1
    # The same id twice is settled once, and an unknown one does not keep the others from being settled.
    assert engine.get_batch_transfer_status([good[2], good[2]]) == -1
    assert engine.get_batch_transfer_status([12345, good[3]]) == -1
    assert engine.transfer_check_status(good[3]) == -1
    for made_up in (0, 1, 12345, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        assert engine.transfer_check_status(made_up) == -1
        assert engine.get_batch_transfer_status([made_up]) == -1


def test_the_status_is_that_of_the_whole_batch(engine):
    own = name_of(engine)
    memory, other = Memory(16), Memory(16)
    assert engine.register_memory(memory.addr, 16) == 0
    lists = ([other.addr] * 2, [memory.addr, 0x10], [16, 16])
    assert engine.batch_transfer_sync_write(own, *lists) == -1
    assert own in TransferEngine.last_error()
    batch = engine.batch_transfer_async_write(own, *lists)
    assert batch > 0 and settled(engine, batch) == -1
    assert own in TransferEngine.last_error()
    assert engine.transfer_check_status(batch) == -1
    batch = engine.batch_transfer_async_write(own, *lists)
    assert engine.get_batch_transfer_status([batch]) == -1


def test_a_peer_that_is_not_there(engine):
    local = Memory(16)
    for name in ("127.0.0.1:1", "no-such-host.invalid:15000", "", "///", "127.0.0.1:port", "127.0.0.1:99999"):
        assert engine.transfer_sync_write(name, local.addr, 4096, 16) == -1, name
        assert TransferEngine.last_error()
        assert engine.batch_transfer_async_write(name, [local.addr], [4096], [16]) == 0, name
        assert engine.transfer_submit_write(name, local.addr, 4096, 16) == 0, name
        assert engine.get_first_buffer_address(name) == 0, name
        assert TransferEngine.last_error()
        assert engine.send_probe(name) < 0, name
    assert engine.send_probe("no-such-host.invalid:15000") == -101
    assert engine.send_probe("127.0.0.1:1") == -102
    assert engine.send_probe(name_of(engine)) == 0
    assert TransferEngine.last_error() is None


# Failures


def test_last_error_is_the_calling_threads(engine):
    assert engine.unregister_memory(4096) == -3
    assert "0x1000" in TransferEngine.last_error()
    seen = []

    def other():
        seen.append(TransferEngine.last_error())
        engine.register_memory(0, 5)
        seen.append(engine.last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] is None and seen[1] is not None and "0x1000" not in seen[1]
    assert "0x1000" in TransferEngine.last_error()
    # What cannot fail leaves it, what can and does not clears it.
    assert engine.warmup_efa_segment("x") == 0 and engine.get_engine_ptr() > 0
    assert "0x1000" in TransferEngine.last_error()
    assert engine.batch_unregister_memory([]) == 0
    assert TransferEngine.last_error() is None


def test_engines_are_told_apart(engine):
    other = TransferEngine()
    assert other.get_engine() is None and other.get_engine_ptr() == 0
    assert other.initialize("127.0.0.1", "P2PHANDSHAKE", "", "") == 0
    assert 0 != other.get_engine_ptr() != engine.get_engine_ptr() != 0
    assert type(other.get_engine()) is mooncake.InnerTransferEngine
    with pytest.raises(TypeError):
        mooncake.InnerTransferEngine()
    assert other.stats()["protocol"] == "tcp"
    assert other.get_rpc_port() != engine.get_rpc_port()
    other.close()


def test_the_topology_is_the_known_text(engine):
    text = engine.get_local_topology()
    if '"cpu:1"' not in text:
        assert text == '{\n\t"cpu:0" : \n\t[\n\t\t[],\n\t\t[]\n\t]\n}\n'
    assert engine.get_local_topology("mlx5_0") == text


def test_memory_that_is_not_there_is_not_registered_and_read_only_memory_can_be_read(engine):
    assert engine.register_memory(4096, 16) == -1
    assert "not mapped" in TransferEngine.last_error()
    assert engine.batch_register_memory([4096], [16]) == -1
    writable = mmap.mmap(-1, 8192)
    view = ctypes.c_char.from_buffer(writable)
    start = ctypes.addressof(view)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start), 8192, mmap.PROT_READ) == 0
    own = f"127.0.0.1:{engine.get_rpc_port()}"
    local = np.ones(16, dtype=np.uint8)
    assert engine.register_memory(start, 8192) == 0
    assert engine.transfer_sync_read(own, local.ctypes.data, start, 16) == 0
    assert not local.any()
    assert engine.transfer_sync_write(own, local.ctypes.data, start, 16) == -1
    assert engine.unregister_memory(start) == 0
    del view
