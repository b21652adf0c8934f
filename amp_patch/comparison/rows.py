"""The rows of a report's card: for each level a bar of its speed, a bar of its memory, and its gap to the baseline.

A cell is the content of an <svg> of any size, in which positions are percentages of the width. A page and a picture
file can therefore show the same cell in boxes of different sizes.
"""

from __future__ import annotations

from typing import NamedTuple

from amp_patch.comparison import headline, measures
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import LARGEST, line, rect, share, text, ticks, var
from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.verdict import percent_of
from amp_patch.diagnose import wording

_NUMBER = 0.36  # a number with its margin, as a share of the narrowest cell (150 pixels)
_ZERO = 0.36  # the position of a gap of 0
_END = ' text-anchor="end"'
_BAR = 0.74  # the longest bar, as a share of the cell; a number follows it
_INKS = {"best": "good", "base": "base", "bad": "lost", "unsure": "unsure", "plain": "ink"}


class Row(NamedTuple):
    """The row of a level: its style (`state`), its short text, its three cells as SVG, and a text alternative."""

    state: str
    level: LevelResult
    short: str
    speed: str
    memory: str
    gap: str
    alt: str


def rows(comparison: Comparison) -> list[Row]:
    """Return the rows in the order of the levels; without a baseline none."""
    if comparison.baseline is None:
        return []
    fastest = max([1.0, *(level.speedup.high for level in comparison.levels if level.speedup)])
    largest = max([1.0, *(level.memory for level in comparison.levels if level.memory)])
    of_gaps, made = _Axis(comparison), []
    for level in comparison.levels:
        state, short = headline.state(level, comparison), headline.in_short(level, comparison)
        if not level.runs:
            made.append(Row(state, level, short, "", "", "", f"{level.name}: {short}"))
            continue
        cells = (_speed(level, state, fastest), _memory(level, state, largest), _gap(level, state, of_gaps))
        said = level.verdict.reason if level.failed else level.verdict.text  # errors are short in the first
        made.append(Row(state, level, short, *cells, f"{level.name}: {short}; {said}"))
    return made


def axis(comparison: Comparison) -> str:
    """Return the labels of the axis of gaps."""
    of_gaps = _Axis(comparison)
    factor, unit = (100, " %") if of_gaps.in_percent else (1, "")
    made = []
    for value, words in ticks(-factor * of_gaps.reach, factor * of_gaps.reach, 4).items():
        label = "0" if not value else f"{'+' if value > 0 else ''}{words}{unit}"
        at = share(of_gaps.place(value / factor))
        made.append(text(at, 12, label, "soft", size=11, more=' text-anchor="middle"'))
    return "".join(made)


class _Axis:
    """The axis of gaps, in shares of the baseline's result; in the metric's unit if that is 0.

    Attributes:
        in_percent: whether gaps are shares.
        unit: the gap that is 1 on the axis.
        margin: the margin in the unit of the axis; if the baseline is 0, a share of the largest result.
        reach: the axis goes from minus this to plus this. It is three margins, or a little more than the farthest
            interval of a level that is not rejected, whichever is more. The gap of a rejected level may be larger, and
            is then a number at the edge. If the axis included it, all other gaps would be drawn as one dot.
    """

    def __init__(self, comparison: Comparison) -> None:
        mean = comparison.baseline.mean if comparison.baseline is not None else None
        self.in_percent, self.unit = bool(mean), abs(mean or 1.0)
        means = [abs(level.mean) for level in comparison.levels if level.mean and abs(level.mean) < LARGEST]
        self.margin = comparison.margin * (1.0 if mean else max(means, default=1.0))
        gaps = [level.finding.gap for level in comparison.levels if level.finding.gap and not level.finding.rejected]
        ends = [abs(each) for gap in gaps for each in (gap.mean, gap.low, gap.high) if each is not None]
        self.reach = max([3 * self.margin, *(1.1 * each / self.unit for each in ends if each < LARGEST)])

    def place(self, value: float) -> float:
        """Return the position of a gap in its cell, as a share of the width. The last third is left for the number."""
        return _ZERO + 0.33 * max(-self.reach, min(self.reach, value)) / self.reach


def _speed(level: LevelResult, state: str, most: float) -> str:
    if level.speedup is None:
        return _centred(text(0, 4, "emulated" if level.emulated else "not known", "soft"))
    median, low, high = level.speedup
    made = _bar(median / most, state, "time")
    if state != "base" and high > low:
        ends, width = [share(_BAR * end / most) for end in (low, high)], ' stroke-width="1.5"'
        made += line(ends[0], 0, ends[1], 0, "ink", width)
        made += "".join(line(end, -4, end, 4, "ink", width) for end in ends)
    return _reference(most) + _centred(made + _number(max(median, high), median, state, most))


