"""The colours of a report, and functions that write small SVG pictures.

A picture reads its colours from CSS variables of its page, so one picture serves light and dark. A cell of the card has
no viewBox, and its positions are percentages: it fits any width, and its letters keep their size.
"""

from __future__ import annotations

import math
from html import escape

from amp_patch.diagnose.wording import figure

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
    "weights": ("#4b2f80", "#d9c8f7"),
    "masters": ("#7a55b0", "#b08fe6"),
    "gradients": ("#a88bd4", "#8360bd"),
    "state": ("#d3c4ea", "#573b8a"),
    "activations": ("#b0528f", "#e08cc2"),
}
LARGEST = 1e30  # values beyond it overflow in the arithmetic of the axes


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
