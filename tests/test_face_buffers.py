"""What lends memory to the pythonic face: buffers, arrays, tensors, addresses; how long it is kept."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest
import tensorferry
from face_kit import Two, silent_peer
from peers import wait_until

DATA = bytes(range(1, 65))


@pytest.fixture(scope="module")
def two():
    pair = Two()
    yield pair
    pair.close()


class ByInterface:
    """As arrays of CuPy and Numba are, but in host memory."""

    def __init__(self, base, readonly=False, attribute="__cuda_array_interface__", **changes):
        self.base = base
        described = {k: base.__array_interface__[k] for k in ("shape", "typestr", "strides", "version")}
        described["data"] = (base.ctypes.data, readonly)
        setattr(self, attribute, described | changes)


class ByDlpack:
    """A tensor that has nothing but DLPack, as PyTorch's on the CPU."""

    def __init__(self, base, versioned=True):
        self.base, self.versioned = base, versioned

    def __dlpack_device__(self):
        return self.base.__dlpack_device__()

    def __dlpack__(self, **arguments):
        if not self.versioned and "max_version" in arguments:
            raise TypeError("what is max_version?")
        return self.base.__dlpack__(**arguments)


def numbers():
    return np.frombuffer(DATA, dtype=np.uint8).copy()


def lend_mmap():
    area = mmap.mmap(-1, len(DATA))
    area[:] = DATA
    return area


LENDERS = {
    "bytes": lambda: DATA,
    "bytearray": lambda: bytearray(DATA),
    "memoryview slice": lambda: memoryview(bytearray(b"..." + DATA + b"..."))[3:-3],
    "memoryview cast": lambda: memoryview(bytearray(DATA)).cast("I"),
    "array": lambda: array.array("Q", DATA),
    "ctypes": lambda: (ctypes.c_char * 64).from_buffer_copy(DATA),
    "mmap": lend_mmap,
    "numpy": numbers,
    "numpy, 2 dimensions": lambda: numbers().view(np.float32).reshape(4, 4),
    "numpy, Fortran order": lambda: numbers().reshape(8, 8).T,
    "numpy, part": lambda: np.concatenate([numbers(), numbers()])[:64],
    "numpy, dimensions of 1": lambda: np.stack([numbers(), numbers()])[:1, None, :],
    "numpy, dates": lambda: numbers().view("datetime64[ns]"),
    "numpy, no dimension": lambda: np.array(DATA, dtype="S64"),
    "numpy, read-only": lambda: np.frombuffer(DATA, dtype=np.uint8),
    "cuda array interface": lambda: ByInterface(numbers().reshape(8, 8)),
    "cuda array interface, dense strides": lambda: ByInterface(numbers().reshape(8, 8), strides=(8, 1)),
    "dlpack": lambda: ByDlpack(numbers().view(np.int32).reshape(2, 8)),
    "dlpack before 1.0": lambda: ByDlpack(numbers(), versioned=False),
}
#: Those that nobody may write to.
READONLY = {"bytes", "numpy, read-only"}


@pytest.mark.parametrize("kind", LENDERS)
def test_every_kind_of_object_lends_its_bytes(two, kind):
    lender = LENDERS[kind]()
    two.memory[:64] = bytes(64)
    two.segment.write(lender, two.at)
    assert two.memory[:64] == DATA
    two.segment.write_async(lender, two.at + 64, 32).result()
    assert two.memory[64:96] == DATA[:32]
    if kind in READONLY:
        with pytest.raises(tensorferry.BadArgument, match="read-only"):
            two.segment.read(lender, two.at)
    else:
        two.memory[:64] = DATA[::-1]
        two.segment.read(lender, two.at)
        two.segment.write(lender, two.at + 100)
        assert two.memory[100:164] == DATA[::-1]


@pytest.mark.parametrize("kind", LENDERS)
def test_every_kind_of_object_can_be_registered(two, kind):
    lender = LENDERS[kind]()
    with tensorferry.Engine() as engine, engine.register(lender) as registered:
        assert (registered.nbytes, registered.device) == (64, "cpu")
        assert engine.buffers()[0].addr == registered.addr
        segment, back = two.initiator.open(engine.name), bytearray(64)
        segment.read(back, registered.addr)
        assert back == DATA
        if kind in READONLY:
            with pytest.raises(tensorferry.Refused):
                segment.write(DATA, registered.addr)
        else:
            segment.write(DATA[::-1], registered.addr)
            segment.read(back, registered.addr)
            assert back == DATA[::-1]


