"""Tables, pictures and lines below the card of a report, for templates/report.html."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from amp_patch.lab import wording
from amp_patch.lab.comparison import measures, number_pictures, pictures
from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.drawing import Picture, stack
from amp_patch.lab.comparison.level_result import LevelResult
from amp_patch.lab.comparison.plan import BASELINE
from amp_patch.lab.recording.run import PARTS, Look, Run

_LISTED = 12  # the most rows of a table of modules or parameters: the worst ones are shown


class Cell(NamedTuple):
    """An entry of a table.

    Attributes:
        words: the text.
        small: the text below it, in small letters.
        colour: the name of a colour, for a swatch in front.
        finding, state: a short text in front, and the name of its style.
        picture: an SVG.
    """

    words: str = ""
    small: str = ""
    colour: str = ""
    finding: str = ""
    state: str = ""
    picture: str = ""

    def __bool__(self) -> bool:
        return any(self)


Entries = list[Cell | str]


class Table(NamedTuple):
    """A table of a report.

    Attributes:
        title: the name that screen readers announce.
        head: headings of the columns.
        rows: the first entry of each row is its heading.
        named: whether the headings of the rows are names from user code, which can be long and are wrapped.
        texts: the headings of the columns that hold text, not numbers.
    """

    title: str
    head: Entries
    rows: list[Entries]
    named: bool = False
    texts: Sequence[str] = ()


class Seen(NamedTuple):
    """Observations of `amp.inspect` at a level."""

    heading: str
    when: str
    pictures: list[Picture]
    not_finite: list[str]
    keep_fp32: str
    errors: Table | None
    lost: Table | None


def table(
    title: str,
    head: Sequence[Cell | str],
    rows: Sequence[Entries],
    *,
    named: bool = False,
    texts: Sequence[str] = (),
) -> Table | None:
    """Return a table of the rows, without columns in which every cell is empty; None if there are no rows."""
    if not rows:
        return None
    kept = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows)]
    return Table(title, [head[i] for i in kept], [[row[i] for i in kept] for row in rows], named, texts)


def sections(comparison: Comparison) -> dict[str, Any]:
    """Return {name of a section in the template: its content}. A section without content is empty."""
    return {
        "failures": _failures(comparison),
        "losses": pictures.losses(comparison),
        "times": _times(comparison),
        "memory": _memory(comparison),
        "advice": _advice(comparison),
        "scales": pictures.scales(comparison),
        "seen": [seen for level in comparison.levels if (seen := _seen(level)) is not None],
        "policies": _policies(comparison),
        "every_run": _runs(comparison),
    }


def number(value: float | None) -> str:
    """Return five significant digits; "" for None."""
    return "" if value is None else wording.digits(value, 5) if math.isfinite(value) else "not finite"


def _times(comparison: Comparison) -> Table | None:
    levels = [level for level in comparison.levels if level.step_ms]
    splits = [measures.part_ms(level.runs, level.step_ms) for level in levels]
    longest = max((sum(split.values()) for split in splits), default=0.0)
    if not longest:
        return None
    head: Entries = ["level", *(Cell(wording.part_name(part), colour=part) for part in PARTS), "step, ms", ""]
    rows: list[Entries] = []
    for level, split in zip(levels, splits, strict=True):
        times = [*(split[part] for part in PARTS), level.step_ms or 0]
        rows.append([level.name, *map(wording.three, times), Cell(picture=stack(split, longest))])
    return table("Milliseconds of a step, by its parts", head, rows)


def _memory(comparison: Comparison) -> Table | None:
    """Return a table of each level's memory for each of `measures.KINDS`, and on CUDA its peak: means over the seeds.

    None if no memory is known.
    """
    levels = [level for level in comparison.levels if level.runs]
    kinds = [{kind: _mean([getattr(run, kind) for run in level.runs]) for kind in measures.KINDS} for level in levels]
    peaks = [_mean([run.peak_memory for run in level.runs if run.device == "cuda"]) for level in levels]
    every = [[*each.values(), sum(each.values()), peak] for each, peak in zip(kinds, peaks, strict=True)]
    longest = max((sum(each.values()) for each in kinds), default=0.0)
    if not longest and not any(peaks):
        return None
    unit, _ = wording.sizes([size for row in every for size in row])
    rows: list[Entries] = []
    for level, each, row in zip(levels, kinds, every, strict=True):
        cells = [wording.in_unit(size, unit) for size in row]
        cells[-3:] = [cell if size else "" for cell, size in zip(cells[-3:], row[-3:], strict=True)]
        rows.append([level.name, *cells, Cell(picture=stack(each, longest))])
    names = [Cell(words, colour=kind) for kind, words in measures.KINDS.items()]
    return table(f"Memory by its kinds, in {unit}", ["level", *names, f"together, {unit}", f"peak, {unit}", ""], rows)


def _advice(comparison: Comparison) -> dict[str, list[str]]:
    """Return {name of a level: its advice on layer sizes}, or {"": the advice} if the advice is equal at all levels."""
    of_level = {level.name: level.advice for level in comparison.levels}
    first = next(iter(of_level.values()), [])
    return {"": first} if all(lines == first for lines in of_level.values()) else of_level


def _failures(comparison: Comparison) -> dict[str, list[str]]:
    """Return {error in full: the runs that ended with this error, as "O2, seed 0"}."""
    in_full: dict[str, str] = {}
    runs_of: dict[str, list[str]] = {}
    for level in comparison.levels:
        for run in level.failed:
            where = f"{level.name}, seed {run.seed}" + (f", after {run.steps} steps" if run.steps else "")
            error = in_full.setdefault(run.error or "", run.error_in_full)
            runs_of.setdefault(error, []).append(where)
    return runs_of


def _seen(level: LevelResult) -> Seen | None:
    looked = [(run, look) for run in level.all_runs for look in run.looks]
    if not looked:
        return None
    looks = [look for _, look in looked]
    steps = sorted({look.step + 1 for look in looks})
    when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    bad = [
        f"Seed {run.seed}: {look.not_finite}" + ("" if look in run.overflows else "; later looks saw nothing like it")
        for run, look in looked
        if look.not_finite
    ]
    names = list(dict.fromkeys(module for run in level.all_runs for module in run.keep_fp32))
    lost = _lost(looks) if level.dtype != "bfloat16" else None
    seen = number_pictures.numbers(level)
    return Seen(level.name, when, seen, bad, repr(names) if names else "", _errors(looks), lost)


def _errors(looks: Sequence[Look]) -> Table | None:
    errors = [*measures.errors(looks).items()][:_LISTED]
    longest = max((error for _, error in errors if math.isfinite(error)), default=0.0) or 1.0
    rows: list[Entries] = []
    for module, error in errors:
        bar = {"base" if error <= longest else "lost": min(error, longest)}
        rows.append([module or "the model itself", number(error), Cell(picture=stack(bar, longest))])
    return table("Modules whose output differs most from FP32's", ["module", "relative error", ""], rows, named=True)


def _lost(looks: Sequence[Look]) -> Table | None:
    """Return the table of the parameters whose gradients lose the largest share of their numbers in FP16.

    A share is the largest over all inspected steps. None if no gradient loses numbers.
    """
    none = [0.0, 0.0, 0.0]
    shares: dict[str, list[float]] = {}
    for look in looks:
        for parameter in {**look.flushed, **look.overflowed}:
            here = [*look.flushed.get(parameter, none), look.overflowed.get(parameter, none)[0]]
            shares[parameter] = [max(pair) for pair in zip(here, shares.get(parameter, [0.0] * 4), strict=True)]
    worst = sorted(
        ((parameter, each) for parameter, each in shares.items() if any(each)), key=lambda item: -max(item[1])
    )
    when = ("at the loss scale used", "without loss scaling", "at the best loss scale")
    head = ["parameter", *(f"become 0 {each}" for each in when), f"overflow {when[0]}"]
    rows: list[Entries] = [[parameter, *map(wording.percent, each)] for parameter, each in worst[:_LISTED]]
    return table("Gradients of which FP16 loses most", head, rows, named=True)


def _policies(comparison: Comparison) -> dict[str, str]:
    """Return {name of a level: its policy in words}. At O0 the words begin with "the script as it is"."""
    policies = {
        level.name: [*dict.fromkeys(run.policy for run in level.all_runs if run.policy)] for level in comparison.levels
    }
    for level in comparison.levels:
        if level.level == BASELINE:
            as_is = f"the script as it is, {level.low_weights or 'FP32'}"
            policies[level.name] = [f"{as_is}: {words.partition(': ')[2]}" for words in policies[level.name]]
    return {level: "; ".join(words) for level, words in policies.items() if words}


def _runs(comparison: Comparison) -> Table | None:
    metric = comparison.metric
    pairs = [(level, run) for level in comparison.levels for run in sorted(level.all_runs, key=lambda run: run.seed)]
    of_runs = [(run.weights, run.activations or 0, run.peak_memory or 0) for _, run in pairs]
    unit, _ = wording.sizes([size for each in of_runs for size in each])
    logged = [metric] if metric != measures.LOSS else []
    head = ["level", "seed", "steps", "last loss", *logged, "median step, ms", "skipped steps"]
    on_cuda = any(run.device == "cuda" for _, run in pairs)
    peak = "peak" if on_cuda else "peak of the process"
    head += [f"{what}, {unit}" for what in ("weights", "activations", peak)] + ["notes"]
    rows: list[Entries] = []
    for (level, run), each in zip(pairs, of_runs, strict=True):
        sizes = [wording.in_unit(size, unit) if size else "" for size in each]
        notes = "; ".join([*(["failed"] if run.error else []), *run.notes])
        rows.append([level.name, *_run(run, metric), *sizes, notes])
    return table("Every run", head, rows, texts=["notes"])


def _run(run: Run, metric: str) -> list[str]:
    seconds = sorted(each for each in run.seconds if math.isfinite(each))
    logged = run.logged.get(metric, [])
    return [
        str(run.seed),
        str(run.steps),
        number(run.loss[-1] if run.loss else None),
        *([number(logged[-1][1] if logged else None)] if metric != measures.LOSS else []),
        wording.three(1000 * seconds[len(seconds) // 2]) if seconds else "",
        str(sum(run.skipped)),
    ]


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the sizes that are not None; 0 if all are None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
