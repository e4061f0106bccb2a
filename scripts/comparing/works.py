"""What is moved: so many blocks of a size per call, and where they lie at either end."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
OPS = ("write", "read")
#: The ends of a pair. The initiator calls, and the clock is there.
INITIATOR, TARGET = "initiator", "target"


@dataclass(frozen=True)
class Work:
    """One call moves `count` blocks; every call moves the same ones."""

    name: str
    block: int
    count: int
    #: Blocks lie in an order of their own at either end, and none beside another.
    scattered: bool = False
    #: What plain sockets send at once, at most.
    raw_chunk: int = MIB
    #: Microseconds from one call to the next; 0: at once.
    pace_us: int = 0

    @property
    def payload(self) -> int:
        """Bytes per call, and so the memory that is walked at each end, again and again."""
        return self.block * self.count

    @property
    def stride(self) -> int:
        return self.block * (2 if self.scattered else 1)

    @property
    def span(self) -> int:
        """Bytes of memory from the first block to the last."""
        return self.stride * self.count

    @property
    def chunk(self) -> int:
        return min(self.payload, self.raw_chunk, max(self.block, 64 * KIB if self.scattered else 0))

    @property
    def single(self) -> bool:
        """Small and alone: plain sockets answer each one."""
        return self.count == 1 and self.block < 64 * KIB

    def slots(self, end: str):
        """For each block, its place at this end, in strides."""
        import numpy as np

        if not self.scattered:
            return np.arange(self.count)
        return np.random.default_rng([self.count, end == TARGET]).permutation(self.count)


WORKS = (
    Work("4 KiB × 1", 4 * KIB, 1),
    Work("4 KiB × 128", 4 * KIB, 128),
    Work("16 KiB × 8,192", 16 * KIB, 8192, scattered=True, raw_chunk=64 * KIB),
    Work("64 KiB × 64", 64 * KIB, 64, raw_chunk=64 * KIB),
    Work("1 MiB × 16", MIB, 16),
    Work("64 MiB × 1", 64 * MIB, 1),
    Work("256 MiB × 1", 256 * MIB, 1),
    Work("4 KiB × 1, paced", 4 * KIB, 1, pace_us=1000),
)
PACED = WORKS[-1].name
#: Paced calls in all rounds together.
PACED_CALLS = 10_000


def named(name: str) -> Work:
    """The work of this name; also as people type it: 4KiBx128, 16KiBx8192, paced."""
    for work in WORKS:
        if name in (work.name, short(work)):
            return work
    raise ValueError(f"no work is called {name!r}; there are {', '.join(short(work) for work in WORKS)}")


def short(work: Work) -> str:
    if work.pace_us:
        return "paced"
    return work.name.replace(" ", "").replace(",", "").replace("×", "x")
