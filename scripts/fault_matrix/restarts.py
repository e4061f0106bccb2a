"""R7: a peer that was killed and is back is met at once, and nothing reaches it by what was known of the old one."""

from __future__ import annotations

from contextlib import ExitStack

from peers import wait_until
from relay import Relay

from .ends import NEW, OLD, Target
from .report import Row, stretch

LENGTH = 64 << 10
#: How soon a peer is usable, in seconds after it has come up.
USABLE = 1.0
#: Where engines listen whose port has to stay the same; in the script's own network nobody else takes them.
PORTS = iter(range(19_000, 20_000, 2))


class Name:
    """A name that stays the same while processes behind it come and go."""

    def __init__(self, kind: str, ends: ExitStack):
        self.kind, self.ends = kind, ends
        self.relay: Relay | None = None
        first = next(PORTS)
        self.port, self.ports = 0, (first, first + 1)
        self.target: Target | None = None

    def start(self) -> tuple[str, int]:
        """A new process, with memory of its own; returns the name and the memory's address."""
        target = self.target = self.ends.enter_context(Target(self.kind))
        if self.kind == "ours":
            if self.port:
                target.reopen("main", self.port, self.ports)
            else:
                self.port = target.open("main", ports=self.ports)
            name = f"127.0.0.1:{self.port}"
        else:
            # Which of two ports it takes for control cannot be told, so the relay's port stands for it.
            own = f"127.0.0.1:{target.open('main')}"
            if self.relay is None:
                self.relay = self.ends.enter_context(Relay(own))
            else:
                self.relay.retarget(own)
            name = self.relay.name
        return name, target.memory("mem", LENGTH, ["main"])


def restarts(full: bool, kind: str) -> Row:
    times = 50 if full else 5
    row = Row("R7", times)
    with ExitStack() as ends:
        initiator = ends.enter_context(Target("ours"))
        initiator.open("main")
        initiator.do("alloc", name="mem", size=LENGTH)
        initiator.do("fill", name="mem", seed=NEW)
        name = Name(kind, ends)
        peer, address = name.start()
        write(initiator, peer, address)
        before = initiator.do("usage")["fds"]
        slowest, landed, failures = 0.0, 0, set()
        for _ in range(times):
            initiator.do("write_until_stopped", target=peer, local="mem", remote=address, length=LENGTH)
            name.target.close()
            old = address
            peer, address = name.start()
            # The writer goes on with the old address meanwhile, and meets the new process with it.
            initiator.do("rest", seconds=0.05)
            failures |= set(initiator.do("stop_writing")) - {"done"}
            if address != old:
                landed += name.target.do("strange_bytes", buffer="mem", seeds=[OLD])
            initiator.do("write_until_stopped", target=peer, local="mem", remote=old, length=LENGTH)
            again = write(initiator, peer, address)
            initiator.do("stop_writing")
            row.expect(again["seconds"] is not None, f"never usable again: {again['text']}")
            slowest = max(slowest, again["seconds"] or 99.0)
            wrong = name.target.do("check", name="mem", background=NEW)
            row.expect(not wrong, f"after the restart: {wrong}")
        name.target.close()
        leaked = leaks(initiator, before)
    row.states = {"usable again": times}
    row.first, row.latest = 0.0, slowest
    row.measured = f"{landed} bytes by an old handle, {leaked} sockets left"
    limit = USABLE * stretch()
    row.in_time(slowest <= limit, f"usable {slowest:.3f} s after it was up again, and the limit is {limit:.1f} s")
    row.expect(landed == 0, f"{landed} bytes were written by what was known of the old process")
    row.expect(leaked <= 0, f"{leaked} descriptors more than at the start")
    row.expect(all(text.startswith("WRITE of") for text in failures), f"failures that do not say of what: {failures}")
    return row


def write(initiator: Target, peer: str, address: int) -> dict:
    return initiator.do("write_until_done", 60, target=peer, local="mem", remote=address, length=LENGTH, seconds=30)


def leaks(initiator: Target, before: int) -> int:
    """How many descriptors there are more than before, when the peer is gone and its connections with it."""
    try:
        wait_until(lambda: initiator.do("usage")["fds"] <= before, 5, "descriptors are given back")
    except AssertionError:
        pass
    return initiator.do("usage")["fds"] - before


def first_contact(kind: str) -> Row:
    """A peer that is asked for before it is up."""
    row = Row("R7", 1)
    with ExitStack() as ends:
        initiator = ends.enter_context(Target("ours"))
        initiator.open("main")
        initiator.do("alloc", name="mem", size=LENGTH)
        initiator.do("fill", name="mem", seed=NEW)
        name = Name(kind, ends)
        peer, address = name.start()
        if kind == "ours":
            name.target.close()
        else:
            for port in ("control", "data"):
                name.relay.accept("refuse", port=port)
        initiator.do("write_until_stopped", target=peer, local="mem", remote=address, length=LENGTH)
        initiator.do("rest", seconds=1.5)
        if kind == "ours":
            peer, address = name.start()
        else:
            for port in ("control", "data"):
                name.relay.accept("pass", port=port)
        first = write(initiator, peer, address)
        texts = initiator.do("stop_writing")
    row.latest = row.first = first["seconds"]
    row.states = {"usable": int(first["seconds"] is not None)}
    row.measured = f"asked {sum(texts.values())} times before"
    limit = USABLE * stretch()
    row.expect(first["seconds"] is not None, f"{first}")
    row.in_time((first["seconds"] or 0.0) <= limit, f"{first}, and the limit is {limit:.1f} s")
    return row
