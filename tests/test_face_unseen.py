"""Transfers that fail, and that are dropped without anybody having asked how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
import tensorferry
from face_kit import Two, run, silent_peer
from peers import wait_until

LOGGER = logging.getLogger("tensorferry.transfer")
DATA = b"12345678"


@contextlib.contextmanager
def heard():
    """The records of the logger, as they come."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    try:
        yield records
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = True


@contextlib.contextmanager
def pair():
    """Two engines, of which the target has a name that no other test has: lines are counted by peer."""
    two = Two()
    try:
        yield two
    finally:
        two.close()


def fail(two, *, dropped=True):
    """A transfer that has failed."""
    transfer = two.segment.write_async(DATA, 4096)
    wait_until(lambda: transfer.done, 20, "it has ended")
    return None if dropped else transfer


def lines_after_all_else(records) -> list[str]:
    """What was logged, when everything has been that there was to log until now: records come in their order."""
    with pair() as last:
        last_line = f"at {last.target.name} "
        # Again and again, should its name have been another's a moment ago: a peer has one line a second.
        wait_until(lambda: fail(last) or any(last_line in record.getMessage() for record in records), 20, "the last line is there")
        return [record.getMessage() for record in records if last_line not in record.getMessage()]


def test_a_failure_that_nobody_has_asked_about_is_one_warning():
    with heard() as records, pair() as two:
        fail(two)
        wait_until(lambda: records, 20, "it is logged")
        assert len(lines_after_all_else(records)) == 1
        (record,) = (record for record in records if two.target.name in record.getMessage())
        assert (record.levelname, record.name, record.threadName) == ("WARNING", "tensorferry.transfer", "tensorferry-logging")
        text = record.getMessage()
        assert text.startswith("Transfer: it failed, and nobody asked how it ended (await it, or call wait() or result()): WRITE of 8")
        assert "in no buffer that the peer has registered" in text


@pytest.mark.parametrize("local", ["an object", "an address"])
def test_one_that_fails_after_it_was_dropped_is_a_warning_too(local):
    with heard() as records, silent_peer() as peer, tensorferry.Engine() as engine:
        lender = bytearray(8)
        with engine.register(lender) as lent:
            given = (lender,) if local == "an object" else (lent.addr,)
            engine.segment(peer).read_async(*given, 4096, 8, timeout=0.2)
            # What another test has dropped may be logged as late as now.
            wait_until(lambda: any(peer in record.getMessage() for record in records), 20, "it is logged")
        (text,) = (record.getMessage() for record in records if peer in record.getMessage())
        assert "READ of 8 bytes" in text and "not complete at its deadline" in text


def test_one_that_somebody_has_asked_about_is_not():
    async def awaited(two):
        with pytest.raises(tensorferry.Refused):
            await two.segment.write_async(DATA, 4096)
        await asyncio.gather(*(two.segment.write_async(DATA, 4096) for _ in range(3)), return_exceptions=True)

    with heard() as records, pair() as two:
        for look in (lambda t: t.wait(), lambda t: t.result()):
            with pytest.raises(tensorferry.Refused):
                look(fail(two, dropped=False))
        assert fail(two, dropped=False).state == "failed"
        assert len(fail(two, dropped=False).failures()) == 1
        asyncio.run(awaited(two))
        assert lines_after_all_else(records) == []


def test_to_ask_while_it_runs_is_not_to_see_how_it_ends():
    with heard() as records, silent_peer() as peer, tensorferry.Engine() as engine:
        transfer = engine.segment(peer).read_async(bytearray(8), 4096, timeout=0.3)
        assert transfer.state == "running" and transfer.failures() == [] and not transfer.wait(0)
        del transfer
        wait_until(lambda: records, 20, "it is logged")


def test_what_is_complete_or_ends_on_purpose_is_not():
    async def given_up(segment):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(segment.read_async(bytearray(8), 4096, timeout=60), 0.05)

    with heard() as records, pair() as two, silent_peer() as peer:
        two.segment.write_async(DATA, two.at).wait()
        two.segment.write_async(DATA, two.at)
        with tensorferry.Engine() as engine:
            segment = engine.segment(peer)
            segment.read_async(bytearray(8), 4096, timeout=60).cancel()
            asyncio.run(given_up(segment))
            running = segment.read_async(bytearray(8), 4096, timeout=60)
            segment.read_async(bytearray(8), 4096, timeout=60)
        assert running.done  # Both have failed, since the engine was closed.
        del running
        assert lines_after_all_else(records) == []


def test_many_are_few_lines():
    with heard() as records, pair() as two:
        for _ in range(200):
            fail(two)
        assert 1 <= len(lines_after_all_else(records)) < 200


def test_the_setting_of_the_log_counts():
    said = run(
        """
        import logging
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(name)s %(message)s")
        target, initiator, memory, at, segment = two()
        def fail():
            transfer = segment.write_async(b"12345678", 4096)
            while not transfer.done:
                time.sleep(0.001)
        fail()
        """,
        env={"TENSORFERRY_LOG": "error"},
    )
    assert said == ""


def test_the_end_of_the_interpreter_is_silent_about_what_it_drops():
    said = run("""
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s")
    target, initiator, memory, at, segment = two()
    kept = segment.write_async(b"12345678", 4096)
    while not kept.done:
        time.sleep(0.001)
    ring = [kept]
    ring.append(ring)
    listener, peer = silent_peer()
    running = initiator.segment(peer).read_async(bytearray(8), 4096, timeout=60)
    """)
    assert said == ""


def test_what_is_dropped_before_the_end_is_told_before_the_end():
    said = run("""
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s")
    target, initiator, memory, at, segment = two()
    transfer = segment.write_async(b"12345678", 4096)
    while not transfer.done:
        time.sleep(0.001)
    del transfer
    """)
    assert said == "tensorferry.transfer WARNING\n"


def test_a_forked_child_says_nothing_of_its_parents_transfers():
    said = run("""
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s")
    target, initiator, memory, at, segment = two()
    transfer = segment.write_async(b"12345678", 4096)
    while not transfer.done:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        with tensorferry.Engine():
            del transfer
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    try:
        transfer.result()
    except tensorferry.Refused:
        print("seen")
    """)
    assert said == "seen\n"
