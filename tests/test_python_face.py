"""The class TransferEngine by itself: what it takes, what it answers, what it says about failures. One process."""

from __future__ import annotations

import array
import ctypes
import gc
import inspect
import itertools
import mmap
import pickle
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import tensorferry
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


@pytest.fixture
def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, TransferEngine.last_error()
    yield made
    made.close()


class Memory:
    """Memory that lives as long as this does."""

    def __init__(self, size: int):
        self.bytes = bytearray(size)
        self.keep = (ctypes.c_char * size).from_buffer(self.bytes)
        self.addr = ctypes.addressof(self.keep)


def name_of(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"


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


# Arguments


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("bad", [-1, 1 << 64, -(1 << 63), 1.0, None, "5", b"5", [5], object(), np.float64(1), np.int64(-1), Index(-1)])
def test_what_is_no_integer_in_range_is_a_type_error(engine, bad):
    for method, args in [
        ("register_memory", (bad, 16)),
        ("register_memory", (4096, bad)),
        ("unregister_memory", (bad,)),
        ("transfer_sync_write", ("x:1", bad, 1, 1)),
        ("transfer_sync_read", ("x:1", 1, 1, bad)),
        ("transfer_check_status", (bad,)),
        ("allocate_managed_buffer", (bad,)),
        ("batch_register_memory", ([1, bad], [1, 1])),
        ("batch_transfer_sync_write", ("x:1", (1,), (bad,), (1,))),
        ("get_batch_transfer_status", ([bad],)),
    ]:
        with pytest.raises(TypeError):
            getattr(engine, method)(*args)
    assert engine.get_rpc_port() > 0


def test_an_exception_of_an_index_comes_through(engine):
    class Broken:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.unregister_memory(Broken())
    with pytest.raises(KeyError, match="mine"):
        engine.batch_unregister_memory([Broken()])


@pytest.mark.parametrize("bad", [None, 5, 1.5, ["x"], object(), bytearray(b"x")])
def test_what_is_no_text_is_a_type_error(engine, bad):
    for method, args in [
        ("send_probe", (bad,)),
        ("transfer_sync_write", (bad, 1, 1, 1)),
        ("batch_transfer_async_read", (bad, [1], [1], [1])),
        ("register_memory", (4096, 16, bad)),
        ("transfer_sync_write", ("x:1", 1, 1, 1, bad)),
        ("warmup_efa_segment", (bad,)),
        ("get_first_buffer_address", (bad,)),
    ]:
        with pytest.raises(TypeError):
            getattr(engine, method)(*args)
    for args in [(bad, "P2PHANDSHAKE", "tcp", ""), ("h", bad, "tcp", ""), ("h", "P2PHANDSHAKE", bad, ""), ("h", "m", "tcp", bad)]:
        with pytest.raises(TypeError):
            TransferEngine().initialize(*args)


def test_what_can_be_no_name_is_a_value_error(engine):
    for bad in (b"\xff", "\ud800", "x" * (64 << 10) + "x", b"x" * (300 << 20)):
        for call in (engine.send_probe, engine.get_first_buffer_address, lambda x: engine.register_memory(4096, 16, x)):
            with pytest.raises(ValueError):
                call(bad)
    assert engine.send_probe("x" * (64 << 10)) < 0


def test_a_message_that_is_too_long_is_refused(engine):
    memory = Memory(16)
    assert engine.register_memory(memory.addr, 16) == 0
    for text in ("x" * (1 << 20), "x" * (200 << 20)):
        message = TransferNotify("", text)
        assert message.msg == text
        assert engine.transfer_sync(name_of(engine), memory.addr, memory.addr, 16, TransferOpcode.Read, message) == -1
        assert "peers accept 1048576" in TransferEngine.last_error()


def test_an_opcode_is_a_transfer_opcode(engine):
    for bad in (1, "Write", None):
        with pytest.raises(TypeError):
            engine.transfer_sync("x:1", 1, 1, 1, bad)
        with pytest.raises(TypeError):
            engine.batch_transfer_async("x:1", [], [], [], bad)
    assert engine.transfer_sync("127.0.0.1:1", 1, 1, 1, TransferOpcode(7)) == -1
    assert "opcode" in TransferEngine.last_error()
    with pytest.raises(TypeError):
        engine.transfer_sync("x:1", 1, 1, 1, TransferOpcode.Read, "text")


@pytest.mark.parametrize("bad", ["12", b"12", bytearray(b"12"), 5, None, {1: 2}, {1, 2}, object(), np.zeros((2, 2), np.int64), np.zeros(2)])
def test_what_is_no_sequence_of_integers_is_a_type_error(engine, bad):
    with pytest.raises(TypeError):
        engine.batch_unregister_memory(bad)
    with pytest.raises(TypeError):
        engine.batch_transfer_sync_write("x:1", [1], [1], bad)


LISTS = [
    ("batch_register_memory", 2, -1),
    ("batch_unregister_memory", 1, -1),
    ("get_batch_transfer_status", 1, -1),
    ("batch_transfer_sync_write", 3, -1),
    ("batch_transfer_sync_read", 3, -1),
    ("batch_transfer_async_write", 3, 0),
    ("batch_transfer_async_read", 3, 0),
]


def call_with(engine, method: str, *lists):
    return getattr(engine, method)(*(["127.0.0.1:1"] if "transfer_" in method and "status" not in method else []), *lists)


ENDLESS = {
    "a range": lambda: range(1 << 40),
    "a range that len() cannot tell": lambda: range(1 << 70),
    "one number, repeated": lambda: np.broadcast_to(np.uint64(5), (1 << 40,)),
    "one signed number, repeated": lambda: np.broadcast_to(np.int64(5), (1 << 40,)),
    "one small number, repeated": lambda: np.broadcast_to(np.uint8(5), (1 << 40,)),
    "one foreign number, repeated": lambda: np.broadcast_to(np.array(5, ">u8"), (1 << 40,)),
    "just too many": lambda: range(1 << 32),
}


@pytest.mark.parametrize("endless", ENDLESS)
@pytest.mark.parametrize(("method", "lists", "answer"), LISTS)
def test_a_list_without_end_is_refused_before_it_is_read(engine, endless, method, lists, answer):
    start = time.perf_counter()
    assert call_with(engine, method, *[ENDLESS[endless]() for _ in range(lists)]) == answer
    assert "has more than 2^32 - 1 entries" in TransferEngine.last_error()
    if lists > 1:
        assert call_with(engine, method, *[[1]] * (lists - 1), ENDLESS[endless]()) == answer
        assert "lists differ in length" in TransferEngine.last_error()
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(("method", "lists", "answer"), LISTS)
def test_what_can_be_read_once_is_no_list(engine, method, lists, answer):
    for endless in (itertools.count, lambda: (n for n in [1]), lambda: iter([1]), lambda: map(int, "1"), set, dict):
        with pytest.raises(TypeError, match="expected a sequence of integers"):
            call_with(engine, method, *[endless() for _ in range(lists)])


class Said:
    """A sequence that says its length."""

    def __init__(self, length, *items):
        self.length, self.items, self.asked = length, items, 0

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, at):
        self.asked += 1
        return self.items[at]


