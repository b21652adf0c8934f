"""A comparison as lines for the terminal."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence

from amp_patch.comparison import headline, measures, named_lines
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.gap import CONFIDENCE
from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.verdict import margin_in_words
from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.run import PARTS, Run
from amp_patch.diagnose.text_table import in_columns

_WIDTH = 80
_NAMES = ("level", "module")
_MODULES = 3  # the worst modules of each level
_COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33}  # numbers of ECMA-48
_STYLES = {
    "within": "green",
    "differs": "red",
    "failed": "red",
    "no worse": "green",
    "so far": "green",
    "undecided": "yellow",
    "unjudged": "yellow",
}


def lines(comparison: Comparison, *, colours: bool = False) -> list[str]:
    """Return lines of at most 80 columns; with `colours`, they have escape codes for a terminal.

    The order is: figures of the levels, gaps, verdicts, the time of a step and the memory by parts, the worst modules
    of `amp.inspect`, the machine, notes, sizes that a GPU would be faster with, and the recommendation.
    """
    if not any(level.runs for level in comparison.levels):
        return [_coloured(comparison.summary, "bold", colours)]  # not wrapped: a path in it can be copied
    parts = [_overview(comparison), _gaps(comparison), _verdicts(comparison, colours)]
    parts += [_times(comparison), _sizes(comparison), _looks(comparison), _machine(comparison), _edits(comparison)]
    parts += [[line for note in comparison.notes for line in _wrapped(f"Note: {note}.")]]
    sizes = dict.fromkeys(line for level in comparison.levels for line in level.advice)
    parts += [[line for advice in sizes for line in _wrapped(f"Size: {advice}.")]]
    parts += [[_coloured(line, "bold", colours) for line in _wrapped(comparison.summary)]]
    return [line for part in parts if part for line in ("", *part)][1:]


def _overview(comparison: Comparison) -> list[str]:
    base = comparison.baseline
    of_base = f"vs\n{base.level}" if base is not None else "vs"
    final = "\n".join(_wrapped(f"final {comparison.metric_in_words}", 12))
    headings = ("level", "seeds", final, of_base, "ms per\nstep", "speed", "memory")
    rows: list[Sequence[str]] = []
    metric = comparison.metric
    for level in comparison.levels:
        missing = metric != measures.LOSS and any(metric not in run.logged for run in level.runs)
        seeds = f"{len(level.runs)}/{len(level.runs) + len(level.failed)}" if level.failed else str(len(level.runs))
        cells = (
            seeds,
            "missing" if missing else _with_range(level.final),
            _against(level, base),
            wording.short(level.step_ms),
            f"{wording.ratio(level.speedup.median)}x" if level.speedup else "emulated" if level.emulated else "",
            wording.ratio(level.memory),
            wording.power_in_ascii(level.scales[-1]) if level.scales else "",
            f"{max(level.skips)}" if level.skips else "",
        )
        rows.append((level.name, *cells))
    return _table(f"{comparison.title}, {comparison.steps} steps", (*headings, "loss\nscale", "skipped\nsteps"), rows)


def _gaps(comparison: Comparison) -> list[str]:
    """Return the lines of the table of gaps to the baseline, in the metric's unit and in per cent."""
    headings = ("level", "pairs", "gap", "low", "high", "gap, %", "low, %", "high, %", "told")
    rows: list[Sequence[str]] = []
    known = [(level, level.finding.gap) for level in comparison.levels if level.finding.gap is not None]
    for level, gap in known:
        values = (gap.mean, gap.low, gap.high)
        units = ["" if each is None else wording.signed(each) for each in values]
        shares = ["" if each is None else wording.signed_percents(each)[0] for each in map(gap.share, values)]
        rows.append((level.name, str(gap.seeds), *units, *shares, _told(level)))
    if not known or comparison.baseline is None:
        return []
    sure = wording.whole_percent(CONFIDENCE)
    title = f"Gap to {comparison.baseline.name} with the same seeds, and the ends of its {sure} interval"
    return _table(f"{title}; {margin_in_words(known[0][1])}", headings, rows)


