"""Defects of the peer's control port, names and metadata: none here. test_defects.py has the index."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from defects_kit import Ends
from peers import OURS, PEER, EngineProcess, notify, opcode, slack, wait_until
from raw import (
    CONNECTION,
    METADATA,
    NOTIFY,
    PROBE,
    FakeTarget,
    control,
    descriptor,
    ended,
    frame,
    probe,
    swallow,
)

# Frames for D6: each alone ends the peer's process.
POISON = {
    "notify-array": (NOTIFY, b"[]"),
    "notify-number": (NOTIFY, b"1"),
    "notify-string": (NOTIFY, b'"s"'),
    "notify-null": (NOTIFY, b"null"),
    "notify-name-object": (NOTIFY, b'{"name":{}}'),
    "notify-msg-array": (NOTIFY, b'{"notify_msg":[]}'),
    "notify-bad-utf8": (NOTIFY, b'{"name":"\xff","notify_msg":"m"}'),
    "connection-array": (CONNECTION, b"[]"),
    "connection-number": (CONNECTION, b"1"),
    "connection-qp-string": (CONNECTION, b'{"qp_num":["x"]}'),
    "connection-qp-negative": (CONNECTION, b'{"qp_num":[-1]}'),
    "connection-payload-object": (CONNECTION, b'{"payload":{}}'),
    "legacy-number": (None, b"7"),
    "legacy-garbage": (None, b"GET / HTTP/1.1\r\n\r\n"),
    "probe-deep": (PROBE, b"[" * 5000),
    "metadata-deep": (METADATA, b'{"a":' * 100_000),
    "metadata-garbage": (METADATA, bytes(range(256)) * 40),
    "metadata-empty": (METADATA, b""),
    "unknown-type": (0x80, b"{}"),
    "unknown-type-255": (0xFF, b"{}"),
    "unknown-type-4": (4, b"{}"),
    "huge-number": (NOTIFY, b'{"name":1e999999,"notify_msg":"m"}'),
}
RAW_POISON = {
    "length-zero": bytes(8),
    "length-max": b"\xff" * 8 + b"\x01{}",
    "length-high-bit": b"\x00" * 7 + b"\x80" + b"\x01{}",
    "length-1-TiB": (1 << 40).to_bytes(8, "little") + b"\x01{}",
    "short-body": (100).to_bytes(8, "little") + b"\x01{}",
    "three-bytes": b"\x01\x02\x03",
    "nothing": b"",
    "http": b"GET /metadata HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", [*POISON, *RAW_POISON])
def test_d6_a_malformed_frame_harms_nobody(bombarded, name):
    target = bombarded.target
    raw = RAW_POISON[name] if name in RAW_POISON else frame(*POISON[name])
    control("127.0.0.1", target.port, raw, half_close=True)
    assert target.alive(), target.said()
    assert probe("127.0.0.1", target.port)
    assert descriptor("127.0.0.1", target.port)["protocol"] == "tcp"
    assert bombarded.write().value == 0


@pytest.mark.parametrize("name", ["length-max", "three-bytes", "short-body"])
def test_d6_silence_after_half_a_frame_is_ended(bombarded, name):
    """The client keeps its side open and says no more: it is closed in a few seconds, and delays nobody meanwhile (D7)."""
    port = bombarded.target.port
    with socket.create_connection(("127.0.0.1", port), timeout=15) as idle:
        idle.sendall(RAW_POISON[name])
        call = bombarded.initiator.te("send_probe", bombarded.target.name)
        assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        assert ended(idle)


FORGED = {
    "array": b"[]",
    "number": b"7",
    "null": b"null",
    "string": b'"x"',
    "garbage": b"\xff\xfe{",
    "empty": b"",
    "deep": b"[" * 50_000,
    "nothing in it": b"{}",
}
FORGED_KEYS = {
    "string port": {"tcp_data_port": "80"},
    "array port": {"tcp_data_port": []},
    "big port": {"tcp_data_port": 1 << 40},
    "negative port": {"tcp_data_port": -1},
    "zero port": {"tcp_data_port": 0},
    "array protocol": {"protocol": ["tcp"]},
    "rdma": {"protocol": "rdma"},
    "string address": {"buffers": [{"name": "x", "addr": "1", "length": 1}]},
    "negative length": {"buffers": [{"name": "x", "addr": 4096, "length": -1}]},
    "wrapping buffer": {"buffers": [{"name": "x", "addr": 2**64 - 16, "length": 4096}]},
    "object buffers": {"buffers": {}},
    "number host": {"tcp_data_host": 7},
    "unknown host": {"tcp_data_host": "no-such-host.invalid"},
    "string version": {"tcp_proto_version": "2"},
}


@pytest.mark.parametrize("name", [*FORGED, *FORGED_KEYS])
def test_d6_a_forged_descriptor_is_an_error(bombarded, name):
    """The mirror image: the target's answer is wrong. -1 with a text, never an exception, and the engine works on."""
    initiator = bombarded.initiator
    with FakeTarget(swallow) as fake:
        if name in FORGED:
            fake.metadata = FORGED[name]
        else:
            fake.metadata = json.dumps(fake.descriptor | FORGED_KEYS[name]).encode()
        call = initiator.te_fresh("transfer_sync_write", fake.name, bombarded.near, 0x20000, 16, deadline=45)
    if name == "string version":
        # It may be read as "old", whose WRITE nobody answers; it must not raise.
        assert call.raised is None, call
    else:
        assert call.raised is None and call.value == -1, call
        assert call.error, "failed without a text"
        assert call.seconds <= 10 * slack(), call
    assert bombarded.write().value == 0


