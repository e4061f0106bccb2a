"""GPU memory through the Python face, with the simulated driver of docs/simgpu.md in the processes.

The library is loaded and initialised as a framework does it, before or after the engine is there; the engine is told addresses
as integers and nothing else, unless a test says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pattern
import pytest
from conftest import Ends
from peers import OURS, PEER, ROOT, STAND_IN, EngineProcess, clean_environment, need, raw_bytes, slack, wait_until

pytestmark = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine is built without a GPU")

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


# Transfers


@pytest.fixture(scope="module", params=[(near, far) for near in KINDS for far in KINDS], ids="-".join)
def areas(request, both):
    initiator, target = both
    near, far = request.param
    return Area(initiator, near, ARENA), Area(target, far, ARENA)


@pytest.mark.parametrize("way", ["one", "batch", "async"])
@pytest.mark.parametrize("op", OPS)
def test_every_pairing_every_size(areas, op, way):
    local, remote = areas
    for size in SIZES:
        end, background, source = lay_out(op, local, remote)
        move(local.end, op, way, remote.end.name, [local.addr + NEAR], [remote.addr + FAR], [size])
        assert end.check(background, patches=[patch(op, source, size)]) == [], size


@pytest.mark.parametrize("op", OPS)
def test_every_pairing_in_many_blocks(areas, op):
    """Blocks of 1 to 4,095 bytes at unaligned addresses, in another order at either end."""
    local, remote = areas
    end, background, source = lay_out(op, local, remote)
    near, far, lengths = pattern.plan(op == "read", 400, 4095)
    move(local.end, op, "batch", remote.end.name, [local.addr + n for n in near], [remote.addr + f for f in far], lengths)
    patches = [patch(op, source, *entry) for entry in zip(lengths, near, far, strict=True)]
    assert end.check(background, patches=patches) == []


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("far", KINDS)
@pytest.mark.parametrize("kind", ["host", "device", "managed", "mapped", "pool", "pinned"])
def test_local_memory_need_not_be_registered(both, op, kind, far):
    initiator, target = both
    local, remote = Area(initiator, kind, 400_000, register=False), Area(target, far, 400_000)
    end, background, source = lay_out(op, local, remote)
    move(initiator, op, "batch", target.name, [local.addr + NEAR], [remote.addr + FAR], [300_001])
    assert end.check(background, patches=[patch(op, source, 300_001)]) == []


@pytest.mark.parametrize("op", OPS)
def test_a_batch_of_every_kind(both, op):
    """Host memory and that of two devices, at both ends, registered or not, in one call."""
    initiator, target = both
    places = [("host", 0), ("device", 0), ("device", 1), ("managed", 1), ("pinned", 0)]
    pairs = [(near, far) for near in places for far in places]
    locals_ = {(p, r): Area(initiator, p[0], 30 * 9000, device=p[1], register=r) for p in places for r in (True, False)}
    remotes = {p: Area(target, p[0], 60 * 9000, device=p[1]) for p in places}
    seeds = {key: Seeds.two() for key in locals_}
    for (key, area), seed in zip(locals_.items(), seeds.values(), strict=True):
        area.fill(seed[0])
    for place, area in remotes.items():
        area.fill(100 + places.index(place))
    entries, wanted = [], {}
    for turn, (near, far) in enumerate(pairs):
        for registered in (True, False):
            local, remote = locals_[near, registered], remotes[far]
            at, to, size = turn * 9000 + 5, (2 * turn + registered) * 9000 + 11, 8000 + turn
            entries.append((local.addr + at, remote.addr + to, size))
            if op == "write":
                wanted.setdefault(remote, []).append((to, seeds[near, registered][0], at, size))
            else:
                wanted.setdefault(local, []).append((at, 100 + places.index(far), to, size))
    move(initiator, op, "batch", target.name, *(list(column) for column in zip(*entries, strict=True)))
    background = {area: 100 + places.index(p) for p, area in remotes.items()} | {locals_[key]: seed[0] for key, seed in seeds.items()}
    for area, patches in wanted.items():
        assert area.check(background[area], patches=patches) == []


@pytest.mark.parametrize("op", OPS)
def test_a_big_one(both, op):
    initiator, target = both
    local, remote = (Area(end, "device", 33 << 20) for end in both)
    end, background, source = lay_out(op, local, remote)
    move(initiator, op, "one", target.name, [local.addr + NEAR], [remote.addr + FAR], [(32 << 20) + 5])
    assert end.check(background, patches=[patch(op, source, (32 << 20) + 5)]) == []


@pytest.mark.parametrize("op", OPS)
def test_to_oneself(one, op):
    """Within a process, between all kinds of memory."""
    places = [("host", 0), ("device", 0), ("device", 1), ("managed", 0)]
    for near in places:
        for far in places:
            local, remote = (Area(one, kind, 300_000, device=device) for kind, device in (near, far))
            end, background, source = lay_out(op, local, remote)
            move(one, op, "batch", one.name, [local.addr + NEAR], [remote.addr + FAR], [200_000])
            assert end.check(background, patches=[patch(op, source, 200_000)]) == [], (near, far)
            for area in (local, remote):
                assert one.value("unregister_memory", area.addr) == 0


def test_bytes_go_in_and_out_of_registered_device_memory(one):
    area = Area(one, "device", 200_000)
    data = bytes(range(256)) * 400
    assert one.value("write_bytes_to_buffer", area.addr + 7, raw_bytes(data), len(data)) == 0
    answer = one.value("read_bytes_from_buffer", area.addr + 7, len(data))
    assert bytes.fromhex(answer["hex"]) == data
    assert area.do("bytes", byte=data[5], start=7 + 5, length=1) == 0


# The released engine at the other end, which has host memory only

PEER_PAIRS = [Ends(*ends, version) for version in (2, 1) for ends in ((OURS, PEER), (PEER, OURS))]


@pytest.fixture(scope="module", params=PEER_PAIRS, ids=str)
def with_peer(request, cuda):
    """Initiator and target; the end that is ours has a GPU."""
    need(PEER)
    ends, made = request.param, []
    env = {"MC_TCP_PROTO": "1"} if ends.version == 1 else {}
    try:
        for kind, settings in ((ends.initiator, env), (ends.target, {})):
            made.append(GpuProcess(cuda, settings) if kind == OURS else EngineProcess(kind, settings))
            if kind != OURS:
                made[-1].open()
        yield ends, *made
    finally:
        for process in made:
            process.close()


@pytest.mark.parametrize("kind", ["device", "managed", "host"])
@pytest.mark.parametrize("op", OPS)
def test_device_memory_and_the_released_engine(with_peer, op, kind):
    ends, initiator, target = with_peer
    local = Area(initiator, kind if ends.initiator == OURS else "host", ARENA)
    remote = Area(target, kind if ends.target == OURS else "host", ARENA)
    acknowledged = ends.wire == 2 or ends.initiator == OURS or op == "read"
    for size in SIZES:
        end, background, source = lay_out(op, local, remote)
        move(initiator, op, "one", target.name, [local.addr + NEAR], [remote.addr + FAR], [size])
        wanted = {"background": background, "patches": [patch(op, source, size)]}
        if acknowledged:
            assert end.check(**wanted) == [], size
        else:
            wait_until(lambda end=end, wanted=wanted: not end.check(**wanted), 10, f"{size} bytes have arrived")
    entries = [(local.addr + n * 5000, remote.addr + (199 - n) * 5000, 4000 + n) for n in range(200)]
    end, background, source = lay_out(op, local, remote)
    move(initiator, op, "batch", target.name, *(list(column) for column in zip(*entries, strict=True)))
    patches = [patch(op, source, size, near - local.addr, far - remote.addr) for near, far, size in entries]
    wait_until(lambda: not end.check(background, patches=patches), 0 if acknowledged else 10, "the blocks have arrived")


@pytest.mark.parametrize("kind", ["device", "host"])
def test_many_transfers_from_and_to_the_released_engine(with_peer, kind):
    """One after another through the same connections; what is read back is what was written."""
    ends, initiator, target = with_peer
    local = Area(initiator, kind if ends.initiator == OURS else "host", ARENA)
    remote = Area(target, kind if ends.target == OURS else "host", ARENA)
    for turn in range(20):
        _, _, source = lay_out("write", local, remote)
        size = 50_000 + turn * 4097
        move(initiator, "write", "one", target.name, [local.addr], [remote.addr + turn], [size])
        if ends.wire == 1 and ends.initiator == PEER:
            wait_until(lambda turn=turn, size=size, source=source: not remote.do("check", background=source, start=turn, length=size), 10, "arrived")
        move(initiator, "read", "one", target.name, [local.addr + (1 << 20)], [remote.addr + turn], [size])
        assert local.check(source, patches=[(1 << 20, source, 0, size)]) == []


# Registration


@pytest.mark.parametrize("kind", ["device", "managed", "mapped", "pool", "pinned"])
@pytest.mark.parametrize("location", [None, "*", "cuda:1", "gpu:1"])
def test_memory_of_a_device_is_registered_with_or_without_its_name(one, kind, location):
    area = Area(one, kind, 100_000, device=1, location=location)
    assert one.value("get_first_buffer_address", one.name) == area.addr
    assert one.te("register_memory", area.addr + 5, 10).value == -7
    assert one.value("unregister_memory", area.addr) == 0
    assert one.value("unregister_memory", area.addr) == -3
    said = {
        "gpu:1": ['location "gpu:1" is unknown: "*" is used'],
        # Pinned memory is the host's.
        "cuda:1": ['location "cuda:1" was given for memory that is not on that device; it counts as "*"'] if kind == "pinned" else [],
    }
    assert [text for text in records(one) if text.startswith("location")] == said.get(location, [])


@pytest.mark.parametrize("kind, device", [("host", 0), ("device", 1)])
def test_a_location_that_is_not_where_the_memory_is_counts_as_none(both, one, kind, device):
    """As existing engines do not look at it; it is said once."""
    initiator, _ = both
    for _ in range(2):
        area = Area(one, kind, 100_000, device=device, location="cuda:0")
        far = Area(one, kind, 1000, device=device, register=False)
        assert one.value("batch_register_memory", [far.addr, far.addr + 500], [400, 400], "cuda:0") == 0
        local = Area(initiator, "device", 100_000)
        _, background, source = lay_out("write", local, area)
        move(initiator, "write", "one", one.name, [local.addr], [area.addr], [90_000])
        assert area.check(background, patches=[(0, source, 0, 90_000)]) == []
    assert records(one) == ['location "cuda:0" was given for memory that is not on that device; it counts as "*"']


def test_parts_of_an_allocation_and_what_lies_beyond_it(one):
    area = Area(one, "device", 1 << 20, register=False)
    assert one.value("register_memory", area.addr + 4096 + 3, 100_001) == 0
    assert one.value("batch_register_memory", [area.addr, area.addr + (1 << 20) - 1], [1, 1]) == 0
    call = one.te("register_memory", area.addr + 200_000, 64 << 20)
    assert call.value == -1 and f"{area.addr + 200_000:#x}" in call.error, call


def test_a_batch_is_registered_as_a_whole_or_not_at_all(one):
    device, host = Area(one, "device", 8192, register=False), Area(one, "host", 8192, register=False)
    hole = one.do("hole", size=1 << 20)
    call = one.te("batch_register_memory", [device.addr, host.addr, hole], [8192, 8192, 64])
    assert call.value == -1 and f"{hole:#x}" in call.error, call
    assert one.value("get_first_buffer_address", one.name) == 0
    assert one.value("batch_register_memory", [device.addr, host.addr], [8192, 8192]) == 0
    assert one.value("batch_unregister_memory", [host.addr, device.addr]) == 0


def refused(process: EngineProcess, address: int, *location: str) -> str:
    call = process.te_fresh("register_memory", address, 4096, *location)
    assert call.value == -1 and call.error, call
    batch = process.te_fresh("batch_register_memory", [address], [4096], *location)
    assert (batch.value, batch.error) == (-1, call.error), batch
    assert any(text.startswith("register_memory: ") for text in records(process, "ERROR"))
    # Whatever is said, nobody is told to build anything.
    assert not re.search("rebuild|recompile|compil", call.error), call.error
    return call.error


def test_an_address_that_nobody_knows(one):
    text = refused(one, one.do("hole", size=1 << 20))
    assert "cannot be registered" in text and "cuda" in text.lower() and "libcuda.so.1" in text, text


def test_a_device_address_while_gpus_are_off(cuda):
    with GpuProcess(cuda, {"TENSORFERRY_GPU": "off"}) as process:
        area = Area(process, "device", 8192, register=False)
        text = refused(process, area.addr)
        assert f"{area.addr:#x}" in text and "TENSORFERRY_GPU=off" in text, text
        text = refused(process, area.addr, "cuda:0")
        assert "cuda:0" in text and "TENSORFERRY_GPU=off" in text, text
        host = Area(process, "host", 8192)
        move(process, "write", "one", process.name, [host.addr], [host.addr + 4096], [4096])
        # A transfer of such memory says the same.
        call = process.te("transfer_sync_write", process.name, area.addr, host.addr, 64)
        assert call.value == -1 and "TENSORFERRY_GPU=off" in call.error, call
        assert process.counter("calls") == 1, "somebody asked the library, after the framework's cuInit"


def test_a_driver_that_says_no_device(libraries):
    env = {"LD_LIBRARY_PATH": str(libraries), "SIMGPU_DEVICES": "0"}
    with EngineProcess(OURS, env) as process:
        process.open()
        host = Area(process, "host", 8192, register=False)
        text = refused(process, host.addr, "cuda:0")
        assert "cuda:0" in text and "libcuda.so.1" in text and "100" in text and "no device" in text.lower(), text
        start = time.monotonic()
        for _ in range(50):
            refused(process, host.addr, "cuda:0")
        assert time.monotonic() - start < 2 * slack(), "a failing library is asked once"
        assert process.value("register_memory", host.addr, 8192) == 0
        move(process, "write", "one", process.name, [host.addr], [host.addr + 4096], [4096])


def test_a_device_that_is_not_there(one):
    area = Area(one, "device", 8192, register=False)
    text = refused(one, area.addr, "cuda:7")
    assert "cuda:7" in text and "2 " in text, text
    text = refused(one, area.addr, "musa:0")
    assert "musa:0" in text and "libmusart.so" in text, text


def test_no_library_at_all(tmp_path):
    with EngineProcess(OURS, {"LD_LIBRARY_PATH": str(tmp_path)}) as process:
        process.open()
        host = Area(process, "host", 8192, register=False)
        if process.do("mapped") == [] and not any(process.do("support")):
            text = refused(process, host.addr, "cuda:0")
            assert "cuda:0" in text and "libcuda.so.1" in text, text
        assert process.value("register_memory", host.addr, 8192) == 0


def test_a_library_that_is_damaged(libraries, tmp_path):
    broken = tmp_path / "libcuda.so.1"
    broken.write_bytes((libraries / "libcuda.so.1").read_bytes()[:5000])
    with EngineProcess(OURS, {"TENSORFERRY_CUDA_LIBRARY": str(broken)}) as process:
        process.open()
        host = Area(process, "host", 8192, register=False)
        assert process.do("support")[0] is False
        text = refused(process, host.addr, "cuda:0")
        assert "cuda:0" in text and str(broken) in text, text
        assert process.value("register_memory", host.addr, 8192) == 0


# SUPPORT_*


@pytest.mark.parametrize(
    "found, settings",
    [
        ([True, True, True], {}),
        ([False, False, False], {"TENSORFERRY_GPU": "off"}),
        ([True, False, False], {"TENSORFERRY_GPU": "cuda"}),
        ([False, True, False], {"TENSORFERRY_GPU": "hip"}),
        ([False, False, True], {"TENSORFERRY_GPU": "musa"}),
        ([False, True, True], {"TENSORFERRY_CUDA_LIBRARY": "/no/such/file"}),
        ([False, False, False], {"TENSORFERRY_GPU": "on"}),
    ],
    ids=str,
)
def test_support_is_what_can_be_loaded(libraries, found, settings):
    """Whatever the devices say: nothing is initialised."""
    env = {"LD_LIBRARY_PATH": str(libraries), "SIMGPU_DEVICES": "0", **settings}
    with EngineProcess(OURS, env) as process:
        assert process.do("mapped") == [], "the import has loaded a library"
        assert process.do("support") == found
        loaded = process.do("mapped")
        assert ("libcuda.so.1" in loaded, "libamdhip64.so.6" in loaded, "libmusart.so.5" in loaded) == tuple(found)
        warned = [text for _, level, text in process.do("logs") if level == "WARNING"]
        assert bool(warned) == (settings.get("TENSORFERRY_GPU") == "on"), warned
        if found[0]:
            process.do("gpu_load", path=str(libraries / "libcuda.so.1"), init="")
            assert process.do("gpu_counts", names=["calls"])["calls"] == 0


def test_support_of_a_library_that_came_later(libraries):
    """A framework brings its library from a folder of its own; no is no answer for ever."""
    with EngineProcess(OURS) as process:
        before = process.do("support")
        if before[1]:
            pytest.skip("skipped: this machine has a HIP library of its own")
        process.do("gpu_open", path=str(libraries / "libamdhip64.so.6"))
        assert process.do("support") == [before[0], True, before[2]]


def test_support_is_a_name_that_can_be_imported(libraries):
    code = """
    import tensorferry.mooncake as m
    assert "SUPPORT_CUDA" not in vars(m) and {"SUPPORT_CUDA", "SUPPORT_EFA"} <= set(dir(m))
    m.install()
    import mooncake.engine
    assert "SUPPORT_CUDA" not in vars(m) and "SUPPORT_CUDA" in dir(mooncake.engine)
    assert mooncake.engine.__file__ and mooncake.engine.__spec__
    from mooncake.engine import SUPPORT_CUDA, SUPPORT_EFA, SUPPORT_HIP, SUPPORT_INTRA_NVLINK, SUPPORT_MNNVL, SUPPORT_MUSA
    assert (SUPPORT_CUDA, SUPPORT_HIP, SUPPORT_MUSA) == (True, True, True)
    assert (SUPPORT_EFA, SUPPORT_INTRA_NVLINK, SUPPORT_MNNVL) == (False, False, False)
    from mooncake.engine import *
    from tensorferry.mooncake import SUPPORT_CUDA as again
    assert again is SUPPORT_CUDA is True and not hasattr(m, "SUPPORT_NPU") and not hasattr(mooncake.engine, "SUPPORT_NPU")
    """
    for runner in ([], ["-m", "tensorferry.mooncake"]):
        env = clean_environment(OURS, {"LD_LIBRARY_PATH": str(libraries)})
        ran = subprocess.run([sys.executable, *runner, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


# In order with a stream


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


@pytest.mark.parametrize("method", ON_CUDA)
def test_a_transfer_between_two_kernels(ordered, method):
    """It carries what the kernel before it wrote; the kernel behind it waits; the call does not."""
    local, remote = ordered.local, ordered.remote
    size = 700_001
    if "write" in method:
        ordered.later(local, 0x11, delay=0.3)
        start = time.monotonic()
        started(ordered.call(method, local.addr, remote.addr, size, ordered.stream))
        assert time.monotonic() - start < 0.2 * slack()
        ordered.later(local, 0x22)
        assert ordered.wait() > 0.05
        assert remote.do("bytes", byte=0x11, length=size) == 0 and local.do("bytes", byte=0x22) == 0
    else:
        seed, _ = Seeds.two()
        remote.fill(seed)
        spare = Area(ordered.initiator, "device", ARENA, register=False)
        ordered.later(local, 0x33, delay=0.3)
        started(ordered.call(method, local.addr, remote.addr, size, ordered.stream))
        ordered.initiator.do("copy_on_stream", stream="s", to=spare.name, source=local.name, length=ARENA)
        ordered.later(local, 0x44)
        ordered.wait()
        assert spare.check(seed, length=size) == []
        assert spare.do("bytes", byte=0x33, start=size) == 0 and local.do("bytes", byte=0x44) == 0
    assert ordered.failed == 0


@pytest.mark.parametrize("method", ["transfer_write_on_cuda", "batch_transfer_write_on_cuda"])
def test_many_transfers_between_kernels_and_nobody_waits(ordered, method):
    length, rounds = 100_000, 20
    answer = ordered.initiator.do(
        "between_kernels", method=method, target=ordered.target.name, local=ordered.local.name, remote=ordered.remote.addr,
        length=length, stream="s", rounds=rounds, delay=0.01,
    )
    assert answer["returned"] == [None] * rounds
    ordered.wait()
    for r in range(rounds):
        assert ordered.remote.do("bytes", byte=r + 1, start=r * length, length=length) == 0, r
        assert ordered.local.do("bytes", byte=0xEE, start=r * length, length=length) == 0, r
    assert ordered.failed == 0 and answer["longest"] < 0.1 * slack()


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams(ordered, stream):
    """The legacy one, by 0 and by its name, and the thread's own."""
    process, local, remote = ordered.initiator, ordered.local, ordered.remote
    spare = Area(process, "device", 1000, register=False)
    local.fill(Seeds.two()[0])
    ordered.later(spare, 1, delay=0.2)
    process.do("fill_default_stream", default=stream, buffer=local.name, byte=0x50 + stream, behind="s")
    args = [stream] if stream else []
    started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, ARENA, *args))
    process.do("fill_default_stream", default=stream, buffer=local.name, byte=0x60)
    assert local.do("bytes", byte=0x60) > 0, "the kernels were not late"
    process.do("wait_default_stream", default=stream)
    assert remote.do("bytes", byte=0x50 + stream) == 0 and local.do("bytes", byte=0x60) == 0


