"""What the tests of the pythonic face share: engines of this process, and peers that say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap

import tensorferry

SIZE = 1 << 20


class Two:
    """Two engines of this process, which talk over TCP: `segment` is what the initiator knows of the target's `memory`."""

    def __init__(self):
        self.target = tensorferry.Engine()
        self.initiator = tensorferry.Engine()
        self.memory = bytearray(SIZE)
        self.registration = self.target.register(self.memory)
        self.at = self.registration.addr
        self.segment = self.initiator.open(self.target.name)

    def close(self):
        self.initiator.close()
        self.target.close()


@contextlib.contextmanager
def silent_peer():
    """The name of a peer that takes connections and says nothing, so that transfers to it run until their deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield "127.0.0.1:%d" % listener.getsockname()[1]


HEAD = """
import asyncio, ctypes, gc, os, signal, socket, sys, threading, time, weakref
import tensorferry

def silent_peer():
    "A peer that accepts connections and says nothing."
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, "127.0.0.1:%d" % listener.getsockname()[1]

def two():
    target, initiator = tensorferry.Engine(), tensorferry.Engine()
    memory = bytearray(1 << 20)
    at = target.register(memory).addr
    return target, initiator, memory, at, initiator.open(target.name)
"""


def run(code: str, *args: str, env: dict[str, str] | None = None, timeout: float = 60, returncode: int = 0) -> str:
    """Runs code in a fresh interpreter, with none of this process's settings; what it prints. It must say nothing else."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code), *args],
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout
