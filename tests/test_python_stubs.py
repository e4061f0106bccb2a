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

FACE = """
import array
import asyncio

import numpy as np
import tensorferry


class Tensor:
    def __dlpack__(self) -> object:
        return self

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


with tensorferry.Engine("h", ports=(15000, 16000), transfer_timeout="5s") as engine, engine.register(bytearray(8)) as lent:
    address: int = lent.addr
    segment: tensorferry.Segment = engine.open(engine.name)
    segment.write(np.zeros(3), segment.buffers()[0].addr, 8, timeout=1.5, on_full="refuse")
    segment.read((address, 8), address)
    segment.read(address, address, length=np.uint64(8))
    transfer = segment.submit("write", [b"x", bytes(5)], array.array("Q", [1, 2]))
    transfer = segment.submit("write", (Tensor(), Tensor()), (1, 2), [3, 4])
    transfer = segment.submit("read", np.zeros(3, dtype=np.uint64), [1, 2, 3], 4096, notify=tensorferry.Notification("a"))
    ended: bool = transfer.wait(5)
    places: list[int] = [place for place, error in transfer.failures() if error.retryable]
    segment.submit("move", [b"x"], [1])  # type: ignore[arg-type]
    segment.write("text", 5)  # type: ignore[arg-type]
    segment.write(b"x", 5, speed=1)  # type: ignore[call-arg]
    transfer.done = True  # type: ignore[misc]


async def main() -> None:
    await segment.write_async(b"x", 5)
    await asyncio.wait_for(transfer, 5)
    try:
        transfer.result()
    except tensorferry.TimedOut as error:
        peer: str | None = error.peer


asyncio.run(main())
"""


def test_programs_are_checked_against_them(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "face.py").write_text(FACE)
    run("mypy", "--strict", "--cache-dir", os.devnull, "uses.py", "face.py", cwd=tmp_path)