def test_host_memory_in_order_with_a_stream(ordered):
    """Pinned or not: a program may have a kernel or a copy that fills it."""
    for kind in ("host", "pinned"):
        local = Area(ordered.initiator, kind, 300_000, seed=5)
        started(ordered.call("transfer_write_on_cuda", local.addr, ordered.remote.addr, 300_000, ordered.stream))
        ordered.wait()
        assert ordered.remote.check(5, length=300_000) == []


@pytest.mark.parametrize("length", [100, 70_000, 1 << 19])
def test_both_ends_in_one_engine(cuda, length):
    with GpuProcess(cuda, {"TENSORFERRY_TRANSFER_TIMEOUT": "5s"}) as one:
        between_kernels_to_oneself(one, length)


def between_kernels_to_oneself(one, length):
    area = Area(one, "device", 1 << 20)
    raw = one.do("gpu_stream", name="s")
    half = 1 << 19
    for turn in range(3):
        one.do("gpu_fill_later", stream="s", buffer=area.name, byte=7 + turn, length=half, delay=0.1)
        started(one.te("transfer_write_on_cuda", one.name, area.addr, area.addr + half, length, raw))
        one.do("gpu_fill_later", stream="s", buffer=area.name, byte=99, length=half)
        assert one.do("gpu_stream_wait", stream="s")["code"] == 0
        assert area.do("bytes", byte=99, length=half) == 0 and area.do("bytes", byte=7 + turn, start=half, length=length) == 0
    assert one.value("stats")["on_cuda_failed"] == 0


