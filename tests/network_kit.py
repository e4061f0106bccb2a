"""Networks of a test's own."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess

import pytest

_numbers = itertools.count()


@contextlib.contextmanager
def slow_loopback(rate: int):
    """How to run a program where the loopback device moves `rate` bytes per second: what to put before its command."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("skipped: a network namespace needs root, ip and tc (iproute2)")
    name = f"ferry-{os.getpid()}-{next(_numbers)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30)
    if made.returncode != 0:
        pytest.skip(f"skipped: this system makes no network namespaces ({made.stderr.strip()})")
    inside = ["ip", "netns", "exec", name]
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True, timeout=30)
        bucket = ["rate", f"{rate * 8}bit", "burst", "256kb", "latency", "20ms"]
        limited = subprocess.run(
            [*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket], capture_output=True, text=True, timeout=30
        )
        if limited.returncode != 0:
            pytest.skip(f"skipped: the kernel has no token bucket ({limited.stderr.strip()})")
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True, timeout=30)
