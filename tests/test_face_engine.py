"""`tensorferry.Engine`: its life, its settings, what peers see of it."""

from __future__ import annotations

import gc
import pickle
import time
import weakref

import pytest
import tensorferry
from face_kit import SIZE, Two, silent_peer
from peers import slack
from tensorferry import Notification


@pytest.fixture(scope="module")
def two():
    pair = Two()
    yield pair
    pair.close()


def test_a_with_block_ends_it():
    with tensorferry.Engine() as engine:
        assert engine.name == f"127.0.0.1:{engine.control_port}"
        assert 15000 <= engine.data_port <= 17000 and engine.data_port != engine.control_port
        assert repr(engine) == f"<Engine {engine.name}>" and not engine.closed
    assert engine.closed and repr(engine) == f"<Engine {engine.name}, closed>"
    engine.close()
    for call in [
        lambda: engine.open("127.0.0.1:1"),
        lambda: engine.segment("127.0.0.1:1"),
        lambda: engine.probe("127.0.0.1:1"),
        lambda: engine.register(bytearray(8)),
    ]:
        with pytest.raises(tensorferry.Closed, match="the engine is closed; make a new one") as caught:
            call()
        assert (caught.value.code, caught.value.kind, caught.value.retryable) == (23, "Closed", False)


def test_it_ends_with_its_last_object(two):
    engine = tensorferry.Engine()
    name, gone = engine.name, weakref.ref(engine)
    two.initiator.probe(name)
    segment = engine.segment(two.target.name)
    del engine
    gc.collect()
    assert segment.engine.name == name
    two.initiator.probe(name)
    del segment
    gc.collect()
    assert gone() is None
    with pytest.raises(tensorferry.PeerUnreachable):
        two.initiator.probe(name)


def test_settings_are_arguments(monkeypatch):
    monkeypatch.setenv("TENSORFERRY_PORTS", "nonsense")
    with tensorferry.Engine(ports=(15000, 16999), transfer_timeout=0.5, queue_bytes="1MiB", spin=0.00002, safe_copy=True, lanes_per_peer=2) as engine:
        assert 15000 <= engine.control_port <= 16999
        with silent_peer() as peer:
            start = time.monotonic()
            with pytest.raises(tensorferry.TimedOut):
                engine.segment(peer).read(bytearray(8), 4096)
            assert 0.4 < time.monotonic() - start < 3 * slack()
    with pytest.raises(tensorferry.ConfigError, match="TENSORFERRY_PORTS=nonsense: expected a port range"):
        tensorferry.Engine()


BAD_SETTINGS = {
    "lanes_per_peer": (0, "lanes_per_peer=0: expected a count from 1 to 64"),
    "io_threads": ("many", "io_threads=many: expected a count from 1 to 64"),
    "ports": ((17000, 15000), "ports=17000-15000: expected a port range such as 15000-17000"),
    "transfer_timeout": (-1.0, "transfer_timeout=-1: expected a time such as 30s or 500ms"),
    "queue_bytes": (1, "queue_bytes=1: expected a size of at least 64KiB"),
    "bind": ("here", "bind=here: expected an IP address"),
    "gpu": ("some", "gpu=some: expected one of auto, off, cuda, musa, hip"),
    "log": ("loud", "log=loud: expected one of error"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting_names_itself(name):
    value, said = BAD_SETTINGS[name]
    with pytest.raises(tensorferry.ConfigError) as caught:
        tensorferry.Engine(**{name: value})
    assert str(caught.value).startswith(said)
    assert isinstance(caught.value, ValueError) and caught.value.code == 1


def test_arguments_of_a_wrong_type_are_type_errors():
    for arguments in [{"ports": [1, 2]}, {"lanes_per_peer": {}}, {"host": 3}, {"nonsense": 1}]:
        with pytest.raises(TypeError):
            tensorferry.Engine(**arguments)


def test_hosts_and_ports_that_cannot_be(two):
    with pytest.raises(tensorferry.PortsExhausted, match="no free port"):
        port = two.target.control_port
        tensorferry.Engine(ports=(port, port + 1), bind="127.0.0.1") and tensorferry.Engine(ports=(port, port + 1))
    with pytest.raises(tensorferry.Error) as caught:
        tensorferry.Engine("not a host")
    assert caught.value.code == 2


def test_names_of_peers(two):
    for name in ["", "host:port", "127.0.0.1:99999"]:
        for call in (two.initiator.open, two.initiator.segment, two.initiator.probe):
            with pytest.raises(tensorferry.BadName) as caught:
                call(name)
            assert isinstance(caught.value, ValueError)
    with pytest.raises(TypeError):
        two.initiator.open(5)
    with pytest.raises(tensorferry.PeerUnreachable, match="cannot be reached") as caught:
        two.initiator.open("127.0.0.1:1")
    assert caught.value.peer == "127.0.0.1:1" and caught.value.retryable and isinstance(caught.value, ConnectionError)


def test_a_segment_can_be_named_without_asking(two):
    start = time.monotonic()
    with silent_peer() as peer:
        segment = two.initiator.segment(peer)
    assert time.monotonic() - start < 1 * slack()
    assert segment.name == peer and repr(segment) == f"<Segment {peer}>" and segment.engine is two.initiator


def test_buffers_of_both_ends(two):
    assert two.target.buffers() == two.segment.buffers() == [two.target.buffers()[0]]
    buffer = two.segment.buffers()[0]
    assert (buffer.addr, buffer.nbytes) == (two.at, SIZE)
    assert repr(buffer) == f"Buffer(addr={two.at:#x}, nbytes={SIZE})"
    assert len({buffer, two.target.buffers()[0]}) == 1
    assert two.initiator.buffers() == []


def test_notifications(two):
    assert two.target.notifications() == []
    two.segment.notify(Notification("first", "1"))
    two.segment.write(b"x", two.at, notify=Notification(message="2"))
    assert two.target.notifications() == [Notification("first", "1"), Notification("", "2")]
    match Notification("a", "b"):
        case Notification(name, message):
            assert (name, message) == ("a", "b")
    assert repr(Notification("a", "b")) == 'Notification(name="a", message="b")'
    with pytest.raises(tensorferry.BadArgument) as caught:
        two.segment.notify(Notification("", "x" * (2 << 20)))
    assert caught.value.kind == "NotifyTooLarge"
    with pytest.raises(TypeError):
        two.segment.notify("text")
    assert two.target.notifications() == []


def test_stats_count(two):
    before = two.initiator.stats()
    two.segment.write(bytes(1000), two.at)
    after = two.initiator.stats()
    assert after["bytes_written"] - before["bytes_written"] == 1000
    assert after["requests_completed"] - before["requests_completed"] == 1
    peer = after["peers"][two.target.name]
    assert peer["bytes_written"] >= 1000 and peer["lanes"]


def test_engines_do_not_mix(two):
    with tensorferry.Engine() as third:
        third.open(two.target.name).write(bytes(5), two.at)
        assert third.stats()["bytes_written"] == 5
        assert third.open(third.name).buffers() == []


def test_the_classes_cannot_be_made_by_hand():
    for cls in (tensorferry.Segment, tensorferry.Transfer, tensorferry.Registration, tensorferry.Buffer):
        with pytest.raises(TypeError):
            cls()


def test_errors_travel_between_processes(two):
    with pytest.raises(tensorferry.Refused) as caught:
        two.segment.write(b"12345", 0x1000)
    error = caught.value
    assert type(error).__module__ == "tensorferry"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is tensorferry.Refused and str(again) == str(error) and vars(again) == vars(error)
