"""The processes at the ends of a transfer, and the network between them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

from peers import OURS, PEER, ROOT, EngineProcess, clean_environment

#: What a target's memory holds, what a WRITE brings, and what stands where nobody may write.
OLD, NEW, CANARY = 1, 2, 3
KINDS = {"ours": OURS, "peer": PEER}
TARGET_DIR = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
INITIATOR = TARGET_DIR / "debug" / "examples" / "initiator"


def build() -> None:
    """The programs: the initiator of cells that the Python face cannot express, and the relay."""
    environment = {**os.environ, "CARGO_TARGET_DIR": str(TARGET_DIR)}
    for what in (["tensorferry", "--example", "initiator"], ["tensorferry-relay"]):
        command = ["cargo", "build", "--quiet", "--locked", "-p", *what]
        subprocess.run(command, cwd=ROOT, check=True, timeout=900, env=environment)


class Initiator:
    """The example `initiator` of the engine: any number of orders at the same time, each with a deadline."""

    def __init__(self, size: int, env: dict[str, str] | None = None):
        self.orders: dict[int, Future] = {0: Future()}
        self.numbers, self.lock = itertools.count(1), threading.Lock()
        environment = clean_environment(OURS, env)
        self.said = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [INITIATOR, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, env=environment
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        hello = self.orders[0].result(30)
        self.name, self.base = hello["name"], hello["base"]

    def start(self, order: str, **args) -> Future:
        """Gives an order and does not wait for it."""
        with self.lock:
            number, answer = next(self.numbers), Future()
            self.orders[number] = answer
            line = json.dumps({"id": number, "do": order, "args": args}) + "\n"
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        return answer

    def do(self, order: str, deadline: float = 60, **args):
        return self.start(order, **args).result(deadline)

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            order = self.orders[answer["id"]]
            if "failure" in answer:
                order.set_exception(RuntimeError(answer["failure"]))
            else:
                order.set_result(answer["value"])
        code = self.process.wait()
        self.said.seek(0)
        why = RuntimeError(f"the initiator has ended with code {code}: {self.said.read().decode(errors='replace')[-2000:]}")
        for order in self.orders.values():
            if not order.done():
                order.set_exception(why)

    def __enter__(self) -> Initiator:
        return self

    def __exit__(self, *failure) -> None:
        self.process.kill()
        self.reader.join()
        self.process.stdin.close()
        self.process.stdout.close()
        self.said.close()


class Target:
    """A process with one engine or several, as a user of Python has them. Threads of ours may share it."""

    def __init__(self, kind: str, env: dict[str, str] | None = None):
        self.kind = kind
        self.process = EngineProcess(KINDS[kind], env)
        self.pid = self.process.pid
        self.lock = threading.RLock()
        self.buffers: dict[str, int] = {}

    def do(self, command: str, deadline: float = 60, **args):
        with self.lock:
            return self.process.do(command, deadline, **args)

    def te(self, method: str, *args, engine: str, deadline: float = 60):
        """Calls an engine method that must not raise; returns its result and what it says of a failure."""
        call = self.do("te", deadline, method=method, args=list(args), kwargs={}, engine=engine)
        if call["raised"]:
            raise RuntimeError(f"{method}: {call['raised']}")
        return call["value"], call["error"]

    def open(self, engine: str, host: str = "127.0.0.1", ports: tuple[int, int] | None = None) -> int:
        """Makes an engine; with `ports`, on these two. Returns its control port."""
        with self.lock:
            if ports:
                for prefix, port in (("MC_MIN", ports[0]), ("MC_MAX", ports[1])):
                    self.do("set_env", name=f"{prefix}_RPC_PORT", value=str(port))
            made = self.do("open_engine", engine=engine, host=host)
            if made["code"]:
                raise RuntimeError(f"initialize({host!r}) returned {made['code']}: {made['error']}")
            return made["port"]

    def reopen(self, engine: str, port: int, ports: tuple[int, int]) -> None:
        """Makes an engine whose control port is this one; which of the two an engine takes for it is chance."""
        for _ in range(60):
            if self.open(engine, ports=ports) == port:
                return
            self.do("drop_engine", engine=engine)
        raise RuntimeError(f"port {port} is never the control port")

    def memory(self, name: str, size: int, engines: list[str], seed: int = OLD) -> int:
        """Memory of the process that is registered with these engines; returns its address."""
        with self.lock:
            address = self.buffers[name] = self.do("alloc", name=name, size=size)
            self.do("fill", name=name, seed=seed)
            for engine in engines:
                code, error = self.te("register_memory", address, size, engine=engine)
                if code:
                    raise RuntimeError(f"register_memory returned {code}: {error}")
            return address

    def close(self) -> None:
        self.process.close()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *failure) -> None:
        self.close()


class Holes:
    """Addresses that swallow whatever is sent to them, until they are healed. Only in a network namespace of our own."""

    def __init__(self):
        self.numbers, self.lock = itertools.count(1), threading.Lock()
        self.made = False

    def address(self) -> str:
        """An address behind a device whose other end nobody reads, and nobody's own."""
        with self.lock:
            if not self.made:
                ip("link", "add", "hole", "type", "veth", "peer", "name", "bottom")
                for end in ("hole", "bottom"):
                    ip("link", "set", end, "up")
                ip("addr", "add", "10.99.0.1/24", "dev", "hole")
                # A neighbour that is known needs not be asked for, so nothing comes back: no answer, no "unreachable".
                ip("neigh", "add", "10.99.0.2", "lladdr", "02:00:00:00:00:02", "dev", "hole", "nud", "permanent")
                ip("route", "add", "10.98.0.0/16", "via", "10.99.0.2")
                self.made = True
            return f"10.98.{next(self.numbers)}.1"

    @staticmethod
    def heal(address: str) -> None:
        """From now on it is an address of this machine, where all that listens everywhere can be reached."""
        ip("addr", "add", f"{address}/32", "dev", "lo")


HOLES = Holes()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True)


def namespace_prefix() -> list[str] | None:
    """What has to stand before a command for it to run in a network namespace of its own; None if that cannot be had."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return None
    prefix = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*prefix, "true"], check=True, timeout=30, capture_output=True)
        return prefix
    return None
