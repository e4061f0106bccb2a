"""The benchmark: with an engine at the other end that knows nothing of it, and against what the kernel counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
from peers import OURS, PEER, EngineProcess, clean_environment, need

TIMEOUT = 300
SVG = "{http://www.w3.org/2000/svg}"


def initiator(target: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tensorferry", "bench", "initiator", target, "--json", *args]
    return subprocess.run(command, env=clean_environment(OURS), capture_output=True, text=True, timeout=TIMEOUT)


def test_a_mooncake_target_is_measured_if_its_memory_may_be_overwritten(tmp_path: Path):
    need(OURS)
    with EngineProcess(PEER) as target:
        name = target.open()
        target.alloc("mem", 8 << 20, register=True)
        sizes = ["--seconds", "0.3", "--sizes", "4095,64KiB,1MiB", "--batches", "1,4"]

        refused = initiator(name, *sizes)
        assert refused.returncode == 1, refused.stdout
        assert f"{name} is no `tensorferry bench target`" in refused.stderr
        assert "add --overwrite" in refused.stderr

        chart = tmp_path / "chart.svg"
        done = initiator(name, *sizes, "--overwrite", "--threads", "2", "--svg", str(chart))
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["verified"] and document["complete"] and document["error"] is None
        assert document["target"]["kind"] == "foreign" and document["target"]["memory_bytes"] == 8 << 20
        assert document["target"]["memory"] is None and document["target"]["machine"] is None
        assert len(document["rows"]) == 12
        for row in document["rows"]:
            assert row["verified"] and row["verified_bytes"] == row["moved_bytes"] > row["measured_bytes"] > 0, row
            assert row["target_cpu_seconds"] is None and row["cpu_seconds_per_gigabyte"] is None, row
            assert row["initiator_cpu_seconds"] > 0 and row["plain_sockets"] is None, row
        assert target.alive()

    drawn = xml.etree.ElementTree.parse(chart).getroot()
    assert drawn.tag == f"{SVG}svg"
    texts = {(text.text or "").strip() for text in drawn.iter(f"{SVG}text")}
    for expected in ("WRITE", "READ", "WRITE, batches of 4", "READ, batches of 4 p99", "GB/s", "µs", "64 KiB", "block size"):
        assert expected in texts, texts
    assert any(text.startswith(f"tensorferry {document['version']} on ") for text in texts), texts
    assert list(drawn.iter(f"{SVG}polyline")), "there are no lines"


#: Runs in a namespace of its own, where nobody else moves anything: a target, and initiators one after the other.
COUNTING = """
import json, os, signal, subprocess, sys

subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
program = [sys.executable, "-m", "tensorferry", "bench"]

def counted():
    for line in open("/proc/net/dev"):
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])

target = subprocess.Popen([*program, "target", "--size", "32MiB", "--json"], stdout=subprocess.PIPE, text=True)
try:
    name = json.loads(target.stdout.readline())["segment"]
    found = []
    for args in json.loads(sys.argv[1]):
        before = counted()
        ran = subprocess.run([*program, "initiator", name, "--json", *args], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        found.append([json.loads(ran.stdout), counted() - before])
    print(json.dumps(found))
finally:
    target.send_signal(signal.SIGINT)
    target.wait(30)
"""


@pytest.fixture
def namespace() -> list[str]:
    """What has to stand before a command for it to run in a network namespace of its own."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("skipped: a network namespace needs unshare and ip (iproute2)")
    prefix = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        pytest.skip(f"skipped: this system makes no network namespaces ({tried.stderr.strip()})")
    return prefix


def test_no_byte_is_reported_that_the_kernel_has_not_counted(namespace: list[str]):
    need(OURS)
    runs = [
        ["--no-sockets", "--seconds", "0.3", "--sizes", size, "--batches", batches, "--op", op, *more]
        for size, batches in (("4KiB", "1"), ("64KiB", "16"), ("1MiB", "4"), ("8MiB", "1"))
        for op in ("write", "read")
        for more in ([], ["--no-verify", "--threads", "2"])
    ]
    ran = subprocess.run(
        [*namespace, sys.executable, "-c", COUNTING, json.dumps(runs)],
        env=clean_environment(OURS),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert ran.returncode == 0, ran.stderr
    for document, counted in json.loads(ran.stdout):
        (row,) = document["rows"]
        assert row["gigabytes_per_second"] * row["measured_seconds"] * 1e9 == pytest.approx(row["measured_bytes"])
        assert 0 < row["measured_bytes"] <= row["moved_bytes"] <= counted, (row, counted)
        assert row["measured_seconds"] <= document["wall_seconds"]
        if row["block_bytes"] >= 1 << 20:
            # Besides, there are headers, acknowledgements and orders; all that is moved is in the report.
            assert counted <= row["moved_bytes"] * 1.02, (row, counted)
