"""The document of a run as a page and charts. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path

from comparing import chart, figures
from comparing.figures import OURS, PEERS, RAW, RAW_AGAIN, Run, Spread
from comparing.works import KIB, MIB, OPS, PACED, Work

#: Those that a chart shows, in this order; colours follow it.
SHOWN = (OURS, "ours-to-peer", "peer", "peer-best", "nixl", "gloo", RAW)


def write(document: dict, folder: Path) -> list[Path]:
    """compare.md, compare.json and the charts."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(document)
    drawn = {name: content for name, content in charts(run).items() if content}
    # First what all the rest can be made from again.
    files = {"compare.json": json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"}
    files |= {"compare.md": markdown(run, list(drawn)), **drawn}
    for name, content in files.items():
        put(folder / name, content)
    return [folder / name for name in files]


def put(file: Path, content: str) -> None:
    """All of it, or what was there before: disks are full at times."""
    new = file.with_name(f".{file.name}")
    try:
        new.write_text(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


# Charts


def charts(run: Run) -> dict[str, str | None]:
    everywhere = [work for work in run.works() if not work.pace_us]
    large = [work for work in everywhere if work.block >= 64 * KIB]
    return {
        **{f"throughput-{op}.svg": bars(run, f"Throughput, {op.upper()}", "GB/s", everywhere, [op], figures.gb_per_s) for op in OPS},
        "latency.svg": latency_chart(run),
        "cpu.svg": bars(run, "Processor time of both ends per GB moved", "CPU seconds per GB", large, list(OPS), figures.cpu_per_gb),
    }


def note(run: Run) -> str:
    machine = run.document["machine"]
    rounds = plural(run.document["options"]["rounds"], "round")
    return f"{machine['cpu']}, {machine['cores']} cores, loopback; medians of {rounds}, lines from the lowest to the highest"


def shown(run: Run) -> list[str]:
    present = {who for who, _, _ in run.turns}
    return [who for who in SHOWN if who in present]


def bars(run: Run, title: str, unit: str, works: list[Work], ops: list[str], what) -> str | None:
    if not works:
        return None
    groups = [(work, op) for op in ops for work in works]
    names = [f"{work.name}\n{op.upper()}" if len(ops) > 1 else work.name for work, op in groups]
    series = [chart.Series(figures.title(run, who), [run.spread(who, work.name, op, what) for work, op in groups]) for who in shown(run)]
    return chart.bars(title, unit, note(run), names, series)


def latency_chart(run: Run) -> str | None:
    small = next((work.name for work in run.works() if work.single and not work.pace_us), None)
    if small is None:
        return None
    groups = [(op, part) for op in OPS for part in ("p50", "p99")]
    series = [
        chart.Series(figures.title(run, who), [run.spread(who, small, op, figures.latency(part)) for op, part in groups])
        for who in shown(run)
    ]
    names = [f"{op.upper()}, {part}" for op, part in groups]
    return chart.bars(f"Latency of one call, {small}", "microseconds", note(run), names, series)


# The page


def markdown(run: Run, images: list[str]) -> str:
    parts = [
        "# Compared with other engines, on one machine, in one run",
        "This page is written by `scripts/compare` from [compare.json](compare.json), which has every turn.",
        facts(run),
        "## Goals",
        "Met is what the median meets; the lowest and the highest of the rounds may not. The fastest ping-pong is that of the fastest "
        "turn, where the tables below have medians.",
        goals(run),
        "## Who takes part",
        who(run),
        trials(run),
        "## Method",
        method(run),
        *chart_lines(images),
        *sections(run),
        paced(run),
        "## Checks",
        checks(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def facts(run: Run) -> str:
    machine, options = run.document["machine"], run.document["options"]
    load = ", ".join(f"{value:.2f}" for value in machine["load_average"])
    rows = [
        (
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores, largest cache {mib(machine['cache_bytes'])}, {mib(machine['memory_bytes'])} of memory",
        ),
        ("system", f"Linux {machine['kernel']}, Python {machine['python']}, huge pages: {machine['huge_pages']}"),
        ("date", f"{machine['date']}; load average before: {load}"),
        ("tensorferry", f"commit {machine['commit']}"),
        ("command", f"`{run.document['command']}`"),
        ("turns", f"{plural(options['rounds'], 'round')} of {options['seconds']:g} s per contender, work and operation"),
        ("network", run.document["network"] or "a network namespace of its own, loopback only"),
    ]
    return table(["", ""], rows)


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def mib(size: int | None) -> str:
    return f"{size / MIB:,.0f} MiB" if size else "unknown"


def goals(run: Run) -> str:
    words = {True: "met", False: "**not met**", None: "not measured"}
    return table(["work", "goal", "", "median (lowest–highest)"], [(g.work, g.text, words[g.met], g.figures) for g in figures.goals(run)])


def who(run: Run) -> str:
    rows = []
    for one in run.document["contenders"]:
        idle = run.document["idle"].get(one["name"])
        state = f"**not run**: {one['why_not']}" if one["why_not"] else ""
        if idle:
            cpu = " / ".join(f"{value * 100:.1f} %" for value in idle["cpu"])
            state += f"{'; ' if state else ''}{cpu} of a core while idle" + (", so stopped between its turns" if idle["held"] else "")
        rows.append((one["name"], one["title"], one["version"] or "", one["note"], state))
    return table(["name", "", "version", "", "initiator / target"], rows)


def trials(run: Run) -> str:
    tried, best = run.document["trials"], run.document["best"]
    if not tried:
        return ""
    cells = list(tried[0]["gb_per_s"])
    rows = []
    for n, trial in enumerate(tried):
        settings = " ".join(f"{name}={value}" for name, value in trial["settings"].items()) or "defaults"
        rows.append(
            (
                f"`{settings}`",
                *(f"{'**' if best[cell] == n else ''}{trial['gb_per_s'][cell]:.2f}{'**' if best[cell] == n else ''}" for cell in cells),
            )
        )
    text = "Settings of Mooncake that were tried before the rounds, GB/s; `peer-best` has the best one of each column."
    return f"{text}\n\n{table(['settings', *cells], rows)}"


def method(run: Run) -> str:
    cache = run.document["machine"]["cache_bytes"]
    rows = []
    for work in run.works():
        both = 2 * work.payload
        walked = "unknown" if not cache else "fits in it" if both <= cache else "exceeds it"
        raw = "round trips, 8 bytes the other way" if work.single else f"one stream, {size(work.chunk)} chunks"
        places = "an order of its own at each end, none beside another" if work.scattered else "one after the other"
        rows.append((work.name, size(work.payload), f"{size(both)}: {walked}", places, raw))
    lines = [
        "- All pairs are started before the first round. In a round, each contender has a turn for each work and operation, one contender after "
        "the other; the order rotates from round to round.",
        "- Before a turn the source is filled with a pattern of its own and the sink with the complement; up to three calls warm up, which may fail twice; the sink is "
        "filled again; then the clock runs. After it every byte of every block is compared.",
        "- Every call of a turn moves the same blocks, so memory of that size is walked at each end, again and again, by engines and by "
        "plain sockets alike. The table says whether that is more than the largest cache of the processor.",
        "- A pair whose turn has failed is started anew, so that it has its other turns all the same.",
        "- A GB is 10^9 bytes of payload. p50 and p99 are of calls. Processor time is that of both processes, from the kernel's clock of each, "
        "and includes Python. Peak memory is VmHWM of both during the turn, less the buffers.",
        "- Plain sockets are blocking `std::net` calls of `tensorferry __plain`, one connection per turn, made before the clock. A WRITE "
        "ends with an answer of 8 bytes, a READ begins with a request of 8 bytes.",
        "- Gloo has no one-sided transfers: its target takes part. A batch is one message, gathered and scattered where blocks are scattered; a WRITE "
        "is answered with a word when all is in place.",
        "- Ratios are of turns of the same round; given are the median, the lowest and the highest of the rounds. *Noise* is plain sockets to "
        "themselves, two turns of each round.",
    ]
    head = ["work", "per call, each end", "both ends, to the largest cache", "blocks lie", "plain sockets"]
    return "\n".join(lines) + "\n\n" + table(head, rows)


def size(count: int) -> str:
    return f"{count // MIB} MiB" if count % MIB == 0 else f"{count // KIB} KiB"


def chart_lines(images: list[str]) -> list[str]:
    return ["## Charts", *(f"![{name.removesuffix('.svg').replace('-', ', ')}]({name})" for name in images)] if images else []


def sections(run: Run) -> list[str]:
    ratio_of = [who for who in (*PEERS, "ours-to-peer", RAW) if who in shown(run)]
    return [
        "## Throughput, GB/s",
        cells(run, figures.gb_per_s, 3),
        "## Throughput of ours as a ratio",
        ratios(run, figures.gb_per_s, ratio_of),
        "## Requests per second",
        cells(run, figures.requests_per_s, 0),
        "## Latency of calls, microseconds: p50 / p99",
        cells(run, figures.p50, 1, figures.p99),
        "## CPU seconds per GB, both ends",
        cells(run, figures.cpu_per_gb, 3),
        "## CPU seconds per GB of ours as a ratio: less is better",
        ratios(run, figures.cpu_per_gb, ratio_of),
        "## Peak memory of both ends beyond the buffers, MiB",
        cells(run, figures.peak, 0),
    ]


def lines_of(run: Run) -> list[tuple[str, Work]]:
    return [(op, work) for op in OPS for work in run.works() if not work.pace_us]


def cells(run: Run, what, digits: int, also=None) -> str:
    """Medians of all contenders."""
    names = [*shown(run), RAW_AGAIN] if (RAW_AGAIN in {who for who, _, _ in run.turns}) else shown(run)
    rows = []
    for op, work in lines_of(run):
        row = [f"{op} {work.name}"]
        for name in names:
            row.append(cell(run, name, work.name, op, [what, *([also] if also else [])], digits))
        rows.append(row)
    return table(["", *(figures.title(run, name) for name in names)], rows)


def cell(run: Run, name: str, work: str, op: str, whats: list, digits: int) -> str:
    values = [run.spread(name, work, op, what) for what in whats]
    if None in values:
        return "failed" if run.failure(name, work, op) else ""
    mark = " †" if any(figures.violation(turn, run.document["network"]) for turn in run.turns[name, work, op]) else ""
    return " / ".join(f"{value.median:,.{digits}f}" for value in values) + mark


def ratios(run: Run, what, others: list[str]) -> str:
    rows = []
    for op, work in lines_of(run):
        found = [run.ratio(OURS, other, work.name, op, what) for other in others]
        rows.append((f"{op} {work.name}", *(spread(one) for one in found), spread(run.noise(work.name, op, what))))
    return table(["ours to", *(figures.title(run, other) for other in others), "*noise*"], rows)


def spread(value: Spread | None) -> str:
    return f"{value.median:.2f} ({value.low:.2f}–{value.high:.2f})" if value else ""


def paced(run: Run) -> str:
    rows = []
    for name in shown(run):
        taken = run.paced(name)
        if taken:
            at = [figures.quantile(taken, part) / 1e3 for part in (0.5, 0.99)]
            late = sum(value > 20_000 for value in taken)
            rows.append((figures.title(run, name), f"{len(taken):,}", *(f"{value:.3f}" for value in at), f"{taken[-1] / 1e3:.3f}", late))
    if not rows:
        return ""
    head = ["", "calls", "p50 ms", "p99 ms", "longest ms", "above 20 ms"]
    return f"## {PACED}: a READ every millisecond\n\n{table(head, rows)}"


def checks(run: Run) -> str:
    turns = run.document["turns"]
    compared = sum(turn.get("verified_bytes") or 0 for turn in turns)
    problems = {}
    for turn in turns:
        said = turn["failed"] or (turn["wrong"] and f"wrong bytes: {turn['wrong']}") or figures.violation(turn, run.document["network"])
        if not said and turn.get("failed_warming"):
            said = f"failed before the clock ran, and then worked: {turn['failed_warming'][0]}"
        if said:
            problems.setdefault((turn["contender"], turn["op"], turn["work"]), []).append(said)
    text = (
        f"{len(turns):,} turns; {compared:,} bytes were compared after them. In each, the loopback device must have counted at least the payload, "
        f"and from 1 MiB per block on at most {(figures.EXACT - 1) * 100:.0f} % more; where it has not, figures are marked with †."
    )
    rows = [(who, f"{op} {work}", len(said), said[0]) for (who, op, work), said in problems.items()]
    if rows:
        return text + "\n\n" + table(["", "work", "turns", "the first one"], rows)
    return text + " All of them passed."


def table(head: list, rows: list) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in line) + " |" for line in lines)
