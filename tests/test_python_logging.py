"""The Python face and its process: what is logged, and signals."""

from __future__ import annotations

import pytest
from process_kit import FULL, good, run

# Logging


def test_a_clean_run_says_nothing():
    done = run("""
    engine, name = new()
    addr = engine.allocate_managed_buffer(4096)
    assert engine.transfer_sync_write(name, addr, addr, 4096) == 0
    """)
    assert good(done) == ""


def test_failures_are_one_error_per_second_and_method():
    done = run("""
    lines = keep_log()
    engine, name = new()
    for _ in range(50):
        assert engine.unregister_memory(0x1000) == -3
    assert engine.register_memory(0, 5) == -1
    errors = [line for line in lines if line[1] == "ERROR"]
    assert len(errors) == 2, errors
    assert {name for name, _, _ in errors} == {"tensorferry.mooncake"}
    assert errors[0][2].startswith("unregister_memory: no buffer is registered at 0x1000"), errors
    time.sleep(1.1)  # the second of which one line is allowed is what this is about
    engine.unregister_memory(0x1000)
    assert "49 more failures of unregister_memory were not logged" in lines[-1][2], lines
    """)
    good(done)


def test_a_peer_that_fails_is_one_error_and_hides_no_other():
    done = run("""
    lines = keep_log()
    engine, _ = new()
    addr = engine.allocate_managed_buffer(4096)
    gone = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gone.append("127.0.0.1:%d" % listener.getsockname()[1])
    for name in [gone[0]] * 20 + [gone[1]]:
        assert engine.transfer_sync_write(name, addr, 4096, 77) == -1
    last = engine.stats()["peers"][gone[0]]["last_error"]
    assert last["code"] == 7 and last["text"].startswith("WRITE of 77 bytes to 0x1000 at " + gone[0]), last
    errors = [text for _, level, text in lines if level == "ERROR"]
    assert sum(gone[1] in text for text in errors) == 1, lines
    assert 1 <= sum(gone[0] in text for text in errors) < 20, lines
    assert "WARNING" not in {level for _, level, _ in lines}, lines
    """)
    good(done)


def test_stats_say_how_each_peer_stands():
    done = run("""
    lines = keep_log(logging.INFO)
    engine, own = new()
    target, name = new()
    local, remote = engine.allocate_managed_buffer(65536), target.allocate_managed_buffer(65536)
    for _ in range(3):
        assert engine.transfer_sync_write(name, local, remote, 5000) == 0
    assert engine.batch_transfer_sync_read(name, [local] * 7, [remote] * 7, [100] * 7) == 0
    assert engine.transfer_sync_read(own, local, local + 8192, 10) == 0
    stats = engine.stats()
    peers = stats["peers"]
    assert set(peers) == {own, name}
    peer = peers[name]
    assert (peer["state"], peers[own]["state"]) == ("connected", "local")
    assert (peer["bytes_written"], peer["bytes_read"], peer["requests_completed"]) == (15000, 700, 10)
    assert peer["lanes_known"] and peer["last_error"] is None and peer["descriptor_age"] < 60
    assert peer["requests_running"] == peer["requests_queued"] == peer["bytes_queued"] == 0
    lane = peer["lanes"][0]
    assert lane["version"] == 2 and lane["address"].startswith("127.0.0.1:") and lane["quiet_for"] >= 0
    # A slice is done when its answer was received, which a waiter may see a moment before.
    assert sum(lane["slices_done"] for lane in peer["lanes"]) in range(1, 11)
    for counter in ("batches_submitted", "batches_completed", "requests_completed", "bytes_read", "lanes_opened"):
        assert stats[counter] == sum(peer[counter] for peer in peers.values()), counter
    engine.close()
    target.close()
    assert lines == [], lines
    """)
    good(done)


def test_an_unconfigured_program_still_sees_why():
    done = run("""
    engine, name = new()
    engine.unregister_memory(0x1000)
    """)
    assert done.returncode == 0
    assert "unregister_memory: no buffer is registered at 0x1000" in done.stderr