def test_a_stream_of_another_device_than_the_memory(ordered):
    """A copy between devices may be behind it, for example."""
    process, local, remote = ordered.initiator, ordered.local, ordered.remote
    raw = process.do("gpu_stream", name="t", device=1)
    process.do("gpu_fill_later", stream="t", buffer=local.name, byte=0x71, delay=0.2)
    started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, ARENA, raw))
    process.do("gpu_fill_later", stream="t", buffer=local.name, byte=0x72)
    assert process.do("gpu_stream_wait", stream="t")["code"] == 0
    assert remote.do("bytes", byte=0x71) == 0 and local.do("bytes", byte=0x72) == 0 and ordered.failed == 0


@pytest.mark.parametrize("kind, device", [("device", 1), ("device", 0), ("pinned", 1)])
def test_the_default_stream_is_that_of_the_current_device(cuda, kind, device):
    """As in every call of the vendor's, wherever the memory is."""
    with Ordered(cuda, current=1) as ordered:
        process, remote = ordered.initiator, ordered.remote
        process.do("gpu_stream", name="t", device=1)
        local, spare = Area(process, kind, 300_000, device=device), Area(process, "device", 1000, device=1, register=False)
        process.do("gpu_fill_later", stream="t", buffer=spare.name, byte=1, delay=0.2)
        process.do("fill_default_stream", default=0, buffer=local.name, byte=0x73, behind="t")
        started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, 300_000))
        process.do("fill_default_stream", default=0, buffer=local.name, byte=0x74)
        process.do("wait_default_stream", default=0)
        assert remote.do("bytes", byte=0x73, length=300_000) == 0 and local.do("bytes", byte=0x74) == 0


