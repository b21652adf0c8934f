"""Time to equal loss: the step after which the baseline had the final result of a worse level."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from amp_patch.comparison import measures
from amp_patch.diagnose.recording.run import Run


class Reached(NamedTuple):
    """The step after which the baseline had a level's final result: `step` of its `of` steps.

    The level needs all `of` steps for that result. Its speedup to equal loss is therefore `step / of` times its speedup
    per step.
    """

    step: int
    of: int


def reached(base: Sequence[Run], metric: str, result: float, steps: int, sign: int) -> Reached | None:
    """Find the step after which the baseline had `result`, by its mean curve.

    The curve of a run is its loss as a running mean over a tenth of the steps (as the result of a run is), or the
    values that it logged. The mean over the seeds is used.

    Args:
        base: the baseline's runs with the seeds of the level.
        result: the level's final result.
        steps: the number of steps that are compared.
        sign: 1 if more of the metric is worse, -1 if less is.

    Returns:
        The step. None if the baseline ends worse than `result`, if the curve has fewer than three points, if the runs
        logged the metric at different steps, or if a value is not finite.
    """
    curve = _of_loss(base, steps) if metric == measures.LOSS else _logged(base, metric)
    if len(curve) < 3 or not all(math.isfinite(value) for _, value in curve):
        return None
    of = curve[-1][0]
    worse = [sign * value > sign * result for _, value in curve]
    if worse[-1]:  # the level ends better than the baseline
        return None
    # A noisy curve crosses the result several times. Counting its worse points gives one step for all crossings.
    return Reached(curve[sum(worse)][0], of)


def _of_loss(runs: Sequence[Run], steps: int) -> list[tuple[int, float]]:
    window = max(1, steps // 10)
    sums = [[0.0, *itertools.accumulate(run.loss[:steps])] for run in runs if run.steps >= steps]
    return [
        (step, statistics.fmean([(each[step] - each[step - window]) / window for each in sums]))
        for step in range(window, steps + 1)
        if sums
    ]


def _logged(runs: Sequence[Run], metric: str) -> list[tuple[int, float]]:
    several = [run.logged.get(metric, []) for run in runs]
    if not several or len({tuple(step for step, _ in each) for each in several}) != 1:
        return []
    return [(points[0][0], statistics.fmean([value for _, value in points])) for points in zip(*several, strict=True)]
