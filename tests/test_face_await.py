"""`await` in the pythonic face: asyncio, without a thread for each transfer and without polling."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref

import pytest
import tensorferry
from face_kit import SIZE, Two, run, silent_peer
from peers import slack

DATA = bytes(range(1, 65))


@pytest.fixture(scope="module")
def two():
    pair = Two()
    yield pair
    pair.close()


class Lender(bytearray):
    """A bytearray that can be watched."""


def test_a_transfer_is_awaited(two):
    async def main():
        assert await two.segment.write_async(DATA, two.at) is None
        back = bytearray(64)
        await two.segment.read_async(back, two.at)
        assert back == DATA
        transfer = two.segment.submit("write", [DATA] * 10, [two.at + 64 * i for i in range(10)])
        await transfer
        await transfer  # It has ended, and can be asked again.

    asyncio.run(main())
    assert two.memory[:640] == DATA * 10


def test_a_failure_is_raised_where_it_is_awaited(two):
    async def main():
        with pytest.raises(tensorferry.Refused) as caught:
            await two.segment.write_async(DATA, two.at + SIZE)
        assert caught.value.remote == two.at + SIZE
        results = await asyncio.gather(
            two.segment.write_async(DATA, two.at), two.segment.write_async(DATA, two.at + SIZE), return_exceptions=True
        )
        assert results[0] is None and isinstance(results[1], tensorferry.Refused)

    asyncio.run(main())


def test_the_tools_of_asyncio_work_with_it(two):
    async def main(peer, engine):
        segment = engine.segment(peer)
        with pytest.raises(TimeoutError) as caught:
            await asyncio.wait_for(segment.write_async(DATA, 4096, timeout=60), 0.1)
        assert not isinstance(caught.value, tensorferry.Error)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await segment.write_async(DATA, 4096, timeout=60)
        with pytest.raises(tensorferry.TimedOut):
            await segment.write_async(DATA, 4096, timeout=0.1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(two.segment.write_async(DATA, two.at + 64 * i))) for i in range(20)]
        assert all(task.done() for task in tasks)
        kept = segment.write_async(DATA, 4096, timeout=60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(wait(kept)), 0.1)
        assert kept.state == "running"
        kept.cancel()

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


async def wait(transfer):
    await transfer


def test_a_cancelled_await_cancels_the_transfer_and_ends_when_the_memory_is_left_alone():
    async def main(peer, engine):
        lender = Lender(64)
        gone = weakref.ref(lender)
        transfer = engine.segment(peer).read_async(lender, 4096, timeout=60)
        task = asyncio.create_task(wait(transfer))
        del lender
        await asyncio.sleep(0.05)
        assert gone() is not None
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < 0.5 * slack()
        assert transfer.state == "cancelled"
        gc.collect()
        assert gone() is None

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


def test_reads_that_are_cancelled_write_nothing_afterwards():
    pair = Two()
    pair.memory[:] = b"\1" * SIZE

    async def main():
        lender, cancelled = bytearray(SIZE), 0
        for i in range(40):
            transfer = pair.segment.submit("read", [lender] * 16, [pair.at] * 16)
            task = asyncio.create_task(wait(transfer))
            await asyncio.sleep(0.0005 * (i % 5))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert transfer.done
            cancelled += transfer.state == "cancelled"
            lender[:] = b"\2" * SIZE
            await asyncio.sleep(0.001)
            assert lender == b"\2" * SIZE
        assert cancelled > 0

    try:
        asyncio.run(main())
    finally:
        pair.close()


def test_a_task_that_is_cancelled_twice_still_waits_for_the_memory():
    async def main(peer, engine):
        transfers = [engine.segment(peer).read_async(bytearray(64), 4096, timeout=60) for _ in range(20)]
        tasks = [asyncio.create_task(wait(transfer)) for transfer in transfers]
        await asyncio.sleep(0)
        for _ in range(3):
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks) and {transfer.state for transfer in transfers} == {"cancelled"}

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


def test_several_tasks_may_await_one_transfer():
    async def main(peer, engine):
        transfer = engine.segment(peer).read_async(bytearray(64), 4096, timeout=0.2)
        results = await asyncio.gather(*(wait(transfer) for _ in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [tensorferry.TimedOut] * 5

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


def test_a_thousand_transfers_at_once():
    """No thread and no descriptor for each, and the loop comes round quickly while they end.

    What counts is the processor time between two turns of the loop: others on this machine do not change it.
    """
    pair = Two()

    async def main():
        turns, stop = [], asyncio.Event()

        async def tick():
            last = time.thread_time()
            while not stop.is_set():
                await asyncio.sleep(0)
                now = time.thread_time()
                turns.append(now - last)
                last = now

        await pair.segment.write_async(DATA, pair.at)
        ticking = asyncio.create_task(tick())
        threads = [threading.active_count()]
        descriptors, system_threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        for round in range(3):
            sources = [bytearray([(i + round) % 251] * 1000) for i in range(1000)]
            waiting = []
            for i, source in enumerate(sources):
                waiting.append(asyncio.create_task(wait(pair.segment.write_async(source, pair.at + 1000 * i))))
                if i % 10 == 9:
                    threads.append(threading.active_count())
                    await asyncio.sleep(0)
            await asyncio.gather(*waiting)
            assert all(pair.memory[1000 * i : 1000 * (i + 1)] == source for i, source in enumerate(sources))
        stop.set()
        await ticking
        assert max(threads) == threads[0] and len(os.listdir("/proc/self/task")) <= system_threads + 8
        # Connections to the peer, of which both ends are in this process.
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * 4
        turns.sort()
        assert turns[int(len(turns) * 0.99)] <= 0.005, (turns[-5:], len(turns))

    try:
        asyncio.run(main())
    finally:
        pair.close()


def test_waiting_costs_nothing():
    """No polling: a loop that only waits uses no processor time."""

    async def main(peer, engine):
        segment = engine.segment(peer)
        waiting = [asyncio.create_task(wait(segment.read_async(bytearray(8), 4096, timeout=60))) for _ in range(100)]
        await asyncio.sleep(0.3)
        used = []
        while len(used) < 3 and min(used, default=1) >= 0.05:
            before = time.process_time()
            await asyncio.sleep(1.5)
            used.append(time.process_time() - before)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert min(used) < 0.05, used

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


def test_each_loop_has_one_descriptor_which_goes_with_it(two):
    def eventfds():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link) == "anon_inode:[eventfd]" for link in links)

    async def some():
        before = eventfds()
        for _ in range(5):
            await asyncio.gather(*(two.segment.write_async(DATA, two.at) for _ in range(20)))
        return eventfds() - before

    before = eventfds()
    # It has none where every transfer has ended before anybody awaits it.
    assert max(asyncio.run(some()) for _ in range(10)) == 1
    gc.collect()
    assert eventfds() == before


def test_loops_in_several_threads(two):
    failures = []

    def work(part):
        async def main():
            for i in range(30):
                source, back = bytearray([part + i] * 64), bytearray(64)
                await two.segment.write_async(source, two.at + 64 * part)
                await two.segment.read_async(back, two.at + 64 * part)
                assert source == back

        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_coroutine_that_is_thrown_away_cancels_its_transfer():
    with silent_peer() as peer, tensorferry.Engine() as engine:
        loop = asyncio.new_event_loop()
        transfer = engine.segment(peer).read_async(bytearray(8), 4096, timeout=60)

        async def main():
            coroutine = wait(transfer)
            coroutine.send(None)
            coroutine.close()

        loop.run_until_complete(main())
        loop.close()
        with pytest.raises(tensorferry.Cancelled):
            transfer.wait(30)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("closed", [False, True])
def test_a_loop_that_is_left_with_transfers_pending_goes_as_a_whole(closed):
    left = []

    def leave(engine, peer):
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)
        transfer = engine.segment(peer).read_async(bytearray(8), 4096, timeout=60)
        task = loop.create_task(wait(transfer))
        loop.run_until_complete(asyncio.sleep(0))
        assert not task.done()
        if closed:
            loop.close()
        left.append(weakref.ref(loop))
        return transfer

    with silent_peer() as peer, tensorferry.Engine() as engine:
        transfers = [leave(engine, peer) for _ in range(5)]
        gc.collect()
        assert [loop() for loop in left] == [None] * 5
        for transfer in transfers:
            with pytest.raises(tensorferry.Cancelled):
                transfer.wait(30)


def test_outside_a_loop_it_says_what_to_do(two):
    transfer = two.segment.write_async(DATA, two.at)
    with pytest.raises(RuntimeError, match=r"awaited in a running loop of asyncio only; elsewhere, call its wait\(\)"):
        wait(transfer).send(None)
    assert transfer.wait()


def test_a_full_queue_does_not_hold_up_a_loop():
    """Where a loop runs, nothing waits for room, whatever `on_full` says; in a thread it does, and the loop goes round."""

    async def main(peer, engine):
        segment = engine.segment(peer)
        source = bytearray(1)
        with engine.register(source) as lent:
            full = segment.submit("write", [lent.addr] * 1024, range(4096, 5120), 1, timeout=60)
            starts = [
                lambda **options: segment.write_async(source, 4096, timeout=60, **options),
                lambda **options: segment.read_async(source, 4096, timeout=60, **options),
                lambda **options: segment.submit("write", [lent.addr], [4096], 1, timeout=60, **options),
            ]
            start = time.monotonic()
            for begin in starts:
                for options in ({}, {"on_full": "wait"}, {"on_full": 30}):
                    with pytest.raises(tensorferry.Busy, match="would hold up the event loop of this thread; await") as caught:
                        begin(**options)
                    assert (caught.value.peer, caught.value.code, caught.value.retryable) == (peer, 20, True)
                with pytest.raises(tensorferry.Busy, match="wait for a batch to end"):
                    begin(on_full="refuse")
            assert time.monotonic() - start < 1 * slack()
            waiting = [asyncio.create_task(asyncio.to_thread(begin)) for begin in starts]
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not any(task.done() for task in waiting)
            await asyncio.to_thread(full.cancel)
            for transfer in await asyncio.gather(*waiting):
                transfer.cancel()

    with tensorferry.Engine(queue_bytes="64KiB") as engine, silent_peer() as peer:
        asyncio.run(main(peer, engine))


def test_without_a_loop_it_waits_for_room_also_after_asyncio_was_used(two):
    async def nothing():
        pass

    asyncio.run(nothing())
    with tensorferry.Engine(queue_bytes="64KiB") as engine, silent_peer() as peer:
        segment = engine.segment(peer)
        full = segment.submit("write", [b"x"] * 1024, range(4096, 5120), timeout=60)
        canceller = threading.Timer(0.1, full.cancel)
        canceller.start()
        segment.write_async(b"x", 4096, timeout=60).cancel()
        # There is room a moment before its state says so.
        canceller.join()
        assert full.state == "cancelled"


def test_a_closed_engine_wakes_whoever_awaits():
    async def main(peer, engine):
        waiting = [asyncio.create_task(wait(engine.segment(peer).read_async(bytearray(8), 4096))) for _ in range(5)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.close)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [tensorferry.Closed] * 5

    with silent_peer() as peer, tensorferry.Engine() as engine:
        asyncio.run(main(peer, engine))


def test_ctrl_c_in_a_loop_cancels_what_is_awaited():
    said = run("""
    listener, peer = silent_peer()
    engine = tensorferry.Engine()
    transfer = engine.segment(peer).read_async(bytearray(8), 4096, timeout=60)
    async def main():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        await transfer
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted", transfer.state)
    """)
    assert said == "interrupted cancelled\n"


def test_a_loop_that_ends_with_transfers_running_does_no_harm():
    said = run("""
    listener, peer = silent_peer()
    engine = tensorferry.Engine()
    async def main():
        asyncio.create_task(asyncio.wait_for(engine.segment(peer).read_async(bytearray(8), 4096, timeout=60), 60))
        await asyncio.sleep(0.1)
    asyncio.run(main())
    print("done")
    """)
    assert said == "done\n"
