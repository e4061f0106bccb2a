"""The faults of R2 as data: what happens, where, and which errors are the right ones."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

MIB = 1 << 20
#: `Error::code()`: no connection, a lost one, a WRITE that is in doubt, the deadline, a peer that talks nonsense.
UNREACHABLE, LOST, UNKNOWN, LATE, PROTOCOL, ANSWER = 7, 10, 11, 13, 16, 17


@dataclass(frozen=True)
class Fault:
    """Something that happens, to whom, and which errors are the right ones."""

    name: str
    #: Nothing tells the initiator, so that only the deadline ends it.
    silent: bool = True
    #: By operation, which codes may be seen. What both have is for batches.
    reads: frozenset[int] = frozenset({LATE})
    writes: frozenset[int] = frozenset({LATE})
    #: Some entries may be complete: those that were there before it happened.
    some_complete: bool = False
    #: It may be met, or be over before the transfer: what was idle for a while is replaced before it is used.
    may_pass: bool = False
    #: Orders to the relay that begin and end it.
    orders: tuple[dict, ...] = ()
    healing: tuple[dict, ...] = ({"do": "rule"}, {"do": "accept", "how": "pass"})
    #: Signals to the target process, before the transfer or in it.
    signal: int | None = None
    in_body: bool = False
    #: Which address swallows everything: that of the data port, or of both.
    hole: str = ""
    #: So long it goes on after the end of the transfers, in seconds: long enough for the kernel's next try to connect
    #: to be too late.
    lasts: float = 0.0
    #: Connections are made, and proved by a transfer, before it happens.
    warm: bool = False

    def allowed(self, op: str) -> frozenset[int]:
        return {"read": self.reads, "write": self.writes, "both": self.reads | self.writes}[op]

    @property
    def size(self) -> int:
        return 64 * MIB if self.in_body else MIB

    @property
    def at_control(self) -> bool:
        return any(order.get("port") == "control" for order in self.orders)


def told(name: str, reads: set[int], writes: set[int], **more) -> Fault:
    """A fault that the initiator is told of, so that it need not wait for its deadline."""
    return Fault(name, silent=False, reads=frozenset(reads), writes=frozenset(writes), **more)


def cut(end: str, way: str = "both", bytes: int = 50_000) -> tuple[dict, ...]:
    return ({"do": "rule", "way": way, "after": {"bytes": bytes, "end": end}},)


def accept(how: str) -> tuple[dict, ...]:
    return ({"do": "accept", "how": how},)


def at_control(fault: Fault) -> Fault:
    """The same orders for the port where descriptors are asked for."""

    def moved(orders: tuple[dict, ...]) -> tuple[dict, ...]:
        return tuple({**order, "port": "control"} for order in orders)

    return replace(fault, orders=moved(fault.orders), healing=moved(fault.healing))


def spoil(*at: int) -> tuple[dict, ...]:
    """All bits of these bytes of each answer are flipped."""
    return ({"do": "rule", "way": "to_initiator", "corrupt": {"at": at, "mask": 255}},)


ABSENT = {UNREACHABLE}
KILL = ({"do": "kill", "port": "data", "how": "silence"},)
WRITES_CUT = {UNKNOWN, LOST}

DATA = [
    Fault("blackholed data address", hole="data", lasts=1.5),
    Fault("data port never accepts", orders=accept("never"), lasts=1.5),
    Fault("data port accepts, then silence", orders=accept("silent")),
    Fault("silence in mid-body", orders=cut("silence"), some_complete=True),
    Fault("1 byte/s", orders=({"do": "rule", "rate": 1},)),
    Fault("SIGSTOP", signal=signal.SIGSTOP, warm=True),
    told(
        "SIGKILL in mid-body",
        {LOST, UNREACHABLE},
        {UNKNOWN, LOST, UNREACHABLE},
        signal=signal.SIGKILL,
        in_body=True,
        warm=True,
        some_complete=True,
    ),
    Fault("connections vanish", warm=True, orders=KILL, some_complete=True, may_pass=True),
    told("RST in mid-body", {LOST}, WRITES_CUT, orders=cut("rst"), some_complete=True),
    told("FIN in mid-body", {LOST}, WRITES_CUT, orders=cut("fin"), some_complete=True),
    told("half-close by the target", {LOST}, WRITES_CUT, orders=cut("half_close", "to_initiator", 4), some_complete=True),
    told("data port refuses", {UNREACHABLE, LOST}, {UNREACHABLE, LOST}, orders=accept("refuse")),
    told("garbage from the data port", {PROTOCOL}, {PROTOCOL}, orders=spoil(0, 5), some_complete=True),
]

CONTROL = [
    Fault("control port never accepts", orders=accept("never"), lasts=1.5),
    Fault("control port accepts, then silence", orders=accept("silent")),
    Fault("control port, 1 byte/s", orders=({"do": "rule", "rate": 1},)),
    Fault("control port stops in its answer", orders=cut("silence", "to_initiator", 100)),
    told("control port refuses", ABSENT, ABSENT, orders=accept("refuse")),
    told("RST in the control answer", ABSENT, ABSENT, orders=cut("rst", "to_initiator", 100)),
    told("FIN in the control answer", ABSENT, ABSENT, orders=cut("fin", "to_initiator", 100)),
    told("garbage from the control port", {ANSWER}, {ANSWER}, orders=spoil(9, 10, 11, 12)),
]

FAULTS = [*DATA, Fault("blackholed name", hole="both", lasts=1.5), *map(at_control, CONTROL)]
