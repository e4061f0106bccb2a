"""The two processes of a pair, as seen from the one that measures."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from comparing.works import INITIATOR, TARGET, Work

END = Path(__file__).resolve().parent / "end.py"
#: An engine is imported, or 256 MiB are filled; nothing that is measured takes so long.
PATIENCE = 120.0
#: Far more calls than a turn has.
MANY = 3_000_000
#: A pair is warm after so many calls or so long.
WARM_CALLS, WARM_SECONDS = 3, 0.1


T = TypeVar("T")


class Failed(Exception):
    """An order was not carried out; the text says why."""


class Process:
    """One end. Obeys orders, one JSON object per line, each answered by one."""

    def __init__(self, command: list[str], env: dict[str, str]):
        self.what, self.unread = " ".join(command[1:]), b""
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, env=env)
        self.pid = self.process.pid
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def tell(self, order: str, **args) -> None:
        try:
            self.process.stdin.write(json.dumps({"order": order, **args}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self.obituary()) from None

    def ask(self, order: str, **args) -> dict:
        self.tell(order, **args)
        return self.answer()

    def answer(self) -> dict:
        end = time.monotonic() + PATIENCE
        while b"\n" not in self.unread:
            left = end - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                raise Failed(f"{self.what}: no answer within {PATIENCE:.0f} s")
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            if not read:
                raise Failed(self.obituary())
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        answer = json.loads(line)
        if answer["answer"] == "failed":
            raise Failed(answer["why"])
        return answer

    def obituary(self) -> str:
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"{self.what} takes no orders any more, and runs on"
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        return f"{self.what} ended with code {code}: {lines[-1] if lines else 'it said nothing'}"

    # What the kernel says about it. Nothing is asked of the process, so nothing is added to what it costs.

    def kernel(self, say: Callable[[], T]) -> T:
        try:
            return say()
        except (OSError, KeyError):
            # Of one that has ended, it says less.
            raise Failed(self.obituary()) from None

    def cpu(self) -> float:
        """Processor seconds of all of its threads so far, from the kernel's clock of that process."""
        return self.kernel(lambda: time.clock_gettime(~self.pid << 3 | 2))

    def forget_peak(self) -> None:
        self.kernel(lambda: Path(f"/proc/{self.pid}/clear_refs").write_text("5"))

    def peak(self) -> int:
        """The most memory it has had at once since the last `forget_peak`, VmHWM."""
        return self.kernel(lambda: int(self.status()["VmHWM"].split()[0]) << 10)

    def status(self) -> dict[str, str]:
        return dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())

    def freeze(self) -> None:
        # Not by its id, which is somebody else's when it has ended.
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.selector.close()
        self.process.stdout.close()
        self.said.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass


class Pair:
    """Two processes between which payload moves. `ready`, `warm`, `arm`, `move` and `check` make up a turn."""

    #: Whether one end may wait for the other for ever after an order has failed.
    two_sided = False

    def __init__(self, initiator: Process, target: Process, own: int):
        self.initiator, self.target = initiator, target
        self.ends = (initiator, target)
        #: Bytes of memory at each end that are there to be moved.
        self.own = own
        #: Stopped while it is not its turn, since it uses the processor all the same.
        self.held = False
        #: Why it takes no more turns.
        self.broken: str | None = None

    @contextlib.contextmanager
    def or_closed(self) -> Iterator[None]:
        """What fails leaves no process behind."""
        try:
            yield
        except Failed:
            self.close()
            raise

    def both(self, order: str, initiator: dict, target: dict) -> list[dict]:
        """Each end's answer; the target is told first, since it may have to listen."""
        self.target.tell(order, **target)
        self.initiator.tell(order, **initiator)
        return self.answers(*self.ends)

    @staticmethod
    def answers(*ends: Process) -> list[dict]:
        """One from each. Those of all are taken before a failure is raised, so that the next order gets its own."""
        answers, failures = [], []
        for end in ends:
            try:
                answers.append(end.answer())
            except Failed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        return answers

    def fill(self, op: str, seed: int, source: bool, sink: bool) -> None:
        """The source holds what is to move, the sink the complement of it, so a byte that does not move is wrong for certain."""
        wanted = [(end, end is not self.sink(op)) for end in self.ends]
        wanted = [(end, is_source) for end, is_source in wanted if (source if is_source else sink)]
        for end, is_source in wanted:
            self.tell_fill(end, seed, not is_source)
        self.answers(*(end for end, _ in wanted))

    def sink(self, op: str) -> Process:
        return self.target if op == "write" else self.initiator

    def hold(self) -> None:
        if self.held:
            for end in self.ends:
                end.freeze()

    def resume(self) -> None:
        if self.held:
            for end in self.ends:
                end.thaw()

    def close(self) -> None:
        for end in self.ends:
            end.close()


