"""What the tests of the class TransferEngine share: an engine, and memory for it."""

from __future__ import annotations

import ctypes

import pytest
from tensorferry.mooncake import TransferEngine


@pytest.fixture
def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, TransferEngine.last_error()
    yield made
    made.close()


class Memory:
    """Memory that lives as long as this does."""

    def __init__(self, size: int):
        self.bytes = bytearray(size)
        self.keep = (ctypes.c_char * size).from_buffer(self.bytes)
        self.addr = ctypes.addressof(self.keep)


def name_of(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"