@pytest.mark.parametrize("method", ["transfer_write_on_cuda", "batch_transfer_read_on_cuda"])
def test_a_driver_that_cannot_wait_for_a_word(cuda, method):
    """A function of ours holds the stream then, until the transfer has ended, in whichever way."""
    with Ordered(cuda) as ordered:
        process, local, remote = ordered.initiator, ordered.local, ordered.remote
        process.do("gpu_inject", call="cuStreamWaitValue32_v2", code=801, times=0)
        seed, _ = Seeds.two()
        remote.fill(seed)
        spare = Area(process, "device", ARENA, register=False)
        ordered.later(local, 5, delay=0.2)
        start = time.monotonic()
        started(ordered.call(method, local.addr, remote.addr, ARENA, ordered.stream))
        assert time.monotonic() - start < 0.15 * slack()
        process.do("copy_on_stream", stream="s", to=spare.name, source=local.name, length=ARENA)
        ordered.later(local, 6)
        ordered.wait()
        if "write" in method:
            assert remote.do("bytes", byte=5) == 0
        else:
            assert spare.check(seed) == []
        assert local.do("bytes", byte=6) == 0 and ordered.failed == 0 and process.counter("host_functions") == 1
        started(ordered.call(method, local.addr, remote.addr, 100, ordered.stream, target="127.0.0.1:1"))
        assert ordered.wait() < 5 and ordered.failed == 1


