"""tables: a comparison for the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from amp_patch.report.verdict import Comparison


def tables(comparison: Comparison) -> list[Any]:
    """What `rich.console.Console.print` takes, one after the other; fits 80 columns."""
    return [Text(f"{level.name}: {level.verdict.text}") for level in comparison.levels] + [Text(comparison.summary)]
