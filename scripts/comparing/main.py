"""scripts/compare: transfer engines side by side on one machine, in one run, with every byte compared."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from comparing import facts, figures, installing, network, report
from comparing.contenders import ROOT, contenders
from comparing.rounds import Stage
from comparing.works import WORKS, named, short

OUT = ROOT / "docs" / "performance"
#: In seconds: enough to see that it works, and too short for a figure.
SMALL = {"rounds": 1, "seconds": 0.1, "only": "raw,ours,ours-to-peer,peer,raw again", "works": "4KiBx128,1MiBx16"}
#: What goes wrong with the others is said, and no failure of this program.
OWN = (figures.OURS, figures.RAW, figures.RAW_AGAIN)
USUAL = {"rounds": 5, "seconds": 0.8, "only": None, "works": None}
NOT_ASKED_FOR = "not asked for (--only, --small)"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/compare",
        description=__doc__.split(": ", 1)[1],
        epilog=f"Works: {', '.join(short(work) for work in WORKS)}. Contenders: {', '.join(c.name for c in contenders())}.",
    )
    parser.add_argument("--rounds", type=int, help="how often each contender has its turns [5]")
    parser.add_argument("--seconds", type=float, help="how long a turn is [0.8]")
    parser.add_argument("--only", metavar="NAMES", help="these contenders only, with commas between")
    parser.add_argument("--works", metavar="NAMES", help="these works only, with commas between")
    parser.add_argument("--small", action="store_true", help="a round of what scripts/test has installed, which says nothing about speed")
    parser.add_argument("--install", action="store_true", help="puts what is only compared into .compare, and ends")
    parser.add_argument("--report", metavar="FILE", help="writes page and charts of an earlier run, and measures nothing")
    parser.add_argument("--out", metavar="FOLDER", help="where page, document and charts go [docs/performance; with --small nowhere]")
    args = parser.parse_args()
    for name, value in (SMALL if args.small else USUAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.rounds < 1 or not 0.01 <= args.seconds <= 60:
        parser.error("--rounds is at least 1, --seconds from 0.01 to 60")
    try:
        args.works = [named(name) for name in args.works.split(",")] if args.works else list(WORKS)
        args.only = names(args.only)
    except ValueError as error:
        parser.error(str(error))
    args.out = Path(args.out) if args.out else None if args.small else OUT
    return args


def names(only: str | None) -> set[str]:
    known = [contender.name for contender in contenders()]
    wanted = only.split(",") if only else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"no contender is called {name!r}; there are {', '.join(known)}")
    # A ratio without its noise says little.
    return {*wanted, *(["raw again"] if "raw" in wanted else [])}


def say(text: str) -> None:
    print(text, flush=True)


def run(args: argparse.Namespace) -> dict:
    document = {
        "command": shlex.join(["scripts/compare", *sys.argv[1:]]),
        "options": {"rounds": args.rounds, "seconds": args.seconds},
        "works": [work.name for work in args.works],
        "machine": facts.machine(),
    }
    taking_part = contenders()
    for contender in taking_part:
        if contender.name in args.only:
            contender.find()
        else:
            contender.why_not = NOT_ASKED_FOR
    document["network"] = network.enter()
    stage = Stage(taking_part, args.works, say)
    try:
        stage.start()
        stage.try_settings()
        for number in range(args.rounds):
            say(f"round {number + 1} of {args.rounds}")
            stage.round(number, args.rounds, args.seconds)
    finally:
        stage.close()
    document["contenders"] = [
        {name: getattr(contender, name) for name in ("name", "title", "version", "note", "env", "why_not")} for contender in taking_part
    ]
    best = {f"{op} {work}": number for (work, op), number in stage.best.items()}
    return {**document, "idle": stage.idle, "trials": stage.trials, "best": best, "turns": stage.turns}


def summary(document: dict) -> int:
    """Prints the goals and whatever went wrong; returns how much of that is ours."""
    seen = figures.Run(document)
    words, problems = {True: "met", False: "NOT MET", None: "not measured"}, 0
    for goal in figures.goals(seen):
        say(f"{words[goal.met]:12} {goal.work:22} {goal.text}: {goal.figures}")
    for contender in document["contenders"]:
        if contender["why_not"]:
            say(f"not run      {contender['name']}: {contender['why_not']}")
            problems += contender["name"] in OWN and contender["why_not"] != NOT_ASKED_FOR
    for turn in document["turns"]:
        said = turn["failed"] or turn["wrong"] or figures.violation(turn, document["network"])
        if said:
            say(f"problem      round {turn['round'] + 1}, {turn['contender']}, {turn['op']} {turn['work']}: {said}")
            problems += turn["contender"] in OWN
    return problems


def main() -> int:
    # Whichever way it ends: no process, and no folder of theirs, is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return compare(arguments())
    except KeyboardInterrupt:
        print("scripts/compare: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"scripts/compare: {error}", file=sys.stderr)
        return 1


def compare(args: argparse.Namespace) -> int:
    if args.install:
        return 1 if installing.install() else 0
    if args.report:
        document = json.loads(Path(args.report).read_text())
    else:
        if args.out:
            # Now, rather than when all is measured, it is found out that nothing can be written there.
            args.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=args.out).close()
        if not args.small:
            installing.install()
        document = run(args)
    problems = summary(document)
    if args.out:
        for file in report.write(document, args.out):
            say(f"written: {os.path.relpath(file)}")
    return 1 if problems else 0