def test_nothing_to_move(ordered):
    started(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 0, ordered.stream))
    started(ordered.initiator.te("batch_transfer_read_on_cuda", ordered.target.name, [], [], [], ordered.stream))
    ordered.wait()
    assert ordered.failed == 0


@pytest.mark.parametrize("length", [0, 100, 100_000])
def test_no_event_is_left_behind(ordered, length):
    process, local, remote = ordered.initiator, ordered.local, ordered.remote
    names = ["calls.cuEventCreate", "calls.cuEventDestroy_v2"]

    def left():
        made, gone = process.do("gpu_counts", names=names).values()
        return made - gone

    started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, 100, ordered.stream))
    ordered.wait()
    before = left()
    for method in ON_CUDA:
        started(ordered.call(method, local.addr, remote.addr, length, ordered.stream))
    ordered.wait()
    wait_until(lambda: left() == before, 3, "as many events as before")


def test_names_of_the_arguments(ordered):
    local, remote = ordered.local, ordered.remote
    one = {"target_hostname": ordered.target.name, "buffer": local.addr, "peer_buffer_address": remote.addr, "length": 10}
    many = {"target_hostname": ordered.target.name, "buffers": [local.addr], "peer_buffer_addresses": [remote.addr], "lengths": [10]}
    for method in ON_CUDA:
        started(ordered.initiator.te(method, **(many if method.startswith("batch") else one), stream_ptr=ordered.stream, transport_hint="x"))
    ordered.wait()


def raised(call, *parts: str, kind: str = "RuntimeError") -> str:
    assert call.raised is not None and call.raised[0] == kind, call
    text = call.raised[1]
    assert all(part in text for part in parts), text
    if kind == "RuntimeError":
        assert call.error == text, call
    return text


def test_what_cannot_be_started_raises(ordered):
    process, local, remote, raw = ordered.initiator, ordered.local.addr, ordered.remote.addr, ordered.stream
    for method in ("batch_transfer_write_on_cuda", "batch_transfer_read_on_cuda"):
        raised(process.te(method, ordered.target.name, [local], [remote, remote], [1], raw), "differ in length", "nothing was sent")
        raised(process.te(method, ordered.target.name, local, remote, 1, raw), "sequence", kind="TypeError")
        raised(process.te(method, ordered.target.name, ["x"], [remote], [1], raw), "integer", kind="TypeError")
    for method in ("transfer_write_on_cuda", "transfer_read_on_cuda"):
        raised(process.te(method, "host:port:", local, remote, 1, raw), "host:port:")
        raised(process.te(method, ordered.target.name, 0, remote, 1, raw), "null")
        raised(process.te(method, ordered.target.name, local, 2**64 - 1, 2, raw), "end of the address space")
        for bad in (None, "x", -1, 2**64, 1.5):
            raised(process.te(method, ordered.target.name, local, remote, 1, bad), "integer", kind="TypeError")
    assert ordered.failed == 0 and records(process, "ERROR") == []
    process.do("make_engine", engine="new")
    raised(process.te("transfer_write_on_cuda", "x:1", 1, 1, 1, engine="new"), "not initialized")
    process.open("closed")
    process.value("close", engine="closed")
    raised(process.te("transfer_write_on_cuda", "x:1", 1, 1, 1, engine="closed"), "closed")


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_stream_that_is_being_captured(cuda, mode):
    """Raises, and the capture is none the worse for it."""
    with Ordered(cuda) as ordered:
        assert ordered.initiator.do("gpu_capture", stream="s", begin=True, mode=mode) == 0
        text = raised(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 100, ordered.stream))
        assert "captur" in text, text
        assert ordered.initiator.do("gpu_capture", stream="s", begin=False) == 0
        ordered.later(ordered.local, 9)
        started(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 100, ordered.stream))
        ordered.wait()
        assert ordered.remote.do("bytes", byte=9, length=100) == 0 and ordered.failed == 0


def test_without_a_gpu_it_raises_and_says_what_was_looked_for():
    with EngineProcess(OURS) as process:
        process.open()
        area = Area(process, "host", 8192)
        if process.do("support")[0]:
            pytest.skip("skipped: this machine has a CUDA library of its own")
        text = raised(process.te("transfer_write_on_cuda", process.name, area.addr, area.addr + 4096, 100, 7))
        assert "libcuda.so.1" in text, text


def test_off_is_off(cuda):
    with GpuProcess(cuda, {"TENSORFERRY_GPU": "off"}) as process:
        area = Area(process, "host", 8192)
        text = raised(process.te("transfer_write_on_cuda", process.name, area.addr, area.addr + 4096, 100, 7))
        assert "TENSORFERRY_GPU=off" in text, text


