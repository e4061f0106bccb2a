"""docs/metrics.md names what `stats()` has in Python, in both faces, and nothing else. (The engine's tests compare it with the Rust structs.)"""

from __future__ import annotations

import re

import pytest
import tensorferry
from face_kit import Two
from peers import ROOT, wait_until
from tensorferry.mooncake import TransferEngine

PAGE = (ROOT / "docs" / "metrics.md").read_text()


def rows(heading: str, head: str = "name") -> list[str]:
    """The first cells of the table with this head in a section of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n?)+)", section, re.M)
    return re.findall(r"^\| `(\w+)` \|", table[1], re.M)


COUNTERS = rows("Counters by peer")


@pytest.fixture
def two():
    pair = Two()
    yield pair
    pair.close()


def test_the_page_has_every_name_of_stats(two):
    two.segment.write(b"hello", two.at)
    with pytest.raises(tensorferry.Refused):
        two.segment.write(b"hello", 4096)
    stats = two.initiator.stats()
    assert list(stats) == COUNTERS + rows("Counters of the engine") + ["peers"]
    (peer,) = stats["peers"].values()
    fields = [name for name in rows("A peer", "field") if name not in ("name", "counters")]
    assert list(peer) == fields + COUNTERS
    assert peer["state"] in rows("A peer", "state")
    assert peer["lanes_known"] and peer["lanes"]
    for lane in peer["lanes"]:
        assert list(lane) == rows("A lane", "field")
        assert lane["state"] in rows("A lane", "state")
    assert list(peer["last_error"]) == rows("The last failure", "field")


def test_what_the_page_says_adds_up(two):
    for _ in range(3):
        two.segment.submit("write", [b"ab", b"cd"], [two.at, two.at + 2]).wait()
        two.segment.read(bytearray(4), two.at)
    with pytest.raises(tensorferry.Refused):
        two.segment.write(b"hello", 4096)
    stats = two.initiator.stats()
    for name in COUNTERS:
        assert stats[name] == sum(peer[name] for peer in stats["peers"].values()), name
    assert (stats["batches_submitted"], stats["batches_completed"], stats["batches_failed"]) == (7, 6, 1)
    assert (stats["requests_completed"], stats["requests_failed"]) == (9, 1)
    assert (stats["bytes_written"], stats["bytes_read"]) == (12, 12)

    def served():
        stats = two.target.stats()
        return stats["served_bytes_written"], stats["served_bytes_read"]

    # They are counted when the answer has left, which may have arrived by then.
    wait_until(lambda: served() == (12, 12), 10, "what was served is counted")
    assert two.target.stats()["peers"] == {}


def test_the_drop_in_has_what_the_page_says():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    try:
        added = [name for name in engine.stats() if name not in COUNTERS + rows("Counters of the engine") + ["peers"]]
        assert added == rows("What `tensorferry.mooncake` adds")
    finally:
        engine.close()
