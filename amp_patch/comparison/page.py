"""A comparison as a self-contained page, and as JSON."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape

from amp_patch.comparison import headline, losses, measures, named_lines, what_next
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import COLOURS
from amp_patch.comparison.level_result import LevelResult, failures
from amp_patch.comparison.rows import axis, rows
from amp_patch.comparison.verdict import interval_of, percent_of
from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.run import INTERRUPTED, dumps
from amp_patch.support.files import write_whole


class Cell(NamedTuple):
    """An entry of the table.

    Attributes:
        words: the text.
        small: the text below it, in small letters.
        finding, state: a short text in front, and the name of its style.
    """

    words: str = ""
    small: str = ""
    finding: str = ""
    state: str = ""


def write(comparison: Comparison, folder: str | Path) -> Path:
    """Write report.html and report.json into `folder`, which is created if needed, and return the page's path.

    Each file is written whole or not at all; a symbolic link at its path is replaced.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # report.json first: a picture can fail, and the numbers may have taken hours.
    write_whole(folder / "report.json", dumps(comparison.to_dict()) + "\n")
    path = folder / "report.html"
    write_whole(path, html(comparison))
    return path


def html(comparison: Comparison) -> str:
    """Return the page, which has inline pictures, no scripts and no requests, and is light or dark as the system is."""
    base, cards = comparison.baseline, rows(comparison)
    of_machine = [note for note in (comparison.lack_note, comparison.kernels_note) if note]
    *before, last = what_next.commands(comparison) or [("", "")]
    return _template().render(
        comparison=comparison,
        colours=COLOURS,
        base=base.name if base is not None else "",
        headline=headline.headline(comparison),
        about=_about(comparison),
        gains=headline.gains(comparison),
        said={
            "Why": headline.why(comparison),
            "Today": comparison.beside_script,
            "How sure": headline.how_sure(comparison),
            "What breaks": headline.what_breaks(comparison),
            "This machine": " ".join(f"{note[0].upper()}{note[1:]}." for note in of_machine),
        },
        to_change=headline.to_change(comparison),
        edit=headline.how_to_use(comparison)[0],
        before=before,
        last=last,
        in_words=what_next.advice(comparison),
        rows=cards if any(row.speed for row in cards) else [],
        axis=axis(comparison),
        what_gap=headline.what_gap(comparison),
        kinds=measures.KINDS,
        table=_table(comparison),
        losses=losses.picture(comparison),
        failed=[f"{level.name}, {words}" for level in comparison.levels for words in failures(level)],
        notes=[note for note in comparison.notes if note not in (comparison.load_note, *of_machine)],
    )


@cache
def _template() -> Template:
    return Environment(
        loader=PackageLoader("amp_patch.comparison"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("report.html")


def _about(comparison: Comparison) -> str:
    """Return levels, seeds, steps, processor and torch of a comparison in one line."""
    machine = comparison.machine
    seeds = len({run.seed for run in comparison.runs if run.loss and run.error_kind != INTERRUPTED})
    said = [f"{len(comparison.levels)} levels", wording.counted(seeds, "seed")]
    said += [f"{comparison.steps} steps"] if comparison.steps else []
    devices = {run.device for run in comparison.runs if run.device}
    said += [comparison.processor] if comparison.processor else sorted(devices)
    return " · ".join([*said, *([f"torch {machine['torch']}"] if "torch" in machine else [])])


def _table(comparison: Comparison) -> dict[str, list[Cell]]:
    """Return {heading of a column: its cell for each level}, without columns in which every cell is empty."""
    base, levels = comparison.baseline, comparison.levels
    of_base = f"gap to {base.name}, same seeds" if base is not None else "difference"
    unit, sizes = wording.sizes([level.memory_bytes or 0 for level in levels])
    columns = {
        "finding": [_finding(level, comparison) for level in levels],
        f"final {comparison.metric_in_words}": [
            Cell(_number(level.mean), ", ".join(map(_number, level.final)) if len({*level.final}) > 1 else "")
            for level in levels
        ],
        of_base: [_gap(level) if base is not None and level is not base else Cell() for level in levels],
        "step, ms": [Cell(wording.three(level.step_ms) if level.step_ms else "") for level in levels],
        f"memory, {unit}": [
            Cell(size if level.memory_bytes else "") for level, size in zip(levels, sizes, strict=True)
        ],
        "skipped steps": [
            Cell(", ".join(map(str, level.skips if len({*level.skips}) > 1 else level.skips[:1])) * any(level.skips))
            for level in levels
        ],
    }
    return {heading: cells for heading, cells in columns.items() if any(map(any, cells))}


def _finding(level: LevelResult, comparison: Comparison) -> Cell:
    word = headline.outcome(level, comparison)  # `reason` says why
    reason = level.verdict.reason
    if not level.runs:
        why = "; failed with ".join(failures(level, short=True))
        reason = "; ".join(filter(None, [why, named_lines.beside(comparison.survey, level)]))
    return Cell(reason, finding=word, state=headline.state(level, comparison) if word else "")


def _gap(level: LevelResult) -> Cell:
    """Return the level's gap in per cent, in the metric's unit if the baseline is 0, and its interval."""
    gap = level.finding.gap
    return Cell() if gap is None else Cell(percent_of(gap) or wording.signed(gap.mean), interval_of(gap))


def _number(value: float | None) -> str:
    """Return five significant digits; "" for None."""
    return "" if value is None else wording.digits(value, 5) if math.isfinite(value) else "not finite"
