"""What is made of the turns: medians, ratios of the same round, and whether the goals are met.

A ratio is that of two turns of one round, which were seconds apart; the figure is the median over the rounds, with the lowest and the
highest. Plain sockets have two turns per round: their ratio to themselves is the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from comparing.works import KIB, MIB, OPS, PACED, WORKS, Work

OURS, RAW, RAW_AGAIN = "ours", "raw", "raw again"
PEERS = ("peer", "peer-best", "nixl", "gloo")
#: From this block size on, payload and counters must agree so closely; below, headers weigh.
EXACT_FROM, EXACT = MIB, 1.02


def quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


# One turn


def gb_per_s(turn: dict) -> float | None:
    return turn["bytes"] / turn["seconds"] / 1e9


def requests_per_s(turn: dict) -> float | None:
    return turn["requests"] / turn["seconds"] if turn["requests"] else None


def cpu_per_gb(turn: dict) -> float | None:
    """Of both ends."""
    return sum(turn["cpu_seconds"]) / (turn["bytes"] / 1e9)


def latency(part: str):
    def of(turn: dict) -> float | None:
        return turn["latency_us"][part] if turn["latency_us"] else None

    return of


p50, p99 = latency("p50"), latency("p99")


def peak(turn: dict) -> float | None:
    """MiB of both ends beyond the buffers."""
    return sum(turn["peak_bytes"]) / MIB


def usable(turn: dict) -> bool:
    return not turn["failed"] and not turn["wrong"]


def violation(turn: dict, network: str | None = None) -> str | None:
    """Where payload and the counters of the loopback device do not go together. `network`: why others are counted there as well."""
    if turn["failed"]:
        return None
    share = turn["counted_bytes"] / turn["bytes"]
    if share < 1:
        return f"{turn['bytes']} bytes of payload, and the loopback device has counted {turn['counted_bytes']}"
    block = next(work.block for work in WORKS if work.name == turn["work"])
    if network is None and block >= EXACT_FROM and share > EXACT:
        return f"the loopback device has counted {(share - 1) * 100:.1f} % more than the payload"
    return None


# All rounds


class Run:
    """The document of a run, by contender, work and operation."""

    def __init__(self, document: dict):
        self.document = document
        self.turns: dict[tuple[str, str, str], list[dict]] = {}
        for turn in document["turns"]:
            self.turns.setdefault((turn["contender"], turn["work"], turn["op"]), []).append(turn)

    def by_round(self, who: str, work: str, op: str, what) -> dict[int, float]:
        turns = (turn for turn in self.turns.get((who, work, op), []) if usable(turn))
        values = {turn["round"]: what(turn) for turn in turns}
        return {number: value for number, value in values.items() if value is not None}

    def spread(self, who: str, work: str, op: str, what) -> Spread | None:
        return Spread.of(self.by_round(who, work, op, what).values())

    def ratio(self, who: str, other: str, work: str, op: str, what) -> Spread | None:
        one, two = self.by_round(who, work, op, what), self.by_round(other, work, op, what)
        return Spread.of(one[number] / two[number] for number in one if two.get(number))

    def noise(self, work: str, op: str, what) -> Spread | None:
        return self.ratio(RAW_AGAIN, RAW, work, op, what)

    def works(self) -> list[Work]:
        return [work for work in WORKS if work.name in self.document["works"]]

    def failure(self, who: str, work: str, op: str) -> str | None:
        """Why there is no figure."""
        for turn in self.turns.get((who, work, op), []):
            if not usable(turn):
                return turn["failed"] or f"wrong bytes: {turn['wrong']}"
        return None

    def why_not(self, who: str) -> str | None:
        for contender in self.document["contenders"]:
            if contender["name"] == who:
                return contender["why_not"]
        return "it is no contender"

    def paced(self, who: str) -> list[float]:
        """Every paced call of all rounds, in order of how long it took; microseconds."""
        turns = (turn for turn in self.turns.get((who, PACED, "read"), []) if usable(turn))
        return sorted(value for turn in turns for value in turn["each_us"])


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, the lowest and the highest."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values) -> Spread | None:
        values = list(values)
        return cls(median(values), min(values), max(values), len(values)) if values else None


# Goals


@dataclass(frozen=True)
class Goal:
    """`met` is None where it could not be measured."""

    work: str
    text: str
    met: bool | None
    figures: str


def goals(run: Run) -> list[Goal]:
    works = {work.name: work for work in run.works()}
    met: list[Goal] = []
    for op in OPS:
        met += batch_goals(run, works, op)
        for name in ("16 KiB × 8,192", "64 KiB × 64"):
            met += raw_goal(run, works, name, op, 0.8)
        for name in ("1 MiB × 16", "64 MiB × 1"):
            met += raw_goal(run, works, name, op, 0.9) + ahead(run, works, name, op)
        met += raw_goal(run, works, "256 MiB × 1", op, 0.75)
        met += small_goals(run, works, op)
        for work in works.values():
            if work.block >= 64 * KIB:
                ratio = run.ratio(OURS, RAW, work.name, op, cpu_per_gb)
                met.append(at_most(run, f"{op} {work.name}", "CPU seconds per GB, both ends, at most 1.3 × plain sockets", ratio, 1.3))
    return met + paced_goals(run, works)


def batch_goals(run: Run, works: dict, op: str) -> list[Goal]:
    name = "4 KiB × 128"
    if name not in works:
        return []
    least = {"write": 2.5, "read": 1.8}[op]
    both = run.ratio(OURS, "peer", name, op, gb_per_s)
    one = run.ratio("ours-to-peer", "peer", name, op, gb_per_s)
    return [
        at_least(run, f"{op} {name}", "at least 10 × Mooncake", both, 10, "peer"),
        at_least(run, f"{op} {name}", f"to a Mooncake target: at least {least} × Mooncake to Mooncake", one, least, "peer"),
    ]


def raw_goal(run: Run, works: dict, name: str, op: str, least: float) -> list[Goal]:
    if name not in works:
        return []
    chunk = works[name].chunk
    text = f"at least {least} × plain sockets with {chunk // KIB if chunk < MIB else chunk // MIB} {'KiB' if chunk < MIB else 'MiB'} chunks"
    return [at_least(run, f"{op} {name}", text, run.ratio(OURS, RAW, name, op, gb_per_s), least)]


def ahead(run: Run, works: dict, name: str, op: str) -> list[Goal]:
    """Ahead of every peer, in throughput."""
    if name not in works:
        return []
    return [at_least(run, f"{op} {name}", f"ahead of {title(run, who)}", run.ratio(OURS, who, name, op, gb_per_s), 1, who) for who in PEERS]


def small_goals(run: Run, works: dict, op: str) -> list[Goal]:
    name = "4 KiB × 1"
    if name not in works:
        return []
    ours, raw = run.spread(OURS, name, op, p50), run.spread(RAW, name, op, p50)
    met, figures = None, absent(run)
    if ours and raw:
        met = ours.median <= 2 * raw.low
        figures = f"{ours.median:.1f} µs ({ours.low:.1f}–{ours.high:.1f}); the fastest of {raw.rounds} was {raw.low:.1f} µs"
    first = Goal(f"{op} {name}", "p50 at most 2 × the fastest of the plain ping-pongs", met, figures)
    others = [
        at_most(run, f"{op} {name}", f"p50 below that of {title(run, who)}", run.ratio(OURS, who, name, op, p50), 1, who) for who in PEERS
    ]
    return [first, *others]


def paced_goals(run: Run, works: dict) -> list[Goal]:
    if PACED not in works:
        return []
    taken = run.paced(OURS)
    if not taken:
        return [Goal(PACED, "p99 at most 1 ms, none above 20 ms", None, absent(run))]
    at = quantile(taken, 0.99)
    figures = f"{len(taken):,} calls: p99 {at / 1e3:.3f} ms, the longest {taken[-1] / 1e3:.3f} ms"
    return [Goal(f"read {PACED}", "p99 at most 1 ms, none above 20 ms", at <= 1000 and taken[-1] <= 20_000, figures)]


def at_least(run: Run, work: str, text: str, ratio: Spread | None, least: float, who: str = RAW) -> Goal:
    return Goal(work, text, ratio and ratio.median >= least, shown(run, ratio, who))


def at_most(run: Run, work: str, text: str, ratio: Spread | None, most: float, who: str = RAW) -> Goal:
    return Goal(work, text, ratio and ratio.median <= most, shown(run, ratio, who))


def shown(run: Run, ratio: Spread | None, who: str) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})" if ratio else absent(run, who)


def absent(run: Run, who: str = RAW) -> str:
    why = next((f"{name}: {run.why_not(name)}" for name in (OURS, who) if run.why_not(name)), None)
    return f"not measured ({why})" if why else "not measured: it failed"


def title(run: Run, who: str) -> str:
    return next((c["title"] for c in run.document["contenders"] if c["name"] == who), who)
