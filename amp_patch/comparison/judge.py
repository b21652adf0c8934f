"""The test of a level against the baseline, which decides its `Finding`. verdict.py puts the finding into words.

`Comparison.test` describes the test in words.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import NamedTuple

from amp_patch.comparison import measures
from amp_patch.comparison.finding import Collapse, Finding, Lost, Skips
from amp_patch.comparison.gap import Gap, gap
from amp_patch.comparison.level_result import LevelResult, same_losses, seeds_change_nothing
from amp_patch.comparison.measures import LOSS
from amp_patch.diagnose.recording.run import INTERRUPTED, Run

SIGNIFICANCE = 0.05
# A level is not recommended if a run skipped more than half of its steps, or more than this share of them and more than
# this number: 24 halvings reduce the largest dynamic scale, 2**24, to 1.
SKIPPED_SHARE, SKIPPED_STEPS = 0.1, 24
# A run has collapsed if its result is worse than the baseline's worst seed by more than COLLAPSED_RANGES times the
# range of the baseline's seeds, and by more than COLLAPSED_SHARE of the improvement over the baseline's training. For
# results that are all drawn from one normal distribution, that happens in a few of 1000 comparisons if the training
# improves nothing, and in none if it improves much.
COLLAPSED_RANGES, COLLAPSED_SHARE = 10, 0.5
# If a metric is logged once, its value at the start of the training is unknown. This share of the baseline's mean then
# replaces COLLAPSED_SHARE of the improvement.
_COLLAPSED_BY = 0.1
# A level is too good if all of its runs are better than the baseline's best seed by more than TOO_GOOD_RANGES times
# the range of the baseline's seeds, and by more than TOO_GOOD_SHARE of the improvement over the baseline's training and
# of the baseline's result. With one seed, which has no range, by more than COLLAPSED_SHARE of the improvement.
TOO_GOOD_RANGES, TOO_GOOD_SHARE = 3, 0.1
_LESS_IS_BETTER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae", "fid")  # parts of metrics' names
_CURVE = 10  # with one seed, a baseline with fewer losses than this gives no bound beyond which a run has collapsed


class Terms(NamedTuple):
    """The attributes of a `Comparison` that `judge` needs to test a level."""

    metric: str
    maximize: bool
    margin: float

    @property
    def sign(self) -> int:
        """1 if more of the metric is worse, -1 if less is."""
        return -1 if self.maximize else 1


def judge(level: LevelResult, base: LevelResult | None, terms: Terms, comparable: bool) -> Finding:
    """Test a level against the baseline.

    Args:
        base: the level that the others are compared with; None if no level has figures.
        comparable: `Comparison.comparable`.
    """
    found = Finding(
        "failed" if not level.runs else "baseline" if comparable and level is base else "alone",
        diverged=_lost(level, base, terms.metric),
        skips=_skips(level),
        fallen_scale=_fallen_scale(level),
        faults=[run for run in level.failed if run.error_kind != INTERRUPTED],
        lost_updates=level.lost_updates if level.loses_updates else None,
    )
    if not level.runs or base is None or level is base:
        return found
    return _beside(level, base, found, terms)


def _beside(level: LevelResult, base: LevelResult, found: Finding, terms: Terms) -> Finding:
    seeds = [seed for seed in level.finite if seed in base.finite]
    if not seeds:
        return replace(found, kind="differs" if found.diverged else "undecided")
    ours, theirs = [level.finite[seed] for seed in seeds], [base.finite[seed] for seed in seeds]
    metric, sign = terms.metric, terms.sign
    sums = metric == LOSS and any(run.objectives > 1 for run in (*level.runs, *base.runs))
    apart = gap(
        ours,
        theirs,
        sign=sign,
        margin=terms.margin,
        gained=0.0 if sums else max(0.0, _gained(base, metric, sign) or 0.0),
        has_spread=not sums and not has_no_spread(base),
    )
    p = measures.paired_t_test(ours, theirs) if len(seeds) > 1 else None
    found = replace(found, gap=apart, p=p)
    wrong_way = _worsened(base, metric, sign)
    if not (sums or wrong_way):
        found = replace(found, collapsed=_collapsed(level, base, metric, sign))
    if found.diverged or found.collapsed:
        return replace(found, kind="differs")
    of_seed = {run.seed: run for run in base.runs}
    if ours == theirs and all(same_losses(run, of_seed[run.seed]) for run in level.runs if run.seed in seeds):
        return replace(found, kind="within", to_the_bit=True)
    why = "sum" if sums else "direction" if wrong_way else "around 0" if metric == LOSS and _around_0(base) else ""
    if why or _too_good(level, base, metric, sign):
        return replace(found, kind="unjudged", unjudged=why or "too good")
    rounding = max(measures.loss_step(each, apart.level) for each in (level.runs, base.runs)) if metric == LOSS else 0.0
    if rounding and abs(apart.mean) <= rounding:
        found = replace(found, kind="within", rounding=rounding)
    if has_no_spread(base):
        return replace(found, kind="undecided")
    if found.rounding is not None:
        return found
    return _by_gap(found, apart, base)


def _by_gap(found: Finding, apart: Gap, base: LevelResult) -> Finding:
    """Return `found` with its kind: by the interval of the gap `apart` if that decides, else by the range of seeds.

    The range is that of the baseline's results over its seeds. If the runs have decorrelated or the gap is slight
    (`by_range`), more seeds would not make the interval decide: the kind is then "within", "differs", "no worse" or
    "undecided". Otherwise more seeds may decide, and a level inside the range is "so far" as good.
    """
    if apart.told is not None:
        return replace(found, kind="within" if apart.told == "as good" else "differs", better=apart.told == "better")
    by_range = apart.decorrelated or apart.is_slight
    found = replace(found, by_range=by_range)
    if min(base.finite.values()) <= apart.level <= max(base.finite.values()) and (by_range or not apart.is_loss):
        return replace(found, kind="within" if by_range else "so far")
    better = apart.sign * apart.mean < 0
    if by_range and found.p is not None and found.p < SIGNIFICANCE:
        return replace(found, kind="differs", better=better)
    return replace(found, kind="no worse" if better and found.p is not None else "undecided")


def has_no_spread(base: LevelResult) -> bool:
    """Return whether the baseline does not show how far chance moves a result: it has one seed, or equal results."""
    return len(base.finite) < 2 or seeds_change_nothing(base)


def _collapsed(level: LevelResult, base: LevelResult, metric: str, sign: int) -> Collapse | None:
    """Find the runs of a level whose results are finite, but worse than chance or rounding explains.

    None if there are no such runs, or if the baseline gives no bound.

    Args:
        sign: 1 if more of the metric is worse, -1 if less is.
    """
    of_seeds, bound = not has_no_spread(base), None
    if not of_seeds and metric == LOSS:
        bound = _bound_of_curve(base, sign)
    elif of_seeds:
        figures = [sign * figure for figure in base.finite.values()]
        worst, width = max(figures), max(figures) - min(figures)
        gained = _gained(base, metric, sign)
        if gained is not None:
            lost = COLLAPSED_SHARE * max(0.0, gained)
        else:
            lost = _COLLAPSED_BY * abs(statistics.mean(figures))
        by = max(COLLAPSED_RANGES * width, lost)
        bound = worst + by if by > 0 else None
    if bound is None:
        return None
    beyond = {seed: figure for seed, figure in level.finite.items() if sign * figure > bound}
    return Collapse([*beyond], [*beyond.values()], of_seeds) if beyond else None


def _gained(base: LevelResult, metric: str, sign: int) -> float | None:
    """Return how much better the metric was at the end of the baseline's training than at its start.

    The start is the median over the seeds, the end the result of the worst seed. Negative if the training made the
    metric worse. None if the metric at the start is unknown for all runs.
    """
    starts = [run.loss[:1] if metric == LOSS else _first_logged(run, metric) for run in base.runs]
    known = [sign * value for start in starts for value in start if math.isfinite(value)]
    return statistics.median(known) - max(sign * figure for figure in base.finite.values()) if known else None


def _worsened(base: LevelResult, metric: str, sign: int) -> bool:
    """Return whether the baseline's training made a logged metric worse, in all seeds by more than these lie apart.

    The metric then has the other direction, as an accuracy without `--maximize`. False if its name says that it has the
    direction asked for: a held-out loss may rise because the baseline overfits.
    """
    if metric == LOSS or any(word in metric.lower() for word in _LESS_IS_BETTER) is (sign == 1):
        return False
    gained = _gained(base, metric, sign)
    width = max(base.finite.values()) - min(base.finite.values())
    return gained is not None and -gained > max(2 * width, _COLLAPSED_BY * abs(statistics.mean(base.finite.values())))


def _around_0(base: LevelResult) -> bool:
    """Return whether the baseline's loss changes its sign, and falls by less than it varies from step to step."""
    for run in base.runs:
        losses = [loss for loss in run.loss if math.isfinite(loss)]
        half = len(losses) // 2
        if half < _CURVE or not min(losses) < 0 < max(losses):
            return False
        if statistics.mean(losses[:half]) - statistics.mean(losses[half:]) > statistics.pstdev(losses[half:]):
            return False
    return True


def _too_good(level: LevelResult, base: LevelResult, metric: str, sign: int) -> bool:
    """Return whether a level is better than rounding or chance explains (`TOO_GOOD_RANGES`).

    False if the baseline trains low-precision weights: masters may then make a level much better.
    """
    if base.low_weights:
        return False
    figures = [sign * figure for figure in base.finite.values()]
    mean, gained = abs(statistics.mean(figures)), _gained(base, metric, sign)
    gained = mean if gained is None or gained <= 0 else gained
    if has_no_spread(base):
        by = COLLAPSED_SHARE * gained
    else:
        by = max(TOO_GOOD_RANGES * (max(figures) - min(figures)), TOO_GOOD_SHARE * gained)
    best = min(figures) - max(by, TOO_GOOD_SHARE * mean)
    return max(sign * figure for figure in level.finite.values()) < best


def _bound_of_curve(base: LevelResult, sign: int) -> float | None:
    """Return the loss beyond which a run has collapsed, if the baseline has one seed.

    It is the worst loss of any step of the baseline, plus the range from its best to its worst loss. None if the
    baseline has fewer than `_CURVE` losses, or if all are equal.
    """
    losses = [sign * loss for run in base.runs for loss in run.loss if math.isfinite(loss)]
    return 2 * max(losses) - min(losses) if len(losses) >= _CURVE and max(losses) > min(losses) else None


