"""Results that measure no quality: the reasons for which a level is not judged by them, as data and in words."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from amp_patch.comparison import measures
from amp_patch.comparison.gap import Gap
from amp_patch.comparison.level_result import LevelResult, has_no_spread, left_out, pairs_of
from amp_patch.comparison.measures import LOSS
from amp_patch.diagnose.recording.run import LOW_TYPES, Run
from amp_patch.diagnose.wording import counted, two

# If a metric is logged once, its value at the start of the training is unknown. This share of the baseline's mean then
# replaces a share of the improvement.
BY_LOGGED_ONCE = 0.1
# A level is too good if all of its runs are better than the baseline's best seed by more than TOO_GOOD_RANGES times
# the range of the baseline's seeds, and by more than TOO_GOOD_SHARE of the improvement over the baseline's training and
# of the baseline's result. With one seed, which has no range, by more than ONE_SEED_SHARE of the improvement.
TOO_GOOD_RANGES, TOO_GOOD_SHARE, ONE_SEED_SHARE = 3, 0.1, 0.5
CURVE = 10  # with fewer losses than this a run has no curve: its range and its direction are not known
_RISES = 3  # a loss rises if its result is above the first by more than this many deviations of its second half
_QUARTILES = 1.35  # deviations between the quartiles of a normal distribution
_CONSTANT = 1e-6  # a figure that varies by at most this share of itself is constant: the rest is rounding in FP32
_ROUNDING = 2.0**-8  # first weights that lie further apart than this share of them are not only rounded to BF16
_FIRST = 3  # steps in which the weights of two levels are nearly the same
_STEPS_OF_TYPE = 4  # losses that lie further apart in these steps than so many steps of the type are not only rounded
_LESS_IS_BETTER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae", "fid")  # parts of metrics' names

LEAST_STEPS, FEW_STEPS = 10, 30  # fewer steps than the first decide nothing; fewer than the second, little
FP64, CONSTANT, SHORT, START, FROZEN = "FP64", "constant", "few steps", "start", "frozen"
UNTOLD = (CONSTANT, START, FROZEN)  # reasons for which also equal losses tell nothing
# Reasons for which the baseline's results tell nothing of a collapse, and reasons that lie in the level, not in them.
NO_BOUND = ("sum", "both ways", "rises", "direction", *UNTOLD)
OF_LEVEL = ("left out", "length", "rounded", "too good")
_BY_METRIC = "give a figure of quality to amp.log, and judge by --metric"
# `Finding.unjudged` -> why results are not judged.
_WHY = {
    "sum": "a sum of the losses of several optimizers, as a GAN's, tells nothing of quality",
    "both ways": "some parameters maximize the loss, others minimize it: it tells nothing of quality",
    "rises": "the baseline's training makes the loss larger",
    "direction": "the baseline's training made it worse: with --maximize more of it is better, without it less is",
    "around 0": "the baseline's loss changes its sign and does not fall, as a policy gradient's",
    CONSTANT: "the baseline's is the same at every step: it measures nothing",
    FP64: "the script's weights are FP64, which this level leaves as they are: every loss is O0's",
    SHORT: f"it has fewer than {LEAST_STEPS} steps",
    START: "with the same seed it began with other weights, or another batch, than the baseline",
    FROZEN: "the baseline's steps change no weight: nothing was trained",
    "left out": "{idle} forwards more than O0's led to no step, as if batches were left out",
    "outlier": "the baseline itself collapsed with one seed, and the level did not: chance decides that",
    "length": "it made {steps} of O0's {of}: by early stopping, a limit of time, or an error that the script catches",
    "scale": "{skipped} of {of} were the search for a loss scale: O0 was as far that many steps before its end",
    "rounded": "from the same weights and batches, first losses lie up to {apart} % apart: its forward rounds the loss",
    "too good": "it is better by more than a rounding explains",
}
# `Finding.unjudged` -> the way out, if it is not a metric.
_WAY_OUT = {
    "rises": "add --maximize if the training maximizes it; if not, {metric}",
    "direction": "add --maximize, or leave it out",
    FP64: "make the model and its inputs FP32, and compare again",
    SHORT: f"train for at least {FEW_STEPS} steps",
    START: "turn off what goes on from a checkpoint of another run, and seed each generator, numpy's default_rng() too",
    FROZEN: "look at the learning rate, and at the gradients",
    "left out": "look into its log",
    "outlier": "make the training steady first, by a warm-up or a smaller learning rate",
    "length": "look into its log; if the training ends by itself, {metric}",
    "scale": "train for more steps",
    "rounded": "compute the loss from FP32 numbers, or {metric}",
    "too good": "look whether all runs train on the same batches, and none goes on from another's checkpoint",
}


class Terms(NamedTuple):
    """The attributes of a `Comparison` that `judge` needs to test a level."""

    metric: str
    maximize: bool
    margin: float
    steps: int

    @property
    def sign(self) -> int:
        """1 if more of the metric is worse, -1 if less is."""
        return -1 if self.maximize else 1


def in_words(why: str, level: LevelResult, base: LevelResult) -> tuple[str, str]:
    """Put `Finding.unjudged` into words: why the level is not judged, and the way out, without full stops."""
    pairs = pairs_of(level, base)
    steps, of = min(((run.steps, other.steps) for other, run in pairs), default=(0, 0))
    skipped, apart = max(level.skips, default=0), two(100 * first_losses_apart(pairs))
    idle = max((left_out(run, other) for other, run in pairs), default=0)
    said = _WHY[why].format(steps=steps, of=counted(of, "step"), skipped=skipped, apart=apart, idle=idle)
    logged = [*dict.fromkeys(name for run in base.runs for name in run.logged)]
    by_metric = f"judge by a figure that the script logs: --metric {' or '.join(logged)}" if logged else _BY_METRIC
    return said, _WAY_OUT.get(why, "{metric}").format(metric=by_metric)


def by_figures(level: LevelResult, base: LevelResult, terms: Terms) -> str:
    """Return why the figures of the level and the baseline measure no quality, whatever their gap; "" if they may."""
    every, metric, pairs = [*level.runs, *base.runs], terms.metric, pairs_of(level, base)
    if _is_constant(base, metric) and (metric == LOSS or {*level.finite.values()} == {*base.finite.values()}):
        return CONSTANT
    if any(_begins_elsewhere(run, other) for other, run in pairs):
        return START
    if _is_frozen(base):
        return FROZEN
    if any(left_out(run, other) for other, run in pairs):
        return "left out"
    if metric == LOSS and any(run.objectives > 1 for run in every):
        return "sum"
    if metric == LOSS and any(run.maximized == "some" for run in every):
        return "both ways"
    if _worsened(base, metric, terms.sign):
        return "rises" if metric == LOSS and terms.sign == 1 else "direction"
    if metric == LOSS and _around_0(base):
        return "around 0"
    shorter = any(run.steps < other.steps for other, run in pairs)
    return "length" if metric == LOSS and shorter and len({run.steps for run in base.runs}) == 1 else ""


def gained(base: LevelResult, metric: str, sign: int) -> float | None:
    """Return how much better the metric was at the end of the baseline's training than at its start.

    The start is the median over the seeds, the end the result of the worst seed. Negative if the training made the
    metric worse. None if the metric at the start is unknown for all runs.
    """
    starts = [run.loss[:1] if metric == LOSS else _first_logged(run, metric) for run in base.runs]
    known = [sign * value for start in starts for value in start if math.isfinite(value)]
    return statistics.median(known) - max(sign * figure for figure in base.finite.values()) if known else None


def is_too_good(level: LevelResult, base: LevelResult, metric: str, sign: int) -> bool:
    """Return whether a level is better than rounding or chance explains (`TOO_GOOD_RANGES`).

    False if the baseline trains low-precision weights: masters may then make a level much better.
    """
    if base.own_weights not in ("", FP64):
        return False
    figures = [sign * figure for figure in base.finite.values()]
    mean, improved = abs(statistics.mean(figures)), gained(base, metric, sign)
    improved = mean if improved is None or improved <= 0 else improved
    if has_no_spread(base):
        by = ONE_SEED_SHARE * improved
    else:
        by = max(TOO_GOOD_RANGES * (max(figures) - min(figures)), TOO_GOOD_SHARE * improved)
    best = min(figures) - max(by, TOO_GOOD_SHARE * mean)
    return max(sign * figure for figure in level.finite.values()) < best


def by_gap(apart: Gap, level: LevelResult, base: LevelResult, terms: Terms) -> str:
    """Return why a gap that lies beyond the limits does not come from the training at the level; "" if it may.

    "scale": the baseline was as far, as many steps before its end as the
    level skipped. "rounded": the first losses, from nearly the same weights, lie as far apart.
    """
    pairs = pairs_of(level, base)
    if terms.metric != LOSS:
        return ""
    worse, behind = apart.sign * apart.mean, apart.sign * _behind(pairs, terms.steps)
    if behind > 0 and apart.margin < worse <= apart.worse_from + behind:
        return "scale"
    first, step = first_losses_apart(pairs), 2.0 ** (1 - LOW_TYPES.get(level.dtype or "", 99))
    if abs(worse) > apart.worse_from and abs(apart.mean) <= first * abs(apart.base) and first <= _STEPS_OF_TYPE * step:
        return "rounded"
    return ""


def first_losses_apart(pairs: list[tuple[Run, Run]]) -> float:
    """Return how far the first losses of runs with the same seed lie apart at most, as a share of the baseline's."""
    first = [each for other, run in pairs for each in zip(run.loss[:_FIRST], other.loss[:_FIRST], strict=False)]
    return max((abs(a / b - 1) for a, b in first if b and math.isfinite(a) and math.isfinite(b)), default=0.0)


