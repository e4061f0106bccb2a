"""What was seen in each cell, as a table."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field

from peers import slack

#: `Error::code()` of the engine.
CODES = {
    7: "PeerUnreachable",
    8: "Refused",
    9: "RangeNotPublished",
    10: "ConnectionLost",
    11: "OutcomeUnknown",
    13: "TimedOut",
    14: "Cancelled",
    15: "Unregistered",
    16: "Protocol",
    17: "BadAnswer",
}


@dataclass
class Row:
    """A cell: what was done, how often, and what became of it."""

    section: str
    repeats: int
    cell: str = ""
    states: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    first: float | None = None
    latest: float | None = None
    #: What else was measured, and the limit it is held to.
    measured: str = ""
    wrong: list[str] = field(default_factory=list)
    #: What took longer than it may, or was over before it was looked at. Others on the machine can be why, unless it is so again.
    late: list[str] = field(default_factory=list)
    skipped: str | None = None
    seconds: float = 0.0

    def expect(self, holds: bool, why: str) -> None:
        if not holds:
            self.wrong.append(why)

    def in_time(self, holds: bool, why: str) -> None:
        if not holds:
            self.late.append(why)

    @property
    def verdict(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "ok" if not self.wrong else "FAILED"

    def cells(self) -> list[str]:
        span = "" if self.latest is None else f"{self.first:.3f}–{self.latest:.3f}"
        return [self.cell, str(self.repeats), counted(self.states), span, counted(self.kinds), self.measured, self.verdict]


HEADS = ["cell", "repeats", "final states", "after (s)", "error kinds", "measured", "verdict"]


def stretch() -> float:
    """By how much a limit on time is stretched. More than in other tests: here everything waits at the same time, and what
    does not depend on time is looked at however long it takes."""
    return max(slack(), min(20.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))


def kinds(codes: dict[str, int]) -> Counter:
    return Counter({CODES.get(int(code), f"code {code}"): n for code, n in codes.items()})


def print_table(title: str, rows: list[Row]) -> None:
    """A table that is readable as it is and as Markdown."""
    print(f"\n## {title}\n")
    lines = [HEADS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
    for n, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
        if n == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        for why in row.wrong[:6]:
            print(f"\n- **{row.cell}**: {why}")
    print(flush=True)


def save(path: str, rows: list[Row]) -> None:
    with open(path, "w") as file:
        json.dump([{**asdict(row), "verdict": row.verdict} for row in rows], file, indent=1)
