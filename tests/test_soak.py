"""scripts/soak finds what it looks for. That nothing is found otherwise is the stage `soak` of scripts/test."""

from __future__ import annotations

import json
import subprocess
import sys

from peers import OURS, ROOT, clean_environment, need


def test_spoilt_bytes_are_found(tmp_path):
    need(OURS)
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "scripts" / "soak"), "--minutes", "0.05", "--spoil", "--json", str(report)]
    ran = subprocess.run(command, env=clean_environment(OURS), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    summary = json.loads(report.read_text())
    assert summary["batches"]["completed"] > 0
    assert any("wrong" in problem for problem in summary["problems"]), summary["problems"]
    assert f"problem: {summary['problems'][0]}" in ran.stderr


def test_how_long_has_to_be_said():
    ran = subprocess.run([sys.executable, str(ROOT / "scripts" / "soak")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "--minutes" in ran.stderr
