"""Transfers in asyncio: each event loop has one eventfd, which threads of the engine write to."""

import asyncio
import os
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary, ref

from tensorferry._native import Transfer, Wakeups


class _Bridge:
    """Who waits in one loop, and for which ticket. The loop owns it: it is what the loop calls when the eventfd is readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wakeups = Wakeups(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.waiting: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self.wakeups.fileno(), self._wake)

    def _wake(self) -> None:
        for ticket in self.wakeups.take():
            future = self.waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)

    def wait(self, transfer: Transfer, loop: asyncio.AbstractEventLoop) -> Generator[Any, None, None]:
        """Returns when the transfer has ended."""
        ticket = self.wakeups.watch(transfer)
        if ticket is None:
            return
        future = self.waiting[ticket] = loop.create_future()
        try:
            yield from future
        finally:
            if self.waiting.pop(ticket, None) is not None:
                self.wakeups.forget(ticket)


# Futures know their loop: with a reference to the bridge, a loop that is left with transfers pending would never go.
_bridges: "WeakKeyDictionary[asyncio.AbstractEventLoop, ref[_Bridge]]" = WeakKeyDictionary()


def _bridge_of(loop: asyncio.AbstractEventLoop) -> _Bridge:
    known = _bridges.get(loop)
    bridge = known() if known is not None else None
    if bridge is None:
        bridge = _Bridge(loop)
        _bridges[loop] = ref(bridge)
    return bridge


def ended(transfer: Transfer) -> Generator[Any, None, None]:
    """What `await transfer` does: waits in the running loop, and raises why it failed.

    If the task is cancelled, so is the transfer, and the task goes on when the memory is left alone.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("a transfer is awaited in a running loop of asyncio only; elsewhere, call its wait() in a thread") from None
    bridge = _bridge_of(loop)
    try:
        yield from bridge.wait(transfer, loop)
    except GeneratorExit:
        # The coroutine is thrown away: nobody can wait.
        transfer._request_cancel()
        raise
    except asyncio.CancelledError:
        transfer._request_cancel()
        while not transfer.done:
            try:
                yield from bridge.wait(transfer, loop)
            except asyncio.CancelledError:
                # Asked again, while the first time is being done.
                pass
        raise
    transfer.result()
