"""The peer protocol by hand, over plain sockets: a client that breaks rules, and a target that is not one."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

READ, WRITE, V2 = 0x00, 0x01, 0x80
MAGIC = 0x4D435456
CONNECTION, METADATA, NOTIFY, PROBE = 0, 1, 2, 3


def header(opcode: int, address: int, size: int, padding: bytes = bytes(7)) -> bytes:
    """A request header: 24 bytes, of which the last seven are padding."""
    return struct.pack("<QQB", size, address, opcode) + padding


def status_frame(code: int) -> bytes:
    return struct.pack("<II", code, MAGIC)


def receive(sock: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes, or fewer at the end of the stream. The socket's timeout holds for all of it."""
    got, end = bytearray(), time.monotonic() + (sock.gettimeout() or 60)
    while len(got) < length:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(got)} of {length} bytes")
        try:
            part = sock.recv(min(1 << 20, length - len(got)))
        except (ConnectionResetError, BrokenPipeError):
            break
        if not part:
            break
        got += part
    return bytes(got)


def ended(sock: socket.socket) -> bool:
    """Waits for the end of the stream, by close or reset; what was unread before it is dropped."""
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class DataClient:
    """A connection to a data port."""

    def __init__(self, host: str, port: int, timeout: float = 10):
        self.sock = socket.create_connection((host, port), timeout=timeout)

    def send(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def status(self) -> int | None:
        """The code of the next status frame; None if the connection ended."""
        frame = receive(self.sock, 8)
        if len(frame) < 8:
            return None
        code, magic = struct.unpack("<II", frame)
        assert magic == MAGIC, f"not a status frame: {frame.hex()}"
        return code

    def receive(self, length: int) -> bytes:
        return receive(self.sock, length)

    def ended(self) -> bool:
        return ended(self.sock)

    def __enter__(self) -> DataClient:
        return self

    def __exit__(self, *failure) -> None:
        self.sock.close()


def frame(kind: int | None, body: bytes) -> bytes:
    """A control frame; without a kind it is one of the old protocol."""
    typed = body if kind is None else bytes([kind]) + body
    return struct.pack("<Q", len(typed)) + typed


def control(host: str, port: int, raw: bytes, timeout: float = 10, half_close: bool = False) -> bytes | None:
    """Sends bytes to a control port and returns the counted body of the answer (type byte included); None if there is none."""
    with socket.create_connection((host, port), timeout=timeout) as sock:
        try:
            sock.sendall(raw)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            return None
        length = receive(sock, 8)
        if len(length) < 8:
            return None
        return receive(sock, struct.unpack("<Q", length)[0])


def descriptor(host: str, port: int) -> dict:
    """What the engine with this control port says of itself."""
    answer = control(host, port, frame(METADATA, b"{}"))
    assert answer is not None and answer[0] == METADATA, answer
    return json.loads(answer[1:])


def probe(host: str, port: int) -> bool:
    answer = control(host, port, frame(PROBE, b"{}"))
    return answer is not None and json.loads(answer[1:]) == {"status": "success"}


class FakeTarget:
    """Looks like an engine: a control port that hands out a descriptor, and a data port served by `serve(sock)`.

    `buffers` are (address, length) pairs that it claims to have. `metadata` replaces the body of the metadata answer; what
    is asked by a message type in `hushed` is not answered.
    """

    def __init__(self, serve, buffers=((0x10000, 1 << 40),), metadata: bytes | None = None, version: int | None = 2):
        self.serve = serve
        self.metadata = metadata
        self.hushed: set[int] = set()
        self.stopping = threading.Event()
        self.open: list[socket.socket] = []
        self.control_port, self.control_requests = self._listen(self._answer), 0
        self.data_port, self.data_connections = self._listen(self._serve_data), 0
        self.name = f"127.0.0.1:{self.control_port}"
        self.descriptor = {
            "name": self.name,
            "protocol": "tcp",
            "buffers": [{"name": self.name, "addr": a, "length": n} for a, n in buffers],
            "tcp_data_host": "127.0.0.1",
            "tcp_data_port": self.data_port,
            "rdma_server_name": "",
            "timestamp": "2026-01-01 00:00:00.000000",
        }
        if version is not None:
            self.descriptor["tcp_proto_version"] = version

    def _listen(self, serve) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.open.append(listener)

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                self.open.append(sock)
                threading.Thread(target=quietly, args=(serve, sock), daemon=True).start()

        def quietly(serve, sock: socket.socket) -> None:
            with contextlib.suppress(OSError, ValueError), sock:
                serve(sock)

        threading.Thread(target=accept, daemon=True).start()
        return listener.getsockname()[1]

    def _answer(self, sock: socket.socket) -> None:
        self.control_requests += 1
        length = receive(sock, 8)
        if len(length) < 8:
            return
        request = receive(sock, struct.unpack("<Q", length)[0])
        bodies = {
            METADATA: self.metadata if self.metadata is not None else json.dumps(self.descriptor).encode(),
            NOTIFY: b'{"name":"","notify_msg":"success"}',
            PROBE: b'{"status":"success"}',
        }
        if request and request[0] in self.hushed:
            self.stopping.wait(60)
        elif request and request[0] in bodies:
            sock.sendall(frame(request[0], bodies[request[0]]))

    def _serve_data(self, sock: socket.socket) -> None:
        self.data_connections += 1
        self.serve(sock)

    def close(self) -> None:
        self.stopping.set()
        for sock in self.open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> FakeTarget:
        return self

    def __exit__(self, *failure) -> None:
        self.close()


class GoodTarget(FakeTarget):
    """Serves as a good engine does, and has no memory: what is written is dropped, what is read is zeros.

    `per_connection` is how many requests it serves before it closes a connection, as some releases of the peer do after
    one. `opened(n)` is called for each data connection before it is served.
    """

    def __init__(self, version: int | None = 2, per_connection: int | None = None, opened=None):
        self.per_connection = per_connection
        self.opened = opened
        self.headers: list[bytes] = []
        self.live: list[socket.socket] = []
        super().__init__(self._serve, version=version)

    def _serve(self, sock: socket.socket) -> None:
        self.live.append(sock)
        try:
            if self.opened:
                self.opened(self.data_connections)
            served = 0
            while served != self.per_connection and self._serve_one(sock):
                served += 1
        finally:
            sock.close()
            self.live.remove(sock)

    def _serve_one(self, sock: socket.socket) -> bool:
        head = receive(sock, 24)
        if len(head) < 24:
            return False
        self.headers.append(head)
        size, _, opcode = struct.unpack("<QQB", head[:17])
        if opcode & 0x7F == WRITE:
            if len(receive(sock, size)) < size:
                return False
            reply = b""
        else:
            reply = bytes(size)
        sock.sendall((status_frame(0) if opcode & V2 else b"") + reply)
        return True

    def drop(self, reset: bool) -> int:
        """Ends all data connections, by a close or a reset; how many there were. Both ends' kernels know when it returns."""
        dropped = list(self.live)
        for sock in dropped:
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
        end, pause = time.monotonic() + 10, threading.Event()
        while any(sock in self.live for sock in dropped):
            assert time.monotonic() < end, "a data connection was not closed"
            pause.wait(0.001)
        return len(dropped)


def swallow(sock: socket.socket) -> None:
    """Serves data connections by reading all and answering nothing."""
    while sock.recv(1 << 16):
        pass


def acknowledge(sock: socket.socket) -> None:
    """Serves v2 WRITEs: takes each, puts it nowhere and says that it is applied."""
    while len(head := receive(sock, 24)) == 24:
        receive(sock, struct.unpack("<Q", head[:8])[0])
        sock.sendall(status_frame(0))


def hang_up_in_body(sock: socket.socket) -> None:
    """Reads a header and the beginning of what follows, then resets the connection."""
    receive(sock, 24)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_slowly(chunk: int, pause: float):
    """Serves v2 READs, `chunk` bytes at a time with a pause after each. The payload is zeros."""

    def serve(sock: socket.socket) -> None:
        rest = threading.Event()
        while True:
            head = receive(sock, 24)
            if len(head) < 24:
                return
            size = struct.unpack("<Q", head[:8])[0]
            sock.sendall(status_frame(0))
            while size:
                n = min(chunk, size)
                sock.sendall(bytes(n))
                size -= n
                rest.wait(pause)

    return serve
