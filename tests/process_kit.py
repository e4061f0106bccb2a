"""Programs that use the drop-in, each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

HEAD = """
import ctypes, gc, logging, os, signal, socket, sys, threading, time
from tensorferry.mooncake import TransferEngine, TransferOpcode, TransferNotify

def new():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, TransferEngine.last_error()
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"

def silent_peer():
    "A peer that accepts connections and says nothing."
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, "127.0.0.1:%d" % listener.getsockname()[1]

class Lines(logging.Handler):
    def __init__(self):
        super().__init__(1)
        self.lines = []
    def emit(self, record):
        self.lines.append((record.name, record.levelname, record.getMessage()))

def keep_log(level=1):
    handler = Lines()
    logging.getLogger("tensorferry").addHandler(handler)
    logging.getLogger("tensorferry").setLevel(level)
    logging.getLogger("tensorferry").propagate = False
    return handler.lines
"""


def run(code: str, *args: str, env: dict[str, str] | None = None, timeout: float = 60, python: tuple[str, ...] = ()):
    """Runs code in a fresh interpreter, with none of this process's settings of an engine."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k != "PYTHONPATH"}
    text = HEAD + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, *python, "-c", text, *args],
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def good(done: subprocess.CompletedProcess, stderr: str = "") -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == stderr
    return done.stdout


#: A batch of 1024 requests fills the queue to a peer.
FULL = 'assert engine.batch_transfer_async_write(peer, [addr] * 1024, [4096] * 1024, [1] * 1024)'