def _told(level: LevelResult) -> str:
    """Return a cell on what decides about the level: the decision of the interval ("as good", "worse", "better").

    "by range" if the range of the baseline's seeds decides, "rounded" if the gap is within the rounding of the losses.
    If nothing decides yet, how many more seeds would ("3 more"), or "not yet".
    """
    found, gap = level.finding, level.finding.gap
    if gap is None or found.by_range:
        return "by range"
    if gap.told is not None:
        return gap.told
    if found.rounding is not None:
        return "rounded"
    return f"{gap.more_seeds} more" if gap.more_seeds is not None else "not yet"


def _verdicts(comparison: Comparison, colours: bool) -> list[str]:
    found = []
    width = max(len(level.name) for level in comparison.levels)
    for level in comparison.levels:
        first, *others = _wrapped(level.verdict.text, _WIDTH - width - 1) or [""]
        style = "green" if level.finding.better else _STYLES.get(level.finding.kind, "")
        found.append(f"{_coloured(f'{level.name:{width}}', style, colours)} {first}".rstrip())
        found += [" " * (width + 1) + line for line in others]
    return found


def _edits(comparison: Comparison) -> list[str]:
    """Return the lines of user code that break levels which ended badly, with a way out for each."""
    found = named_lines.edits(comparison.survey, comparison.levels)
    words = [f"{line.place}, {', '.join(names)}: {line.what}. Edit: {line.edit}." for line, names in found]
    return [each for text in words for each in _wrapped(text)]


def _times(comparison: Comparison) -> list[str]:
    headings = [wording.part_name(part).replace(", ", ",\n") for part in PARTS]
    rows: list[Sequence[str]] = []
    for level in filter(lambda level: level.runs, comparison.levels):
        split = measures.part_ms(level.runs, level.step_ms)
        parts = [wording.short(split[part] if level.step_ms is not None else None) for part in PARTS]
        rows.append((level.name, *parts, wording.short(level.samples_per_second)))
    each = headline.epoch(comparison)
    table = _table("Time of a step, ms", ("level", *headings, "samples\nper second"), rows)
    return table + (_wrapped(f"An epoch takes {each}.") if each else [])


def _sizes(comparison: Comparison) -> list[str]:
    on_cuda = any(run.device == "cuda" for level in comparison.levels for run in level.runs)
    headings = ["level", "weights", "masters", "gradients", "optimizer\nstate", "activations"]
    # On a CPU `memory_bytes` is the sum of the parts. The peak of the process includes libraries and data too.
    headings += ["peak"] if on_cuda else ["sum", "process\npeak"]
    rows: list[Sequence[str]] = []
    for level in filter(lambda level: level.runs, comparison.levels):
        sizes = (_mib(level.runs, size) for size in ("weights", "masters", "gradients", "state", "activations"))
        peak = None if level.memory_bytes is None else level.memory_bytes / 2**20
        process = [] if on_cuda else [_mib(level.runs, "peak_memory")]
        rows.append((level.name, *map(wording.short, (*sizes, peak, *process))))
    return _table("Memory, MiB", headings, rows)


def _machine(comparison: Comparison) -> list[str]:
    """Return the processor that trained, the CPU's threads, and what the processor does in FP16 and BF16."""
    machine = comparison.machine
    words = [comparison.processor] if comparison.processor else []
    of_cpu = {"bfloat16": "BF16", "float16": "FP16"}
    said = {"threads": "threads", **({"tensor_cores": "tensor cores"} if comparison.on_gpu else of_cpu)}
    words += [f"{name}: {machine[key]}" for key, name in said.items() if key in machine]
    return _wrapped("; ".join(words) + ".") if words else []


