"""R2: whatever happens to the peer or on the way, each entry ends once, rightly, and by its deadline."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from peers import wait_until
from relay import Relay

from .cells import Fault
from .ends import CANARY, NEW, HOLES, OLD, Initiator, Target
from .report import CODES, Row, kinds, stretch

DEADLINE_MS = 2000
#: A deadline is met so soon after it, in seconds. What is known before is told within `KNOWN`.
GRACE, KNOWN = 0.5, 1.0
#: How long a final state is waited for.
PATIENCE = 45.0
#: How soon the next transfer is complete when the fault has gone.
HEALED = 1.0
#: The released engine answers its control connections one after the other, and waits so long for each that is stuck.
SERIAL = 5.0
#: How many requests of 64 bytes one process of it serves in a second, at least: all repeats of a cell come to one process at
#: once, and what was sent before the fault was over comes first.
PEERS_RATE = 10_000
NEXT = 64_000
OPS = {"READ": ("read", 1), "WRITE": ("write", 1), "batch of 1,000": ("both", 1000)}


class Shared:
    """What cells share: a target of each kind behind all relays."""

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.targets: dict[str, tuple[Target, int]] = {}
        self.lock = threading.Lock()
        self.ports = iter(range(20_000, 32_000, 2))

    def target(self, kind: str) -> tuple[Target, int]:
        with self.lock:
            if kind not in self.targets:
                target = Target(kind)
                self.targets[kind] = target, target.open("main")
            return self.targets[kind]

    def pair_of_ports(self) -> tuple[int, int]:
        with self.lock:
            first = next(self.ports)
            return first, first + 1

    def close(self) -> None:
        for target, _ in self.targets.values():
            target.close()


@dataclass
class Scene:
    """A cell while it runs."""

    shared: Shared
    fault: Fault
    kind: str
    op: str
    count: int
    id: str
    #: The names of the peers, one for each repeat.
    names: list[str] = field(default_factory=list)
    #: Where the target's memory is: for the transfers that meet the fault, and for those after it.
    met: int = 0
    after: int = 0
    target: Target | None = None
    relay: Relay | None = None
    hole: str = ""
    ports: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    own: list = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.fault.size

    @property
    def rest(self) -> int:
        """A place for the next transfer with each peer."""
        return self.shared.repeats * NEXT

    def prepare(self) -> None:
        repeats, fault = self.shared.repeats, self.fault
        if fault.signal is None and not fault.hole:
            self.target, port = self._target()
            self._behind_relay(port)
            return
        self.target = Target(self.kind)
        self.own.append(self.target)
        engines = [f"e{i}" for i in range(repeats)]
        if fault.signal == signal.SIGKILL and self.kind == "peer":
            # It cannot be told which control port to come back on; the relay's name stays the same.
            self._behind_relay(self.target.open("main"))
            return
        host = "127.0.0.1"
        if fault.hole:
            self.hole = host = HOLES.address()
        for engine in engines:
            ports = self.shared.pair_of_ports()
            self.ports.append((self.target.open(engine, host, ports), ports))
        at = self.hole if fault.hole == "both" else "127.0.0.1"
        self.names = [f"{at}:{port}" for port, _ in self.ports]
        self.register(engines)

    def _target(self) -> tuple[Target, int]:
        if not self.is_serial:
            return self.shared.target(self.kind)
        target = Target(self.kind)
        self.own.append(target)
        return target, target.open("main")

    @property
    def is_serial(self) -> bool:
        """Connections that are stuck there hold up all others, so it is no other cell's target."""
        return self.kind == "peer" and self.fault.at_control

    def _behind_relay(self, port: int) -> None:
        self.register(["main"])
        self.relay = Relay(f"127.0.0.1:{port}", self.shared.repeats)
        self.own.append(self.relay)
        self.names = self.relay.names

    def register(self, engines: list[str]) -> None:
        self.met = self.target.memory(f"{self.id}: met", self.size, engines)
        self.after = self.target.memory(f"{self.id}: after", self.rest, engines)

    def first(self, name: str) -> dict:
        """The batch that meets the fault. All peers' are of the same memory, which holds what they bring."""
        length = self.size // self.count
        return {"peer": name, "op": self.op, "local": 0, "remote": self.met, "len": length, "count": self.count}

    def next(self, number: int, name: str) -> dict:
        """The batch after the fault."""
        op, at, length = "read" if self.op == "read" else "write", number * NEXT, NEXT // self.count
        return {"peer": name, "op": op, "local": self.size + at, "remote": self.after + at, "len": length, "count": self.count}

    def peers_time(self, repeats: int) -> float:
        """What a process of the released engine may take for a batch of each repeat."""
        return repeats * self.count / PEERS_RATE if self.kind == "peer" else 0.0

    def begin(self) -> None:
        for order in self.fault.orders:
            self.tell(order)
        if self.fault.signal is not None:
            os.kill(self.target.pid, self.fault.signal)
            if self.fault.signal == signal.SIGSTOP:
                wait_until(lambda: state_of(self.target.pid) in "Tt", 5, "the target is stopped")

    def tell(self, order: dict) -> None:
        self.relay.tell(order["do"], **{key: value for key, value in order.items() if key != "do"})

    def heal(self) -> None:
        fault = self.fault
        if fault.signal is None and not fault.hole:
            for order in fault.healing:
                self.tell(order)
        elif fault.hole:
            HOLES.heal(self.hole)
        elif fault.signal == signal.SIGSTOP:
            os.kill(self.target.pid, signal.SIGCONT)
        else:
            self._restart()

    def _restart(self) -> None:
        """The target again: other memory, the same names."""
        self.target.close()
        self.target = Target(self.kind)
        self.own.append(self.target)
        if self.relay:
            self.relay.retarget(f"127.0.0.1:{self.target.open('main')}")
            self.register(["main"])
            return
        engines = [f"e{i}" for i in range(len(self.ports))]
        for engine, (port, ports) in zip(engines, self.ports):
            self.target.reopen(engine, port, ports)
        self.register(engines)

    def close(self) -> None:
        for end in self.own:
            end.close()


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def run_cell(shared: Shared, fault: Fault, kind: str, op_name: str) -> Row:
    op, count = OPS[op_name]
    row = Row("R2", shared.repeats)
    scene = Scene(shared, fault, kind, op, count, id=f"{fault.name}, {op_name}")
    began = time.monotonic()
    try:
        scene.prepare()
        with Initiator(scene.size + scene.rest) as initiator:
            play(scene, initiator, row)
    finally:
        scene.close()
        row.seconds = time.monotonic() - began
    return row


