"""The Python face and the process around it: import, exit, fork, and programs for another engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from process_kit import FULL, good, run

# Import


def test_importing_is_quick_and_light():
    code = """
    import sys, time
    start = time.perf_counter()
    import tensorferry.mooncake
    seconds = time.perf_counter() - start
    heavy = [m for m in ("numpy", "logging", "threading", "asyncio", "typing") if m in sys.modules]
    print(seconds, heavy)
    """
    outputs = [subprocess.check_output([sys.executable, "-I", "-c", textwrap.dedent(code)], text=True) for _ in range(3)]
    assert all("numpy" not in line and "logging" not in line for line in outputs)
    assert min(float(line.split()[0]) for line in outputs) < 0.3


# The end of the interpreter, and of an engine


ENDS = {
    "nothing is left": "",
    "a batch is running": "engine.batch_transfer_async_write(name, [addr] * 100, [addr] * 100, [1 << 20] * 100)",
    "a thread waits": """
    listener, peer = silent_peer()
    threading.Thread(target=engine.transfer_sync_write, args=(peer, addr, 4096, 16), daemon=True).start()
    connection = listener.accept()
    """,
    "sys.exit": "sys.exit(0)",
    "engines refer to each other": "pair = [engine]; pair.append(pair); del engine",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_quickly_and_in_silence(end):
    body = textwrap.indent(textwrap.dedent(ENDS[end]).strip(), "    ")
    start = time.monotonic()
    done = run(f"""
    logging.basicConfig(level=logging.DEBUG, filename=os.devnull)
    engine, name = new()
    addr = engine.allocate_managed_buffer(1 << 20)
    began = time.monotonic()
{body}
    """, env={"TENSORFERRY_LOG": "debug"})
    assert good(done) == ""
    assert time.monotonic() - start < 5


def test_an_engine_ends_with_its_object():
    done = run("""
    other, _ = new()
    def seconds():
        before = set(os.listdir("/proc/self/task"))
        engine, name = new()
        threads = set(os.listdir("/proc/self/task")) - before
        assert threads
        assert other.send_probe(name) == 0
        start = time.monotonic()
        del engine
        gc.collect()
        took = time.monotonic() - start
        logging.disable()
        assert other.send_probe(name) < 0
        # A thread that was joined is listed until the system has put it away.
        while threads & set(os.listdir("/proc/self/task")):
            assert time.monotonic() - start < 10
            time.sleep(0.01)
        return took
    assert min(seconds() for _ in range(3)) < 1
    """)
    good(done)


def test_dropping_an_engine_lets_other_threads_run_and_ends_its_batches():
    done = run("""
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    result = []
    thread = threading.Thread(target=lambda: result.append(engine.transfer_sync_write(peer, addr, 4096, 16)))
    logging.disable()
    thread.start()
    connection = listener.accept()
    engine.close()
    thread.join(5)
    assert result == [-1]
    """)
    good(done)


# Fork


def test_in_a_forked_child_every_call_answers_at_once():
    done = run("""
    logging.disable()
    engine, name = new()
    addr = engine.allocate_managed_buffer(4096)
    listener, peer = silent_peer()
    batch = engine.batch_transfer_async_write(peer, [addr], [4096], [16])
    assert batch and engine.transfer_check_status(batch) == 0
    calls = {
        "register_memory": (4096, 16), "unregister_memory": (addr,), "batch_register_memory": ([4096], [16]),
        "batch_unregister_memory": ([addr],), "transfer_sync_write": (peer, addr, 4096, 16),
        "transfer_sync_read": (name, addr, addr, 16), "transfer_sync": (name, addr, addr, 16, TransferOpcode.Read),
        "batch_transfer_sync_write": (peer, [addr], [4096], [16]), "batch_transfer_sync_read": (name, [addr], [addr], [16]),
        "batch_transfer_sync": (name, [addr], [addr], [16], TransferOpcode.Write),
        "batch_transfer_async_write": (peer, [addr], [4096], [16]), "batch_transfer_async_read": (name, [addr], [addr], [16]),
        "batch_transfer_async": (name, [addr], [addr], [16], TransferOpcode.Write),
        "transfer_submit_write": (peer, addr, 4096, 16), "transfer_check_status": (batch,),
        "get_batch_transfer_status": ([batch],), "allocate_managed_buffer": (16,), "free_managed_buffer": (addr, 4096),
        "write_bytes_to_buffer": (addr, b"x", 1), "get_first_buffer_address": (name,), "send_probe": (name,),
        "initialize": ("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
    }
    ids = [n for n in calls if "async" in n or n in ("transfer_submit_write", "allocate_managed_buffer", "get_first_buffer_address")]
    # A busy machine may make a child slow, but not three.
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            start = time.monotonic()
            for method, args in calls.items():
                assert getattr(engine, method)(*args) == (0 if method in ids else -1), method
                assert "made before a fork" in TransferEngine.last_error(), method
            for method, args in {"read_bytes_from_buffer": (addr, 1), "get_notifies": ()}.items():
                try:
                    getattr(engine, method)(*args)
                except RuntimeError as error:
                    assert "made before a fork" in str(error), error
                else:
                    raise AssertionError(method)
            assert f"127.0.0.1:{engine.get_rpc_port()}" == name and engine.get_engine() and engine.get_engine_ptr()
            assert engine.stats()["protocol"] == "tcp" and engine.get_batch_transfer_status([]) == 0
            sys.exit(7 if time.monotonic() - start < 1 else 8)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 8:
            break
    assert code == 7
    assert engine.transfer_check_status(batch) == 0
    assert engine.transfer_sync_write(name, addr, addr, 16) == 0
    """, python=("-W", "ignore::DeprecationWarning"))
    good(done)


@pytest.mark.parametrize("end", ["engine.close()", "del engine; gc.collect()", "engine.close(); del engine; gc.collect()", ""])
def test_a_child_of_a_busy_process_ends_at_once(end):
    """Whatever locks the engine's threads and callers had at the fork."""
    done = run(f"""
    logging.disable()
    engine, name = new()
    other, _ = new()
    addr = engine.allocate_managed_buffer(1 << 20)
    local = other.allocate_managed_buffer(1 << 20)
    stop = threading.Event()
    def transfer(engine=engine):
        while not stop.is_set():
            other.batch_transfer_sync_write(name, [local] * 50, [addr] * 50, [4096] * 50)
    def allocate(engine=engine):
        while not stop.is_set():
            engine.free_managed_buffer(engine.allocate_managed_buffer(64 << 10), 64 << 10)
    def probe(engine=engine):
        while not stop.is_set():
            other.get_first_buffer_address(name)
            engine.write_bytes_to_buffer(addr, b"x" * 5000, 5000)
    def make():
        while not stop.is_set():
            made = TransferEngine()
            making.append(made)
            made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
            making.pop().close()
    making = []
    threads = [threading.Thread(target=f) for f in (transfer, allocate, probe, make)]
    for f in (transfer, allocate, probe):
        f.__defaults__ = (engine,)
    for thread in threads:
        thread.start()
    while engine.stats()["served_writes"] < 500:
        time.sleep(0.01)
    for i in range(40):
        pid = os.fork()
        if pid == 0:
            # What a child of `multiprocessing` does not do: all of the interpreter's end.
            signal.alarm(20)
            threads.clear()
            for f in (transfer, allocate, probe):
                f.__defaults__ = None
            for made in making:
                made.close()
            {end or "pass"}
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, i
    stop.set()
    for thread in threads:
        thread.join()
    assert engine.transfer_sync_write(name, addr, addr, 16) == 0
    """, python=("-W", "ignore::DeprecationWarning"), timeout=120)
    good(done)


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_child_has_none_of_the_sockets(fork):
    """So that peers see the parent's end. Python is not told of every fork."""
    done = run(f"""
    def sockets():
        ours = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{fd}}")]
        return sum(os.readlink(f"/proc/self/fd/{{fd}}").startswith("socket:") for fd in ours)
    before = sockets()
    logging.disable()
    engine, name = new()
    other, _ = new()
    addr, local = engine.allocate_managed_buffer(4096), other.allocate_managed_buffer(4096)
    assert other.transfer_sync_write(name, local, addr, 4096) == 0
    assert sockets() > before
    pid = {fork}()
    if pid == 0:
        signal.alarm(20)
        if "ctypes" in {fork!r}:
            engine.close()
            del other
            gc.collect()
        assert sockets() == before, (sockets(), before)
        assert engine.send_probe(name) == -1
        fresh, own = new()
        assert fresh.send_probe(own) == 0
        fresh.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert other.transfer_sync_write(name, local, addr, 4096) == 0
    """, python=("-W", "ignore::DeprecationWarning"))
    good(done)


FORKING_WAITS = {
    "sync": "engine.transfer_sync_write(peer, addr, 4096, 16)",
    "batches": "engine.get_batch_transfer_status([engine.batch_transfer_async_write(peer, [addr], [4096], [16])])",
    "queue": "engine.batch_transfer_sync_write(peer, [addr] * 1024, [4096] * 1024, [1] * 1024)",
    "exchange": "engine.get_first_buffer_address(peer)",
}


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("wait", FORKING_WAITS)
def test_a_signal_handler_may_fork_during_a_wait(wait, leaves):
    done = run(f"""
    logging.disable()
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    if {wait == "queue"}:
        {FULL}
    children = []
    def handle(*_):
        children.append(os.fork())
        if children[0] == 0 and {leaves}:
            raise SystemExit(8)
        if children[0] == 0:
            signal.alarm(20)
        else:
            threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        code = {FORKING_WAITS[wait]}
    except KeyboardInterrupt:
        # The parent went on waiting.
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == (8 if {leaves} else 7)
    else:
        assert children == [0] and code <= 0 and "made before a fork" in TransferEngine.last_error()
        sys.exit(7)
    """, env={"TENSORFERRY_QUEUE_BYTES": "64KiB"}, python=("-W", "ignore::DeprecationWarning"))
    good(done)


def test_children_of_children_log_and_work():
    done = run("""
    lines = keep_log()
    engine, name = new()
    for generation in range(12):
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            sys.exit(7 if generation else 0)
        signal.alarm(50)
        os.environ["MC_TRANSFER_TIMEOUT"] = f"abc{generation}"
        fresh, own = new()
        deadline = time.monotonic() + 10
        while not any(f"MC_TRANSFER_TIMEOUT=abc{generation}" in text for _, _, text in lines):
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)
        assert fresh.send_probe(own) == 0
    sys.exit(7)
    """, python=("-W", "ignore::DeprecationWarning"))
    good(done)


def test_in_a_forked_child_nothing_hangs_and_a_new_engine_works():
    done = run("""
    logging.disable()
    engine, name = new()
    addr = engine.allocate_managed_buffer(4096)
    assert engine.transfer_sync_write(name, addr, addr, 16) == 0
    pid = os.fork()
    if pid == 0:
        start = time.monotonic()
        assert engine.transfer_sync_write(name, addr, addr, 16) == -1
        assert "fork" in TransferEngine.last_error(), TransferEngine.last_error()
        assert engine.batch_transfer_async_write(name, [addr], [addr], [16]) == 0
        assert engine.register_memory(4096, 16) == -1
        assert engine.send_probe(name) < 0
        engine.close()
        fresh, own = new()
        a = fresh.allocate_managed_buffer(64)
        assert fresh.transfer_sync_write(own, a, a + 32, 16) == 0, TransferEngine.last_error()
        del engine, fresh
        gc.collect()
        assert time.monotonic() - start < 5
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    other, _ = new()
    assert other.send_probe(name) == 0
    assert engine.transfer_sync_write(name, addr, addr, 16) == 0
    """, python=("-W", "ignore::DeprecationWarning"))
    good(done)


def test_a_forked_child_still_logs():
    done = run("""
    lines = keep_log()
    engine, name = new()
    pid = os.fork()
    if pid == 0:
        assert engine.register_memory(4096, 16) == -1
        assert any(level == "ERROR" and "register_memory" in text for _, level, text in lines), lines
        os.environ["MC_TRANSFER_TIMEOUT"] = "abc"
        fresh, own = new()
        deadline = time.monotonic() + 10
        while not any("MC_TRANSFER_TIMEOUT=abc" in text for _, _, text in lines):
            assert time.monotonic() < deadline, lines
            time.sleep(0.01)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """, python=("-W", "ignore::DeprecationWarning"))
    good(done)


# Memory that is not there


def test_without_memory_a_call_fails_and_the_process_lives():
    """Addresses are all there is of much memory, and a limit as of a container makes little of it short."""
    done = run("""
    import mmap, resource
    logging.disable()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    length, no_reserve = 1 << 42, 0x4000
    addr = libc.mmap(None, length, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve, -1, 0)
    engine, name = new()
    assert engine.register_memory(addr, length) == 0
    def fails(call, *args):
        try:
            assert call(*args) == -1, call
        except MemoryError:
            pass
        else:
            assert "memory" in TransferEngine.last_error() or "entries" in TransferEngine.last_error()
    fails(engine.read_bytes_from_buffer, addr, length)
    assert engine.read_bytes_from_buffer(addr, 3) == bytes(3)
    message = TransferNotify("a", "x" * (300 << 20))
    many, data, text = [addr] * (30 << 20), bytearray(300 << 20), "x" * (300 << 20)
    now = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + (200 << 20), -1))
    fails(engine.batch_transfer_sync_write, name, many, many, many)
    fails(engine.batch_register_memory, many, many)
    fails(engine.batch_unregister_memory, many)
    fails(engine.get_batch_transfer_status, many)
    fails(engine.write_bytes_to_buffer, addr, data, len(data))
    fails(engine.read_bytes_from_buffer, addr, len(data))
    fails(engine.write_bytes_to_buffer, addr, text + "", len(text))
    fails(TransferNotify, text, "")
    fails(lambda: message.msg)
    assert engine.transfer_sync(name, addr, addr + 64, 16, TransferOpcode.Read, message) == -1
    assert engine.transfer_sync_write(name, addr, addr + 64, 16) == 0
    """)
    good(done)


# The program


def test_the_module_is_the_program(tmp_path):
    for command in ([sys.executable, "-m", "tensorferry"], [str(Path(sys.executable).with_name("tensorferry"))]):
        if not Path(command[0]).exists():
            continue
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith("tensorferry ")
        done = subprocess.run([*command, "no-such-command"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "no-such-command" in done.stderr


def test_ctrl_c_ends_the_program():
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorferry", "demo", "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while not children.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode != 0


# Programs for another engine


PROGRAM = """
import importlib.util, multiprocessing, os, subprocess, sys
import mooncake.engine as engine

def child(queue):
    import mooncake.engine
    queue.put(mooncake.engine.TransferEngine.__module__)

if __name__ == "__main__":
    assert importlib.util.find_spec("mooncake.engine") is not None
    assert engine.TransferEngine.__module__ == "tensorferry.mooncake", engine
    assert sys.modules["__main__"].child is child
    made = engine.TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == "tensorferry.mooncake"
    process.join()
    code = "import mooncake.engine as e; print(e.TransferEngine.__module__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "tensorferry.mooncake\\n"
    assert len(os.environ["PYTHONPATH"].split(os.pathsep)) == len(set(os.environ["PYTHONPATH"].split(os.pathsep)))
    print(sys.argv[0], sys.argv[1:])
    sys.exit(5)
"""

#: A package of the name, as somebody may have installed it.
INSTALLED = {
    "__init__.py": "from mooncake.pool import Pool\nfrom pkgutil import extend_path\n"
    "__path__ = extend_path(__path__, __name__)\nHERE = __file__\n__all__ = ['Pool']\n",
    "engine.py": "raise SystemError('not this one')\n",
    "store.py": "from .engine import TransferEngine\nclass Store: pass\n",
    "pool.py": "class Pool: pass\n",
}


def stand_in(*args: str, cwd: Path, env: dict[str, str] | None = None, times: int = 1):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k != "PYTHONPATH"}
    command = [sys.executable, *(["-m", "tensorferry.mooncake"] * times), *args]
    return subprocess.run(command, cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, timeout=120)


@pytest.fixture
def installed(tmp_path) -> dict[str, str]:
    package = tmp_path / "installed" / "mooncake"
    package.mkdir(parents=True)
    for name, text in INSTALLED.items():
        (package / name).write_text(text)
    return {"PYTHONPATH": str(package.parent)}


@pytest.mark.parametrize("times", [1, 2])
def test_a_script_finds_ours_in_its_place(tmp_path, times):
    script = tmp_path / "folder" / "program.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    done = stand_in("folder/program.py", "a", "-b", cwd=tmp_path, times=times)
    assert done.returncode == 5, done.stderr
    # The second run is a module to the first, which knows it by its file.
    assert done.stdout.endswith("program.py ['a', '-b']\n") and done.stderr == ""


def test_a_module_and_code_find_ours_in_its_place(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = stand_in("-m", "program", "a", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert done.stdout == f"{tmp_path / 'program.py'} ['a']\n"
    done = stand_in("-c", "import sys, mooncake.engine as e; print(e.TransferEngine.__module__, sys.argv)", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensorferry.mooncake ['-c', 'x']\n", "")


def test_the_rest_of_an_installed_package_survives(tmp_path, installed):
    code = (
        "import mooncake, mooncake.store, mooncake.engine as e; "
        "assert mooncake.store.TransferEngine is e.TransferEngine; assert mooncake.Pool and mooncake.HERE; "
        "print(e.TransferEngine.__module__, mooncake.HERE == mooncake.__file__)"
    )
    done = stand_in("-c", code, cwd=tmp_path, env=installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensorferry.mooncake True\n", "")


def test_an_installed_package_that_fails_is_no_reason_to_fail(tmp_path, installed):
    (Path(installed["PYTHONPATH"]) / "mooncake" / "__init__.py").write_text("import no_such_library\n")
    done = stand_in("-c", "import mooncake.engine as e; print(e.TransferEngine.__module__)", cwd=tmp_path, env=installed)
    assert (done.returncode, done.stdout) == (0, "tensorferry.mooncake\n")
    assert "no_such_library" in done.stderr


def test_a_name_that_nobody_has_is_an_error_that_says_so(tmp_path):
    code = """
import mooncake.engine as e
try:
    e.SharedSegment
except AttributeError as error:
    print(error)
try:
    from mooncake.engine import create_rpc_server
except ImportError as error:
    print("tensorferry" in str(error))
print(hasattr(e, "__path__"), "install" in dir(e))
"""
    done = stand_in("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    missing = "tensorferry's mooncake.engine has no 'SharedSegment', and no other mooncake.engine is installed that might"
    assert done.stdout.splitlines() == [missing, "True", "False False"]


def test_an_installed_engine_that_cannot_be_loaded_is_named(tmp_path, installed):
    (Path(installed["PYTHONPATH"]) / "mooncake" / "engine.so").write_text("no library")
    code = "import mooncake.engine as e; print(hasattr(e, 'SharedSegment')); e.SharedSegment"
    done = stand_in("-c", code, cwd=tmp_path, env=installed)
    assert (done.returncode, done.stdout) == (1, "False\n")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("AttributeError: tensorferry's mooncake.engine has no 'SharedSegment', and the one that is installed cannot")
    assert "engine.so" in said


# install()


def plain(code: str, cwd: Path, env: dict[str, str] | None = None):
    """Runs code of a program that nobody has prepared."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "TENSORFERRY_")) and k != "PYTHONPATH"}
    script = cwd / "program.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run([sys.executable, str(script)], cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, timeout=120)


def test_install_puts_the_engine_in_place_where_there_is_no_package(tmp_path):
    done = plain("""
    import importlib.util, multiprocessing

    def child(queue):
        from mooncake.engine import TransferEngine
        queue.put(TransferEngine.__module__)

    def main():
        import tensorferry.mooncake

        assert importlib.util.find_spec("mooncake") is None
        tensorferry.mooncake.install()
        import mooncake.engine
        from mooncake import engine
        from mooncake.engine import TransferEngine

        assert mooncake.engine is engine and TransferEngine is tensorferry.mooncake.TransferEngine
        assert importlib.util.find_spec("mooncake.engine").origin == engine.__file__
        tensorferry.mooncake.install()
        assert mooncake.engine is engine is importlib.import_module("mooncake.engine")
        queue = multiprocessing.get_context("spawn").Queue()
        process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=30))
        process.join()

    if __name__ == "__main__":
        main()
    """, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensorferry.mooncake\n", "")


@pytest.mark.parametrize("before", ["pass", "import mooncake", "import mooncake.pool"])
def test_install_leaves_the_rest_of_an_installed_package(tmp_path, installed, before):
    """Its own engine, which would fail, is never imported."""
    done = plain(f"""
    {before}
    import tensorferry.mooncake
    tensorferry.mooncake.install()
    import mooncake, mooncake.store, importlib.util
    from mooncake import engine
    assert mooncake.store.TransferEngine is engine.TransferEngine is tensorferry.mooncake.TransferEngine
    assert mooncake.Pool and importlib.util.find_spec("mooncake.engine").origin == engine.__file__
    """, tmp_path, installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_install_says_that_it_came_too_late(tmp_path, installed):
    (Path(installed["PYTHONPATH"]) / "mooncake" / "engine.py").write_text("TransferEngine, SharedSegment = 'theirs', 'rest'\n")
    done = plain("""
    from mooncake.engine import TransferEngine as early
    import tensorferry.mooncake
    tensorferry.mooncake.install()
    tensorferry.mooncake.install()
    from mooncake.engine import SharedSegment, TransferEngine
    print(early, TransferEngine.__module__, SharedSegment)
    """, tmp_path, installed)
    assert (done.returncode, done.stdout) == (0, "theirs tensorferry.mooncake rest\n")
    assert done.stderr.count("program.py:4: RuntimeWarning: mooncake.engine was imported before") == 1, done.stderr


def test_install_takes_the_place_of_the_module_itself(tmp_path):
    done = plain("""
    import sys, tensorferry.mooncake
    sys.modules["mooncake.engine"] = tensorferry.mooncake
    tensorferry.mooncake.install()
    import mooncake.engine
    print(mooncake.engine.TransferEngine is tensorferry.mooncake.TransferEngine)
    """, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# The runner's errors


def test_a_program_on_path_is_named_by_its_path(tmp_path):
    done = stand_in("sh", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("there is no file 'sh' here; for the program on PATH, write $(which sh)\nusage: ")
    done = stand_in("no-such-program", cwd=tmp_path)
    assert done.stderr.startswith("there is no file 'no-such-program' here, and no program of that name on PATH\n")


@pytest.mark.parametrize("args", [[], ["nowhere.py"], ["-m"], ["-c"], ["--what"]])
def test_what_cannot_be_run_is_usage(tmp_path, args):
    done = stand_in(*args, cwd=tmp_path)
    assert done.returncode == 2 and "usage: python -m tensorferry.mooncake" in done.stderr
    assert done.stdout == ""


def test_what_a_program_raises_is_shown(tmp_path):
    (tmp_path / "broken.py").write_text("def f():\n    raise KeyError('mine')\nf()\n")
    done = stand_in("broken.py", cwd=tmp_path)
    assert done.returncode == 1 and "raise KeyError('mine')" in done.stderr
    assert stand_in("--help", cwd=tmp_path).stdout.startswith("usage:")
