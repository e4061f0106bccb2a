"""Registration in the drop-in: what is refused, what forgives, how it looks to peers that came before it, and how much it bears."""

from __future__ import annotations

import json
import time

import pytest
from peers import OURS, PEER, EngineProcess, as_tuple, at_best, numpy_array, raw_bytes, slack, wait_until
from raw import V2, WRITE, DataClient, FakeTarget, acknowledge, descriptor, header

MANY = 20_000


@pytest.fixture
def area(ours):
    """64 KiB of memory that is not registered."""
    ours.area = ours.alloc("area", 65536, seed=1)
    return ours


def register(process, address, length):
    return process.value("register_memory", address, length)


def refused(process, code, method, *args):
    """The call fails with the peer's code, and says why."""
    call = process.te_fresh(method, *args)
    assert call.value == code, call
    if process.faithful:
        assert call.error, f"{method}{args} failed without a text"


@pytest.mark.parametrize(
    "start, length",
    [(4096, 8192), (4096, 4096), (8192, 100), (0, 65536), (0, 4097), (12287, 2)],
    ids=["repeat", "same-start", "inside", "around", "over-the-start", "over-the-end"],
)
def test_overlap_is_refused(area, start, length):
    assert register(area, area.area + 4096, 8192) == 0
    refused(area, -7, "register_memory", area.area + start, length)
    assert [b["length"] for b in descriptor("127.0.0.1", area.port)["buffers"]] == [8192]
    assert area.value("unregister_memory", area.area + 4096) == 0


def test_side_by_side_is_fine(area):
    assert [register(area, area.area + n * 4096, 4096) for n in (1, 0, 2)] == [0, 0, 0]
    assert len(descriptor("127.0.0.1", area.port)["buffers"]) == 3


def test_no_length_is_refused_and_harms_nobody(two):
    target, initiator = two.target, two.initiator
    lone = target.alloc("lone", 4096)
    refused(target, -1, "register_memory", lone, 0)
    refused(target, -1, "batch_register_memory", [lone, lone + 64], [64, 0])
    assert initiator.value("transfer_sync_write", target.name, initiator.mem, target.mem, 4096) == 0


def test_unregister(area):
    assert register(area, area.area, 4096) == 0
    refused(area, -3, "unregister_memory", area.area + 1)
    refused(area, -3, "unregister_memory", area.area + 4096)
    assert area.value("unregister_memory", area.area) == 0
    refused(area, -3, "unregister_memory", area.area)
    assert descriptor("127.0.0.1", area.port)["buffers"] == []
    assert register(area, area.area, 8192) == 0


def test_batches(area):
    at = area.area
    assert area.value("batch_register_memory", [], []) == 0
    assert area.value("batch_unregister_memory", []) == 0
    assert area.value("batch_register_memory", as_tuple([at, at + 4096]), numpy_array([4096, 4096])) == 0
    # One bad range: nothing of the batch stays.
    refused(area, -7, "batch_register_memory", [at + 8192, at + 100], [4096, 16])
    refused(area, -7, "batch_register_memory", [at + 16384, at + 16384], [4096, 4096])
    assert len(descriptor("127.0.0.1", area.port)["buffers"]) == 2
    assert register(area, at + 8192, 4096) == 0
    assert area.value("batch_unregister_memory", [at, at + 4096, at + 8192]) == 0
    assert descriptor("127.0.0.1", area.port)["buffers"] == []


def test_location(area):
    """A location is a word that is not checked."""
    for n, location in enumerate(["*", "cpu:0", "cpu:7", "nonsense"]):
        assert area.value("register_memory", area.area + n * 64, 64, location) == 0
    assert area.value("register_memory", buffer_addr=area.area + 1024, capacity=64, location="*") == 0
    assert area.value("batch_register_memory", buffer_addresses=[area.area + 2048], capacities=[64], location="cpu:0") == 0


def test_bigger_again_under_peers_that_know_the_old_one(two):
    """Unregister, register bigger at the same address: a connected peer reaches all of it."""
    initiator, target = two.initiator, two.target
    lone = target.alloc("lone", 65536, seed=3)
    assert register(target, lone, 4096) == 0
    assert initiator.value("transfer_sync_write", target.name, initiator.mem, lone, 4096) == 0
    assert target.value("unregister_memory", lone) == 0
    refused(initiator, -1, "transfer_sync_write", target.name, initiator.mem, lone, 4096)
    assert register(target, lone, 65536) == 0
    assert initiator.value("transfer_sync_write", target.name, initiator.mem, lone, 65536) == 0
    assert target.do("check", name="lone", background=1) == []


