"""The type stubs say what is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("mypy", reason="mypy is not installed; scripts/test installs it")


def run(*args: str, cwd) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run([sys.executable, "-m", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_agree_with_the_module(tmp_path):
    run("mypy.stubtest", "tensorferry", "--mypy-config-file", os.devnull, cwd=tmp_path)


USES = """
import array
from tensorferry.mooncake import Read, TransferEngine, TransferNotify, TransferOpcode

engine = TransferEngine()
code: int = engine.initialize("h", "P2PHANDSHAKE", b"tcp", "")
code = engine.batch_transfer_sync_write("h:1", [1], (2,), array.array("Q", [3]))
code = engine.batch_transfer_sync("h:1", [1], [2], [3], TransferEngine.TransferOpcode.Write, TransferNotify("a", "b"))
text: str | None = TransferEngine.last_error()
data: bytes = engine.read_bytes_from_buffer(1, 2)
number: int = int(Read) + TransferOpcode.Write.value
messages: list[TransferNotify] = engine.get_notifies()
engine.transfer_sync_write("h:1", 1.5, 2, 3)  # type: ignore[arg-type]
engine.transfer_sync("h:1", 1, 2, 3, 1)  # type: ignore[arg-type]
engine.batch_unregister_memory(["x"])  # type: ignore[list-item]
engine.unregister_memory(addr=5)  # type: ignore[call-arg]
"""


def test_programs_are_checked_against_them(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    run("mypy", "--strict", "--cache-dir", os.devnull, "uses.py", cwd=tmp_path)
