"""R8: after a cancel nothing touches the source; after `unregister_memory` nothing touches the destination."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from peers import wait_until

from .ends import CANARY, NEW, OLD, Initiator, Target
from .report import Row, kinds, stretch

LENGTH = 32 << 20
SLOTS = 4
#: How long a cancel, and the revocation of memory that is in use, may take, in seconds.
CANCEL, REVOKE = 0.1, 1.0
SEED = 20


class Slot:
    """Memory at both ends for one transfer at a time, and what is known of it."""

    def __init__(self, number: int, target: Target, initiator: Initiator, name: str):
        self.number, self.target, self.initiator, self.name = number, target, initiator, name
        self.buffer, self.local = f"slot {number}", number * LENGTH
        self.remote = target.memory(self.buffer, LENGTH, ["main"])
        self.registered = True
        self.late = 0

    def cancel(self, after_us: int) -> dict:
        """A WRITE that is cancelled; its source cannot be touched by anybody when this returns."""
        wanted = {"peer": self.name, "op": "write", "local": self.local, "remote": self.remote, "len": LENGTH, "count": 1}
        return self.initiator.do("cancel", batch=wanted, after_us=after_us)

    def revoke(self) -> float:
        """Takes the destination back, and makes it the receiver's own again; returns how long that took."""
        call = self.target.do("te", method="unregister_memory", args=[self.remote], kwargs={}, engine="main")
        assert call["value"] == 0, call
        self.registered = False
        self.target.do("fill", name=self.buffer, seed=CANARY)
        return call["seconds"]

    def renew(self) -> None:
        """Looks at what has come since, and lets the next transfer in."""
        if not self.registered:
            self.late += bool(self.target.do("check", name=self.buffer, background=CANARY))
            code, error = self.target.te("register_memory", self.remote, LENGTH, engine="main")
            assert code == 0, error
            self.registered = True
        self.initiator.do("protect", at=self.local, len=LENGTH, open=True)


def cancels(full: bool, kind: str) -> Row:
    """The released engine writes on after its unregister, so with it only our own end is looked at."""
    count = 1000 if full else 100
    row = Row("R8", count)
    dice = random.Random(SEED)
    moments = [dice.randrange(0, 40_000) for _ in range(count)]
    took, revoked, outcomes = [], [0.0], []
    with Target(kind) as target, Initiator(SLOTS * LENGTH) as initiator:
        name = f"127.0.0.1:{target.open('main')}"
        initiator.do("fill", at=0, len=SLOTS * LENGTH, seed=NEW)
        slots = [Slot(number, target, initiator, name) for number in range(SLOTS)]

        def play(slot: Slot) -> None:
            for after_us in moments[slot.number :: SLOTS]:
                slot.renew()
                outcome = slot.cancel(after_us)
                outcomes.append(outcome)
                took.append(outcome["seconds"])
                if kind == "ours":
                    revoked.append(slot.revoke())

        with ThreadPoolExecutor(SLOTS) as pool:
            list(pool.map(play, slots))
        for slot in slots:
            slot.renew()
        late = sum(slot.late for slot in slots)
        alive = initiator.process.poll() is None
    row.states = dict(Counter(outcome["state"] for outcome in outcomes))
    row.kinds = dict(sum((kinds({outcome["code"]: 1}) for outcome in outcomes if outcome["code"]), Counter()))
    row.first, row.latest = min(took), max(took)
    row.measured = f"unregister at most {max(revoked):.3f} s, {late} destinations changed after it, source untouched"
    row.expect(alive and len(outcomes) == count, f"the initiator died after {len(outcomes)} cancels")
    slowest = sorted(took)[len(took) * 97 // 100] if stretch() > 1 else max(took)
    row.in_time(slowest <= CANCEL * stretch(), f"a cancel took {slowest:.3f} s")
    row.in_time(max(took) <= REVOKE * stretch(), f"a cancel took {max(took):.3f} s")
    row.expect(late == 0, f"{late} destinations were written after the receiver's unregister")
    row.in_time(max(revoked) <= REVOKE * stretch(), f"unregister took {max(revoked):.3f} s")
    row.in_time(row.states.get("Cancelled", 0) >= count // 4, f"too few were still running: {row.states}")
    return row


def has_begun(op: str, target: Target, initiator: Initiator, length: int) -> bool:
    if op == "write":
        return bool(target.do("check", name="mem", background=OLD, start=0, length=64))
    return any(initiator.do("differs", at=n * length, len=64, seed=NEW) is not None for n in range(8))


def revoke_in_use(op: str) -> Row:
    """The receiver takes its memory back while eight transfers of it run."""
    row = Row("R8", 8)
    length = 64 << 20
    with Target("ours") as target, Initiator(8 * length) as initiator:
        name = f"127.0.0.1:{target.open('main')}"
        remote = target.memory("mem", length, ["main"])
        initiator.do("fill", at=0, len=8 * length, seed=NEW)
        one = {"peer": name, "op": op, "remote": remote, "len": length, "count": 1}
        numbers = initiator.do("submit", batches=[{**one, "local": n * length} for n in range(8)], timeout_ms=20_000)
        wait_until(lambda: has_begun(op, target, initiator, length), 10, "the first bytes have moved")
        call = target.do("te", method="unregister_memory", args=[remote], kwargs={}, engine="main")
        target.do("fill", name="mem", seed=CANARY)
        outcomes = initiator.do("outcome", batches=numbers, seconds=30)
        threading.Event().wait(0.2)
        late = target.do("check", name="mem", background=CANARY)
    row.states = dict(Counter(outcome["state"] for outcome in outcomes if outcome))
    row.kinds = dict(sum((kinds(outcome["codes"]) for outcome in outcomes if outcome), Counter()))
    row.first = row.latest = call["seconds"]
    row.measured = f"destination {'changed' if late else 'untouched'} after it"
    row.expect(call["value"] == 0, f"unregister: {call}")
    row.in_time(call["seconds"] <= REVOKE * stretch(), f"unregister took {call['seconds']:.3f} s")
    row.expect(not late, f"written after unregister had returned: {late}")
    row.expect(None not in outcomes, "some had no final state after 30 s")
    row.in_time(row.states.get("Completed", 0) < 8, "it was too late for all of them")
    return row