def test_d7_idle_control_connections_delay_nobody():
    with Ends(OURS, 4096) as ends:
        idle = [socket.create_connection(("127.0.0.1", ends.target.port)) for _ in range(8)]
        call = ends.write()
        assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        for sock in idle:
            sock.close()


def test_d16_bad_utf8_loses_no_other_notification():
    with Ends(OURS, 4096) as ends:
        port = ends.target.port
        for body in (b'{"name":"a","notify_msg":"1"}', b'{"name":"\xff","notify_msg":"2"}', b'{"name":"c","notify_msg":"3"}'):
            control("127.0.0.1", port, frame(NOTIFY, body))
        seen = ends.target.value("get_notifies")
        assert ["a", "1"] in seen and ["c", "3"] in seen, seen


def told_by(engine) -> bytes:
    """The descriptor of an engine, as its control port tells it."""
    return json.dumps(descriptor("127.0.0.1", engine.port)).encode()


@pytest.mark.parametrize("kind", [OURS, PEER])
def test_d25_a_peer_that_came_back_elsewhere_is_found_within_the_request(kind):
    """One name stands for an engine, then for nobody, then for another engine with other ports and other memory."""
    size = 1 << 16
    with FakeTarget(swallow) as front, EngineProcess(OURS) as initiator, EngineProcess(kind) as first:
        initiator.open()
        near = initiator.alloc("mem", size, seed=2, register=True)
        first.open()
        far = first.alloc("mem", size, seed=1, register=True)
        front.metadata = told_by(first)
        assert initiator.value("transfer_sync_write", front.name, near, far, size) == 0
        assert initiator.value("get_first_buffer_address", front.name) == far
        first.close()
        call = initiator.te_fresh("transfer_sync_write", front.name, near, far, 64)
        assert call.value == -1 and front.name in call.error, call
        assert call.seconds <= 1.0 * slack(), call
        with EngineProcess(kind) as second:
            second.open()
            far = second.alloc("mem", size, seed=1, register=True)
            front.metadata = told_by(second)
            call = initiator.te_fresh("transfer_sync_write", front.name, near, far, size)
            assert call.value == 0 and call.seconds <= 1.0 * slack(), call
            assert second.do("check", name="mem", background=2) == []
            assert initiator.value("get_first_buffer_address", front.name) == far


def complaints(process):
    """What an engine has logged from WARNING up, and said on standard error."""
    records = [text for _, level, text in process.do("logs") if level in ("WARNING", "ERROR", "CRITICAL")]
    return records + process.said().splitlines()


def test_d26_a_clean_run_logs_nothing_that_looks_like_failure():
    """All of a life, at both ends: made, registered, written to, notified, unregistered, ended."""
    with Ends(OURS, 1 << 16) as ends:
        for op in ("write", "read"):
            assert ends.initiator.value(f"transfer_sync_{op}", ends.target.name, ends.near, ends.far, 4096) == 0
        assert ends.initiator.value("transfer_sync", ends.target.name, ends.near, ends.far, 16, opcode("Write"), notify("a", "b")) == 0
        assert ends.initiator.value("send_probe", ends.target.name) == 0
        assert ends.initiator.value("unregister_memory", ends.near) == ends.target.value("unregister_memory", ends.far) == 0
        for end in (ends.initiator, ends.target):
            end.do("drop_engine")
            assert complaints(end) == []


