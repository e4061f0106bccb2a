"""What is known to go wrong in the peer's releases does not go wrong here: a test for each defect, by its number.

D10, D12, D13 and D15 are about registration and are in test_registration.py.
"""

from __future__ import annotations

import json
import socket

import pytest
from peers import OURS, PEER, EngineProcess, notify, opcode, raw_bytes, slack, wait_until
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
    hang_up_in_body,
    probe,
    swallow,
)

TARGETS = pytest.mark.parametrize("kind", [OURS, PEER])


class Ends:
    """Our initiator, and a target of either kind."""

    def __init__(self, kind, size, **env):
        self.target = EngineProcess(kind)
        self.initiator = EngineProcess(OURS, env)
        self.target.open()
        self.initiator.open()
        self.far = self.target.alloc("mem", size, seed=1, register=True)
        self.near = self.initiator.alloc("mem", size, seed=2, register=True)

    def write(self, at=0, length=16, remote=None):
        far = self.far + at if remote is None else remote
        return self.initiator.te("transfer_sync_write", self.target.name, self.near + at, far, length)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.initiator.close()
        self.target.close()


@TARGETS
@pytest.mark.parametrize("count, block", [(2500, 16384), (20000, 4096)])
def test_d1_a_long_batch_is_just_a_batch(kind, count, block):
    """Batches beyond any queue complete, each way, and the single transfers after them as well."""
    with Ends(kind, count * block) as ends:
        for _ in range(3):
            answer = ends.initiator.do("grid", 60, op="write", target=ends.target.name, local="mem", remote=ends.far, block=block, count=count)
            assert answer["value"] == 0, answer
            call = ends.write()
            assert call.value == 0 and call.seconds <= 0.5 * slack(), call
        assert ends.target.do("check", name="mem", background=2) == []
        ends.target.do("fill", name="mem", seed=3)
        answer = ends.initiator.do("grid", 60, op="read", target=ends.target.name, local="mem", remote=ends.far, block=block, count=count)
        assert answer["value"] == 0, answer
        assert ends.initiator.do("check", name="mem", background=3) == []


@TARGETS
def test_d2_waiting_in_the_queue_is_no_failure(kind):
    """2,000 x 1 MiB of one range: seconds of work behind one another, none of which times out."""
    block = 1 << 20
    with Ends(kind, block) as ends:
        answer = ends.initiator.do(
            "repeat_batch", 120, op="write", target=ends.target.name, local=ends.near, remote=ends.far, length=block, count=2000
        )
        assert answer["value"] == 0, answer
        assert ends.target.do("check", name="mem", background=2) == []


@TARGETS
def test_d3_a_refusal_does_not_poison_good_requests(kind):
    with Ends(kind, 1 << 20) as ends:
        assert ends.write().value == 0
        for good in (1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1):
            call = ends.write() if good else ends.write(remote=0x10)
            assert call.value == (0 if good else -1), (good, call)
            assert call.seconds <= 0.5 * slack(), (good, call)
            if not good and ends.initiator.faithful:
                assert call.error
        answer = ends.initiator.te("batch_transfer_sync_write", ends.target.name, [ends.near] * 8, [0x10] * 8, [16] * 8)
        assert answer.value == -1
        call = ends.write()
        assert call.value == 0 and call.seconds <= 0.5 * slack(), call


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


@pytest.fixture(scope="module")
def shared():
    kept = []
    yield kept
    for ends in kept:
        ends.__exit__()


@pytest.fixture
def bombarded(shared):
    """Two ends that serve all these tests; new ones only after a test has ended a process."""
    if shared and not (shared[-1].target.alive() and shared[-1].initiator.alive()):
        shared.pop().__exit__()
    if not shared:
        shared.append(Ends(OURS, 1 << 16))
    return shared[-1]


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


