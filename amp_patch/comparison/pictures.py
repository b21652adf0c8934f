"""The pictures of a report: losses, the figures at the end, time and memory, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from amp_patch.comparison import measures
from amp_patch.comparison.drawing import STAND_INS, Picture, colour, cut, name_rows, picture, raised, thin
from amp_patch.comparison.wording import PARTS_IN_WORDS, SIZES, size
from amp_patch.recording.run import PARTS, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amp_patch.comparison.comparison import Comparison
    from amp_patch.comparison.level_result import LevelResult

_LARGEST = 1e30  # an axis cannot be much longer


def losses(comparison: Comparison) -> list[Picture]:
    """A panel a level: the running mean over the steps of the mean over the seeds, with the seeds' range around it."""
    shown = [level for level in comparison.levels if any(run.loss for run in (*level.runs, *level.failed))]
    baseline = next((level for level in shown if level is comparison.baseline and level.runs), None)
    curves = {id(level): _curve([run.loss for run in level.runs]) for level in shown if level.runs}
    every = [edge for curve in curves.values() for edge in (curve.low, curve.high)]
    finite = np.concatenate([edge[np.isfinite(edge)] for edge in every] or [np.empty(0)])
    logarithmic = bool(finite.size) and finite.min() > 0 and finite.max() > 20 * finite.min()
    span = None
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
        span = (low / 1.15, high * 1.15) if logarithmic else (low - margin, high + margin)
    pictures = []
    for level in shown:

        def draw(axes: Axes, level: LevelResult = level) -> None:
            if logarithmic:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
            if baseline is not None and level is not baseline:
                behind = curves[id(baseline)]
                axes.plot(behind.steps, behind.mean, color=STAND_INS["behind"], linewidth=3.5, label=baseline.name)
            mine = STAND_INS[colour(level.level)]
            for run in level.failed:
                if run.loss:
                    part = _curve([run.loss])
                    axes.plot(part.steps, part.mean, color=mine, linewidth=0.9, linestyle=":", label="failed")
            curve = curves.get(id(level))
            if curve is not None:
                axes.fill_between(curve.steps, curve.low, curve.high, color=mine, alpha=0.22, linewidth=0)
                axes.plot(curve.steps, curve.mean, color=mine, linewidth=1.4, label=level.name)
                if curve.not_finite.size:
                    axes.plot(
                        curve.not_finite,
                        np.zeros(curve.not_finite.size),
                        "x",
                        color=STAND_INS["lost"],
                        markersize=5,
                        transform=axes.get_xaxis_transform(),
                        clip_on=False,
                        label="not finite",
                    )
            if span is not None:
                axes.set_ylim(*span)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("step")
            axes.set_title(f"{level.name}: training loss")
            handles, labels = axes.get_legend_handles_labels()
            once = dict(zip(labels, handles, strict=True))
            if len(once) > 1:
                axes.legend(once.values(), once.keys(), loc="best")

        pictures.append(picture(f"loss-{level.name}", draw, _words_of_losses(level, curves.get(id(level)), baseline)))
    return pictures


def finals(comparison: Comparison) -> list[Picture]:
    """The metric at the end: a dot a seed, in a row a level, before the range of the baseline's."""
    rows = [(level, [v for v in level.final if abs(v) < _LARGEST]) for level in comparison.levels if level.runs]
    every = [value for _, values in rows for value in values]
    if not every:
        return []
    baseline = comparison.baseline
    # A level that is far off would leave of all others one dot: it is shown by an arrow at the edge, with its figure.
    near = [v for level, values in rows if level.verdict.kind != "differs" for v in values] or every
    width = max(near) - min(near) or abs(near[0]) or 1.0
    low, high = max(min(every), min(near) - 3 * width), min(max(every), max(near) + 3 * width)
    margin = 0.06 * (high - low or width)

    def draw(axes: Axes) -> None:
        for place, (level, values) in enumerate(rows):
            if level is baseline and values:
                axes.axvspan(min(values), max(values), color=STAND_INS["behind"], alpha=0.25, linewidth=0)
            mine = STAND_INS[colour(level.level)]
            inside = [value for value in values if low <= value <= high]
            axes.plot(inside, [place] * len(inside), "o", color=mine, alpha=0.75, markersize=6)
            words = [f"{lost} not finite"] if (lost := len(level.final) - len(values)) else []
            for edge, mark, beyond in (
                (high, ">", [value for value in values if value > high]),
                (low, "<", [value for value in values if value < low]),
            ):
                if beyond:
                    axes.plot([edge], [place], mark, color=mine, markersize=7)
                    words.insert(0, " to ".join(dict.fromkeys(f"{v:.4g}" for v in (min(beyond), max(beyond)))))
            if words:
                right = not any(value > (low + high) / 2 for value in inside)
                axes.text(
                    0.91 if right else 0.09,
                    place,
                    ", ".join(words),
                    transform=axes.get_yaxis_transform(),
                    ha="right" if right else "left",
                    va="center",
                    fontsize=8.5,
                    color=STAND_INS["lost" if lost else "ink"],
                )
        axes.set_xlim(low - margin, high + margin)
        name_rows(axes, [level.name for level, _ in rows])
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(f"{cut(comparison.metric)} at the end, a dot a seed")

    said = "; ".join(f"{level.name}: {', '.join(f'{v:.4g}' for v in level.final)}" for level, _ in rows)
    return [picture("final", draw, f"The {comparison.metric} at the end, of each seed. {said}.", rows=len(rows))]


