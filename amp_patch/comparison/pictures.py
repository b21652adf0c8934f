"""The pictures of a report: SVG that takes its colours from the page, so that light and dark are one picture.

Each is small, made for the width of a phone, where a page shows them one below the other and a desk three in a row.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from amp_patch.comparison import measures
from amp_patch.diagnose.histogram import FORMATS
from amp_patch.recording.run import PARTS, Look, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amp_patch.comparison.comparison import Comparison
    from amp_patch.comparison.level_result import LevelResult

# Name of a colour -> on white, on black. The levels' hues are Okabe and Ito's, those of what is stacked Paul Tol's:
# told apart with every kind of colour vision, and in print.
COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#57606a", "#a3abb5"),
    "line": ("#dfe3e8", "#363c44"),
    "behind": ("#a6abb1", "#7a828c"),
    "lost": ("#c62828", "#ff7070"),
    "O0": ("#555555", "#b9bcc0"),
    "O1": ("#0072b2", "#4aa8e0"),
    "O2": ("#d55e00", "#f0803c"),
    "O3": ("#c0609a", "#e09bc4"),
    "O4": ("#2c93cc", "#86cdf7"),
    "O5": ("#c78500", "#f2b632"),
    "data": ("#9aa0a6", "#9aa0a6"),
    "forward": ("#4477aa", "#5c92c8"),
    "backward": ("#ee6677", "#f07f8e"),
    "between": ("#228833", "#46b058"),
    "optimizer": ("#ccbb44", "#ccbb44"),
    "weights": ("#4477aa", "#5c92c8"),
    "masters": ("#66ccee", "#66ccee"),
    "gradients": ("#ee6677", "#f07f8e"),
    "state": ("#ccbb44", "#ccbb44"),
}
# What matplotlib draws them in; nothing else has these colours, so that each can become a variable of the page's.
_STAND_INS = {name: f"#fe01{index:02x}" for index, name in enumerate(COLOURS)}
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": _STAND_INS["ink"],
    "axes.labelcolor": _STAND_INS["soft"],
    "axes.titlecolor": _STAND_INS["ink"],
    "axes.edgecolor": _STAND_INS["soft"],
    "xtick.color": _STAND_INS["soft"],
    "ytick.color": _STAND_INS["soft"],
    "grid.color": _STAND_INS["line"],
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.borderpad": 0.0,
    "legend.handlelength": 1.0,
    "legend.columnspacing": 1.2,
    "text.parse_math": False,  # in a user's name a dollar is a dollar
    "svg.fonttype": "none",  # words stay words: they can be read aloud, searched and copied
    "svg.hashsalt": "amp_patch",
}
_LARGEST = 1e30  # an axis cannot be much longer
_POINTS = 400  # as many as such a picture can show of a curve
WORST = 12  # modules
SIZES = {"weights": "weights", "masters": "masters", "gradients": "gradients", "state": "optimizer state"}
PARTS_IN_WORDS = {**{part: part for part in PARTS}, "between": "in between"}
_FP16 = FORMATS[torch.float16]


class Picture(NamedTuple):
    """One picture: an <svg> element for inside of a page that has the colours, and what it shows, in words."""

    svg: str
    alt: str


def colour(level: str) -> str:
    """The name in COLOURS of a level's."""
    return level if level in COLOURS else "ink"


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
                axes.plot(behind.steps, behind.mean, color=_STAND_INS["behind"], linewidth=3.5, label=baseline.name)
            mine = _STAND_INS[colour(level.level)]
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
                        color=_STAND_INS["lost"],
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

        pictures.append(_picture(f"loss-{level.name}", draw, _words_of_losses(level, curves.get(id(level)), baseline)))
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
                axes.axvspan(min(values), max(values), color=_STAND_INS["behind"], alpha=0.25, linewidth=0)
            mine = _STAND_INS[colour(level.level)]
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
                    color=_STAND_INS["lost" if lost else "ink"],
                )
        axes.set_xlim(low - margin, high + margin)
        _rows(axes, [level.name for level, _ in rows])
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_title(f"{_short(comparison.metric)} at the end, a dot a seed")

    said = "; ".join(f"{level.name}: {', '.join(f'{v:.4g}' for v in level.final)}" for level, _ in rows)
    return [_picture("final", draw, f"The {comparison.metric} at the end, of each seed. {said}.", rows=len(rows))]


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
                        color=_STAND_INS[name],
                        edgecolor=_STAND_INS["paper"],
                        linewidth=0.5,
                        label=labels[name],
                    )
                left += values
            _bars(axes, names, totals, ends)
            axes.set_title(title, pad=36)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)

        parts = "; ".join(f"{n}: {end}" for n, end in zip(names, ends, strict=True))
        return _picture(title, draw, f"{title}, by level. {parts}.", rows=len(names), above=0.25)

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
            axes.barh(range(len(names)), peaks, 0.68, color=[_STAND_INS[colour(level.level)] for level in levels])
            _bars(axes, names, peaks, ends)
            axes.set_title("Peak memory", pad=36)

        words = "; ".join(f"{name}: {end}" for name, end in zip(names, ends, strict=True))
        pictures.append(_picture("peak", draw, f"Peak memory, by level. {words}.", rows=len(names), above=0.25))
    return pictures


