"""What a report has below its card and its table: each a part that is opened by a click."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_patch.comparison import measures, number_pictures, pictures, wording
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.drawing import Picture
from amp_patch.comparison.level_result import LevelResult
from amp_patch.comparison.markup import definitions, figures, items, plain, section, stack, swatch, table
from amp_patch.recording.run import PARTS, Look, Run

_LISTED = 12  # modules, and parameters, that a table names: the worst


def sections(comparison: Comparison) -> list[str]:
    """The parts that there is something to say in."""
    base = comparison.baseline.name if comparison.baseline is not None else ""
    curves = "A line is the mean over the seeds, on the range of all; "
    curves += f"grey is the range of {base}'s own seeds; " if base else ""
    curves += "red marks losses that are not finite. Means run over a 25th of the steps."
    lines = "A line a seed; red marks skipped steps."
    return [
        section("What failed", _failures(comparison)),
        section(
            "Training loss",
            _with_words(curves, pictures.losses(comparison)),
            f"how far each level is from {base}, with the same seed" if base else "",
        ),
        section("Time of a step", _times(comparison), "data, forward, backward, optimizer"),
        section("Memory", _memory(comparison), "weights, gradients, optimizer state, activations"),
        section("Sizes of layers", _advice(comparison), "that a GPU would be faster with"),
        section("Loss scale and skipped steps", _with_words(lines, pictures.scales(comparison))),
        section("What the numbers look like", "".join(map(_seen, comparison.levels)), "as amp.inspect saw them"),
        section("What each level is", definitions(_policies(comparison))),
        section(
            "How it was decided", f"<p>{plain(comparison.test)}</p>" if any(v.runs for v in comparison.levels) else ""
        ),
        section("The machine", definitions(comparison.machine)),
        section("Every run", _runs(comparison)),
    ]


def _with_words(words: str, several: Sequence[Picture]) -> str:
    return f'<p class="soft">{plain(words)}</p>{figures(several)}' if several else ""


def number(value: float | None) -> str:
    return "" if value is None else f"{value:#.5g}".rstrip(".") if math.isfinite(value) else "not finite"


def _times(comparison: Comparison) -> str:
    levels = [level for level in comparison.levels if level.step_ms]
    splits = [measures.part_ms(level.runs, level.step_ms) for level in levels]
    longest = max((sum(split.values()) for split in splits), default=0.0)
    if not longest:
        return ""
    head = ["level", *(swatch(part, wording.PARTS_IN_WORDS[part]) for part in PARTS), "step, ms", ""]
    rows = [
        [
            plain(level.heading),
            *(wording.three(split[part]) for part in PARTS),
            wording.three(level.step_ms or 0),
            stack(split, longest),
        ]
        for level, split in zip(levels, splits, strict=True)
    ]
    return table("Milliseconds of a step, by its parts", head, rows)


def _memory(comparison: Comparison) -> str:
    """What the training takes, by its kinds, and on CUDA its peak: means over the seeds."""
    levels = [level for level in comparison.levels if level.runs]
    kinds = [{kind: _mean([getattr(run, kind) for run in level.runs]) for kind in wording.SIZES} for level in levels]
    peaks = [_mean([run.peak_memory for run in level.runs if run.device == "cuda"]) for level in levels]
    every = [[*each.values(), sum(each.values()), peak] for each, peak in zip(kinds, peaks, strict=True)]
    longest = max((sum(each.values()) for each in kinds), default=0.0)
    if not longest and not any(peaks):
        return ""
    unit, _ = wording.sizes([size for row in every for size in row])
    rows = []
    for level, each, row in zip(levels, kinds, every, strict=True):
        cells = [wording.in_unit(size, unit) for size in row]
        cells[-3:] = [cell if size else "" for cell, size in zip(cells[-3:], row[-3:], strict=True)]
        rows.append([plain(level.heading), *cells, stack(each, longest)])
    names = [swatch(kind, said) for kind, said in wording.SIZES.items()]
    return table(f"Memory by its kinds, in {unit}", ["level", *names, f"together, {unit}", f"peak, {unit}", ""], rows)


def _advice(comparison: Comparison) -> str:
    """A list where all levels have the same, as they mostly do; else one for each that has any."""
    of_level = {level.heading: level.advice for level in comparison.levels}
    first = next(iter(of_level.values()), [])
    if all(lines == first for lines in of_level.values()):
        return items(first)
    return "".join(f"<h3>{plain(level)}</h3>{items(lines)}" for level, lines in of_level.items() if lines)


def _failures(comparison: Comparison) -> str:
    """The errors, each once, with the runs that had it."""
    runs_of: dict[str, list[str]] = {}
    for level in comparison.levels:
        for run in level.failed:
            where = f"{level.heading}, seed {run.seed}" + (f", after {run.steps} steps" if run.steps else "")
            runs_of.setdefault(run.error or "recorded no step", []).append(where)
    return "".join(f"<h3>{plain('; '.join(w))}</h3><pre>{plain(error)}</pre>" for error, w in runs_of.items())


def _seen(level: LevelResult) -> str:
    """What `amp.inspect` saw at a level."""
    looked = [(run, look) for run in (*level.runs, *level.failed) for look in run.looks]
    if not looked:
        return ""
    looks = [look for _, look in looked]
    steps = sorted({look.step + 1 for look in looks})
    when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    parts = [
        f'<h3>{plain(level.heading)}</h3><p class="soft">Seen at {when}; red is outside of what the type can hold.</p>',
        figures(number_pictures.numbers(level)),
    ]
    bad = [
        f"Seed {run.seed}: {look.not_finite}" + ("" if look in run.overflows else "; later looks saw nothing like it")
        for run, look in looked
        if look.not_finite
    ]
    if bad:
        parts += ["<p>Where the first number that is not finite appeared:</p>", items(bad)]
    names = list(dict.fromkeys(module for run in (*level.runs, *level.failed) for module in run.keep_fp32))
    if names:
        parts.append(f"<p>Best kept in FP32:</p><pre>amp.initialize(..., keep_fp32={plain(repr(names))})</pre>")
    return "".join([*parts, _errors(looks), _lost(looks) if level.dtype != "bfloat16" else ""])


def _errors(looks: Sequence[Look]) -> str:
    errors = [*measures.errors(looks).items()][:_LISTED]
    if not errors:
        return ""
    finite = [error for _, error in errors if math.isfinite(error)]
    longest = max(finite, default=0.0) or 1.0
    rows = [
        [
            plain(module or "the model itself"),
            number(error),
            stack({"base" if error <= longest else "lost": min(error, longest)}, longest),
        ]
        for module, error in errors
    ]
    title = "Modules whose output differs most from FP32's"
    return f"<p>{title}:</p>" + table(title, ["module", "relative error", ""], rows, named=True)


def _lost(looks: Sequence[Look]) -> str:
    """Of which gradients FP16 loses most: the largest shares of all looks."""
    none = [0.0, 0.0, 0.0]
    shares: dict[str, list[float]] = {}
    for look in looks:
        for parameter in {**look.flushed, **look.overflowed}:
            here = [*look.flushed.get(parameter, none), look.overflowed.get(parameter, none)[0]]
            shares[parameter] = [max(pair) for pair in zip(here, shares.get(parameter, [0.0] * 4), strict=True)]
    worst = sorted(
        ((parameter, each) for parameter, each in shares.items() if any(each)), key=lambda item: -max(item[1])
    )
    if not worst:
        return ""
    when = ("at the loss scale used", "without loss scaling", "at the best loss scale")
    head = ["parameter", *(f"become 0 {each}" for each in when), f"overflow {when[0]}"]
    rows = [
        [plain(parameter), *(plain(wording.percent(share)) for share in each)] for parameter, each in worst[:_LISTED]
    ]
    title = "Gradients of which FP16 loses most"
    return f"<p>{title}, in per cent of their numbers:</p>" + table(title, head, rows, named=True)


def _policies(comparison: Comparison) -> dict[str, str]:
    """label of a level -> its policy, in words."""
    policies = {
        level.heading: [*dict.fromkeys(run.policy for run in (*level.runs, *level.failed) if run.policy)]
        for level in comparison.levels
    }
    return {level: "; ".join(words) for level, words in policies.items() if words}


def _runs(comparison: Comparison) -> str:
    metric = comparison.metric
    pairs = [
        (level, run)
        for level in comparison.levels
        for run in sorted((*level.runs, *level.failed), key=lambda run: run.seed)
    ]
    of_runs = [(run.weights, run.activations or 0, run.peak_memory or 0) for _, run in pairs]
    unit, _ = wording.sizes([size for each in of_runs for size in each])
    logged = [plain(metric)] if metric != measures.LOSS else []
    head = ["level", "seed", "steps", "last loss", *logged, "median step, ms", "skipped steps"]
    head += [f"{what}, {unit}" for what in ("weights", "activations", "peak")] + ["notes"]
    rows = []
    for (level, run), each in zip(pairs, of_runs, strict=True):
        sizes = [wording.in_unit(size, unit) if size else "" for size in each]
        notes = plain("; ".join([*(["failed"] if run.error else []), *run.notes]))
        rows.append([plain(level.heading), *_run(run, metric), *sizes, notes])
    return table("Every run", head, rows, texts=["notes"]) if rows else ""


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
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
