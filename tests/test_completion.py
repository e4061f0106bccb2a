"""Completed means applied at the destination; what is refused or not yet applied is never called complete."""

from __future__ import annotations

import os
import time

import pytest
from conftest import V2_PAIRS, Ends
from peers import OURS, PEER, EngineProcess, slack

LENGTH = 2_400_000
ROUNDS = 400
NOISE_WRITERS = 3
NOISE_LENGTH = 512 << 10
SEEDS = [101, 102, 103, 104, 105]


class Watched:
    """An initiator and a target with a pipe beside them, over which the target is asked to look at its memory at once."""

    def __init__(self, ends: Ends):
        self.to_target = os.pipe()
        self.to_initiator = os.pipe()
        self.target = EngineProcess(ends.target, pass_fds=(self.to_target[0], self.to_initiator[1]))
        self.initiator = EngineProcess(ends.initiator, pass_fds=(self.to_target[1], self.to_initiator[0]))
        for fd in (*self.to_target, *self.to_initiator):
            os.close(fd)
        self.noise = EngineProcess(ends.initiator)
        self.target.open()
        self.initiator.open()
        noise = NOISE_WRITERS * NOISE_LENGTH
        self.remote = self.target.alloc("mem", LENGTH + noise, seed=1, register=True)
        self.initiator.alloc("mem", LENGTH * len(SEEDS), seed=2, register=True)
        self.noise.alloc("mem", noise, seed=3)
        for n in range(NOISE_WRITERS):
            self.noise.open(engine=f"noise{n}")
        self.noise.do(
            "make_noise", target=self.target.name, local="mem", remote=self.remote + LENGTH, length=NOISE_LENGTH, threads=NOISE_WRITERS
        )

    def rounds(self, job: str) -> tuple[dict, int]:
        self.target.start(
            "side",
            "serve_side_pipe",
            requests=self.to_target[0],
            answers=self.to_initiator[1],
            buffer="mem",
            start=0,
            length=LENGTH,
            seeds=SEEDS,
        )
        counts = self.initiator.do(
            job,
            150,
            requests=self.to_target[1],
            answers=self.to_initiator[0],
            target=self.target.name,
            local="mem",
            remote=self.remote,
            length=LENGTH,
            rounds=ROUNDS,
            seeds=SEEDS,
        )
        return counts, self.target.join("side", 10)

    def close(self) -> None:
        for process in (self.noise, self.initiator, self.target):
            process.close()


@pytest.mark.parametrize("job", ["write_rounds", "read_rounds"])
@pytest.mark.parametrize("ends", V2_PAIRS, ids=str)
def test_no_torn_bytes_at_completion(ends, job):
    """400 transfers of 2.4 MB under three noise writers; at each completion the destination is compared at once."""
    watched = Watched(ends)
    try:
        counts, torn_at_target = watched.rounds(job)
        noise = watched.noise.do("stop_noise", 60)
    finally:
        watched.close()
    assert counts == {"failed": 0, "torn": 0}
    assert torn_at_target == 0
    assert all(n > 0 for n in noise), f"a noise writer wrote nothing: {noise}"


@pytest.fixture(params=V2_PAIRS, ids=str)
def open_pair(request):
    """Two engines with a request behind them, so that the connection is there."""
    with EngineProcess(request.param.target) as target, EngineProcess(request.param.initiator) as initiator:
        target.open()
        initiator.open()
        target.mem = target.alloc("mem", 1 << 20, seed=1, register=True)
        initiator.mem = initiator.alloc("mem", 1 << 20, seed=2, register=True)
        assert initiator.value("transfer_sync_write", target.name, initiator.mem, target.mem, 4096) == 0
        yield initiator, target


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_frozen_target_completes_nothing(open_pair, op):
    """64 KiB fit into the kernel's buffers; nothing may be called complete while the target stands still."""
    initiator, target = open_pair
    target.freeze()
    call = initiator.te(f"batch_transfer_async_{op}", target.name, [initiator.mem + 9], [target.mem + 5], [65536])
    assert call.value > 0, call
    frozen = initiator.do("watch_status", id=call.value, seconds=3.0)
    assert frozen["seen"] == [0], f"{frozen} while the target was stopped"
    target.thaw()
    thawed = initiator.do("watch_status", id=call.value, seconds=10)
    assert thawed["seen"][-1] == 1, thawed
    assert thawed["seconds"] <= 1.0 * slack(), thawed
    if op == "write":
        assert target.do("check", name="mem", background=1, patches=[(0, 2, 0, 4096), (5, 2, 9, 65536)]) == []
    else:
        # What came: the 4,096 bytes that were written before, then the target's own.
        assert initiator.do("check", name="mem", background=2, patches=[(9, 1, 5, 65536), (9, 2, 5, 4091)]) == []


def test_a_frozen_target_at_first_contact_completes_nothing():
    """The same with nothing known of the target. The call may wait for it before it gives an id."""
    with EngineProcess(OURS) as target, EngineProcess(OURS) as initiator:
        target.open()
        initiator.open()
        far = target.alloc("mem", 65536, seed=1, register=True)
        near = initiator.alloc("mem", 65536, seed=2, register=True)
        target.freeze()
        initiator.start("write", "submit_and_watch", target=target.name, local=near, remote=far, length=65536, seconds=15)
        assert not initiator.do("join", thread="write", seconds=1.5)["done"], "a final state while the target was stopped"
        target.thaw()
        began = time.monotonic()
        answer = initiator.join("write", 15)
        assert answer["status"] == 1, answer
        assert time.monotonic() - began <= 1.0 * slack(), answer
        assert target.do("check", name="mem", background=2) == []


def test_an_unregistered_range_fails_every_time(open_pair):
    """50 WRITEs and 50 READs of a range that nobody registered: 50 and 50 failures, and its bytes stay."""
    initiator, target = open_pair
    times = 50 if initiator.faithful else 3  # theirs waits a second after every other refusal (D3)
    lone = target.alloc("lone", 4096, seed=8)
    counts = initiator.do("write_many", 60, target=target.name, local=initiator.mem, remote=lone, length=4096, times=times)
    assert counts == {"write": times, "read": times}
    assert target.do("check", name="lone", background=8) == []
    assert initiator.do("check", name="mem", background=2) == []


def test_completion_is_seen_by_the_peer_as_well():
    """A small WRITE of theirs, answered by us, is in our memory when their call returns: 2,000 times."""
    with EngineProcess(OURS) as target, EngineProcess(PEER) as initiator:
        target.open()
        initiator.open()
        far = target.alloc("mem", 1 << 20, seed=1, register=True)
        near = initiator.alloc("mem", 1 << 20, seed=2, register=True)
        for part in range(20):
            at = part * 50_000
            assert initiator.value("transfer_sync_write", target.name, near + at, far + at, 50_000) == 0
            assert target.do("check", name="mem", background=2, start=0, length=at + 50_000) == []