@pytest.mark.parametrize(("method", "lists", "answer"), LISTS)
def test_a_sequence_may_be_wrong_about_its_length(engine, method, lists, answer):
    for length, error in [(KeyError("mine"), KeyError), (-1, ValueError), (2, IndexError), (1 << 24, IndexError)]:
        with pytest.raises(error):
            call_with(engine, method, *[Said(length, 1) for _ in range(lists)])
    for length in (1 << 32, sys.maxsize, 1 << 80):
        said = [Said(length, 1) for _ in range(lists)]
        assert call_with(engine, method, *said) == answer
        assert [one.asked for one in said] == [0] * lists
    # It has more than it says.
    said = Said(1, 4097, 4098, 4099)
    assert engine.batch_unregister_memory(said) == -3 and said.asked == 1


@pytest.mark.parametrize(("method", "lists", "answer"), LISTS)
def test_a_list_that_changes_while_it_is_read_is_refused(engine, method, lists, answer):
    class Meddling:
        def __init__(self, what):
            self.what = what

        def __index__(self):
            self.what()
            return 4096

    first: list = []
    first[:] = [Meddling(first.clear), 1, 1]
    assert call_with(engine, method, first, *[[1] * 3 for _ in range(lists - 1)]) == answer
    assert "became shorter while it was read" in TransferEngine.last_error()
    if lists > 1:
        last = [1, 1]
        assert call_with(engine, method, [Meddling(last.clear), 1], *[[1] * 2 for _ in range(lists - 2)], last) == answer
        assert "lists differ in length" in TransferEngine.last_error()
    # One that grows is read to where it ended.
    first[:] = [Meddling(lambda: first.extend(first)) for _ in range(20)]
    before = time.perf_counter()
    call_with(engine, "batch_unregister_memory", first)
    assert time.perf_counter() - before < 5


