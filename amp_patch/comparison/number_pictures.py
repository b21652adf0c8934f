"""The pictures of what `amp.inspect` saw: the sizes of numbers, and the modules' errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from amp_patch.comparison import measures
from amp_patch.comparison.drawing import STAND_INS, Picture, colour, cut, picture, raised, show_powers
from amp_patch.comparison.wording import percent
from amp_patch.diagnose.histogram import FORMATS
from amp_patch.recording.run import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from amp_patch.comparison.level_result import LevelResult

WORST = 12  # modules
_FP16 = FORMATS[torch.float16]


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
        _histogram(above, counts, left, right, STAND_INS[colour(level.level)], used[0], used[1])
        show_powers(above, left, right)
        above.tick_params(labelbottom=False)
        for place, (words, (low, high, flushed, overflowed)) in enumerate(shares.items()):
            below.barh(
                place,
                min(high, right) + 1 - max(low, left),
                0.3,
                max(low, left),
                color=STAND_INS[colour(level.level) if place == 1 else "behind"],
            )
            lost = f"{percent(flushed)} flush" + (f", {percent(overflowed)} overflow" if overflowed else "")
            below.text(
                left,
                place - 0.42,
                f"{words}: {lost}",
                fontsize=8.5,
                va="center",
                color=STAND_INS["lost" if flushed or overflowed else "ink"],
            )
        below.set_ylim(2.3, -0.8)
        below.set_yticks([])
        below.spines["left"].set_visible(False)
        show_powers(below, left, right)
        below.set_xlabel("size; the bars are what FP16 can hold")

    words = "; ".join(
        f"at {words} {percent(flushed)} of them flush to zero and {percent(overflowed)} overflow"
        for words, (_, _, flushed, overflowed) in shares.items()
    )
    alt = f"The sizes of the gradients at {level.name}, from 2^{min(counts)} to 2^{max(counts)}. In FP16, {words}."
    return picture(f"gradients-{level.name}", draw, alt, height=4.2)


def _others(level: LevelResult, seen: dict[str, dict[int, int]]) -> Picture:
    low, high = _FP16
    left, right = min(low, *map(min, seen.values())) - 2, max(high, *map(max, seen.values())) + 3

    def draw(axes: Axes) -> None:
        axes.set_axis_off()
        axes.set_title(f"{level.name}: everything else, by its size")
        height = 1 / len(seen)
        for place, (words, counts) in enumerate(seen.items()):
            row = axes.inset_axes((0, 1 - (place + 1) * height, 1, height * 0.68))
            row.axvspan(low, high + 1, color=STAND_INS["behind"], alpha=0.2, linewidth=0)
            _histogram(row, counts, left, right, STAND_INS[colour(level.level)], low, high)
            row.set_title(words, fontsize=8.5, fontweight="normal", pad=3)
            row.set_yticks([])
            show_powers(row, left, right)
            if place < len(seen) - 1:
                row.tick_params(labelbottom=False)
            else:
                row.set_xlabel("size; FP16's range is shaded")

    spans = "; ".join(f"{words} from 2^{min(counts)} to 2^{max(counts)}" for words, counts in seen.items())
    alt = f"The sizes of the numbers at {level.name}: {spans}. FP16 holds 2^{low} to 2^{high + 1}."
    return picture(f"others-{level.name}", draw, alt, height=4.2)


def _errors(level: LevelResult, errors: list[tuple[str, float]]) -> Picture:
    finite = [error for _, error in errors if 0 < error < math.inf] or [1.0]
    low, high = min(finite) / 3, max(finite) * 3

    def draw(axes: Axes) -> None:
        shown = [high if math.isinf(error) else max(error, low) for _, error in errors]
        places = [place + 0.25 for place in range(len(errors))]  # a module's name stands above its bar
        bars = axes.barh(places, shown, 0.4, color=STAND_INS[colour(level.level)])
        for place, (bar, (name, error)) in enumerate(zip(bars, errors, strict=True)):
            if math.isinf(error):
                bar.set_color(STAND_INS["lost"])
            figure = "not finite" if math.isinf(error) else f"{error:.2g}"
            words = f"{cut(name or 'the model itself', 42)}: {figure}"
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
    return picture(
        f"errors-{level.name}", draw, f"The relative error of the outputs of modules at {level.name}: {words}.", 4.2
    )


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
    for part, paint in ((inside, kept), (~inside, STAND_INS["lost"])):
        if values[part].any():
            axes.stairs(np.where(part, values, 0), edges, baseline=0.5, fill=True, color=paint)
    axes.set_yscale("log")
    axes.set_ylim(0.5, values.max() * 2)
    axes.yaxis.set_major_locator(LogLocator(numticks=4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"10{raised(round(math.log10(value)))}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _power(scale: float) -> str:
    """A loss scale: powers of two as such."""
    exact = scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5
    return f"2{raised(math.frexp(scale)[1] - 1)}" if exact and scale != 1 else f"{scale:g}"
