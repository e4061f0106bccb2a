"""What is known to go wrong in the peer's releases does not go wrong here: INDEX below, and the tests about transfers."""

from __future__ import annotations

import re
import threading
import time

import pytest
from defects_kit import TARGETS, Ends
from peers import OURS, PEER, ROOT, EngineProcess, notify, opcode, slack, wait_until
from raw import NOTIFY, FakeTarget, GoodTarget, receive, status_frame, swallow

#: Each defect by its number, and the tests that it is not ours. Tests of the Python suite by their names, of the engine in
#: Rust as `file::name`.
INDEX = {
    "D1 a batch longer than the queue wedges the peer": ["test_d1_a_long_batch_is_just_a_batch", "load::a_batch_larger_than_any_bound_is_normal_use"],
    "D2 accepted work fails although it progresses": ["test_d2_waiting_in_the_queue_is_no_failure"],
    "D3 a refused address poisons what follows": ["test_d3_a_refusal_does_not_poison_good_requests", "faults::many_refusals_on_many_lanes_fail_their_entries_and_no_other"],
    "D4 a restarted peer costs a failure per connection": ["test_d4_connections_that_the_peer_ended_cost_nothing"],
    "D5 buffers are touched after the call has failed": [
        "test_d5_an_answer_after_the_deadline_touches_nothing",
        "test_d5_a_failed_batch_has_stopped_reading",
        "test_d5_a_stopped_target_leaves_the_outcome_unknown",
        "stops::a_cancelled_read_is_quiet_and_its_neighbours_are_right",
    ],
    "D6 a malformed frame ends the process": [
        "test_d6_a_malformed_frame_harms_nobody",
        "test_d6_silence_after_half_a_frame_is_ended",
        "test_d6_a_forged_descriptor_is_an_error",
    ],
    "D7 the control port serves one client at a time": ["test_d7_idle_control_connections_delay_nobody", "strangers::clients_that_hold_control_connections_delay_nobody"],
    "D8 a restarted engine inherits old buffers": "about metadata stores, which this version does not have",
    "D9 ports run out": ["test_d9_connections_are_used_again"],
    "D10 batch_unregister with an unknown address": ["test_d10_batch_unregister_with_an_unknown_address"],
    "D11 a stuck peer blocks the engine": ["test_d11_a_stuck_peer_blocks_only_its_own", "stops::peers_that_never_answer_hold_up_nobody"],
    "D12 many buffers": [
        "test_d12_twenty_thousand_regions",
        "test_d12_an_initiator_with_twenty_thousand_regions",
        "test_d12_a_descriptor_that_is_too_long",
    ],
    "D13 unregister does not stop an inbound transfer": ["test_d13_unregister_ends_an_inbound_write", "test_d13_unregister_waits_for_an_inbound_write"],
    "D14 a lost notification is silent, a slow one blocks": [
        "test_d14_a_notification_that_cannot_be_delivered_is_an_error",
        "test_d14_a_notification_that_hangs_delays_nobody_else",
    ],
    "D15 nonsense can be registered": ["test_d15_nonsense_is_refused_and_poisons_nothing"],
    "D16 bad UTF-8 loses notifications": ["test_d16_bad_utf8_loses_no_other_notification"],
    "D17 busy waiting": ["test_d17_waiting_costs_no_processor_time", "test_idle_engines_cost_nothing"],
    "D18 bad configuration aborts": ["test_d18_an_unknown_store_is_an_error"],
    "D19 misuse is a segmentation fault": [
        "test_d19_calls_before_initialize",
        "test_d19_ids_that_are_over_or_never_were",
        "test_d19_bytes_and_managed_buffers",
        "test_d19_none_for_the_protocol",
    ],
    "D20 lists of different lengths": ["test_d20_lists_of_different_lengths", "test_d20_registering_lists_of_different_lengths"],
    "D21 padding leaks memory": ["test_d21_headers_carry_zeros_in_their_padding", "header::padding_is_sent_as_zeros_and_ignored_on_arrival"],
    "D22 failed batches leak": ["test_d22_batches_that_fail_leave_nothing_behind", "load::failed_batches_leave_no_memory_behind"],
    "D23 a status is that of the first entry": ["test_d23_a_status_is_that_of_the_whole_batch"],
    "D24 a second engine takes over a name": "about metadata stores, which this version does not have",
    "D25 descriptors never refresh": [
        "test_d25_a_peer_that_came_back_elsewhere_is_found_within_the_request",
        "faults::a_peer_that_came_back_on_another_data_port_is_found_within_the_request",
    ],
    "D26 noise in the log that looks like failure": [
        "test_d26_a_clean_run_logs_nothing_that_looks_like_failure",
        "test_d26_a_peer_that_is_gone_is_called_that",
        "test_a_clean_run_says_nothing",
    ],
    "D27 names are misread": ["test_d27_a_bad_port_is_no_other_port", "test_d27_addresses_of_both_families", "test_names_with_a_port"],
    "D28 it listens everywhere": ["test_d28_it_listens_where_it_is_told"],
    "D29 the interpreter is held": [
        "test_d29_other_threads_run_while_a_peer_does_not_answer",
        "test_d29_other_threads_run_while_a_buffer_is_in_use",
        "test_d29_other_threads_run_while_an_engine_comes_and_goes",
        "test_the_interpreter_is_free_during_a_read",
    ],
    "D30 smaller surprises": [
        "test_d30_an_empty_batch_with_a_notification_notifies",
        "test_d30_what_is_not_known_is_said_and_not_obeyed",
        "test_d30_topology_and_the_end_take_no_second",
        "test_d30_a_range_of_one_port_is_too_small_and_says_so",
        "test_d30_a_restart_in_two_ports_does_not_wait_for_old_connections",
        "test_d30_a_managed_buffer_publishes_itself_only",
        "test_d30_ids_are_small_positive_numbers",
        "test_a_second_initialize_is_refused",
        "test_an_initialize_that_fails_can_be_done_again",
        "test_in_a_forked_child_every_call_answers_at_once",
        "pair::an_engine_is_its_own_peer_without_a_socket",
    ],
    "D31 a refusal is lost to a reset": [
        "test_d31_a_peer_that_hangs_up_in_the_body_is_an_error",
        "test_d31_a_refusal_before_a_reset_is_heard",
        "test_d31_our_refusal_arrives_whole",
        "strangers::a_refusal_is_not_lost_though_megabytes_were_on_their_way",
    ],
    "D32 unknown operations are served": ["test_d32_an_unknown_operation_is_not_served", "strangers::unknown_operations_are_closed_and_not_served"],
    "D33 old targets fail every second request": ["test_d33_old_targets_that_close_after_a_request", "test_d33_the_old_release_by_turns"],
    "D34 a refused v1 WRITE is called complete": ["test_d34_a_refused_v1_write_is_a_failure", "faults::a_refused_v1_write_is_a_failure_here_and_touches_nothing_there"],
}


