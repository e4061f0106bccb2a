"""R2, as users of `tensorferry.mooncake` meet it: no call says how long it may take, and each ends all the same."""

from __future__ import annotations

from pathlib import Path

from peers import ROOT
from relay import Relay

from .ends import OLD, Target
from .matrix import GRACE
from .report import Row, stretch

LENGTH, COUNT = 64, 1000
SETTINGS = ROOT / "docs" / "settings.md"
#: What docs/settings.md says of the default.
DOCUMENTED = "| `TENSORFERRY_TRANSFER_TIMEOUT` | time | 30 s |"


def no_limit_given(full: bool, kind: str) -> Row:
    """Every form of a transfer, to a peer that is silent; with the default limit, or, to be quick, one from the environment."""
    limit, env = (30.0, {}) if full else (2.0, {"TENSORFERRY_TRANSFER_TIMEOUT": "2s"})
    row = Row("R2", 4, measured=f"a limit of {limit:.0f} s holds")
    with Target(kind) as target, Target("ours", env) as initiator:
        port = target.open("main")
        remote = target.memory("mem", LENGTH * COUNT, ["main"])
        initiator.open("main")
        local = initiator.do("alloc", name="mem", size=LENGTH * COUNT)
        initiator.do("fill", name="mem", seed=OLD)
        lists = [[base + n * LENGTH for n in range(COUNT)] for base in (local, remote)] + [[LENGTH] * COUNT]
        with Relay(f"127.0.0.1:{port}") as relay:
            relay.accept("silent")
            batch, error = initiator.te("batch_transfer_async_write", relay.name, *lists, engine="main")
            row.expect(batch != 0, f"the asynchronous call said {error}")
            calls = {
                "get_batch_transfer_status": [[batch]],
                "transfer_sync_write": [relay.name, local, remote, LENGTH],
                "transfer_sync_read": [relay.name, local, remote, LENGTH],
                "batch_transfer_sync_read": [relay.name, *lists],
            }
            for method, args in calls.items():
                initiator.process.start_te(method, method, *args)
            ends = {method: initiator.process.join(method, limit + 20) for method in calls}
    times = [end["seconds"] for end in ends.values()]
    row.states = {"-1": sum(end["value"] == -1 for end in ends.values())}
    row.first, row.latest = min(times), max(times)
    row.expect(row.states["-1"] == len(calls), f"{ends}")
    row.in_time(row.latest <= limit + GRACE * stretch(), f"a call took {row.latest:.3f} s")
    # The asynchronous one was started before it was waited for.
    row.expect(row.first >= limit - 0.5 * stretch(), f"a call ended after {row.first:.3f} s")
    for method, end in ends.items():
        named = relay.name in (end["error"] or "") and f"of {LENGTH} bytes" in (end["error"] or "")
        row.expect(named and "not complete at its deadline" in end["error"], f"{method}: {end['error']}")
    row.expect(DOCUMENTED in Path(SETTINGS).read_text(), "docs/settings.md does not say what the default is")
    return row
