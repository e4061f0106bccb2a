"""`tensorferry.doctor()` tells a program what `tensorferry doctor` tells people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k != "PYTHONPATH"}


def python(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args], env=CLEAN | env, capture_output=True, text=True, timeout=60)


def run(code: str, **env: str) -> str:
    done = python("-c", textwrap.dedent(code), **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def shape(value: object) -> object:
    """The names in a document, without what changes from run to run."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    return type(value).__name__


def test_the_document_is_that_of_the_program():
    ours = json.loads(run("import json, tensorferry; print(json.dumps(tensorferry.doctor()))"))
    done = python("-m", "tensorferry", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert shape(ours) == shape(theirs)
    assert ours["ok"] is True and ours["problems"] == []
    assert ours["proofs"][0]["memory"] == "cpu" and ours["proofs"][0]["moved"] is True


def test_settings_of_this_process_count():
    code = """
    import os, tensorferry
    os.environ["TENSORFERRY_GPU"] = "off"
    found = tensorferry.doctor(require="gpu")
    assert {vendor["state"] for vendor in found["gpu"]["vendors"]} == {"not-looked-for"}, found
    assert not found["ok"] and found["proofs"][0]["moved"]
    (problem,) = found["problems"]
    assert problem.startswith("--require gpu: no device can be used: CUDA was not looked for, because of"), problem
    """
    run(code)


def test_what_cannot_be_asked_for_is_an_error_that_says_what_can():
    code = """
    import os, tensorferry
    try:
        tensorferry.doctor(require=["cuda", "npu"])
    except ValueError as error:
        print(error)
    os.environ["TENSORFERRY_PORTS"] = "9-1"
    try:
        tensorferry.doctor()
    except ValueError as error:
        print(error)
    """
    first, second = run(code).splitlines()
    assert first == '"npu" cannot be required: expected cuda, musa, hip, or gpu for any of them'
    assert second.startswith("TENSORFERRY_PORTS=9-1: expected a port range"), second


def test_an_engine_goes_on_beside_it():
    code = """
    import tensorferry
    from tensorferry.mooncake import TransferEngine
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert tensorferry.doctor()["ok"]
    addr = engine.allocate_managed_buffer(4096)
    assert engine.transfer_sync_write(f"127.0.0.1:{engine.get_rpc_port()}", addr, addr, 4096) == 0
    """
    run(code)
