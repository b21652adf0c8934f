"""Histograms of the sizes of numbers that `amp.inspect` counted, beside the range of a type."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from amp_patch.lab.comparison.drawing import Picture, Plot, line, power_ticks, rect, text
from amp_patch.lab.diagnose.histogram import FORMATS, Format
from amp_patch.lab.recording.run import Look
from amp_patch.lab.wording import percent, power, raised, type_name

if TYPE_CHECKING:
    from amp_patch.lab.comparison.level_result import LevelResult

_KINDS = {
    "weights": "weights",
    "activations": "activations",
    "activation_gradients": "gradients of activations, scaled",
}


def numbers(level: LevelResult) -> list[Picture]:
    """Return the histograms of a level's inspected steps: gradients, weights, activations and their gradients.

    The range drawn is that of the level's type; O0 has no type, and its range is FP16's.
    """
    looks = [look for run in level.all_runs for look in run.looks]
    of_type = level.dtype or "float16"
    format_, held = type_name(of_type), FORMATS[getattr(torch, of_type)]
    counts = _exponents(looks, "gradients")
    pictures = [_gradients(level, looks, counts, format_, held)] if counts else []
    for kind, words in _KINDS.items():
        counts = _exponents(looks, kind)
        if counts:
            low, high = held
            plot = _histogram(f"{level.name}: {words}", counts, low, high, format_)
            limits = f"{format_} holds 2^{low} to 2^{high + 1}"
            pictures.append(
                plot.picture(f"The sizes of {words} at {level.name}: 2^{min(counts)} to 2^{max(counts)}; {limits}.")
            )
    return pictures


def _gradients(level: LevelResult, looks: list[Look], counts: dict[int, int], format_: str, held: Format) -> Picture:
    """Draw the histogram of the gradients, and below it the range of the type, for FP16 at up to three loss scales.

    Source: figure 3 of Micikevicius et al. 2018.
    """
    scales = {"without loss scaling": 1.0}
    if format_ == "FP16":
        in_use, best = looks[-1].scale, min(look.best_scale for look in looks)
        scales |= {f"at the loss scale used, {power(in_use)}": in_use} if in_use != 1.0 else {}
        scales |= {f"at the best loss scale, {power(best)}": best}
    total = sum(counts.values())
    shares = {}
    for words, scale in scales.items():
        shift = math.floor(math.log2(scale)) if scale > 0 and math.isfinite(scale) else 0
        low, high = held.smallest - shift, held.largest - shift
        lost = sum(count for e, count in counts.items() if e < low) / total
        over = sum(count for e, count in counts.items() if e > high) / total
        shares[words] = (low, high, lost, over)
    used = [*shares.values()][1 if len(scales) == 3 else 0]
    plot = _histogram(f"{level.name}: gradients, by their size", counts, *used[:2], format_, below=28.0 * len(shares))
    for place, (words, (low, high, lost, over)) in enumerate(shares.items()):
        y = plot.HEIGHT + 28 * place
        left, right = (plot.LEFT + min(plot.width, max(0.0, plot.x(edge))) for edge in (low, high + 1))
        said = f"{format_} {words}: {percent(lost)} become 0" + (f", {percent(over)} overflow" if over else "")
        plot.outer.append(text(4, y + 9, said, "lost" if lost or over else "ink", size=10.5))
        plot.outer.append(line(plot.LEFT, y + 17, plot.LEFT + plot.width, y + 17, "line"))
        plot.outer.append(rect(f"{left:.1f}", y + 14, f"{right - left:.1f}", 6, "base", ' rx="2"'))
    words = "; ".join(
        f"{words} {percent(lost)} of them become 0 and {percent(over)} overflow"
        for words, (_, _, lost, over) in shares.items()
    )
    span = f"from 2^{min(counts)} to 2^{max(counts)}"
    return plot.picture(f"The sizes of the gradients at {level.name}, {span}. In {format_}, {words}.")


def _histogram(title: str, counts: dict[int, int], low: int, high: int, format_: str, below: float = 0.0) -> Plot:
    """Return a plot of the count of numbers at each exponent; exponents outside of the format's [low, high] are red."""
    also = {low, high + 1} if format_ == "FP16" else set()  # BF16's whole range would squeeze the bars
    left, right = min([*counts, *also]) - 2, max([*counts, *also]) + 3
    top = max(counts.values())
    first = math.ceil(math.log10(top))
    stride = max(1, first // 3)
    y_ticks = {10.0**e: f"10{raised(e)}" for e in range(0, first + 1, stride) if 10.0**e <= 2 * top}
    plot = Plot(title, (left, right), (0.5, 2.0 * top), power_ticks(left, right), y_ticks, log=True, below=below)
    for inside, colour in ((True, "soft"), (False, "lost")):
        shown = [(e, count) for e, count in counts.items() if (low <= e <= high) is inside and count]
        plot.columns(shown, colour)
    return plot


def _exponents(looks: Iterable[Look], kind: str) -> dict[int, int]:
    """Return {exponent: count of numbers} over all looks."""
    counts: dict[int, int] = {}
    for look in looks:
        for exponent, count in look.counts.get(kind, {}).get("exponents", {}).items():
            counts[int(exponent)] = counts.get(int(exponent), 0) + count
    return dict(sorted(counts.items()))
