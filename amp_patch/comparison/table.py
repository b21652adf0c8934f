"""tables: a comparison for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from amp_patch.comparison import measures
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult
from amp_patch.recording.run import PARTS, Run

_STYLES = {"within": "green", "differs": "red", "failed": "red", "undecided": "yellow"}
_MODULES = 3  # of each level, the worst


def tables(comparison: Comparison) -> list[Any]:
    """What `rich.console.Console.print` takes, one after the other: at most 80 columns, whatever the numbers.

    The levels with their figures, the verdicts, where the time of a step and the memory went, what `amp.inspect` saw
    (of the worst modules), the notes, and last the recommendation.
    """
    parts: list[list[Any]] = []
    if comparison.levels:
        parts += [[_overview(comparison)], [_verdicts(comparison)]]
    if any(level.runs for level in comparison.levels):
        parts += [[_times(comparison)], [_sizes(comparison)]]
    parts += [_looks(comparison), [Text(f"Note: {note}.", style="dim") for note in comparison.notes]]
    parts += [[Text(comparison.summary, style="bold")]]
    with_gaps = [renderable for part in parts if part for renderable in (Text(), *part)]
    return with_gaps[1:]


def _overview(comparison: Comparison) -> Table:
    base = comparison.baseline
    of_base = f"vs\n{base.level}" if base is not None else "vs"
    rows = _table(
        f"{comparison.title}, {comparison.steps} steps",
        *("level", "seeds", f"final\n{comparison.metric}", of_base, "ms per\nstep", "speed", "memory"),
        *("loss\nscale", "skipped\nsteps"),
    )
    for level in comparison.levels:
        seeds = f"{len(level.runs)}/{len(level.runs) + len(level.failed)}" if level.failed else str(len(level.runs))
        _row(
            rows,
            level,
            seeds,
            "missing" if _gave_none(level, comparison.metric) else _with_range(level.final),
            _percent(level, base),
            _number(level.step_ms),
            f"{_two_digits(level.speedup.median)}x" if level.speedup else "",
            _two_digits(level.memory),
            _power_of_two(level.scales[-1]) if level.scales else "",
            f"{max(level.skips)}" if level.skips else "",
        )
    return rows


def _verdicts(comparison: Comparison) -> Table:
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for level in comparison.levels:
        style = "green" if level.verdict.better else _STYLES.get(level.verdict.kind, "")
        lines.add_row(Text(level.name, style=style), Text(level.verdict.text))
    return lines


def _times(comparison: Comparison) -> Table:
    rows = _table("Time of a step, ms", "level", *PARTS, "samples\nper second")
    for level in filter(_went_well, comparison.levels):
        split = measures.part_ms(level.runs, level.step_ms)
        parts = [_number(split[part] if level.step_ms is not None else None) for part in PARTS]
        _row(rows, level, *parts, _number(level.samples_per_second))
    return rows


def _sizes(comparison: Comparison) -> Table:
    sizes = ("weights", "masters", "gradients", "state", "activations")
    rows = _table("Memory, MiB", "level", "weights", "masters", "gradients", "optimizer\nstate", "activations", "peak")
    for level in filter(_went_well, comparison.levels):
        peak = None if level.memory_bytes is None else level.memory_bytes / 2**20
        _row(rows, level, *(_number(_mib(level.runs, size)) for size in sizes), _number(peak))
    return rows


def _looks(comparison: Comparison) -> list[Any]:
    """The worst modules of each level that was inspected, what FP16 would lose of their gradients, and what to do."""
    rows = _table(
        "Gradients that FP16 would flush to zero, %, and errors against FP32",
        *("level", "module", "error", "at the\nscale", "at\nscale 1", "at the\nbest"),
        text=("module",),
    )
    said: dict[str, list[str]] = {}  # a line -> the levels of which it is true
    for level in comparison.levels:
        runs = [*level.runs, *level.failed]
        looks = [look for run in runs for look in run.looks]
        errors = measures.errors(looks)
        flushed: dict[str, list[float]] = {}
        for look in looks:
            for name, shares in look.flushed.items():
                module = name.rpartition(".")[0]
                flushed[module] = list(map(max, flushed.get(module, shares), shares))
        badness = {name: (errors.get(name, 0.0), *flushed.get(name, [0.0])) for name in {**errors, **flushed}}
        for name in sorted(badness, key=lambda name: badness[name], reverse=True)[:_MODULES]:
            if any(badness[name]):
                worst = f"{errors[name]:.2g}" if name in errors else ""
                _row(rows, level, name or "(itself)", worst, *(f"{100 * share:.3g}" for share in flushed.get(name, [])))
        found = [str(look.not_finite) for run in runs for look in run.overflows][:1]
        keep = [*dict.fromkeys(name for run in runs for name in run.keep_fp32)]
        if keep and level.dtype is not None:
            found.append(f"keep_fp32={keep} would keep the worst modules in FP32")
        for line in found:
            said.setdefault(line, []).append(level.name)
    lines = [Text(f"{', '.join(names)}: {line}.") for line, names in said.items()]
    return [rows, *lines] if rows.row_count else lines


def _table(title: str, *headings: str, text: Iterable[str] = ()) -> Table:
    rows = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False
    )
    lines = max(heading.count("\n") for heading in headings)
    for heading in headings:
        left = heading in ("level", *text)
        low = "\n" * (lines - heading.count("\n")) + heading
        rows.add_column(Text(low), justify="left" if left else "right", overflow="fold")
    return rows


def _row(rows: Table, level: LevelResult, *cells: str) -> None:
    # Text, because rich would take brackets in a string for markup.
    rows.add_row(*map(Text, (level.name, *cells)))


def _went_well(level: LevelResult) -> bool:
    return bool(level.runs)


def _gave_none(level: LevelResult, metric: str) -> bool:
    """Whether a run of the level never gave the metric to `amp.log`."""
    return metric != measures.LOSS and any(metric not in run.logged for run in level.runs)


def _with_range(values: list[float]) -> str:
    """The mean of the figures and half of their range."""
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "diverged"
    half = (max(values) - min(values)) / 2
    mean = f"{statistics.mean(values):#.4g}".rstrip(".")
    return f"{mean} ±{half:.2g}" if len(values) > 1 else mean


def _percent(level: LevelResult, base: LevelResult | None) -> str:
    """How far the mean is from the baseline's."""
    if base is None or level is base or level.mean is None or not base.mean or len(level.finite) < len(level.runs):
        return ""
    percent = 100 * (level.mean - base.mean) / abs(base.mean)
    if abs(percent) > 999:
        return ">+999%" if percent > 0 else "<-999%"
    return f"{percent:{'+.0f' if abs(percent) > 99 else '+.2f'}}%"


def _number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _power_of_two(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 10 else f"{scale:.3g}"


def _mib(runs: list[Run], name: str) -> float | None:
    sizes = [size for run in runs if (size := getattr(run, name)) is not None]
    return statistics.median(sizes) / 2**20 if sizes else None
