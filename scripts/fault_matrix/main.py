"""Arguments, and the order of the sections."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from peers import PEER, why_absent

from . import dropin, idle, isolation, matrix, ports, quiet, restarts
from .cells import FAULTS
from .ends import build, ip, namespace_prefix
from .report import Row, print_table, save

ABOUT = """
Lets faults happen to transfers between this engine and another one, or a release of Mooncake, and looks at what becomes
of them: which final state, when, with which error, and whether the next transfer works. Runs in a network namespace of
its own. Exit codes: 0 all is as it has to be, 1 something is not, 2 it cannot be run here.
"""
INSIDE = "TENSORFERRY_FAULTS_INSIDE"


@dataclass(frozen=True)
class Setting:
    """How much is done."""

    full: bool
    only: str
    jobs: int

    @property
    def repeats(self) -> int:
        return 100 if self.full else 5

    def wants(self, cell: str) -> bool:
        return self.only.lower() in cell.lower()

    def kinds(self) -> list[str]:
        return ["ours", "peer"] if why_absent(PEER) is None else ["ours"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=ABOUT)
    parser.add_argument("--full", action="store_true", help="100 repeats of each cell instead of 5, and the long gaps")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cells with this in their name, such as R5: or SIGSTOP")
    parser.add_argument("--json", metavar="FILE", help="write what was seen there")
    parser.add_argument("--jobs", metavar="N", type=int, default=10, help="how many cells run at the same time (10)")
    return parser.parse_args()


def in_its_time(body, tries: int) -> Row:
    """A cell; again if nothing but a time was wrong, which its row says."""
    before: list[str] = []
    for left in reversed(range(tries)):
        row = body()
        if row.wrong or not row.late or not left:
            break
        before += row.late
    if before:
        row.measured += f"; tried again, since {'; '.join(before)}"
    row.wrong += row.late
    return row


def run_cells(setting: Setting, cells: list[tuple[str, object]], jobs: int | None = None) -> list[Row]:
    """Runs cells, some at a time; each is its section and name, and a function that returns its row."""

    def one(cell) -> Row:
        (section, _, name), body = cell[0].partition(": "), cell[1]
        try:
            row = in_its_time(body, 1 if setting.full else 3)
        except Exception as error:  # a cell that cannot be run has not held
            row = Row(section, 0, wrong=[f"{type(error).__name__}: {error}"])
        row.cell = name
        return row

    wanted = [cell for cell in cells if setting.wants(cell[0])]
    with ThreadPoolExecutor(jobs or setting.jobs) as pool:
        return list(pool.map(one, wanted))


def matrix_rows(setting: Setting) -> list[Row]:
    shared = matrix.Shared(setting.repeats)
    cells = [
        (f"R2: {fault.name}, {op}, {kind}", lambda fault=fault, op=op, kind=kind: matrix.run_cell(shared, fault, kind, op))
        for fault in FAULTS
        for op in matrix.OPS
        for kind in setting.kinds()
    ]
    cells += [
        (f"R2: no limit given, through Python, {kind}", lambda kind=kind: dropin.no_limit_given(setting.full, kind)) for kind in setting.kinds()
    ]
    try:
        return run_cells(setting, cells)
    finally:
        shared.close()


def idle_rows(setting: Setting) -> list[Row]:
    # One after the other: within each, all gaps pass at the same time.
    return [row for kind in setting.kinds() for row in idle.rows(setting.full, kind, setting.wants)]


def port_rows(setting: Setting) -> list[Row]:
    cells = [
        (f"R6: 100 ports for {ports.THREADS} threads and {ports.PEERS} peers, {kind}", lambda kind=kind: ports.few_ports(kind))
        for kind in setting.kinds()
    ]
    cells.append((f"R6: {ports.CLIENTS} clients of {ports.FILES} descriptors, ours", ports.few_files))
    # What they count is the whole namespace's.
    return run_cells(setting, cells, jobs=1)


def restart_rows(setting: Setting) -> list[Row]:
    cells = []
    for kind in setting.kinds():
        cells.append((f"R7: killed and restarted while a writer runs, {kind}", lambda kind=kind: restarts.restarts(setting.full, kind)))
        cells.append((f"R7: not up at first contact, {kind}", lambda kind=kind: restarts.first_contact(kind)))
    return run_cells(setting, cells)


def quiet_rows(setting: Setting) -> list[Row]:
    cancels = "R8: WRITEs of 32 MiB cancelled at random moments"
    cells = [(f"{cancels}, {kind}", lambda kind=kind: quiet.cancels(setting.full, kind)) for kind in setting.kinds()]
    cells += [(f"R8: unregister while 8 {op.upper()}s run, ours", lambda op=op: quiet.revoke_in_use(op)) for op in ("read", "write")]
    return run_cells(setting, cells, jobs=1)


def isolation_rows(setting: Setting) -> list[Row]:
    cells = [
        (f"R13: 2 peers beside a blackholed and a stopped one, {kind}", lambda kind=kind: isolation.isolation(setting.full, kind))
        for kind in setting.kinds()
    ]
    return run_cells(setting, cells, jobs=1)


SECTIONS = [
    ("R2: one final state, by its deadline", matrix_rows),
    ("R5: the first transfer after an idle gap", idle_rows),
    ("R6: few ports, few descriptors", port_rows),
    ("R7: restarts", restart_rows),
    ("R8: quiet after cancel and unregister", quiet_rows),
    ("R13: dead peers beside healthy ones", isolation_rows),
]


def machine() -> str:
    with open("/proc/meminfo") as file:
        kib = int(file.readline().split()[1])
    return f"{os.cpu_count()} cores, {kib / (1 << 20):.0f} GiB of memory, Linux {platform.release()}"


def main() -> int:
    given = arguments()
    if INSIDE not in os.environ:
        build()
        prefix = namespace_prefix()
        if prefix is None:
            print("faults: needs a network namespace: root or user namespaces, unshare and ip (iproute2)", file=sys.stderr)
            return 2
        os.environ[INSIDE] = "1"
        os.execvp(prefix[0], [*prefix, sys.executable, *sys.argv])
    ip("link", "set", "lo", "up")
    # Each of a hundred peers has some connections at either end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    setting = Setting(given.full, given.only, given.jobs)
    print(f"{machine()}\n`scripts/faults {' '.join(sys.argv[1:])}`")
    rows: list[Row] = []
    for title, section in SECTIONS:
        began = time.monotonic()
        found = section(setting)
        if found:
            print_table(title, found)
            print(f"{time.monotonic() - began:.0f} s", flush=True)
        rows += found
    if given.json:
        save(given.json, rows)
    if not rows:
        print(f"faults: no cell has {given.only!r} in its name", file=sys.stderr)
        return 2
    return 1 if any(row.wrong for row in rows) else 0
