"""Reports of tables and lines, as text for terminals, files and notebooks. No cell is truncated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from amp_patch.diagnose.text_table import in_columns

_WIDTH = 100  # columns of text


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


class Printed:
    """The base class of results that print as tables; notebooks show all rows."""

    def parts(self, rows: int | None) -> Iterator[Part]:
        """Yield the tables and lines. Tables may have more than `rows` rows; None: they have all."""
        raise NotImplementedError

    def summary(self, rows: int | None = 5) -> str:
        """Return the text that `print` shows. Long tables have `rows` rows, the worst ones."""
        return as_text(self.parts(rows))

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """Return all rows for a notebook, in letters of one width."""
        return f'<pre style="overflow-x:auto">{escape(self.summary(None))}</pre>'


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