def test_another_protocol_and_an_unknown_location_are_said_once():
    done = run("""
    lines = keep_log()
    for _ in range(3):
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "mlx5_0") == 0
        assert engine.stats()["requested_protocol"] == "rdma" and engine.stats()["protocol"] == "tcp"
        buffer = (ctypes.c_char * 16)()
        assert engine.register_memory(ctypes.addressof(buffer), 16, "npu:3") == 0
        engine.close()
    warnings = [text for _, level, text in lines if level == "WARNING"]
    assert len(warnings) == 2 and "rdma" in warnings[0] and "npu:3" in warnings[1], warnings
    """)
    good(done)


@pytest.mark.parametrize("variable", ["MC_LOG_LEVEL", "TENSORFERRY_LOG"])
def test_the_engine_speaks_through_logging_at_the_level_of_its_setting(variable):
    code = """
    lines = keep_log()
    engine, name = new()
    deadline = time.monotonic() + 10
    while not any("MC_GID_INDEX" in text for _, _, text in lines) and time.monotonic() < deadline and sys.argv[1] == "debug":
        time.sleep(0.01)
    engine.close()
    if sys.argv[1] != "debug":
        time.sleep(0.2)  # in which a record would come that must not
    mine = [line for line in lines if line[0].startswith("tensorferry")]
    print(any("MC_GID_INDEX" in text and level == "DEBUG" for _, level, text in mine))
    """
    assert good(run(code, "debug", env={"MC_GID_INDEX": "3", variable: "debug"})) == "True\n"
    assert good(run(code, "", env={"MC_GID_INDEX": "3", variable: "warning"})) == "False\n"


def test_a_malformed_setting_of_the_peers_is_a_warning():
    done = run("""
    lines = keep_log()
    engine, name = new()
    import atexit
    def check():
        assert any(level == "WARNING" and "MC_TRANSFER_TIMEOUT=abc" in text for _, level, text in lines), lines
        print("seen")
    deadline = time.monotonic() + 10
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    check()
    """, env={"MC_TRANSFER_TIMEOUT": "abc"})
    assert good(done) == "seen\n"


def test_a_handler_that_fails_fails_no_call():
    done = run("""
    class Broken(logging.Filter):
        def filter(self, record):
            raise ValueError("mine")
    logging.getLogger("tensorferry.mooncake").addFilter(Broken())
    raised = []
    sys.unraisablehook = lambda what: raised.append(what.exc_value)
    engine, name = new()
    assert engine.unregister_memory(0x1000) == -3
    assert [str(e) for e in raised] == ["mine"]
    """)
    good(done)


# Signals


#: Calls that would take far more than five seconds, and what comes before them.
WAITS = {
    "sync": ("", "engine.transfer_sync_write(peer, addr, 4096, 16)"),
    "read": ("", "engine.batch_transfer_sync_read(peer, [addr], [4096], [16])"),
    "full queue, sync": (FULL, "engine.transfer_sync_write(peer, addr, 4096, 1)"),
    "full queue, async": (FULL, "engine.transfer_submit_write(peer, addr, 4096, 1)"),
    "first address": ("", "engine.get_first_buffer_address(peer)"),
    "probe": ("", "engine.send_probe(peer)"),
    "long list": ("", "engine.batch_unregister_memory(range(1 << 31))"),
    "long list of ids": ("", "engine.get_batch_transfer_status(range(1 << 31))"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait(wait):
    before, call = WAITS[wait]
    done = run(f"""
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    {before}
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < 5)
    own = engine.allocate_managed_buffer(16)
    assert engine.transfer_sync_write(name, own, own, 16) == 0
    """, env={"TENSORFERRY_QUEUE_BYTES": "64KiB"})
    assert good(done) == "interrupted True\n"


@pytest.mark.parametrize(
    "call", ["unregister_memory(addr)", "batch_unregister_memory([addr])", "free_managed_buffer(managed, 16)"]
)
def test_ctrl_c_ends_a_wait_for_a_buffer_in_use(call):
    """Which is half a second, after which its transfers are stopped."""
    done = run(f"""
    engine, name = new()
    listener, peer = silent_peer()
    def seconds():
        memory = ctypes.create_string_buffer(16)
        addr, managed = ctypes.addressof(memory), engine.allocate_managed_buffer(16)
        assert engine.register_memory(addr, 16) == 0
        assert engine.batch_transfer_async_write(peer, [addr, managed], [4096] * 2, [16] * 2)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            engine.{call}
            time.sleep(10)  # On a busy machine the signal may come too late for the call.
        except KeyboardInterrupt:
            took = time.monotonic() - start
        # It ends by itself, in half a second: whoever asked would be helping it.
        time.sleep(1)
        logging.disable()
        assert engine.{call} in (-1, -3)
        engine.unregister_memory(addr)
        return took
    print(min(seconds() for _ in range(3)) < 0.4)
    """)
    assert good(done) == "True\n"


def test_ctrl_c_during_a_call_that_fails_is_not_lost():
    """Saying that it failed runs Python code, in which signals are raised."""
    done = run("""
    engine, name = new()
    listener, peer = silent_peer()
    def answer():
        connection, _ = listener.accept()
        connection.recv(100)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        connection.close()
    threading.Thread(target=answer).start()
    try:
        engine.send_probe(peer)
    except KeyboardInterrupt:
        print("interrupted")
    assert TransferEngine.last_error() is not None
    """)
    assert good(done) == "interrupted\n"


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "SystemExit"])
def test_what_wants_out_of_the_program_gets_through_the_log(raised):
    done = run(f"""
    class Leaving(logging.Filter):
        def filter(self, record):
            if {raised} is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise {raised}
    logging.getLogger("tensorferry.mooncake").addFilter(Leaving())
    engine, name = new()
    memory = ctypes.create_string_buffer(16)
    calls = [
        lambda: engine.unregister_memory(0x1000),
        lambda: engine.register_memory(ctypes.addressof(memory), 16, "npu:3"),
        lambda: TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", ""),
    ]
    for call in calls:
        try:
            call()
        except {raised}:
            print("raised")
    """)
    assert good(done) == "raised\n" * 3


