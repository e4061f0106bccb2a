"""The process at one end of a pair: makes an engine and memory, and obeys orders, one JSON object per line.

    python end.py ENGINE END BYTES        ENGINE is a class of engines.py, END initiator or target

Answers leave on what was standard output, which engines that print are kept away from. Any end of the input is the end.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent.parent / "tests"))

import numpy as np  # noqa: E402
import pattern  # noqa: E402

from comparing import engines, works  # noqa: E402


#: Bytes that are filled or compared at a time.
PIECE = works.MIB


class Memory:
    """Ordinary pages, all of them touched; blocks lie in it as a work says."""

    def __init__(self, size: int):
        self.size = size
        self.area = mmap.mmap(-1, size)
        self.view = np.frombuffer(self.area, dtype=np.uint8)
        self.view[:] = 7
        self.address = self.view.ctypes.data

    def pieces(self, work: works.Work, end: str, seed: int):
        """For some blocks at a time: their bytes as they should be, the memory that they lie in, and their rows there."""
        if not work.scattered:
            flat = self.view[: work.payload]
            for at in range(0, work.payload, PIECE):
                memory = flat[at : at + PIECE]
                yield pattern.pattern(seed, at, len(memory)), memory, slice(None)
            return
        rows = self.view[: work.span].reshape(work.count, work.stride)[:, : work.block]
        slots, step = work.slots(end), max(1, PIECE // work.block)
        for first in range(0, work.count, step):
            at = slots[first : first + step]
            yield pattern.pattern(seed, first * work.block, len(at) * work.block).reshape(len(at), work.block), rows, at

    def fill(self, work: works.Work, end: str, seed: int, complement: bool) -> None:
        for wanted, memory, at in self.pieces(work, end, seed):
            memory[at] = np.invert(wanted, out=wanted) if complement else wanted

    def wrong(self, work: works.Work, end: str, seed: int) -> str | None:
        """Compares every byte of every block."""
        wrong = first = seen = 0
        for wanted, memory, at in self.pieces(work, end, seed):
            if not np.array_equal(memory[at], wanted):
                bad = np.flatnonzero(memory[at].ravel() != wanted.ravel())
                first = first if wrong else seen + int(bad[0])
                wrong += len(bad)
            seen += wanted.size
        return f"{wrong} of {seen} bytes are wrong, the first in block {first // work.block}" if wrong else None


def measure(call, seconds: float, most: int, pace_us: int) -> dict:
    """Calls until the time is over, or so often."""
    clock, latencies = time.perf_counter, array.array("d")
    gc.collect()
    gc.disable()
    try:
        began = due = clock()
        while True:
            start = clock()
            call()
            now = clock()
            latencies.append(now - start)
            if now - began >= seconds or len(latencies) >= most:
                break
            if pace_us:
                # Late ones are not made up for: a burst would be another work.
                due = max(due + pace_us / 1e6, now)
                time.sleep(max(0.0, due - clock()))
    finally:
        gc.enable()
    calls = len(latencies)
    return {"calls": calls, "seconds": now - began, "latencies_ns": [round(value * 1e9) for value in latencies]}


class End:
    """Carries out the orders."""

    def __init__(self, engine: str, end: str, size: int):
        self.end, self.memory = end, Memory(size)
        self.engine = getattr(engines, engine)(self.memory, end)
        self.work = self.call = None

    def hello(self):
        return {"value": self.engine.hello()}

    def meet(self, peer, place):
        self.engine.meet(peer, place)

    def prepare(self, work, op):
        """Makes the lists, or whatever the engine wants to have prepared."""
        self.work = works.named(work)
        self.call = self.engine.prepare(self.work, op)

    def fill(self, seed, complement):
        self.memory.fill(self.work, self.end, seed, complement)

    def run(self, seconds, most, pace_us):
        moved = measure(self.call, seconds, most, pace_us)
        self.engine.finish()
        return {"answer": "moved", "bytes": moved["calls"] * self.work.payload, **moved}

    def serve(self):
        """The target's part of `run`, where an engine needs one."""
        self.engine.serve()

    def check(self, seed):
        return {"answer": "checked", "bytes": self.work.payload, "wrong": self.memory.wrong(self.work, self.end, seed)}


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody is left behind
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        end = End(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        print(json.dumps({"answer": "ready", **end.hello()}), file=answers)
    except Exception as failure:
        print(json.dumps(failed(failure)), file=answers)
        os._exit(1)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(end, order.pop("order"))(**order) or {}
            answer.setdefault("answer", "done")
        except Exception as failure:
            answer = failed(failure)
        print(json.dumps(answer), file=answers)
    os._exit(0)


def failed(failure: Exception) -> dict:
    return {"answer": "failed", "why": f"{type(failure).__name__}: {failure}"}


if __name__ == "__main__":
    main()