def test_a_torch_tensor_lends_its_bytes(two):
    torch = pytest.importorskip("torch", reason="skipped: PyTorch is not installed")
    tensor = torch.arange(64, dtype=torch.bfloat16)
    two.segment.write(tensor, two.at)
    back = torch.empty_like(tensor)
    two.segment.read(back, two.at)
    assert torch.equal(back, tensor)


def test_an_address_needs_its_length(two):
    lender = numbers()
    address = lender.ctypes.data
    for local in (address, np.uint64(address), (address, 64)):
        two.memory[:64] = bytes(64)
        two.segment.write(local, two.at, 64)
        assert two.memory[:64] == DATA
    two.segment.write((address, 64), two.at)
    for call in [lambda: two.segment.write(address, two.at), lambda: two.target.register(address)]:
        with pytest.raises(TypeError, match="says no length"):
            call()
    registered = two.target.register((address, 64))
    two.segment.write(b"address", registered.addr)
    assert bytes(lender[:7]) == b"address"
    registered.unregister()


NOT_CONTIGUOUS = {
    "every second": lambda: numbers()[::2],
    "columns": lambda: numbers().reshape(8, 8)[:, :4],
    "backwards": lambda: numbers()[::-1],
    "repeated": lambda: np.broadcast_to(numbers(), (3, 64)),
    "memoryview": lambda: memoryview(DATA)[::3],
    "cuda array interface": lambda: ByInterface(numbers().reshape(8, 8)[:, :4]),
    "dlpack": lambda: ByDlpack(numbers().reshape(8, 8)[:, :4]),
    "dates": lambda: numbers().view("datetime64[ns]")[::2],
}


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_what_is_not_contiguous_is_refused(two, kind):
    lender = NOT_CONTIGUOUS[kind]()
    for call in [lambda: two.target.register(lender), lambda: two.segment.write(lender, two.at), lambda: two.segment.submit("write", [lender], [two.at])]:
        with pytest.raises(tensorferry.BadArgument, match=r"of shape \(.*\) with strides \(.*\) bytes is not contiguous"):
            call()