def _first_logged(run: Run, metric: str) -> list[float]:
    """Return a list of the first value of the metric that a run logged; an empty list if it logged fewer than two."""
    values = [value for _, value in run.logged.get(metric, [])]
    return values[:1] if len(values) > 1 else []


def _lost(level: LevelResult, base: LevelResult | None, metric: str) -> list[Lost]:
    reasons: dict[tuple[str, int | None, bool, float | None], list[int]] = {}
    for run, figure in zip(level.runs, level.final, strict=True):
        if math.isfinite(figure):
            continue
        step = next((step for step, loss in enumerate(run.loss) if not math.isfinite(loss)), None)
        if step is None or metric != LOSS:
            kind, step = ("not finite" if metric != LOSS and metric in run.logged else "missing"), None
        else:
            kind = "diverged"
        as_base = base is not None and level is not base and run.seed in set(base.seeds) - set(base.finite)
        reasons.setdefault((kind, step, as_base, run.lost_eps), []).append(run.seed)
    return [Lost(*reason, seeds) for reason, seeds in reasons.items()]


def _skips(level: LevelResult) -> Skips | None:
    several = [Skips(sum(run.skipped), run.steps, run.seed) for run in level.runs]
    much = any(n > steps / 2 or n > max(SKIPPED_STEPS, SKIPPED_SHARE * steps) for n, steps, _ in several)
    return max(several, key=lambda each: each.skipped / max(1, each.steps)) if much else None


def _fallen_scale(level: LevelResult) -> float | None:
    return min(
        (run.scale[-1] for run in level.runs if run.scale and run.scale[-1] < min(1.0, run.scale[0])), default=None
    )
