"""Bad input at the borders that a user meets: a clear error each, and the engine works on.

What the peer's releases do wrong in this field (calls before initialize, made-up ids, unequal lists) is in test_defects.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import Ends, Pair
from peers import (
    OURS,
    STAND_IN,
    TESTS,
    EngineProcess,
    as_tuple,
    clean_environment,
    module_of,
    need,
    notify,
    numpy_array,
    numpy_int,
    numpy_list,
    opcode,
    raw_bytes,
    slack,
    some_object,
    wait_until,
)
from raw import FakeTarget, hang_up_in_body, probe


@pytest.fixture(scope="module")
def standing():
    """Two ends of ours that all the bad input below must not harm."""
    pair = Pair(Ends(OURS, OURS, 2), 1 << 20)
    yield pair
    pair.close()


def still_works(pair):
    for op in ("write", "read"):
        call = pair.initiator.te(f"transfer_sync_{op}", pair.target.name, pair.initiator.mem, pair.target.mem, 4096)
        assert call.value == 0, call


def fails(call, code):
    assert call.raised is None and call.value == code, call
    assert call.error or STAND_IN, f"failed without a text: {call}"


HOSTS = [
    "",
    "///",
    ":",
    "::::",
    "127.0.0.1",
    "127.0.0.1:",
    "127.0.0.1:0",
    "127.0.0.1:1",
    "127.0.0.1:abc",
    "127.0.0.1:99999",
    "127.0.0.1:-1",
    "127.0.0.1:1:2",
    "[::1",
    "[::1]:",
    "[::1]:1",
    "no-such-host.invalid:15000",
    "a b:15000",
    "nul\0byte:15000",
    "h" * 5000 + ":15000",
    "ü.invalid:15000",
]


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: repr(h[:30]))
def test_a_host_that_is_none(standing, host):
    e, near = standing.initiator, standing.initiator.mem
    call = e.te_fresh("transfer_sync_write", host, near, 0x20000, 16)
    fails(call, -1)
    assert call.seconds <= 6 * slack(), call
    fails(e.te_fresh("batch_transfer_sync_read", host, [near], [0x20000], [16]), -1)
    probed = e.te_fresh("send_probe", host)
    assert probed.raised is None and probed.value < 0 and (probed.error or STAND_IN), probed
    first = e.te_fresh("get_first_buffer_address", host)
    assert first.raised is None and first.value == 0, first
    # An id may be refused at once, or given and fail.
    call = e.te_fresh("batch_transfer_async_write", host, [near], [0x20000], [16])
    assert call.raised is None, call
    if call.value == 0:
        assert call.error, call
    else:
        assert e.value("get_batch_transfer_status", [call.value]) == -1
    still_works(standing)


def test_the_error_names_the_peer_and_the_range(standing):
    e, near, far = standing.initiator, standing.initiator.mem, standing.target.mem
    error = e.te_fresh("transfer_sync_write", "127.0.0.1:1", near, far, 16).error
    assert "127.0.0.1:1" in error, error
    error = e.te_fresh("transfer_sync_write", standing.target.name, near, far + (1 << 20), 4097).error
    assert standing.target.name in error and f"{far + (1 << 20):x}" in error.lower() and "4097" in error.replace(",", ""), error


def wrong_types(near, far, host):
    write = opcode("Write")
    yield "transfer_sync_write", [host, near, far, 16.0]
    yield "transfer_sync_write", [host, near, far, None]
    yield "transfer_sync_write", [host, near, far, "16"]
    yield "transfer_sync_write", [host, near, far, -1]
    yield "transfer_sync_write", [host, near, far, 1 << 64]
    yield "transfer_sync_write", [host, -near, far, 16]
    yield "transfer_sync_write", [host, near, 1 << 64, 16]
    yield "transfer_sync_write", [host, 1 << 200, far, 16]
    yield "transfer_sync_write", [None, near, far, 16]
    yield "transfer_sync_write", [7, near, far, 16]
    yield "transfer_sync_write", [host, near, far]
    yield "transfer_sync_write", [host, near, far, 16, "", 0]
    yield "transfer_sync_write", [host, some_object(), far, 16]
    yield "transfer_sync", [host, near, far, 16, 1]
    yield "transfer_sync", [host, near, far, 16, None]
    yield "transfer_sync", [host, near, far, 16, write, "a notification"]
    yield "batch_transfer_sync_write", [host, near, [far], [16]]
    yield "batch_transfer_sync_write", [host, None, [far], [16]]
    yield "batch_transfer_sync_write", [host, [near], [far], [16.5]]
    yield "batch_transfer_sync_write", [host, [near], [None], [16]]
    yield "batch_transfer_sync_write", [host, [near], [far], [-16]]
    yield "batch_transfer_sync_write", [host, [near], [far], [1 << 64]]
    yield "batch_transfer_async_read", [host, [near], "far", [16]]
    yield "batch_transfer_async", [host, [near], [far], [16], "Write"]
    yield "register_memory", [None, 16]
    yield "register_memory", [near, -1]
    yield "register_memory", [near, 1 << 64]
    yield "register_memory", [near, 1.5]
    yield "register_memory", [near, 16, 7]
    yield "unregister_memory", [-1]
    yield "unregister_memory", ["x"]
    yield "batch_register_memory", [near, 16]
    yield "batch_register_memory", [[near], [None]]
    yield "batch_unregister_memory", [7]
    yield "transfer_check_status", [None]
    yield "transfer_check_status", [-1]
    yield "transfer_check_status", [1 << 64]
    yield "get_batch_transfer_status", [7]
    yield "get_batch_transfer_status", [[None]]
    yield "get_batch_transfer_status", [[-1]]
    yield "allocate_managed_buffer", [-1]
    yield "allocate_managed_buffer", ["8"]
    yield "free_managed_buffer", [near]
    yield "read_bytes_from_buffer", [near, -1]
    yield "write_bytes_to_buffer", [near, 7, 1]
    yield "send_probe", [None]
    yield "get_first_buffer_address", [None]
    yield "initialize", ["127.0.0.1", "P2PHANDSHAKE", "tcp"]
    yield "get_rpc_port", [1]


def test_wrong_types_are_type_errors(standing):
    e = standing.initiator
    for method, args in wrong_types(e.mem, standing.target.mem, standing.target.name):
        call = e.te_fresh(method, *args)
        assert call.raised, f"{method}{args}: {call}"
        # None where a string belongs is a RuntimeError in the peer.
        assert call.raised[0] in ("TypeError", "RuntimeError" if None in args else "TypeError"), f"{method}{args}: {call}"
        assert call.raised[1]
        still_works(standing)


def test_positional_only(standing):
    """The methods that the peer binds without names take none."""
    e = standing.initiator
    for method, kwargs in (("unregister_memory", {"addr": 1}), ("transfer_check_status", {"batch_id": 1}), ("allocate_managed_buffer", {"length": 1})):
        call = e.te_fresh(method, **kwargs)
        assert call.raised and call.raised[0] == "TypeError", call


def test_sizes_beyond_all_memory(standing):
    e, near, far, host = standing.initiator, standing.initiator.mem, standing.target.mem, standing.target.name
    for size in (1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1):
        for op in ("write", "read"):
            fails(e.te_fresh(f"transfer_sync_{op}", host, near, far, size), -1)
            fails(e.te_fresh(f"batch_transfer_sync_{op}", host, [near, near], [far, far], [16, size]), -1)
        still_works(standing)


def test_null_addresses(standing):
    e, near, far, host = standing.initiator, standing.initiator.mem, standing.target.mem, standing.target.name
    for op in ("write", "read"):
        fails(e.te_fresh(f"transfer_sync_{op}", host, 0, far, 16), -1)
        fails(e.te_fresh(f"transfer_sync_{op}", host, near, 0, 16), -1)
        fails(e.te_fresh(f"batch_transfer_sync_{op}", host, [near, 0], [far, far], [16, 16]), -1)
        # Of no bytes, no address is looked at.
        assert e.value(f"transfer_sync_{op}", host, 0, 0, 0) == 0
    still_works(standing)


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("length", [1, 4096, 1 << 20])
def test_local_memory_that_is_not_there(standing, op, length):
    """Addresses that are mapped by nobody, and a range that runs out of the mapped: an error, no signal."""
    e, far, host = standing.initiator, standing.target.mem, standing.target.name
    hole = e.do("hole", size=2 << 20)
    for near in (0x10, hole, hole - 8, (1 << 47) + 5, (1 << 64) - (1 << 21)):
        if near == hole - 8 and length == 1:
            continue
        fails(e.te_fresh(f"transfer_sync_{op}", host, near, far, length), -1)
        call = e.te_fresh(f"batch_transfer_sync_{op}", host, [e.mem, near], [far, far], [64, length])
        fails(call, -1)
        still_works(standing)


def test_what_the_peer_accepts(standing):
    """bytes for a name, numpy integers and arrays, tuples, booleans, keyword names."""
    e, near, far, host = standing.initiator, standing.initiator.mem, standing.target.mem, standing.target.name
    assert e.value("transfer_sync_write", raw_bytes(host.encode()), near, far, 16) == 0
    assert e.value("transfer_sync_write", host, numpy_int(near), numpy_int(far, "int64"), numpy_int(16, "int32")) == 0
    assert e.value("transfer_sync_write", host, near, far, True) == 0
    assert e.value("batch_transfer_sync_write", host, as_tuple([near]), numpy_array([far]), numpy_list([16], "int64")) == 0
    assert e.value("transfer_sync_read", target_hostname=host, buffer=near, peer_buffer_address=far, length=16, transport_hint="x") == 0
    assert (
        e.value("batch_transfer_sync_read", target_hostname=host, buffers=[near], peer_buffer_addresses=[far], lengths=[16], transport_hint="")
        == 0
    )
    assert (
        e.value("transfer_sync", target_hostname=host, buffer=near, peer_buffer_address=far, length=16, opcode=opcode("Read"), notify=None) == 0
    )
    assert e.value("transfer_sync", host, near, far, 16, opcode("Write"), notify("n", "m"), "hint") == 0
    assert e.value("send_probe", peer_server_name=host) == 0
    assert e.value("warmup_efa_segment", segment_name="x") == 0


def test_a_second_initialize_is_refused(standing):
    """-1, and nothing changes: same port, same memory."""
    target = standing.target
    fails(target.te_fresh("initialize", "127.0.0.1", "P2PHANDSHAKE", "tcp", ""), -1)
    fails(target.te_fresh("initialize_ext", "127.0.0.1", "P2PHANDSHAKE", "tcp", "", "etcd"), -1)
    assert target.value("get_rpc_port") == target.port
    still_works(standing)


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "efa", "zzz", ""])
def test_any_protocol_is_tcp(protocol):
    with EngineProcess(OURS) as process:
        process.open(protocol=protocol, device="mlx5_0,mlx5_1")
        assert probe("127.0.0.1", process.port)


def test_xgmi_is_refused():
    with EngineProcess(OURS) as process:
        made = process.do("open_engine", protocol="xgmi")
        assert made["code"] == -1 and made["error"]


def test_names_with_a_port(standing):
    """The port given to initialize is ignored; several engines may be given the same."""
    with EngineProcess(OURS) as process:
        ports = {process.do("open_engine", engine=f"e{n}", host="127.0.0.1:12345")["port"] for n in range(3)}
        assert len(ports) == 3 and 0 not in ports and 12345 not in ports


def test_after_the_engine_is_gone():
    """An engine that was dropped takes its ports along; ids of its batches mean nothing to another engine."""
    with EngineProcess(OURS) as target, EngineProcess(OURS) as process:
        target.open()
        far = target.alloc("mem", 4096, register=True)
        process.open("first")
        name = process.open("second")
        near = process.alloc("mem", 4096)
        id = process.value("transfer_submit_write", target.name, near, far, 64, engine="first")
        assert id > 0
        process.do("drop_engine", engine="first")
        fails(process.te_fresh("transfer_check_status", id, engine="second"), -1)
        assert process.value("transfer_sync_write", target.name, near, far, 64, engine="second") == 0
        port = int(name.rsplit(":", 1)[1])
        process.do("drop_engine", engine="second")

        def gone():
            try:
                return not probe("127.0.0.1", port)
            except ConnectionRefusedError:
                return True

        wait_until(gone, 1 * slack(), "the control port is closed")
        process.open()
        assert process.value("transfer_sync_write", target.name, near, far, 64) == 0


MALFORMED_MC = [
    ("MC_MIN_RPC_PORT", "abc"),
    ("MC_TCP_LANES_PER_PEER", "many"),
    ("MC_TRANSFER_TIMEOUT", "soon"),
    ("MC_HANDSHAKE_CONNECT_TIMEOUT", "-4"),
    ("MC_HANDSHAKE_MAX_LENGTH", "1.5"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "x"),
    ("MC_TCP_PROGRESS_TIMEOUT_SEC", "-3"),
]


def test_a_malformed_mc_setting_is_one_warning():
    """The default holds, and `logging` gets one warning that names the variable."""
    with EngineProcess(OURS, dict(MALFORMED_MC)) as process, EngineProcess(OURS) as target:
        target.open()
        far = target.alloc("mem", 4096, register=True)
        process.open()
        near = process.alloc("mem", 4096)
        assert process.value("transfer_sync_write", target.name, near, far, 64) == 0
        assert 15000 <= process.port <= 17000

        def warned():
            process.value("get_notifies")
            records = [r[2] for r in process.do("logs") if r[1] == "WARNING"]
            return all(any(name in text for text in records) for name, _ in MALFORMED_MC) and records

        records = wait_until(warned, 3, "a warning for each malformed setting")
        for name, _ in MALFORMED_MC:
            assert sum(name in text for text in records) == 1, records


MALFORMED_OURS = [
    ("TENSORFERRY_PORTS", "abc"),
    ("TENSORFERRY_PORTS", "16000-15000"),
    ("TENSORFERRY_PORTS", "1-99999"),
    ("TENSORFERRY_BIND", "not an address"),
    ("TENSORFERRY_LANES_PER_PEER", "0"),
    ("TENSORFERRY_LANES_PER_PEER", "four"),
    ("TENSORFERRY_IO_THREADS", "-1"),
    ("TENSORFERRY_TRANSFER_TIMEOUT", "soon"),
    ("TENSORFERRY_TRANSFER_TIMEOUT", "-1"),
    ("TENSORFERRY_CONNECT_TIMEOUT", ""),
    ("TENSORFERRY_QUEUE_BYTES", "lots"),
    ("TENSORFERRY_LANE_IDLE_PROBE", "nan"),
    ("TENSORFERRY_SPIN", "1s"),
    ("TENSORFERRY_SAFE_COPY", "maybe"),
]


def test_a_malformed_setting_of_ours_is_an_error():
    """initialize says -1 and names the variable; without it the same process makes a good engine."""
    with EngineProcess(OURS) as process:
        for name, value, code, error in process.do("try_settings", settings=MALFORMED_OURS):
            assert code == -1, f"{name}={value!r} was accepted"
            assert error and name in error, f"{name}={value!r}: {error}"
        process.open()
        assert probe("127.0.0.1", process.port)


# SIGPIPE: a host that has set it to its default dies of any write to a closed socket that does not forbid the signal.

SIGPIPE_SCRIPT = TESTS / "sigpipe_host.py"


def test_a_python_host_with_the_default_sigpipe_lives():
    need(OURS)
    with FakeTarget(hang_up_in_body) as fake:
        ran = subprocess.run(
            [sys.executable, str(SIGPIPE_SCRIPT), module_of(OURS)[0], fake.name],
            env=clean_environment(OURS),
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout == "alive\n"


C_HOST = r"""
#include <Python.h>
#include <signal.h>
#include <stdio.h>
int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_DFL);
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    if (PyStatus_Exception(PyConfig_SetBytesArgv(&config, argc, argv))) return 90;
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) return 91;
    PyConfig_Clear(&config);
    return Py_RunMain();
}
"""


def test_a_c_host_with_the_default_sigpipe_lives(tmp_path):
    """A C program that embeds Python and has no handler for SIGPIPE."""
    need(OURS)
    compiler = shutil.which("cc")
    include = sysconfig.get_path("include")
    library = sysconfig.get_config_var("LIBDIR")
    version = sysconfig.get_config_var("LDVERSION")
    if not compiler:
        pytest.skip("skipped: no C compiler (cc)")
    if not Path(include, "Python.h").exists():
        pytest.skip(f"skipped: no Python.h in {include}; on Debian: apt-get install libpython3-dev")
    if not any(Path(library).glob(f"libpython{version}.so*")):
        pytest.skip(f"skipped: no libpython{version}.so in {library}; on Debian: apt-get install libpython3-dev")
    source, program = tmp_path / "host.c", tmp_path / "host"
    source.write_text(C_HOST)
    build = [compiler, str(source), f"-I{include}", f"-L{library}", f"-Wl,-rpath,{library}", f"-lpython{version}", "-o", str(program)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    env = clean_environment(OURS)
    folders = [env.get("PYTHONPATH"), sysconfig.get_path("platlib"), str(TESTS)]
    env["PYTHONPATH"] = ":".join(f for f in folders if f)
    env["PYTHONHOME"] = f"{sys.base_prefix}:{sys.base_exec_prefix}"
    with FakeTarget(hang_up_in_body) as fake:
        run = [str(program), str(SIGPIPE_SCRIPT), module_of(OURS)[0], fake.name]
        ran = subprocess.run(run, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout == "alive\n"