def _memory(level: LevelResult, state: str, most: float) -> str:
    if level.memory is None:
        return _centred(text(0, 4, "not known", "soft"))
    made = _bar(level.memory / most, state, "memory") + _parts(level, state, most)
    made += _number(level.memory, level.memory, state, most)
    return _reference(most) + _centred(made)


def _parts(level: LevelResult, state: str, most: float) -> str:
    """Return SVG rectangles on the memory bar, from the left: one for each entry of `measures.KINDS`, in its colour.

    On CUDA the rest of the peak stays uncovered.
    """
    sizes = {kind: measures.median(getattr(run, kind) for run in level.runs) or 0 for kind in measures.KINDS}
    whole = level.memory_bytes if level.memory_ratio is not None else sum(sizes.values()) - sizes["activations"]
    if not whole or not level.memory:
        return ""
    made, left = "", 0.0
    for kind, size in sizes.items():
        part = min(size / whole, 1 - left)
        if part > 0:
            start, width = (_BAR * level.memory * each / most for each in (left, part))
            made += rect(share(start), -8, share(width), 16, kind, _faint(state))
            left += part
    return made


def _bar(part: float, state: str, colour: str) -> str:
    return rect(0, -8, share(_BAR * part), 16, "base" if state == "base" else colour, f' rx="2"{_faint(state)}')


def _faint(state: str) -> str:
    return ' opacity="0.4"' if state in ("bad", "unsure") else ""


def _number(end: float, value: float, state: str, most: float) -> str:
    """Return the value as SVG text, right of the bar that ends at `end`.

    If the line at the baseline's value would cross the text there, it stands right of that line.
    """
    bold = ' font-weight="700"' if state == "best" else ""
    strikes = end < 1 and (1 - end) * _BAR / most < _NUMBER
    return text(share(_BAR * (1.0 if strikes else end) / most), 4.5, f"{wording.ratio(value)}x", more=f' dx="7"{bold}')


def _reference(most: float) -> str:
    """Return a vertical line at the end of the baseline's bar, for comparison with the other bars."""
    return line(share(_BAR / most), 0, share(_BAR / most), "100%", "soft", ' stroke-dasharray="2 3"')


def _gap(level: LevelResult, state: str, of_gaps: _Axis) -> str:
    """Return the cell with the gap to the baseline as a dot, its interval as a line, and the margin as a band."""
    gap, reach = level.finding.gap, of_gaps.reach
    left, right = (of_gaps.place(each) for each in (-of_gaps.margin, of_gaps.margin))
    # A little higher than the row, so that there are no seams between the bands of two rows.
    behind = rect(share(left), "-1%", share(max(right - left, 0.004)), "102%", "band")
    behind += line(share(_ZERO), 0, share(_ZERO), "100%", "soft")
    missing = len(level.final) - len(level.finite)
    lost = f"{missing} of {len(level.final)} {'stopped' if level.stopped else 'not finite'}"
    if gap is None:
        at_end = lost if missing else wording.digits(level.mean or 0.0, 4)
        return behind + _centred(text("99%", 4.5, at_end, "soft" if state == "base" else "lost", size=12, more=_END))
    ink, mean, made = _INKS[state], gap.mean / of_gaps.unit, ""
    words = percent_of(gap) or wording.signed(gap.mean)
    said = lost if missing else f"{words} →" if mean > reach else f"← {words}" if mean < -reach else words
    if not missing and abs(mean) <= reach:
        ends = [each / of_gaps.unit for each in (gap.low, gap.high) if each is not None]
        if ends:
            low, high = (share(of_gaps.place(each)) for each in ends)
            made += line(low, 0, high, 0, ink, ' stroke-width="2"')
            inside = [at for end, at in zip(ends, (low, high), strict=True) if abs(end) <= reach]
            made += "".join(line(at, -5, at, 5, ink, ' stroke-width="2"') for at in inside)
        look = f"fill: {var(ink)}; stroke: {var('paper')}"
        made += f'<circle cx="{share(of_gaps.place(mean))}" cy="0" r="4.5" style="{look}"/>'
    return behind + _centred(made + text("99%", 4.5, said, ink, size=12, more=_END))


def _centred(inside: str) -> str:
    """Wrap SVG elements, so that their y = 0 is at half of the cell's height."""
    return f'<svg y="50%" overflow="visible">{inside}</svg>'
