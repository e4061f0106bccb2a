"""The class TransferEngine: which arguments it takes, in which forms, and what it says about others. One process."""

from __future__ import annotations

import array
import itertools
import mmap
import sys
import time

import numpy as np
import pytest
from dropin_kit import Memory, engine, name_of
from tensorferry.mooncake import TransferEngine, TransferNotify, TransferOpcode


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
    start = time.thread_time()
    assert call_with(engine, method, *[ENDLESS[endless]() for _ in range(lists)]) == answer
    assert "has more than 2^32 - 1 entries" in TransferEngine.last_error()
    if lists > 1:
        assert call_with(engine, method, *[[1]] * (lists - 1), ENDLESS[endless]()) == answer
        assert "lists differ in length" in TransferEngine.last_error()
    assert time.thread_time() - start < 0.5


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
    before = time.thread_time()
    call_with(engine, "batch_unregister_memory", first)
    assert time.thread_time() - before < 5


def test_a_very_long_number_is_refused_quickly(engine):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        start = time.thread_time()
        for number in (1 << 5_000_000, -(1 << 5_000_000)):
            with pytest.raises(TypeError) as raised:
                engine.unregister_memory(number)
            assert str(raised.value) == "expected an integer from 0 to 2**64 - 1, not one so far from them"
        assert time.thread_time() - start < 3
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
    start = time.thread_time()
    assert engine.write_bytes_to_buffer(addr, long, 3) == 0
    assert time.thread_time() - start < 0.5
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
    start = time.thread_time()
    assert engine.batch_transfer_sync_write("x:1", addresses, addresses, short) == -1
    seconds = time.thread_time() - start
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
