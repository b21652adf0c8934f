"""Draw the card of a report as an SVG file, for a page without HTML and styles, such as a README."""

from __future__ import annotations

import re
from html import escape

from amp_patch.comparison import headline, measures
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import COLOURS, rect, text
from amp_patch.comparison.rows import axis, rows

_ROW = 44
_LEFT = 24
_NAMES = 150.0  # width of the column with the levels' names
_COLUMNS = {"speed": (190.0, "Speed", "longer is faster"), "memory": (190.0, "Memory", "shorter is less")}
_DOTS = 250.0
_TITLE = 1350.0  # characters of a title that fit at font size 1: a bold letter is 0.61 wide on average
_FOOT = 18.0
_SWATCH, _LETTER = 26.0, 5.7  # widths in the legend: of a colour with its margins, and of a letter
_GAP = 22.0


def poster(comparison: Comparison, *, dark: bool = False, about: str = "", machine: str = "") -> str:
    """Return an SVG file with the headline, and for each level its bars of speed and memory, and its gap.

    Args:
        dark: whether to use the colours for a dark page.
        about: the line below the headline, on the compared script.
        machine: the line at the foot, on the machine.
    """
    best = comparison.recommended is not comparison.baseline
    gains = headline.gains(comparison)
    title = headline.headline(comparison) + (f": {gains}" if gains else "")
    size = round(min(20.0, _TITLE / len(title)), 1)
    words = [
        text(_LEFT, 44, title, "good" if best else "ink", size=size, more=' font-weight="700"'),
        text(_LEFT, 68, about, "soft", size=13),
    ]
    return _file(comparison, [*_COLUMNS], 92.0, words, title, machine, dark=dark)


def dots(comparison: Comparison, *, dark: bool = False) -> str:
    """Return an SVG file with the gap of each level to the baseline."""
    return _file(comparison, [], 16.0, [], f"The gap in {comparison.metric_in_words}, by level", "", dark=dark)


def _legend(right: float, y: float) -> str:
    """Return the names of the parts of a memory bar with their colours, in a line that ends at `right`."""
    widths = [_SWATCH + _LETTER * len(words) for words in measures.KINDS.values()]
    x, made = right - sum(widths), ""
    for (kind, words), width in zip(measures.KINDS.items(), widths, strict=True):
        made += rect(x, y - 9, 10, 10, kind, ' rx="2"') + text(x + 14, y, words, "soft", size=11)
        x += width
    return made


def _file(
    comparison: Comparison, columns: list[str], top: float, words: list[str], title: str, foot: str, *, dark: bool
) -> str:
    made = [row for row in rows(comparison) if row.speed]
    places, x = [], _LEFT + _NAMES
    for name in columns:
        width, head, hint = _COLUMNS[name]
        places.append((name, x, width, head, hint))
        x += width + _GAP
    better, *_, margin = headline.what_gap(comparison).split("; ")  # all parts together are wider than the column
    places.append(("gap", x, _DOTS, f"Gap in {comparison.metric_in_words}", f"{better}; {margin}"))
    wide, first = x + _DOTS + _LEFT, top + 44
    tall = first + _ROW * len(made) + 34 + (_FOOT if foot else 0.0)
    words = [*words, text(_LEFT, tall - 14, foot, "soft", size=12)]
    parts = [rect(0.5, 0.5, wide - 1, tall - 1, "card", ' rx="12" stroke="var(--line)"'), *words]
    for _, x, _, head, hint in places:
        parts.append(text(x, top + 14, head, size=13.5, more=' font-weight="700"'))
        parts.append(text(x, top + 31, hint, "soft", size=12))
    for place, row in enumerate(made):
        y = first + _ROW * place
        if row.state == "best":
            parts.append(rect(_LEFT - 12, y, wide - 2 * (_LEFT - 12), _ROW, "tint", ' rx="8"'))
        ink = {"best": "good", "bad": "lost"}.get(row.state, "ink")
        parts.append(text(_LEFT, y + 19, row.level.name, ink, size=14, more=' font-weight="700"'))
        parts.append(text(_LEFT, y + 35, row.short, ink if ink != "ink" else "soft", size=11.5))
        for name, x, width, _, _ in places:
            cell = {"speed": row.speed, "memory": row.memory, "gap": row.gap}[name]
            parts.append(f'<svg x="{x}" y="{y}" width="{width}" height="{_ROW}" overflow="visible">{cell}</svg>')
    x = places[-1][1]
    labels = axis(comparison)
    parts.append(
        f'<svg x="{x}" y="{first + _ROW * len(made) + 4}" width="{_DOTS}" height="16" overflow="visible">{labels}</svg>'
    )
    if "memory" in columns:
        parts.append(_legend(x - _GAP, first + _ROW * len(made) + 16))
    alt = escape("; ".join([title, *(row.alt for row in made)]), quote=True)
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall:g}" width="{wide:g}" height="{tall:g}"'
    )
    body = "\n".join(parts)
    file = f'{start} font-family="system-ui, sans-serif" role="img" aria-label="{alt}">\n{body}\n</svg>\n'
    return re.sub(r"var\(--(\w+)\)", lambda found: COLOURS[found[1]][dark], file)
