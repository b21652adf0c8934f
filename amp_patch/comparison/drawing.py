"""How the pictures of a report are drawn: colours, axes, and the way from matplotlib to an element of a page.

A picture is SVG that takes its colours from the page, so that light and dark are one picture. Each is small, made for
the width of a phone; a page shows them one below the other there, and three in a row on a desk.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name of a colour -> on white, on black. The levels' hues are Okabe and Ito's, those of what is stacked Paul Tol's:
# told apart with every kind of colour vision, and in print.
COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#57606a", "#a3abb5"),
    "line": ("#dfe3e8", "#363c44"),
    "behind": ("#a6abb1", "#7a828c"),
    "lost": ("#c62828", "#ff7070"),
    "O0": ("#555555", "#b9bcc0"),
    "O1": ("#0072b2", "#4aa8e0"),
    "O2": ("#d55e00", "#f0803c"),
    "O3": ("#c0609a", "#e09bc4"),
    "O4": ("#2c93cc", "#86cdf7"),
    "O5": ("#c78500", "#f2b632"),
    "native": ("#4d7c0f", "#9bcf4a"),
    "data": ("#9aa0a6", "#9aa0a6"),
    "forward": ("#4477aa", "#5c92c8"),
    "backward": ("#ee6677", "#f07f8e"),
    "between": ("#228833", "#46b058"),
    "optimizer": ("#ccbb44", "#ccbb44"),
    "weights": ("#4477aa", "#5c92c8"),
    "masters": ("#66ccee", "#66ccee"),
    "gradients": ("#ee6677", "#f07f8e"),
    "state": ("#ccbb44", "#ccbb44"),
}
# What matplotlib draws them in; nothing else has these colours, so that each can become a variable of the page's.
STAND_INS = {name: f"#fe01{index:02x}" for index, name in enumerate(COLOURS)}
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": STAND_INS["ink"],
    "axes.labelcolor": STAND_INS["soft"],
    "axes.titlecolor": STAND_INS["ink"],
    "axes.edgecolor": STAND_INS["soft"],
    "xtick.color": STAND_INS["soft"],
    "ytick.color": STAND_INS["soft"],
    "grid.color": STAND_INS["line"],
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderpad": 0.0,
    "legend.handlelength": 1.0,
    "legend.columnspacing": 1.2,
    "text.parse_math": False,  # in a user's name a dollar is a dollar
    "svg.fonttype": "none",  # words stay words: they can be read aloud, searched and copied
    "svg.hashsalt": "amp_patch",
}
_POINTS = 400  # as many as such a picture can show of a curve


class Picture(NamedTuple):
    """One picture: an <svg> element for inside of a page that has the colours, and what it shows, in words."""

    svg: str
    alt: str


def colour(level: str) -> str:
    """The name in COLOURS of a level's."""
    return level if level in COLOURS else "ink"


def picture(
    name: str,
    draw: Callable[[Any], None],
    alt: str,
    height: float = 2.5,
    *,
    rows: int | None = None,
    above: float = 0.0,
) -> Picture:
    """Draw a picture, 4 inches wide.

    Args:
        name: what the ids inside begin with, so that no two pictures of a page share one.
        draw: is given the axes.
        alt: what the picture shows, in words.
        height: in inches.
        rows: in place of a height: how many bars there are.
        above: with `rows`, inches for a legend above them.
    """
    if rows is not None:
        height = max(1.5, 0.75 + 0.27 * rows) + above
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # matplotlib warns of letters that its own font lacks. The words stay words, and the page's font may have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(4.0, height), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Picture(_for_a_page(file.getvalue(), name, alt), alt)


def _for_a_page(svg: str, name: str, alt: str) -> str:
    """An SVG file as an element among others of one page: its own ids, the page's colours and letters."""
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", name)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    for each, stand_in in STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{each})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    start = f'<svg {box.group()} role="img" aria-label="{escape(alt)}">'
    return start + svg[svg.index(">") + 1 :]


def name_rows(axes: Axes, names: list[str]) -> None:
    """Label the rows 0, 1, ... of a picture with bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=STAND_INS["ink"])
    axes.grid(False, axis="y")


def show_powers(axes: Axes, left: int, right: int) -> None:
    """An axis of exponents from `left` to `right`, labelled as powers of two."""
    axes.set_xlim(left, right)
    stride = max(4, 4 * math.ceil((right - left) / 36))
    ticks = [e for e in range(left, right) if e % stride == 0]
    axes.set_xticks(ticks, [f"2{raised(e)}" for e in ticks])


def raised(exponent: int) -> str:
    """The number in superscript digits."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def thin(values: np.ndarray) -> np.ndarray:
    """At most `_POINTS` of the values, evenly chosen, the first and the last among them."""
    return values[np.linspace(0, len(values) - 1, _POINTS).round().astype(int)] if len(values) > _POINTS else values


def cut(name: str, length: int = 28) -> str:
    """The name in at most so many letters: its beginning and its end."""
    name = name.encode(errors="replace").decode()  # a file name can hold bytes that are no letter
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-(length // 2) :]}"
