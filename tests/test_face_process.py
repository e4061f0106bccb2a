"""The pythonic face and the process around it: signals, forks, exits, other interpreters, idling."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
from face_kit import run
from peers import slack

# Import


def test_importing_is_cheap():
    code = """
import sys, time
start = time.perf_counter()
import tensorferry
print(time.perf_counter() - start, [m for m in ("numpy", "asyncio", "logging", "threading", "typing", "json") if m in sys.modules])
"""
    said = [subprocess.check_output([sys.executable, "-I", "-c", code], text=True) for _ in range(3)]
    assert {line.split(maxsplit=1)[1] for line in said} == {"[]\n"}
    assert min(float(line.split()[0]) for line in said) < 0.3


# Signals

WAITS = {
    "read": "segment.read(bytearray(8), 4096)",
    "wait": "transfer.wait()",
    "result": "transfer.result(60)",
    "full queue": "segment.write_async(source, 4096)",
    "open": "engine.open(peer)",
    "buffers": "segment.buffers()",
    "probe": "engine.probe(peer)",
    "notify": "segment.notify(tensorferry.Notification())",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(wait):
    said = run(f"""
    listener, peer = silent_peer()
    engine = tensorferry.Engine(queue_bytes="64KiB", transfer_timeout=60, connect_timeout=60)
    segment, source = engine.segment(peer), bytearray(8)
    transfer = segment.write_async(source, 4096)
    if {wait == "full queue"}:
        full = segment.submit("write", [source] * 1023, range(4096, 5119))
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        {WAITS[wait]}
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < {3 * slack()}, transfer.state)
    target, initiator, memory, at, other = two()
    other.write(b"still works", at)
    assert memory[:11] == b"still works"
    """)
    state = "cancelled" if wait in ("wait", "result") else "running"
    assert said == f"interrupted True {state}\n"


def test_a_signal_that_raises_nothing_does_not_end_a_wait():
    said = run("""
    signal.signal(signal.SIGUSR1, lambda *_: print("seen"))
    listener, peer = silent_peer()
    engine = tensorferry.Engine()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        engine.segment(peer).read(bytearray(8), 4096, timeout=1.0)
    except tensorferry.TimedOut as error:
        print(error.elapsed >= 1.0)
    """)
    assert said == "seen\nTrue\n"


def test_other_threads_run_while_one_waits():
    run("""
    listener, peer = silent_peer()
    engine = tensorferry.Engine()
    ticks, stop = [0], threading.Event()
    def tick():
        while not stop.wait(0.001):
            ticks[0] += 1
    thread = threading.Thread(target=tick)
    thread.start()
    for call in (engine.segment(peer).read_async(bytearray(8), 4096, timeout=1.5).wait, lambda: engine.segment(peer).read(bytearray(8), 4096, timeout=1.5)):
        before = ticks[0]
        try:
            call()
        except tensorferry.TimedOut:
            assert ticks[0] - before > 20, ticks[0] - before
    stop.set()
    thread.join()
    """)


# Exit

ENDS = {
    "nothing is left": "",
    "a transfer runs": "kept = segment.write_async(bytearray(8), 4096)",
    "one that nobody holds": "segment.write_async(bytearray(8), 4096); gc.collect()",
    "a thread waits": """
    def read():
        try:
            segment.read(bytearray(8), 4096)
        except tensorferry.Closed:
            pass
    before = engine.stats()["batches_submitted"]
    threading.Thread(target=read, daemon=True).start()
    while engine.stats()["batches_submitted"] == before:
        time.sleep(0.01)
    """,
    "a registration": "kept = engine.register(bytearray(8))",
    "sys.exit": "sys.exit(0)",
    "a closed engine": "engine.close()",
    "a cycle": "ring = [engine, segment]; ring.append(ring)",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_quickly_and_in_silence(end):
    body = textwrap.indent(textwrap.dedent(ENDS[end]).strip(), "    ")
    start = time.monotonic()
    said = run(f"""
    listener, peer = silent_peer()
    engine = tensorferry.Engine()
    segment = engine.segment(peer)
    print("here")
{body}
    """)
    assert said == "here\n" and time.monotonic() - start < 5 * slack()


# Forks


def test_in_a_forked_child_calls_raise_and_a_new_engine_works():
    said = run("""
    target, engine, memory, at, segment = two()
    listener, peer = silent_peer()
    registered = engine.register(bytearray(8))
    running = engine.segment(peer).read_async(bytearray(8), 4096, timeout=60)
    async def awaited(transfer):
        await transfer
    # A task of the parent's, which the child throws away.
    async def begin():
        coroutine = awaited(running)
        coroutine.send(None)
        return coroutine
    pending = asyncio.new_event_loop().run_until_complete(begin())
    ended = segment.write_async(b"x", at)
    ended.wait()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            calls = [
                lambda: engine.register(bytearray(8)), engine.buffers, engine.notifications, engine.stats,
                lambda: engine.open(target.name), lambda: engine.segment(target.name), lambda: engine.probe(target.name),
                segment.buffers, lambda: segment.write(b"x", at), lambda: segment.read_async(bytearray(1), at),
                lambda: segment.submit("write", [b"x"], [at]), lambda: segment.notify(tensorferry.Notification()),
                running.wait, running.result, running.cancel, running.failures, lambda: running.done, lambda: running.state,
                ended.wait, registered.unregister,
            ]
            for number, call in enumerate(calls):
                try:
                    call()
                    assert False, number
                except tensorferry.ForkedProcess as error:
                    assert isinstance(error, RuntimeError) and str(os.getppid()) in str(error)
            async def main():
                await running
            try:
                asyncio.run(main())
                assert False
            except tensorferry.ForkedProcess:
                pass
            pending.close()
            repr(engine), repr(segment), repr(running), engine.name, engine.closed
            registered.__exit__(None, None, None)
            engine.close()
            with tensorferry.Engine() as fresh:
                other = fresh.open(target.name)
                other.write(b"from the child", at)
                async def again():
                    await other.write_async(b"!", at + 14)
                asyncio.run(again())
            del engine, segment, running, registered, ended, target
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert memory[:15] == b"from the child!"
    assert running.state == "running"
    segment.write(b"the parent", at)
    assert memory[:10] == b"the parent"
    pending.close()
    print("good")
    """)
    assert said == "good\n"


def test_forks_at_any_moment_do_no_harm():
    """Whatever locks threads of the engine, and callers, had at the fork."""
    said = run("""
    target, engine, memory, at, segment = two()
    stop, failures = threading.Event(), []
    def work(part):
        async def main():
            while not stop.is_set():
                await asyncio.gather(*(segment.write_async(bytes([part]) * 100, at + 1000 * part + 100 * i) for i in range(10)))
                segment.write_async(b"dropped", at)
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        time.sleep(0.02)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                segment.write(b"x", at)
            except tensorferry.ForkedProcess:
                with tensorferry.Engine() as fresh:
                    fresh.open(target.name).write(b"child", at + 5000)
            del engine, segment
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    # Before its target, with which the last of those that were dropped would fail.
    engine.close()
    print("good")
    """)
    assert said == "good\n"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        import tensorferry

        def work(name, at, part, answers):
            try:
                with tensorferry.Engine() as engine:
                    segment = engine.open(name)
                    segment.write(bytes([65 + part]) * 100, at + 100 * part)
                    try:
                        segment.write(b"x", at + 5000)
                    except tensorferry.Error as error:
                        answers.put((part, error))
            except BaseException as error:
                answers.put((part, error))

        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[1])
            with tensorferry.Engine() as target:
                memory = bytearray(1000)
                at = target.register(memory).addr
                answers = context.Queue()
                children = [context.Process(target=work, args=(target.name, at, part, answers)) for part in range(4)]
                for child in children:
                    child.start()
                got = sorted((answers.get(timeout=60) for _ in children), key=lambda answer: answer[0])
                for child in children:
                    child.join(60)
                assert [child.exitcode for child in children] == [0] * 4
                assert [type(error) for _, error in got] == [tensorferry.Refused] * 4, got
                assert [error.remote - at for _, error in got] == [5000] * 4
                assert memory[:400] == b"A" * 100 + b"B" * 100 + b"C" * 100 + b"D" * 100
            print("good")
        """)
    )
    said = run(f"""
    import runpy
    sys.argv = [{str(script)!r}, {method!r}]
    runpy.run_path(sys.argv[0], run_name="__main__")
    """ if method == "fork" else f"""
    import subprocess
    print(subprocess.check_output([sys.executable, {str(script)!r}, "spawn"], text=True), end="")
    """)
    assert said == "good\n"


