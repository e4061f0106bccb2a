"""Transfers between two processes, through the engine, by integer addresses: are the bytes right, and how fast do they go?"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .process import Process, ending
from .report import Failed, Report, Skip, expect, query_smi

KIB = 1 << 10
MIB = 1 << 20

OURS = "tensorferry.mooncake"
PEER = "mooncake.engine"

#: Local end and remote end.
PAIRINGS = [("host", "host"), ("host", "device"), ("device", "host"), ("device", "device")]
OPS = ["write", "read"]
SIZES = [1, 511, 512, MIB - 1, MIB, MIB + 1, 3 * MIB + 7]
BIG = 256 * MIB
SHAPES = [(4 * KIB, 128), (64 * KIB, 64), (MIB, 16), (64 * MIB, 1)]
#: Where a range begins in its memory: at no round address.
NEAR, FAR = 3, 1021
SLACK = 4 * KIB


@dataclass
class Setting:
    """What the checks have to do with."""

    program: str
    env: dict[str, str]
    quick: bool
    peer: str | None = None
    gpu: dict = field(default_factory=dict)
    device: int = 0
    #: Why no check can use the driver; None: it can.
    no_gpu: str | None = None
    #: Why the engine cannot be used, and why not for GPU memory.
    no_engine: str | None = None
    no_engine_gpu: str | None = None

    def process(self, **env: str) -> Process:
        return Process(self.program, {**self.env, **env})

    def need(self, *kinds: str) -> None:
        """Skips the check where the engine cannot move memory of one of these kinds."""
        why = self.no_engine or (self.no_engine_gpu if set(kinds) != {"host"} else None)
        if why:
            raise Skip(why)


class Pair:
    """The initiator and the target, each in a process with an engine."""

    def __init__(self, setting: Setting, kinds: tuple[str, str], module: str = OURS):
        env: dict[str, str] = {}
        if module == PEER and setting.peer:
            env = {"PYTHONPATH": setting.peer, "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}
        self.setting = setting
        self.local, self.remote = setting.process(**env), setting.process(**env)
        self.ends = (self.local, self.remote)
        self.peer = ""
        self.addresses: dict[str, int] = {}
        try:
            for end, kind in zip(self.ends, kinds):
                if kind != "host":
                    end.do("use_gpu", device=setting.device, framework=setting.gpu["framework"])
            self.local.do("open", module=module)
            self.peer = self.remote.do("open", module=module)["name"]
        except BaseException:
            self.__exit__()
            raise

    def memory(self, end: Process, name: str, kind: str, size: int, location: str | None = None) -> None:
        """Registered memory of one end."""
        address = end.do("memory", name=name, kind=kind, size=size)
        end.do("register", name=name, location=location)
        if end is self.remote:
            self.addresses[name] = address

    def move(self, op: str, pieces: list[tuple[str, int, str, int, int]], end_size: int) -> None:
        """One batch of [local region, offset, remote region, offset, length]; compares every byte of what it wrote to."""
        names = {self.local: {piece[0] for piece in pieces}, self.remote: {piece[2] for piece in pieces}}
        seeds: dict[tuple[Process, str], int] = {}
        for end, regions in names.items():
            for name in sorted(regions):
                seeds[end, name] = len(seeds) + 1
                end.do("fill", name=name, seed=seeds[end, name], size=end_size)
        entries = [(near, at, self.addresses[far] + to, length) for near, at, far, to, length in pieces]
        self.local.do("transfer", op=op, peer=self.peer, entries=entries)
        to_end = self.remote if op == "write" else self.local
        for name in sorted(names[to_end]):
            patches = []
            for near, at, far, to, length in pieces:
                if op == "write" and far == name:
                    patches.append((to, seeds[self.local, near], at, length))
                elif op == "read" and near == name:
                    patches.append((at, seeds[self.remote, far], to, length))
            wrong = to_end.do("check", name=name, seed=seeds[to_end, name], size=end_size, patches=patches)
            expect(not wrong, f"{op} of {[piece[4] for piece in pieces]} bytes: {wrong}")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *failure) -> None:
        for end in self.ends:
            end.__exit__()


def cases(setting: Setting, kinds: tuple[str, str], op: str) -> dict:
    """Every size between one kind of memory here and one kind there."""
    setting.need(*kinds)
    sizes = SIZES if setting.quick else [*SIZES, BIG]
    room = max(sizes) + SLACK
    with Pair(setting, kinds) as pair:
        # One end says where its memory is, the other leaves it to be found out.
        pair.memory(pair.local, "near", kinds[0], room)
        location = "cpu" if kinds[1] == "host" else f"cuda:{setting.device}"
        pair.memory(pair.remote, "far", kinds[1], room, location)
        for size in sizes:
            pair.move(op, [("near", NEAR, "far", FAR, size)], size + SLACK)
    return {"sizes": sizes}


def kind_case(setting: Setting, kind: str, op: str) -> dict:
    """A kind of memory at both ends, and the host's at the other."""
    setting.need(kind)
    size = 3 * MIB + 7
    with Pair(setting, (kind, kind)) as pair:
        for end in pair.ends:
            for name, what in (("host", "host"), ("special", kind)):
                pair.memory(end, name, what, size + SLACK)
        for near, far in (("special", "host"), ("host", "special"), ("special", "special")):
            pair.move(op, [(near, NEAR, far, FAR, size)], size + SLACK)
    return {"size": size}


