"""Much at once: 200,000 entries in a call, 5 GiB in a request, many threads. Callers wait, memory stays bounded, every byte is right."""

from __future__ import annotations

import pytest
from peers import OURS, PEER, STAND_IN, EngineProcess

GIB = 1 << 30
GROWTH_KIB = 64 << 10


def available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


@pytest.fixture
def ends(request):
    """Initiator and target of the kinds asked for; ours if nothing is."""
    initiator, target = getattr(request, "param", (OURS, OURS))
    settings = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"} if STAND_IN else {}
    with EngineProcess(target) as owner, EngineProcess(initiator, settings) as starter:
        owner.open()
        starter.open()
        yield starter, owner


def areas(ends, size, near_size=None):
    initiator, target = ends
    far = target.alloc("mem", size, seed=1, register=True, huge=True)
    near = initiator.alloc("mem", near_size or size, seed=2, register=True, huge=True)
    return near, far


BOTH = pytest.mark.parametrize("ends", [(OURS, OURS), (OURS, PEER)], ids=["ours-to-ours", "ours-to-peer"], indirect=True)


@BOTH
def test_two_hundred_thousand_entries(ends):
    """One call of 200,000 x 4 KiB each way: no refusal, and at most 64 MiB more memory at either end."""
    initiator, target = ends
    count, block = 200_000, 4096
    near, far = areas(ends, count * block)
    for op in ("write", "read"):
        before = target.do("usage")["rss"]
        target.do("reset_peak")
        answer = initiator.do("grid", 90, op=op, target=target.name, local="mem", remote=far, block=block, count=count)
        assert answer["value"] == 0, answer
        assert answer["grown_kib"] <= GROWTH_KIB, f"{op}: {answer}"
        grown = target.do("usage")["peak"] - before
        assert not target.faithful or grown <= GROWTH_KIB, f"{op}: the target grew by {grown} KiB"
        if op == "write":
            assert target.do("check", 120, name="mem", background=2) == []
            target.do("fill", 60, name="mem", seed=3)
        else:
            assert initiator.do("check", 120, name="mem", background=3) == []


def test_sixty_four_threads_of_1024_entries(ends):
    initiator, target = ends
    threads, count, block = 64, 1024, 4096
    near, far = areas(ends, threads * count * block)
    for op in ("write", "read"):
        answer = initiator.do(
            "grid_threads", 120, op=op, target=target.name, local="mem", remote=far, block=block, count=count, threads=threads
        )
        assert answer["values"] == [0] * threads
        assert answer["grown_kib"] <= GROWTH_KIB, answer["grown_kib"]
        if op == "write":
            assert target.do("check", 120, name="mem", background=2) == []
            target.do("fill", 60, name="mem", seed=3)
        else:
            assert initiator.do("check", 120, name="mem", background=3) == []


def test_five_gib_in_one_request(ends):
    """5 GiB + 3 bytes at odd addresses, there and back."""
    if available() < 13 * GIB:
        pytest.skip(f"skipped: needs 13 GiB of memory, {available() / GIB:.1f} GiB are available")
    initiator, target = ends
    length = 5 * GIB + 3
    far = target.do("alloc", name="mem", size=length + 64, huge=True)
    near = initiator.do("alloc", name="mem", size=length + 64, huge=True)
    assert target.value("register_memory", far, length + 64) == 0
    assert initiator.value("register_memory", near, length + 64) == 0
    initiator.do("fill", 120, name="mem", seed=2, start=5, length=length)
    call = initiator.te("transfer_sync_write", target.name, near + 5, far + 11, length, deadline=120)
    assert call.value == 0, call
    assert target.do("check", 120, name="mem", background=2, start=11, length=length) == []
    target.do("fill", 120, name="mem", seed=4, start=11, length=length)
    call = initiator.te("transfer_sync_read", target.name, near + 5, far + 11, length, deadline=120)
    assert call.value == 0, call
    assert initiator.do("check", 120, name="mem", background=4, start=5, length=length) == []


@BOTH
def test_sixteen_threads_of_400_verified_transfers(ends):
    """Each thread writes random bytes, reads them back elsewhere and compares: 6,400 times, sizes 1 to 65,536."""
    initiator, target = ends
    share, threads = 512 << 10, 16
    near, far = areas(ends, threads * share)
    wrong = initiator.do("verified_threads", 150, target=target.name, local="mem", remote=far, share=share, threads=threads, rounds=400)
    assert wrong == []
