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


def test_every_cell_is_in_the_documentation():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from fault_matrix.cells import FAULTS
    finally:
        sys.path.pop(0)
    text = (ROOT / "docs" / "faults.md").read_text()
    missing = [fault.name for fault in FAULTS for op in ("READ", "WRITE", "batch of 1,000") if f"| {fault.name}, {op}, ours " not in text]
    assert not missing, missing
