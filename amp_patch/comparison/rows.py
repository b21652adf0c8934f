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
from amp_patch.comparison.verdict import gap_in_words, percent_of
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
    """Return the rows in the order of the levels."""
    fastest = max([1.0, *(level.speedup.high for level in comparison.levels if level.speedup)])
    largest = max([1.0, *(level.memory for level in comparison.levels if level.memory)])
    reach = _reach(comparison)
    made = []
    for level in comparison.levels:
        state, short = headline.state(level, comparison), headline.in_short(level, comparison)
        cells = ("", "", "")
        if level.runs:
            cells = (_speed(level, state, fastest), _memory(level, state, largest), _gap(comparison, level, reach))
        ends = ", ".join(wording.figure(value) for value in level.final)
        unknown = "emulated, speed not known" if level.emulated else "speed not known"
        speed = f"speed {wording.ratio(level.speedup.median)}" if level.speedup else unknown
        memory = f"memory {wording.ratio(level.memory)}" if level.memory else "memory not known"
        gap = f", {gap_in_words(level.finding.gap, 'it')}" if level.finding.gap is not None else ""
        alt = f"{level.name}: {short}" + (f"; {speed}, {memory} of the baseline's; {ends}{gap}" if level.runs else "")
        made.append(Row(state, level, short, *cells, alt))
    return made


def axis(comparison: Comparison) -> str:
    """Return the labels of the axis of gaps."""
    reach = _reach(comparison)
    if reach is None:
        return ""
    unit = " %" if _in_percent(comparison) else ""
    factor = 100 if unit else 1
    made = []
    for value, words in ticks(-factor * reach, factor * reach, 4).items():
        label = "0" if not value else f"{'+' if value > 0 else ''}{words}{unit}"
        made.append(
            text(share(_place(value / factor, reach)), 12, label, "soft", size=11, more=' text-anchor="middle"')
        )
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
            faint = ' opacity="0.4"' if state in ("bad", "unsure") else ""
            made += rect(share(start), -8, share(width), 16, kind, faint)
            left += part
    return made


def _bar(part: float, state: str, colour: str) -> str:
    faint = ' opacity="0.4"' if state in ("bad", "unsure") else ""
    return rect(0, -8, share(_BAR * part), 16, "base" if state == "base" else colour, f' rx="2"{faint}')


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


def _gap(comparison: Comparison, level: LevelResult, reach: float | None) -> str:
    """Return the cell with the gap to the baseline as a dot, its interval as a line, and the margin as a band."""
    if reach is None:
        return _centred(text(0, 4, "not known", "soft"))
    base, gap = comparison.baseline, level.finding.gap
    margin = _margin(comparison)
    left, right = (_place(max(-reach, min(reach, each)), reach) for each in (-margin, margin))
    # A little higher than the row, so that there are no seams between the bands of two rows.
    behind = rect(share(left), "-1%", share(max(right - left, 0.004)), "102%", "band")
    behind += line(share(_ZERO), 0, share(_ZERO), "100%", "soft")
    missing = len(level.final) - len(level.finite)
    lost = f"{missing} of {len(level.final)} {'stopped' if level.stopped else 'not finite'}"
    if gap is None or base is None:
        at_end = lost if missing else wording.digits(level.mean or 0.0, 4)
        return behind + _centred(text("99%", 4.5, at_end, "soft" if level is base else "lost", size=12, more=_END))
    ink, unit = _INKS[headline.state(level, comparison)], _unit(comparison)
    mean, ends = gap.mean / unit, [each / unit for each in (gap.low, gap.high) if each is not None]
    made = ""
    if ends and abs(mean) <= reach:
        low, high = (_place(max(-reach, min(reach, each)), reach) for each in ends)
        made += line(share(low), 0, share(high), 0, ink, ' stroke-width="2"')
        for end, at in zip(ends, (low, high), strict=True):
            made += line(share(at), -5, share(at), 5, ink, ' stroke-width="2"') if abs(end) <= reach else ""
    if abs(mean) <= reach:
        look = f"fill: {var(ink)}; stroke: {var('paper')}"
        made += f'<circle cx="{share(_place(mean, reach))}" cy="0" r="4.5" style="{look}"/>'
    words = percent_of(gap) or wording.signed(gap.mean)
    beyond = f"{words} →" if mean > reach else f"← {words}" if mean < -reach else words
    said = lost if missing else beyond
    return behind + _centred(made * (not missing) + text("99%", 4.5, said, ink, size=12, more=_END))


def _reach(comparison: Comparison) -> float | None:
    """Return the largest gap on the axis of gaps, which goes from minus this to plus this; None without a baseline.

    It is three margins, or a little more than the farthest interval of a level that is not rejected, whichever is more.
    The gap of a rejected level may be larger, and is then a number at the edge. If the axis included it, all other gaps
    would be drawn as one dot.
    """
    gaps = [(level, level.finding.gap) for level in comparison.levels if level.finding.gap is not None]
    if comparison.baseline is None:
        return None
    unit = _unit(comparison)
    near = [
        abs(each / unit)
        for level, gap in gaps
        if not level.finding.rejected
        for each in (gap.mean, gap.low, gap.high)
        if each is not None and abs(each) < LARGEST
    ]
    return max([3 * _margin(comparison), *(1.1 * each for each in near)])


def _place(value: float, reach: float) -> float:
    """Return the position of a gap in its cell, as a share of the width. The last third is left for the number."""
    return _ZERO + 0.33 * value / reach


def _in_percent(comparison: Comparison) -> bool:
    """Return whether gaps are drawn as shares of the baseline's result: not if that is 0 or there is no baseline."""
    return comparison.baseline is not None and bool(comparison.baseline.mean)


def _unit(comparison: Comparison) -> float:
    base = comparison.baseline
    return abs(base.mean or 1.0) if base is not None else 1.0


def _margin(comparison: Comparison) -> float:
    """Return the margin in the unit of the axis; if the baseline is 0, a share of the largest result."""
    if _in_percent(comparison):
        return comparison.margin
    means = [abs(level.mean) for level in comparison.levels if level.mean and abs(level.mean) < LARGEST]
    return comparison.margin * max(means, default=1.0)


def _centred(inside: str) -> str:
    """Wrap SVG elements, so that their y = 0 is at half of the cell's height."""
    return f'<svg y="50%" overflow="visible">{inside}</svg>'
