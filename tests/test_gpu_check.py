"""scripts/gpu-check: what it says where there is no GPU, with a simulated one, and of engines that do something wrong."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from peers import OURS, ROOT, STAND_IN, TESTS, clean_environment, need

PAIRINGS = ["host-write-host", "host-read-host", "host-write-device", "host-read-device"]
PAIRINGS += ["device-write-host", "device-read-host", "device-write-device", "device-read-device"]

ours_only = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine stands in for ours, and is not what is checked")


def run(folder: Path, *arguments: str, env: dict[str, str] | None = None, libraries: Path | None = None):
    """The exit code and the checks of the report by name."""
    env = clean_environment(OURS, env)
    env.pop("LD_LIBRARY_PATH", None)
    if libraries:
        env["LD_LIBRARY_PATH"] = str(libraries)
    report = folder / "report.json"
    command = [sys.executable, str(ROOT / "scripts/gpu-check"), "--quick", "--json", str(report), *arguments]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert report.exists(), ran.stdout + ran.stderr
    document = json.loads(report.read_text())
    checks = {check["name"]: check for check in document["checks"]}
    assert sum(document["counts"].values()) == len(document["checks"]) == len(checks)
    assert ran.returncode == (1 if document["counts"]["failed"] else 0), ran.stdout + ran.stderr
    for check in checks.values():
        assert (check["why"] is None) == (check["result"] == "ok"), check
    return document, checks


def results(checks, prefix: str) -> dict[str, str]:
    """What became of the checks whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): check["why"] or "ok" for name, check in checks.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Path:
    """A folder with a simulated CUDA driver under its real name."""
    folder = tmp_path_factory.mktemp("simgpu")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [file for file in target.glob("*/deps/libtensorferry_simgpu.so") if file.is_file()]
    if built:
        shutil.copy(max(built, key=lambda file: file.stat().st_mtime), folder / "libcuda.so.1")
    elif shutil.which("cargo"):
        subprocess.run([ROOT / "scripts/simgpu", folder, "libcuda.so.1"], check=True, timeout=600)
    else:
        pytest.skip("skipped: the simulator was not built, and there is no cargo")
    return folder


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory) -> str:
    """The small engine as a wheel of ours."""
    wheel = tmp_path_factory.mktemp("wheel") / "tensorferry-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tensorferry/__init__.py", "__version__ = 'small'\n")
        archive.write(TESTS / "gpu_check_engine.py", "tensorferry/mooncake.py")
    return str(wheel)


@ours_only
def test_without_a_gpu_the_host_is_checked(tmp_path):
    need(OURS)
    try:
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("skipped: this machine has a CUDA driver")
    except OSError:
        pass
    document, checks = run(tmp_path)
    why = checks["gpu"]["why"]
    host_only = ("engine", "program.", "contexts.host-only", "bytes.host-write-host", "bytes.host-read-host")
    host_only += ("throughput.host-write-host", "throughput.host-read-host")
    assert why.startswith("there is no CUDA driver: libcuda.so.1: "), why
    for name, check in checks.items():
        if name == "program.doctor":
            continue  # not every version has it
        if name.endswith(".peer"):
            assert check["why"] == "no --peer was given", check
        elif name.startswith(host_only):
            assert check["result"] == "ok", check
        else:
            assert (check["result"], check["why"]) == ("skipped", why), check
    assert document["machine"]["cores"] > 0 and document["settings"]["quick"]
    assert checks["contexts.host-only"]["numbers"]["target"] == {"initialised": False, "active": []}
    assert checks["throughput.host-write-host.ours"]["numbers"]["64 KiB x 64"]["gb_per_s"] > 0


