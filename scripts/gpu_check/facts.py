"""What the driver and the kernel do with GPU memory: numbers that the engine's design rests on. No engine is used."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import statistics
import threading
import time

from .cuda import ATTRIBUTES, DISABLE_TIMING, KINDS, NON_BLOCKING, Cuda, Region

KIB = 1 << 10
MIB = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)
for name in ("send", "recv"):
    getattr(libc, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    getattr(libc, name).restype = ctypes.c_ssize_t


def in_new_thread(body):
    """What `body` returns in a thread that is in no context."""
    answer = []
    thread = threading.Thread(target=lambda: answer.append(body()))
    thread.start()
    thread.join()
    if not answer:
        raise RuntimeError("the thread failed")
    return answer[0]


def cost_ns(body, times: int) -> int:
    """The median of what a call takes, Python's part in it included."""
    spent = []
    for _ in range(times):
        began = time.perf_counter_ns()
        body()
        spent.append(time.perf_counter_ns() - began)
    return int(statistics.median(spent))


def pointers(cuda: Cuda, device: int, times: int) -> dict:
    """What queries about memory of each kind answer to a thread without a context, and what they cost."""
    regions = {kind: Region(kind, 4 * MIB, device, cuda, "driver") for kind in KINDS}
    told = {}

    def ask() -> bool:
        for kind, region in regions.items():
            address = region.address + 4097
            code, values = cuda.attributes(list(ATTRIBUTES.values()), address)
            told[kind] = {
                "one_by_one": {name: cuda.attribute(which, address) for name, which in ATTRIBUTES.items()},
                "together": [code, dict(zip(ATTRIBUTES, values))],
                "one_ns": cost_ns(lambda: cuda.attribute(2, address), times),
                "together_ns": cost_ns(lambda: cuda.attributes(list(ATTRIBUTES.values()), address), times),
            }
        return cuda.get("cuCtxGetCurrent") == 0

    context_less = in_new_thread(ask)
    return {"context_less": context_less, "kinds": told, "active": cuda.active()}


def socket_pair() -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far = listener.accept()[0]
    listener.close()
    return near, far


def move(call, descriptor: int, address: int, size: int) -> dict:
    """Calls send or recv until `size` bytes are through; the rate, or the error of the first failing call."""
    done, began = 0, time.perf_counter()
    while done < size:
        moved = call(descriptor, address + done, min(size - done, MIB), 0)
        if moved <= 0:
            code = ctypes.get_errno() if moved < 0 else 0
            return {"errno": errno.errorcode.get(code, code), "bytes": done}
        done += moved
    return {"gb_per_s": round(size / (time.perf_counter() - began) / 1e9, 3)}


def sockets(cuda: Cuda, device: int, size: int) -> dict:
    """What send() and recv() do with memory of each kind."""
    told = {}
    for kind in KINDS:
        region = Region(kind, size, device, cuda, "driver")
        region.write(0, bytes(size))
        told[kind] = {
            "send": beside(drain, size, lambda near: move(libc.send, near, region.address, size)),
            "recv": beside(feed, size, lambda near: move(libc.recv, near, region.address, size)),
        }
    return told


def beside(other, size: int, body) -> dict:
    """`body` with the descriptor of one end of a connection, while `other` has the other end in a thread."""
    near, far = socket_pair()
    thread = threading.Thread(target=other, args=(far, size))
    thread.start()
    answer = body(near.fileno())
    near.close()
    thread.join()
    far.close()
    return answer


def drain(far: socket.socket, _size: int) -> None:
    scratch = bytearray(MIB)
    while far.recv_into(scratch):
        pass


def feed(far: socket.socket, size: int) -> None:
    try:
        far.sendall(bytes(size))
    except OSError:  # nobody receives it
        pass


def copies(cuda: Cuda, device: int, total: int, chunks: list[int], depths: list[int]) -> dict:
    """Rates of both directions by chunk and by how many are in flight, with pinned and with pageable host memory."""
    memory = Region("device", total, device, cuda, "driver")
    stream = cuda.get("cuStreamCreate", NON_BLOCKING)
    most = max(depths) * max(chunks)
    events = [cuda.get("cuEventCreate", DISABLE_TIMING) for _ in range(max(depths))]
    rates: dict = {}
    for kind in ("pinned", "host"):
        host = Region(kind, most, device, cuda, "driver")
        host.write(0, bytes(most))
        for direction in ("to_host", "to_device"):
            # What is made at the first copy is not measured.
            copy_async(cuda, direction, memory.address, host.address, most, stream)
            cuda.call("cuStreamSynchronize", stream)
            for chunk in chunks:
                for depth in depths if kind == "pinned" else [1]:
                    rate = copy_rate(cuda, direction, memory.address, host.address, (total, chunk), stream, events[:depth])
                    rates.setdefault(kind, {}).setdefault(direction, {})[f"{chunk // KIB} KiB x {depth}"] = rate
    return {"gb_per_s": rates}


