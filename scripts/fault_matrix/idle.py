"""R5: the first transfer after an idle gap works, however the receiver has closed the connection meanwhile."""

from __future__ import annotations

from relay import Relay

from .ends import OLD, Target
from .report import Row, stretch

#: On a machine so busy that an answer takes longer than that, the relay closes connections that are in use.
CLOSED_AFTER_MS = 1000
#: `TENSORFERRY_LANE_IDLE_PROBE` by default, in seconds.
PROBE = 0.5
#: What the first batch after a gap may take, in 99 of 100 cases.
LIMITS = {"fin": 0.020, "rst": 0.020, "silence": PROBE + 0.1}
ENTRIES, LENGTH = 64, 4096


def plan(full: bool) -> list[tuple[float, int, int]]:
    """Gaps in seconds, with how many peers and cycles: some 200 in all for each gap and way of closing."""
    if full:
        return [(0.2, 5, 40), (1.1, 5, 40), (5.0, 10, 20), (65.0, 50, 4)]
    return [(0.2, 4, 15), (1.1, 4, 4), (5.0, 4, 1)]


def rows(full: bool, kind: str, only) -> list[Row]:
    """All gaps and ways at the same time, against one relay with a copy for each peer."""
    groups = [(gap, peers, cycles, how) for gap, peers, cycles in plan(full) for how in LIMITS]
    groups = [group for group in groups if only(name_of(group, kind))]
    if not groups:
        return []
    size = ENTRIES * LENGTH
    with Target(kind) as target, Target("ours") as initiator:
        port = target.open("main")
        remote = target.memory("mem", size, ["main"])
        initiator.open("main")
        initiator.do("alloc", name="mem", size=size)
        initiator.do("fill", name="mem", seed=OLD)
        with Relay(f"127.0.0.1:{port}", sum(peers for _, peers, _, _ in groups)) as relay:
            orders, first = [], 0
            for gap, peers, cycles, how in groups:
                copies = list(range(first, first + peers))
                relay.idle(CLOSED_AFTER_MS, how, copies=copies)
                orders.append({"targets": [relay.names[c] for c in copies], "gap": gap, "cycles": cycles})
                first += peers
            longest = max(group["gap"] * group["cycles"] for group in orders)
            results = initiator.do(
                "batches_after_gaps", longest + 180, groups=orders, local="mem", remote=remote, length=LENGTH, count=ENTRIES
            )
            ended = [count["data"]["ended"] for count in relay.counts()]
        found, first = [], 0
        for group, result in zip(groups, results):
            found.append(judge(group, kind, result, sum(ended[first : first + group[1]]), full))
            first += group[1]
        return found


def name_of(group, kind: str) -> str:
    return f"R5: gap of {group[0]} s, closed by {group[3]}, {kind}"


def judge(group, kind: str, result: dict, ended: int, full: bool) -> Row:
    gap, peers, cycles, how = group
    times = sorted(result["seconds"])
    row = Row("R5", len(times), name_of(group, kind).partition(": ")[2])
    row.states = {"Completed": len(times) + peers - len(result["failed"])}
    row.first, row.latest = times[0], times[-1]
    p99 = times[len(times) * 99 // 100]
    row.measured = f"p99 {p99 * 1e3:.1f} ms, {ended} connections closed"
    row.expect(not result["failed"], f"{len(result['failed'])} failed: {result['failed'][:1]}")
    row.expect(len(times) == peers * cycles, f"{len(times)} of {peers * cycles} were measured")
    # A busy machine is slow in steps of a scheduler's slice, so a factor is not enough.
    limit = LIMITS[how] + 0.06 * (stretch() - 1)
    # Of few, the p99 is the latest of all, and one may have had to wait for a processor: then it is that one of ten.
    counts = p99 if full else times[max(0, len(times) - 1 - max(1, len(times) // 10))]
    row.expect(counts <= limit, f"p99 is {p99 * 1e3:.1f} ms, without a tenth of them {counts * 1e3:.1f} ms, and the limit is {limit * 1e3:.0f} ms")
    if gap > CLOSED_AFTER_MS / 1e3:
        row.expect(ended >= peers * min(cycles, 2), f"only {ended} connections were closed by the relay")
    return row
