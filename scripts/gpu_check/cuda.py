"""The CUDA driver's own library, as far as the checks call it, and memory of every kind."""

from __future__ import annotations

import ctypes
import mmap

#: Arguments of the driver's functions: p pointer, q 64-bit address or handle, z size, i and u 32-bit integers.
FUNCTIONS = {
    "cuInit": "u",
    "cuDriverGetVersion": "p",
    "cuDeviceGetCount": "p",
    "cuDeviceGetName": "pii",
    "cuDevicePrimaryCtxGetState": "ipp",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxSetCurrent": "q",
    "cuCtxGetCurrent": "p",
    "cuCtxSynchronize": "",
    "cuPointerGetAttribute": "piq",
    "cuPointerGetAttributes": "uppq",
    "cuMemAlloc_v2": "pz",
    "cuMemFree_v2": "q",
    "cuMemAllocManaged": "pzu",
    "cuMemHostAlloc": "pzu",
    "cuMemFreeHost": "q",
    "cuMemGetAllocationGranularity": "ppu",
    "cuMemAddressReserve": "pzzqq",
    "cuMemCreate": "pzpq",
    "cuMemMap": "qzzqq",
    "cuMemSetAccess": "qzpz",
    "cuMemcpyHtoD_v2": "qpz",
    "cuMemcpyDtoH_v2": "pqz",
    "cuMemcpyHtoDAsync_v2": "qqzq",
    "cuMemcpyDtoHAsync_v2": "qqzq",
    "cuStreamCreate": "pu",
    "cuStreamSynchronize": "q",
    "cuStreamBeginCapture_v2": "qi",
    "cuStreamEndCapture": "qp",
    "cuEventCreate": "pu",
    "cuEventRecord": "qq",
    "cuEventQuery": "q",
    "cuEventSynchronize": "q",
    "cuGetErrorName": "ip",
}
TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_uint64, "z": ctypes.c_size_t, "i": ctypes.c_int, "u": ctypes.c_uint}

NOT_INITIALIZED = 3
NON_BLOCKING = 1
DISABLE_TIMING = 2
PORTABLE = 1
WRITE_COMBINED = 4
ATTACH_GLOBAL = 1
CAPTURE_GLOBAL = 0
ATTRIBUTES = {
    "type": 2,
    "ordinal": 9,
    "managed": 8,
    "buffer_id": 7,
    "range_start": 11,
    "range_size": 12,
    "context": 1,
    "host_pointer": 4,
}

#: Kinds of memory that a check can ask for. "mapped" is what expandable segments are made of.
KINDS = ["host", "pinned", "write-combined", "device", "managed", "mapped"]
#: Those that the host reads and writes by itself.
HOST_KINDS = ["host", "pinned", "write-combined"]


class CudaError(Exception):
    def __init__(self, call: str, code: int, name: str):
        super().__init__(f"{call} answered {code} {name}".strip())
        self.code = code


