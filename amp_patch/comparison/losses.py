"""The picture of a report: the training loss of each level over the steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from itertools import cycle
from typing import NamedTuple

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import LARGEST, line, text, ticks, var

_WIDTH, _HEIGHT = 480.0, 250.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 58.0, 10.0, 26.0, 26.0
_COLOURS = ("time", "unsure", "activations", "good", "lost", "memory", "ink", "gradients")  # beside the baseline's
_POINTS = 200  # the most points of a curve: a picture of this width shows no more


class Picture(NamedTuple):
    """An <svg> element for a page that defines the colours, and {name of a level: colour of its line}."""

    svg: str
    key: dict[str, str]


def picture(comparison: Comparison) -> Picture | None:
    """Return the training loss of each level, as the mean over its seeds, on the range of the baseline's seeds.

    None if no run has a loss.
    """
    losses = {level.name: [run.loss for run in level.all_runs if run.loss] for level in comparison.levels}
    last = max((len(loss) for found in losses.values() for loss in found), default=0)
    if not last:
        return None
    curves = {name: smooth(found, last) for name, found in losses.items() if found}
    axes = _Axes(last, [value for curve in curves.values() for _, found in curve for value in found])
    base, colours = comparison.baseline and comparison.baseline.name, cycle(_COLOURS)
    key = {name: "base" if name == base else next(colours) for name in curves}
    drawn = axes.area(curves[base]) if base in curves else ""
    drawn += "".join(axes.curve(curve, key[name]) for name, curve in curves.items())
    alt = f"The training loss over {last} steps, a line for each level: {', '.join(key)}."
    start = f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(alt)}">{axes.labels}'
    inner = f'<svg x="{_LEFT}" y="{_TOP}" width="{axes.width}" height="{axes.height}">{axes.grid}{drawn}</svg>'
    return Picture(f"{start}{inner}</svg>", key)


def smooth(losses: Sequence[Sequence[float]], last: int) -> list[tuple[int, list[float]]]:
    """Return (step, mean of each run's losses over the 25th of the steps that ends there) for up to 200 steps.

    A run that ended before the step has no mean. No run has one if a loss in the window is not finite.
    """
    window = max(1, last // 25)
    count = min(_POINTS, last - window + 1)
    means = []
    for index in range(count):
        step = window + round(index * (last - window) / max(1, count - 1))
        inside = [each[step - window : step] for each in losses if len(each) >= step]
        finite = all(math.isfinite(value) for each in inside for value in each)
        limited = [[max(-LARGEST, min(value, LARGEST)) for value in each] for each in inside]
        means.append((step, [*map(statistics.fmean, limited)] if finite else []))
    return means


class _Axes:
    """Axes from step 1 to the last, and over all values: logarithmic if these are positive and far apart."""

    def __init__(self, last: int, values: Sequence[float]) -> None:
        low, high = min(values, default=0.0), max(values, default=1.0)
        self._log = low > 0 and high > 20 * low
        margin = (high - low) * 0.06 or abs(low) * 0.05 or 1.0
        ends = (math.log10(low / 1.1), math.log10(high * 1.1)) if self._log else (low - margin, high + margin)
        self._low, self._high = ends
        self._last = max(2, last)
        self.width, self.height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        self.grid, self.labels = "", ""
        for value, label in ticks(*ends).items():
            y = round(self._at(value), 1)
            self.grid += line(0, y, "100%", y, "line")
            words = f"{10**value:.2g}" if self._log else label
            self.labels += text(_LEFT - 6, _TOP + y + 4, words, "soft", size=12, more=' text-anchor="end"')
        steps = {step: label for step, label in ticks(0, last).items() if step == int(step) > 0} or {1: "1"}
        for step, label in steps.items():
            x = round(_LEFT + self._x(step), 1)
            self.labels += text(x, _HEIGHT - 7, label, "soft", size=12, more=' text-anchor="middle"')

    def curve(self, means: Iterable[tuple[int, list[float]]], colour: str) -> str:
        """Return a line through the means over the runs, with a gap where there is none."""
        path, pen = "", "M"
        for step, found in means:
            path += f"{pen}{self._point(step, statistics.fmean(found))}" if found else ""
            pen = "L" if found else "M"
        return f'<path d="{path or "M0 0"}" style="fill: none; stroke: {var(colour)}; stroke-width: 1.6"/>'

    def area(self, means: Iterable[tuple[int, list[float]]]) -> str:
        """Return the area between the smallest and the largest mean of each step."""
        edge = [self._point(step, max(found)) for step, found in means if found]
        edge += [self._point(step, min(found)) for step, found in [*means][::-1] if found]
        return f'<path d="M{"L".join(edge or ["0 0"])}Z" style="fill: {var("band")}"/>'

    def _point(self, step: int, value: float) -> str:
        return f"{self._x(step):.1f} {self._at(math.log10(value) if self._log else value):.1f}"

    def _x(self, step: float) -> float:
        return (step - 1) / (self._last - 1) * self.width

    def _at(self, value: float) -> float:
        return self.height * (self._high - value) / (self._high - self._low)
