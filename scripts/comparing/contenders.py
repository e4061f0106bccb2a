"""Who takes part, with which settings, and why somebody cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from comparing.process import PATIENCE, EnginePair, Pair, PlainPair

ROOT = Path(__file__).resolve().parent.parent.parent
#: scripts/test puts it there.
PEER_VERSION = "0.3.13.post1"
PEER = ROOT / ".peers" / PEER_VERSION
#: `--install` puts the others there, each into a folder of its own.
ELSEWHERE = ROOT / ".compare"

#: What of the peer's settings can matter over TCP, tried before the rounds. They are read when an engine is made.
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"MC_TCP_SLICE_SIZE": "262144"},
    {"MC_TCP_SLICE_SIZE": "1048576"},
    {"MC_TCP_LANES_PER_PEER": "1"},
    {"MC_TCP_LANES_PER_PEER": "16"},
    {"MC_TCP_LANES_PER_PEER": "1", "MC_TCP_SLICE_SIZE": "1048576"},
    {"MC_TCP_ENABLE_CONNECTION_POOL": "0"},
)
#: The peer's default of 1,024 refuses large batches; this is its largest.
PEER_QUEUE = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}


@dataclass
class Kind:
    """An engine that can be at an end: its class in engines.py, the interpreter and what it needs around it."""

    engine: str
    python: str
    env: dict[str, str] = field(default_factory=dict)
    #: Prints the version; fails where the engine cannot be used.
    version: str = ""

    def find(self) -> tuple[str | None, str | None]:
        """The version, or why it is not there."""
        if not Path(self.python).exists():
            return None, f"{Path(self.python).relative_to(ROOT)} is not there; scripts/compare --install makes it"
        command = [self.python, "-c", self.version]
        try:
            tried = subprocess.run(command, env=clean(self.env), capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            return None, f"importing it takes longer than {PATIENCE:.0f} s"
        if tried.returncode == 0:
            return tried.stdout.strip(), None
        return None, f"it cannot be imported: {(tried.stderr.strip().splitlines() or ['no message'])[-1]}"


@dataclass
class Contender:
    """One line of the comparison. `raw again` is the same pair as `raw`."""

    name: str
    title: str
    initiator: Kind | None = None
    target: Kind | None = None
    note: str = ""
    env: dict[str, str] = field(default_factory=dict)
    version: str | None = None
    why_not: str | None = None

    def find(self) -> None:
        kinds = [kind for kind in (self.initiator, self.target) if kind]
        found = {kind.engine: kind.find() for kind in kinds}
        self.version = " to ".join(dict.fromkeys(version for version, _ in found.values() if version)) or None
        self.why_not = next((why for _, why in found.values() if why), None)

    def start(self, size: int, place: str, more: dict[str, str] | None = None) -> Pair:
        if self.initiator.engine == "Plain":
            return PlainPair(clean({}))
        kinds = (self.initiator, self.target)
        envs = tuple(clean({**kind.env, **self.env, **(more or {})}) for kind in kinds)
        return EnginePair(tuple(k.engine for k in kinds), tuple(k.python for k in kinds), envs, size, place)


def clean(more: dict[str, str]) -> dict[str, str]:
    """This environment without settings of any engine, and with these."""
    foreign = ("MC_", "TENSORFERRY_", "UCX_", "NIXL_", "GLOO_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more}


OURS = Kind("Tensorferry", sys.executable, version="import tensorferry.mooncake, tensorferry; print(tensorferry.__version__)")
MOONCAKE = Kind(
    "Mooncake",
    sys.executable,
    {"PYTHONPATH": str(PEER)},
    f"import mooncake.engine; print({PEER_VERSION!r})",
)
NIXL = Kind(
    "Nixl",
    str(ELSEWHERE / "nixl" / "bin" / "python"),
    {"UCX_TLS": "tcp"},
    "import nixl_cu12, importlib.metadata as m; print(m.version('nixl-cu12'))",
)
GLOO = Kind(
    "Gloo",
    str(ELSEWHERE / "gloo" / "bin" / "python"),
    version="import importlib.metadata as m; print('of xoscar', m.version('xoscar'))",
)
PLAIN = Kind("Plain", sys.executable, version="import tensorferry; print(tensorferry.__version__)")


def contenders() -> list[Contender]:
    """All of them, in the order of the first round."""
    return [
        Contender("raw", "plain sockets", PLAIN, PLAIN, "one stream, or round trips for 4 KiB × 1"),
        Contender("ours", "tensorferry", OURS, OURS, "default settings"),
        Contender("ours-to-peer", "tensorferry → Mooncake", OURS, MOONCAKE, "default settings"),
        Contender("peer", "Mooncake", MOONCAKE, MOONCAKE, "default settings"),
        Contender(
            "peer-best", "Mooncake, best settings", MOONCAKE, MOONCAKE, "what was fastest for each work before the rounds", PEER_QUEUE
        ),
        Contender("nixl", "NIXL (UCX, tcp)", NIXL, NIXL, "UCX_TLS=tcp, prepared descriptors"),
        Contender("gloo", "Gloo", GLOO, GLOO, "one message per batch, with the blocks gathered; a word to say that all is in place"),
        Contender("raw again", "plain sockets, again", PLAIN, PLAIN, "the same two processes, for the noise"),
    ]
