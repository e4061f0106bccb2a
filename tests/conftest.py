"""Fixtures: pairs of engine processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import defects_kit
import pytest
from peers import OLD_PEER, OURS, PEER, ROOT, STAND_IN, EngineProcess, need, why_absent

# Where tests run in the background of a shell, Ctrl-C is ignored, and what they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Ends:
    """Who starts the transfers, who owns the remote memory, and which version the initiator is held to."""

    initiator: str
    target: str
    version: int

    def __str__(self) -> str:
        return f"{self.initiator}-to-{self.target}-v{self.wire}"

    @property
    def wire(self) -> int:
        """The version on the wire: the old release speaks only v1."""
        return 1 if OLD_PEER in (self.initiator, self.target) else self.version


PAIRS = [
    Ends(OURS, OURS, 2),
    Ends(OURS, OURS, 1),
    Ends(OURS, PEER, 2),
    Ends(OURS, PEER, 1),
    Ends(PEER, OURS, 2),
    Ends(PEER, OURS, 1),
    Ends(OURS, OLD_PEER, 2),
    Ends(OLD_PEER, OURS, 2),
]
V2_PAIRS = [ends for ends in PAIRS if ends.wire == 2]


class Pair:
    """Two processes with an engine each, which know each other's memory `mem`."""

    def __init__(self, ends: Ends, size: int, env: dict[str, str] | None = None):
        self.ends = ends
        self.size = size
        settings = dict(env or {})
        if ends.version == 1:
            settings["MC_TCP_PROTO"] = "1"
        if ends.initiator == PEER or STAND_IN:
            settings["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
        self.target = EngineProcess(ends.target)
        try:
            self.initiator = EngineProcess(ends.initiator, settings)
        except BaseException:
            self.target.close()
            raise
        for end in (self.target, self.initiator):
            end.open()
            end.mem = end.alloc("mem", size, seed=1, register=True)

    @property
    def acknowledged(self) -> bool:
        """Whether a WRITE that the initiator calls complete is in the target's memory by then.

        v1 has no answer to a WRITE; our initiator waits for the target's close, theirs for its own socket buffer.
        """
        return self.ends.wire == 2 or self.initiator.faithful

    def close(self) -> None:
        self.initiator.close()
        self.target.close()


def make_pair(ends: Ends, size: int, **args) -> Pair:
    pair = Pair(ends, size, **args)
    return pair


@pytest.fixture(scope="session", autouse=True)
def say_who_is_absent(request):
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for kind in (OURS, PEER, OLD_PEER):
        why = why_absent(kind)
        if why and reporter:
            reporter.write_line(f"absent: {kind}: {why}")


@pytest.fixture
def ours():
    """Our engine in a process, opened."""
    with EngineProcess(OURS) as process:
        process.open()
        yield process


@pytest.fixture
def two():
    """Our engine at both ends, 1 MiB of registered memory each."""
    pair = make_pair(Ends(OURS, OURS, 2), 1 << 20)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def shared():
    kept = []
    yield kept
    for ends in kept:
        ends.__exit__()


@pytest.fixture
def bombarded(shared):
    """Two ends that serve all tests of a module; new ones only after a test has ended a process."""
    if shared and not (shared[-1].target.alive() and shared[-1].initiator.alive()):
        shared.pop().__exit__()
    if not shared:
        shared.append(defects_kit.Ends(OURS, 1 << 16))
    return shared[-1]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> Path:
    """A folder with the simulated libraries, under the vendors' names."""
    need(OURS)
    if not shutil.which("cargo"):
        pytest.skip("skipped: there is no cargo to build the simulated GPU with")
    folder = tmp_path_factory.mktemp("simgpu")
    names = ["libcuda.so.1", "libmusart.so.5", "libamdhip64.so.6"]
    built = subprocess.run([str(ROOT / "scripts" / "simgpu"), str(folder), *names], capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def cuda(libraries) -> str:
    return str(libraries / "libcuda.so.1")