def mixed_batch(setting: Setting, op: str) -> dict:
    """One batch whose entries lie in host and device memory in every combination."""
    setting.need("device")
    step, count = 700_001, 6
    room = 4 * count * step + SLACK
    with Pair(setting, ("device", "device")) as pair:
        for end in pair.ends:
            for kind in ("host", "device"):
                pair.memory(end, kind, kind, room)
        pieces = []
        for n in range(4 * count):
            near, far = PAIRINGS[n % 4]
            pieces.append((near, NEAR + n * step, far, FAR + (4 * count - 1 - n) * step, step - n * 1009))
        pair.move(op, pieces, room)
    return {"entries": len(pieces)}


def contexts(setting: Setting, kinds: list[str]) -> dict:
    """On which devices both processes have contexts after they have moved memory of these kinds in both directions."""
    setting.need(*kinds)
    host_only = kinds == ["host"]
    ends = ("host", "host") if host_only else ("device", "device")
    with Pair(setting, ends) as pair:
        for end in pair.ends:
            for kind in kinds:
                pair.memory(end, kind, kind, 2 * MIB + SLACK)
        for kind in kinds:
            for op in OPS:
                pair.move(op, [(kind, NEAR, kind, FAR, MIB)], 2 * MIB)
        told = {name: end.do("contexts") for name, end in zip(("initiator", "target"), pair.ends)}
        pids = {str(end.pid) for end in pair.ends}
        apps = query_smi("compute-apps", "pid,gpu_uuid,used_memory") or []
    numbers = {**told, "nvidia_smi": [app for app in apps if app["pid"] in pids]}
    wanted = [] if host_only else [setting.device]
    for who, seen in told.items():
        expect(seen["active"] == wanted, f"the {who} has contexts on devices {seen['active']}, not {wanted}", numbers)
        expect(seen["initialised"] != host_only, f"the {who} has initialised the driver for host memory", numbers)
    return numbers


def beside_capture(setting: Setting) -> dict:
    """A user's graph capture goes on in one thread while the engine moves device memory for another."""
    setting.need("device")
    with Pair(setting, ("device", "device")) as pair:
        pair.memory(pair.local, "near", "device", 4 * MIB)
        pair.memory(pair.remote, "far", "device", 4 * MIB)
        entries = [("near", 0, pair.addresses["far"], 4 * MIB)]
        numbers = {}
        for op in OPS:
            told = pair.local.do("transfer_beside_capture", op=op, peer=pair.peer, entries=entries, times=8)
            numbers[op] = told
            expect(told["capture_end"] == 0, f"the capture ended with {told['capture_end']}", numbers)
    return numbers


