"""HTML of a report's parts: headings, tables, sections. What is a user's text stays text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from amp_patch.comparison.drawing import Picture, rect, share


def plain(value: Any) -> str:
    return escape(str(value))


def section(title: str, content: str, hint: str = "") -> str:
    """A section that is opened by a click; nothing where there is no content."""
    said = f" <small>{plain(hint)}</small>" if hint else ""
    return f"<details>\n<summary><h2>{plain(title)}</h2>{said}</summary>\n{content}\n</details>" if content else ""


def figures(several: Sequence[Picture]) -> str:
    made = "".join(f"<figure>{each.svg}</figure>" for each in several)
    return f'<div class="pictures">{made}</div>' if made else ""


def items(several: Iterable[str]) -> str:
    made = "".join(f"<li>{plain(item)}</li>" for item in several)
    return f"<ul>{made}</ul>" if made else ""


def definitions(pairs: dict[str, Any]) -> str:
    made = "".join(f"<dt>{plain(name)}</dt><dd>{plain(value)}</dd>" for name, value in pairs.items())
    return f"<dl>{made}</dl>" if made else ""


def table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, named: bool = False, texts: Sequence[str] = ()
) -> str:
    """A table of HTML cells, in a box of its own that scrolls; the first cell of a row is its heading.

    A column without an entry is left out.

    Args:
        title: above it, and what it is called where it is read aloud.
        named: the first column has names of the user's, which can be long: they are broken into lines.
        texts: the headings of columns of words.
    """
    kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
    look = {place: ' class="text"' if head[place] in texts else "" for place in kept}
    top = "".join(f'<th scope="col"{look[place]}>{head[place]}</th>' for place in kept)
    lines = []
    for row in rows:
        cells = "".join(f"<td{look[place]}>{row[place]}</td>" for place in kept[1:])
        lines.append(f'<tr><th scope="row">{row[0]}</th>{cells}</tr>')
    words = plain(title)
    return (
        f'<div class="scroll{" named" * named}" role="region" tabindex="0" aria-label="{words}">'
        f'<table aria-label="{words}"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def swatch(colour: str, words: str) -> str:
    """A heading with the colour that stands for it."""
    return f'<i class="swatch" style="background: var(--{colour})"></i>{plain(words)}'


def stack(parts: dict[str, float], longest: float) -> str:
    """A bar in parts: name of a colour -> its length."""
    left, made = 0.0, ""
    for colour, length in parts.items():
        if length > 0:
            made += rect(share(left / longest), 4, share(length / longest), 14, colour, ' stroke="var(--paper)"')
            left += length
    return f'<svg class="stack" aria-hidden="true">{made}</svg>' if made else ""