def test_a_peer_that_is_not_there(cuda):
    """The stream goes on; the failure is logged, counted, and raised by the next call, which starts nothing."""
    with Ordered(cuda) as ordered:
        gone = "127.0.0.1:1"
        local, remote = ordered.local, ordered.remote
        ordered.later(local, 1, delay=0.05)
        started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, 5000, ordered.stream, target=gone))
        ordered.later(local, 2)
        assert ordered.wait() < 5
        assert local.do("bytes", byte=2) == 0
        assert ordered.failed == 1, "it is counted by the time that the stream goes on"
        (text,) = wait_until(lambda: records(ordered.initiator, "ERROR"), 5, "the failure is logged")
        assert text.startswith("transfer_write_on_cuda: ") and gone in text, text
        before = ordered.initiator.value("stats")["batches_submitted"]
        said = raised(ordered.call("batch_transfer_read_on_cuda", local.addr, remote.addr, 5000, ordered.stream), text, "started nothing")
        assert "an earlier transfer failed" in said
        assert ordered.initiator.value("stats")["batches_submitted"] == before
        started(ordered.call("batch_transfer_read_on_cuda", local.addr, remote.addr, 5000, ordered.stream))
        ordered.wait()
        assert ordered.failed == 1 and len(records(ordered.initiator, "ERROR")) == 1
        assert ordered.initiator.alive()


def test_many_failures_are_one_record_a_second(cuda):
    with Ordered(cuda) as ordered:
        process, local, remote = ordered.initiator, ordered.local, ordered.remote
        ordered.later(local, 1, delay=0.3)
        for n in range(30):
            started(ordered.call(ON_CUDA[n % 4], local.addr, 4096, 100, ordered.stream))
        ordered.wait()
        assert ordered.failed == 30
        wait_until(lambda: len(records(process, "ERROR")) >= 4, 5, "they are logged")
        assert len(records(process, "ERROR")) == 4, "one for each method"
        raised(ordered.call("transfer_read_on_cuda", local.addr, remote.addr, 100, ordered.stream), "29 more failed after it")
        started(ordered.call("transfer_read_on_cuda", local.addr, remote.addr, 100, ordered.stream))
        ordered.wait()
        process.value("close")

        def missed():
            rest = [text for text in records(process, "ERROR") if "were not logged" in text]
            return sum(int(re.search(r"(\d+) more failures", text)[1]) for text in rest)

        # What the engine's threads have to say is logged a moment later.
        wait_until(lambda: missed() == 26, 5, "those that were not logged are counted")


def test_a_target_that_dies_in_mid_transfer(cuda):
    with Ordered(cuda, size=64 << 20) as ordered:
        local, remote = ordered.local, ordered.remote
        started(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, 64 << 20, ordered.stream))
        ordered.later(local, 3, length=100)
        wait_until(lambda: ordered.target.value("stats")["connections_accepted"] > 0, 5, "it has begun")
        ordered.target.close()
        assert ordered.wait() < 20
        assert local.do("bytes", byte=3, length=100) == 0 and ordered.failed == 1
        raised(ordered.call("transfer_write_on_cuda", local.addr, remote.addr, 1, ordered.stream), "an earlier transfer failed")
        assert ordered.initiator.alive()


def test_a_copy_that_does_not_end(cuda):
    """The deadline lets the stream go on; the memory stays in use until the copy has ended."""
    with Ordered(cuda, env={"TENSORFERRY_TRANSFER_TIMEOUT": "600ms"}) as ordered:
        process = ordered.initiator
        process.do("gpu_set", hang=1)
        started(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 100_000, ordered.stream))
        ordered.later(ordered.local, 5)
        wait_until(lambda: ordered.failed == 1, 5 * slack(), "the transfer has failed")
        call = process.te("unregister_memory", ordered.local.addr)
        assert call.value == -1 and "still in use" in call.error, call
        process.do("gpu_heal")
        ordered.wait()
        assert process.value("unregister_memory", ordered.local.addr) == 0


def test_a_transfer_that_is_out_of_time(cuda):
    """A peer that does not answer: the deadline lets the stream go on."""
    with Ordered(cuda, env={"TENSORFERRY_TRANSFER_TIMEOUT": "600ms"}) as ordered:
        ordered.target.freeze()
        try:
            started(ordered.call("transfer_read_on_cuda", ordered.local.addr, ordered.remote.addr, 100_000, ordered.stream))
            assert 0.3 < ordered.wait() < 5 * slack()
            assert ordered.failed == 1
        finally:
            ordered.target.thaw()
        raised(ordered.call("transfer_read_on_cuda", ordered.local.addr, ordered.remote.addr, 1, ordered.stream), "not complete at its deadline")


@pytest.mark.parametrize("end", ["close", "drop"])
def test_the_end_of_the_engine_lets_the_stream_go_on(cuda, end):
    with Ordered(cuda) as ordered:
        ordered.target.freeze()
        try:
            started(ordered.call("transfer_read_on_cuda", ordered.local.addr, ordered.remote.addr, 100_000, ordered.stream))
            ordered.later(ordered.local, 4)
            if end == "close":
                ordered.initiator.value("close")
            else:
                ordered.initiator.do("drop_engine")
            assert ordered.wait() < 5
        finally:
            ordered.target.thaw()
        assert ordered.local.do("bytes", byte=4) == 0
        (text,) = wait_until(lambda: records(ordered.initiator, "ERROR"), 5, "the failure is logged")
        assert "transfer_read_on_cuda" in text and "closed" in text, text
        assert ordered.initiator.alive()


def test_the_thread_that_looks_is_there_only_when_it_is_needed(cuda):
    with Ordered(cuda) as ordered:
        process = ordered.initiator

        def looking():
            names = [Path(f"/proc/{process.pid}/task/{task}/comm").read_text().strip() for task in os.listdir(f"/proc/{process.pid}/task")]
            return sum("tensorferry-str".startswith(name) and name.startswith("tensorferry-str") for name in names)

        assert looking() == 0
        for _ in range(3):
            started(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 100, ordered.stream))
        # A thread names itself, a moment after it is there.
        wait_until(lambda: looking() == 1, 10, "one thread looks")
        ordered.wait()
        before = process.do("usage")["cpu"]
        time.sleep(1)  # idle, to be measured
        assert process.do("usage")["cpu"] - before < 0.05
        process.value("close")
        wait_until(lambda: looking() == 0, 10, "no thread looks")


