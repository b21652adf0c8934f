"""The curves of a report: the training loss of the baseline, how far each level is from it, and the loss scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from amp_patch.lab.comparison.drawing import LARGEST, Picture, Plot, power_ticks, step_ticks, thin, ticks
from amp_patch.lab.wording import figure, power_in_ascii

if TYPE_CHECKING:
    from amp_patch.lab.comparison.comparison import Comparison
    from amp_patch.lab.comparison.level_result import LevelResult
    from amp_patch.lab.recording.run import Run

_Value = float | None


class _Curves(NamedTuple):
    """Running means of the losses at chosen steps: a list for each run, with None where a run has no mean."""

    steps: list[int]
    values: list[list[_Value]]

    @property
    def low(self) -> list[_Value]:
        return [min(found, default=None) for found in self._found]

    @property
    def high(self) -> list[_Value]:
        return [max(found, default=None) for found in self._found]

    @property
    def mean(self) -> list[_Value]:
        return [statistics.fmean(found) if found else None for found in self._found]

    @property
    def _found(self) -> list[list[float]]:
        return [[v for v in column if v is not None] for column in zip(*self.values, strict=True)]


def losses(comparison: Comparison) -> list[Picture]:
    """Return a picture for each level: its training loss minus the baseline's with the same seed.

    The spread of the baseline's seeds is drawn behind it. For the baseline, and for a level that has no seed in common
    with it, the picture has the level's own loss.
    """
    base = comparison.baseline
    pictures = []
    for level in comparison.levels:
        runs = [run for run in level.all_runs if run.loss]
        of_base = {run.seed: run for run in base.runs if run.loss} if base is not None and level is not base else {}
        paired = [run for run in runs if run.seed in of_base]
        if paired and base is not None:
            pictures.append(_difference(level, base, paired, of_base))
        elif runs:
            pictures.append(_loss(level, runs))
    return pictures


def scales(comparison: Comparison) -> list[Picture]:
    """Return a picture for each level that scales the loss: its loss scale over the steps, a line for each seed.

    Marks at the foot show the skipped steps.
    """
    pictures = []
    for level in comparison.levels:
        runs = [run for run in level.all_runs if run.scale]
        if all(scale == 1.0 for run in runs for scale in run.scale):
            continue
        exponents = [math.log2(s) for run in runs for s in run.scale if s > 0 and math.isfinite(s)] or [0.0]
        low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents)) + 1
        last = max(len(run.scale) for run in runs)
        x_ticks, y_ticks = step_ticks(last), power_ticks(low, high, 6)
        plot = Plot(f"{level.name}: loss scale", (1, max(2, last)), (low, high), x_ticks, y_ticks)
        for run in runs:
            plot.curve(_stairs(run.scale), "ink", width=1.3)
        skipped = sorted({step + 1 for run in runs for step, skipped in enumerate(run.skipped) if skipped})
        plot.foot(skipped, "lost")
        count = sum(sum(run.skipped) for run in runs)
        ends = ", ".join(power_in_ascii(run.scale[-1]) for run in runs)
        alt = f"The loss scale at {level.name} over the steps; at the end {ends}; {count} skipped steps in all."
        pictures.append(plot.picture(alt))
    return pictures


def _loss(level: LevelResult, runs: Sequence[Run]) -> Picture:
    curves = _smooth([run.loss for run in runs])
    found = [v for row in curves.values for v in row if v is not None]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    logarithmic = low > 0 and high > 20 * low
    span = (low / 1.1, high * 1.1) if logarithmic else _widened(low, high)
    if logarithmic:
        first, last = math.floor(math.log10(span[0])), math.ceil(math.log10(span[1]))
        stride = max(1, (last - first) // 5)
        y_ticks = {10.0**e: f"{10.0**e:g}" for e in range(first, last + 1, stride) if span[0] <= 10.0**e <= span[1]}
    else:
        y_ticks = ticks(*span)
    last_step = max(len(run.loss) for run in runs)
    title = f"{level.name}: training loss"
    plot = Plot(title, (1, max(2, last_step)), span, step_ticks(last_step), y_ticks, log=logarithmic)
    plot.area(zip(curves.steps, curves.low, curves.high, strict=True), "band")
    plot.curve(zip(curves.steps, curves.mean, strict=True), "ink")
    _mark_not_finite(plot, runs)
    return plot.picture(_in_words(level, runs, "The training loss"))


def _difference(level: LevelResult, base: LevelResult, paired: Sequence[Run], of_base: dict[int, Run]) -> Picture:
    """Draw the losses of the runs minus the losses of the baseline's run with the same seed."""
    longest = max(len(run.loss) for run in (*paired, *of_base.values()))
    ours = _smooth([run.loss for run in paired], longest)
    theirs = _smooth([of_base[run.seed].loss for run in paired], longest)
    around = _smooth([run.loss for run in of_base.values()], longest)
    distances = _Curves(ours.steps, [list(map(_less, a, b)) for a, b in zip(ours.values, theirs.values, strict=True)])
    band = [
        (x, _less(low, mean), _less(high, mean))
        for x, low, mean, high in zip(around.steps, around.low, around.mean, around.high, strict=True)
    ]
    edges = [abs(v) for _, low, high in band for v in (low, high) if v is not None]
    far = [abs(v) for row in distances.values for v in row if v is not None]
    reach = 1.15 * max(max(edges, default=0.0), max(far, default=0.0)) or 1.0
    plot = Plot(
        f"{level.name}: training loss less {base.name}'s",
        (1, max(2, longest)),
        (-reach, reach),
        step_ticks(longest),
        ticks(-reach, reach),
    )
    plot.area(band, "band")
    plot.area(zip(distances.steps, distances.low, distances.high, strict=True), "ink", 0.25)
    plot.curve(zip(distances.steps, distances.mean, strict=True), "ink")
    _mark_not_finite(plot, paired)
    words = f"The training loss less that of {base.name} with the same seed"
    return plot.picture(_in_words(level, paired, words))