def _behind(pairs: list[tuple[Run, Run]], steps: int) -> float:
    """Return how far the baseline's loss moves, near its end, in as many steps as the level has skipped."""
    before = max(1, steps // 8)
    moved = [
        sum(run.skipped) * (measures.final(other, LOSS, steps - before) - measures.final(other, LOSS, steps)) / before
        for other, run in pairs
    ]
    known = [each for each in moved if math.isfinite(each)]
    return statistics.mean(known) if known else 0.0


def _is_constant(base: LevelResult, metric: str) -> bool:
    """Return whether each run of the baseline has several figures, which are all the same."""
    for run in base.runs:
        values = run.loss if metric == LOSS else [value for _, value in run.logged.get(metric, [])]
        if len(values) < 2 or not max(values) - min(values) <= _CONSTANT * max(map(abs, values)):
            return False
    return True


def _begins_elsewhere(run: Run, other: Run) -> bool:
    """Return whether the first weights and inputs of two runs are further apart than rounding explains."""
    known = len(run.start) == len(other.start) and all(map(math.isfinite, run.start))
    return known and math.dist(run.start, other.start) > _ROUNDING * math.hypot(*other.start)


def _is_frozen(base: LevelResult) -> bool:
    """Return whether the steps of the baseline's runs were measured, and none of them changed a weight."""
    counts = [count for run in base.runs for each in run.updates for count in each.counts.values()]
    return bool(counts) and not any(changed for changed, _ in counts)


def _worsened(base: LevelResult, metric: str, sign: int) -> bool:
    """Return whether the baseline's training made the metric worse, in all seeds by more than chance explains.

    The metric then has the other direction, as an accuracy without `--maximize`. False if the name of a logged metric
    says that it has the direction asked for: a held-out loss may rise because the baseline overfits.
    """
    if metric == LOSS:
        return all(_rises([sign * loss for loss in run.loss]) for run in base.runs)
    if any(word in metric.lower() for word in _LESS_IS_BETTER) is (sign == 1):
        return False
    improved = gained(base, metric, sign)
    width = max(base.finite.values()) - min(base.finite.values())
    by = max(2 * width, BY_LOGGED_ONCE * abs(statistics.mean(base.finite.values())))
    return improved is not None and -improved > by


def _rises(losses: list[float]) -> bool:
    half, end = losses[len(losses) // 2 :], losses[-max(1, len(losses) // 10) :]
    if len(losses) < CURVE or not all(map(math.isfinite, losses)):
        return False
    low, _, high = statistics.quantiles(half, n=4, method="inclusive")  # a loss that explodes has no deviation
    return statistics.median(end) - losses[0] > _RISES * (high - low) / _QUARTILES


def _around_0(base: LevelResult) -> bool:
    """Return whether the baseline's loss changes its sign, and falls by less than it varies from step to step."""
    for run in base.runs:
        losses = [loss for loss in run.loss if math.isfinite(loss)]
        half = len(losses) // 2
        if half < CURVE or not min(losses) < 0 < max(losses):
            return False
        if statistics.mean(losses[:half]) - statistics.mean(losses[half:]) > statistics.pstdev(losses[half:]):
            return False
    return True


def _first_logged(run: Run, metric: str) -> list[float]:
    """Return a list of the first value of the metric that a run logged; an empty list if it logged fewer than two."""
    values = [value for _, value in run.logged.get(metric, [])]
    return values[:1] if len(values) > 1 else []