@pytest.mark.parametrize("file, init", [("libmusart.so.5", ""), ("libamdhip64.so.6", "hipInit")])
def test_streams_of_other_vendors(libraries, file, init):
    """Where MUSA or HIP is what the process uses, the stream is one of theirs."""
    made = []
    try:
        for _ in range(2):
            made.append(EngineProcess(OURS, {"LD_LIBRARY_PATH": str(libraries)}))
            made[-1].do("gpu_load", path=str(libraries / file), init=init)
            made[-1].open()
        initiator, target = made
        local, remote = Area(initiator, "device", 300_000), Area(target, "device", 300_000)
        raw = initiator.do("gpu_stream", name="s")
        initiator.do("gpu_fill_later", stream="s", buffer=local.name, byte=5, delay=0.2)
        started(initiator.te("transfer_write_on_cuda", target.name, local.addr, remote.addr, 300_000, raw))
        initiator.do("gpu_fill_later", stream="s", buffer=local.name, byte=6)
        assert initiator.do("gpu_stream_wait", stream="s")["code"] == 0
        assert remote.do("bytes", byte=5) == 0 and local.do("bytes", byte=6) == 0
        assert "libcuda.so.1" not in initiator.do("mapped")
    finally:
        for process in made:
            process.close()


# A guest of the process and its GPU


@pytest.mark.parametrize("current", [None, 0, 1])
def test_contexts_are_where_they_were(cuda, current):
    """None on a device that the process does not use, and the calling thread's is what it was, whatever is called."""
    env = {"SIMGPU_DEVICES": "3"}
    with Ordered(cuda, env=env, current=current) as ordered:
        process, target = ordered.initiator, ordered.target
        before = process.do("current_context")
        areas = [Area(process, kind, 300_000, device=1) for kind in ("device", "managed", "mapped", "pool")]
        areas.append(Area(process, "device", 300_000, device=1, location="cuda:1"))
        raw = process.do("gpu_stream", name="t", device=1)
        for area in areas:
            for op in OPS:
                move(process, op, "batch", target.name, [area.addr + 5], [ordered.remote.addr], [250_000])
            started(process.te("transfer_write_on_cuda", target.name, area.addr, ordered.remote.addr, 200_000, raw))
            started(process.te("transfer_read_on_cuda", target.name, area.addr, ordered.remote.addr, 200_000, raw))
            move(process, "write", "one", process.name, [area.addr], [ordered.local.addr], [200_000])
        assert process.do("gpu_stream_wait", stream="t")["code"] == 0
        for area in areas:
            assert process.value("unregister_memory", area.addr) == 0
        assert process.do("current_context") == before
        counts = process.do("gpu_counts", names=["contexts.0", "contexts.1", "contexts.2", "legacy_stream_operations"])
        assert counts == {"contexts.0": 1, "contexts.1": 1, "contexts.2": 0, "legacy_stream_operations": 0}
        assert ordered.failed == 0


def test_host_memory_calls_no_library(cuda):
    """Registered host memory moves without a question; a process that names no device initialises nothing."""
    with GpuProcess(cuda) as process, EngineProcess(OURS) as target:
        target.open()
        local, remote = Area(process, "host", ARENA), Area(target, "host", ARENA)
        process.do("gpu_reset")
        for op in OPS:
            move(process, op, "batch", target.name, [local.addr] * 50, [remote.addr] * 50, [4096] * 50)
            move(process, op, "one", target.name, [local.addr], [remote.addr], [ARENA])
        assert process.counter("calls") == 0
    with EngineProcess(OURS) as process:
        process.do("gpu_load", path=cuda, init="")
        process.open()
        area = Area(process, "host", ARENA)
        move(process, "write", "one", process.name, [area.addr], [area.addr + 4096], [4096])
        assert process.do("gpu_counts", names=["calls.cuInit"]) == {"calls.cuInit": 0}


HEAD = """
import ctypes, gc, logging, multiprocessing, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
from tensorferry.mooncake import TransferEngine
from gpu_jobs import Gpu

def new():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, TransferEngine.last_error()
    return engine, f"127.0.0.1:{{engine.get_rpc_port()}}"

def memory(gpu, size, byte, device=0):
    address = gpu.alloc(device, size, 0)
    image = (ctypes.c_uint8 * size)(*[byte] * size)
    assert address and gpu.write(address, image, size) == 0
    return address

def seen(gpu, address, size):
    image = (ctypes.c_uint8 * size)()
    assert gpu.read(address, image, size) == 0
    return set(image)

def framework():
    gpu = Gpu({library!r})
    assert gpu.library.cuInit(0) == 0
    return gpu
"""


