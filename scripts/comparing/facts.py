"""The machine and the sources: what a figure is worth nothing without."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

from comparing.contenders import ROOT


def machine() -> dict:
    return {
        "cpu": field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cache_bytes": largest_cache(),
        "memory_bytes": int((field("/proc/meminfo", "MemTotal") or "0").split()[0]) << 10,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": os.getloadavg(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
    }


def read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def field(path: str, name: str) -> str | None:
    for line in (read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def largest_cache() -> int | None:
    """Of the first core; 0 where the kernel does not say."""
    units = {"K": 10, "M": 20}
    sizes = [read(str(path)) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << units[size[-1]] for size in sizes if size and size[-1] in units), default=0)


def commit() -> str:
    """Of the tree that this script is in; `+` where files differ from it."""

    def git(*args: str) -> str | None:
        try:
            ran = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        except OSError:
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