def test_every_defect_has_a_test_or_a_reason():
    assert [entry.split()[0] for entry in INDEX] == [f"D{n}" for n in range(1, 35)]
    python = {name for file in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"^def (\w+)\(", file.read_text(), re.M)}
    rust = {
        f"{file.stem}::{name}"
        for file in (ROOT / "crates").glob("*/*/**/*.rs")
        for name in re.findall(r"#\[test\]\n\s*fn (\w+)\(", file.read_text())
    }
    for entry, tests in INDEX.items():
        assert tests
        missing = [] if isinstance(tests, str) else [name for name in tests if name not in python | rust]
        assert not missing, f"{entry}: there is no {missing}"
    # A test that names a defect is found from here.
    named = {name for name in python if re.match(r"test_d\d+_", name)}
    assert named <= {name for tests in INDEX.values() for name in tests}

@TARGETS
@pytest.mark.parametrize("count, block", [(2500, 16384), (20000, 4096)])
def test_d1_a_long_batch_is_just_a_batch(kind, count, block):
    """Batches beyond any queue complete, each way, and the single transfers after them as well."""
    with Ends(kind, count * block) as ends:
        for _ in range(3):
            answer = ends.initiator.do("grid", 60, op="write", target=ends.target.name, local="mem", remote=ends.far, block=block, count=count)
            assert answer["value"] == 0, answer
            call = ends.write()
            assert call.value == 0 and call.seconds <= 0.5 * slack(), call
        assert ends.target.do("check", name="mem", background=2) == []
        ends.target.do("fill", name="mem", seed=3)
        answer = ends.initiator.do("grid", 60, op="read", target=ends.target.name, local="mem", remote=ends.far, block=block, count=count)
        assert answer["value"] == 0, answer
        assert ends.initiator.do("check", name="mem", background=3) == []


