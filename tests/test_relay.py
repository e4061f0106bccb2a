"""The relay between us and the released engines: what it passes on, and what it does to it."""

from __future__ import annotations

import pytest
from conftest import PAIRS, Pair
from peers import notify, opcode, slack, wait_until
from relay import Relay, RelayError

SIZE = 4 << 20


@pytest.fixture(scope="module", params=PAIRS, ids=str)
def stand(request):
    pair = Pair(request.param, SIZE)
    with Relay(pair.target.name, copies=2) as relay:
        yield pair, relay
    pair.close()


def moved(relay: Relay, copy: int = 0) -> int:
    counts = relay.counts()[copy]["data"]
    return counts["to_target"] + counts["to_initiator"]


def test_transfers_go_through_it(stand):
    pair, relay = stand
    for seed, length in [(2, 1), (3, 65537), (4, SIZE)]:
        for name in relay.names:
            pair.initiator.do("fill", name="mem", seed=seed)
            before = sum(moved(relay, copy) for copy in range(2))
            call = pair.initiator.te("transfer_sync_write", name, pair.initiator.mem, pair.target.mem, length)
            assert call.value == 0, call
            wait_until(lambda: not pair.target.do("check", name="mem", background=seed, length=length), 10, "the bytes have arrived")
            pair.initiator.do("fill", name="mem", seed=seed + 100, length=length)
            call = pair.initiator.te("transfer_sync_read", name, pair.initiator.mem, pair.target.mem, length)
            assert call.value == 0, call
            assert pair.initiator.do("check", name="mem", background=seed, length=length) == []
            assert sum(moved(relay, copy) for copy in range(2)) >= before + 2 * length


def test_notifications_and_probes_go_through_it(stand):
    pair, relay = stand
    before = relay.counts()[1]["control"]["total"]
    args = [relay.names[1], pair.initiator.mem, pair.target.mem, 4096, opcode("Write"), notify("n", "m")]
    call = pair.initiator.te("transfer_sync", *args)
    assert call.value == 0, call
    wait_until(lambda: pair.target.value("get_notifies") == [["n", "m"]], 10, "the notification")
    assert relay.counts()[1]["control"]["total"] > before, "it went past the relay"
    if pair.ends.wire == 2:
        assert pair.initiator.value("send_probe", relay.names[1]) == 0


def test_a_connection_that_is_cut_in_a_payload_fails_a_write(stand):
    pair, relay = stand
    relay.rule(copies=1, way="to_target", after={"bytes": 100_000, "end": "rst"})
    call = pair.initiator.te("transfer_sync_write", relay.names[1], pair.initiator.mem, pair.target.mem, SIZE, deadline=60)
    assert call.value == -1 or not pair.acknowledged, call
    # What is not acknowledged may be called complete before it comes to the relay.
    wait_until(lambda: relay.counts()[1]["data"]["ended"] >= 1, 10, "the relay has cut the connection")
    relay.rule(copies=1)
    if pair.initiator.faithful:
        call = pair.initiator.te("transfer_sync_write", relay.names[1], pair.initiator.mem, pair.target.mem, SIZE)
        assert call.value == 0, call
        assert call.seconds < 1.0 * slack()


def test_an_order_that_is_not_understood_is_an_error(two):
    with Relay(two.target.name) as relay:
        with pytest.raises(RelayError, match="no copy 1"):
            relay.rule(copies=1)
        with pytest.raises(RelayError, match="unknown field `delay`"):
            relay.rule(delay=2)
        assert relay.counts()[0]["data"]["total"] == 0
