"""In the place of `mooncake.engine`: the same names, and programs written for it run unchanged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import OURS, PEER, STAND_IN, TESTS, EngineProcess, clean_environment, module_of, need, opcode
from pattern import pattern

PROGRAM = str(TESTS / "dropin_program.py")

ours_only = pytest.mark.skipif(bool(STAND_IN), reason="skipped: the released engine stands in for ours, and is no drop-in for itself")


def run(arguments, env, stdin=""):
    ran = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, input=stdin, timeout=90)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def good(found):
    assert found["ours"] and found["spec"] and found["code"] == 0 and found["port"] > 0, found


@ours_only
def test_under_the_name_in_sys_modules():
    need(OURS)
    code = (
        "import sys, runpy, tensorferry.mooncake as m; sys.modules['mooncake.engine'] = m;"
        f"sys.argv = ['program', 'a']; runpy.run_path({PROGRAM!r}, run_name='__main__')"
    )
    found = run(["-c", code], clean_environment(OURS))
    good(found)
    assert found["argv"] == ["a"]


@ours_only
def test_run_by_the_module_without_the_peer():
    need(OURS)
    found = run(["-m", "tensorferry.mooncake", PROGRAM, "a", "--children", "-x"], clean_environment(OURS))
    good(found)
    assert found["argv"] == ["a", "--children", "-x"] and found["name"] == "__main__"
    good(found["spawned"])
    good(found["subprocess"])


@ours_only
def test_run_by_the_module_with_the_peer_installed():
    """Everything else of the peer's package is still the peer's; only `engine` is ours."""
    need(OURS)
    need(PEER)
    folder = module_of(PEER)[1]
    env = clean_environment(OURS) | {"PYTHONPATH": folder}
    found = run(["-m", "tensorferry.mooncake", PROGRAM, "--children", "--peer"], env)
    good(found)
    good(found["spawned"])
    good(found["subprocess"])
    plain = run([PROGRAM, "--peer"], env)
    assert not plain["ours"], "without us the program would have run with the peer's engine"
    for name in ("buffer_pool", "mooncake_config", "store", "exports"):
        assert found[name] == plain[name]
    assert found["buffer_pool"].startswith(folder)


#: Says what the names are that this engine does not have.
REST = """
import json, sys, unittest.mock
sys.modules["torch"] = torch = unittest.mock.MagicMock()
sys.modules["torch.distributed"] = torch.distributed
import mooncake.engine as engine
names = %r
print(json.dumps({
    "ours": engine.TransferEngine.__module__,
    "found": [name for name in names if callable(getattr(engine, name, None))],
    "once": all(getattr(engine, name) is getattr(engine, name) for name in names),
    "nothing": hasattr(engine, "no_such_name"),
    "segment": __import__("mooncake.shared_segment").shared_segment._CppSharedSegment is engine.SharedSegment,
    "file": engine.__file__,
}))
"""


@ours_only
@pytest.mark.parametrize("way", ["run by the module", "installed", "installed late"])
def test_names_that_are_not_ours_are_those_of_the_installed_engine(way):
    """So the peer's modules that need them, such as `mooncake.shared_segment`, are imported as without us."""
    need(OURS)
    need(PEER)
    env = clean_environment(OURS) | {"PYTHONPATH": module_of(PEER)[1]}
    names = sorted(OUT_OF_SCOPE)
    head = {
        "run by the module": "",
        "installed": "import tensorferry.mooncake as t; t.install()\n",
        "installed late": "import mooncake.engine, warnings; warnings.simplefilter('ignore', RuntimeWarning)\n"
        "import tensorferry.mooncake as t; t.install()\n",
    }[way]
    runner = ["-m", "tensorferry.mooncake"] if way == "run by the module" else []
    found = run([*runner, "-c", head + REST % names], env)
    assert found["ours"] == "tensorferry.mooncake" and "tensorferry" in found["file"]
    assert found["found"] == names and found["once"] and found["segment"] and not found["nothing"], found


@ours_only
def test_errors_of_the_runner():
    """No program, or one that is not there: usage on standard error and a code, no traceback."""
    need(OURS)
    env = clean_environment(OURS)
    for arguments in ([], ["no-such-program.py"]):
        ran = subprocess.run([sys.executable, "-m", "tensorferry.mooncake", *arguments], env=env, capture_output=True, text=True, timeout=30)
        assert ran.returncode != 0 and ran.stderr, ran
        assert "Traceback" not in ran.stderr, ran.stderr


@ours_only
def test_a_program_that_fails_fails_alike(tmp_path):
    """The exit code and the exception of the program are those of the run."""
    need(OURS)
    env = clean_environment(OURS)
    program = tmp_path / "program.py"
    for body, code in (("import sys; sys.exit(7)", 7), ("raise ValueError('mine')", 1)):
        program.write_text(body)
        ran = subprocess.run([sys.executable, "-m", "tensorferry.mooncake", str(program)], env=env, capture_output=True, text=True, timeout=30)
        assert ran.returncode == code
        assert code != 1 or "ValueError: mine" in ran.stderr


# The same names and defaults

OUT_OF_SCOPE = {
    "SharedSegment",
    "RpcInterface",
    "CoroRPCInterface",
    "ReceivedData",
    "ReceivedTensor",
    "create_rpc_client",
    "create_rpc_server",
}


def surface(kind: str) -> dict:
    """What a module shows: its names, and each engine method with the names and defaults of its arguments."""
    with EngineProcess(kind) as process:
        return process.do("surface")


@pytest.fixture(scope="module")
def both():
    need(OURS)
    need(PEER)
    return surface(OURS), surface(PEER)


