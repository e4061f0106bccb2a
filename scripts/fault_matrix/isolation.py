"""R13: peers that are dead or stopped, with much waiting for them, cost the healthy ones nothing."""

from __future__ import annotations

import os
import signal
import statistics
from contextlib import ExitStack


from .ends import HOLES, OLD, Target
from .report import Row, stretch

LENGTH, QUEUED, QUEUED_LENGTH = 64 << 10, 64, 1 << 20
#: How much of a processor the initiator may take while it does nothing but wait for the two; it is looked at so long.
BUSY, WATCHED = 0.1, 1.0
#: Of the rate alone, and of the p99 alone. A busy machine gets a wider gate: what starves is far outside of it.
RATE, P99 = 0.9, 2.0
GATE_RATE, GATE_P99 = 0.5, 5.0
#: Of the processor time for a write.
MOST_CPU = 1.5


def isolation(full: bool, kind: str) -> Row:
    seconds, pairs = (6.0, 5) if full else (0.8, 3)
    row = Row("R13", pairs)
    with ExitStack() as ends:
        healthy = [ends.enter_context(Target(kind)) for _ in range(2)]
        targets = [(f"127.0.0.1:{one.open('main')}", one.memory("mem", LENGTH * 2, ["main"])) for one in healthy]
        # Longer than a measurement, so that what waits for the dead ones waits during all of it.
        initiator = ends.enter_context(Target("ours", {"TENSORFERRY_TRANSFER_TIMEOUT": f"{seconds * 3 + 5}s"}))
        here = initiator.do("alloc", name="mem", size=QUEUED_LENGTH)
        initiator.do("fill", name="mem", seed=OLD)
        measured: list[tuple[dict, dict]] = []
        busy = 0.0
        for pair in range(pairs):
            engine = f"e{pair}"
            initiator.open(engine)
            steady = {"targets": targets, "local": "mem", "length": LENGTH, "engine": engine}
            run(initiator, 0.2, steady)
            alone = run(initiator, seconds, steady)
            with Target(kind) as stopped, Target(kind) as dead:
                queue(initiator, engine, here, stopped, dead)
                busy = max(busy, share_of_processor(initiator))
                measured.append((alone, run(initiator, seconds, steady)))
            initiator.do("drop_engine", engine=engine)
    row.in_time(busy < BUSY, f"the initiator took {busy:.0%} of a processor to wait for peers that are dead")
    return judge(row, measured, full, busy)


def queue(initiator: Target, engine: str, here: int, stopped: Target, dead: Target) -> None:
    """Stops one peer that is known, hides the other, and has much wait for each."""
    for target, host in ((stopped, "127.0.0.1"), (dead, HOLES.address())):
        name = f"127.0.0.1:{target.open('main', host)}"
        remote = target.memory("mem", QUEUED_LENGTH, ["main"])
        if target is stopped:
            code, error = initiator.te("transfer_sync_write", name, here, remote, 8, engine=engine)
            if code:
                raise RuntimeError(f"before the peer was stopped: {error}")
            os.kill(stopped.pid, signal.SIGSTOP)
        initiator.do(
            "submit_many", engine=engine, target=name, local="mem", remote=remote, length=QUEUED_LENGTH, count=QUEUED
        )


def share_of_processor(initiator: Target) -> float:
    before = initiator.do("usage")["cpu"]
    initiator.do("rest", seconds=WATCHED)
    return (initiator.do("usage")["cpu"] - before) / WATCHED


def run(initiator: Target, length: float, steady: dict) -> dict:
    return initiator.do("steady_writes", length + 60, **{**steady, "seconds": length})


def judge(row: Row, measured: list[tuple[dict, dict]], full: bool, busy: float) -> Row:
    rate = statistics.median(beside["rate"] / alone["rate"] for alone, beside in measured)
    p99 = statistics.median(beside["p99"] / alone["p99"] for alone, beside in measured)
    cpu = statistics.median(beside["cpu"] / alone["cpu"] for alone, beside in measured)
    speed = statistics.median(alone["rate"] for alone, _ in measured)
    failed = [text for pair in measured for one in pair for text in one["failed"]]
    row.states = {"measured": len(measured)}
    row.measured = f"rate × {rate:.2f} of {speed / 1e6:.0f} MB/s, p99 × {p99:.2f}, processor time × {cpu:.2f}; waiting took {busy:.1%}"
    least, most = (RATE, P99) if full else (GATE_RATE / stretch(), GATE_P99 * stretch())
    row.in_time(rate >= least, f"the rate is × {rate:.2f}, and the limit is {least:.2f}")
    row.in_time(p99 <= most, f"the p99 is × {p99:.2f}, and the limit is {most:.1f}")
    row.in_time(cpu <= MOST_CPU, f"a write takes × {cpu:.2f} of the processor time that it takes alone")
    row.expect(not failed, f"healthy peers failed: {failed[:1]}")
    return row
