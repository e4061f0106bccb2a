"""A good guest in the process: quiet, quick to come and go, no signal handlers, the interpreter free while bytes move."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from peers import OURS, EngineProcess, at_best, clean_environment, module_of, need, notify, opcode, slack, wait_until
from raw import FakeTarget, read_slowly, swallow

CLEAN = """
import ctypes, importlib, mmap, sys, threading
threading.Thread(target=int).start()  # with its first thread the C library takes a signal for itself
def signals():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
before = signals()
m = importlib.import_module(sys.argv[1])
imported = signals()
a, b = m.TransferEngine(), m.TransferEngine()
assert a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert b.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
area = mmap.mmap(-1, 1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert b.register_memory(at, 1 << 20) == 0
name = f"127.0.0.1:{b.get_rpc_port()}"
for n in range(20):
    assert a.batch_transfer_sync_write(name, [at] * 64, [at + 4096] * 64, [4096] * 64) == 0
    assert a.transfer_sync_read(name, at, at + 8192, 4096) == 0
assert a.send_probe(name) == 0
assert b.unregister_memory(at) == 0
assert before == imported == signals(), (before, imported, signals())
del a
assert before == signals()
"""


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    need(OURS)
    command = [sys.executable, "-c", code, module_of(OURS)[0], *arguments]
    return subprocess.run(command, env=clean_environment(OURS, env), capture_output=True, text=True, timeout=60)


def test_a_clean_run_says_nothing_and_leaves_signals_alone():
    ran = run(CLEAN)
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout, ran.stderr) == ("", "")


def test_import_is_quick():
    """The best of five, under 0.3 s."""
    code = "import time, importlib, sys; t = time.monotonic(); importlib.import_module(sys.argv[1]); print(time.monotonic() - t)"
    best = min(float(run(code).stdout) for _ in range(5))
    assert best < 0.3 * slack(), f"{best:.3f} s"


LEAVE = """
import ctypes, importlib, mmap, sys, threading, time
m = importlib.import_module(sys.argv[1])
e = m.TransferEngine()
assert e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
area = mmap.mmap(-1, 64 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert e.register_memory(at, 64 << 20) == 0
for fake in sys.argv[2:]:
    assert e.batch_transfer_async_write(fake, [at] * 64, [0x20000] * 64, [1 << 20] * 64) > 0
    assert e.batch_transfer_async_read(fake, [at], [0x20000], [64 << 20]) > 0
    threading.Thread(target=e.transfer_sync_read, args=(fake, at, 0x20000, 64 << 20), daemon=True).start()
print(time.monotonic(), flush=True)
"""


def test_exit_is_quick_with_transfers_running():
    """The interpreter ends within a second, though targets are silent, slow or gone and a thread is inside a call."""
    with FakeTarget(swallow) as silent, FakeTarget(read_slowly(4096, 0.05)) as slow, FakeTarget(lambda sock: None) as gone:
        seconds = at_best(lambda: leave(silent.name, slow.name, gone.name), 1.0)
    assert seconds <= 1.0 * slack(), f"{seconds:.2f} s to exit"


def test_exit_is_quick_when_idle():
    assert at_best(leave, 1.0) <= 1.0 * slack()


def leave(*fakes: str) -> float:
    """How long the interpreter takes to end."""
    ran = run(LEAVE, *fakes)
    ended = time.monotonic()
    assert ran.returncode == 0, ran.stderr
    return ended - float(ran.stdout)


def test_sigterm_and_ctrl_c_end_a_blocked_process():
    """SIGTERM ends the process at once; SIGINT raises KeyboardInterrupt out of a blocking call."""
    need(OURS)
    code = (
        "import importlib, sys, ctypes, mmap\nm = importlib.import_module(sys.argv[1])\ne = m.TransferEngine()\n"
        "assert e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0\narea = mmap.mmap(-1, 4096)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(area))\nprint('in', flush=True)\n"
        "try:\n    e.transfer_sync_read(sys.argv[2], at, 0x20000, 4096)\nexcept KeyboardInterrupt:\n    sys.exit(42)\n"
    )
    for sent, wanted in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 42)):
        with FakeTarget(swallow) as silent:
            process = subprocess.Popen(
                [sys.executable, "-c", code, module_of(OURS)[0], silent.name],
                env=clean_environment(OURS),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                assert process.stdout.readline() == "in\n"
                wait_until(lambda: silent.data_connections > 0, 10, "the call is under way")
                os.kill(process.pid, sent)
                began = time.monotonic()
                process.wait(20)
                assert time.monotonic() - began < 1.0 * slack()
                assert process.returncode == wanted, process.stderr.read()
            finally:
                if process.poll() is None:
                    process.kill()
                process.communicate()


def test_the_interpreter_is_free_during_a_read():
    """A counting thread goes on while the main thread is in a synchronous READ of a slow target.

    The best of up to five: others on the machine take the processor from the thread, too.
    """
    with FakeTarget(read_slowly(256 << 10, 0.02)) as slow, EngineProcess(OURS) as process:
        process.open()
        size, paces = 16 << 20, []
        near = process.alloc("mem", size, register=True)
        while len(paces) < 5 and max(paces, default=0) <= 0.6:
            counted = process.do("count_during", 60, thread_seconds=0.5, method="transfer_sync_read", args=[slow.name, near, 0x20000, size])
            assert counted["value"] == 0
            assert counted["seconds"] > 0.5, counted
            paces.append(counted["during"] / counted["alone"])
    assert max(paces) > 0.6, paces


def test_idle_engines_cost_nothing():
    """Two engines that know each other, for two seconds: next to no processor time. What they cost shows every time."""
    with EngineProcess(OURS) as process:
        process.open()
        other = process.open("other")
        near = process.alloc("mem", 8192)
        assert process.value("register_memory", near, 8192, engine="other") == 0
        assert process.value("transfer_sync_write", other, near, near + 4096, 4096) == 0
        used = min(rest(process) for _ in range(3))
    assert used < 0.02, f"{used:.3f} s of CPU in 2 s, at the least of three times"


def rest(process: EngineProcess) -> float:
    """Processor seconds of two idle seconds."""
    before = process.do("usage")["cpu"]
    process.do("rest", seconds=2)
    return process.do("usage")["cpu"] - before


def test_several_engines_in_one_process():
    """Three engines, each with ports, memory and notifications of its own, all under load at once."""
    with EngineProcess(OURS) as process:
        names = [process.open(f"e{n}") for n in range(3)]
        assert len(set(names)) == 3
        size = 1 << 20
        at = [process.alloc(f"m{n}", size, seed=10 + n) for n in range(3)]
        for n in range(3):
            assert process.value("register_memory", at[n], size, engine=f"e{n}") == 0
        # What one engine has registered, another has not.
        call = process.te("transfer_sync_write", names[0], at[1], at[1], 64, engine="e2")
        assert call.value == -1, call
        for n in range(3):
            near = process.alloc(f"s{n}", size, seed=20 + n)
            locals_, remotes = [near + i * 1024 for i in range(1024)], [at[(n + 1) % 3] + i * 1024 for i in range(1024)]
            process.start_te(f"t{n}", "batch_transfer_sync_write", names[(n + 1) % 3], locals_, remotes, [1024] * 1024, engine=f"e{n}")
        for n in range(3):
            assert process.join(f"t{n}", 20)["value"] == 0
        for n in range(3):
            assert process.do("check", name=f"m{(n + 1) % 3}", background=20 + n) == []
        assert process.value("transfer_sync", names[1], at[0], at[1], 8, opcode("Write"), notify("a", "b"), engine="e0") == 0
        wait_until(lambda: process.value("get_notifies", engine="e1") == [["a", "b"]], 5, "a notification at e1")
        assert process.value("get_notifies", engine="e0") == process.value("get_notifies", engine="e2") == []
        process.do("drop_engine", engine="e0")
        assert process.value("transfer_sync_write", names[2], at[1], at[2], 8, engine="e1") == 0


def test_engines_come_and_go():
    """Fifty engines one after another leave no descriptor and no thread behind."""
    with EngineProcess(OURS) as process:
        process.do("come_and_go", 60, times=3)
        before = process.do("usage")
        process.do("come_and_go", 120, times=50)

        def back():
            now = process.do("usage")
            return now["fds"] <= before["fds"] + 2 and now["threads"] <= before["threads"]

        wait_until(back, 3, f"descriptors and threads as before: {before}")
