"""Memory of a GPU in the pythonic face, with the simulated driver of docs/simgpu.md: arrays, tensors, streams."""

from __future__ import annotations

import pytest
from face_kit import run
from peers import TESTS

BODY = """
sys.path.insert(0, sys.argv[2])
import numpy as np
from gpu_jobs import Gpu, KINDS

gpu = Gpu(sys.argv[1])
assert gpu.library.cuInit(0) == 0
SIZE = 300_000

class Array:
    "As arrays of CuPy and Numba are."
    def __init__(self, device=0, shape=(300, 1000), strides=None, readonly=False):
        self.addr = gpu.alloc(device, SIZE, KINDS["device"])
        assert self.addr
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (self.addr, readonly), "strides": strides, "version": 3}
    def fill(self, byte):
        image = np.full(SIZE, byte, dtype=np.uint8)
        assert gpu.write(self.addr, image.ctypes.data, SIZE) == 0
    def image(self):
        image = np.empty(SIZE, dtype=np.uint8)
        assert gpu.read(self.addr, image.ctypes.data, SIZE) == 0
        return image

class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64), ("kind", ctypes.c_int32), ("id", ctypes.c_int32), ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
    ]

class ByDlpack:
    "As tensors are that have nothing else: two bytes for each element, from `offset` on."
    def __init__(self, array, offset=0):
        self.array, self.offset, self.asked = array, offset, []
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, *, stream=None, max_version=None):
        self.asked.append(stream)
        shape, strides = (ctypes.c_int64 * 2)(300, (SIZE - self.offset) // 600), (ctypes.c_int64 * 2)((SIZE - self.offset) // 600, 1)
        self.held = Tensor(self.array.addr, 2, 0, 2, 4, 16, 1, ctypes.addressof(shape), ctypes.addressof(strides), self.offset), shape, strides
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.held[0]), b"dltensor", None)

class Stream:
    def __init__(self):
        self.cuda_stream = gpu.stream(0, 1)

class NewStream:
    def __init__(self, raw):
        self.raw = raw
    def __cuda_stream__(self):
        return (0, self.raw)

target, initiator = tensorferry.Engine(), tensorferry.Engine()
remote = bytearray(SIZE)
at = target.register(remote).addr
segment = initiator.open(target.name)
"""


def good(cuda: str, code: str) -> None:
    import textwrap

    assert run(BODY + textwrap.dedent(code) + "\nprint('good')\n", cuda, str(TESTS)) == "good\n"


def test_arrays_and_tensors_of_a_device_lend_their_memory(cuda):
    good(cuda, """
    array = Array()
    for number, lender in enumerate([array, ByDlpack(array), array]):
        array.fill(10 + number)
        segment.write(lender, at)
        assert remote == bytes([10 + number]) * SIZE
        remote[:] = b"z" * SIZE
        if number == 2:
            segment.submit("read", [lender], [at]).wait()
        else:
            segment.read_async(lender, at).result()
        assert (array.image() == ord("z")).all()
    part = ByDlpack(array, 60_000)
    array.fill(0)
    segment.read(part, at)
    assert (array.image()[60_000:] == ord("z")).all() and not array.image()[:60_000].any()
    # The order with work on the device is the caller's.
    assert part.asked == [-1]
    """)


def test_memory_of_a_device_can_be_registered(cuda):
    good(cuda, """
    array = Array()
    for lender in (array, ByDlpack(array), (array.addr, SIZE)):
        with target.register(lender) as registered:
            assert (registered.device, registered.addr, registered.nbytes) == ("cuda:0", array.addr, SIZE)
            segment.write(b"into the device", registered.addr + 5)
            assert bytes(array.image()[5:20]) == b"into the device"
            back = bytearray(15)
            segment.read(back, registered.addr + 5)
            assert back == b"into the device"
    with target.register(Array(1), location="cuda:1") as registered:
        assert registered.device == "cuda:1"
    with target.register(Array(readonly=True)) as registered:
        try:
            segment.write(b"x", registered.addr)
            assert False
        except tensorferry.Refused:
            pass
    try:
        target.register(array, location="cuda:1")
        assert False
    except tensorferry.BadArgument as error:
        assert error.kind == "WrongLocation"
    """)


def test_device_memory_that_is_not_contiguous_or_is_readonly_is_refused(cuda):
    good(cuda, """
    wide = Array(shape=(300, 500), strides=(1000, 1))
    for call in (lambda: segment.write(wide, at), lambda: target.register(wide)):
        try:
            call()
            assert False
        except tensorferry.BadArgument as error:
            assert str(error).startswith("Array of shape (300, 500) with strides (1000, 1) bytes is not contiguous"), error
    try:
        segment.read(Array(readonly=True), at)
        assert False
    except tensorferry.BadArgument as error:
        assert "read-only" in str(error)
    """)


def test_a_transfer_starts_behind_a_stream(cuda):
    good(cuda, """
    array, stream = Array(), Stream()
    for byte, given in [(1, stream), (2, NewStream(stream.cuda_stream)), (3, stream.cuda_stream)]:
        # A kernel that writes some time after its launch.
        assert gpu.fill_later(stream.cuda_stream, array.addr, byte, SIZE, 50_000_000) == 0
        segment.write(array, at, stream=given)
        assert remote == bytes([byte]) * SIZE
    async def main():
        assert gpu.fill_later(stream.cuda_stream, array.addr, 4, SIZE, 50_000_000) == 0
        await segment.write_async(array, at, stream=stream)
        assert remote == bytes([4]) * SIZE
    asyncio.run(main())
    """)


def test_later_work_on_the_stream_waits_if_it_is_asked_to(cuda):
    good(cuda, """
    array, stream = Array(), Stream()
    for byte in range(1, 6):
        assert gpu.fill_later(stream.cuda_stream, array.addr, byte, SIZE, 5_000_000) == 0
        transfer = segment.write_async(array, at, stream=stream, hold_stream=True)
        assert gpu.fill_later(stream.cuda_stream, array.addr, 0xEE, SIZE, 0) == 0
        transfer.wait()
        assert remote == bytes([byte]) * SIZE
    assert gpu.stream_wait(stream.cuda_stream) == 0
    """)


def test_a_stream_is_kept_until_its_transfer_has_ended(cuda):
    good(cuda, """
    array, stream = Array(), Stream()
    raw, gone = stream.cuda_stream, weakref.ref(stream)
    assert gpu.fill_later(raw, array.addr, 1, SIZE, 1_500_000_000) == 0
    transfer = segment.write_async(array, at, stream=stream)
    del stream
    gc.collect()
    assert gone() is not None and not transfer.done
    transfer.wait()
    assert gone() is None
    """)


@pytest.mark.parametrize("device", ["cuda:7", "musa:0"])
def test_a_device_that_is_not_there_says_so(cuda, device):
    good(cuda, f"""
    try:
        target.register(bytearray(8), location={device!r})
        assert False
    except tensorferry.DeviceError as error:
        assert error.kind == "Gpu" and {device.split(":")[0]!r} in str(error).lower(), error
    """)
