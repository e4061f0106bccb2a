"""Engines in processes of their own: ours, and the released ones that it must work with."""

from __future__ import annotations

import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
OURS = "ours"
PEER = "0.3.13.post1"
OLD_PEER = "0.3.11.post1"

#: A release of the peer that stands in for us at every end. It proves the tests themselves: the interoperation tests
#: pass with it, those of the peer's defects fail.
STAND_IN = os.environ.get("TENSORFERRY_TEST_STANDIN")

#: Commands of a worker that takes part in nothing slow.
DEADLINE = 30.0


def slack() -> float:
    """By how much a limit on time is stretched: more when others keep the machine busy."""
    fixed = os.environ.get("TENSORFERRY_TEST_SLACK")
    if fixed:
        return float(fixed)
    # The load is that of a minute, and knows little of what began a moment ago.
    return min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1), 1.0 + 3.0 * pressure()))


def pressure() -> float:
    """In what part of the last ten seconds somebody waited for a processor; 0 where the kernel does not say."""
    try:
        with open("/proc/pressure/cpu") as file:
            return float(file.readline().split()[1].removeprefix("avg10=")) / 100
    except OSError:
        return 0.0


def at_best(measure, limit: float, tries: int = 3) -> float:
    """The least of a few measurements, of which the first within the limit is the last.

    Whoever else works on the machine makes what is measured longer, and never shorter.
    """
    least = math.inf
    for _ in range(tries):
        least = min(least, measure())
        if least <= limit:
            break
    return least


def wait_until(condition, deadline: float, what: str):
    """Waits for a condition and returns its value; fails with `what` when the deadline has passed."""
    end, pause = time.monotonic() + deadline, threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:.1f} s: {what}")
        pause.wait(0.005)


def module_of(kind: str) -> tuple[str, str | None]:
    """The module to import for a kind of engine, and the folder that it lies in, if it is not installed."""
    if kind == OURS and not STAND_IN:
        return "tensorferry.mooncake", None
    version = STAND_IN if kind == OURS else kind
    return "mooncake.engine", str(ROOT / ".peers" / version)


def clean_environment(kind: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a process: none of this process's settings of an engine, then `env`."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k not in ("PYTHONPATH", "PYTHONSTARTUP")
    }
    folder = module_of(kind)[1]
    if folder:
        kept["PYTHONPATH"] = folder
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    kept.update(env or {})
    return kept


@functools.cache
def why_absent(kind: str) -> str | None:
    """Why this kind of engine cannot be run here; None if it can."""
    module, folder = module_of(kind)
    if folder and not Path(folder).is_dir():
        return f"{folder} is not there; scripts/test installs it"
    tried = subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=clean_environment(kind), capture_output=True, text=True, timeout=60
    )
    if tried.returncode == 0:
        return None
    last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{module} {'of ' + kind if folder else ''} cannot be imported: {last}"


def need(kind: str) -> None:
    """Skips the test where a peer's release is absent. Our own module is never optional."""
    why = why_absent(kind)
    if why is None:
        return
    if kind == OURS:
        pytest.fail(f"{why}. Run `scripts/test`, or `pip install .` into this environment.")
    pytest.skip(f"skipped: {why}")


