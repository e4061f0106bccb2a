"""GPU memory through the Python face, with the simulated driver of docs/simgpu.md in the processes.

The library is loaded and initialised as a framework does it, before or after the engine is there; the engine is told addresses
as integers and nothing else, unless a test says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pattern
import pytest
from conftest import Ends
from gpu_kit import ARENA, FAR, KINDS, NEAR, OPS, SIZES, Area, GpuProcess, Ordered, Seeds, both, lay_out, move, one, ordered, patch, records, started
from peers import OURS, PEER, ROOT, STAND_IN, EngineProcess, clean_environment, need, raw_bytes, wait_until

pytestmark = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine is built without a GPU")


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
        for _ in range(50):
            refused(process, host.addr, "cuda:0")
        process.do("gpu_load", path=str(libraries / "libcuda.so.1"), init="")
        assert process.do("gpu_counts", names=["calls.cuInit"]) == {"calls.cuInit": 1}, "a failing library is asked once"
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