def _mark_not_finite(plot: Plot, runs: Sequence[Run]) -> None:
    bad = sorted({step + 1 for run in runs for step, loss in enumerate(run.loss) if not math.isfinite(loss)})
    plot.foot(bad, "lost")
    if bad:
        plot.note(f"not finite from step {bad[0]} on", "lost")


def _in_words(level: LevelResult, runs: Sequence[Run], what: str) -> str:
    ends = ", ".join(figure(run.loss[-1]) for run in runs)
    steps = max(len(run.loss) for run in runs)
    words = f"{what}, at {level.name} over {steps} steps; the last loss of each seed: {ends}."
    count = sum(not math.isfinite(loss) for run in runs for loss in run.loss)
    return words + (f" Not finite at {count} steps." if count else "")


def _smooth(several: Sequence[Sequence[float]], longest: int | None = None) -> _Curves:
    """Return running means of each run's losses, over windows of a 25th of the steps.

    A mean is None if the run ended inside its window, or if a loss in it is not finite.
    """
    longest = longest or max(map(len, several))
    window = max(1, longest // 25)
    steps = [int(step) for step in thin(range(window, longest + 1))]
    return _Curves(steps, [[_mean(losses_[step - window : step], window) for step in steps] for losses_ in several])


def _mean(values: Sequence[float], window: int) -> _Value:
    """Return the mean of the losses of a window; None if the run ended inside of it, or if a loss is not finite."""
    if len(values) < window or not all(map(math.isfinite, values)):
        return None
    return statistics.fmean([max(-LARGEST, min(value, LARGEST)) for value in values])


def _less(value: _Value, other: _Value) -> _Value:
    return None if value is None or other is None else value - other


def _stairs(values: Sequence[float]) -> list[tuple[float, float | None]]:
    """Return the points (step, log2 of the value) of a step curve: at its ends, and two at each change of the value.

    The logarithm is None for 0, negative and non-finite values.
    """
    places = [i for i in range(len(values)) if i == 0 or i == len(values) - 1 or values[i] != values[i - 1]]
    points: list[tuple[float, float | None]] = []
    for place in map(int, thin(places)):
        value = values[place]
        height = math.log2(value) if value > 0 and math.isfinite(value) else None
        if points:
            points.append((place + 1, points[-1][1]))
        points.append((place + 1, height))
    return points


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(low) * 0.05 or 1.0
    return low - margin, high + margin