def test_d11_a_stuck_peer_blocks_only_its_own():
    """One peer is stopped at first contact; transfers to another go on at their pace, and so does this interpreter."""
    with Ends(OURS, 4096, MC_TRANSFER_TIMEOUT="5") as ends, EngineProcess(OURS) as stuck:
        stuck.open()
        assert ends.write().value == 0
        stuck.freeze()
        ends.initiator.start_te("stuck", "transfer_sync_write", stuck.name, ends.near, ends.far, 16)
        ends.initiator.start_te("address", "get_first_buffer_address", stuck.name)
        for _ in range(50):
            call = ends.write()
            assert call.value == 0 and call.seconds <= 0.5 * slack(), call
        with EngineProcess(OURS) as third:
            third.open()
            far = third.alloc("mem", 4096, register=True)
            call = ends.initiator.te("transfer_sync_write", third.name, ends.near, far, 64)
            assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        answer = ends.initiator.join("stuck", 9 * slack())
        assert answer["value"] == -1 and answer["error"], answer
        stuck.thaw()
        ends.initiator.join("address", 60)


def test_d14_a_notification_that_cannot_be_delivered_is_an_error():
    """Over the frame's limit: refused before a byte moves."""
    with Ends(OURS, 4096) as ends:
        write = opcode("Write")
        call = ends.initiator.te_fresh("transfer_sync", ends.target.name, ends.near, ends.far, 16, write, notify("big", "x" * (1 << 20)))
        assert call.value == -1 and call.error, call
        assert ends.target.do("check", name="mem", background=1) == []
        assert ends.write().value == 0


def test_d16_bad_utf8_loses_no_other_notification():
    with Ends(OURS, 4096) as ends:
        port = ends.target.port
        for body in (b'{"name":"a","notify_msg":"1"}', b'{"name":"\xff","notify_msg":"2"}', b'{"name":"c","notify_msg":"3"}'):
            control("127.0.0.1", port, frame(NOTIFY, body))
        seen = ends.target.value("get_notifies")
        assert ["a", "1"] in seen and ["c", "3"] in seen, seen


def test_d17_waiting_costs_no_processor_time():
    """A target that takes all and never answers: the call ends by its deadline of 5 s, having used under 0.2 s of CPU."""
    with FakeTarget(swallow) as fake, EngineProcess(OURS, {"MC_TRANSFER_TIMEOUT": "5"}) as initiator:
        initiator.open()
        near = initiator.alloc("mem", 4096, seed=1, register=True)
        before = initiator.do("usage")["cpu"]
        call = initiator.te_fresh("transfer_sync_write", fake.name, near, 0x20000, 4096)
        used = initiator.do("usage")["cpu"] - before
        assert call.value == -1 and call.error, call
        assert 4.9 <= call.seconds <= 5.0 + 0.5 * slack(), call
        assert used < 0.2, f"{used:.2f} s of CPU in {call.seconds:.1f} s of waiting"


@pytest.mark.parametrize("server", ["foo://x", "redis://127.0.0.1:6379", "://", "http", "etcd+x://", "P2PHANDSHAKE ", "p2phandshake"])
def test_d18_an_unknown_store_is_an_error(server):
    with EngineProcess(OURS) as process:
        made = process.do("open_engine", metadata=server, deadline=40)
        assert made["code"] == -1
        assert made["error"]
        process.open()  # the process is as good as new
        assert probe("127.0.0.1", process.port)


