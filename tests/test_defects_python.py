"""Defects of the peer's Python class: none here. test_defects.py has the index."""

from __future__ import annotations

import random
import socket
import threading

import pytest
from defects_kit import Ends
from peers import OURS, EngineProcess, notify, opcode, raw_bytes, slack, wait_until
from raw import METADATA, PROBE, V2, WRITE, DataClient, GoodTarget, descriptor, header, probe


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


#: Calls that a peer can keep waiting. It takes connections to its control port and answers neither question.
HUNG = {
    "transfer_sync_write": lambda peer, near: [peer, near, 0x20000, 16],
    "transfer_sync_read": lambda peer, near: [peer, near, 0x20000, 16],
    "batch_transfer_sync_write": lambda peer, near: [peer, [near] * 8, [0x20000] * 8, [16] * 8],
    "batch_transfer_async_read": lambda peer, near: [peer, [near], [0x20000], [16]],
    "transfer_submit_write": lambda peer, near: [peer, near, 0x20000, 16],
    "get_first_buffer_address": lambda peer, near: [peer],
    "send_probe": lambda peer, near: [peer],
}


def lets_others_run(process, method, args, engine="main"):
    """Calls a method. Beside it, another thread of the interpreter is never kept waiting for most of the call."""
    answer = process.do("longest_silence", 60, method=method, args=args, engine=engine)
    assert answer["silence"] <= max(0.2 * slack(), 0.5 * answer["seconds"]), (method, answer)
    return answer


@pytest.fixture(scope="module")
def waiting():
    """An engine with short deadlines."""
    with EngineProcess(OURS, {"TENSORFERRY_TRANSFER_TIMEOUT": "1s", "TENSORFERRY_CONNECT_TIMEOUT": "1s"}) as process:
        process.open()
        process.near = process.alloc("mem", 4096, register=True)
        yield process


@pytest.mark.parametrize("method", HUNG)
def test_d29_other_threads_run_while_a_peer_does_not_answer(waiting, method):
    with GoodTarget() as hung:
        hung.hushed |= {METADATA, PROBE}
        # Some questions have longer than a transfer: the peer hangs up in the end.
        hang_up = threading.Timer(1.5, hung.close)
        hang_up.start()
        answer = lets_others_run(waiting, method, HUNG[method](hung.name, waiting.near))
        hang_up.join()
        assert 0.2 <= answer["seconds"] <= 10 * slack(), answer
        if "async" in method or "submit" in method:
            assert answer["value"] > 0
            lets_others_run(waiting, "get_batch_transfer_status", [[answer["value"]]])


def test_d29_other_threads_run_while_a_buffer_is_in_use(waiting):
    """`unregister_memory` waits for a peer that stands still in the middle of a WRITE."""
    size = 1 << 20
    address = waiting.alloc("inbound", size, seed=1, register=True)
    with DataClient("127.0.0.1", descriptor("127.0.0.1", waiting.port)["tcp_data_port"]) as client:
        client.send(header(WRITE | V2, address, size), bytes(size // 2))
        wait_until(lambda: waiting.do("peek", name="inbound", start=size // 2 - 1, length=1)["hex"] == "00", 5, "half of it is there")
        answer = lets_others_run(waiting, "unregister_memory", [address])
        assert answer["value"] == 0 and answer["seconds"] >= 0.2, answer


def test_d29_other_threads_run_while_an_engine_comes_and_goes():
    """From the first call to the last, the end with a transfer that hangs among them."""
    with EngineProcess(OURS) as process, GoodTarget() as hung:
        hung.hushed |= {METADATA}
        process.do("make_engine", engine="main")
        for method, args, value in (
            ("initialize", ["no-such-host.invalid", "P2PHANDSHAKE", "tcp", ""], 0),
            ("register_memory", [process.alloc("mem", 1 << 28), 1 << 28], 0),
            ("allocate_managed_buffer", [1 << 28], None),
            ("batch_transfer_async_write", [hung.name, [4096], [4096], [16]], None),
            ("close", [], None),
        ):
            answer = lets_others_run(process, method, args)
            assert value is None or answer["value"] == value, (method, answer)
            assert answer["seconds"] <= 1.0 * slack(), (method, answer)


def test_d30_an_empty_batch_with_a_notification_notifies():
    with Ends(OURS, 4096) as ends:
        for n, op in enumerate(("Write", "Read")):
            assert ends.initiator.value("batch_transfer_sync", ends.target.name, [], [], [], opcode(op), notify("empty", str(n))) == 0
        assert ends.target.value("get_notifies") == [["empty", "0"], ["empty", "1"]]


def test_d30_what_is_not_known_is_said_and_not_obeyed():
    """An unknown protocol is TCP, with a line in the log and both names in `stats()`; a hint changes nothing."""
    with EngineProcess(OURS) as process:
        process.open(protocol="bogus")
        near = process.alloc("mem", 8192, seed=1, register=True)
        assert process.value("transfer_sync_write", process.name, near, near + 4096, 64, "bogus") == 0
        stats = process.value("stats")
        assert (stats["protocol"], stats["requested_protocol"]) == ("tcp", "bogus")
        wait_until(lambda: any("bogus" in text for _, level, text in process.do("logs") if level == "WARNING"), 5, "the log says so")


def test_d30_topology_and_the_end_take_no_second():
    with EngineProcess(OURS) as process:
        for _ in range(3):
            process.open()
            call = process.te("get_local_topology")
            assert call.seconds <= 0.2 * slack(), call
            call = process.te("close")
            assert call.seconds <= 0.5 * slack(), call
            process.do("drop_engine")


def two_free_ports() -> int:
    """The first of two neighbouring ports that nobody has, below those that the kernel gives to connections."""
    for _ in range(100):
        first = random.randrange(20_000, 32_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", first))
                two.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return first
    raise AssertionError("no two neighbouring ports are free")


def test_d30_a_range_of_one_port_is_too_small_and_says_so():
    first = two_free_ports()
    with EngineProcess(OURS, {"TENSORFERRY_PORTS": f"{first}-{first}"}) as process:
        made = process.do("open_engine")
        assert made["code"] == -1
        assert "two ports" in made["error"] and "TENSORFERRY_PORTS" in made["error"], made


def test_d30_a_restart_in_two_ports_does_not_wait_for_old_connections():
    """Killed with connections open in both directions, again and again: its ports are free at once."""
    first = two_free_ports()
    with EngineProcess(OURS) as peer:
        peer.open()
        near = peer.alloc("mem", 4096, seed=1, register=True)
        for _ in range(5):
            with EngineProcess(OURS, {"TENSORFERRY_PORTS": f"{first}-{first + 1}"}) as process:
                process.open()
                mine = process.alloc("mem", 4096, seed=2, register=True)
                assert process.value("transfer_sync_write", peer.name, mine, near, 64) == 0
                assert peer.value("transfer_sync_write", process.name, near, mine, 64) == 0


def test_d30_a_managed_buffer_publishes_itself_only():
    with EngineProcess(OURS) as process:
        process.open()
        at = process.value("allocate_managed_buffer", 5000)
        published = descriptor("127.0.0.1", process.port)["buffers"]
        assert len(published) == 1 and published[0]["addr"] == at and 5000 <= published[0]["length"] <= 8192, published


def test_d30_ids_are_small_positive_numbers():
    with Ends(OURS, 4096) as ends:
        for _ in range(10):
            id = ends.initiator.value("transfer_submit_write", ends.target.name, ends.near, ends.far, 16)
            assert 0 < id < 1 << 63
            assert ends.initiator.value("get_batch_transfer_status", [id]) == 0