class Cuda:
    """The library by its real name: whatever the loader finds under it."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.contexts: dict[int, int] = {}
        for name, letters in FUNCTIONS.items():
            function = getattr(self.library, name, None)
            if function is not None:
                function.argtypes = [TYPES[letter] for letter in letters]

    def code(self, name: str, *args) -> int:
        """Calls a function; its answer."""
        return getattr(self.library, name)(*args)

    def call(self, name: str, *args) -> None:
        code = self.code(name, *args)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(name, code, (text.value or b"").decode())

    def get(self, name: str, *args, type=ctypes.c_uint64) -> int:
        """Calls a function whose first argument is where its result goes."""
        out = type()
        self.call(name, ctypes.byref(out), *args)
        return out.value or 0

    # Devices and contexts

    def initialised(self) -> bool:
        """Whether somebody in this process has initialised the driver; does not do it."""
        count = ctypes.c_int()
        return self.code("cuDeviceGetCount", ctypes.byref(count)) != NOT_INITIALIZED

    def count(self) -> int:
        return self.get("cuDeviceGetCount", type=ctypes.c_int)

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 255, device)
        return text.value.decode()

    def active(self) -> list[int]:
        """The devices on which this process has its primary context. Makes none."""
        found = []
        for device in range(self.count()):
            flags, active = ctypes.c_uint(), ctypes.c_int()
            self.call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                found.append(device)
        return found

    def use(self, device: int) -> None:
        """Enters the device's primary context on this thread; makes it if need be."""
        if device not in self.contexts:
            self.contexts[device] = self.get("cuDevicePrimaryCtxRetain", device)
        self.call("cuCtxSetCurrent", self.contexts[device])

    # Memory

    def allocate(self, kind: str, size: int, device: int) -> int:
        if kind == "device":
            return self.get("cuMemAlloc_v2", size)
        if kind == "managed":
            return self.get("cuMemAllocManaged", size, ATTACH_GLOBAL)
        if kind in ("pinned", "write-combined"):
            return self.get("cuMemHostAlloc", size, PORTABLE if kind == "pinned" else PORTABLE | WRITE_COMBINED)
        if kind == "mapped":
            return self.map(size, device)
        raise ValueError(f"no kind of memory is called {kind}")

    def map(self, size: int, device: int) -> int:
        """Device memory in many small pieces, side by side in a larger reservation."""
        pinned_here = (ctypes.c_int * 8)(1, 0, 1, device)
        piece = self.get("cuMemGetAllocationGranularity", pinned_here, 0, type=ctypes.c_size_t)
        whole = -(-size // piece) * piece
        start = self.get("cuMemAddressReserve", 8 * whole, 0, 0, 0)
        for at in range(0, whole, piece):
            handle = self.get("cuMemCreate", piece, pinned_here, 0)
            self.call("cuMemMap", start + at, piece, 0, handle, 0)
        self.call("cuMemSetAccess", start, whole, (ctypes.c_int * 3)(1, device, 3), 1)
        return start

    def read(self, address: int, size: int) -> bytearray:
        out = bytearray(size)
        self.call("cuMemcpyDtoH_v2", (ctypes.c_char * size).from_buffer(out), address, size)
        return out

    def write(self, address: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", address, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data))
        # A copy from pageable memory may return before the device has all of it.
        self.call("cuCtxSynchronize")

    # What a pointer is

    def attribute(self, which: int, address: int) -> tuple[int, int]:
        """Code and value of one attribute."""
        value = ctypes.c_uint64()
        code = self.code("cuPointerGetAttribute", ctypes.byref(value), which, address)
        return code, value.value

    def attributes(self, which: list[int], address: int) -> tuple[int, list[int]]:
        """Code and values of several."""
        values = (ctypes.c_uint64 * len(which))()
        base, width = ctypes.addressof(values), ctypes.sizeof(ctypes.c_uint64)
        outs = (ctypes.c_void_p * len(which))(*[base + n * width for n in range(len(which))])
        code = self.code("cuPointerGetAttributes", len(which), (ctypes.c_int * len(which))(*which), outs, address)
        return code, list(values)


class Region:
    """Memory of one kind. Lives as long as its process."""

    def __init__(self, kind: str, size: int, device: int, cuda: Cuda | None, framework: str):
        self.kind, self.size, self.cuda = kind, size, cuda
        if kind == "host":
            self.keep = mmap.mmap(-1, size)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.keep))
        elif kind == "device" and framework == "torch":
            import torch

            self.keep = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
            self.address = self.keep.data_ptr()
        elif kind == "device" and framework == "cupy":
            import cupy

            with cupy.cuda.Device(device):
                self.keep = cupy.cuda.alloc(size)
            self.address = self.keep.ptr
        else:
            self.address = cuda.allocate(kind, size, device)

    def read(self, start: int, size: int) -> bytes | bytearray:
        if self.kind in HOST_KINDS:
            return ctypes.string_at(self.address + start, size)
        return self.cuda.read(self.address + start, size)

    def write(self, start: int, data: bytes) -> None:
        if self.kind in HOST_KINDS:
            ctypes.memmove(self.address + start, data, len(data))
        else:
            self.cuda.write(self.address + start, data)


def framework_of(wanted: str) -> str:
    """What allocates device memory: the wanted framework, or the first one that is installed and sees a device."""
    if wanted in ("auto", "torch"):
        try:
            import torch

            if torch.cuda.is_available():
                return "torch"
        except ImportError:
            pass
    if wanted in ("auto", "cupy"):
        try:
            import cupy

            if cupy.cuda.is_available():
                return "cupy"
        except ImportError:
            pass
    if wanted in ("auto", "driver"):
        return "driver"
    raise ImportError(f"{wanted} is not installed, or sees no device")
