"""Gap: the difference between a level's results and the baseline's at the same seeds, with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from amp_patch.comparison import measures

CONFIDENCE = 0.95
_ROUNDING = 1e-12  # a mean difference below this share of the results counts as 0: FP64 rounding can cause it
MOST_SEEDS = 10  # if a gap needs more seeds than this in all, the results are too noisy, and no number is named


@dataclass(frozen=True)
class Gap:
    """Differences between a level's results and the baseline's at the same seeds, in the metric's unit.

    Attributes:
        level, base: the mean results over the seeds that both have a result for.
        seeds: the number of these seeds.
        mean: the mean difference, level minus baseline.
        low, high: Student's interval of that mean at CONFIDENCE; None if there is no spread to compute it from, because
            there is one seed or the script does not use its seeds.
        sign: 1 if more of the metric is worse, -1 if less is.
        margin: a level that is worse by at most this counts as good.
        worse_from: a level that is worse by more than this counts as worse: the margin, or the same share of the
            baseline's improvement over its training if that is more. If a loss ends near 0, every difference is many
            per cent of it.
        decorrelated: whether the differences spread as much as the baseline's own results: two runs with the same
            seed then differ as much as two runs with different seeds, so the seeds no longer pair the runs.
        more_seeds: the number of additional seeds with which the interval would decide, if the differences keep their
            spread; None if the gap is decided, or if `MOST_SEEDS` seeds would not be enough.
    """

    level: float
    base: float
    seeds: int
    mean: float
    low: float | None = None
    high: float | None = None
    sign: int = 1
    margin: float = 0.0
    worse_from: float = 0.0
    decorrelated: bool = False
    more_seeds: int | None = None

    @property
    def told(self) -> str | None:
        """The decision of the interval; None if there is no interval, or if it allows several decisions.

        "as good" if the whole interval is at most the margin, "worse" if it is beyond `worse_from`, "better" if it is
        beyond `worse_from` on the better side of 0.
        """
        if self.low is None or self.high is None:
            return None
        least, most = sorted((self.sign * self.low, self.sign * self.high))
        if least > self.worse_from:
            return "worse"
        if most < -self.worse_from:
            return "better"
        return "as good" if most <= self.margin else None

    @property
    def is_slight(self) -> bool:
        """Whether the whole interval is worse than the margin, but not the whole of it worse than `worse_from`.

        The level is then surely worse, but by little of what the training improved. False if there is no interval.
        """
        return self.told is None and self._least > self.margin

    @property
    def is_loss(self) -> bool:
        """Whether the whole interval is on the worse side of 0; False if there is no interval."""
        return self._least > 0

    @property
    def excludes_0(self) -> bool:
        """Whether the interval leaves out 0, as a paired t-test rejects chance; False if there is no interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def is_noisy(self) -> bool:
        """Whether the interval decides nothing, and would not with `MOST_SEEDS` seeds."""
        undecided = self.low is not None and self.told is None and self.more_seeds is None
        return undecided and (self.seeds >= MOST_SEEDS or not self.is_slight)

    def share(self, value: float | None) -> float | None:
        """Return `value` as a share of the baseline's mean; None if that mean is 0."""
        return None if value is None or not self.base else value / abs(self.base)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for JSON, `told`, and mean, low, high and margin in per cent of the baseline's mean."""
        keys = {"mean_percent": self.mean, "low_percent": self.low, "high_percent": self.high}
        percents = {}
        for key, value in {**keys, "margin_percent": self.margin}.items():
            share = self.share(value)
            percents[key] = None if share is None else 100 * share
        return {**asdict(self), **percents, "told": self.told}

    @property
    def _least(self) -> float:
        """The end of the interval on the better side, with the sign that is positive for worse; 0 without interval."""
        return min(self.sign * (self.low or 0.0), self.sign * (self.high or 0.0))


def gap(
    ours: Sequence[float], theirs: Sequence[float], *, sign: int, margin: float, gained: float, has_spread: bool
) -> Gap:
    """Compute the gap between a level and the baseline.

    Args:
        ours, theirs: the results of the level and of the baseline, with the same seeds in the same order.
        sign: the attribute of `Gap`.
        margin: the margin as a share of the baseline's mean, and of `gained`.
        gained: how much the baseline's training improved the metric; 0 if unknown. A gap counts as worse only if it is
            also larger than `margin * gained`: if a loss ends near 0, every difference is many per cent of it.
        has_spread: whether the baseline's results with different seeds show how far chance moves a result.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    level, base, mean = (statistics.mean(each) for each in (ours, theirs, differences))
    if abs(mean) < _ROUNDING * max(abs(level), abs(base)):
        mean = 0.0
    small = margin * abs(base)
    found = Gap(level, base, len(ours), mean, sign=sign, margin=small, worse_from=max(small, margin * gained))
    if not has_spread or len(ours) < 2:
        return found
    half = measures.half_width(measures.spread(differences), len(ours), CONFIDENCE)
    apart = 0 < measures.spread(theirs) <= measures.spread(differences)
    found = replace(found, low=mean - half, high=mean + half, decorrelated=apart)
    return found if found.told or found.is_slight else replace(found, more_seeds=_more(found, differences))


def _more(found: Gap, differences: Sequence[float]) -> int | None:
    """Estimate how many more seeds would make the interval decide, if the differences keep their mean and spread.

    It decides if it is so narrow that it excludes the limit next to the mean: `worse_from` if the mean is worse than
    that, else the margin. None if more than `MOST_SEEDS` seeds would be needed in all.
    """
    worse = found.sign * found.mean
    distance = abs(worse - (found.margin if worse <= found.worse_from else found.worse_from))
    spread = measures.spread(differences)
    for more in range(1, MOST_SEEDS + 1 - found.seeds):
        if measures.half_width(spread, found.seeds + more, CONFIDENCE) < distance:
            return more
    return None
