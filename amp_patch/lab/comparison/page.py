"""A comparison as a self-contained page, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape

from amp_patch.lab import wording
from amp_patch.lab.comparison import headline, measures, named_lines, what_next
from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.drawing import COLOURS
from amp_patch.lab.comparison.level_result import LevelResult, failures
from amp_patch.lab.comparison.rows import axis, rows
from amp_patch.lab.comparison.sections import Cell, Entries, Table, number, sections, table
from amp_patch.lab.comparison.verdict import interval_of, percent_of
from amp_patch.lab.recording.run import INTERRUPTED, Run, dumps
from amp_patch.support.files import write_whole


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
    won = any(headline.state(level, comparison) == "best" for level in comparison.levels)
    return _template().render(
        comparison=comparison,
        colours=COLOURS,
        base=base.name if base is not None else "",
        headline=headline.headline(comparison),
        about=_about(comparison),
        won=won,
        gains=headline.gains(comparison),
        said={
            "Why": headline.why(comparison),
            "How sure": headline.how_sure(comparison),
            "What breaks": headline.what_breaks(comparison),
            "An epoch": f"{each}." if (each := headline.epoch(comparison)) else "",
            "This machine": " ".join(f"{note[0].upper()}{note[1:]}." for note in of_machine),
        },
        edit=headline.how_to_use(comparison)[0],
        before=before,
        last=last,
        in_words=what_next.advice(comparison),
        rows=cards if any(row.speed for row in cards) else [],
        axis=axis(comparison),
        what_memory=headline.what_memory(comparison),
        what_gap=headline.what_gap(comparison),
        kinds=measures.KINDS,
        levels=_levels(comparison),
        breaks=_breaks(comparison),
        notes=[note for note in comparison.notes if note not in (comparison.load_note, *of_machine)],
        **sections(comparison),
    )


@cache
def _template() -> Template:
    return Environment(
        loader=PackageLoader("amp_patch.lab.comparison"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template("report.html")


def _about(comparison: Comparison) -> str:
    """Return levels, seeds, steps, processor and torch of a comparison in one line."""
    machine = comparison.machine
    seeds = _finished_seeds(comparison)
    said = [f"{len(comparison.levels)} levels", wording.counted(seeds, "seed")]
    said += [f"{comparison.steps} steps"] if comparison.steps else []
    devices = {run.device for run in comparison.runs if run.device}
    said += [comparison.processor] if comparison.processor else sorted(devices)
    return " · ".join([*said, *([f"torch {machine['torch']}"] if "torch" in machine else [])])


def _finished_seeds(comparison: Comparison) -> int:
    """Return how many seeds have all their runs, none of them interrupted, and at least one with a loss."""
    of_seed: dict[int, list[Run]] = {}
    for run in comparison.runs:
        of_seed.setdefault(run.seed, []).append(run)
    most = max(map(len, of_seed.values()), default=0)
    whole = [runs for runs in of_seed.values() if len(runs) == most or not comparison.cut]
    return sum(any(run.loss for run in runs) and all(run.error_kind != INTERRUPTED for run in runs) for runs in whole)


def _levels(comparison: Comparison) -> Table | None:
    base, levels = comparison.baseline, comparison.levels
    of_base = f"gap to {base.name}, same seeds" if base is not None else "difference"
    unit, sizes = wording.sizes([level.memory_bytes or 0 for level in levels])
    head = ["level", "finding", f"final {comparison.metric_in_words}", of_base, "step, ms", "speed", "samples/s"]
    head += [f"memory, {unit}", "last loss scale", "skipped steps", "updates lost without masters"]
    head += ["failed runs"]
    lines: list[Entries] = []
    for level, size in zip(levels, sizes, strict=True):
        other = base is not None and level is not base
        lines.append(
            [
                level.name,
                _finding(level, comparison),
                Cell(number(level.mean), _several(level.final) if len(level.final) > 1 else ""),
                _gap(level) if other else "",
                wording.three(level.step_ms) if level.step_ms else "",
                _speed(level) if other else "",
                wording.three(level.samples_per_second) if level.samples_per_second else "",
                size if level.memory_bytes else "",
                _several(level.scales, wording.power) if any(scale != 1 for scale in level.scales) else "",
                _several(level.skips, str) if any(level.skips) else "",
                wording.percent(level.lost_updates) if level.lost_updates is not None else "",
                f"{len(level.failed)} of {len(level.failed) + len(level.runs)}" if level.failed else "",
            ]
        )
    return table("The levels", head, lines, texts=["finding"])


def _breaks(comparison: Comparison) -> Table | None:
    """Return the lines of user code that break levels which ended badly."""
    found = named_lines.edits(comparison.survey, comparison.levels)
    head = ["line", "operation", "levels", "what happens", "edit"]
    lines: list[Entries] = [[line.place, line.op, ", ".join(names), line.what, line.edit] for line, names in found]
    return table("Lines that break a level", head, lines, named=True, texts=["what happens", "edit"])


def _finding(level: LevelResult, comparison: Comparison) -> Cell | str:
    word = headline.outcome(level, comparison)  # `reason` says why
    reason = level.verdict.reason
    if not level.runs:
        why = "; failed with ".join(failures(level, short=True))
        reason = "; ".join(filter(None, [why, named_lines.beside(comparison.survey, level)]))
    return Cell(reason, finding=word, state=headline.state(level, comparison)) if word else reason


def _gap(level: LevelResult) -> Cell | str:
    """Return the cell with the level's gap in per cent and in the metric's unit, and its interval; "" without a gap."""
    gap = level.finding.gap
    if gap is None:
        return ""
    unit = wording.signed(gap.mean)
    if gap.low is not None and gap.high is not None:
        unit += f" ({wording.signed(gap.low)} to {wording.signed(gap.high)})"
    percent = percent_of(gap)
    return Cell(percent or unit, ", ".join(filter(None, [interval_of(gap), unit if percent else ""])))


def _speed(level: LevelResult) -> Cell | str:
    if level.speedup is None:
        return "emulated" if level.emulated else ""
    median, low, high = map(wording.ratio, level.speedup)
    return Cell(f"{median}x", f"{low} to {high}" if low != high else "")


def _several(values: Sequence[float], words: Callable[[float], str] = number) -> str:
    """Return the texts of `values`, one for each seed, or a single text if all are equal."""
    texts = [words(value) for value in values]
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])
