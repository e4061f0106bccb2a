"""Processes with a simulated GPU, and memory in them."""

from __future__ import annotations

import pytest
from peers import OURS, EngineProcess

SLOT = 64 << 10
SIZES = [1, 511, 512, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 7, (1 << 20) + 3]
ARENA = 2 << 20
NEAR, FAR = 3, 1021
KINDS = ["host", "device"]
OPS = ["write", "read"]
ON_CUDA = ["transfer_write_on_cuda", "transfer_read_on_cuda", "batch_transfer_write_on_cuda", "batch_transfer_read_on_cuda"]


class GpuProcess(EngineProcess):
    """Our engine in a process that uses a GPU."""

    def __init__(self, library: str, env: dict[str, str] | None = None, framework_first: bool = True, current: int | None = None, **args):
        super().__init__(OURS, {"TENSORFERRY_STAGING_SLOT_BYTES": str(SLOT), **(env or {})}, **args)
        try:
            if framework_first:
                self.do("gpu_load", path=library, current=current)
            self.open()
            if not framework_first:
                self.do("gpu_load", path=library, current=current)
        except BaseException:
            self.close()
            raise

    def counter(self, name: str) -> int:
        return self.do("gpu_counts", names=[name])[name]


class Area:
    """Memory of one process, on the host or on a device, that is filled and compared in one way."""

    made = 0

    def __init__(self, end: EngineProcess, kind: str, size: int, seed: int = 1, device: int = 0, location: str | None = None, register=True):
        Area.made += 1
        self.end, self.kind, self.size, self.name = end, kind, size, f"area{Area.made}"
        if kind == "host":
            self.addr = end.alloc(self.name, size, seed=seed)
        else:
            self.addr = end.do("gpu_alloc", name=self.name, size=size, kind=kind, device=device, seed=seed)
        if register:
            call = end.te("register_memory", self.addr, size, *([location] if location is not None else []))
            assert call.value == 0, call

    def do(self, command: str, deadline: float = 60, **args):
        return self.end.do(("" if self.kind == "host" else "gpu_") + command, deadline, name=self.name, **args)

    def fill(self, seed: int, **args) -> None:
        self.do("fill", seed=seed, **args)

    def check(self, background: int, **args) -> list[str]:
        return self.do("check", background=background, **args)


def records(process: EngineProcess, level: str = "WARNING") -> list[str]:
    """What was logged, from that level up."""
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    return [text for _, seen, text in process.do("logs") if levels.index(seen) >= levels.index(level)]


class Seeds:
    """Fresh patterns for every test, so that no bytes are right by having been there before."""

    last = 10

    @classmethod
    def two(cls) -> tuple[int, int]:
        cls.last += 2
        return cls.last, cls.last + 1


@pytest.fixture(scope="module")
def both(cuda):
    """Two processes with a GPU each; in one, the framework came first, in the other, the engine."""
    target = GpuProcess(cuda)
    try:
        initiator = GpuProcess(cuda, framework_first=False)
    except BaseException:
        target.close()
        raise
    yield initiator, target
    initiator.close()
    target.close()


@pytest.fixture
def one(cuda):
    with GpuProcess(cuda, current=0) as process:
        yield process


def lay_out(op: str, local: Area, remote: Area):
    """Fills both; returns the destination, what it is filled with, the source's pattern."""
    local_seed, remote_seed = Seeds.two()
    local.fill(local_seed)
    remote.fill(remote_seed)
    return (remote, remote_seed, local_seed) if op == "write" else (local, local_seed, remote_seed)


def patch(op: str, source: int, size: int, near: int = NEAR, far: int = FAR):
    to, at = (far, near) if op == "write" else (near, far)
    return (to, source, at, size)


def move(initiator, op: str, way: str, target: str, local: list[int], remote: list[int], lengths: list[int]) -> None:
    """One transfer to its end, made in one of the ways there are."""
    if way == "one":
        for args in zip(local, remote, lengths, strict=True):
            call = initiator.te(f"transfer_sync_{op}", target, *args)
            assert call.value == 0, call
    elif way == "batch":
        call = initiator.te(f"batch_transfer_sync_{op}", target, local, remote, lengths)
        assert call.value == 0, call
    else:
        call = initiator.te(f"batch_transfer_async_{op}", target, local, remote, lengths)
        assert call.value > 0, call
        assert initiator.do("poll", id=call.value)["status"] == 1


class Ordered:
    """An initiator with a stream on which kernels are late, and a target."""

    def __init__(self, cuda: str, far: str = "device", size: int = ARENA, env: dict[str, str] | None = None, current: int | None = 0):
        self.ends: list[GpuProcess] = []
        try:
            self.ends += [GpuProcess(cuda)]
            self.ends += [GpuProcess(cuda, env, current=current)]
            self.target, self.initiator = self.ends
            self.local, self.remote = Area(self.initiator, "device", size), Area(self.target, far, size)
            self.stream = self.initiator.do("gpu_stream", name="s", device=0)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args, target: str | None = None, **kwargs):
        local, remote, length, *rest = args
        if method.startswith("batch"):
            local, remote, length = [local], [remote], [length]
        return self.initiator.te(method, target or self.target.name, local, remote, length, *rest, **kwargs)

    def later(self, area: Area, byte: int, delay: float = 0.0, **args) -> None:
        area.end.do("gpu_fill_later", stream="s", buffer=area.name, byte=byte, delay=delay, **args)

    def wait(self, deadline: float = 60) -> float:
        """Until the stream has passed all that is on it."""
        answer = self.initiator.do("gpu_stream_wait", deadline, stream="s")
        assert answer["code"] == 0, answer
        return answer["seconds"]

    @property
    def failed(self) -> int:
        return self.initiator.value("stats")["on_cuda_failed"]

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *failure) -> None:
        self.close()


@pytest.fixture(scope="module")
def ordered(cuda):
    with Ordered(cuda) as made:
        yield made


def started(call) -> None:
    assert (call.value, call.raised) == (None, None), call
