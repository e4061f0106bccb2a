"""R13: peers that are dead or stopped, with much waiting for them, cost the healthy ones nothing."""

from __future__ import annotations

import os
import signal
import statistics
from contextlib import ExitStack

from peers import slack

from .ends import OLD, Holes, Target
from .report import Row

LENGTH, QUEUED, QUEUED_LENGTH = 64 << 10, 64, 1 << 20
#: How much of a processor the initiator may take while it does nothing but wait for the two; it is looked at so long.
BUSY, WATCHED = 0.1, 1.0
#: Of the rate alone, and of the p99 alone. A busy machine gets a wider gate: what starves is far outside of it.
RATE, P99 = 0.9, 2.0
GATE_RATE, GATE_P99 = 0.5, 5.0


def isolation(full: bool, kind: str, holes: Holes) -> Row:
    seconds, pairs = (6.0, 5) if full else (0.8, 3)
    row = Row("R13", f"2 healthy peers beside a blackholed and a stopped one, {kind}", pairs)
    with ExitStack() as ends:
        healthy = [ends.enter_context(Target(kind)) for _ in range(2)]
        targets = [(f"127.0.0.1:{one.open('main')}", one.memory("mem", LENGTH * 2, ["main"])) for one in healthy]
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
            stopped = ends.enter_context(Target(kind))
            dead = ends.enter_context(Target(kind))
            hole = holes.address()
            for target, host in ((stopped, "127.0.0.1"), (dead, hole)):
                port = target.open("main", host)
                remote = target.memory("mem", QUEUED_LENGTH, ["main"])
                if target is stopped:
                    met = initiator.te("transfer_sync_write", f"127.0.0.1:{port}", here, remote, 8, engine=engine)
                    row.expect(met[0] == 0, f"before it was stopped: {met}")
                    os.kill(stopped.pid, signal.SIGSTOP)
                order = {"target": f"127.0.0.1:{port}", "local": "mem", "remote": remote, "length": QUEUED_LENGTH, "count": QUEUED}
                initiator.do("submit_many", engine=engine, **order)
            before = initiator.do("usage")["cpu"]
            initiator.do("rest", seconds=WATCHED)
            busy = max(busy, (initiator.do("usage")["cpu"] - before) / WATCHED)
            beside = run(initiator, seconds, steady)
            measured.append((alone, beside))
            os.kill(stopped.pid, signal.SIGKILL)
            initiator.do("drop_engine", engine=engine)
    row.expect(busy < BUSY, f"the initiator took {busy:.0%} of a processor to wait for peers that are dead")
    return judge(row, measured, full, busy)


def run(initiator: Target, length: float, steady: dict) -> dict:
    return initiator.do("steady_writes", length + 60, **{**steady, "seconds": length})


def judge(row: Row, measured: list[tuple[dict, dict]], full: bool, busy: float) -> Row:
    rate = statistics.median(beside["rate"] / alone["rate"] for alone, beside in measured)
    p99 = statistics.median(beside["p99"] / alone["p99"] for alone, beside in measured)
    speed = statistics.median(alone["rate"] for alone, _ in measured)
    failed = [text for pair in measured for one in pair for text in one["failed"]]
    row.states = {"measured": len(measured)}
    row.measured = f"rate × {rate:.2f} of {speed / 1e6:.0f} MB/s, p99 × {p99:.2f}; waiting alone took {busy:.1%} of a processor"
    least, most = (RATE, P99) if full else (GATE_RATE / slack(), GATE_P99 * slack())
    row.expect(rate >= least, f"the rate is × {rate:.2f}, and the limit is {least:.2f}")
    row.expect(p99 <= most, f"the p99 is × {p99:.2f}, and the limit is {most:.1f}")
    row.expect(not failed, f"healthy peers failed: {failed[:1]}")
    return row