def test_the_facts_of_a_simulated_driver(tmp_path, simulator, other_engine):
    _, checks = run(tmp_path, "--wheel", other_engine, "--only", "facts.", libraries=simulator)
    assert set(results(checks, "facts.").values()) == {"ok"}, checks
    assert checks["gpu"]["numbers"]["devices"] == ["simgpu Cuda 0", "simgpu Cuda 1"]
    pointers = checks["facts.pointers"]["numbers"]
    assert pointers["context_less"] and pointers["active"] == [1]
    kinds = pointers["kinds"]
    assert kinds["host"]["one_by_one"]["type"] == [1, 0] and kinds["host"]["together"][0] == 0
    assert kinds["managed"]["together"][1]["managed"] == 1
    assert kinds["mapped"]["one_by_one"]["context"] == [0, 0]
    sockets = checks["facts.sockets"]["numbers"]
    assert sockets["device"] == {"send": {"errno": "EFAULT", "bytes": 0}, "recv": {"errno": "EFAULT", "bytes": 0}}
    assert sockets["managed"]["recv"]["gb_per_s"] > 0
    assert checks["facts.fork"]["numbers"]["init_and_count_in_child"] == "[304, 3]"
    assert set(checks["facts.copies"]["numbers"]["gb_per_s"]) == {"pinned", "host"}


@ours_only
def test_our_engine_with_a_simulated_driver(tmp_path, simulator):
    need(OURS)
    _, checks = run(tmp_path, libraries=simulator)
    engine = checks["engine"]
    if engine["result"] == "failed" and "SUPPORT_CUDA is False" in engine["why"]:
        skipped = [check["why"] for name, check in checks.items() if "device" in name and not name.endswith(".peer")]
        assert set(skipped) == {"this tensorferry moves no memory of CUDA (SUPPORT_CUDA is False)"}
        pytest.skip(f"skipped: {engine['why']}")
    for name, check in checks.items():
        if not name.endswith(".peer") and name != "program.doctor":
            assert check["result"] == "ok", check


def test_an_engine_that_does_everything_right(tmp_path, simulator, other_engine):
    for prefix in ("bytes.", "contexts.", "guest."):
        _, checks = run(tmp_path, "--wheel", other_engine, "--only", prefix, libraries=simulator)
        assert checks["engine"]["numbers"]["version"] == "small"
        found = results(checks, prefix)
        assert len(found) > 2 and set(found.values()) == {"ok"}, found
        assert prefix != "bytes." or set(PAIRINGS) < set(found)


@pytest.mark.parametrize(
    ("fault", "check", "why"),
    [
        ("one-byte-off", "bytes.device-write-device", "write of [1048575] bytes: byte 1021 of far is "),
        ("last-byte-lost", "bytes.host-read-device", "read of [1048575] bytes: byte 1048577 of near is "),
        ("last-byte-lost", "bytes.mixed-batch-write", "write of "),
        ("context-on-device-0", "contexts.mixed", "the initiator has contexts on devices [0, 1], not [1]"),
        ("spoils-captures", "guest.capture", "the capture ended with 901"),
        ("forks-on", "guest.fork", "the child: signal SIGSEGV"),
        ("registers-nothing", "throughput.device-read-host.ours", "register_memory of device memory answered -1: registers-nothing"),
    ],
)
def test_what_an_engine_does_wrong_is_found(tmp_path, simulator, other_engine, fault, check, why):
    env = {"GPU_CHECK_FAULT": fault}
    _, checks = run(tmp_path, "--wheel", other_engine, "--only", check, env=env, libraries=simulator)
    assert checks[check]["result"] == "failed" and why in checks[check]["why"], checks[check]


def test_a_driver_without_devices(tmp_path, simulator, other_engine):
    env = {"SIMGPU_DEVICES": "0"}
    _, checks = run(tmp_path, "--wheel", other_engine, "--only", "facts.calls", env=env, libraries=simulator)
    assert checks["facts.calls"]["why"] == "cuInit answered 100 CUDA_ERROR_NO_DEVICE"


def test_a_file_that_is_not_there(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/gpu-check"), "--wheel", str(tmp_path / "none.whl")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 2 and "none.whl: there is no such file" in ran.stderr, ran.stderr
