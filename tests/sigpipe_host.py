"""A host whose SIGPIPE is the default: `sigpipe_host.py MODULE FAKE`. FAKE resets its data connections in mid-body."""

import ctypes
import importlib
import logging
import mmap
import signal
import sys

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
logging.getLogger().addHandler(logging.NullHandler())
engine_module = importlib.import_module(sys.argv[1])
assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL

engine, target = engine_module.TransferEngine(), engine_module.TransferEngine()
for e in (engine, target):
    assert e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
area = mmap.mmap(-1, 16 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
for _ in range(20):
    assert engine.transfer_sync_write(sys.argv[2], address, 0x20000, 16 << 20) == -1
    assert engine.batch_transfer_sync_write(sys.argv[2], [address] * 64, [0x20000] * 64, [65536] * 64) == -1
# Local memory that is not there, towards a target that is well.
assert target.register_memory(address, 16 << 20) == 0
name = f"127.0.0.1:{target.get_rpc_port()}"
for size in (16, 1 << 20):
    assert engine.transfer_sync_write(name, 0x10, address, size) == -1
    assert engine.transfer_sync_read(name, 0x10, address, size) == -1
assert engine.transfer_sync_write(name, address + 4096, address, 4096) == 0
assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
print("alive", flush=True)
