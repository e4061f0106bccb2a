"""Faults at every place of a transfer: `scripts/faults` with few repeats, one test for each of its sections."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from peers import OURS, ROOT, STAND_IN, need

pytestmark = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine is not held to this")

#: For each section, how many cells there are at least with our engine at the other end.
SECTIONS = {"R2": 60, "R5": 9, "R6": 2, "R7": 2, "R8": 3, "R13": 1}
#: Seconds that a section takes at most; what hangs is found out by this.
LIMIT = 600


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "faults"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.parametrize("section", SECTIONS)
def test_no_fault_leaves_more_than_it_must(section, tmp_path):
    need(OURS)
    report = tmp_path / "report.json"
    done = run("--only", f"{section}:", "--json", str(report))
    if "needs a network namespace" in done.stderr:
        pytest.skip(f"skipped: {done.stderr.strip()}")
    print(done.stdout)
    assert report.exists(), done.stderr
    rows = json.loads(report.read_text())
    bad = [f"{row['cell']}: {why}" for row in rows for why in row["wrong"]]
    assert not bad, "\n".join(bad)
    assert done.returncode == 0, done.stderr
    ours = [row for row in rows if not row["cell"].endswith("peer")]
    assert len(ours) >= SECTIONS[section], [row["cell"] for row in rows]
    assert {row["verdict"] for row in rows} == {"ok"}


def test_a_cell_that_does_not_exist_is_an_error():
    done = run("--only", "no such cell")
    if "needs a network namespace" in done.stderr:
        pytest.skip(f"skipped: {done.stderr.strip()}")
    assert done.returncode == 2 and "no cell" in done.stderr, done


@pytest.mark.parametrize("seen, tries, verdict, again", [
    ([""], 3, "ok", 0), (["late", ""], 3, "ok", 1), (["late", "late", "late"], 3, "FAILED", 2),
    (["late", "wrong"], 3, "FAILED", 1), (["wrong"], 3, "FAILED", 0), (["late and wrong"], 3, "FAILED", 0), (["late"], 1, "FAILED", 0),
])
def test_a_cell_is_tried_again_if_only_a_time_was_wrong_and_says_so(seen, tries, verdict, again, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from fault_matrix.main import in_its_time
    from fault_matrix.report import Row

    left = iter(seen)

    def body() -> Row:
        what, row = next(left), Row("R2", 1)
        row.in_time("late" not in what, "a call took long")
        row.expect("wrong" not in what, "wrong bytes")
        return row

    row = in_its_time(body, tries)
    assert (row.verdict, row.measured.count("a call took long"), next(left, None)) == (verdict, again, None)


def test_every_cell_is_in_the_documentation():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from fault_matrix.cells import FAULTS
    finally:
        sys.path.pop(0)
    text = (ROOT / "docs" / "faults.md").read_text()
    missing = [fault.name for fault in FAULTS for op in ("READ", "WRITE", "batch of 1,000") if f"| {fault.name}, {op}, ours " not in text]
    assert not missing, missing
