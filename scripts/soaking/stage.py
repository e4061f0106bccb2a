"""The processes of a soak: targets behind relays, and initiators that know each target by a copy of its relay."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from peers import OURS, ROOT, EngineProcess
from relay import Relay

#: Seconds that a batch has, beside those for its length.
TIMEOUT = 4.0
MIB = 1 << 20
#: Region sizes of the two threads of an initiator.
HOST_REGIONS = [24 * MIB, 8 * MIB]
GPU_REGIONS = [12 * MIB, 4 * MIB]
#: Nothing that is asked of a process takes longer, unless it never ends.
DEADLINE = 60.0


def two_ports(rng: random.Random) -> str:
    """Two neighbouring ports that are free now, below those that the kernel gives away."""
    for _ in range(200):
        first = rng.randrange(20000, 32000)
        try:
            for port in (first, first + 1):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return f"{first}-{first + 1}"
    raise RuntimeError("no two neighbouring ports are free")


@dataclass
class Findings:
    """What is not as it should be, and how much memory was compared at the targets."""

    problems: list[str] = field(default_factory=list)
    compared: int = 0
    arenas: int = 0


class Target:
    """An engine that owns memory, and the relay before it."""

    def __init__(self, key: str, env: dict[str, str], library: str | None, copies: int):
        self.key, self.env, self.library = key, env, library
        self.process = self._start()
        self.relay = Relay(self.process.name, copies=copies)
        #: By initiator: the name and the address of its arena.
        self.arenas: dict[str, tuple[str, int]] = {}
        #: Arenas that are closed, and are looked at once more.
        self.closed: list[str] = []
        self.made = 0
        self.deaths = 0

    def _start(self) -> EngineProcess:
        process = EngineProcess(OURS, self.env)
        if self.library:
            process.do("gpu_load", path=self.library)
        process.open()
        return process

    def make_arena(self, initiator: Initiator) -> None:
        self.made += 1
        name = f"{self.key}-{initiator.key}-{self.made}"
        args = {"name": name, "size": sum(initiator.regions), "gpu": self.library is not None}
        self.arenas[initiator.key] = (name, self.process.do("soaking.load:make_arena", DEADLINE, **args))

    def drop_closed(self) -> list[str]:
        """Lets go of the arenas that were closed; returns what is wrong with them."""
        dropped, self.closed = self.closed, []
        return [problem for name in dropped for problem in self.process.do("soaking.load:drop_arena", DEADLINE, name=name)]

    def kill(self) -> None:
        self.process.close()
        self.deaths += 1
        self.closed.clear()

    def restart(self) -> None:
        self.process = self._start()
        self.relay.retarget(self.process.name)

    def close(self) -> None:
        self.relay.close()
        self.process.close()


class Initiator:
    """An engine whose threads move bytes to and from its targets."""

    def __init__(self, key: str, number: int, env: dict[str, str], library: str | None, seed: int, pause: float):
        self.key, self.number, self.library = key, number, library
        self.regions = GPU_REGIONS if library else HOST_REGIONS
        self.targets: list[tuple[Target, int]] = []
        self.process = EngineProcess(OURS, {**env, "TENSORFERRY_TRANSFER_TIMEOUT": f"{TIMEOUT}s"})
        if library:
            self.process.do("gpu_load", path=library)
        self.process.open()
        args = {"seed": seed + number, "threads": self.regions, "timeout": TIMEOUT, "gpu": library is not None, "pause": pause}
        self.do("begin", **args)

    def do(self, command: str, **args):
        return self.process.do(f"soaking.load:{command}", DEADLINE, **args)

    def add(self, target: Target, copy: int) -> None:
        self.targets.append((target, copy))
        self.do("add_target", key=target.key)
        target.make_arena(self)
        self.renew(target)

    def renew(self, target: Target) -> None:
        """Tells the threads of their new arena at a target."""
        copy = next(copy for one, copy in self.targets if one is target)
        self.do("renew", key=target.key, name=target.relay.names[copy], address=target.arenas[self.key][1])

    def close(self) -> None:
        self.process.close()


class Stage:
    """All of them."""

    def __init__(self, seed: int, pause: float):
        self.rng = random.Random(seed)
        self.findings = Findings()
        self.folder = Path(tempfile.mkdtemp(prefix="tensorferry-soak-"))
        self.library = self._simulator()
        # Large blocks go back to the system when they are freed, so that a leak can be seen beside Python's own ups and downs.
        env = {"PYTHONPATH": str(ROOT / "scripts"), "TENSORFERRY_IO_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
        mortal = {**env, "TENSORFERRY_PORTS": two_ports(self.rng)}
        self.targets = [
            Target("lasting", env, None, 2),
            Target("mortal", mortal, None, 2),
            Target("gpu", env, self.library, 2),
        ]
        lasting, self.mortal, gpu = self.targets
        libraries = {"one": None, "two": None, "three": self.library}
        self.initiators = [Initiator(key, n, env, library, seed, pause) for n, (key, library) in enumerate(libraries.items())]
        one, two, three = self.initiators
        for target, (first, second) in [(lasting, (one, three)), (self.mortal, (one, two)), (gpu, (two, three))]:
            first.add(target, 0)
            second.add(target, 1)
        for initiator in self.initiators:
            initiator.do("go")

    def _simulator(self) -> str:
        command = [str(ROOT / "scripts" / "simgpu"), str(self.folder / "simgpu"), "libcuda.so.1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        return str(self.folder / "simgpu" / "libcuda.so.1")

    def pairs(self):
        return [(initiator, target) for initiator in self.initiators for target, _ in initiator.targets]

    def of(self, target: Target):
        return [initiator for initiator in self.initiators if any(one is target for one, _ in initiator.targets)]

    def lasting(self) -> dict[str, int]:
        """The ids of the processes that live as long as the soak."""
        pids = {f"target {t.key}": t.process.pid for t in self.targets if t is not self.mortal}
        pids.update({f"initiator {i.key}": i.process.pid for i in self.initiators})
        pids.update({f"relay {t.key}": t.relay.process.pid for t in self.targets})
        return pids

    def close(self) -> None:
        for one in [*self.initiators, *self.targets]:
            one.close()
        shutil.rmtree(self.folder, ignore_errors=True)
