"""The rows of the card: for each level a bar of its speed, a bar of its memory, and a dot for each seed's result.

A cell is the inside of an <svg> of any size: shares of its width are percentages. So a page and a picture file show
the same, each in boxes of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from amp_patch.lab import wording
from amp_patch.lab.comparison import headline
from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.drawing import LARGEST, line, rect, share, text, ticks, var
from amp_patch.lab.comparison.level_result import LevelResult

_NUMBER = 0.36  # of the narrowest cell's width, 150 pixels: what a number takes, with the gap before it
_BAR = 0.74  # of a cell's width: the rest is for the number behind the longest bar
_INKS = {"best": "good", "base": "base", "bad": "lost", "unsure": "unsure", "plain": "ink"}


class Row(NamedTuple):
    """One level: how it is shown, what it is called, its cells, and all of it in words."""

    state: str
    level: LevelResult
    short: str
    speed: str
    memory: str
    dots: str
    alt: str


class _Scale(NamedTuple):
    """Maps results to shares of the width."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return 0.09 + 0.82 * (value - self.low) / ((self.high - self.low) or 1.0)


def rows(comparison: Comparison) -> list[Row]:
    """In the order of the levels."""
    fastest = max([1.0, *(level.speedup.high for level in comparison.levels if level.speedup)])
    largest = max([1.0, *(level.memory for level in comparison.levels if level.memory)])
    scale = _results(comparison)
    made = []
    for level in comparison.levels:
        state, short = headline.state(level, comparison), headline.in_short(level, comparison)
        cells = ("", "", "")
        if level.runs:
            cells = (_speed(level, state, fastest), _memory(level, state, largest), _dots(comparison, level, scale))
        ends = ", ".join(wording.figure(value) for value in level.final)
        unknown = "emulated, speed not known" if level.emulated else "speed not known"
        speed = f"speed {wording.ratio(level.speedup.median)}" if level.speedup else unknown
        memory = f"memory {wording.ratio(level.memory)}" if level.memory else "memory not known"
        alt = f"{level.name}: {short}" + (f"; {speed}, {memory} of the baseline's; {ends}" if level.runs else "")
        made.append(Row(state, level, short, *cells, alt))
    return made


def axis(comparison: Comparison) -> str:
    """The labels below the dots."""
    scale = _results(comparison)
    if scale is None:
        return ""
    made = []
    for value, words in ticks(scale.low, scale.high, 4).items():
        made.append(text(share(scale.share(value)), 12, words, "soft", size=11, more=' text-anchor="middle"'))
    return "".join(made)


def _speed(level: LevelResult, state: str, most: float) -> str:
    if level.speedup is None:
        return _centred(text(0, 4, "emulated" if level.emulated else "not known", "soft"))
    median, low, high = level.speedup
    made = _bar(median / most, state, "time")
    if state != "base" and high > low:
        made += line(share(_BAR * low / most), 0, share(_BAR * high / most), 0, "ink", ' stroke-width="1.5"')
        made += "".join(
            line(share(_BAR * v / most), -4, share(_BAR * v / most), 4, "ink", ' stroke-width="1.5"')
            for v in (low, high)
        )
    return _reference(most) + _centred(made + _number(max(median, high), median, state, most))


def _memory(level: LevelResult, state: str, most: float) -> str:
    if level.memory is None:
        return _centred(text(0, 4, "not known", "soft"))
    made = _bar(level.memory / most, state, "memory") + _number(level.memory, level.memory, state, most)
    return _reference(most) + _centred(made)


def _bar(part: float, state: str, colour: str) -> str:
    faint = ' opacity="0.4"' if state in ("bad", "unsure") else ""
    return rect(0, -8, share(_BAR * part), 16, "base" if state == "base" else colour, f' rx="2"{faint}')


def _number(end: float, value: float, state: str, most: float) -> str:
    """The value behind the end of its bar, or behind the baseline's line, which would strike it through."""
    bold = ' font-weight="700"' if state == "best" else ""
    strikes = end < 1 and (1 - end) * _BAR / most < _NUMBER
    return text(share(_BAR * (1.0 if strikes else end) / most), 4.5, f"{wording.ratio(value)}x", more=f' dx="7"{bold}')


def _reference(most: float) -> str:
    """A line where the baseline's bar ends."""
    return line(share(_BAR / most), 0, share(_BAR / most), "100%", "soft", ' stroke-dasharray="2 3"')


def _dots(comparison: Comparison, level: LevelResult, scale: _Scale | None) -> str:
    state, base = headline.state(level, comparison), comparison.baseline
    missing = len(level.final) - len(level.finite)
    if scale is None:
        return _centred(text(0, 4, "not finite" if missing else "none", "lost"))
    made, behind = "", ""
    if base is not None:
        low, high = min(base.finite.values()), max(base.finite.values())
        left = scale.share(low)
        width = max(scale.share(high) - left, 0.004)
        behind = rect(share(left), "-1%", share(width), "102%", "band")  # higher than the row, or seams show
    ink = _INKS[state]
    inside = [value for value in level.finite.values() if scale.low <= value <= scale.high]
    if level.mean is not None and scale.low <= level.mean <= scale.high:
        mean = share(scale.share(level.mean))
        made += line(mean, -11, mean, 11, ink, ' stroke-width="2"')
    for value in inside:
        look = f"fill: {var(ink)}; stroke: {var('paper')}"
        made += f'<circle cx="{share(scale.share(value))}" cy="0" r="4.5" fill-opacity="0.85" style="{look}"/>'
    above = [value for value in level.finite.values() if value > scale.high]
    below = [value for value in level.finite.values() if value < scale.low]
    said = [f"{missing} of {len(level.final)} not finite"] if missing else []
    for beyond, arrow in ((above, "{} →"), (below, "← {}")):
        if beyond:
            span = " to ".join(dict.fromkeys(wording.figure(v) for v in (min(beyond), max(beyond))))
            said.append(arrow.format(span))
    if said:
        right = bool(above) or not any(scale.share(value) > 0.5 for value in inside)
        end = ' text-anchor="end"' if right else ""
        made += text("99%" if right else "1%", 4.5, ", ".join(said), ink, size=12, more=end)
    return behind + _centred(made)


def _results(comparison: Comparison) -> _Scale | None:
    """The axis of the dots. Results far off are numbers at its edge: else all others would be one dot."""
    values = {id(level): [v for v in level.finite.values() if abs(v) < LARGEST] for level in comparison.levels}
    every = [value for each in values.values() for value in each]
    if not every:
        return None
    near = [v for level in comparison.levels if level.finding.kind != "differs" for v in values[id(level)]] or every
    width = max(near) - min(near) or abs(near[0]) * 0.01 or 1.0
    return _Scale(max(min(every), min(near) - width), min(max(every), max(near) + width))


def _centred(inside: str) -> str:
    """An SVG around the parts, with y = 0 in the middle of its height."""
    return f'<svg y="50%" overflow="visible">{inside}</svg>'