def run(library: str, body: str, *python: str, tmp_path: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """A program of its own; with `tmp_path` it is a file, as multiprocessing needs it."""
    need(OURS)
    code = HEAD.format(tests=str(ROOT / "tests"), library=library) + textwrap.dedent(body)
    command = ["-c", code]
    if tmp_path is not None:
        (tmp_path / "program.py").write_text(code)
        command = [str(tmp_path / "program.py")]
    return subprocess.run([sys.executable, *python, *command], env=clean_environment(OURS, env), capture_output=True, text=True, timeout=90)


def good(done: subprocess.CompletedProcess) -> None:
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_an_exit_without_close(cuda):
    """With device memory registered, transfers running in both directions, and a stream that waits for one."""
    start = time.monotonic()
    done = run(
        cuda,
        """
        logging.disable()
        gpu = framework()
        engine, name = new()
        other, other_name = new()
        here, there = memory(gpu, 1 << 20, 1), memory(gpu, 1 << 20, 2, device=1)
        assert engine.register_memory(here, 1 << 20) == 0 and other.register_memory(there, 1 << 20) == 0
        assert engine.transfer_sync_write(other_name, here, there, 1 << 20) == 0
        assert seen(gpu, there, 1000) == {1}
        gpu.set(b"d2h_bytes_per_second", 1_000_000)
        assert engine.batch_transfer_async_write(other_name, [here] * 8, [there] * 8, [1 << 20] * 8)
        stream = gpu.stream(0, 1)
        gpu.fill_later(stream, here, 3, 1000, 0)
        engine.transfer_write_on_cuda(other_name, here, there, 1 << 20, stream)
        other.batch_transfer_async_read(name, [there] * 8, [here] * 8, [1 << 20] * 8)
        """,
    )
    good(done)
    assert time.monotonic() - start < 20


def test_a_forked_child_of_a_process_with_a_gpu(cuda):
    """Calls answer at once; a new engine in the child moves host memory and says why it moves no other."""
    good(
        run(
            cuda,
            """
            logging.disable()
            gpu = framework()
            engine, name = new()
            other, other_name = new()
            here = memory(gpu, 1 << 20, 1)
            there = memory(gpu, 1 << 20, 2)
            assert engine.register_memory(here, 1 << 20) == 0 and other.register_memory(there, 1 << 20) == 0
            stream = gpu.stream(0, 1)
            gpu.fill_later(stream, here, 3, 1 << 20, 300_000_000)
            engine.transfer_write_on_cuda(other_name, here, there, 1 << 20, stream)
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                for method in ("transfer_write_on_cuda", "transfer_read_on_cuda"):
                    try:
                        getattr(engine, method)(other_name, here, there, 16, stream)
                    except RuntimeError as error:
                        assert "made before a fork" in str(error), error
                    else:
                        raise AssertionError(method)
                assert engine.register_memory(here, 16) == -1
                assert engine.stats()["protocol"] == "tcp"
                engine.close()
                del engine, other
                gc.collect()
                fresh, fresh_name = new()
                area = fresh.allocate_managed_buffer(8192)
                assert fresh.write_bytes_to_buffer(area, b"x" * 4096, 4096) == 0
                assert fresh.transfer_sync_write(fresh_name, area, area + 4096, 4096) == 0
                assert fresh.read_bytes_from_buffer(area + 4096, 4096) == b"x" * 4096
                assert fresh.register_memory(area + (1 << 30), 16, "cuda:0") == -1
                assert "fork" in TransferEngine.last_error(), TransferEngine.last_error()
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            assert gpu.stream_wait(stream) == 0
            assert seen(gpu, there, 1 << 20) == {3}
            assert engine.transfer_sync_read(other_name, here, there, 1 << 20) == 0
            """,
            "-W",
            "ignore::DeprecationWarning",
        )
    )


def test_a_child_that_uses_a_gpu_which_its_parent_did_not(cuda):
    """The parent has an engine, moves host memory and never names a device: nothing of it is in the child's way."""
    good(
        run(
            cuda,
            """
            logging.disable()
            gpu = Gpu(LIBRARY)
            engine, name = new()
            area = engine.allocate_managed_buffer(8192)
            assert engine.transfer_sync_write(name, area, area + 4096, 4096) == 0
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                assert gpu.library.cuInit(0) == 0
                fresh, name = new()
                here, there = memory(gpu, 1 << 20, 1), memory(gpu, 1 << 20, 2)
                assert fresh.register_memory(here, 1 << 20) == 0 and fresh.register_memory(there, 1 << 20, "cuda:0") == 0
                assert fresh.transfer_sync_write(name, here, there, 1 << 20) == 0
                assert seen(gpu, there, 1 << 20) == {1}
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            """.replace("LIBRARY", repr(cuda)),
            "-W",
            "ignore::DeprecationWarning",
        )
    )


@pytest.mark.parametrize("way", ["spawn", "forkserver", "fork"])
def test_multiprocessing(cuda, tmp_path, way):
    """A worker with a GPU and an engine of its own; by fork only where the parent has used no GPU, as without us."""
    good(
        run(
            cuda,
            f"""
            def work(pipe, name, remote):
                gpu = framework()
                engine, own = new()
                here = memory(gpu, 1 << 20, 7)
                assert engine.register_memory(here, 1 << 20) == 0, TransferEngine.last_error()
                pipe.send(engine.transfer_sync_write(name, here, remote, 1 << 20))
                pipe.send((own, here))
                pipe.recv()

            if __name__ == "__main__":
                context = multiprocessing.get_context({way!r})
                engine, name = new()
                area = engine.allocate_managed_buffer(1 << 20)
                pipe, other = context.Pipe()
                child = context.Process(target=work, args=(other, name, area))
                child.start()
                assert pipe.poll(60)
                assert pipe.recv() == 0
                assert set(engine.read_bytes_from_buffer(area, 1 << 20)) == {{7}}
                gpu = framework()
                own, address = pipe.recv()
                here = memory(gpu, 1 << 20, 1)
                assert engine.transfer_sync_read(own, here, address, 1 << 20) == 0, TransferEngine.last_error()
                assert seen(gpu, here, 1 << 20) == {{7}}
                pipe.send(None)
                child.join(20)
                assert child.exitcode == 0
            """,
            "-W",
            "ignore::DeprecationWarning",
            tmp_path=tmp_path,
        )
    )


def test_a_device_that_has_failed(cuda):
    """A kernel of the process faulted: device memory fails with a text, host memory goes on, nobody ends."""
    with GpuProcess(cuda) as process, EngineProcess(OURS) as target:
        target.open()
        device, host, remote = Area(process, "device", ARENA), Area(process, "host", ARENA), Area(target, "host", ARENA)
        process.do("gpu_set", sticky=700)
        call = process.te("transfer_sync_write", target.name, device.addr, remote.addr, 100_000)
        assert call.value == -1 and "700" in call.error and "host memory still moves" in call.error, call
        move(process, "write", "one", target.name, [host.addr], [remote.addr], [ARENA])
        process.do("gpu_heal")
        move(process, "write", "one", target.name, [device.addr], [remote.addr], [ARENA])


def test_a_program_with_a_gpu_says_nothing(cuda):
    """No line on standard error, no signal handler."""
    good(
        run(
            cuda,
            """
            def signals():
                with open("/proc/self/status") as file:
                    return [line for line in file if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
            threading.Thread(target=int).start()
            gpu = framework()
            before = signals()
            engine, name = new()
            here, there = memory(gpu, 1 << 20, 1), memory(gpu, 1 << 20, 2)
            assert engine.batch_register_memory([here, there], [1 << 20] * 2) == 0
            for op in ("write", "read"):
                assert getattr(engine, f"transfer_sync_{op}")(name, here, there, 1 << 20) == 0
            stream = gpu.stream(0, 1)
            for _ in range(20):
                engine.transfer_write_on_cuda(name, here, there, 1 << 20, stream)
            assert gpu.stream_wait(stream) == 0 and engine.stats()["on_cuda_failed"] == 0
            assert signals() == before
            engine.close()
            assert signals() == before
            """,
        )
    )