def costs(comparison: Comparison) -> list[Picture]:
    """The time of a step by its parts, the memory of tensors by their kinds, and the peak: a bar a level."""
    levels = [level for level in comparison.levels if level.runs]
    if not levels:
        return []
    names = [level.name for level in levels]
    splits = [measures.part_ms(level.runs, level.step_ms) for level in levels]
    times = {part: [split[part] for split in splits] for part in PARTS}
    sizes = {name: [_mean(getattr(run, name) for run in level.runs) for level in levels] for name in SIZES}
    peaks = [_mean(run.peak_memory for run in level.runs if run.peak_memory is not None) for level in levels]
    baseline = next((place for place, level in enumerate(levels) if level is comparison.baseline), None)

    def stacked(stacks: dict[str, list[float]], labels: dict[str, str], title: str, ends: list[str]) -> Picture:
        totals = [sum(values) for values in zip(*stacks.values(), strict=True)]

        def draw(axes: Axes) -> None:
            left = np.zeros(len(names))
            for name, values in stacks.items():
                if any(values):
                    axes.barh(
                        range(len(names)),
                        values,
                        0.68,
                        left,
                        color=STAND_INS[name],
                        edgecolor=STAND_INS["paper"],
                        linewidth=0.5,
                        label=labels[name],
                    )
                left += values
            _bars(axes, names, totals, ends)
            axes.set_title(title, pad=36)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)

        parts = "; ".join(f"{n}: {end}" for n, end in zip(names, ends, strict=True))
        return picture(title, draw, f"{title}, by level. {parts}.", rows=len(names), above=0.25)

    pictures = []
    if any(level.step_ms for level in levels):
        pictures.append(
            stacked(times, PARTS_IN_WORDS, "Time of a step", [_speed(level, comparison) for level in levels])
        )
    if any(map(any, sizes.values())):
        totals = [sum(values) for values in zip(*sizes.values(), strict=True)]
        pictures.append(stacked(sizes, SIZES, "Memory of the model's tensors", _sizes(totals, baseline)))
    if any(peaks):
        ends = _sizes(peaks, baseline)

        def draw(axes: Axes) -> None:
            axes.barh(range(len(names)), peaks, 0.68, color=[STAND_INS[colour(level.level)] for level in levels])
            _bars(axes, names, peaks, ends)
            axes.set_title("Peak memory", pad=36)

        words = "; ".join(f"{name}: {end}" for name, end in zip(names, ends, strict=True))
        pictures.append(picture("peak", draw, f"Peak memory, by level. {words}.", rows=len(names), above=0.25))
    return pictures


