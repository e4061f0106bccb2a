"""A small engine in the place of ours, for the tests of scripts/gpu-check: right but for the fault that is asked for.

It moves memory of any kind through the CUDA driver, one connection per batch.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading

SUPPORT_CUDA = True

FAULT = os.environ.get("GPU_CHECK_FAULT", "")
HEADER = struct.Struct("<BQQ")
RELAXED = 2


def enter_device_of(address: int):
    """The driver, in the context of the memory's device; None for memory of the host."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    kind, device, context = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()
    if cuda.cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_uint64(address)) or kind.value != 2:
        return None
    cuda.cuPointerGetAttribute(ctypes.byref(device), 9, ctypes.c_uint64(address))
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(device.value))
    cuda.cuCtxSetCurrent(context)
    if FAULT != "spoils-captures":
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
    if FAULT == "context-on-device-0":
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    return cuda


def load(address: int, length: int) -> bytes:
    cuda = enter_device_of(address)
    if cuda is None:
        return ctypes.string_at(address, length)
    data = ctypes.create_string_buffer(length)
    if FAULT == "spoils-captures":
        memory = ctypes.c_void_p()
        cuda.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(4096), 1)
    assert cuda.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(length)) == 0
    return data.raw


def store(address: int, data: bytes) -> None:
    if FAULT == "one-byte-off" and len(data) > 512:
        address, data = address + 1, data[:-1]
    if FAULT == "last-byte-lost" and len(data) > 512:
        data = data[:-1]
    cuda = enter_device_of(address)
    if cuda is None:
        ctypes.memmove(address, data, len(data))
    else:
        assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))) == 0


def receive(connection: socket.socket, length: int) -> bytes:
    got = bytearray()
    while len(got) < length:
        part = connection.recv(length - len(got))
        if not part:
            raise EOFError
        got += part
    return bytes(got)


class TransferEngine:
    def initialize(self, _host, _metadata, _protocol, _device) -> int:
        self.pid = os.getpid()
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self.listener.getsockname()[1]

    def register_memory(self, _address, _length, _location="*") -> int:
        return -1 if FAULT == "registers-nothing" else 0

    @staticmethod
    def last_error() -> str | None:
        return FAULT or None

    def batch_transfer_sync_write(self, peer, locals_, remotes, lengths) -> int:
        return self._batch(1, peer, locals_, remotes, lengths)

    def batch_transfer_sync_read(self, peer, locals_, remotes, lengths) -> int:
        return self._batch(0, peer, locals_, remotes, lengths)

    def _batch(self, write, peer, locals_, remotes, lengths) -> int:
        if os.getpid() != self.pid and FAULT != "forks-on":
            return -1
        host, port = peer.split(":")
        with socket.create_connection((host, int(port))) as connection:
            for local, remote, length in zip(locals_, remotes, lengths):
                connection.sendall(HEADER.pack(write, remote, length))
                if write:
                    connection.sendall(load(local, length))
                    receive(connection, 1)
                else:
                    store(local, receive(connection, length))
        return 0

    def _accept(self) -> None:
        while True:
            connection = self.listener.accept()[0]
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection) -> None:
        with connection:
            while True:
                try:
                    write, address, length = HEADER.unpack(receive(connection, HEADER.size))
                except EOFError:
                    return
                if write:
                    store(address, receive(connection, length))
                    connection.sendall(b"k")
                else:
                    connection.sendall(load(address, length))
