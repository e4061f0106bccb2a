"""Starts all pairs, and gives each its turns."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from comparing import network
from comparing.contenders import SETTINGS, Contender
from comparing.figures import quantile, usable
from comparing.process import MANY, Failed, Pair
from comparing.works import OPS, PACED_CALLS, WORKS, Work

#: A pair that uses more of a processor than this while it has nothing to do is stopped between its turns.
IDLE = 0.005
IDLE_SECONDS = 1.0
#: How often a pair may fail before the clock runs.
WARM_RETRIES = 2
#: How long a setting is tried per work before the rounds, how often, and what share of the best comes near enough for that.
TRIAL_SECONDS, TRIALS, NEAR = 0.2, 2, 0.75


class Stage:
    """All pairs, and what has been measured."""

    def __init__(self, contenders: list[Contender], works: list[Work], say: Callable[[str], None]):
        self.contenders, self.works, self.say = contenders, works, say
        self.size = max(max(work.span for work in works), 1 << 20)
        self.folder = Path(tempfile.mkdtemp(prefix="compare-"))
        self.pairs: dict[tuple[str, int], Pair] = {}
        #: For each setting that was tried: its number, and GB/s by (work, op).
        self.trials: list[dict] = []
        self.best: dict[tuple[str, str], int] = {}
        self.idle: dict[str, dict] = {}
        self.turns: list[dict] = []
        self.seed = 0

    # Pairs

    def start(self) -> None:
        for contender in self.contenders:
            if contender.why_not or contender.name == "raw again":
                continue
            variants = SETTINGS if contender.name == "peer-best" else ({},)
            whys = []
            for n, more in enumerate(variants):
                self.say(f"starting {contender.title}" + (f", setting {n + 1} of {len(variants)}" if len(variants) > 1 else ""))
                whys.append(self.start_one(contender, n, more))
            if all(whys):
                contender.why_not = whys[0]
        for contender in self.contenders:
            if contender.name == "raw again" and not contender.why_not:
                contender.why_not = next(c.why_not for c in self.contenders if c.name == "raw")

    def start_one(self, contender: Contender, variant: int, more: dict[str, str]) -> str | None:
        """Returns why it does not work."""
        try:
            pair = contender.start(self.size, str(self.folder / f"{contender.name}-{variant}-{self.seed}"), more)
        except Failed as failure:
            return f"it does not start: {failure}"
        self.pairs[contender.name, variant] = pair
        # Connected, and shown to work, before it is looked at while it has nothing to do.
        first = self.turn(contender, pair, self.works[0], OPS[0], 0.05)
        if first["failed"] or first["wrong"]:
            pair.broken = f"its first transfer failed: {first['failed'] or first['wrong']}"
        else:
            try:
                self.hold_if_busy(contender, variant, pair)
            except Failed as failure:
                pair.broken = f"it does not stay: {failure}"
        if pair.broken:
            pair.close()
        return pair.broken

    def renew(self, pair: Pair) -> None:
        """Starts a pair anew whose turn has failed: what it has left behind would spoil the turns after it."""
        name, variant = next(key for key, value in self.pairs.items() if value is pair)
        contender = next(c for c in self.contenders if c.name == name)
        pair.close()
        pair.broken = self.start_one(contender, variant, SETTINGS[variant] if name == "peer-best" else {})

    def hold_if_busy(self, contender: Contender, variant: int, pair: Pair) -> None:
        """Looks at what it costs while it has nothing to do."""
        before = [end.cpu() for end in pair.ends]
        time.sleep(IDLE_SECONDS)  # idle, to be measured
        used = [(end.cpu() - was) / IDLE_SECONDS for end, was in zip(pair.ends, before)]
        pair.held = max(used) > IDLE
        pair.hold()
        if variant == 0:
            self.idle[contender.name] = {"cpu": used, "held": pair.held}

    def pair(self, contender: Contender, work: Work, op: str) -> Pair:
        """The pair of this contender; of the settings that were tried, that with the best for this work."""
        if contender.name == "raw again":
            return self.pairs["raw", 0]
        tried = WORKS[0] if work.pace_us else work
        return self.pairs[contender.name, self.best.get((tried.name, op), 0) if contender.name == "peer-best" else 0]

    def alive(self, name: str) -> list[tuple[str, int]]:
        return [key for key, pair in self.pairs.items() if key[0] == name and not pair.broken]

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Before the rounds

    def try_settings(self) -> None:
        """Finds the best setting of the peer's for each work."""
        contender = next((c for c in self.contenders if c.name == "peer-best" and not c.why_not), None)
        if contender is None:
            return
        self.trials = [{"settings": {**contender.env, **more}, "gb_per_s": {}} for more in SETTINGS]
        for work in (work for work in self.works if not work.pace_us):
            for op in OPS:
                rates = self.try_one(contender, work, op)
                self.best[work.name, op] = max(range(len(rates)), key=rates.__getitem__)
                for trial, rate in zip(self.trials, rates):
                    trial["gb_per_s"][f"{op} {work.name}"] = rate
                self.say(f"Mooncake, {op} {work.name}: best with {SETTINGS[self.best[work.name, op]] or 'its defaults'}")

    def try_one(self, contender: Contender, work: Work, op: str) -> list[float]:
        """GB/s with each setting; those that come near the best are tried again, in another order."""
        moved = [[0.0, 0.0] for _ in SETTINGS]
        rates = [0.0 for _ in SETTINGS]
        for trial in range(TRIALS):
            near = [n for _, n in self.alive("peer-best") if rates[n] >= max(rates) * NEAR]
            for n in near[::-1] if trial else near:
                seen = self.turn(contender, self.pairs["peer-best", n], work, op, TRIAL_SECONDS)
                if seen["failed"]:
                    self.renew(self.pairs["peer-best", n])
                elif usable(seen):
                    moved[n][0] += seen["bytes"]
                    moved[n][1] += seen["seconds"]
                    rates[n] = moved[n][0] / moved[n][1] / 1e9
        return rates

    # Rounds

    def round(self, number: int, rounds: int, seconds: float) -> None:
        order = rotated([c for c in self.contenders if not c.why_not], number)
        for work in self.works:
            for op in OPS if not work.pace_us else ("read",):
                for contender in order:
                    pair = self.pair(contender, work, op)
                    if pair.broken:
                        contender.why_not = contender.why_not or pair.broken
                        continue
                    # Paced calls are counted; the time only ends what does not get on.
                    most = math.ceil(PACED_CALLS / rounds) if work.pace_us else MANY
                    limit = 3 * most * work.pace_us / 1e6 if work.pace_us else seconds
                    seen = self.turn(contender, pair, work, op, limit, most)
                    self.turns.append({"round": number, **seen})
                    self.say(line(seen))
                    if seen["failed"]:
                        self.renew(pair)

    def turn(self, contender: Contender, pair: Pair, work: Work, op: str, seconds: float, most: int = MANY) -> dict:
        """A fresh pattern, a few calls to warm up, the measured calls, and the comparison of every byte."""
        self.seed += 1
        seen = {"contender": contender.name, "work": work.name, "op": op, "failed": None, "wrong": None}
        pair.resume()
        try:
            pair.ready(work, op, self.seed)
            seen["failed_warming"] = warmed(pair)
            pair.arm()
            seen |= measured(pair, work, seconds, most)
            checked = pair.check()
            seen |= {"verified_bytes": checked["bytes"], "wrong": checked["wrong"]}
        except Failed as failure:
            seen["failed"] = str(failure)
        pair.hold()
        return seen


