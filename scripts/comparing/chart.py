"""Grouped bars as SVG, with the range of each and a logarithmic axis. No library: what a chart says is in its text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

from comparing.figures import Spread

WIDTH, HEIGHT = 1080, 460
LEFT, RIGHT, BOTTOM = 70, 16, 52
#: Of the space of a group, what is left free beside it.
GAP = 0.14
#: Can be told apart by those who do not see all colours.
COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#7f7f7f", "#b8b8b8")
INK, PALE, FONT = "#222222", "#dddddd", "font-family='sans-serif'"


@dataclass(frozen=True)
class Series:
    """One contender: a value for each group, or None where there is none."""

    name: str
    values: list[Spread | None]


class Axis:
    """Logarithmic: from the last 1, 2 or 5 below the least value to the first above the greatest."""

    def __init__(self, values: list[float], top: float, bottom: float):
        self.top, self.bottom = top, bottom
        low, high = min(values, default=1.0), max(values, default=10.0)
        self.low = max((tick for tick in ticks(low / 10, high) if tick <= low * 0.8), default=low / 2)
        self.high = min((tick for tick in ticks(low, high * 10) if tick >= high * 1.25), default=high * 2)

    def y(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.bottom - max(0.0, share) * (self.bottom - self.top)

    def ticks(self) -> list[float]:
        return [tick for tick in ticks(self.low, self.high) if self.low <= tick <= self.high]


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten in reach."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    return [step * 10.0**power for power in powers for step in (1, 2, 5)]


def number(value: float) -> str:
    """Three digits that matter, and no more zeros than that."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}".rstrip("0").rstrip(".") if value > 0 else "0"


def text(x: float, y: float, said: str, size: int = 12, anchor: str = "start", more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{INK}' {FONT} {more}>{escape(said)}</text>"


def bars(title: str, unit: str, note: str, groups: list[str], series: list[Series]) -> str:
    """The whole file. A line break in the name of a group is one in the chart."""
    keys, rows = legend(series)
    top = 74 + 18 * rows
    seen = [value for one in series for value in one.values if value]
    axis = Axis([end for value in seen for end in (value.low, value.high)], top, HEIGHT - BOTTOM)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        text(LEFT, 26, title, 17, more="font-weight='bold'"),
        text(LEFT, 45, note, 12),
        *keys,
        *grid(axis, unit),
    ]
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    for n, group in enumerate(groups):
        left = LEFT + n * wide
        for row, said in enumerate(group.split("\n")):
            parts.append(text(left + wide / 2, HEIGHT - BOTTOM + 20 + 16 * row, said, 13, "middle"))
        parts += group_bars(axis, left + wide * GAP / 2, wide * (1 - GAP), [one.values[n] for one in series])
    parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{axis.bottom}' y2='{axis.bottom}' stroke='{INK}'/>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def legend(series: list[Series]) -> tuple[list[str], int]:
    """The names beside their colours, and how many rows they take."""
    parts, x, row = [], LEFT, 0
    for n, one in enumerate(series):
        wide = 36 + 7 * len(one.name)
        if x + wide > WIDTH - RIGHT:
            x, row = LEFT, row + 1
        y = 60 + 18 * row
        parts.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{COLOURS[n % len(COLOURS)]}'/>")
        parts.append(text(x + 17, y, one.name))
        x += wide
    return parts, row + 1


def grid(axis: Axis, unit: str) -> list[str]:
    parts = []
    for tick in axis.ticks():
        y = axis.y(tick)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='{PALE}'/>")
        parts.append(text(LEFT - 7, y + 4, number(tick), 12, "end"))
    middle = (axis.top + axis.bottom) / 2
    turned = f"transform='rotate(-90 18 {middle:.1f})'"
    return [*parts, text(18, middle, f"{unit}, logarithmic", 12, "middle", turned)]


def group_bars(axis: Axis, left: float, wide: float, values: list[Spread | None]) -> list[str]:
    parts, step = [], wide / max(1, len(values))
    for n, value in enumerate(values):
        x = left + n * step
        middle = x + step / 2
        if value is None:
            parts.append(upright(middle, axis.bottom - 5, "none"))
            continue
        y, colour = axis.y(value.median), COLOURS[n % len(COLOURS)]
        parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{step * 0.9:.1f}' height='{axis.bottom - y:.1f}' fill='{colour}'/>")
        high, low = axis.y(value.high), axis.y(value.low)
        parts.append(f"<line x1='{middle:.1f}' x2='{middle:.1f}' y1='{high:.1f}' y2='{low:.1f}' stroke='{INK}'/>")
        parts.append(upright(middle, min(y, high) - 4, number(value.median)))
    return parts


def upright(x: float, y: float, said: str) -> str:
    return text(x + 3.5, y, said, 10, "start", f"transform='rotate(-90 {x + 3.5:.1f} {y:.1f})'")