@TARGETS
def test_d2_waiting_in_the_queue_is_no_failure(kind):
    """2,000 x 1 MiB of one range: seconds of work behind one another, none of which times out."""
    block = 1 << 20
    with Ends(kind, block) as ends:
        answer = ends.initiator.do(
            "repeat_batch", 120, op="write", target=ends.target.name, local=ends.near, remote=ends.far, length=block, count=2000
        )
        assert answer["value"] == 0, answer
        assert ends.target.do("check", name="mem", background=2) == []


@TARGETS
def test_d3_a_refusal_does_not_poison_good_requests(kind):
    with Ends(kind, 1 << 20) as ends:
        assert ends.write().value == 0
        for good in (1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1):
            call = ends.write() if good else ends.write(remote=0x10)
            assert call.value == (0 if good else -1), (good, call)
            assert call.seconds <= 0.5 * slack(), (good, call)
            if not good and ends.initiator.faithful:
                assert call.error
        answer = ends.initiator.te("batch_transfer_sync_write", ends.target.name, [ends.near] * 8, [0x10] * 8, [16] * 8)
        assert answer.value == -1
        call = ends.write()
        assert call.value == 0 and call.seconds <= 0.5 * slack(), call


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_d4_connections_that_the_peer_ended_cost_nothing(reset):
    """Four lanes are warm, the peer ends them all, as it does when it restarts: every request after that succeeds, and at once."""
    opened, size = threading.Event(), 1 << 20

    def wait_for_four(connections):
        if connections >= 4:
            opened.set()
        opened.wait(20)

    with GoodTarget(opened=wait_for_four) as target, EngineProcess(OURS) as initiator:
        initiator.open()
        near = initiator.alloc("mem", size, seed=1, register=True)
        # More than three lanes take before they are answered.
        batch = [near] * 40, [0x20000 + n * size for n in range(40)], [size] * 40
        assert initiator.value("batch_transfer_sync_write", target.name, *batch) == 0
        assert target.data_connections == 4
        # Later batches have as many lanes as it takes: who is answered at once needs fewer.
        for op, lanes in (("write", 4), ("read", 1)):
            for wanted in (lanes, 1):
                assert target.drop(reset) >= wanted
                for _ in range(8):
                    call = initiator.te_fresh(f"transfer_sync_{op}", target.name, near, 0x20000, 16)
                    assert call.value == 0 and call.seconds <= 0.5 * slack(), call
            call = initiator.te_fresh(f"batch_transfer_sync_{op}", target.name, *batch)
            assert call.value == 0, call


