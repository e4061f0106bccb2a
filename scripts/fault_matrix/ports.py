"""R6: connections are reused and bounded, so that neither ports nor descriptors run out."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack

from peers import wait_until
from raw import READ, V2, DataClient, descriptor, header

from .ends import OLD, Target
from .report import Row, stretch

LANES, PEERS, THREADS, LENGTH = 4, 2, 32, 4096
RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
ESTABLISHED, TIME_WAIT = "01", "06"
FILES, CLIENTS = 64, 200
#: How long the receiver's processor time is looked at while clients wait, and how much of a processor it may take.
WATCHED, BUSY = 2.0, 0.2


def sockets() -> Counter:
    """How many sockets of the network namespace are in each state."""
    states: Counter = Counter()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(path) as file:
            next(file)
            states.update(line.split()[3] for line in file)
    return states


class Samples:
    """Looks at all sockets every 10 ms, and a last time at the end."""

    def __init__(self):
        self.most = self.count = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        last = False
        while not last:
            last = self.stop.wait(0.01)
            self.most = max(self.most, sockets()[ESTABLISHED])
            self.count += 1

    def __enter__(self) -> Samples:
        self.thread.start()
        return self

    def __exit__(self, *failure) -> None:
        self.stop.set()
        self.thread.join()


def few_ports(kind: str) -> Row:
    """Many transfers where only a hundred connections can be made."""
    count = 20_000
    row = Row("R6", count)
    with open(RANGE) as file:
        before = file.read()
    with ExitStack() as ends:
        targets = [ends.enter_context(Target(kind)) for _ in range(PEERS)]
        names = [f"127.0.0.1:{target.open('main')}" for target in targets]
        addresses = [target.memory("mem", THREADS * LENGTH, ["main"]) for target in targets]
        initiator = ends.enter_context(Target("ours"))
        initiator.open("main")
        initiator.do("alloc", name="mem", size=THREADS * LENGTH)
        initiator.do("fill", name="mem", seed=OLD)
        set_range("40000 40099")
        ends.callback(set_range, before)
        waiting = sockets()[TIME_WAIT]
        with Samples() as samples:
            result = initiator.do(
                "transfers_from_threads",
                300,
                targets=list(zip(names, addresses)),
                local="mem",
                length=LENGTH,
                threads=THREADS,
                each=count // THREADS,
            )
        waiting = sockets()[TIME_WAIT] - waiting
    most = 2 * LANES * PEERS + 4
    row.states = {"Completed": count - result["failed"]}
    row.measured = f"at most {samples.most} sockets established (limit {most}) in {samples.count} samples, {waiting} in TIME_WAIT"
    row.expect(result["failed"] == 0, f"{result['failed']} transfers failed: {result['texts']}")
    row.expect(samples.most <= most and samples.count > 0, row.measured)
    row.expect(waiting < 10, row.measured)
    return row


def set_range(ports: str) -> None:
    with open(RANGE, "w") as file:
        file.write(ports)


def few_files() -> Row:
    """More clients than the receiver may have descriptors: those it has no room for wait, and it is at rest."""
    row = Row("R6", CLIENTS)
    with ExitStack() as ends:
        target = ends.enter_context(Target("ours"))
        control = target.open("main")
        address = target.memory("mem", LENGTH, ["main"])
        data = descriptor("127.0.0.1", control)["tcp_data_port"]
        before = descriptors(target)
        target.do("limit_files", count=FILES)
        clients = [DataClient("127.0.0.1", data, 30) for _ in range(CLIENTS)]
        for client in clients:
            ends.callback(client.sock.close)
            client.send(header(READ | V2, address, 8))
        served = settled(clients)
        began, cpu = time.monotonic(), processor_time(target)
        threading.Event().wait(WATCHED)
        busy = (processor_time(target) - cpu) / (time.monotonic() - began)
        late = [client for client in clients if client not in served]
        left = time.monotonic()
        for client in served:
            client.sock.close()
        answered = serve_all(late)
        resumed = time.monotonic() - left
        wait_until(lambda: descriptors(target) <= before, 10, "the descriptors of those who have left are given back")
        row.measured = f"all served {resumed:.2f} s after the first had left; {busy:.0%} of a processor meanwhile"
    row.states = {"served at once": len(served), "waited": len(late)}
    row.expect(FILES // 4 <= len(served) <= FILES, f"{len(served)} were served with {FILES} descriptors")
    row.expect(answered == len(late), f"{answered} of {len(late)} that had waited were served in the end")
    row.in_time(busy < BUSY, f"the receiver took {busy:.0%} of a processor while clients waited")
    row.in_time(resumed < 5 * stretch(), f"service was back after {resumed:.2f} s")
    return row


def descriptors(target: Target) -> int:
    return len(os.listdir(f"/proc/{target.pid}/fd"))


def processor_time(target: Target) -> float:
    """Seconds so far; looked at from here, since the process may have no descriptor left to look with."""
    with open(f"/proc/{target.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def settled(clients: list[DataClient]) -> list[DataClient]:
    """Those that have an answer, once no more come."""
    found: list[DataClient] = []
    quiet = threading.Event()
    while True:
        fresh = [client for client in clients if client not in found and readable(client)]
        found += fresh
        if not fresh and found:
            return found
        quiet.wait(0.5)


def readable(client: DataClient) -> bool:
    client.sock.setblocking(False)
    try:
        return len(client.sock.recv(16, socket.MSG_PEEK)) == 16
    except BlockingIOError:
        return False
    finally:
        client.sock.settimeout(30)


def serve_all(clients: list[DataClient]) -> int:
    """How many get their answer; each leaves as soon as it has it."""
    waiting, answered, end = list(clients), 0, time.monotonic() + 60
    pause = threading.Event()
    while waiting and time.monotonic() < end:
        for client in [client for client in waiting if readable(client)]:
            answered += client.status() == 0 and len(client.receive(8)) == 8
            client.sock.close()
            waiting.remove(client)
        pause.wait(0.01)
    return answered