def test_a_submit_waits_for_room_in_the_queue():
    done = run("""
    target, name = new()
    engine, _ = new()
    remote = target.allocate_managed_buffer(1 << 20)
    local = engine.allocate_managed_buffer(1 << 20)
    lists = [[at + i for i in range(900)] for at in (local, remote)] + [[1] * 900]
    codes = []
    def work():
        for _ in range(20):
            codes.append(engine.batch_transfer_sync_write(name, *lists))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 80, (codes, TransferEngine.last_error())
    """, env={"TENSORFERRY_QUEUE_BYTES": "64KiB"})
    good(done)


def test_a_submit_waits_for_room_no_longer_than_its_batch_may_take():
    done = run(f"""
    logging.disable()
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    start = time.monotonic()
    {FULL}
    assert engine.transfer_sync_write(peer, addr, 4096, 1) == -1
    assert 1 < time.monotonic() - start < 4
    {FULL}
    threading.Timer(0.3, engine.close).start()
    assert engine.transfer_sync_write(peer, addr, 4096, 1) == -1
    assert "closed" in TransferEngine.last_error()
    assert time.monotonic() - start < 5
    """, env={"TENSORFERRY_QUEUE_BYTES": "64KiB", "TENSORFERRY_TRANSFER_TIMEOUT": "2s"})
    good(done)


def test_other_threads_run_while_one_waits():
    done = run("""
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    def tick():
        connection = listener.accept()
        for _ in range(200):
            time.sleep(0.001)
        engine.close()
    threading.Thread(target=tick).start()
    start = time.monotonic()
    assert engine.transfer_sync_write(peer, addr, 4096, 16) == -1
    assert "closed" in TransferEngine.last_error(), TransferEngine.last_error()
    assert time.monotonic() - start < 10
    """)
    assert done.returncode == 0, done.stderr


def test_an_async_call_does_not_wait_for_a_silent_peer():
    done = run("""
    logging.disable()
    engine, name = new()
    addr = engine.allocate_managed_buffer(16)
    listener, peer = silent_peer()
    start = time.monotonic()
    batch = engine.batch_transfer_async_read(peer, [addr], [4096], [16])
    assert batch > 0 and time.monotonic() - start < 2
    assert engine.transfer_check_status(batch) == 0
    # Whether it is there was waited for once.
    start = time.monotonic()
    assert all(engine.transfer_submit_write(peer, addr, 4096, 16) for _ in range(40))
    assert time.monotonic() - start < 5
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        engine.get_batch_transfer_status([batch])
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < 8)
    assert engine.transfer_check_status(batch) == -1
    """)
    assert good(done) == "interrupted True\n"