def stays(process, name, seed, seconds=0.3):
    """The memory is this pattern, and goes on being it while the engine has time to do what it must not."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < end:
        assert process.do("check", name=name, background=seed) == []
        pause.wait(0.02)


def test_d5_an_answer_after_the_deadline_touches_nothing():
    """A READ is answered after it has failed: by a single call, by a batch and by an id."""
    size, answer_now, answered = 1 << 20, threading.Event(), []

    def serve(sock):
        while len(head := receive(sock, 24)) == 24:
            answer_now.wait(30)
            try:
                sock.sendall(status_frame(0) + b"z" * int.from_bytes(head[:8], "little"))
            finally:
                answered.append(sock)

    with FakeTarget(serve) as target, EngineProcess(OURS, {"TENSORFERRY_TRANSFER_TIMEOUT": "1s"}) as initiator:
        initiator.open()
        near = initiator.alloc("mem", 3 * size, seed=1, register=True)
        initiator.start_te("one", "transfer_sync_read", target.name, near, 0x20000, size)
        initiator.start_te("batch", "batch_transfer_sync_read", target.name, [near + size] * 2, [0x20000] * 2, [size // 2] * 2)
        id = initiator.value("batch_transfer_async_read", target.name, [near + 2 * size], [0x20000], [size])
        for thread in ("one", "batch"):
            answer = initiator.join(thread, 5 * slack())
            assert answer["value"] == -1 and "deadline" in answer["error"], answer
        assert initiator.do("poll", id=id)["status"] in (-1, -2)
        assert target.data_connections > 0 and not answered
        initiator.do("fill", name="mem", seed=9)
        answer_now.set()
        wait_until(lambda: answered, 10, "an answer has been sent, or could not be")
        stays(initiator, "mem", 9)


@TARGETS
def test_d5_a_failed_batch_has_stopped_reading(kind):
    """One entry of 2,500 is refused. What arrives of the others is what was there before the call returned."""
    block, count = 16384, 2500
    with Ends(kind, block * count) as ends:
        remotes = [ends.far + n * block for n in range(count)]
        remotes[count // 2] = 0x10
        locals_ = [ends.near + n * block for n in range(count)]
        call = ends.initiator.te("batch_transfer_sync_write", ends.target.name, locals_, remotes, [block] * count)
        assert call.value == -1, call
        ends.initiator.do("fill", name="mem", seed=3)
        end, pause = time.monotonic() + 0.3, threading.Event()
        while time.monotonic() < end:
            assert ends.target.do("strange_bytes", buffer="mem", seeds=[1, 2]) == 0
            pause.wait(0.02)


@TARGETS
def test_d5_a_stopped_target_leaves_the_outcome_unknown(kind):
    """It takes what had reached its machine when it goes on. The error says so, and no byte of it is newer than the call."""
    size = 8 << 20
    with Ends(kind, 2 * size, TENSORFERRY_TRANSFER_TIMEOUT="1s") as ends:
        assert ends.write().value == 0
        ends.target.freeze()
        call = ends.initiator.te("transfer_sync_write", ends.target.name, ends.near, ends.far, size)
        assert call.value == -1 and call.seconds <= 1.0 + 0.5 * slack(), call
        assert not ends.initiator.faithful or "may still be written" in call.error, call
        ends.initiator.do("fill", name="mem", seed=3)
        ends.target.thaw()
        again = ends.initiator.te("transfer_sync_write", ends.target.name, ends.near + size, ends.far + size, size)
        assert again.value == 0, again
        assert ends.target.do("strange_bytes", buffer="mem", seeds=[1, 2, 3]) == 0


def test_d9_connections_are_used_again():
    """30,000 small transfers and a batch of 20,000, where there are 100 ports to connect from and none comes back."""
    with EngineProcess(OURS) as process:
        refused = process.do("own_network", ports=100)
        if refused:
            pytest.skip(f"skipped: {refused}; run as root")
        process.open()
        name = process.open("other")
        near = process.alloc("near", 20_000 * 16, seed=1)
        far = process.alloc("far", 20_000 * 16, seed=2)
        assert process.value("register_memory", far, 20_000 * 16, engine="other") == 0
        assert process.do("write_many", 120, target=name, local=near, remote=far, length=16, times=15_000) == {"write": 0, "read": 0}
        answer = process.do("grid", 60, op="write", target=name, local="near", remote=far, block=16, count=20_000)
        assert answer["value"] == 0, answer
        assert process.do("check", name="far", background=1) == []
        assert process.do("connections_made") <= 10


def test_d11_a_stuck_peer_blocks_only_its_own():
    """One peer is stopped at first contact; transfers to another go on at their pace, and so does this interpreter."""
    with Ends(OURS, 4096, MC_TRANSFER_TIMEOUT="5") as ends, EngineProcess(OURS) as stuck:
        stuck.open()
        assert ends.write().value == 0
        stuck.freeze()
        ends.initiator.start_te("stuck", "transfer_sync_write", stuck.name, ends.near, ends.far, 16)
        ends.initiator.start_te("address", "get_first_buffer_address", stuck.name)
        for _ in range(50):
            call = ends.write()
            assert call.value == 0 and call.seconds <= 0.5 * slack(), call
        with EngineProcess(OURS) as third:
            third.open()
            far = third.alloc("mem", 4096, register=True)
            call = ends.initiator.te("transfer_sync_write", third.name, ends.near, far, 64)
            assert call.value == 0 and call.seconds <= 1.0 * slack(), call
        answer = ends.initiator.join("stuck", 9 * slack())
        assert answer["value"] == -1 and answer["error"], answer
        stuck.thaw()
        ends.initiator.join("address", 60)


def test_d14_a_notification_that_cannot_be_delivered_is_an_error():
    """Over the frame's limit: refused before a byte moves."""
    with Ends(OURS, 4096) as ends:
        write = opcode("Write")
        call = ends.initiator.te_fresh("transfer_sync", ends.target.name, ends.near, ends.far, 16, write, notify("big", "x" * (1 << 20)))
        assert call.value == -1 and call.error, call
        assert ends.target.do("check", name="mem", background=1) == []
        assert ends.write().value == 0