def _looks(comparison: Comparison) -> list[str]:
    """Return lines on the inspected levels: the worst modules, the shares of gradients that FP16 loses, advice."""
    headings = ("level", "module", "error", "at the\nscale", "at\nscale 1", "at the\nbest")
    rows: list[Sequence[str]] = []
    said: dict[str, list[str]] = {}  # a line -> its levels
    for level in comparison.levels:
        looks = [look for run in level.all_runs for look in run.looks]
        errors = measures.errors(looks)
        flushed: dict[str, list[float]] = {}
        for look in looks:
            for name, shares in look.flushed.items():
                module = name.rpartition(".")[0]
                flushed[module] = list(map(max, flushed.get(module, shares), shares))
        badness = {name: (errors.get(name, 0.0), *flushed.get(name, [0.0])) for name in {**errors, **flushed}}
        for name in sorted(badness, key=lambda name: badness[name], reverse=True)[:_MODULES]:
            if any(badness[name]):
                worst = wording.two(errors[name]) if name in errors else ""
                lost = [wording.percent(share).removesuffix(" %") for share in flushed.get(name, [])] or [""] * 3
                rows.append((level.name, name or "(itself)", worst, *lost))
        found = [str(look.not_finite) for run in level.all_runs for look in run.overflows][:1]
        keep = [*dict.fromkeys(name for run in level.all_runs for name in run.keep_fp32)]
        if keep and level.dtype is not None:
            found.append(f"keep_fp32={keep} would keep the worst modules in FP32")
        for line in found:
            said.setdefault(line, []).append(level.name)
    words = [line for text, names in said.items() for line in _wrapped(f"{', '.join(names)}: {text}.")]
    if not rows:
        return words
    return _table("Gradients that FP16 would flush to zero, %, and errors against FP32", headings, rows) + words


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Names are left-aligned; if lines would be too long, the widest column is wrapped."""
    widths = [max(map(len, (*heading.split("\n"), *cells))) for heading, *cells in zip(headings, *rows, strict=True)]
    widest = max(range(len(widths)), key=lambda i: widths[i])
    widths[widest] -= max(0, sum(widths) + len(widths) - 1 - _WIDTH)
    lines: list[Sequence[str]] = []
    for row in (headings, *rows):
        cells = [
            [line for part in cell.split("\n") for line in _wrapped(part, width) or [""]]
            for cell, width in zip(row, widths, strict=True)
        ]
        height = max(map(len, cells))
        blanks = [[""] * (height - len(cell)) for cell in cells]
        pairs = zip(blanks, cells, strict=True)  # headings stand at the bottom of their line, cells at the top
        lines += zip(*(above + cell if row is headings else cell + above for above, cell in pairs), strict=True)
        if row is headings:
            lines.append(["-" * (sum(widths) + len(widths) - 1)])
    right = [at for at, heading in enumerate(headings) if heading not in _NAMES]
    return _wrapped(title) + in_columns(lines, right=right, widths=widths, gap=" ")


def _wrapped(text: str, width: int = _WIDTH) -> list[str]:
    """Return the text in lines of at most `width`; a longer word is broken."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _coloured(text: str, style: str, colours: bool) -> str:
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if colours and style else text


def _with_range(values: list[float]) -> str:
    """Return "mean ± half of the range" of the results; "" without a result, "diverged" if one is not finite."""
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "diverged"
    half = (max(values) - min(values)) / 2
    mean = wording.digits(statistics.mean(values), 4)
    return f"{mean} ±{wording.two(half)}" if len(values) > 1 else mean


def _against(level: LevelResult, base: LevelResult | None) -> str:
    """Return how far the level's mean result is from the baseline's: "+0.30%".

    "" if there is no gap, or if a result of the level is not finite.
    """
    gap = level.finding.gap
    if base is None or gap is None or len(level.finite) < len(level.runs):
        return ""
    return wording.signed_percent(gap.level, gap.base).replace(" ", "")


def _mib(runs: list[Run], name: str) -> float | None:
    size = measures.median(getattr(run, name) for run in runs)
    return None if size is None else size / 2**20