def fork_after(setting: Setting) -> dict:
    """A child of a process whose engine has moved device memory; the parent goes on."""
    setting.need("device")
    with Pair(setting, ("device", "host")) as pair:
        for name, kind in (("device", "device"), ("host", "host")):
            pair.memory(pair.local, name, kind, MIB)
        pair.memory(pair.remote, "far", "host", MIB)
        entries = [(name, 0, pair.addresses["far"], MIB // 2) for name in ("device", "host")]
        pair.local.do("transfer", op="write", peer=pair.peer, entries=entries)
        code = pair.local.do("fork", peer=pair.peer, entries=entries, seconds=60)
        meaning = {2: "the parent's engine moved something", 3: f"its own engine failed: {pair.local.said()[-300:]}"}
        expect(code == 0, f"the child: {meaning.get(code) or ending(code)}", {"child": code})
        pair.local.do("transfer", op="write", peer=pair.peer, entries=entries)
    return {"child": code}


def exit_without_close(setting: Setting) -> dict:
    """Processes that end with engines, registered device memory and all."""
    setting.need("device")
    with Pair(setting, ("device", "device")) as pair:
        pair.memory(pair.local, "near", "device", MIB)
        pair.memory(pair.remote, "far", "device", MIB)
        pair.move("write", [("near", 0, "far", 0, MIB)], MIB)
        ended = {name: (end.end(), end.said()) for name, end in zip(("initiator", "target"), pair.ends)}
    for who, (how, said) in ended.items():
        expect(how == "exit code 0", f"the {who} ended with {how}: {said[-500:]}")
        expect(not said, f"the {who} wrote to standard error: {said[-500:]}")
    return {who: how for who, (how, _) in ended.items()}


def throughput(setting: Setting, module: str, kinds: tuple[str, str], op: str) -> dict:
    """GB/s of batches of several shapes."""
    if module == PEER:
        if not setting.peer:
            raise Skip("no --peer was given")
        if "device" in kinds and setting.no_gpu:
            raise Skip(setting.no_gpu)
    else:
        setting.need(*kinds)
    seconds, shapes = (0.05, SHAPES[:3]) if setting.quick else (1.0, SHAPES)
    room = max(block * count for block, count in shapes)
    numbers = {}
    try:
        with Pair(setting, kinds, module) as pair:
            pair.memory(pair.local, "near", kinds[0], room)
            pair.memory(pair.remote, "far", kinds[1], room)
            pair.local.do("fill", name="near", seed=1, size=room)
            pair.remote.do("fill", name="far", seed=2, size=room)
            for block, count in shapes:
                numbers[f"{block // KIB} KiB x {count}"] = pair.local.do(
                    "measure",
                    op=op,
                    peer=pair.peer,
                    name="near",
                    remote=pair.addresses["far"],
                    block=block,
                    count=count,
                    seconds=seconds,
                )
    except Exception as error:
        if module == PEER:
            raise Skip(f"the peer: {error}") from error
        raise Failed(f"{type(error).__name__}: {error}", numbers) from error
    return numbers


def check_all(report: Report, setting: Setting) -> None:
    report.check("contexts.host-only", contexts, setting, ["host"])
    report.check("contexts.device-only", contexts, setting, ["device"])
    report.check("contexts.mixed", contexts, setting, ["host", "device"])
    for kinds in PAIRINGS:
        for op in OPS:
            report.check(f"bytes.{kinds[0]}-{op}-{kinds[1]}", cases, setting, kinds, op)
    for kind in ("managed", "pinned", "write-combined", "mapped"):
        for op in OPS:
            report.check(f"bytes.{kind}-{op}", kind_case, setting, kind, op)
    for op in OPS:
        report.check(f"bytes.mixed-batch-{op}", mixed_batch, setting, op)
    report.check("guest.capture", beside_capture, setting)
    report.check("guest.fork", fork_after, setting)
    report.check("guest.exit-without-close", exit_without_close, setting)
    for kinds in PAIRINGS:
        for op in OPS:
            for who, module in (("ours", OURS), ("peer", PEER)):
                name = f"throughput.{kinds[0]}-{op}-{kinds[1]}.{who}"
                report.check(name, throughput, setting, module, kinds, op)


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of an engine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "TENSORFERRY_"))}
