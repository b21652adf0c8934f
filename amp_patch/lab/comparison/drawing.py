"""The colours of a report, and functions that write small SVG pictures.

A picture reads its colours from CSS variables of its page, so one picture serves light and dark. A cell of a table or
of the card has no viewBox, and its positions are percentages: it fits any width, and its letters keep their size. A
`Plot` has axes and a fixed aspect ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from amp_patch.lab.wording import figure, raised

# Name of a colour -> (on white, on black). Blue is time, violet memory, green the recommended level.
COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "card": ("#f6f7f9", "#1b2026"),
    "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#57606a", "#a3abb5"),
    "line": ("#dfe3e8", "#363c44"),
    "band": ("#d9dde2", "#414851"),
    "good": ("#15702f", "#56d06f"),
    "tint": ("#e4f3e8", "#1c2f22"),
    "unsure": ("#8a5a00", "#e3b341"),
    "lost": ("#c62828", "#ff7b7b"),
    "base": ("#8b939c", "#8b939c"),
    "time": ("#2f6fb0", "#68a8e8"),
    "memory": ("#7a55b0", "#b08fe6"),
    "data": ("#b3bcc6", "#5b6470"),
    "forward": ("#7fb0e0", "#3f74a8"),
    "backward": ("#2f6fb0", "#68a8e8"),
    "between": ("#8f9aa6", "#7f8b97"),
    "optimizer": ("#174a7c", "#b9dbfb"),
    "weights": ("#4b2f80", "#d9c8f7"),
    "masters": ("#7a55b0", "#b08fe6"),
    "gradients": ("#a88bd4", "#8360bd"),
    "state": ("#d3c4ea", "#573b8a"),
    "activations": ("#b0528f", "#e08cc2"),
}
LARGEST = 1e30  # values beyond it overflow in the arithmetic of the axes
_POINTS = 200  # the most points of a curve: a picture of this width shows no more


class Picture(NamedTuple):
    """An <svg> element for a page that defines the colours, and its text alternative."""

    svg: str
    alt: str


def var(colour: str) -> str:
    """Return a CSS reference to a colour of COLOURS."""
    return f"var(--{colour})"


def rect(x: str | float, y: str | float, width: str | float, height: str | float, colour: str, more: str = "") -> str:
    """Return an SVG rectangle; `more` has attributes, unescaped."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" style="fill: {var(colour)}"{more}/>'


