"""A process that was stopped and goes on looks at what has arrived before it looks at the clock."""

from __future__ import annotations

import socket
import threading

from peers import OURS, EngineProcess
from raw import METADATA, FakeTarget, descriptor, frame, header, receive, status_frame

LENGTH = 4096


def pass_seconds(seconds: float) -> None:
    """The stimulus of these tests: time passes while a process is stopped."""
    threading.Event().wait(seconds)


def test_an_answer_that_came_while_the_initiator_was_stopped_is_taken():
    asked, answer_now, answered = (threading.Event() for _ in range(3))

    def serve(sock: socket.socket) -> None:
        assert len(receive(sock, 24)) == 24
        asked.set()
        answer_now.wait(20)
        sock.sendall(status_frame(0) + b"z" * LENGTH)
        answered.set()
        receive(sock, 1)

    with FakeTarget(serve) as target, EngineProcess(OURS, env={"TENSORFERRY_TRANSFER_TIMEOUT": "1500ms"}) as initiator:
        initiator.open()
        local = initiator.alloc("mem", LENGTH)
        initiator.start_te("read", "transfer_sync_read", target.name, local, 0x10000, LENGTH)
        assert asked.wait(10)
        initiator.freeze()
        answer_now.set()
        assert answered.wait(10)
        pass_seconds(2)
        initiator.thaw()
        assert initiator.join("read", 10)["value"] == 0


def test_what_came_while_the_target_was_stopped_is_served():
    with EngineProcess(OURS) as target:
        target.open()
        address = target.alloc("mem", LENGTH, seed=5, register=True)
        data_port = data_port_of(target.port)
        request = header(0x80, address, 8)
        with socket.create_connection(("127.0.0.1", data_port), 20) as data, socket.create_connection(("127.0.0.1", target.port), 20) as control:
            data.sendall(request[:12])
            pass_seconds(0.2)
            target.freeze()
            data.sendall(request[12:])
            control.sendall(frame(METADATA, b"{}"))
            pass_seconds(5.5)
            target.thaw()
            assert receive(data, 16)[:8] == status_frame(0)
            assert b"tcp_data_port" in receive(control, 200)


def test_a_busy_connection_is_not_taken_for_half_a_header():
    with EngineProcess(OURS) as target:
        target.open()
        address = target.alloc("mem", LENGTH, seed=5, register=True)
        request = header(0x80, address, 8)
        with socket.create_connection(("127.0.0.1", data_port_of(target.port)), 20) as data:
            data.sendall(request[:10])
            for _ in range(14):
                pass_seconds(0.5)
                data.sendall(request[10:] + request[:10])
                assert receive(data, 16)[:8] == status_frame(0)


def data_port_of(control_port: int) -> int:
    return descriptor("127.0.0.1", control_port)["tcp_data_port"]