class EnginePair(Pair):
    """An engine at each end, of the classes in engines.py."""

    def __init__(self, engines: tuple[str, str], pythons: tuple[str, str], envs: tuple[dict, dict], size: int, place: str):
        roles = (INITIATOR, TARGET)
        made = [Process([pythons[n], str(END), engines[n], roles[n], str(size)], envs[n]) for n in (0, 1)]
        super().__init__(*made, own=size)
        self.two_sided = engines[1] == "Gloo"
        with self.or_closed():
            hello = [answer.get("value") for answer in self.answers(*self.ends)]
            self.both("meet", {"peer": hello[1], "place": place}, {"peer": hello[0], "place": place})

    def tell_fill(self, end: Process, seed: int, complement: bool) -> None:
        end.tell("fill", seed=seed, complement=complement)

    def ready(self, work: Work, op: str, seed: int) -> None:
        self.op, self.seed = op, seed
        self.both("prepare", {"work": work.name, "op": op}, {"work": work.name, "op": op})
        self.fill(op, seed, source=True, sink=True)

    def warm(self) -> None:
        self.move(WARM_SECONDS, WARM_CALLS, 0)

    def arm(self) -> None:
        self.fill(self.op, self.seed, source=False, sink=True)

    def move(self, seconds: float, most: int, pace_us: int) -> dict:
        if self.two_sided:
            self.target.tell("serve")
        moved = self.initiator.ask("run", seconds=seconds, most=most, pace_us=pace_us)
        if self.two_sided:
            self.target.answer()
        return moved

    def check(self) -> dict:
        return self.sink(self.op).ask("check", seed=self.seed)


class PlainPair(Pair):
    """Sockets and nothing else: the program's hidden subcommand at each end."""

    two_sided = True

    def __init__(self, env: dict[str, str]):
        made = [Process([sys.executable, "-m", "tensorferry", "__plain"], env) for _ in (0, 1)]
        super().__init__(*made, own=0)
        with self.or_closed():
            self.port = [answer["port"] for answer in self.answers(*self.ends)][1]

    def tell_fill(self, end: Process, seed: int, complement: bool) -> None:
        end.tell("fill", bytes=self.payload, pattern={"seed": seed << 40, "complement": complement})

    def ready(self, work: Work, op: str, seed: int) -> None:
        self.work, self.op, self.seed, self.payload = work, op, seed, work.payload
        # It keeps the largest buffer that it ever needed.
        self.own = max(self.own, self.payload)
        self.fill(op, seed, source=True, sink=True)

    def connect(self) -> None:
        self.initiator.ask("connect", port=self.port)
        self.target.ask("accept")

    def warm(self) -> None:
        self.connect()
        self.move(0.0, WARM_CALLS, 0)

    def arm(self) -> None:
        self.fill(self.op, self.seed, source=False, sink=True)
        self.connect()

    def move(self, seconds: float, most: int, pace_us: int) -> dict:
        work = {
            "way": "send" if self.op == "write" else "receive",
            "pings": self.work.single,
            "bytes": self.payload,
            "chunk": self.work.chunk,
            "limit_ns": round(seconds * 1e9),
            "most": most,
            "pace_us": pace_us,
        }
        self.target.tell("serve", **work)
        moved = self.initiator.ask("run", **work)
        self.target.answer()
        return moved

    def check(self) -> dict:
        return self.sink(self.op).ask("check", bytes=self.payload, pattern={"seed": self.seed << 40, "complement": False})