def line(x1: str | float, y1: str | float, x2: str | float, y2: str | float, colour: str, more: str = "") -> str:
    """Return an SVG line; `more` has attributes, unescaped."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" style="stroke: {var(colour)}"{more}/>'


def text(x: str | float, y: str | float, words: str, colour: str = "ink", *, size: float = 13, more: str = "") -> str:
    """Return an SVG text element. `words` are escaped; `more` has further attributes, which are not."""
    return f'<text x="{x}" y="{y}" font-size="{size}" style="fill: {var(colour)}"{more}>{escape(words)}</text>'


def share(value: float) -> str:
    """Return a share of the width as a percentage."""
    return f"{100 * value:.2f}%"


def stack(parts: dict[str, float], longest: float) -> str:
    """Return an SVG of a stacked bar: {name of a colour: length of its part}; a bar of `longest` fills the width."""
    left, made = 0.0, ""
    for colour, length in parts.items():
        if length > 0:
            made += rect(share(left / longest), 4, share(length / longest), 14, colour, ' stroke="var(--paper)"')
            left += length
    return f'<svg class="stack" aria-hidden="true">{made}</svg>' if made else ""


class Plot:
    """A picture with two axes, `WIDTH` wide. Later additions cover earlier ones, and all are clipped at the axes.

    Args:
        title: above the axes.
        x, y: the lowest and the highest value.
        y_ticks, x_ticks: value -> its label.
        log: whether the y axis is logarithmic; its values are then above 0.
    """

    WIDTH, HEIGHT = 320.0, 176.0
    LEFT, TOP, RIGHT, BOTTOM = 48.0, 26.0, 10.0, 22.0

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        x_ticks: dict[float, str],
        y_ticks: dict[float, str],
        *,
        log: bool = False,
        below: float = 0.0,
    ) -> None:
        self.title, self._x, self._log, self._below = title, x, log, below
        self._y = (math.log(y[0]), math.log(y[1])) if log else y
        self.inner: list[str] = []
        self.outer: list[str] = []
        self.width, self.height = self.WIDTH - self.LEFT - self.RIGHT, self.HEIGHT - self.TOP - self.BOTTOM
        for value, label in y_ticks.items():
            at = self.y(value)
            self.inner.append(line(0, _short(at), "100%", _short(at), "line"))
            end = ' text-anchor="end"'
            self.outer.append(text(self.LEFT - 5, _short(self.TOP + at + 3.5), label, "soft", size=10, more=end))
        for value, label in x_ticks.items():
            place = self.LEFT + self.x(value)
            middle = ' text-anchor="middle"'
            self.outer.append(text(_short(place), self.HEIGHT - 7, label, "soft", size=10, more=middle))

    def x(self, value: float) -> float:
        """Return pixels from the left."""
        return (value - self._x[0]) / ((self._x[1] - self._x[0]) or 1) * self.width

    def y(self, value: float) -> float:
        """Return pixels from the top; values far outside of the axis are clamped."""
        low, high = self._y
        if self._log:
            value = math.log(value) if value > 0 else low
        height = (value - low) / ((high - low) or 1)
        return self.height * (1 - min(3.0, max(-2.0, height)))  # clamped: renderers drop a path that goes to 1e30

    def curve(self, points: Iterable[tuple[float, float | None]], colour: str, *, width: float = 1.6) -> None:
        """Draw a line through the points, with a gap at each None."""
        path, pen = [], "M"
        for x, y in points:
            if y is None:
                pen = "M"
                continue
            path.append(f"{pen}{_short(self.x(x))} {_short(self.y(y))}")
            pen = "L"
        look = f"fill: none; stroke: {var(colour)}; stroke-width: {width}"
        self.inner.append(f'<path d="{"".join(path) or "M0 0"}" style="{look}"/>')

    def area(
        self, edges: Iterable[tuple[float, float | None, float | None]], colour: str, opacity: float = 1.0
    ) -> None:
        """Fill the area between two lines of (x, lower, upper), with a gap at each None."""
        shapes: list[list[tuple[float, float, float]]] = [[]]
        for x, low, high in edges:
            if low is None or high is None:
                shapes.append([])
            else:
                shapes[-1].append((self.x(x), self.y(low), self.y(high)))
        path = ""
        for shape in filter(None, shapes):
            upper = "L".join(f"{_short(x)} {_short(high)}" for x, _, high in shape)
            lower = "L".join(f"{_short(x)} {_short(low)}" for x, low, _ in reversed(shape))
            path += f"M{upper}L{lower}Z"
        if path:
            self.inner.append(f'<path d="{path}" style="fill: {var(colour)}; fill-opacity: {opacity}"/>')

    def columns(self, heights: Iterable[tuple[float, float]], colour: str) -> None:
        """Draw a column from the foot up to each (x, y), one unit of x wide."""
        wide = _short(max(0.5, self.x(self._x[0] + 1) - 0.4))
        path = "".join(
            f"M{_short(self.x(x))} {self.height}V{_short(self.y(y))}h{wide}V{self.height}Z" for x, y in heights
        )
        if path:
            self.inner.append(f'<path d="{path}" style="fill: {var(colour)}"/>')

    def foot(self, places: Sequence[float], colour: str) -> None:
        """Draw marks at the foot of the axes."""
        marks = "".join(f"M{_short(self.x(x))} {self.height}v-9" for x in thin(places))
        if marks:
            self.inner.append(f'<path d="{marks}" style="stroke: {var(colour)}; stroke-width: 1.4"/>')

    def note(self, words: str, colour: str) -> None:
        """Write words inside of the axes, at the lower right."""
        place, end = self.WIDTH - self.RIGHT - 2, ' text-anchor="end"'
        self.outer.append(text(place, self.TOP + self.height - 14, words, colour, size=10.5, more=end))

    def picture(self, alt: str) -> Picture:
        """Return the picture with its text alternative."""
        box = f"0 0 {self.WIDTH:g} {self.HEIGHT + self._below:g}"
        head = text(2, 14, self.title, size=11.5, more=' font-weight="600"')
        axes = f'<svg x="{self.LEFT}" y="{self.TOP}" width="{self.width}" height="{self.height}">'
        foot = self.TOP + self.height
        edge = line(self.LEFT, foot, self.WIDTH - self.RIGHT, foot, "soft")
        drawn = f"{head}{axes}{''.join(self.inner)}</svg>{edge}{''.join(self.outer)}"
        return Picture(f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}">{drawn}</svg>', alt)


def ticks(low: float, high: float, count: int = 4) -> dict[float, str]:
    """Return {value: label} of about `count` round values from `low` to `high`. The labels are distinct."""
    span = high - low
    if not span or not math.isfinite(span):
        return {low: figure(low)}
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    values = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e5 or step < 1e-4:
        return {value: f"{value:.3g}" for value in values}
    power = math.floor(math.log10(step) + 1e-9)
    digits = max(0, -power + (round(step / 10.0**power, 6) == 2.5))
    return {value: f"{value:.{digits}f}" for value in values}


def step_ticks(last: int) -> dict[float, str]:
    """Return {step: label} for an axis of steps: round steps from 1 to `last`."""
    return {value: label for value, label in ticks(0, last).items() if value >= 1 and value == int(value)} or {1: "1"}


def power_ticks(low: int, high: int, count: int = 8) -> dict[float, str]:
    """Return {exponent: label} for an axis of exponents of 2, about `count` of them."""
    stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20) if (high - low) / s <= count)
    return {exponent: f"2{raised(exponent)}" for exponent in range(low, high + 1) if exponent % stride == 0}


def thin(values: Sequence[float]) -> Sequence[float]:
    """Return at most `_POINTS` of the values, evenly spaced, with the first and the last."""
    if len(values) <= _POINTS:
        return values
    return [values[round(index * (len(values) - 1) / (_POINTS - 1))] for index in range(_POINTS)]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