def test_d26_a_peer_that_is_gone_is_called_that():
    """Its end in the middle of things is one line per failed call, which names it, and nothing at the other ends."""
    with Ends(OURS, 1 << 16, TENSORFERRY_LOG="info") as ends, EngineProcess(OURS, {"TENSORFERRY_LOG": "info"}) as third:
        third.open()
        far = third.alloc("mem", 4096, register=True)
        assert ends.write().value == 0
        assert ends.initiator.value("transfer_sync_write", third.name, ends.near, far, 64) == 0
        ends.target.close()
        call = ends.write()
        assert call.value == -1 and ends.target.name in call.error and "cannot be reached" in call.error, call
        assert ends.initiator.value("send_probe", ends.target.name) == -102
        said = wait_until(lambda: complaints(ends.initiator), 5, "the failure is logged")
        assert all(ends.target.name in line for line in said) and len(said) <= 2, said
        assert not any(word in line.lower() for line in said for word in ("json", "malformed", "descriptor", "metadata")), said
        ends.initiator.close()
        wait_until(lambda: third.value("stats")["connections_accepted"] == 1, 5, "its connection was accepted")
        assert complaints(third) == []


def test_d27_a_bad_port_is_no_other_port():
    """Names with an illegal port contact nobody, not even who listens at the port of names without one."""
    with EngineProcess(OURS) as target:
        target.open()
        far = target.alloc("mem", 4096, register=True)
        with EngineProcess(OURS, {"MC_HANDSHAKE_PORT": str(target.port)}) as initiator:
            initiator.open()
            near = initiator.alloc("mem", 4096)
            assert initiator.value("transfer_sync_write", "127.0.0.1", near, far, 16) == 0
            for name in ("127.0.0.1:abc", "127.0.0.1:99999", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:0x10", "127.0.0.1: 80", "[::1]:abc"):
                call = initiator.te_fresh("transfer_sync_write", name, near, far, 16)
                assert call.value == -1 and name in call.error and "port" in call.error, call
                assert initiator.te_fresh("send_probe", name).value < 0
            assert target.value("stats")["connections_accepted"] == 1


def test_d27_addresses_of_both_families():
    """An engine at ::1, one at 127.0.0.1 and one at localhost reach each other, whatever MC_USE_IPV6 says."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as failure:
        pytest.skip(f"skipped: no IPv6 here: {failure}")
    with EngineProcess(OURS, {"MC_USE_IPV6": "0"}) as one, EngineProcess(OURS, {"MC_USE_IPV6": "1"}) as two:
        names = {}
        for process in (one, two):
            process.mem = process.alloc("mem", 4096, seed=1)
            for host in ("::1", "127.0.0.1", "localhost"):
                made = process.do("open_engine", engine=host, host=f"[{host}]" if ":" in host else host)
                assert made["code"] == 0, made
                shown = f"[{host}]" if ":" in host else host
                names[process.pid, host] = f"{shown}:{made['port']}"
                assert process.value("register_memory", process.mem, 4096, engine=host) == 0
        for here, there in ((one, two), (two, one)):
            for ours in ("::1", "127.0.0.1", "localhost"):
                for theirs in ("::1", "127.0.0.1", "localhost"):
                    name = names[there.pid, theirs]
                    call = here.te_fresh("transfer_sync_write", name, here.mem, there.mem, 64, engine=ours)
                    assert call.value == 0, f"{ours} to {name}: {call}"


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of every listening TCP socket of a process."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    found = set()
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = b"".join(bytes.fromhex(host[n : n + 8])[::-1] for n in range(0, len(host), 8))
                found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found


@pytest.mark.parametrize(
    "host, bind, where",
    [
        ("127.0.0.1", None, {"127.0.0.1"}),
        ("127.0.0.2", None, {"127.0.0.2"}),
        ("localhost", None, {"127.0.0.1"}),
        ("127.0.0.1", "127.0.0.3", {"127.0.0.3"}),
        ("127.0.0.1", "0.0.0.0", {"0.0.0.0"}),
        ("some-name.invalid", "127.0.0.1", {"127.0.0.1"}),
    ],
)
def test_d28_it_listens_where_it_is_told(host, bind, where):
    """Both ports, and no other: on the engine's own address, or on that of TENSORFERRY_BIND."""
    with EngineProcess(OURS, {"TENSORFERRY_BIND": bind} if bind else None) as process:
        assert listeners(process.pid) == set()
        made = process.do("open_engine", host=host)
        assert made["code"] == 0, made
        seen = listeners(process.pid)
        assert {address for address, _ in seen} == where and len(seen) == 2, seen
        assert made["port"] in {port for _, port in seen}
        process.do("drop_engine")
        assert listeners(process.pid) == set()
