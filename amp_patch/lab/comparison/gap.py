"""Gap: how far a level's results lie from the baseline's at the same seeds, and how surely."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from amp_patch.lab.comparison import measures

CONFIDENCE = 0.95
_ROUNDING = 1e-12  # a mean this near to 0 is what FP64 rounds its sum to
_MOST_MORE = 100  # so many seeds more nobody runs: the gap is about the margin


@dataclass(frozen=True)
class Gap:
    """Differences between a level's results and the baseline's of the same seeds, in the metric's unit.

    Attributes:
        level, base: the means over the seeds that both have a result of.
        seeds: how many those are.
        mean: of the differences, level less baseline.
        low, high: Student's interval of that mean at CONFIDENCE; None where there is no spread to tell it by: with one
            seed, or a script that does not use its seeds.
        sign: 1 where more of the metric is worse, -1 where less is.
        margin: up to which worse counts as good.
        worse_from: beyond which it counts as worse: the margin, or more where the baseline's result is next to nothing
            beside what its training gained.
        decorrelated: whether the differences spread as much as the baseline's own seeds do: two runs of one seed are
            then as far apart as runs of two.
        more_seeds: how many more would tell, if they spread as these do; None where so many would not, or it is told.
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
        """ "as good" where the whole interval lies below the margin, "worse" where it lies above `worse_from`, "better"
        where it lies as far on the other side; else None.
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
        """Whether it is surely beyond the margin, and not surely beyond `worse_from`."""
        return self.told is None and self._least > self.margin

    @property
    def is_loss(self) -> bool:
        """Whether it is surely worse than the baseline, by how much so ever."""
        return self._least > 0

    def share(self, value: float | None) -> float | None:
        """Of the baseline's mean; None where that is 0."""
        return None if value is None or not self.base else value / abs(self.base)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: with what is told, and with mean, low, high and margin in per cent of the baseline's mean."""
        keys = {"mean_percent": self.mean, "low_percent": self.low, "high_percent": self.high}
        percents = {}
        for key, value in {**keys, "margin_percent": self.margin}.items():
            share = self.share(value)
            percents[key] = None if share is None else 100 * share
        return {**asdict(self), **percents, "told": self.told}

    @property
    def _least(self) -> float:
        """The end of the interval on the better side; 0 without an interval."""
        return min(self.sign * (self.low or 0.0), self.sign * (self.high or 0.0))


def gap(
    ours: Sequence[float], theirs: Sequence[float], *, sign: int, margin: float, gained: float, has_spread: bool
) -> Gap:
    """
    Args:
        ours, theirs: the results of the level and of the baseline, of the same seeds in the same order.
        margin: as a share of the baseline's mean.
        gained: what the baseline's training gained; 0 where that is not known. A gap counts as worse only where it is
            also beyond this share of it: of a loss that ends next to 0 every difference is many per cent.
        has_spread: whether the seeds tell how far chance moves a result.
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
    """The fewest seeds more of which the interval would lie on one side of the margin."""
    worse = found.sign * found.mean
    distance = abs(worse - (found.margin if worse <= found.worse_from else found.worse_from))
    spread = measures.spread(differences)
    for more in range(1, _MOST_MORE + 1):
        if measures.half_width(spread, found.seeds + more, CONFIDENCE) < distance:
            return more
    return None