#: What every method answers on an engine that was never initialized: a code, an id, nothing, or an exception.
BEFORE_INITIALIZE = [
    ("register_memory", [4096, 64], -1),
    ("unregister_memory", [4096], -1),
    ("batch_register_memory", [[4096], [64]], -1),
    ("batch_unregister_memory", [[4096]], -1),
    ("transfer_sync_write", ["127.0.0.1:1", 4096, 4096, 16], -1),
    ("transfer_sync_read", ["127.0.0.1:1", 4096, 4096, 16], -1),
    ("batch_transfer_sync_write", ["127.0.0.1:1", [4096], [4096], [16]], -1),
    ("batch_transfer_sync_read", ["127.0.0.1:1", [4096], [4096], [16]], -1),
    ("transfer_sync", ["127.0.0.1:1", 4096, 4096, 16, {"$": "opcode", "name": "Write"}], -1),
    ("batch_transfer_sync", ["127.0.0.1:1", [4096], [4096], [16], {"$": "opcode", "name": "Read"}], -1),
    ("batch_transfer_async_write", ["127.0.0.1:1", [4096], [4096], [16]], 0),
    ("batch_transfer_async_read", ["127.0.0.1:1", [4096], [4096], [16]], 0),
    ("batch_transfer_async", ["127.0.0.1:1", [4096], [4096], [16], {"$": "opcode", "name": "Write"}], 0),
    ("transfer_submit_write", ["127.0.0.1:1", 4096, 4096, 16], 0),
    ("transfer_check_status", [12345], -1),
    ("get_batch_transfer_status", [[12345]], -1),
    ("allocate_managed_buffer", [4096], 0),
    ("get_first_buffer_address", ["127.0.0.1:1"], 0),
    ("get_rpc_port", [], "RuntimeError"),
    ("get_notifies", [], "RuntimeError"),
]


@pytest.fixture
def never_initialized():
    with EngineProcess(OURS) as process:
        process.do("make_engine", engine="main")
        yield process


@pytest.mark.parametrize("method, args, wanted", BEFORE_INITIALIZE, ids=[row[0] for row in BEFORE_INITIALIZE])
def test_d19_calls_before_initialize(never_initialized, method, args, wanted):
    call = never_initialized.te_fresh(method, *args)
    if isinstance(wanted, str):
        assert call.raised and call.raised[0] == wanted and call.raised[1], call
    else:
        assert call.raised is None and call.value == wanted, call
        if method != "get_first_buffer_address":
            assert call.error, "failed without a text"


def test_d19_ids_that_are_over_or_never_were():
    """An id is good until its final state was told once; then, as for an id that never was, the answer is -1."""
    with Ends(OURS, 4096) as ends:
        e, name = ends.initiator, ends.target.name

        def submit(remote):
            id = e.value("batch_transfer_async_write", name, [ends.near], [remote], [64])
            assert id > 0
            return id

        good = submit(ends.far)
        assert e.value("get_batch_transfer_status", [good]) == 0
        assert e.value("get_batch_transfer_status", [good]) == -1
        assert e.value("transfer_check_status", good) == -1
        good = submit(ends.far)
        assert e.do("poll", id=good)["status"] == 1
        assert e.value("transfer_check_status", good) == -1
        assert e.value("get_batch_transfer_status", [good]) == -1
        bad = submit(0x10)
        assert e.value("get_batch_transfer_status", [bad]) == -1
        assert e.value("get_batch_transfer_status", [bad]) == -1
        empty = e.value("batch_transfer_async_write", name, [], [], [])
        assert empty > 0 and e.do("poll", id=empty)["status"] == 1
        answer = e.do("made_up_ids", 60, count=10_000)
        assert answer["odd"] == [] and answer["asked"] == 10_000
        assert ends.write().value == 0