def arguments(doc: str) -> list[tuple[str, str | None]]:
    """Names and defaults in the first line of a pybind11 docstring."""
    inside = doc[doc.index("(") + 1 : doc.rindex(") ->")]
    parts = re.split(r", (?=\w+: )", inside)[1:]
    found = []
    for part in parts:
        name, rest = part.split(":", 1)
        found.append((name, rest.split(" = ")[1] if " = " in rest else None))
    return found


def test_every_name_is_there(both):
    ours, theirs = both
    assert set(theirs["module"]) - set(ours["module"]) - OUT_OF_SCOPE == set()
    assert set(theirs["methods"]) - set(ours["methods"]) == set()
    # These three say what is found on this machine, and the release compared with is built without a GPU.
    found = {"SUPPORT_CUDA", "SUPPORT_HIP", "SUPPORT_MUSA"}
    assert {k: ours["values"][k] for k in set(theirs["values"]) - found} == {k: v for k, v in theirs["values"].items() if k not in found}
    assert all(isinstance(ours["values"][k], bool) for k in found)


def test_every_argument_has_its_name_and_default(both):
    if STAND_IN:
        pytest.skip("skipped: the released engine has no signatures to compare")
    ours, theirs = both
    wrong = []
    for method, doc in theirs["methods"].items():
        wanted = arguments(doc)
        seen = ours["signatures"].get(method)
        if seen is None:
            wrong.append(f"{method} has no signature")
        elif len(seen) != len(wanted):
            wrong.append(f"{method} takes {seen}, theirs {wanted}")
        else:
            for (name, default), (our_name, our_default, kind) in zip(wanted, seen):
                named = not re.fullmatch(r"arg\d", name)
                if named and (name != our_name or default != our_default or kind == "POSITIONAL_ONLY"):
                    wrong.append(f"{method}: {our_name}={our_default} ({kind}), theirs {name}={default}")
    assert wrong == []


@ours_only
def test_every_method_is_in_the_table_of_the_documentation(both):
    """With as many arguments as it takes."""
    page = (TESTS.parent / "docs" / "dropin.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    documented = {name: inside for row in rows for name, inside in re.findall(r"`(\w+)(?:\(([^)]*)\))?`", row)}
    methods = both[0]["methods"]
    assert set(methods) - set(documented) == set()
    wrong = []
    for name, arguments in both[0]["signatures"].items():
        shown = [a for a in re.split(r",\s*", re.sub(r"[\[\]]", "", documented.get(name, ""))) if a]
        if shown and "…" not in shown and arguments is not None and len(shown) != len(arguments):
            wrong.append(f"{name}: {shown} is not {arguments}")
    assert wrong == []


def test_opcodes_and_notifications():
    with EngineProcess(OURS) as process:
        found = process.do("small_classes")
    assert found == {
        "ints": [0, 1],
        "exported": True,
        "nested": True,
        "equal": True,
        "names": ["Read", "Write"],
        "empty": ["", ""],
        "filled": ["n", "m"],
        "by-name": ["n", "m"],
        "written": ["x", "y"],
        "hashable": True,
    }


def test_engine_pointer():
    """get_engine and get_engine_ptr answer at any time: nothing before initialize."""
    with EngineProcess(OURS) as process:
        process.do("make_engine", engine="main")
        assert process.value("get_engine") is None
        assert process.value("get_engine_ptr") == 0
        assert process.value("get_local_topology") == process.value("get_local_topology", None)
        process.open("second")
        process.value("get_engine_ptr", engine="second")
        process.value("get_engine", engine="second")


def test_topology():
    """JSON with an entry for each NUMA node, on an engine that was never initialized as well."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    with EngineProcess(OURS) as process:
        process.do("make_engine", engine="main")
        text = process.value("get_local_topology")
        found = json.loads(text)
        assert set(found) == {f"cpu:{n}" for n in range(nodes)}
        if nodes == 1:
            assert text == '{\n\t"cpu:0" : \n\t[\n\t\t[],\n\t\t[]\n\t]\n}\n'


def test_a_first_address_before_anything_is_registered(two):
    own = two.initiator
    assert own.value("get_first_buffer_address", own.name) == own.mem
    with EngineProcess(OURS) as process:
        name = process.open()
        assert process.value("get_first_buffer_address", name) == 0
        assert process.value("get_first_buffer_address", two.target.name) == two.target.mem


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_transfer_to_oneself(two, op):
    """Its own name is a target like any other; overlapping ranges are moved as by memmove."""
    e = two.initiator
    for shift in (0, 1, 4096, 100_000):
        e.do("fill", name="mem", seed=7)
        source, to = (e.mem, e.mem + shift) if op == "write" else (e.mem + shift, e.mem)
        local, remote = (source, to) if op == "write" else (to, source)
        assert e.value(f"transfer_sync_{op}", e.name, local, remote, 300_000) == 0
        patch = (shift, 7, 0, 300_000) if op == "write" else (0, 7, shift, 300_000)
        if STAND_IN and 0 < shift < 300_000:
            continue  # theirs goes through a socket, in chunks
        assert e.do("check", name="mem", background=7, patches=[patch]) == []
    id = e.value("batch_transfer_async", e.name, [e.mem], [e.mem + 500_000], [100], opcode("Write"))
    assert e.do("poll", id=id)["status"] == 1


def test_a_pattern_is_itself():
    """The helper that all comparisons rest on: any part of a pattern is that part of the whole, and no two are alike."""
    whole = pattern(5, 0, 3 << 20)
    for start, length in ((0, 1), (7, 9), (8, 8), (1 << 20, 12345), ((8 << 17) - 3, 4096), (123457, (2 << 20) + 1)):
        assert bytes(pattern(5, start, length)) == bytes(whole[start : start + length])
    assert bytes(pattern(6, 0, 64)) != bytes(whole[:64])
