"""Reports of tables and lines, as text for terminals and files, or as HTML for notebooks. No cell is truncated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from amp_patch.diagnose.text_table import in_columns

_WIDTH = 100  # columns of text

# No colours of text or background: the notebook may be light or dark.
_CELL = "padding:2px 12px 2px 0;border-bottom:1px solid rgba(128,128,128,.35);vertical-align:top"
_TABLE = "border-collapse:collapse;color:inherit;font-size:inherit;margin:0 0 .6em"
_PARAGRAPH = "margin:.6em 0;color:inherit"


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        rows: the cells; the first cell of a row is a name.
        header: lines of the header, which may have fewer cells than a row.
        title: the line above the table; "" for none.
        numbers: whether the cells after the name are numbers, to be right-aligned.
    """

    rows: Sequence[tuple[str, ...]]
    header: tuple[tuple[str, ...], ...] = ()
    title: str = ""
    numbers: bool = False


Part = Table | str  # a table of a report, or a line


def as_text(parts: Iterable[Part]) -> str:
    """Render a report as text. A name that would make its table wider than `_WIDTH` gets a separate line."""
    lines: list[str] = []
    for part in parts:
        lines += [part] if isinstance(part, str) else _text_of(part)
    return "\n".join(lines)


def as_html(parts: Iterable[Part]) -> str:
    """Render a report as an HTML fragment with inline styles, which depends on no style sheet."""
    found = [
        _html_of(part) if isinstance(part, Table) else f'<p style="{_PARAGRAPH}">{escape(part)}</p>'
        for part in parts
        if part
    ]
    return f'<div style="color:inherit;font-size:13px;line-height:1.4">{"".join(found)}</div>'


def _text_of(table: Table) -> list[str]:
    if not table.rows:
        return []
    lines = [*table.header, *table.rows]
    columns = max(map(len, lines))
    padded = [(*line, *[""] * (columns - len(line))) for line in lines]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    room = max(_WIDTH - sum(widths[1:]) - 2 * columns, max(map(len, (line[0] for line in table.header)), default=0), 16)
    if columns > 1 and widths[0] > room:
        widths[0] = max((len(line[0]) for line in padded if len(line[0]) <= room), default=4)
    rows: list[Sequence[str]] = []
    for name, *cells in padded:
        long = columns > 1 and len(name) > widths[0]
        rows += [(name,), ("", *cells)] if long else [(name, *cells)]
    found = in_columns(rows, right=range(1, columns) if table.numbers else (), widths=widths)
    return [f"{table.title}:", *(f"  {line}".rstrip() for line in found)] if table.title else found


def _html_of(table: Table) -> str:
    if not table.rows:
        return ""
    columns = max(map(len, (*table.header, *table.rows)))
    head = "".join(_html_row(line, columns, "th", table.numbers) for line in table.header)
    body = "".join(_html_row(line, columns, "td", table.numbers) for line in table.rows)
    title = f'<p style="{_PARAGRAPH};font-weight:600">{escape(table.title)}</p>' if table.title else ""
    head = f"<thead>{head}</thead>" if head else ""
    # Each cell has its style: a notebook's own rules for cells would override a style of the table.
    return f'{title}<div style="overflow-x:auto"><table style="{_TABLE}">{head}<tbody>{body}</tbody></table></div>'


def _html_row(line: tuple[str, ...], columns: int, kind: str, numbers: bool) -> str:
    cells = []
    for index in range(columns):
        align = "right" if numbers and index else "left"
        style = f"{_CELL};text-align:{align};background:none;color:inherit"
        style += ";white-space:nowrap" if index else ";overflow-wrap:anywhere"
        style += ";font-weight:600" if kind == "th" else ""
        cells.append(f'<{kind} style="{style}">{escape(line[index] if index < len(line) else "")}</{kind}>')
    return f'<tr style="background:none">{"".join(cells)}</tr>'
