"""scripts/soak: moves memory between engines for a long time while everything goes wrong, and compares every byte."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

from soaking.faults import Faults, replace_arena, replace_unknown, rest
from soaking.stage import TIMEOUT, Stage

#: After everything was taken back, batches may fail for so long: those that were on their way have deadlines.
RECOVERY = TIMEOUT + 1.0
#: What a process may have more at the last look than at the first third's, without being called a leak.
FDS, THREADS, RSS = 12, 3, 32 << 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--minutes", type=float, required=True, help="how long; it ends by itself, some seconds later")
    parser.add_argument("--seed", type=int, default=None, help="what goes wrong, and when, is drawn from it; printed if not given")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a thread rests between batches, on average")
    parser.add_argument("--spoil", action="store_true", help="spoils payloads instead of all else, to see that it is found")
    parser.add_argument("--json", metavar="FILE", help="writes the summary there, too")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error("--minutes must be above 0")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    return args


def look(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    rss, threads = int(status["VmRSS"].split()[0]) << 10, int(status["Threads"])
    return {"rss": rss, "threads": threads, "fds": len(os.listdir(f"/proc/{pid}/fd"))}


class Soak:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.stage = Stage(args.seed, args.pause)
        self.faults = Faults(self.stage, args.spoil)
        #: At each look: by process, what it has.
        self.looks: list[dict[str, dict[str, int]]] = []
        self.began = time.monotonic()
        self.last_problems = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        total = self.args.minutes * 60
        between = max(25.0, total / 15)
        next_look = between / 2
        while self.elapsed() < total:
            self.faults.next()
            replace_unknown(self.stage)
            if self.elapsed() >= next_look:
                self.pause_and_look()
                next_look = self.elapsed() + between
                self.say()
        self.pause_and_look()
        self.compare_all()

    def pause_and_look(self) -> None:
        """Takes every fault back; then nothing fails any more, and processes have what they need and nothing else."""
        self.faults.clear()
        rest(RECOVERY)
        before = self.failures()
        rest(1.5)
        after = self.failures()
        for name in before:
            if after[name] > before[name]:
                self.stage.findings.problems.append(f"initiator {name}: {after[name] - before[name]} batches failed long after the last fault")
        for target in self.stage.targets:
            self.stage.findings.problems += target.drop_closed()
        self.looks.append({name: look(pid) for name, pid in self.stage.lasting().items()})

    def failures(self) -> dict[str, int]:
        return {i.key: i.do("so_far")["seen"]["failed"] for i in self.stage.initiators}

    def compare_all(self) -> None:
        for initiator, target in self.stage.pairs():
            replace_arena(self.stage, initiator, target)

    def finish(self) -> dict:
        reports = {i.key: i.do("finish", seconds=20) for i in self.stage.initiators}
        problems = list(self.stage.findings.problems)
        for key, report in reports.items():
            problems += [f"initiator {key}: {text}" for text in report.pop("problems") + counters(report)]
        for target in self.stage.targets:
            if target is not self.stage.mortal:
                problems += served(target, reports)
        problems += self.leaks()
        return self.summary(reports, problems)

    def leaks(self) -> list[str]:
        problems = []
        # The first look is taken while everything is still used for the first time.
        looks = self.looks[1:] or self.looks
        third = max(1, len(looks) // 3)
        for name in self.looks[0]:
            for what, limit in (("fds", FDS), ("threads", THREADS), ("rss", RSS)):
                values = [look[name][what] for look in looks]
                first, last = statistics.median(values[:third]), statistics.median(values[-third:])
                if last - first > limit:
                    problems.append(f"{name}: {what} went from {first:.0f} to {last:.0f}")
        return problems

    def summary(self, reports: dict, problems: list[str]) -> dict:
        total = {name: sum(r["seen"][name] for r in reports.values()) for name in reports["one"]["seen"]}
        kinds: dict[str, int] = {}
        for report in reports.values():
            for kind, count in report["kinds"].items():
                kinds[kind] = kinds.get(kind, 0) + count
        first, last = self.looks[min(1, len(self.looks) - 1)], self.looks[-1]
        processes = {name: {what: [first[name][what], last[name][what]] for what in first[name]} for name in first}
        return {
            "seed": self.args.seed,
            "seconds": round(self.elapsed(), 1),
            "batches": total,
            "verified_bytes": sum(r["verified"] for r in reports.values()),
            "compared_at_targets": self.stage.findings.compared,
            "arenas": self.stage.findings.arenas,
            "engines": sum(r["engines"] for r in reports.values()) + sum(t.deaths + 1 for t in self.stage.targets),
            "latest_after_deadline": round(max(r["latest"] for r in reports.values()), 3),
            "failures": kinds,
            "faults": self.faults.counts,
            "connections": sum(c[p]["total"] for t in self.stage.targets for c in t.relay.counts() for p in ("data", "control")),
            "processes": processes,
            "problems": problems,
        }

    def say(self) -> None:
        seen = [i.do("so_far") for i in self.stage.initiators]
        batches, failed = (sum(s["seen"][name] for s in seen) for name in ("batches", "failed"))
        verified = sum(s["verified"] for s in seen)
        found = len(self.stage.findings.problems) + sum(len(s["problems"]) for s in seen)
        print(
            f"{self.elapsed():7.0f} s  {batches} batches, {failed} failed, {verified / 1e9:.1f} GB verified, {found} problems", flush=True
        )
        if found > self.last_problems:
            for text in (self.stage.findings.problems + [p for s in seen for p in s["problems"]])[:5]:
                print(f"    {text}", flush=True)
        self.last_problems = found


def counters(report: dict) -> list[str]:
    """Where an engine's counters and what its threads have seen do not add up."""
    seen, stats, problems = report["seen_of_this_engine"], report["stats"], []

    def must(good: bool, what: str) -> None:
        if not good:
            problems.append(f"counters: {what}: {stats}, seen {seen}")

    must(stats["batches_completed"] == seen["completed"], "batches_completed")
    # A batch that never started because its peer was unknown is no batch of the engine's.
    must(stats["batches_failed"] <= seen["failed"], "batches_failed")
    must(stats["batches_submitted"] == stats["batches_completed"] + stats["batches_failed"], "batches_submitted")
    entries, more = seen["entries_completed"], seen["entries_of_failed"]
    must(entries <= stats["requests_completed"] <= entries + more, "requests_completed")
    must(entries <= stats["requests_completed"] + stats["requests_failed"] <= entries + more, "requests_failed")
    moved = stats["bytes_read"] + stats["bytes_written"]
    must(stats["bytes_read"] >= seen["bytes_read"] and stats["bytes_written"] >= seen["bytes_written"], "bytes")
    must(moved <= seen["bytes_read"] + seen["bytes_written"] + seen["bytes_of_failed"], "bytes")
    return problems