def test_d14_a_notification_that_hangs_delays_nobody_else():
    """The peer's data port is well, its control port does not answer: that call fails by its deadline, others go on at their pace."""
    with Ends(OURS, 4096, TENSORFERRY_TRANSFER_TIMEOUT="5s") as ends, GoodTarget() as hung:
        hung.hushed.add(NOTIFY)
        write = opcode("Write")
        ends.initiator.start_te("hung", "transfer_sync", hung.name, ends.near, 0x20000, 16, write, notify("a", "lost"))
        wait_until(lambda: hung.headers, 10, "the bytes have arrived")
        for n in range(50):
            call = ends.initiator.te("transfer_sync", ends.target.name, ends.near, ends.far, 16, write, notify("n", str(n)))
            assert call.value == 0 and call.seconds <= 0.5 * slack(), call
        assert ends.target.value("get_notifies") == [["n", str(n)] for n in range(50)]
        assert ends.initiator.running("hung")
        answer = ends.initiator.join("hung", 9 * slack())
        assert answer["value"] == -1 and "notification" in answer["error"], answer


def test_d17_waiting_costs_no_processor_time():
    """A target that takes all and never answers: the call ends by its deadline of 5 s, having used under 0.2 s of CPU."""
    with FakeTarget(swallow) as fake, EngineProcess(OURS, {"MC_TRANSFER_TIMEOUT": "5"}) as initiator:
        initiator.open()
        near = initiator.alloc("mem", 4096, seed=1, register=True)
        before = initiator.do("usage")["cpu"]
        call = initiator.te_fresh("transfer_sync_write", fake.name, near, 0x20000, 4096)
        used = initiator.do("usage")["cpu"] - before
        assert call.value == -1 and call.error, call
        assert 4.9 <= call.seconds <= 5.0 + 0.5 * slack(), call
        assert used < 0.2, f"{used:.2f} s of CPU in {call.seconds:.1f} s of waiting"


def test_d22_batches_that_fail_leave_nothing_behind():
    """60 batches of 2,000 with a refused entry, waited for and not: next to no memory."""
    with Ends(OURS, 2000 * 64) as ends:
        job = {"target": ends.target.name, "local": ends.near, "remote": ends.far, "length": 64, "count": 2000}
        ends.initiator.do("refused_batches", 60, times=20, **job)
        grown = ends.initiator.do("refused_batches", 60, times=60, **job)
        assert grown < 4096, f"{grown} KiB for 60 batches"
        assert ends.write().value == 0


@TARGETS
@pytest.mark.parametrize("good_first", [True, False])
def test_d23_a_status_is_that_of_the_whole_batch(kind, good_first):
    """One refused entry among two, or among many: never 1."""
    with Ends(kind, 1 << 20) as ends:
        for others in (1, 50):
            remotes = [ends.far + n * 64 for n in range(others)]
            remotes.insert(others if good_first else 0, 0x10)
            locals_ = [ends.near + n * 64 for n in range(others + 1)]
            id = ends.initiator.value("batch_transfer_async_write", ends.target.name, locals_, remotes, [64] * (others + 1))
            assert id > 0
            assert ends.initiator.do("poll", id=id)["status"] == -1
        assert ends.write().value == 0