def play(scene: Scene, initiator: Initiator, row: Row) -> None:
    initiator.do("fill", at=0, len=scene.size, seed=NEW)
    initiator.do("fill", at=scene.size, len=scene.rest, seed=NEW)
    first = [scene.first(name) for name in scene.names]
    submitted = len(first) * scene.count
    if scene.fault.warm:
        warm = [{**one, "op": "write", "len": 8, "count": 1} for one in first]
        submitted += len(warm)
        numbers = initiator.do("submit", batches=warm, timeout_ms=10_000)
        for outcome in initiator.do("outcome", batches=numbers, seconds=20):
            row.expect(outcome is not None and outcome["state"] == "Completed", f"before the fault: {outcome}")
    if not scene.fault.in_body:
        scene.begin()
    # What ends before its deadline is given more of it on a busy machine, so that it is not taken for late.
    more = 1 if scene.fault.silent else min(stretch() ** 2, 15)
    numbers = initiator.do("submit", batches=first, timeout_ms=int(DEADLINE_MS * more))
    if scene.fault.in_body:
        scene.begin()
    outcomes = initiator.do("outcome", batches=numbers, seconds=PATIENCE)
    # Whoever still writes or reads this memory is found out by the canary.
    initiator.do("fill", at=0, len=scene.size, seed=CANARY)
    judge(scene, row, outcomes)
    threading.Event().wait(scene.fault.lasts)
    scene.heal()
    submitted += recover(scene, initiator, row)
    again = initiator.do("outcome", batches=numbers, seconds=1)
    row.expect(again == outcomes, f"a final state has changed: {outcomes} became {again}")
    row.expect(initiator.do("differs", at=0, len=scene.size, seed=CANARY) is None, "local memory was written after the end")
    counters = initiator.do("stats")["counters"]
    settled = counters["requests_completed"] + counters["requests_failed"]
    row.expect(settled == submitted, f"{submitted} entries have come to {settled} ends")