OBJECTS = {
    "numpy": lambda: np.array([1, "two"], dtype=object),
    "numpy, a field": lambda: np.zeros(2, dtype=[("number", "i4"), ("any", "O")]),
    "ctypes": lambda: (ctypes.py_object * 2)(1, "two"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_python_objects_are_no_bytes_to_move(two, kind):
    """What is read over their addresses, the interpreter would follow."""
    lender = OBJECTS[kind]()
    for call in [
        lambda: two.target.register(lender),
        lambda: two.segment.read(lender, two.at),
        lambda: two.segment.submit("read", [lender], [two.at]),
    ]:
        with pytest.raises(tensorferry.BadArgument, match="are Python objects, whose bytes mean nothing elsewhere"):
            call()
    named = np.zeros(2, dtype=[("O", "i4"), ("OO", "i4")])
    two.segment.read(named, two.at)


def test_what_ends_the_program_is_not_taken_for_a_wrong_type(two):
    class Exits:
        def __index__(self):
            raise SystemExit(5)

    for call in [
        lambda: two.target.register((Exits(), 5)),
        lambda: two.segment.write((two.at, Exits()), two.at),
        lambda: two.segment.submit("write", [Exits()], [two.at], 5),
    ]:
        with pytest.raises(SystemExit):
            call()


def test_the_shape_and_the_strides_are_named(two):
    with pytest.raises(ValueError, match=r"^ndarray of shape \(8, 4\) with strides \(8, 1\) bytes is not contiguous, so"):
        two.target.register(numbers().reshape(8, 8)[:, :4])


NO_MEMORY = [None, 1.5, "text", object(), [1, 2], {}, (1,), (1, 2, 3), ("a", 1), (-1, 5), 1 << 64, -1]


@pytest.mark.parametrize("what", NO_MEMORY, ids=repr)
def test_what_lends_no_memory_is_a_type_error(two, what):
    for call in [
        lambda: two.target.register(what),
        lambda: two.segment.write(what, two.at),
        lambda: two.segment.read_async(what, two.at, 5),
        lambda: two.segment.submit("write", [what], [two.at]),
    ]:
        with pytest.raises(TypeError):
            call()


BROKEN = {
    "no data": {"data": None},
    "no such type": {"typestr": "bytes"},
    "shape": {"shape": (-1,)},
    "too large": {"shape": (1 << 62, 8), "strides": None},
}


@pytest.mark.parametrize("how", BROKEN)
def test_an_array_that_describes_itself_wrongly(two, how):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        two.target.register(ByInterface(numbers(), **BROKEN[how]))


def test_an_array_that_cannot_describe_itself_as_one_of_cuda_has_dlpack(two):
    class Tensor(ByDlpack):
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("no such type there")

    two.segment.write(Tensor(numbers()), two.at)
    assert two.memory[:64] == DATA


def test_a_tensor_that_gives_itself_not_away_says_why(two):
    class Tensor(ByDlpack):
        def __dlpack__(self, **arguments):
            raise BufferError("Can't export tensors that require gradient")

    class Elsewhere(ByDlpack):
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(BufferError, match="require gradient"):
        two.segment.write(Tensor(numbers()), two.at)
    with pytest.raises(tensorferry.BadArgument, match="DLPack's kind 8"):
        two.segment.write(Elsewhere(numbers()), two.at)


def test_lengths_are_checked(two):
    lender = bytearray(DATA)
    with pytest.raises(tensorferry.BadArgument, match="length=65: the local object has 64 bytes"):
        two.segment.write(lender, two.at, 65)
    two.segment.write(lender, two.at, 0)
    two.segment.write(b"", two.at)
    with pytest.raises(tensorferry.BadArgument):
        two.target.register(b"")


# Registration


def test_a_registration_can_be_ended(two):
    with tensorferry.Engine() as engine:
        segment = two.initiator.open(engine.name)
        registered = engine.register(bytearray(64))
        assert repr(registered) == f"<Registration of 64 bytes at {registered.addr:#x} on cpu>"
        segment.write(DATA, registered.addr)
        registered.unregister()
        registered.unregister()
        with pytest.raises(tensorferry.Refused):
            segment.write(DATA, registered.addr)
        assert engine.buffers() == []


def test_the_same_range_can_be_registered_again(two):
    with tensorferry.Engine() as engine:
        lender = bytearray(64)
        segment = two.initiator.open(engine.name)
        first, second = engine.register(lender), engine.register(lender)
        first.unregister()
        segment.write(DATA, second.addr)
        with pytest.raises(tensorferry.Overlap, match="overlaps"):
            engine.register(memoryview(lender)[:10])
        second.unregister()
        with pytest.raises(tensorferry.Refused):
            segment.write(DATA, second.addr)


def test_readonly_is_for_whoever_wants_it(two):
    lender = bytearray(DATA)
    with two.target.register(lender, readonly=True) as registered:
        with pytest.raises(tensorferry.Refused):
            two.segment.write(b"spoilt", registered.addr)
        back = bytearray(64)
        two.segment.read(back, registered.addr)
    assert lender == back == DATA


def test_where_it_is_can_be_said(two):
    with two.target.register(bytearray(8), location="cpu") as registered:
        assert registered.device == "cpu"
    with pytest.raises(tensorferry.BadArgument, match='location: "npu:0" is not'):
        two.target.register(bytearray(8), location="npu:0")
    with pytest.raises(tensorferry.DeviceError):
        two.target.register(bytearray(8), location="musa:7")


def test_memory_that_is_not_there_is_refused(two):
    with pytest.raises(tensorferry.BadLocalAddress, match="not mapped for the CPU") as caught:
        two.target.register((4096, 64))
    assert caught.value.kind == "Unmapped"
    with pytest.raises(tensorferry.BadLocalAddress, match="EFAULT") as caught:
        two.segment.write((4096, 64), two.at)
    assert (caught.value.local, caught.value.length) == (4096, 64)


# Who keeps what, and until when


class Lender(bytearray):
    """A bytearray that can be watched."""


def test_the_engine_keeps_what_is_registered():
    engine = tensorferry.Engine()
    lender = Lender(64)
    gone = weakref.ref(lender)
    registered = engine.register(lender)
    del lender
    gc.collect()
    assert gone() is not None
    del registered
    gc.collect()
    assert gone() is not None and len(engine.buffers()) == 1
    engine.close()
    assert gone() is None


def test_it_is_let_go_when_it_is_unregistered(two):
    lender = Lender(64)
    gone = weakref.ref(lender)
    registered = two.target.register(lender)
    with pytest.raises(BufferError):
        lender.append(1)
    del lender
    assert gone() is not None
    registered.unregister()
    assert gone() is None


def test_a_refused_registration_keeps_nothing(two):
    lender = Lender(64)
    gone = weakref.ref(lender)
    with pytest.raises(tensorferry.BadArgument):
        two.target.register(memoryview(lender)[:0])
    with pytest.raises(tensorferry.BadArgument):
        two.segment.read_async(lender, 0)
    lender.append(1)
    del lender
    gc.collect()
    assert gone() is None


def test_a_closed_engine_and_its_buffers_in_a_cycle_are_collected():
    """Not before: peers can reach the memory, and the collector empties what it finds in any order."""
    cache = Lender(64)
    cache.engine = tensorferry.Engine()
    cache.registered = cache.engine.register(cache)
    segment, at, gone = cache.engine.open(cache.engine.name), cache.registered.addr, weakref.ref(cache)
    del cache
    gc.collect()
    segment.write(DATA, at)
    assert gone()[:] == DATA
    segment.engine.close()
    del segment
    gc.collect()
    assert gone() is None


def test_a_transfer_in_a_cycle_is_collected_when_it_has_ended(two):
    with tensorferry.Engine() as engine, silent_peer() as peer:
        lender = Lender(64)
        gone = weakref.ref(lender)
        lender.transfer = engine.segment(peer).read_async(lender, 4096, timeout=60)
        del lender
        gc.collect()
        assert gone() is not None and gone().transfer.state == "running"
        gone().transfer.cancel()
        gc.collect()
        assert gone() is None
    # One that nobody has looked at.
    lender = Lender(64)
    gone = weakref.ref(lender)
    lender.transfer = two.segment.write_async(lender, two.at)
    del lender

    def collected():
        gc.collect()
        return gone() is None

    wait_until(collected, 20, "the transfer has ended, and is collected")


def test_the_collector_does_not_empty_what_a_running_transfer_uses():
    with tensorferry.Engine() as engine, silent_peer() as peer:
        lender, ring = Lender(64), []
        view = memoryview(lender)
        gone = weakref.ref(lender)
        ring += [ring, view, engine.segment(peer).read_async(view, 4096, timeout=3)]
        del lender, view, ring
        gc.collect()
        assert gone() is not None
        with pytest.raises(BufferError):
            gone().append(1)
        wait_until(lambda: gone() is None, 20, "the buffer is let go after its transfer's end")


@pytest.mark.parametrize("kind", ["bytearray", "list", "interface", "dlpack"])
def test_a_transfer_keeps_its_memory_until_its_end_is_seen(kind):
    with tensorferry.Engine() as engine, silent_peer() as peer:
        base = Lender(64)
        gone = weakref.ref(base)
        array_ = np.frombuffer(base, dtype=np.uint8)
        lender = {"bytearray": base, "list": [base], "interface": ByInterface(array_), "dlpack": ByDlpack(array_)}[kind]
        segment = engine.segment(peer)
        if kind == "list":
            transfer = segment.submit("read", lender, [4096], timeout=60)
        else:
            transfer = segment.read_async(lender, 4096, timeout=60)
        del base, array_, lender
        gc.collect()
        assert gone() is not None and not transfer.done
        transfer.cancel()
        gc.collect()
        assert gone() is None
        assert transfer.state == "cancelled"


def test_a_transfer_that_nobody_holds_goes_on_and_then_lets_go(two):
    with tensorferry.Engine() as engine, silent_peer() as peer:
        lender = Lender(64)
        gone = weakref.ref(lender)
        del_this = engine.segment(peer).read_async(lender, 4096, timeout=3)
        del del_this, lender
        gc.collect()
        assert gone() is not None
        # Nobody calls anything: a thread of Python's lets go.
        wait_until(lambda: gone() is None, 20, "the buffer is let go after its transfer's end")
    before = two.target.stats()["served_bytes_written"]
    for _ in range(50):
        two.segment.write_async(bytes(1000), two.at)
    wait_until(lambda: two.target.stats()["served_bytes_written"] >= before + 50_000, 20, "every byte is there")


def test_closing_an_engine_ends_what_nobody_holds():
    lender = Lender(64)
    gone = weakref.ref(lender)
    with silent_peer() as peer, tensorferry.Engine() as engine:
        transfer = engine.segment(peer).read_async(lender, 4096)
        del lender
    with pytest.raises(tensorferry.Closed):
        transfer.result()
    assert gone() is None
    lender = Lender(64)
    gone = weakref.ref(lender)
    with silent_peer() as peer, tensorferry.Engine() as engine:
        engine.segment(peer).read_async(lender, 4096)
        del lender
        gc.collect()
        assert gone() is not None
    wait_until(lambda: gone() is None, 20, "the buffer is let go")
