"""One end of a transfer, or a user of the driver alone: what a process of a check can be told to do."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import random
import signal
import statistics
import threading
import time

from . import facts
from .cuda import CAPTURE_GLOBAL, NON_BLOCKING, Cuda, Region, framework_of

#: A prime: what lands at a wrong place does not look right.
PERIOD = 1_048_583


@functools.lru_cache(maxsize=8)
def period(seed: int) -> bytes:
    return random.Random(seed).randbytes(PERIOD)


def pattern(seed: int, start: int, size: int) -> bytes:
    """`size` bytes of the pattern of `seed`, from its byte `start` on."""
    skip = start % PERIOD
    return (period(seed) * ((skip + size) // PERIOD + 1))[skip : skip + size]


def difference(one: bytes, other: bytes) -> int:
    """The first byte in which two texts of one length differ."""
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] != other[low:middle]:
            high = middle
        else:
            low = middle
    return low


class Worker:
    def __init__(self):
        self.cuda: Cuda | None = None
        self.device = 0
        self.framework = "driver"
        self.regions: dict[str, Region] = {}
        self.module = None
        self.engine = None

    # The driver

    def probe(self, framework):
        """Whether there is a device, and what memory of it is made by."""
        try:
            cuda = Cuda()
        except (OSError, AttributeError) as error:
            return {"why": f"there is no CUDA driver: {error}"}
        try:
            version = cuda.get("cuDriverGetVersion")
            cuda.call("cuInit", 0)
            names = [cuda.device_name(device) for device in range(cuda.count())]
        except Exception as error:  # whatever the driver says is the reason
            return {"why": str(error)}
        if not names:
            return {"why": "the driver shows no device"}
        return {"driver": version, "devices": names, "framework": framework_of(framework)}

    def use_gpu(self, device, framework="driver"):
        """From here on this process uses the device, as its framework would."""
        self.cuda, self.device, self.framework = Cuda(), device, framework
        self.cuda.call("cuInit", 0)
        self.cuda.use(device)

    def contexts(self):
        """The devices on which this process has a context, and whether it has initialised the driver at all."""
        try:
            cuda = Cuda()
        except OSError:
            return {"initialised": False, "active": []}
        if not cuda.initialised():
            return {"initialised": False, "active": []}
        return {"initialised": True, "active": cuda.active()}

    def fact(self, name, **args):
        return getattr(facts, name)(self.cuda, self.device, **args)

    # Memory

    def memory(self, name, kind, size):
        self.regions[name] = Region(kind, size, self.device, self.cuda, self.framework)
        return self.regions[name].address

    def fill(self, name, seed, size):
        self.regions[name].write(0, pattern(seed, 0, size))

    def check(self, name, seed, size, patches):
        """Compares with the pattern `seed` but for [start, seed, from, length]; "" or the first difference."""
        seen = self.regions[name].read(0, size)
        wanted = bytearray(pattern(seed, 0, size))
        for start, other, at, length in patches:
            wanted[start : start + length] = pattern(other, at, length)
        if seen == wanted:
            return ""
        at = difference(bytes(seen), bytes(wanted))
        return f"byte {at} of {name} is {seen[at]}, not {wanted[at]}"

    # The engine

    def open(self, module):
        """Makes an engine; its name, and whether it says that it moves memory of CUDA."""
        if module == "mooncake.engine":
            # Its libraries need a CUDA runtime, which the loader finds once a framework has loaded one.
            try:
                importlib.import_module("torch")
            except ImportError:
                pass
        self.module = importlib.import_module(module)
        self.engine = self.module.TransferEngine()
        code = self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise RuntimeError(f"initialize answered {code}: {self.error()}")
        name = f"127.0.0.1:{self.engine.get_rpc_port()}"
        version = getattr(importlib.import_module(module.partition(".")[0]), "__version__", None)
        return {"name": name, "version": version, "moves_cuda": bool(getattr(self.module, "SUPPORT_CUDA", False))}

    def error(self):
        ask = getattr(self.engine, "last_error", None)
        return ask() if ask else None

    def register(self, name, location=None):
        region = self.regions[name]
        args = (region.address, region.size) if location is None else (region.address, region.size, location)
        code = self.engine.register_memory(*args)
        if code != 0:
            raise RuntimeError(f"register_memory of {region.kind} memory answered {code}: {self.error()}")

    def lists(self, entries):
        """[local region, offset in it, remote address, length] as the lists that the engine takes."""
        local = [self.regions[name].address + offset for name, offset, _, _ in entries]
        return local, [remote for _, _, remote, _ in entries], [length for *_, length in entries]

    def transfer(self, op, peer, entries):
        """One batch; raises if it fails."""
        code = getattr(self.engine, f"batch_transfer_sync_{op}")(peer, *self.lists(entries))
        if code != 0:
            raise RuntimeError(f"{op} of {len(entries)} x {entries[0][3]} bytes answered {code}: {self.error()}")

    def measure(self, op, peer, name, remote, block, count, seconds):
        """The same batch again and again; GB/s of the median round."""
        call = getattr(self.engine, f"batch_transfer_sync_{op}")
        entries = [(name, n * block, remote + n * block, block) for n in range(count)]
        lists = self.lists(entries)
        for _ in range(2):
            self.transfer(op, peer, entries)
        rounds, end = [], time.monotonic() + seconds
        while not rounds or time.monotonic() < end:
            began = time.perf_counter()
            code = call(peer, *lists)
            rounds.append(time.perf_counter() - began)
            if code != 0:
                raise RuntimeError(f"round {len(rounds)} answered {code}: {self.error()}")
        return {"gb_per_s": round(block * count / statistics.median(rounds) / 1e9, 3), "rounds": len(rounds)}

    def transfer_beside_capture(self, op, peer, entries, times):
        """Transfers while another thread has a global capture open; what the capture ended with."""
        open_, done, ended = threading.Event(), threading.Event(), []

        def capture():
            try:
                self.cuda.use(self.device)
                stream = self.cuda.get("cuStreamCreate", NON_BLOCKING)
                self.cuda.call("cuStreamBeginCapture_v2", stream, CAPTURE_GLOBAL)
                open_.set()
                done.wait()
                ended.append(self.cuda.code("cuStreamEndCapture", stream, (ctypes.c_void_p * 1)()))
            finally:
                open_.set()

        thread = threading.Thread(target=capture)
        thread.start()
        open_.wait()
        try:
            for _ in range(times):
                self.transfer(op, peer, entries)
        finally:
            done.set()
            thread.join()
        return {"transfers": times, "capture_end": ended[0] if ended else None}

    def fork(self, peer, entries, seconds):
        """A child: the engine that it has inherited refuses, and one of its own moves host memory. Its exit code."""
        pid = os.fork()
        if pid == 0:
            os._exit(self.child(peer, entries))
        end = time.monotonic() + seconds
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TimeoutError(f"the child had not ended after {seconds} s")
            time.sleep(0.01)

    def child(self, peer, entries):
        """2: the inherited engine answered as if nothing had happened; 3: the new one failed."""
        try:
            self.transfer("write", peer, entries)
            return 2
        except Exception:
            pass
        try:
            self.open(self.module.__name__)
            self.regions = {name: region for name, region in self.regions.items() if region.kind == "host"}
            self.transfer("write", peer, [entry for entry in entries if entry[0] in self.regions])
            return 0
        except BaseException as error:
            print(f"in the child: {type(error).__name__}: {error}", flush=True)
            return 3