def judge(scene: Scene, row: Row, outcomes: list[dict | None]) -> None:
    """Each of them ended once, in time, and for the right reason."""
    fault = scene.fault
    times = [outcome["seconds"] for outcome in outcomes if outcome]
    row.states = dict(Counter(outcome["state"] if outcome else "none" for outcome in outcomes))
    row.kinds = dict(sum((kinds(outcome["codes"]) for outcome in outcomes if outcome), Counter()))
    row.expect(len(times) == len(outcomes), f"some had no final state after {PATIENCE:.0f} s")
    if not times:
        return
    row.first, row.latest = min(times), max(times)
    limit = DEADLINE_MS / 1e3 + GRACE * stretch() if fault.silent else KNOWN * stretch() + scene.peers_time(len(outcomes))
    row.in_time(row.latest <= limit, f"the latest ended after {row.latest:.3f} s, and the limit is {limit:.1f} s")
    if fault.silent:
        first = min((outcome["seconds"] for outcome in outcomes if outcome and outcome["state"] != "Completed"), default=99.0)
        row.expect(first >= DEADLINE_MS / 1e3, f"the first ended before its deadline, after {first:.3f} s")
    allowed = fault.allowed(scene.op)
    failed = 0
    for outcome in filter(None, outcomes):
        seen = {int(code) for code in outcome["codes"]}
        ended = outcome["completed"] + sum(outcome["codes"].values())
        failed += outcome["state"] != "Completed"
        row.expect(outcome["undecided"] == 0 and ended == scene.count, f"{outcome['undecided']} entries have no clear end")
        row.expect(seen <= allowed, f"{sorted(CODES[c] for c in seen - allowed)}: {outcome['text']}")
        row.expect(outcome["vague"] is None, f"it does not say to whom or what: {outcome['vague']}")
        row.expect(fault.some_complete or not outcome["completed"], f"{outcome['completed']} entries completed")
    # A process is killed when it is, and some of its transfers may have been faster.
    row.in_time(fault.may_pass or 2 * failed > len(outcomes), "most transfers did not meet the fault")


def recover(scene: Scene, initiator: Initiator, row: Row) -> int:
    """The next transfer to each peer, with the same engine, is right and prompt; returns how many entries it had."""
    wanted = [scene.next(number, name) for number, name in enumerate(scene.names)]
    numbers = initiator.do("submit", batches=wanted, timeout_ms=15_000)
    outcomes = initiator.do("outcome", batches=numbers, seconds=20)
    bad = [outcome for outcome in outcomes if not outcome or outcome["state"] != "Completed"]
    row.expect(not bad, f"{len(bad)} of {len(outcomes)} next transfers failed: {bad and bad[0]}")
    times = [outcome["seconds"] for outcome in outcomes if outcome]
    if times:
        limit = HEALED * stretch() + SERIAL * scene.is_serial
        limit += scene.peers_time(len(wanted))
        row.measured = f"next one after {max(times):.3f} s"
        row.in_time(max(times) <= limit, f"the next transfer took {max(times):.3f} s, and the limit is {limit:.1f} s")
    if not bad:
        check_bytes(scene, initiator, row)
    return sum(one["count"] for one in wanted)


def check_bytes(scene: Scene, initiator: Initiator, row: Row) -> None:
    if scene.op == "read":
        wrong = initiator.do("differs", at=scene.size, len=scene.rest, seed=OLD)
    else:
        wrong = scene.target.do("check", name=f"{scene.id}: after", background=NEW)
    row.expect(not wrong, f"the next transfers brought other bytes: {wrong}")
    # A target that was started anew has other memory, which nobody has written to.
    seeds = [OLD] if scene.fault.signal == signal.SIGKILL else [OLD, NEW]
    strange = scene.target.do("strange_bytes", buffer=f"{scene.id}: met", seeds=seeds)
    row.expect(strange == 0, f"{strange} bytes of the target's are neither the old ones nor those of the WRITEs")
