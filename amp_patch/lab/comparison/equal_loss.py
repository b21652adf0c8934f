"""Time to equal loss: when the baseline had the result with which a worse level ends, from the recorded curves."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from amp_patch.lab.comparison import measures
from amp_patch.lab.recording.run import Run


class Reached(NamedTuple):
    """The baseline had this result after `step` of its `of` steps.

    A level that ends with it has trained all of them: of what it is faster by, the share `step / of` is left.
    """

    step: int
    of: int


def reached(base: Sequence[Run], metric: str, result: float, steps: int, sign: int) -> Reached | None:
    """
    Args:
        base: the baseline's runs, of the seeds with which the level trained.
        result: what the level ends with.
        steps: how many are compared.
        sign: 1 where more of the metric is worse, -1 where less is.

    The curve is the mean over the seeds: of the loss a running mean over a tenth of the steps, as the result of a run
    is. None where there is no curve: of a metric that was logged fewer than three times, or at other steps by each run.
    """
    curve = _of_loss(base, steps) if metric == measures.LOSS else _logged(base, metric)
    if len(curve) < 3 or not all(math.isfinite(value) for _, value in curve):
        return None
    of = curve[-1][0]
    worse = [sign * value > sign * result for _, value in curve]
    if worse[-1]:  # it is not worse than where the baseline ends
        return None
    # A noisy curve passes the result several times: those of its points that are worse count as if they came first.
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