@pytest.mark.parametrize("kind", [OURS, PEER])
def test_late_registration_is_usable_at_once(kind):
    """Memory registered after a peer connected is reached within 100 ms, with no call in between: 50 regions."""
    with EngineProcess(OURS) as target, EngineProcess(kind) as initiator:
        target.open()
        initiator.open()
        far = target.alloc("mem", 51 * 4096, seed=1)
        near = initiator.alloc("mem", 51 * 4096, seed=2, register=True)
        assert register(target, far, 4096) == 0
        assert initiator.value("transfer_sync_write", target.name, near, far, 4096) == 0
        seconds = []
        for n in range(1, 51):
            assert register(target, far + n * 4096, 4096) == 0
            call = initiator.te("transfer_sync_write", target.name, near + n * 4096, far + n * 4096, 4096)
            assert call.value == 0, f"region {n}: {call}"
            seconds.append(call.seconds)
        # A few may have had to wait for a processor.
        assert sorted(seconds)[45] <= 0.1 * slack(), seconds
        assert target.do("check", name="mem", background=2) == []


@pytest.mark.parametrize("kind", [OURS, PEER])
def test_d12_twenty_thousand_regions(kind):
    """20,000 regions: 2 s to register, 1 s to open; first and last are reached, by ours and by a released initiator."""
    with EngineProcess(OURS) as target, EngineProcess(kind) as initiator:
        target.open()
        initiator.open()
        far = target.alloc("mem", MANY * 4096)
        near = initiator.alloc("mem", 4096, seed=2, register=True)
        answer = target.do("register_many", 60, buffer="mem", count=MANY, stride=4096, length=64)
        assert answer["bad"] == [] and answer["seconds"] <= 2.0 * slack(), answer
        call = initiator.te("transfer_sync_write", target.name, near, far, 64)
        assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        for n in (1, MANY // 2, MANY - 1):
            call = initiator.te("transfer_sync_write", target.name, near, far + n * 4096, 64)
            assert call.value == 0, f"region {n}: {call}"
            assert target.do("check", name="mem", background=2, start=n * 4096, length=64) == []
        # A range between two regions is still none.
        assert initiator.value("transfer_sync_write", target.name, near, far + 4096 + 60, 16) == -1
        # Each one waits until the IO threads have let go of it, and so as long as the machine takes to wake them.
        answer = target.do("unregister_many", 60, buffer="mem", count=MANY, stride=4096)
        assert answer["bad"] == [] and answer["seconds"] <= 6.0 * slack(), answer


@pytest.mark.parametrize("kind", [OURS, PEER])
def test_d12_an_initiator_with_twenty_thousand_regions(kind):
    """How many regions an initiator has of its own is no business of its targets."""
    with EngineProcess(kind) as target, EngineProcess(OURS) as initiator:
        target.open()
        initiator.open()
        far = target.alloc("mem", 4096, seed=1, register=True)
        near = initiator.alloc("mem", MANY * 4096)
        assert initiator.do("register_many", 60, buffer="mem", count=MANY, stride=4096, length=64)["bad"] == []
        initiator.do("fill", name="mem", seed=2, length=4096)
        call = initiator.te("transfer_sync_write", target.name, near, far, 64)
        assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        assert target.do("check", name="mem", background=1, patches=[(0, 2, 0, 64)]) == []


@pytest.mark.parametrize("limit, taken", [(None, False), (32 << 20, True)], ids=["16-MiB", "raised"])
def test_d12_a_descriptor_that_is_too_long(limit, taken):
    """It is an error that names the peer and both lengths, unless the limit was raised."""
    with EngineProcess(OURS, {"MC_HANDSHAKE_MAX_LENGTH": str(limit)} if limit else {}) as initiator, FakeTarget(acknowledge) as fake:
        initiator.open()
        near = initiator.alloc("mem", 4096, seed=2, register=True)
        fake.metadata = json.dumps(fake.descriptor).encode().ljust(16 << 20)
        call = initiator.te_fresh("transfer_sync_write", fake.name, near, 0x20000, 64)
        assert call.value == (0 if taken else -1), call
        if not taken:
            assert all(text in call.error for text in (fake.name, "16777217 bytes", "1 to 16777216")), call


@pytest.mark.parametrize("unknown", [0, 1], ids=["unknown-first", "unknown-last"])
def test_d10_batch_unregister_with_an_unknown_address(area, unknown):
    """Refused, and either nothing has changed or every known one is gone: none is left in between."""
    at = area.area
    assert register(area, at, 4096) == 0 and register(area, at + 4096, 4096) == 0
    addresses = [at, at + 4096]
    addresses.insert(0 if unknown == 0 else 2, at + 32768)
    refused(area, -3, "batch_unregister_memory", addresses)
    left = {b["addr"] for b in descriptor("127.0.0.1", area.port)["buffers"]}
    assert left in (set(), {at, at + 4096})
    for address in (at, at + 4096):
        if left:
            assert area.value("unregister_memory", address) == 0
        assert register(area, address, 4096) == 0
        assert area.value("unregister_memory", address) == 0


@pytest.mark.parametrize(
    "address, length", [(0, 16), (2**64 - 10, 100), (2**64 - 1, 2), (4096, 2**64 - 1), (2**63, 2**63)], ids=str
)
def test_d15_nonsense_is_refused_and_poisons_nothing(two, address, length):
    initiator, target = two.initiator, two.target
    refused(target, -1, "register_memory", address, length)
    refused(target, -1, "batch_register_memory", [address], [length])
    assert initiator.value("transfer_sync_write", target.name, initiator.mem, target.mem, 4096) == 0
    with EngineProcess(PEER) as stranger:
        stranger.open()
        near = stranger.alloc("mem", 4096, seed=5)
        assert stranger.value("transfer_sync_write", target.name, near, target.mem, 4096) == 0


class HalfAWrite:
    """A raw client in the middle of a WRITE of 1 MiB into a target, of which half has arrived."""

    SIZE = 1 << 20

    def __init__(self, target):
        self.target = target
        self.address = target.alloc("inbound", self.SIZE, seed=1)
        assert register(target, self.address, self.SIZE) == 0
        self.client = DataClient("127.0.0.1", descriptor("127.0.0.1", target.port)["tcp_data_port"])
        self.client.send(header(WRITE | V2, self.address, self.SIZE), b"\xaa" * (self.SIZE // 2))
        half = self.SIZE // 2
        wait_until(lambda: self.bytes_at(half - 1) == b"\xaa", 5, "half of the body is in the target's memory")

    def bytes_at(self, at, length=1):
        return bytes.fromhex(self.target.do("peek", name="inbound", start=at, length=length)["hex"])

    def send_rest(self) -> bool:
        try:
            self.client.send(b"\xbb" * (self.SIZE // 2))
        except OSError:
            return False
        return True


def test_d13_unregister_ends_an_inbound_write(ours):
    """The writer stands still: unregister closes it after half a second, and no byte lands after it has returned."""
    assert at_best(lambda: unregister_under_a_writer(ours), 1.0) <= 1.0 * slack()


def unregister_under_a_writer(ours) -> float:
    """How long it takes."""
    write = HalfAWrite(ours)
    with write.client:
        call = ours.te("unregister_memory", write.address)
        assert call.value == 0, call
        ours.do("fill", name="inbound", seed=2)
        write.send_rest()
        assert write.client.status() != 0, "a WRITE into memory that is no longer registered was acknowledged"
        assert write.client.ended()
        assert ours.do("check", name="inbound", background=2) == []
    assert ours.value("register_memory", write.address, write.SIZE) == 0
    return call.seconds


def test_d13_unregister_waits_for_an_inbound_write(ours):
    """The writer goes on: unregister either waits until all of it is there and acknowledged, or ends it."""
    write = HalfAWrite(ours)
    with write.client:
        ours.start_te("unregister", "unregister_memory", write.address)
        write.send_rest()
        status = write.client.status()
        answer = ours.join("unregister", 10)
        assert answer["value"] == 0
        if status == 0:
            assert write.bytes_at(write.SIZE // 2, write.SIZE // 2) == b"\xbb" * (write.SIZE // 2)
        with DataClient("127.0.0.1", descriptor("127.0.0.1", ours.port)["tcp_data_port"]) as late:
            late.send(header(WRITE | V2, write.address, 16), bytes(16))
            assert late.status() == 1


def test_unregister_while_transfers_run(two):
    """Our own transfers hold the local memory: unregister waits for them or ends them, and returns within a second or so."""
    initiator, target = two.initiator, two.target
    size = 64 << 20
    near = initiator.alloc("big", size, seed=3, register=True)
    far = target.alloc("big", size, seed=4, register=True)
    ids = [initiator.value("transfer_submit_write", target.name, near, far, size) for _ in range(4)]
    assert all(ids)
    began = time.monotonic()
    call = initiator.te("unregister_memory", near)
    assert call.value == 0 and time.monotonic() - began <= 3 * slack(), call
    initiator.do("fill", name="big", seed=5)
    for id in ids:
        assert initiator.do("poll", id=id, seconds=30)["status"] in (1, -1)
    # What has landed is what was there before unregister returned.
    assert target.do("strange_bytes", 60, buffer="big", seeds=[3, 4]) == 0


def test_managed_buffers(two):
    """Allocated, registered at once, written to and read from as bytes, freed; a peer reaches them."""
    initiator, target = two.initiator, two.target
    far = target.value("allocate_managed_buffer", 5000)
    assert far > 0
    data = bytes(range(256)) * 16
    near = initiator.value("allocate_managed_buffer", len(data))
    assert near > 0
    assert initiator.value("write_bytes_to_buffer", near, raw_bytes(data), len(data)) == 0
    assert initiator.value("read_bytes_from_buffer", near, len(data))["hex"] == data.hex()
    assert initiator.value("transfer_sync_write", target.name, near, far, len(data)) == 0
    assert target.value("read_bytes_from_buffer", far, len(data))["hex"] == data.hex()
    assert target.value("free_managed_buffer", far, 5000) == 0
    assert initiator.value("free_managed_buffer", near, len(data)) == 0
    small = target.value("allocate_managed_buffer", 0)
    assert small > 0 and target.value("free_managed_buffer", small, 0) == 0
    big = target.value("allocate_managed_buffer", (256 << 20) + 1)
    assert big > 0 and target.value("free_managed_buffer", big, (256 << 20) + 1) == 0
    assert target.value("allocate_managed_buffer", 1 << 50) == 0
