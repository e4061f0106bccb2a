"""Transfers in order with streams of a GPU, through the drop-in: the `*_on_cuda` methods."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest
from gpu_kit import ARENA, ON_CUDA, Area, GpuProcess, Ordered, Seeds, one, ordered, records, started
from peers import OURS, STAND_IN, EngineProcess, at_best, slack, wait_until

pytestmark = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine is built without a GPU")


# In order with a stream


@pytest.mark.parametrize("method", ON_CUDA)
def test_a_transfer_between_two_kernels(ordered, method):
    """It carries what the kernel before it wrote; the kernel behind it waits; the call does not."""
    local, remote = ordered.local, ordered.remote
    size = 700_001
    if "write" in method:
        ordered.later(local, 0x11, delay=1.0)
        start = time.monotonic()
        started(ordered.call(method, local.addr, remote.addr, size, ordered.stream))
        assert time.monotonic() - start < 0.8
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
    # A call that waited would take as long as its kernel.
    length, rounds, late = 100_000, 20, 0.02
    answer = ordered.initiator.do(
        "between_kernels", method=method, target=ordered.target.name, local=ordered.local.name, remote=ordered.remote.addr,
        length=length, stream="s", rounds=rounds, delay=late,
    )
    assert answer["returned"] == [None] * rounds
    ordered.wait()
    for r in range(rounds):
        assert ordered.remote.do("bytes", byte=r + 1, start=r * length, length=length) == 0, r
        assert ordered.local.do("bytes", byte=0xEE, start=r * length, length=length) == 0, r
    assert ordered.failed == 0 and answer["median"] < late / 2, answer


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams(ordered, stream):
    """The legacy one, by 0 and by its name, and the thread's own."""
    process, local, remote = ordered.initiator, ordered.local, ordered.remote
    spare = Area(process, "device", 1000, register=False)
    local.fill(Seeds.two()[0])
    ordered.later(spare, 1, delay=1.0)
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
        ordered.later(local, 5, delay=1.0)
        start = time.monotonic()
        started(ordered.call(method, local.addr, remote.addr, ARENA, ordered.stream))
        assert time.monotonic() - start < 0.8
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
    # Those of the first one may have been there a moment longer than the stream was held.
    wait_until(lambda: left() <= before, 10, "no more events than before")


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
        # All of them are started before the first can fail.
        ordered.later(local, 1, delay=2.0)
        for n in range(30):
            started(ordered.call(ON_CUDA[n % 4], local.addr, 4096, 100, ordered.stream))
        ordered.wait()
        assert ordered.failed == 30
        wait_until(lambda: len(records(process, "ERROR")) >= 4, 5, "one for each method is logged")
        raised(ordered.call("transfer_read_on_cuda", local.addr, remote.addr, 100, ordered.stream), "29 more failed after it")
        started(ordered.call("transfer_read_on_cuda", local.addr, remote.addr, 100, ordered.stream))
        ordered.wait()
        process.value("close")

        def told():
            """How many were logged, and how many are said not to have been."""
            said = records(process, "ERROR")
            missed = [int(count) for text in said for count in re.findall(r"(\d+) more failures", text)]
            return sum("more failures were" not in text for text in said), sum(missed)

        # What the engine's threads have to say is logged a moment later.
        wait_until(lambda: sum(told()) == 30, 5, "those that were not logged are counted")
        assert 4 <= told()[0] < 30


def test_a_target_that_dies_in_mid_transfer(cuda):
    with Ordered(cuda, size=64 << 20) as ordered:
        local, remote = ordered.local, ordered.remote
        # Three seconds of copying, so that it is not over when the target dies.
        ordered.initiator.do("gpu_set", d2h_bytes_per_second=20_000_000)
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
    with Ordered(cuda, env={"TENSORFERRY_TRANSFER_TIMEOUT": "1500ms"}) as ordered:
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
            names = []
            for task in os.listdir(f"/proc/{process.pid}/task"):
                # A thread may end while it is looked at.
                with contextlib.suppress(OSError):
                    names.append(Path(f"/proc/{process.pid}/task/{task}/comm").read_text().strip())
            return names.count("tensorferry-str")

        def idle():
            before = process.do("usage")["cpu"]
            time.sleep(1)  # idle, to be measured
            return process.do("usage")["cpu"] - before

        assert looking() == 0
        for _ in range(3):
            started(ordered.call("transfer_write_on_cuda", ordered.local.addr, ordered.remote.addr, 100, ordered.stream))
        # A thread names itself, a moment after it is there.
        wait_until(lambda: looking() == 1, 10, "one thread looks")
        ordered.wait()
        assert at_best(idle, 0.05) <= 0.05
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