class WorkerError(Exception):
    """A command failed in the worker."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class WorkerDied(AssertionError):
    """The worker is gone, or did not answer."""


class Call:
    """What one call of an engine method came to."""

    def __init__(self, answer: dict):
        self.value = answer["value"]
        self.raised = answer["raised"]
        self.error = answer["error"]
        self.seconds = answer["seconds"]

    def __repr__(self) -> str:
        if self.raised:
            return f"raised {self.raised[0]}: {self.raised[1]}"
        return f"{self.value!r} after {self.seconds:.3f} s (last_error: {self.error!r})"


class EngineProcess:
    """A worker process. Every command has a deadline; the process is killed by its id at the end."""

    def __init__(
        self,
        kind: str,
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        options: tuple[str, ...] = (),
        inside: list[str] | None = None,
    ):
        need(kind)
        self.kind = kind
        self.ours = kind == OURS
        self.faithful = self.ours and not STAND_IN
        self.env = env or {}
        self.stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*(inside or []), sys.executable, str(TESTS / "worker.py"), module_of(kind)[0], *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=clean_environment(kind, env),
            pass_fds=pass_fds,
        )
        self.pid = self.process.pid
        self.count = 0
        self.unread = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.name = ""
        self.port = 0
        self.hello = self._reply(0, DEADLINE)

    # Commands

    def do(self, command: str, deadline: float = DEADLINE, **args):
        """Runs a command of worker.py or jobs.py and returns what it returned."""
        self.count += 1
        line = json.dumps({"id": self.count, "do": command, "args": args}) + "\n"
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._death(f"before {command}") from None
        return self._reply(self.count, deadline, command)

    def te(self, method: str, *args, engine: str = "main", deadline: float = DEADLINE, **kwargs) -> Call:
        """Calls an engine method."""
        return Call(self.do("te", deadline, method=method, args=list(args), kwargs=kwargs, engine=engine))

    def te_fresh(self, method: str, *args, engine: str = "main", deadline: float = DEADLINE, **kwargs) -> Call:
        """Calls an engine method from a thread that has called none before."""
        return Call(self.do("te_fresh", deadline, method=method, args=list(args), kwargs=kwargs, engine=engine))

    def value(self, method: str, *args, **kwargs):
        """Calls an engine method that must not raise, and returns its result."""
        call = self.te(method, *args, **kwargs)
        assert call.raised is None, f"{method}: {call}"
        return call.value

    def start(self, thread: str, command: str, **args) -> None:
        """Starts a command in a thread of the worker."""
        self.do("start", thread=thread, do=command, args=args)

    def start_te(self, thread: str, method: str, *args, engine: str = "main", **kwargs) -> None:
        self.start(thread, "te", method=method, args=list(args), kwargs=kwargs, engine=engine)

    def join(self, thread: str, deadline: float):
        """Waits for a thread of the worker; fails if it has not ended by the deadline."""
        answer = self.do("join", deadline + DEADLINE, thread=thread, seconds=deadline)
        assert answer["done"], f"{thread} had not ended after {deadline} s in the {self.kind} worker"
        return answer["value"]

    def running(self, thread: str) -> bool:
        return not self.do("join", thread=thread, seconds=0)["done"]

    def open(self, engine: str = "main", **args) -> str:
        """Makes and initializes an engine; returns its segment name."""
        made = self.do("open_engine", engine=engine, **args)
        assert made["code"] == 0, f"initialize returned {made['code']}: {made['error']}"
        if engine == "main":
            self.name, self.port = made["name"], made["port"]
        return made["name"]

    def alloc(self, name: str, size: int, seed: int | None = None, register: bool = False, **args) -> int:
        address = self.do("alloc", name=name, size=size, **args)
        if seed is not None:
            self.do("fill", deadline=120, name=name, seed=seed)
        if register:
            assert self.value("register_memory", address, size) == 0
        return address

    # Life and death

    def alive(self) -> bool:
        return self.process.poll() is None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

        def stopped() -> bool:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"

        wait_until(stopped, 5, "the process is stopped")

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def said(self) -> str:
        """All that the process has written to standard error."""
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    def close(self) -> None:
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        self.selector.close()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            try:
                pipe.close()
            except BrokenPipeError:
                pass

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *failure) -> None:
        self.close()

    # Replies

    def _reply(self, id: int, deadline: float, command: str = "its start"):
        end = time.monotonic() + deadline
        while True:
            line, found, rest = self.unread.partition(b"\n")
            if found:
                self.unread = rest
                reply = json.loads(line)
                assert reply["id"] == id, f"reply {reply['id']} to command {id}"
                if "failure" in reply:
                    raise WorkerError(*reply["failure"])
                return reply["value"]
            left = end - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                raise self._silence(command, deadline)
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            if not read:
                raise self._death(f"during {command}")
            self.unread += read

    def _silence(self, command: str, deadline: float) -> WorkerDied:
        before = len(self.said())
        os.kill(self.pid, signal.SIGUSR1)  # faulthandler prints the stacks
        try:
            wait_until(lambda: len(self.said()) > before, 1, "")
        except AssertionError:
            pass
        text = self.said()
        self.close_hard()
        return WorkerDied(f"the {self.kind} worker did not answer {command} within {deadline} s\n{text[-3000:]}")

    def close_hard(self) -> None:
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait()

    def _death(self, when: str) -> WorkerDied:
        code = self.process.wait()
        return WorkerDied(f"the {self.kind} worker died {when} with code {code}\n{self.said()[-3000:]}")


# Values for the arguments of `te` that JSON has no form for.


def opcode(name: str) -> dict:
    return {"$": "opcode", "name": name}


def notify(name: str, msg: str) -> dict:
    return {"$": "notify", "name": name, "msg": msg}


def raw_bytes(data: bytes) -> dict:
    return {"$": "bytes", "hex": data.hex()}


def numpy_int(value: int, dtype: str = "uint64") -> dict:
    return {"$": "np", "value": value, "dtype": dtype}


def numpy_array(items: list[int], dtype: str = "uint64") -> dict:
    return {"$": "nparray", "items": items, "dtype": dtype}


def numpy_list(items: list[int], dtype: str = "uint64") -> dict:
    return {"$": "nplist", "items": items, "dtype": dtype}


def as_tuple(items: list) -> dict:
    return {"$": "tuple", "items": items}


def some_object() -> dict:
    return {"$": "object"}
