"""The checks that were made, what became of each, and on what machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time


class Skip(Exception):
    """A check that cannot be made here, and why."""


class Failed(Exception):
    """A check that did not hold, and what was seen."""

    def __init__(self, why: str, numbers=None):
        super().__init__(why)
        self.numbers = numbers


def expect(holds: bool, why: str, numbers=None) -> None:
    if not holds:
        raise Failed(why, numbers)


class Report:
    """Makes checks one after the other, and prints a line for each."""

    def __init__(self, only: str = ""):
        self.only = only
        self.checks: list[dict] = []

    def check(self, name: str, body, *args, always: bool = False) -> None:
        """Makes one check, if it was asked for: `body` returns its numbers, or raises."""
        if not always and not name.startswith(self.only):
            return
        began = time.monotonic()
        result, why, numbers = "ok", None, None
        try:
            numbers = body(*args)
        except Skip as skip:
            result, why = "skipped", str(skip)
        except Failed as failed:
            result, why, numbers = "failed", str(failed), failed.numbers
        except Exception as error:  # a check that cannot be carried out has not held
            result, why = "failed", f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 3)
        self.checks.append({"name": name, "result": result, "why": why, "numbers": numbers, "seconds": seconds})
        said = why if why else shown(numbers)
        print(f"{result:8}{name}{': ' if said else ''}{said}", flush=True)

    def counts(self) -> dict[str, int]:
        results = [check["result"] for check in self.checks]
        return {result: results.count(result) for result in ("ok", "failed", "skipped")}

    def document(self, settings: dict) -> dict:
        return {"format": 1, "machine": machine(), "settings": settings, "counts": self.counts(), "checks": self.checks}


def shown(numbers) -> str:
    """Numbers on one line, as far as they fit there."""
    text = "" if numbers is None else json.dumps(numbers)
    return text if len(text) <= 150 else text[:147] + "..."


def machine() -> dict:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "processor": field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": field("/proc/meminfo", "MemTotal"),
        "packages": {name: version(name) for name in ("torch", "cupy", "cupy-cuda12x", "cupy-cuda13x") if version(name)},
        "gpus": query_smi("gpu", "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,uuid"),
    }


def field(path: str, key: str) -> str | None:
    try:
        with open(path) as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(key)), None)
    except OSError:
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def query_smi(what: str, fields: str) -> list[dict] | None:
    """What nvidia-smi says; None where there is none, or where it fails."""
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ran.returncode != 0:
        return None
    names = fields.split(",")
    return [dict(zip(names, (part.strip() for part in line.split(",")))) for line in ran.stdout.splitlines() if line.strip()]