def scales(comparison: Comparison) -> list[Picture]:
    """The loss scale over time, a line a seed, and the skipped steps, of the levels that scale the loss."""
    pictures = []
    for level in comparison.levels:
        runs = [run for run in (*level.runs, *level.failed) if run.scale]
        if all(scale == 1.0 for run in runs for scale in run.scale):
            continue

        def draw(axes: Axes, level: LevelResult = level, runs: list[Run] = runs) -> None:
            mine = _STAND_INS[colour(level.level)]
            for run in runs:
                steps, values = _corners(run.scale)
                axes.plot(steps, values, color=mine, linewidth=1.2, alpha=0.8, drawstyle="steps-post")
            skips = sorted({step + 1 for run in runs for step, skipped in enumerate(run.skipped) if skipped})
            if skips:
                axes.plot(
                    _thin(np.asarray(skips)),
                    np.zeros(len(_thin(np.asarray(skips)))),
                    "|",
                    color=_STAND_INS["lost"],
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
            axes.set_yticks(ticks, [f"2{_raised(round(math.log2(t)))}" for t in ticks])
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_ylim(2.0**low, 2.0**high)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.set_xlabel("step")
            axes.set_title(f"{level.name}: loss scale")

        count = sum(sum(run.skipped) for run in runs)
        last = ", ".join(f"{run.scale[-1]:g}" for run in runs)
        alt = f"The loss scale at {level.name} over the steps; at the end {last}; {count} skipped steps in all."
        pictures.append(_picture(f"scale-{level.name}", draw, alt))
    return pictures


def numbers(level: LevelResult) -> list[Picture]:
    """What `amp.inspect` saw at a level: the sizes of the gradients, of everything else, and the modules' errors."""
    looks = [look for run in (*level.runs, *level.failed) for look in run.looks]
    pictures = []
    if _exponents(looks, "gradients"):
        pictures.append(_gradients(level, looks))
    kinds = {
        "weights": "weights",
        "activations": "activations",
        "activation_gradients": "activations' gradients, scaled",
    }
    seen = {words: _exponents(looks, kind) for kind, words in kinds.items() if _exponents(looks, kind)}
    if seen:
        pictures.append(_others(level, seen))
    errors = [*measures.errors(looks).items()][:WORST]
    if errors:
        pictures.append(_errors(level, errors))
    return pictures


def size(count: float) -> str:
    """Bytes in words: 1536 is "1.5 KiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log(count, 1024)))
    return f"{count / 1024**power:.3g} {('KiB', 'MiB', 'GiB')[power - 1]}"


def _gradients(level: LevelResult, looks: list[Look]) -> Picture:
    """Figure 3 of Micikevicius et al. 2018: what of the gradients lies below FP16's range, at three loss scales."""
    counts = _exponents(looks, "gradients")
    in_use, best = looks[-1].scale, min(look.best_scale for look in looks)
    scales = {"scale 1": 1.0, f"scale in use, {_power(in_use)}": in_use, f"best scale, {_power(best)}": best}
    total = sum(counts.values())
    shares = {}
    for words, scale in scales.items():
        shift = math.floor(math.log2(scale)) if scale > 0 and math.isfinite(scale) else 0
        low, high = _FP16.smallest - shift, _FP16.largest - shift
        flushed = sum(count for e, count in counts.items() if e < low) / total
        overflowed = sum(count for e, count in counts.items() if e > high) / total
        shares[words] = (low, high, flushed, overflowed)
    used = shares[f"scale in use, {_power(in_use)}"]
    left, right = min(*counts, used[0]) - 2, max(*counts, used[1]) + 3

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_title(f"{level.name}: gradients, by their size")
        above, below = axes.inset_axes((0, 0.48, 1, 0.52)), axes.inset_axes((0, 0, 1, 0.4))
        _histogram(above, counts, left, right, _STAND_INS[colour(level.level)], used[0], used[1])
        _powers(above, left, right)
        above.tick_params(labelbottom=False)
        for place, (words, (low, high, flushed, overflowed)) in enumerate(shares.items()):
            below.barh(
                place,
                min(high, right) + 1 - max(low, left),
                0.3,
                max(low, left),
                color=_STAND_INS[colour(level.level) if place == 1 else "behind"],
            )
            lost = f"{percent(flushed)} flush" + (f", {percent(overflowed)} overflow" if overflowed else "")
            below.text(
                left,
                place - 0.42,
                f"{words}: {lost}",
                fontsize=8.5,
                va="center",
                color=_STAND_INS["lost" if flushed or overflowed else "ink"],
            )
        below.set_ylim(2.3, -0.8)
        below.set_yticks([])
        below.spines["left"].set_visible(False)
        _powers(below, left, right)
        below.set_xlabel("size; the bars are what FP16 can hold")

    words = "; ".join(
        f"at {words} {percent(flushed)} of them flush to zero and {percent(overflowed)} overflow"
        for words, (_, _, flushed, overflowed) in shares.items()
    )
    alt = f"The sizes of the gradients at {level.name}, from 2^{min(counts)} to 2^{max(counts)}. In FP16, {words}."
    return _picture(f"gradients-{level.name}", draw, alt, height=4.2)


def _others(level: LevelResult, seen: dict[str, dict[int, int]]) -> Picture:
    low, high = _FP16
    left, right = min(low, *map(min, seen.values())) - 2, max(high, *map(max, seen.values())) + 3

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_title(f"{level.name}: everything else, by its size")
        height = 1 / len(seen)
        for place, (words, counts) in enumerate(seen.items()):
            row = axes.inset_axes((0, 1 - (place + 1) * height, 1, height * 0.68))
            row.axvspan(low, high + 1, color=_STAND_INS["behind"], alpha=0.2, linewidth=0)
            _histogram(row, counts, left, right, _STAND_INS[colour(level.level)], low, high)
            row.set_title(words, fontsize=8.5, fontweight="normal", pad=3)
            row.set_yticks([])
            _powers(row, left, right)
            if place < len(seen) - 1:
                row.tick_params(labelbottom=False)
            else:
                row.set_xlabel("size; FP16's range is shaded")

    spans = "; ".join(f"{words} from 2^{min(counts)} to 2^{max(counts)}" for words, counts in seen.items())
    alt = f"The sizes of the numbers at {level.name}: {spans}. FP16 holds 2^{low} to 2^{high + 1}."
    return _picture(f"others-{level.name}", draw, alt, height=4.2)


def _errors(level: LevelResult, errors: list[tuple[str, float]]) -> Picture:
    finite = [error for _, error in errors if 0 < error < math.inf] or [1.0]
    low, high = min(finite) / 3, max(finite) * 3

    def draw(axes: Axes) -> None:
        shown = [high if math.isinf(error) else max(error, low) for _, error in errors]
        places = [place + 0.25 for place in range(len(errors))]  # a module's name stands above its bar
        bars = axes.barh(places, shown, 0.4, color=_STAND_INS[colour(level.level)])
        for place, (bar, (name, error)) in enumerate(zip(bars, errors, strict=True)):
            if math.isinf(error):
                bar.set_color(_STAND_INS["lost"])
            figure = "not finite" if math.isinf(error) else f"{error:.2g}"
            words = f"{_short(name or 'the model itself', 42)}: {figure}"
            axes.text(0, place - 0.2, words, transform=axes.get_yaxis_transform(), fontsize=8.5, va="center")
        axes.set_xscale("log")
        axes.set_xlim(low, high * 1.01)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yticks([])
        axes.set_ylim(max(len(errors), 6) - 0.4, -0.5)
        axes.set_title(f"{level.name}: relative error")
        axes.set_xlabel("of a module's output against FP32")

    words = "; ".join(f"{name} {error:.2g}" for name, error in errors)
    return _picture(
        f"errors-{level.name}", draw, f"The relative error of the outputs of modules at {level.name}: {words}.", 4.2
    )


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
    return _Curve(_thin(steps[window - 1 :]), _thin(mean), _thin(low), _thin(high), _thin(bad))


def _thin(values: np.ndarray) -> np.ndarray:
    return values[np.linspace(0, len(values) - 1, _POINTS).round().astype(int)] if len(values) > _POINTS else values


def _corners(values: list[float]) -> tuple[list[int], list[float]]:
    """(steps, values) where the value changes, and at the ends: all that a line of steps needs."""
    places = [i for i in range(len(values)) if i == 0 or i == len(values) - 1 or values[i] != values[i - 1]]
    places = _thin(np.asarray(places)).tolist()
    return [place + 1 for place in places], [values[place] for place in places]


def _exponents(looks: Iterable[Look], kind: str) -> dict[int, int]:
    """exponent -> how many numbers, of all looks."""
    counts: dict[int, int] = {}
    for look in looks:
        for exponent, count in look.counts.get(kind, {}).get("exponents", {}).items():
            counts[int(exponent)] = counts.get(int(exponent), 0) + count
    return dict(sorted(counts.items()))


def _histogram(axes: Axes, counts: dict[int, int], left: int, right: int, kept: str, lowest: int, highest: int) -> None:
    """Bars on a logarithmic axis; those of the numbers outside of [lowest, highest] in the colour of what is lost."""
    edges = np.arange(left, right + 1)
    values = np.array([counts.get(e, 0) for e in edges[:-1]])
    inside = (edges[:-1] >= lowest) & (edges[:-1] <= highest)
    for part, paint in ((inside, kept), (~inside, _STAND_INS["lost"])):
        if values[part].any():
            axes.stairs(np.where(part, values, 0), edges, baseline=0.5, fill=True, color=paint)
    axes.set_yscale("log")
    axes.set_ylim(0.5, values.max() * 2)
    axes.yaxis.set_major_locator(LogLocator(numticks=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"10{_raised(round(math.log10(value)))}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _powers(axes: Axes, left: int, right: int) -> None:
    axes.set_xlim(left, right)
    stride = max(4, 4 * math.ceil((right - left) / 36))
    ticks = [e for e in range(left, right) if e % stride == 0]
    axes.set_xticks(ticks, [f"2{_raised(e)}" for e in ticks])


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=_STAND_INS["ink"])
    axes.grid(False, axis="y")


def _bars(axes: Axes, names: list[str], totals: list[float], ends: list[str]) -> None:
    longest = max(totals) or 1.0
    for place, (total, words) in enumerate(zip(totals, ends, strict=True)):
        axes.text(total + 0.02 * longest, place, words, va="center", fontsize=8.5)
    axes.set_xlim(0, longest)  # the layout leaves room for the words
    _rows(axes, names)
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


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _power(scale: float) -> str:
    """A loss scale: powers of two as such."""
    exact = scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5
    return f"2{_raised(math.frexp(scale)[1] - 1)}" if exact and scale != 1 else f"{scale:g}"


def percent(share: float) -> str:
    return "0 %" if share == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.2g} %" if share < 1 else "100 %"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _short(name: str, length: int = 28) -> str:
    name = name.encode(errors="replace").decode()  # half a letter, of a file name, say, has no form
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-(length // 2) :]}"


def _picture(
    name: str,
    draw: Callable[[Any], None],
    alt: str,
    height: float = 2.5,
    *,
    rows: int | None = None,
    above: float = 0.0,
) -> Picture:
    """Make one; `rows` bars decide its height, `above` inches more are for a legend."""
    if rows is not None:
        height = max(1.5, 0.75 + 0.27 * rows) + above
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A letter that matplotlib's font lacks: the page's may well have it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(4.0, height), layout="constrained")
        draw(figure.add_subplot())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Picture(_for_a_page(file.getvalue(), name, alt), alt)


def _for_a_page(svg: str, name: str, alt: str) -> str:
    """An SVG file as an element among others of one page: its own ids, the page's colours and letters."""
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", name)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    for each, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{each})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    start = f'<svg {box.group()} role="img" aria-label="{escape(alt)}">'
    return start + svg[svg.index(">") + 1 :]
