"""Defects of the peer on its data connections: none here. test_defects.py has the index."""

from __future__ import annotations

import socket
import struct

import pytest
from defects_kit import TARGETS, Ends
from peers import OLD_PEER, OURS, EngineProcess, slack, wait_until
from raw import V2, WRITE, DataClient, FakeTarget, GoodTarget, descriptor, hang_up_in_body, header, receive, status_frame


@pytest.mark.parametrize("version", [None, 2], ids=["v1", "v2"])
def test_d21_headers_carry_zeros_in_their_padding(version):
    """Of every header on the wire: single requests and batches, each way, from fresh and from used connections."""
    with GoodTarget(version=version) as target, EngineProcess(OURS) as initiator:
        initiator.open()
        near = initiator.alloc("mem", 1 << 16, seed=1)
        rounds, count = (4, 1000) if version else (2, 50)
        for _ in range(rounds):
            for op in ("write", "read"):
                lists = [near] * count, [0x20000 + 16 * n for n in range(count)], [16] * count
                assert initiator.value(f"batch_transfer_sync_{op}", target.name, *lists) == 0
                assert initiator.value(f"transfer_sync_{op}", target.name, near, 0x20000, 1 << 16) == 0
        assert len(target.headers) == rounds * 2 * (count + 1)
        assert {head[17:] for head in target.headers} == {bytes(7)}


def test_d31_a_peer_that_hangs_up_in_the_body_is_an_error():
    """The connection is reset while we send: -1 with a text, no signal, no hang."""
    with FakeTarget(hang_up_in_body) as fake, Ends(OURS, 8 << 20) as ends:
        for op in ("write", "read"):
            call = ends.initiator.te_fresh(f"transfer_sync_{op}", fake.name, ends.near, 0x20000, 8 << 20)
            assert call.value == -1 and call.error, call
            assert call.seconds <= 5 * slack(), call
        wait_until(lambda: ends.write().value == 0, 1, "the engine works on")


def refuse_and_reset(sock):
    """Answers a WRITE as the peer does: refused after its header, and closed while its body is unread, so that it is reset."""
    receive(sock, 24)
    sock.sendall(status_frame(1))


def test_d31_a_refusal_before_a_reset_is_heard():
    """The error is the refusal, each time, and not that of the connection that broke while we were sending."""
    with FakeTarget(refuse_and_reset) as fake, Ends(OURS, 8 << 20) as ends:
        for _ in range(30):
            call = ends.initiator.te_fresh("transfer_sync_write", fake.name, ends.near, 0x20000, 8 << 20)
            assert call.value == -1 and "refused" in call.error, call
            assert call.seconds <= 1.0 * slack(), call


def test_d31_our_refusal_arrives_whole(ours):
    """8 MiB to memory that is not registered: the client can send all of it, and then reads the status and the end."""
    port = descriptor("127.0.0.1", ours.port)["tcp_data_port"]
    for _ in range(10):
        with DataClient("127.0.0.1", port) as client:
            client.send(header(WRITE | V2, 0x20000, 8 << 20), bytes(8 << 20))
            assert client.status() == 1
            client.sock.shutdown(socket.SHUT_WR)
            assert client.receive(1) == b""


@pytest.mark.parametrize("opcode", [0x02, 0x7F, 0x82, 0xFE, 0xFF], ids=hex)
def test_d32_an_unknown_operation_is_not_served(ours, opcode):
    """The connection is closed without a byte, so that whoever asks learns that this engine does not know it."""
    address = ours.alloc("mem", 4096, seed=1, register=True)
    with DataClient("127.0.0.1", descriptor("127.0.0.1", ours.port)["tcp_data_port"]) as client:
        client.send(struct.pack("<QQB7x", 64, address, opcode))
        assert client.receive(1) == b"" and client.ended()


def by_turns(initiator, name, near, far):
    for n in range(12):
        op = "read" if n % 2 else "write"
        call = initiator.te_fresh(f"transfer_sync_{op}", name, near, far, 4096)
        assert call.value == 0 and call.seconds <= 0.5 * slack(), f"{op} {n}: {call}"


@pytest.mark.parametrize("per_connection", [1, None], ids=["one-per-connection", "persistent"])
def test_d33_old_targets_that_close_after_a_request(per_connection):
    """WRITE and READ by turns succeed, whether the v1 target closes after each request or not."""
    with GoodTarget(version=None, per_connection=per_connection) as target, EngineProcess(OURS) as initiator:
        initiator.open()
        near = initiator.alloc("mem", 4096, seed=1)
        by_turns(initiator, target.name, near, 0x20000)
        assert {head[16] & V2 for head in target.headers} == {0}


def test_d33_the_old_release_by_turns():
    with Ends(OLD_PEER, 4096) as ends:
        by_turns(ends.initiator, ends.target.name, ends.near, ends.far)
        assert ends.target.do("check", name="mem", background=2) == []


@TARGETS
def test_d34_a_refused_v1_write_is_a_failure(kind):
    """v1 has no answer for it. It fails here, the request after it does not, and nothing has changed there."""
    with Ends(kind, 1 << 16, MC_TCP_PROTO="1") as ends:
        lone = ends.target.alloc("lone", 4096, seed=5)
        for _ in range(5):
            for length in (16, 4096):
                call = ends.write(length=length, remote=lone)
                assert call.value == -1 and call.error, call
                assert ends.write(length=length).value == 0
        assert ends.target.do("check", name="lone", background=5) == []
