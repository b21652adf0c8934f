"""Text tables, as printed by `inspect`, `explain`, `compare` and the batch search."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def in_columns(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), widths: Sequence[int] = (), gap: str = "  "
) -> list[str]:
    """Return a line for each row, without trailing spaces. Cells are padded to their column's width, never truncated.

    Args:
        rows: the cells. A row may have fewer cells than the others.
        right: indices of the right-aligned columns; the others are left-aligned.
        widths: the widths of the columns; by default the width of the widest cell.
        gap: the text between two columns.
    """
    if not widths:
        columns = max(map(len, rows), default=0)
        widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(columns)]
    return [
        gap.join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
