"""A process of a check: obeys one JSON line per command, so that what goes wrong in it goes wrong there."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading


class ProcessError(Exception):
    """A command failed, or the process did not answer."""


class Process:
    """The commands are the functions of worker.py."""

    def __init__(self, program: str, env: dict[str, str]):
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, program, "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=env,
        )
        self.pid = self.process.pid
        self.replies: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.replies.put(json.loads(line))
        self.replies.put(None)

    def do(self, command: str, deadline: float = 120, **args):
        try:
            self.process.stdin.write((json.dumps({"do": command, "args": args}) + "\n").encode())
            self.process.stdin.flush()
            reply = self.replies.get(timeout=deadline)
        except BrokenPipeError:
            reply = None
        except queue.Empty:
            self.kill()
            raise ProcessError(f"{command} had no answer within {deadline:g} s") from None
        if reply is None:
            code = self.process.wait()
            raise ProcessError(f"the process died in {command} ({ending(code)}): {self.said()[-2000:]}")
        if "failure" in reply:
            raise ProcessError(f"{command}: {reply['failure']}")
        return reply["value"]

    def said(self) -> str:
        """What it wrote to standard error."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()

    def end(self, deadline: float = 20) -> str:
        """Lets it end as a program ends after its last line; how it ended."""
        self.process.stdin.close()
        try:
            return ending(self.process.wait(deadline))
        except subprocess.TimeoutExpired:
            self.kill()
            return f"it was still there {deadline:g} s after its last line"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *failure) -> None:
        self.kill()
        self.process.stdin.close()
        self.errors.close()


def ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def serve(commands) -> int:
    """The process's own side. What anybody else prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"value": getattr(commands, command["do"])(**command["args"])}
        except Exception as error:  # told to whoever asked
            reply = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
    return 0