def copy_async(cuda: Cuda, direction: str, device: int, host: int, size: int, stream: int) -> None:
    if direction == "to_host":
        cuda.call("cuMemcpyDtoHAsync_v2", host, device, size, stream)
    else:
        cuda.call("cuMemcpyHtoDAsync_v2", device, host, size, stream)


def copy_rate(cuda: Cuda, direction: str, device: int, host: int, sizes: tuple[int, int], stream: int, events: list[int]) -> float:
    """`total` bytes in chunks through a ring of as many host slots as there are events."""
    total, chunk = sizes
    depth, count = len(events), total // chunk
    began = time.perf_counter()
    for n in range(count):
        if n >= depth:
            cuda.call("cuEventSynchronize", events[n % depth])
        copy_async(cuda, direction, device + n * chunk, host + n % depth * chunk, chunk, stream)
        cuda.call("cuEventRecord", events[n % depth], stream)
    cuda.call("cuStreamSynchronize", stream)
    return round(count * chunk / (time.perf_counter() - began) / 1e9, 3)


def calls(cuda: Cuda, device: int, times: int) -> dict:
    """What the calls of a copy cost the thread that makes them."""
    memory = Region("device", MIB, device, cuda, "driver")
    host = Region("pinned", MIB, device, cuda, "driver")
    stream = cuda.get("cuStreamCreate", NON_BLOCKING)
    event = cuda.get("cuEventCreate", DISABLE_TIMING)
    told: dict = {}
    for direction in ("to_host", "to_device"):
        for size in (64 * KIB, MIB):
            submit, whole = [], []
            for _ in range(times):
                began = time.perf_counter_ns()
                copy_async(cuda, direction, memory.address, host.address, size, stream)
                submit.append(time.perf_counter_ns() - began)
                cuda.call("cuStreamSynchronize", stream)
                whole.append(time.perf_counter_ns() - began)
            spent = {"submit_ns": int(statistics.median(submit)), "complete_ns": int(statistics.median(whole))}
            told[f"{direction} {size // KIB} KiB"] = spent
    cuda.call("cuEventRecord", event, stream)
    cuda.call("cuEventSynchronize", event)
    told["event_record_ns"] = cost_ns(lambda: cuda.code("cuEventRecord", event, stream), times)
    cuda.call("cuStreamSynchronize", stream)
    told["event_query_ns"] = cost_ns(lambda: cuda.code("cuEventQuery", event), times)
    # A call of the driver's that does next to nothing: what of the above is Python's.
    told["least_call_ns"] = cost_ns(lambda: cuda.code("cuCtxSetCurrent", cuda.contexts[device]), times)
    return told


def pinning(cuda: Cuda, _device: int, sizes: list[int]) -> dict:
    """How long pinned memory takes to get and to give back."""
    told = {}
    for size in sizes:
        began = time.perf_counter()
        address = cuda.get("cuMemHostAlloc", size, 1)
        got = time.perf_counter()
        cuda.call("cuMemFreeHost", address)
        freed = time.perf_counter()
        told[f"{size // MIB} MiB"] = {"alloc_ms": round((got - began) * 1e3, 2), "free_ms": round((freed - got) * 1e3, 2)}
    return told


def fork(cuda: Cuda, _device: int) -> dict:
    """What a child of a process that has initialised the driver is told."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = ctypes.c_int()
        codes = [cuda.code("cuInit", 0), cuda.code("cuDeviceGetCount", ctypes.byref(count))]
        os.write(writing, bytes(str(codes), "ascii"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        told = answer.read()
    _, status = os.waitpid(pid, 0)
    parent = cuda.code("cuCtxSynchronize")
    return {"init_and_count_in_child": told, "child": os.waitstatus_to_exitcode(status), "parent_goes_on": parent == 0}
