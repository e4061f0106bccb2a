"""Arguments, and the order of the checks."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from . import transfers
from .pack import pack
from .process import serve
from .report import Failed, Report, Skip, expect
from .transfers import Setting, clean_environment
from .worker import Worker

ABOUT = """
Checks tensorferry on a machine with an NVIDIA GPU, and reports numbers: what the driver answers (pointers, sockets,
copies, pinning, fork), whether every byte of transfers between host and device memory is right, what a transfer leaves
behind in a process, and how fast it is. Where there is no GPU those checks are skipped, each with its reason.
Needs python3 and the wheel of tensorferry. Exit codes: 0 nothing failed, 1 something did, 2 the arguments make no sense.
"""


def arguments(args: list[str], program: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=ABOUT)
    parser.add_argument("--json", metavar="FILE", help="write the whole report there")
    parser.add_argument("--quick", action="store_true", help="small sizes and short measurements: seconds instead of minutes")
    parser.add_argument("--only", metavar="PREFIX", default="", help="only checks whose names begin so, such as bytes. or facts.sockets")
    parser.add_argument(
        "--device", metavar="N", type=int, help="the device to use (the last one, so that a context on device 0 is noticed)"
    )
    parser.add_argument("--framework", choices=["auto", "torch", "cupy", "driver"], default="auto", help="what allocates device memory")
    parser.add_argument("--wheel", metavar="FILE", help="tensorferry's wheel (the one beside this program, or else what is installed)")
    parser.add_argument("--program", metavar="FILE", help="the program tensorferry (the one beside this program, or else the wheel's)")
    parser.add_argument(
        "--peer", metavar="FOLDER", help="where `pip install --target FOLDER mooncake-transfer-engine` was done: measured too"
    )
    parser.add_argument("--pack", metavar="FOLDER", help="build the wheel and the program, and put all that has to travel there")
    given = parser.parse_args(args)
    for name in ("wheel", "program", "peer"):
        path = getattr(given, name)
        if path and not Path(path).exists():
            parser.error(f"--{name} {path}: there is no such file")
    given.wheel = given.wheel or next(map(str, sorted(program.parent.glob("tensorferry-*.whl"))), None)
    beside = program.parent / "tensorferry"
    given.program = given.program or (str(beside) if beside.is_file() else None)
    return given


def find_gpu(setting: Setting, wanted: int | None, framework: str) -> dict:
    with setting.process() as process:
        found = process.do("probe", framework=framework)
    setting.no_gpu = setting.no_engine_gpu = found.get("why")
    if setting.no_gpu:
        raise Skip(setting.no_gpu)
    setting.gpu = found
    count = len(found["devices"])
    setting.device = count - 1 if wanted is None else wanted
    expect(0 <= setting.device < count, f"there is no device {setting.device}: the driver shows {count}")
    return {**found, "used": setting.device}


def find_engine(setting: Setting) -> dict:
    """Whether the engine can be used at all. What it says about CUDA is held against what the driver says."""
    try:
        with setting.process() as process:
            opened = process.do("open", module=transfers.OURS)
    except Exception as error:
        setting.no_engine = setting.no_engine_gpu = f"the engine cannot be used: {error}"
        raise
    if not setting.no_gpu and not opened["moves_cuda"]:
        setting.no_engine_gpu = "this tensorferry moves no memory of CUDA (SUPPORT_CUDA is False)"
        raise Failed(f"there is a device, and {setting.no_engine_gpu}", opened)
    return opened


def fact(setting: Setting, name: str, **args) -> dict:
    """One of the facts, in a process of its own."""
    if setting.no_gpu:
        raise Skip(setting.no_gpu)
    with setting.process() as process:
        process.do("use_gpu", device=setting.device)
        return process.do("fact", deadline=300, name=name, **args)


def pointers(setting: Setting) -> dict:
    """The answers must be those that telling memory apart relies on."""
    numbers = fact(setting, "pointers", times=100 if setting.quick else 10_000)
    for kind, told in numbers["kinds"].items():
        one, (code, together) = told["one_by_one"], told["together"]
        if kind == "host":
            expect(one["type"][0] == 1 and code == 0 and not any(together.values()), "host memory is known", numbers)
            continue
        wanted = 1 if kind in ("pinned", "write-combined") else 2
        expect(list(one["type"]) == [0, wanted] and together["type"] == wanted, f"{kind} memory has another type", numbers)
        expect(list(one["ordinal"]) == [0, setting.device], f"{kind} memory is another device's", numbers)
        expect(bool(one["managed"][1]) == (kind == "managed"), f"{kind} memory: managed is {one['managed']}", numbers)
    expect(numbers["active"] == [setting.device], f"contexts on {numbers['active']}", numbers)
    return numbers


def sockets(setting: Setting) -> dict:
    """What the host can touch, a socket takes; device memory is EFAULT, or else the machine is one where it is not."""
    numbers = fact(setting, "sockets", size=(1 if setting.quick else 64) << 20)
    for kind in ("host", "pinned", "write-combined", "managed"):
        for way in ("send", "recv"):
            expect("gb_per_s" in numbers[kind][way], f"{way} with {kind} memory: {numbers[kind][way]}", numbers)
    return numbers


def copies(setting: Setting) -> dict:
    chunks = [64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20]
    if setting.quick:
        return fact(setting, "copies", total=2 << 20, chunks=chunks[:3], depths=[1, 2])
    return fact(setting, "copies", total=256 << 20, chunks=chunks, depths=[1, 2, 4, 8])


def driver_fork(setting: Setting) -> dict:
    numbers = fact(setting, "fork")
    expect(numbers["child"] == 0 and numbers["parent_goes_on"], "a fork after the initialisation did harm", numbers)
    return numbers


def run_program(setting: Setting, program: str | None, args: list[str]) -> dict:
    command = [program] if program else [sys.executable, "-m", "tensorferry"]
    ran = subprocess.run([*command, *args], env=setting.env, capture_output=True, text=True, timeout=120)
    if ran.returncode == 2 and "unrecognized subcommand" in ran.stderr:
        raise Skip(f"this tensorferry has no {args[0]}")
    expect(ran.returncode == 0, f"exit code {ran.returncode}: {ran.stderr.strip()[-500:]}")
    return json.loads(ran.stdout)


def check_all(report: Report, setting: Setting, given: argparse.Namespace) -> None:
    # What these find decides which of the others can be made.
    report.check("gpu", find_gpu, setting, given.device, given.framework, always=True)
    report.check("engine", find_engine, setting, always=True)
    report.check("facts.pointers", pointers, setting)
    report.check("facts.sockets", sockets, setting)
    report.check("facts.copies", copies, setting)
    times = 50 if setting.quick else 2000
    report.check("facts.calls", lambda: fact(setting, "calls", times=times))
    sizes = [16 << 20] if setting.quick else [16 << 20, 64 << 20, 512 << 20]
    report.check("facts.pinning", lambda: fact(setting, "pinning", sizes=sizes))
    report.check("facts.fork", driver_fork, setting)
    report.check("program.doctor", run_program, setting, given.program, ["doctor", "--json"])
    seconds = "1" if setting.quick else "5"
    report.check("program.demo", run_program, setting, given.program, ["demo", "--json", "--seconds", seconds])
    transfers.check_all(report, setting)


def main(program: Path) -> int:
    if sys.argv[1:] == ["worker"]:
        return serve(Worker())
    given = arguments(sys.argv[1:], program)
    if given.pack:
        return pack(Path(given.pack).resolve(), program.parent)
    env = {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if given.wheel:
            # A wheel is an archive of what is to be imported.
            zipfile.ZipFile(given.wheel).extractall(folder)
            env["PYTHONPATH"] = folder
        setting = Setting(str(program), env, given.quick, given.peer and str(Path(given.peer).resolve()))
        report = Report(given.only)
        check_all(report, setting, given)
    counts = report.counts()
    if given.json:
        settings = {"quick": given.quick, "device": setting.device, "wheel": given.wheel, "peer": given.peer, "only": given.only}
        Path(given.json).write_text(json.dumps(report.document(settings), indent=1) + "\n")
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts["failed"] else 0