def warmed(pair: Pair) -> list[str]:
    """What failed before it worked: an engine may find out only now that a connection is gone, which its users would try again."""
    failures = []
    while True:
        try:
            pair.warm()
            return failures
        except Failed as failure:
            failures.append(str(failure))
            if pair.two_sided or len(failures) > WARM_RETRIES:
                raise


def measured(pair: Pair, work: Work, seconds: float, most: int) -> dict:
    for end in pair.ends:
        end.forget_peak()
    cpu, counted = [end.cpu() for end in pair.ends], network.loopback_bytes()
    moved = pair.move(seconds, most, work.pace_us)
    counted = network.loopback_bytes() - counted
    cpu = [end.cpu() - was for end, was in zip(pair.ends, cpu)]
    return {
        "bytes": moved["bytes"],
        "calls": moved["calls"],
        "requests": moved["calls"] * work.count if moved["latencies_ns"] else None,
        "seconds": moved["seconds"],
        "cpu_seconds": cpu,
        "peak_bytes": [max(0, end.peak() - pair.own) for end in pair.ends],
        "counted_bytes": counted,
        **latencies(moved["latencies_ns"], bool(work.pace_us)),
    }


def latencies(taken_ns: list[int], keep: bool) -> dict:
    """Of calls; a plain stream has none. `keep` keeps each, so that rounds can be put together."""
    if not taken_ns:
        return {"latency_us": None}
    ordered = sorted(taken_ns)
    seen = {f"p{part}": quantile(ordered, part / 100) / 1e3 for part in (50, 90, 99)} | {"max": ordered[-1] / 1e3}
    return {"latency_us": seen, **({"each_us": [round(value / 1e3) for value in taken_ns]} if keep else {})}


def line(seen: dict) -> str:
    what = f"{seen['op']:5} {seen['work']:16} {seen['contender']:13}"
    if seen["failed"]:
        return f"{what} failed: {seen['failed']}"
    rate = f"{seen['bytes'] / seen['seconds'] / 1e9:7.3f} GB/s"
    p50 = f", p50 {seen['latency_us']['p50']:.0f} µs" if seen["latency_us"] else ""
    return f"{what} {rate}{p50}{', WRONG: ' + seen['wrong'] if seen['wrong'] else ''}"


def rotated(items: Iterable, by: int) -> list:
    items = list(items)
    by %= max(1, len(items))
    return items[by:] + items[:by]
