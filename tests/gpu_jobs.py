"""Functions that the tests run inside a worker that has a simulated GPU (docs/simgpu.md). As in jobs.py."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
import pattern

U64, INT, PTR = ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p

#: What `simgpu_alloc` calls them.
KINDS = {"device": 0, "managed": 1, "mapped": 2, "pool": 3, "pinned": 4, "combined": 5}


class Gpu:
    """The simulator's own functions, in the library as this process has loaded it."""

    SIGNATURES = {
        "simgpu_count": (U64, [ctypes.c_char_p]),
        "simgpu_set": (INT, [ctypes.c_char_p, U64]),
        "simgpu_inject": (INT, [ctypes.c_char_p, U64, U64, INT]),
        "simgpu_heal": (None, []),
        "simgpu_reset": (None, []),
        "simgpu_alloc": (U64, [INT, U64, INT]),
        "simgpu_free": (INT, [U64]),
        "simgpu_read": (INT, [U64, PTR, U64]),
        "simgpu_write": (INT, [U64, PTR, U64]),
        "simgpu_stream": (U64, [INT, ctypes.c_uint]),
        "simgpu_stream_wait": (INT, [U64]),
        "simgpu_fill_later": (INT, [U64, U64, ctypes.c_uint8, U64, U64]),
        "simgpu_capture_begin": (INT, [U64, INT]),
        "simgpu_capture_end": (INT, [U64]),
    }

    def __init__(self, path: str):
        # As frameworks load it: its symbols are for everybody.
        self.library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        for name, (result, arguments) in self.SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("simgpu_"), function)
        self.areas: dict[str, tuple[int, int]] = {}
        self.streams: dict[str, int] = {}

    def read_all(self, name: str) -> np.ndarray:
        address, size = self.areas[name]
        image = np.empty(size, dtype=np.uint8)
        assert self.read(address, image.ctypes.data, size) == 0
        return image


def gpu_load(state, path, init="cuInit", current=None):
    """Loads the library as a framework would: it is initialised, and a device is this thread's current one."""
    state.gpu = Gpu(path)
    if init:
        assert getattr(state.gpu.library, init)(0) == 0
    if current is not None:
        context = PTR()
        assert state.gpu.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), current) == 0
        assert state.gpu.library.cuCtxSetCurrent(context) == 0


def gpu_open(state, path):
    """Loads the library, and does nothing else with it."""
    ctypes.CDLL(path)


def gpu_alloc(state, name, size, device=0, kind="device", seed=None):
    address = state.gpu.alloc(device, size, KINDS[kind])
    assert address != 0, f"no {kind} memory"
    state.gpu.areas[name] = (address, size)
    if seed is not None:
        gpu_fill(state, name, seed)
    return address


def gpu_free(state, name):
    address, _ = state.gpu.areas.pop(name)
    assert state.gpu.free(address) == 0


def gpu_fill(state, name, seed, start=0, length=None):
    address, size = state.gpu.areas[name]
    image = pattern.pattern(seed, 0, size - start if length is None else length)
    assert state.gpu.write(address + start, image.ctypes.data, len(image)) == 0


def gpu_check(state, name, background, **rest):
    """`check` of worker.py, for memory of a device."""
    import __main__ as worker

    state.buffers["image of " + name] = state.gpu.read_all(name)
    try:
        return worker.check(state, "image of " + name, background, **rest)
    finally:
        del state.buffers["image of " + name]


def gpu_bytes(state, name, byte, start=0, length=None):
    """How many bytes of the range are not `byte`."""
    image = state.gpu.read_all(name)[start:]
    return int(np.count_nonzero(image[:length] != byte))


def gpu_counts(state, *, names):
    return {name: state.gpu.count(name.encode()) for name in names}


def gpu_set(state, **settings):
    for name, value in settings.items():
        assert state.gpu.set(name.encode(), value) == 0


def gpu_inject(state, call, code, nth=1, times=1):
    assert state.gpu.inject(call.encode(), nth, times, code) == 0


def gpu_heal(state):
    state.gpu.heal()


def gpu_reset(state):
    state.gpu.reset()


# Streams


def gpu_stream(state, name, device=0, flags=1):
    stream = state.gpu.streams[name] = state.gpu.stream(device, flags)
    assert stream != 0
    return stream