def scales(comparison: Comparison) -> list[Picture]:
    """The loss scale over time, a line a seed, and the skipped steps, of the levels that scale the loss."""
    pictures = []
    for level in comparison.levels:
        runs = [run for run in (*level.runs, *level.failed) if run.scale]
        if all(scale == 1.0 for run in runs for scale in run.scale):
            continue

        def draw(axes: Axes, level: LevelResult = level, runs: list[Run] = runs) -> None:
            mine = STAND_INS[colour(level.level)]
            for run in runs:
                steps, values = _corners(run.scale)
                axes.plot(steps, values, color=mine, linewidth=1.2, alpha=0.8, drawstyle="steps-post")
            skips = sorted({step + 1 for run in runs for step, skipped in enumerate(run.skipped) if skipped})
            if skips:
                axes.plot(
                    thin(np.asarray(skips)),
                    np.zeros(len(thin(np.asarray(skips)))),
                    "|",
                    color=STAND_INS["lost"],
                    markersize=9,
                    markeredgewidth=1.2,
                    transform=axes.get_xaxis_transform(),
                    clip_on=False,
                    label="skipped step",
                )
                axes.legend(loc="best")
            exponents = [math.log2(s) for run in runs for s in run.scale if s > 0 and math.isfinite(s)] or [0.0]
            low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
            axes.set_yscale("log", base=2)
            stride = max(1, math.ceil((high - low) / 7))
            ticks = [2.0**e for e in range(low, high + 1, stride)]
            axes.set_yticks(ticks, [f"2{raised(round(math.log2(t)))}" for t in ticks])
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(2.0**low, 2.0**high)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("step")
            axes.set_title(f"{level.name}: loss scale")

        count = sum(sum(run.skipped) for run in runs)
        last = ", ".join(f"{run.scale[-1]:g}" for run in runs)
        alt = f"The loss scale at {level.name} over the steps; at the end {last}; {count} skipped steps in all."
        pictures.append(picture(f"scale-{level.name}", draw, alt))
    return pictures


class _Curve(NamedTuple):
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    not_finite: np.ndarray  # the steps at which some seed's loss was


def _curve(seeds: list[list[float]]) -> _Curve:
    """Running means over a 25th of the steps; a loss that is not finite leaves a gap."""
    length = max(map(len, seeds))
    table = np.full((len(seeds), length), np.nan)
    for row, losses_ in zip(table, seeds, strict=True):
        row[: len(losses_)] = np.where(np.isfinite(losses_), np.clip(losses_, -_LARGEST, _LARGEST), np.nan)
    given = np.arange(length) < np.array([[len(each)] for each in seeds])
    finite = np.isfinite(table)
    steps = np.arange(1, length + 1)
    window = max(1, length // 25)
    smooth = np.stack(
        [
            np.convolve(np.where(ok, row, np.nan), np.full(window, 1 / window), "valid")
            for ok, row in zip(finite, table, strict=True)
        ]
    )
    there = given[:, window - 1 :]  # a seed that ended earlier is no gap
    with np.errstate(invalid="ignore"):
        mean = np.where(there, smooth, 0).sum(0) / there.sum(0)
    low, high = np.fmin.reduce(smooth, 0), np.fmax.reduce(smooth, 0)
    bad = steps[(given & ~finite).any(0)]
    return _Curve(thin(steps[window - 1 :]), thin(mean), thin(low), thin(high), thin(bad))


def _corners(values: list[float]) -> tuple[list[int], list[float]]:
    """(steps, values) where the value changes, and at the ends: all that a line of steps needs."""
    places = [i for i in range(len(values)) if i == 0 or i == len(values) - 1 or values[i] != values[i - 1]]
    places = thin(np.asarray(places)).tolist()
    return [place + 1 for place in places], [values[place] for place in places]


def _bars(axes: Axes, names: list[str], totals: list[float], ends: list[str]) -> None:
    longest = max(totals) or 1.0
    for place, (total, words) in enumerate(zip(totals, ends, strict=True)):
        axes.text(total + 0.02 * longest, place, words, va="center", fontsize=8.5)
    axes.set_xlim(0, longest)  # the layout leaves room for the words
    name_rows(axes, names)
    axes.set_xticks([])
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)


def _speed(level: LevelResult, comparison: Comparison) -> str:
    if not level.step_ms:
        return "unknown"
    faster = "" if level is comparison.baseline or level.speedup is None else f", {level.speedup.median:.2g}x as fast"
    return f"{level.step_ms:.3g} ms{faster}"


def _sizes(totals: list[float], baseline: int | None) -> list[str]:
    """In words, each also as a multiple of the baseline's."""
    base = 0.0 if baseline is None else totals[baseline]
    return [
        size(total) + (f" ({total / base:.2g}x)" if base and total and place != baseline else "")
        for place, total in enumerate(totals)
    ]


def _words_of_losses(level: LevelResult, curve: _Curve | None, baseline: LevelResult | None) -> str:
    if curve is None:
        return f"The training loss at {level.name} up to where it failed."
    last = [f"{run.loss[-1]:.4g}" for run in level.runs if run.loss]
    words = f"The training loss at {level.name} over {int(curve.steps[-1])} steps"
    words += f"; the last one of each seed: {', '.join(last)}."
    if curve.not_finite.size:
        words += f" Not finite at {curve.not_finite.size} steps, from step {int(curve.not_finite[0])} on."
    return words + (f" Behind it in grey {baseline.name}." if baseline is not None and level is not baseline else "")


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