def test_another_interpreter_is_refused():
    pytest.importorskip("_xxsubinterpreters", reason="skipped: this Python has another interface to its interpreters")
    said = run("""
    import _xxsubinterpreters as interpreters
    other = interpreters.create()
    try:
        interpreters.run_string(other, "import tensorferry")
    except interpreters.RunFailedError as error:
        print("ImportError" in str(error) and "works in one only" in str(error))
    tensorferry.Engine().close()
    """)
    assert said == "True\n"


# Idling


def test_idle_engines_use_no_processor_time():
    said = run("""
    target, engine, memory, at, segment = two()
    segment.write(b"x", at)
    time.sleep(1)
    used = []
    while len(used) < 3 and min(used, default=1) >= 0.02:
        before = time.process_time()
        time.sleep(2)  # idle, to be measured
        used.append(time.process_time() - before)
    print(*used)
    """)
    assert min(map(float, said.split())) < 0.02, said


def test_a_dropped_transfer_is_let_go_without_a_thread_of_its_own():
    said = run("""
    target, engine, memory, at, segment = two()
    names = lambda: sorted(thread.name for thread in threading.enumerate())
    before = names()
    for i in range(1000):
        segment.write_async(bytearray(1000), at)
    print(names() == before, before)
    # Before its target, with which those that still run would fail.
    engine.close()
    """)
    assert said == "True ['MainThread', 'tensorferry-logging']\n"