def test_a_very_long_number_is_refused_quickly(engine):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        start = time.perf_counter()
        for number in (1 << 5_000_000, -(1 << 5_000_000)):
            with pytest.raises(TypeError) as raised:
                engine.unregister_memory(number)
            assert str(raised.value) == "expected an integer from 0 to 2**64 - 1, not one so far from them"
        assert time.perf_counter() - start < 3
    finally:
        sys.set_int_max_str_digits(limit)
    for number in (-1, -(1 << 100), 1 << 64, Index(-7)):
        with pytest.raises(TypeError) as raised:
            engine.unregister_memory(number)
        assert str(raised.value).endswith(f", not {number.__index__()}")
        with pytest.raises(TypeError) as raised:
            engine.batch_unregister_memory([1, number])
        assert str(raised.value).startswith("item 1: ")
        assert raised.value.__notes__ == ["while processing 'addrs'"]


def test_what_wants_out_of_the_program_gets_through_arguments(engine):
    class Leaving:
        def __init__(self, method):
            self.method = method

        def __index__(self):
            raise KeyboardInterrupt

    class Lasting(Said):
        def __len__(self):
            raise KeyboardInterrupt

    for args in [([Leaving(None)],), (Lasting(1),)]:
        with pytest.raises(KeyboardInterrupt):
            engine.batch_unregister_memory(*args)
    with pytest.raises(KeyboardInterrupt):
        engine.unregister_memory(Leaving(None))