def served(target, reports: dict) -> list[str]:
    """Whether a target has counted at least what its initiators saw completed."""
    stats, problems = target.process.value("stats"), []
    for op, counter in (("read", "served_bytes_read"), ("write", "served_bytes_written")):
        seen = sum(r["moved"].get(f"{target.key} {op}", 0) for r in reports.values())
        if stats[counter] < seen:
            problems.append(f"target {target.key}: {counter} is {stats[counter]}, and initiators saw {seen}")
    return problems


def table(summary: dict) -> str:
    batches = summary["batches"]
    rows = [
        ("time", f"{summary['seconds'] / 60:.1f} min, seed {summary['seed']}"),
        ("batches", f"{batches['batches']:,}: {batches['completed']:,} completed, {batches['failed']:,} failed"),
        ("entries of completed batches", f"{batches['entries_completed']:,}"),
        ("bytes of completed batches", f"{batches['bytes_written']:,} written, {batches['bytes_read']:,} read"),
        ("bytes compared", f"{summary['verified_bytes']:,} after transfers, {summary['compared_at_targets']:,} in {summary['arenas']} arenas at targets"),
        ("engines, connections", f"{summary['engines']:,}, {summary['connections']:,}"),
        ("latest end after a deadline", f"{summary['latest_after_deadline'] * 1000:.0f} ms"),
        ("faults", ", ".join(f"{name} {count}" for name, count in sorted(summary["faults"].items()))),
        ("failures", ", ".join(f"{kind}: {count}" for kind, count in sorted(summary["failures"].items()))),
    ]
    for name, has in summary["processes"].items():
        rss = "–".join(f"{value / (1 << 20):.0f}" for value in has["rss"])
        rows.append((name, f"{rss} MiB, {has['fds'][0]}–{has['fds'][1]} files, {has['threads'][0]}–{has['threads'][1]} threads"))
    rows.append(("problems", str(len(summary["problems"]))))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    args = arguments()
    print(f"soak: {args.minutes:g} minutes, --seed {args.seed}", flush=True)
    soak = Soak(args)
    try:
        soak.run()
        summary = soak.finish()
    finally:
        soak.stage.close()
    print(table(summary))
    for text in summary["problems"]:
        print(f"problem: {text}", file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["problems"] else 0