def test_d19_bytes_and_managed_buffers():
    with Ends(OURS, 4096) as ends:
        e = ends.initiator
        calls = [
            e.te_fresh("write_bytes_to_buffer", 0, raw_bytes(b"x"), 1),
            e.te_fresh("write_bytes_to_buffer", ends.near, raw_bytes(b"x"), 100),
            e.te_fresh("write_bytes_to_buffer", 0x10, raw_bytes(b"x"), 1),
            e.te_fresh("read_bytes_from_buffer", 0, 5),
            e.te_fresh("read_bytes_from_buffer", 0x10, 5),
            e.te_fresh("free_managed_buffer", 12345, 300 << 20),
            e.te_fresh("free_managed_buffer", 12345, 64),
        ]
        for call in calls:
            assert call.raised or (call.value == -1 and call.error), call
        assert e.do("check", name="mem", background=2) == []
        first = e.value("allocate_managed_buffer", 8192)
        assert e.value("free_managed_buffer", first, 8192) == 0
        again = e.te_fresh("free_managed_buffer", first, 8192)
        assert again.raised or again.value != 0, "a block was freed twice"
        blocks = {e.value("allocate_managed_buffer", 8192) for _ in range(4)}
        assert len(blocks) == 4 and 0 not in blocks
        assert ends.write().value == 0


def test_d19_none_for_the_protocol():
    with EngineProcess(OURS) as process:
        process.do("make_engine", engine="main")
        for at in range(4):
            args = ["127.0.0.1", "P2PHANDSHAKE", "tcp", ""]
            args[at] = None
            call = process.te_fresh("initialize", *args)
            assert call.raised and call.raised[0] in ("TypeError", "RuntimeError"), call
        assert process.value("initialize", "127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0


@pytest.mark.parametrize("lists", [([1, 2], [1], [1]), ([1], [1, 2], [1]), ([1], [1], [1, 2]), ([], [1], [1]), ([1], [1], [])], ids=str)
def test_d20_lists_of_different_lengths(bombarded, lists):
    """Refused before the target is even looked for."""
    e, unknown = bombarded.initiator, "127.0.0.1:1"
    buffers, remotes, lengths = ([bombarded.near] * len(lists[0]), [bombarded.far] * len(lists[1]), [16] * len(lists[2]))
    for host in (unknown, bombarded.target.name):
        for op in ("write", "read"):
            call = e.te_fresh(f"batch_transfer_sync_{op}", host, buffers, remotes, lengths)
            assert call.value == -1 and call.error, call
            call = e.te_fresh(f"batch_transfer_async_{op}", host, buffers, remotes, lengths)
            assert call.value == 0 and call.error, call
    assert bombarded.write().value == 0


def test_d20_registering_lists_of_different_lengths(bombarded):
    e = bombarded.initiator
    lone = e.alloc("lone", 8192)
    for addresses, lengths in (([lone, lone + 4096], [16]), ([lone], [16, 16]), ([], [16]), ([lone], [])):
        call = e.te_fresh("batch_register_memory", addresses, lengths)
        assert call.value == -1 and call.error, call
    assert e.value("register_memory", lone, 4096) == 0
    assert e.value("unregister_memory", lone) == 0


@TARGETS
@pytest.mark.parametrize("good_first", [True, False])
def test_d23_a_status_is_that_of_the_whole_batch(kind, good_first):
    """One refused entry among two, or among many: never 1."""
    with Ends(kind, 1 << 20) as ends:
        for others in (1, 50):
            remotes = [ends.far + n * 64 for n in range(others)]
            remotes.insert(others if good_first else 0, 0x10)
            locals_ = [ends.near + n * 64 for n in range(others + 1)]
            id = ends.initiator.value("batch_transfer_async_write", ends.target.name, locals_, remotes, [64] * (others + 1))
            assert id > 0
            assert ends.initiator.do("poll", id=id)["status"] == -1
        assert ends.write().value == 0


def test_d31_a_peer_that_hangs_up_in_the_body_is_an_error():
    """The connection is reset while we send: -1 with a text, no signal, no hang."""
    with FakeTarget(hang_up_in_body) as fake, Ends(OURS, 8 << 20) as ends:
        for op in ("write", "read"):
            call = ends.initiator.te_fresh(f"transfer_sync_{op}", fake.name, ends.near, 0x20000, 8 << 20)
            assert call.value == -1 and call.error, call
            assert call.seconds <= 5 * slack(), call
        wait_until(lambda: ends.write().value == 0, 1, "the engine works on")
