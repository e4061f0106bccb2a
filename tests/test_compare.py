"""scripts/compare: what it makes of figures, and a small run of it. No figure of that run is looked at: it is too short for any."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from peers import OURS, PEER, ROOT, STAND_IN, clean_environment, need, wait_until, why_absent

sys.path.append(str(ROOT / "scripts"))

from comparing import chart, end, figures, main, network, process, report, rounds, works  # noqa: E402

SCRIPT = ROOT / "scripts" / "compare"
NAMES = ["raw", "ours", "ours-to-peer", "peer", "peer-best", "nixl", "gloo", "raw again"]


# What is made of figures


def turn(
    who: str, work: str, op: str = "write", number: int = 0, gb_per_s: float = 1.0, cpu: float = 1.0, us: float = 100.0, **more
) -> dict:
    """A made-up turn of one second."""
    moved = int(gb_per_s * 1e9)
    seen = {
        "round": number,
        "contender": who,
        "work": work,
        "op": op,
        "failed": None,
        "wrong": None,
        "bytes": moved,
        "calls": 100,
        "requests": 100,
        "seconds": 1.0,
        "cpu_seconds": [cpu * gb_per_s / 2, cpu * gb_per_s / 2],
        "peak_bytes": [1 << 20, 1 << 20],
        "counted_bytes": int(moved * 1.001) + 1000,
        "latency_us": {"p50": us, "p90": us, "p99": 2 * us, "max": 3 * us},
        "verified_bytes": 4096,
    }
    return seen | more


def document(turns: list[dict], why_not: dict[str, str] | None = None) -> dict:
    return {
        "command": "scripts/compare",
        "options": {"rounds": 3, "seconds": 1.0},
        "works": [work.name for work in works.WORKS],
        "machine": {
            "cpu": "A <processor> & more",
            "cores": 2,
            "cache_bytes": 32 << 20,
            "memory_bytes": 1 << 34,
            "kernel": "6.1",
            "python": "3.11",
            "huge_pages": "always",
            "load_average": [0.0, 0.0, 0.0],
            "date": "2026-01-01",
            "commit": "0" * 40,
        },
        "network": None,
        "contenders": [
            {"name": name, "title": f"<{name}>", "version": "1", "note": "", "env": {}, "why_not": (why_not or {}).get(name)}
            for name in NAMES
        ],
        "idle": {},
        "trials": [],
        "best": {},
        "turns": turns,
    }


def goal(turns: list[dict], text: str, work: str, **more) -> figures.Goal:
    found = [g for g in figures.goals(figures.Run(document(turns, **more))) if g.text == text and g.work == work]
    assert len(found) == 1, found
    return found[0]


def test_a_ratio_is_the_median_of_those_of_each_round():
    work = "1 MiB × 16"
    turns = [turn("ours", work, number=n, gb_per_s=rate) for n, rate in enumerate([2.0, 9.0, 4.0])]
    turns += [turn("raw", work, number=n, gb_per_s=rate) for n, rate in enumerate([1.0, 3.0, 8.0, 5.0])]
    run = figures.Run(document(turns))
    # 2, 3 and 0.5: not the ratio of the medians, which is 4 / 4. The fourth round has no other end.
    assert run.ratio("ours", "raw", work, "write", figures.gb_per_s) == figures.Spread(2.0, 0.5, 3.0, 3)
    assert run.spread("raw", work, "write", figures.gb_per_s) == figures.Spread(4.0, 1.0, 8.0, 4)
    assert run.ratio("ours", "nixl", work, "write", figures.gb_per_s) is None
    assert run.ratio("ours", "raw", work, "read", figures.gb_per_s) is None


def test_turns_that_failed_or_brought_wrong_bytes_are_no_figures():
    work = "1 MiB × 16"
    turns = [turn("ours", work, number=0, gb_per_s=5.0, wrong="block 1"), turn("ours", work, number=1, gb_per_s=2.0)]
    turns += [{"round": 2, "contender": "ours", "work": work, "op": "write", "failed": "it broke", "wrong": None}]
    run = figures.Run(document(turns))
    assert run.spread("ours", work, "write", figures.gb_per_s) == figures.Spread(2.0, 2.0, 2.0, 1)
    assert run.failure("ours", work, "write") == "wrong bytes: block 1"


def test_quantiles():
    assert figures.quantile(range(100), 0.5) == 50
    assert figures.quantile(range(100), 0.99) == 99
    assert figures.quantile([7], 0.99) == 7


@pytest.mark.parametrize("rate, met", [(9.9, False), (10.1, True)])
def test_the_goal_beside_the_peer(rate, met):
    turns = [turn(who, "4 KiB × 128", gb_per_s=r) for who, r in (("ours", rate), ("ours-to-peer", 2.6), ("peer", 1.0))]
    assert goal(turns, "at least 10 × Mooncake", "write 4 KiB × 128").met is met
    assert goal(turns, "to a Mooncake target: at least 2.5 × Mooncake to Mooncake", "write 4 KiB × 128").met is True
    assert goal(turns, "to a Mooncake target: at least 1.8 × Mooncake to Mooncake", "read 4 KiB × 128").met is None


@pytest.mark.parametrize(
    "work, least, chunks",
    [("16 KiB × 8,192", 0.8, "64 KiB"), ("64 KiB × 64", 0.8, "64 KiB"), ("1 MiB × 16", 0.9, "1 MiB"), ("64 MiB × 1", 0.9, "1 MiB")],
)
def test_the_goals_beside_plain_sockets(work, least, chunks):
    text = f"at least {least} × plain sockets with {chunks} chunks"
    for rate, met in ((least - 0.01, False), (least + 0.01, True)):
        turns = [turn("ours", work, "read", gb_per_s=rate), turn("raw", work, "read", gb_per_s=1.0)]
        assert goal(turns, text, f"read {work}").met is met


def test_the_goal_of_the_smallest_is_held_against_the_fastest_of_the_ping_pongs():
    text, work = "p50 at most 2 × the fastest of the plain ping-pongs", "4 KiB × 1"
    raw = [turn("raw", work, number=n, us=us) for n, us in enumerate([30, 15, 40, 33, 31])]
    assert goal([*raw, turn("ours", work, us=29)], text, f"write {work}").met is True
    missed = goal([*raw, turn("ours", work, us=31)], text, f"write {work}")
    assert missed.met is False and "the fastest of 5 was 15.0 µs" in missed.figures


def test_the_goal_of_paced_reads():
    text, work = "p99 at most 1 ms, none above 20 ms", works.PACED
    good = [turn("ours", work, "read", number=n, each_us=[50.0] * 2000) for n in range(5)]
    assert goal(good, text, f"read {work}").met is True
    assert "10,000 calls" in goal(good, text, f"read {work}").figures
    one_late = good[:4] + [turn("ours", work, "read", number=4, each_us=[50.0] * 1999 + [20_001.0])]
    assert goal(one_late, text, f"read {work}").met is False
    slow = good[:4] + [turn("ours", work, "read", number=4, each_us=[50.0] * 1899 + [1_100.0] * 101)]
    assert goal(slow, text, f"read {work}").met is False


def test_the_goal_of_processor_time():
    text, work = "CPU seconds per GB, both ends, at most 1.3 × plain sockets", "64 KiB × 64"
    for cpu, met in ((1.29, True), (1.31, False)):
        turns = [turn("ours", work, cpu=cpu, gb_per_s=3.0), turn("raw", work, cpu=1.0, gb_per_s=2.0)]
        assert goal(turns, text, f"write {work}").met is met


def test_a_goal_that_cannot_be_looked_at_says_why():
    missing = goal([turn("ours", "1 MiB × 16")], "ahead of <nixl>", "write 1 MiB × 16", why_not={"nixl": "not installed"})
    assert missing.met is None and missing.figures == "not measured (nixl: not installed)"


def test_payload_that_was_not_counted_is_found():
    assert figures.violation(turn("ours", "4 KiB × 1")) is None
    assert "has counted 5" in figures.violation(turn("ours", "4 KiB × 1", counted_bytes=5))
    twice = {"gb_per_s": 1.0, "counted_bytes": 1_100_000_000}
    assert figures.violation(turn("ours", "64 KiB × 64", **twice)) is None
    assert "10.0 % more" in figures.violation(turn("ours", "1 MiB × 16", **twice))
    others = "this system makes no network namespace"
    assert figures.violation(turn("ours", "1 MiB × 16", **twice), others) is None
    assert "has counted 5" in figures.violation(turn("ours", "1 MiB × 16", counted_bytes=5), others)


def test_one_of_ours_that_does_not_run_is_a_failure_unless_nobody_asked_for_it():
    turns = [turn("raw", "1 MiB × 16")]
    for why_not, problems in (("it does not start: no memory", 1), (main.NOT_ASKED_FOR, 0)):
        assert main.summary(document(turns, why_not={"ours": why_not, "nixl": "not installed"})) == problems


# What goes wrong around it


def test_a_process_that_has_ended_says_so_whatever_is_asked_of_it():
    ended = process.Process([sys.executable, "-c", "raise SystemExit('it was enough')"], clean_environment(OURS))
    for reaped in (False, True):
        if reaped:
            ended.process.wait()
        for ask in (lambda: ended.ask("run"), ended.peak, ended.forget_peak):
            with pytest.raises(process.Failed, match="ended with code 1: it was enough"):
                ask()
    # Its id may be somebody else's by now.
    ended.freeze()
    ended.thaw()
    ended.close()


def test_no_network_of_our_own_is_no_reason_to_end(monkeypatch):
    def refused():
        raise PermissionError(1, "Operation not permitted", "/proc/self/uid_map")

    before = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(network, "move", refused)
    assert network.enter() == "this system makes no network namespace ([Errno 1] Operation not permitted: '/proc/self/uid_map')"
    assert os.readlink("/proc/self/ns/net") == before


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "compare.json"
    report.put(file, "before")
    with pytest.raises(UnicodeEncodeError):
        report.put(file, "half of it \ud800")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_kill_end_it_and_leave_nothing_behind(number, tmp_path):
    need(OURS)
    command = [sys.executable, str(SCRIPT), "--small", "--only", "raw,ours", "--seconds", "30"]
    env = {**clean_environment(OURS), "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as running:
        try:
            for line in running.stdout:
                if line.startswith("round 1"):
                    break
            running.send_signal(number)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, said) == (130, "scripts/compare: interrupted\n")
    assert list(tmp_path.iterdir()) == []

    def gone():
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return True

    # The system puts away what nobody has waited for.
    wait_until(gone, 10, "no process is left")


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(file / "folder")]
    ran = subprocess.run(command, env=clean_environment(OURS), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stdout == "", ran.stdout
    assert ran.stderr == f"scripts/compare: [Errno 20] Not a directory: '{file / 'folder'}'\n"


# Works, and what is compared


def test_scattered_blocks_are_in_another_order_at_each_end_and_none_beside_another():
    work = works.named("16KiBx8192")
    places = {}
    for at in (works.INITIATOR, works.TARGET):
        places[at] = work.slots(at)
        assert sorted(places[at]) == list(range(work.count))
        assert list(places[at]) == list(work.slots(at))
    assert np.mean(places[works.INITIATOR] == places[works.TARGET]) < 0.01
    assert work.stride == 2 * work.block and work.span == 2 * work.payload == 256 << 20


def test_plain_sockets_send_what_the_goals_say():
    chunks = {works.short(work): work.chunk >> 10 for work in works.WORKS if not work.single}
    assert chunks == {"4KiBx128": 4, "16KiBx8192": 64, "64KiBx64": 64, "1MiBx16": 1024, "64MiBx1": 1024, "256MiBx1": 1024}


def test_works_have_names_that_can_be_typed():
    assert [works.named(works.short(work)) for work in works.WORKS] == list(works.WORKS)
    with pytest.raises(ValueError, match="4KiBx128"):
        works.named("5KiB")


@pytest.mark.parametrize("name", ["4KiBx128", "16KiBx8192"])
def test_every_byte_of_every_block_is_compared(name):
    work = dataclasses.replace(works.named(name), count=100)
    memory = end.Memory(work.span)
    memory.fill(work, works.TARGET, 5, complement=False)
    assert memory.wrong(work, works.TARGET, 5) is None
    assert memory.wrong(work, works.TARGET, 6) is not None
    for block, byte in ((0, 0), (work.count - 1, work.block - 1), (work.count // 2, 17)):
        at = work.stride * int(work.slots(works.TARGET)[block]) + byte
        memory.view[at] ^= 1
        assert memory.wrong(work, works.TARGET, 5) == f"1 of {work.payload} bytes are wrong, the first in block {block}"
        memory.view[at] ^= 1
    memory.fill(work, works.TARGET, 5, complement=True)
    assert memory.wrong(work, works.TARGET, 5) == f"{work.payload} of {work.payload} bytes are wrong, the first in block 0"


def test_the_order_rotates():
    assert [rounds.rotated("abc", n) for n in range(4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert rounds.rotated([], 3) == []


# Page and charts


def test_a_chart_is_well_formed_and_says_what_it_shows():
    spread = figures.Spread(0.5, 0.25, 2.0, 3)
    drawn = chart.bars(
        "a < b", "GB/s", "x & y", ["one", "two\nhalves"], [chart.Series("it & I", [spread, None]), chart.Series("they", [spread, spread])]
    )
    svg = tree.fromstring(drawn)
    said = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("a < b", "x & y", "GB/s, logarithmic", "one", "two", "halves", "it & I", "they", "0.5", "none"):
        assert wanted in said, said
    assert said.count("0.5") >= 3


def test_bars_end_where_the_axis_says():
    axis = chart.Axis([0.3, 4.0], top=100, bottom=400)
    assert (axis.low, axis.high) == (0.2, 5.0)
    assert axis.y(axis.low) == 400 and axis.y(axis.high) == 100
    # A logarithmic axis: the same step for the same factor.
    assert axis.y(1.0) - axis.y(2.0) == pytest.approx(axis.y(2.0) - axis.y(4.0))
    assert axis.ticks() == pytest.approx([0.2, 0.5, 1, 2, 5])


@pytest.mark.parametrize(
    "value, said", [(0.0123, "0.0123"), (0.5, "0.5"), (3.456, "3.46"), (12.3, "12.3"), (99.96, "100"), (1234.5, "1,234")]
)
def test_numbers_on_charts(value, said):
    assert chart.number(value) == said


def test_whoever_did_not_take_part_is_on_the_page_with_the_reason():
    made_up = document([turn("ours", "1 MiB × 16"), turn("raw", "1 MiB × 16")], why_not={"gloo": "too large"})
    page = report.markdown(figures.Run(made_up), [])
    assert "**not run**: too large" in page
    for name in NAMES:
        assert f"| {name} |" in page


# A small run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    if STAND_IN:
        pytest.skip("skipped: the released engine has no plain sockets to be held against")
    need(OURS)
    out = tmp_path_factory.mktemp("compare")
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(out)]
    ran = subprocess.run(command, env=clean_environment(OURS), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return out, json.loads((out / "compare.json").read_text())


def test_every_contender_has_moved_and_every_byte_was_compared(small):
    seen = small[1]
    assert [contender["name"] for contender in seen["contenders"]] == NAMES
    why_not = {contender["name"]: contender["why_not"] for contender in seen["contenders"]}
    taking_part = {"raw", "ours", "raw again"} | (set() if why_absent(PEER) else {"peer", "ours-to-peer"})
    for name in NAMES:
        turns = [turn for turn in seen["turns"] if turn["contender"] == name]
        if name not in taking_part:
            assert why_not[name] and not turns, name
            continue
        assert why_not[name] is None
        assert [(turn["work"], turn["op"]) for turn in turns] == [
            (work, op) for work in ("4 KiB × 128", "1 MiB × 16") for op in ("write", "read")
        ]
        for turn in turns:
            assert turn["failed"] is None and turn["wrong"] is None, turn
            assert turn["verified_bytes"] == next(work.payload for work in works.WORKS if work.name == turn["work"])
            assert turn["bytes"] == turn["calls"] * turn["verified_bytes"] > 0
            assert all(cpu > 0 for cpu in turn["cpu_seconds"]) and all(peak >= 0 for peak in turn["peak_bytes"])
            assert turn["counted_bytes"] >= turn["bytes"]
            if seen["network"] is None:
                assert figures.violation(turn) is None, turn


def test_the_document_says_what_a_figure_is_worth_nothing_without(small):
    machine = small[1]["machine"]
    for fact in ("cpu", "cores", "kernel", "python", "commit", "date", "load_average"):
        assert machine[fact], fact
    assert all(contender["version"] for contender in small[1]["contenders"] if not contender["why_not"])


def test_page_and_charts_can_be_made_again_from_the_document(small, tmp_path):
    out, _ = small
    command = [sys.executable, str(SCRIPT), "--report", str(out / "compare.json"), "--out", str(tmp_path)]
    ran = subprocess.run(command, env=clean_environment(OURS), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    made = {file.name: file.read_text() for file in out.iterdir()}
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == made
    assert {"compare.md", "compare.json", "throughput-write.svg", "throughput-read.svg", "cpu.svg"} <= set(made)
    for name, content in made.items():
        if name.endswith(".svg"):
            tree.fromstring(content)
            assert f"({name})" in made["compare.md"]


@pytest.mark.parametrize(
    "args, says",
    [(["--works", "5KiB"], "no work is called"), (["--only", "me"], "no contender is called"), (["--rounds", "0"], "--rounds")],
)
def test_what_makes_no_sense_is_refused(args, says):
    ran = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and says in ran.stderr, ran.stderr
