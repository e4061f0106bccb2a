"""The relay that misbehaves on command (docs/relay.md), as tests and scripts use it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: An order is carried out at once; so long only on a machine that is very busy.
DEADLINE = 30.0


def program() -> Path:
    """The built program. scripts/test builds it before it runs these tests; otherwise cargo does so now."""
    folder = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    built = folder / "debug" / "tensorferry-relay"
    if not built.exists():
        command = ["cargo", "build", "--quiet", "--locked", "-p", "tensorferry-relay"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "CARGO_TARGET_DIR": str(folder)}, check=True, timeout=600)
    return built


class RelayError(Exception):
    """An order was not carried out; the text says why."""


class Relay:
    """`copies` relays before the engine whose segment name is `target`. Ends with `close`, or as a context."""

    def __init__(self, target: str, copies: int = 1, host: str = "127.0.0.1"):
        self.process = subprocess.Popen(
            [str(program()), target, "--copies", str(copies), "--host", host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.unread = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        addresses = self._answer()["ready"]
        #: What initiators open instead of the target: the name of each copy.
        self.names = [address["control"] for address in addresses]
        #: The data port of each copy, host:port.
        self.data = [address["data"] for address in addresses]

    @property
    def name(self) -> str:
        """The name of the first copy."""
        return self.names[0]

    # Orders. `copies` is a number or a list of numbers; None is all of them.

    def rule(self, **rule) -> None:
        """From now on bytes are treated like this; without arguments they pass. docs/relay.md lists what there is."""
        self.tell("rule", **rule)

    def accept(self, how: str, copies=None, port: str = "data") -> None:
        """From now on whoever connects meets this: pass, refuse, silent, never."""
        self.tell("accept", how=how, copies=copies, port=port)

    def idle(self, ms: int | None, how: str = "fin", copies=None, port: str = "data") -> None:
        """From now on connections end like this when nothing has moved for so long; None keeps them."""
        self.tell("idle", ms=ms, how=how, copies=copies, port=port)

    def kill(self, how: str, copies=None, port: str | None = None) -> None:
        """Ends what is open now: fin, rst, silence. Both ports, if none is named."""
        self.tell("kill", how=how, copies=copies, port=port)

    def retarget(self, target: str, copies=None) -> None:
        """From now on the copies stand before another engine."""
        self.tell("retarget", target=target, copies=copies)

    def counts(self) -> list[dict]:
        """What has happened, for each copy: {"control": {...}, "data": {"open", "total", "ended", ...}}."""
        return self.tell("counts")["counts"]

    def tell(self, what: str, **args) -> dict:
        line = json.dumps({"do": what, **args}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RelayError(f"{line.strip()}: {answer['error']}")
        return answer

    def _answer(self) -> dict:
        end = time.monotonic() + DEADLINE
        while b"\n" not in self.unread:
            left = end - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                raise RelayError(f"the relay did not answer within {DEADLINE} s")
            read = os.read(self.process.stdout.fileno(), 1 << 16)
            if not read:
                raise RelayError(f"the relay ended with code {self.process.wait()}")
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Ends it. Its connections are closed."""
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(timeout=DEADLINE)
        self.selector.close()
        self.process.stdout.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *failure) -> None:
        self.close()