def gpu_fill_later(state, stream, buffer, byte, start=0, length=None, delay=0.0):
    """A kernel that writes some time after its launch."""
    address, size = state.gpu.areas[buffer]
    length = size - start if length is None else length
    assert state.gpu.fill_later(state.gpu.streams[stream], address + start, byte, length, int(delay * 1e9)) == 0


def gpu_stream_wait(state, stream):
    """Waits as `cudaStreamSynchronize` does. Returns its answer, and the seconds it took."""
    start = time.monotonic()
    code = state.gpu.stream_wait(state.gpu.streams[stream])
    return {"code": code, "seconds": time.monotonic() - start}


def vendor_call(state, name, *arguments):
    """A call of the vendor's own."""
    function = getattr(state.gpu.library, name)
    function.argtypes = [type(argument) for argument in arguments]
    code = function(*arguments)
    assert code == 0, f"{name} answered {code}"


def fill_default_stream(state, default, buffer, byte, behind=None):
    """Work on a default stream of this thread: a buffer is filled, after what is on the stream `behind`."""
    address, size = state.gpu.areas[buffer]
    if behind is not None:
        event = PTR()
        vendor_call(state, "cuEventCreate", ctypes.pointer(event), ctypes.c_uint(2))
        vendor_call(state, "cuEventRecord", event, PTR(state.gpu.streams[behind]))
        vendor_call(state, "cuStreamWaitEvent", PTR(default), event, ctypes.c_uint(0))
    vendor_call(state, "cuMemsetD8Async", U64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size), PTR(default))


def wait_default_stream(state, default):
    vendor_call(state, "cuStreamSynchronize", PTR(default))


def gpu_capture(state, stream, begin, mode=0):
    stream = state.gpu.streams[stream]
    return state.gpu.capture_begin(stream, mode) if begin else state.gpu.capture_end(stream)


def between_kernels(state, method, target, local, remote, length, stream, rounds, delay, engine="main"):
    """Per round: a late kernel fills local memory, a transfer WRITEs it, the next kernel spoils it; nothing is waited for.

    Each round has a part of the memory at either end. Returns how long half of the calls took at most, and what they returned.
    """
    te, raw = state.engines[engine], state.gpu.streams[stream]
    base, _ = state.gpu.areas[local]
    call, seconds, returned = getattr(te, method), [], []
    for r in range(rounds):
        at = base + r * length
        assert state.gpu.fill_later(raw, at, r + 1, length, int(delay * 1e9)) == 0
        start = time.monotonic()
        if method.startswith("batch"):
            half = length // 2
            returned.append(call(target, [at, at + half], [remote + r * length, remote + r * length + half], [half, length - half], raw))
        else:
            returned.append(call(target, at, remote + r * length, length, raw))
        seconds.append(time.monotonic() - start)
        assert state.gpu.fill_later(raw, at, 0xEE, length, 0) == 0
    return {"median": sorted(seconds)[rounds // 2], "returned": returned}


def copy_on_stream(state, stream, to, source, length):
    """A copy between two device buffers by the vendor's own call, behind what is on the stream."""
    (to, _), (source, _) = state.gpu.areas[to], state.gpu.areas[source]
    vendor_call(state, "cuMemcpyAsync", U64(to), U64(source), ctypes.c_size_t(length), PTR(state.gpu.streams[stream]))


def current_context(state):
    """The context of the calling thread, of a thread that never had one, and how deep the first one's stack is."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(state.gpu.count(b"thread.context")))
    thread.start()
    thread.join()
    return [state.gpu.count(b"thread.context"), answers[0], state.gpu.count(b"thread.contexts")]


def support(state):
    """What the module says it could use, under both of its names."""
    import importlib

    state.module.install()
    names = ("SUPPORT_CUDA", "SUPPORT_HIP", "SUPPORT_MUSA")
    other = importlib.import_module("mooncake.engine")
    found = [getattr(state.module, name) for name in names]
    assert found == [getattr(other, name) for name in names]
    return found


def mapped(state):
    """The GPU libraries that this process has mapped."""
    with open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if ".so" in line}
    stems = ("libcuda", "libmusa", "libamdhip64")
    return sorted({os.path.basename(path) for path in paths if os.path.basename(path).startswith(stems)})