def test_data_without_end_is_read_as_far_as_it_is_asked_for(engine):
    addr = engine.allocate_managed_buffer(16)
    endless = np.broadcast_to(np.uint8(5), (1 << 40,))
    assert engine.write_bytes_to_buffer(addr, endless, 1 << 39) == -1
    assert "no registered or managed buffer" in TransferEngine.last_error()
    assert engine.write_bytes_to_buffer(addr, endless, (1 << 40) + 1) == -1
    with pytest.raises(MemoryError):
        engine.write_bytes_to_buffer(addr, endless, 3)
    long = mmap.mmap(-1, 8 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    start = time.perf_counter()
    assert engine.write_bytes_to_buffer(addr, long, 3) == 0
    assert time.perf_counter() - start < 0.5
    for data, text in [
        (np.arange(6, dtype=np.uint8).reshape(2, 3), b"\0\1\2\3"),
        (np.arange(6, dtype=np.uint8).reshape(2, 3).T, b"\0\3\1\4"),
        (np.arange(9, dtype=np.uint8)[::2], b"\0\2\4\6"),
        (np.array([1.0]), np.array([1.0]).tobytes()[:4]),
        (np.array([(1, 2)], dtype=[("a", "u2"), ("b", "u2")]), b"\1\0\2\0"),
        (bytearray(b"abcdef"), b"abcd"),
    ]:
        assert engine.write_bytes_to_buffer(addr, data, 4) == 0
        assert engine.read_bytes_from_buffer(addr, 4) == text


FORMS = [
    list,
    tuple,
    lambda ns: [np.uint64(n) for n in ns],
    lambda ns: [np.int32(n & 0x7FFF) if n < 0x7FFF else n for n in ns],
    lambda ns: np.array(ns, np.uint64),
    lambda ns: np.array(ns, np.int64),
    lambda ns: np.array(ns, ">i8"),
    lambda ns: np.repeat(np.array(ns, np.uint64), 2)[::2],
    lambda ns: array.array("Q", ns),
    lambda ns: array.array("q", ns),
    lambda ns: memoryview(array.array("Q", ns)),
    lambda ns: [Index(n) for n in ns],
]


@pytest.mark.parametrize("form", FORMS)
def test_lists_come_in_many_forms(engine, form):
    memory = Memory(100)
    addresses = form([memory.addr, memory.addr + 50])
    lengths = form([10, 20])
    assert engine.batch_register_memory(addresses, lengths) == 0, TransferEngine.last_error()
    assert engine.register_memory(memory.addr + 69, 1) == -7
    assert engine.register_memory(memory.addr + 70, 1) == 0
    assert engine.batch_unregister_memory(addresses) == 0
    assert engine.unregister_memory(np.uint64(memory.addr + 70)) == 0


def test_a_bool_and_a_small_array_are_integers(engine):
    with pytest.raises(TypeError):
        engine.batch_unregister_memory(np.array([-1]))
    assert engine.batch_unregister_memory([True]) == -3
    assert engine.batch_unregister_memory(np.array([1, 2], np.uint8)) == -3
    assert engine.batch_unregister_memory(np.array([], np.int64)) == 0
    assert engine.batch_unregister_memory([]) == 0


@pytest.mark.parametrize("form", [list, lambda ns: np.array(ns, np.uint64)])
def test_many_entries_are_read_quickly(engine, form):
    n = 200_000
    memory = Memory(n)
    addresses, ones = form(list(range(memory.addr, memory.addr + n))), form([1] * n)
    short = form([1])
    start = time.perf_counter()
    assert engine.batch_transfer_sync_write("x:1", addresses, addresses, short) == -1
    seconds = time.perf_counter() - start
    assert "lists differ in length" in TransferEngine.last_error()
    assert seconds < 0.5
    del ones


def test_lists_of_different_lengths_are_refused_before_the_peer_is_asked(engine):
    unknown = "no-such-host.invalid:1"
    start = time.perf_counter()
    for lists in (([1], [1, 2], [1]), ([1, 2], [1, 2], [1]), ([], [], [1])):
        for method in ("batch_transfer_sync_write", "batch_transfer_sync_read"):
            assert getattr(engine, method)(unknown, *lists) == -1
            assert "lists differ in length" in TransferEngine.last_error()
        for method in ("batch_transfer_async_write", "batch_transfer_async_read"):
            assert getattr(engine, method)(unknown, *lists) == 0
            assert "lists differ in length" in TransferEngine.last_error()
        assert engine.batch_transfer_sync(unknown, *lists, TransferOpcode.Read, TransferNotify("a", "b")) == -1
        assert engine.batch_transfer_async(unknown, *lists, TransferOpcode.Read) == 0
    assert engine.batch_register_memory([4096, 8192], [16]) == -1
    assert "lists differ in length" in TransferEngine.last_error()
    assert time.perf_counter() - start < 0.5


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


@pytest.mark.parametrize("location", ["*", "", "cpu", "cpu:0", "cpu:12", b"cpu:1"])
def test_locations_of_host_memory(engine, location, caplog):
    memory = Memory(16)
    assert engine.register_memory(memory.addr, 16, location) == 0
    assert engine.unregister_memory(memory.addr) == 0
    assert engine.batch_register_memory([memory.addr], [16], location=location) == 0
    assert not caplog.records


@pytest.mark.parametrize("location", ["gpu:0", "cuda", "cuda:", "cuda:-1", "cpu:", "cpu:x", "CPU", "npu:3"])
def test_an_unknown_location_is_said_once(engine, location, caplog):
    memory = Memory(16)
    for _ in range(2):
        assert engine.register_memory(memory.addr, 16, location) == 0
        assert engine.unregister_memory(memory.addr) == 0
    assert [r.getMessage() for r in caplog.records] == [f'location "{location}" is unknown: "*" is used']


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
