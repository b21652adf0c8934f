"""The test of a level against the baseline, which decides its `Finding`. verdict.py puts the finding into words.

docs/compare.md describes the test.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from amp_patch.comparison import measures, unjudged
from amp_patch.comparison.finding import Collapse, Finding, Lost, Skips
from amp_patch.comparison.gap import Gap, gap
from amp_patch.comparison.level_result import LevelResult, has_no_spread, left_out, pairs_of, same_losses
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.unjudged import BY_LOGGED_ONCE, CURVE, Terms, gained
from amp_patch.diagnose.recording.run import INTERRUPTED

# A level is not recommended if a run skipped more than half of its steps, or more than this share of them and more than
# this number: 24 halvings reduce the largest dynamic scale, 2**24, to 1.
SKIPPED_SHARE, SKIPPED_STEPS = 0.1, 24
# A run has collapsed if its result is worse than the baseline's worst seed by more than COLLAPSED_RANGES times the
# range of the baseline's seeds, and by more than COLLAPSED_SHARE of the improvement over the baseline's training. For
# results that are all drawn from one normal distribution, that happens in a few of 1000 comparisons if the training
# improves nothing, and in none if it improves much.
COLLAPSED_RANGES, COLLAPSED_SHARE = 10, 0.5


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
    metric, sign, why = terms.metric, terms.sign, unjudged.by_figures(level, base, terms)
    sums = why in ("sum", "both ways")
    apart = gap(
        ours,
        theirs,
        sign=sign,
        margin=terms.margin,
        gained=0.0 if sums else max(0.0, gained(base, metric, sign) or 0.0),
        has_spread=not sums and not has_no_spread(base),
    )
    found = replace(found, gap=apart)
    if why not in unjudged.NO_BOUND:
        found = replace(found, collapsed=_collapsed(level, base, metric, sign))
    if found.diverged or found.collapsed:
        return replace(found, kind="differs")
    pairs = [pair for pair in pairs_of(level, base) if pair[0].seed in seeds]
    if why not in unjudged.UNTOLD and ours == theirs and all(same_losses(*pair) for pair in pairs):
        why, found = unjudged.FP64 * (base.own_weights == unjudged.FP64), replace(found, kind="within", to_the_bit=True)
    elif not why and 0 < min(run.steps for run in (*level.runs, *base.runs)) < unjudged.LEAST_STEPS:
        why = unjudged.SHORT
    elif not why and _is_chance(level, base, metric, sign):
        why = "outlier"
    elif not why and unjudged.is_too_good(level, base, metric, sign):
        why = "too good"
    if why or found.to_the_bit:
        return replace(found, kind="unjudged" if why else "within", unjudged=why)
    rounding = max(measures.loss_step(each, apart.level) for each in (level.runs, base.runs)) if metric == LOSS else 0.0
    if rounding and abs(apart.mean) <= rounding:
        found = replace(found, kind="within", rounding=rounding)
    if has_no_spread(base):
        found = replace(found, kind="undecided")
    elif found.rounding is None:
        found = _by_gap(found, apart, base)
    if found.rounding is None and found.skips is None and (found.better or not found.usable):
        why = unjudged.by_gap(apart, level, base, terms)
    return replace(found, kind="unjudged", better=False, unjudged=why) if why else found


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
    if by_range and apart.excludes_0:
        return replace(found, kind="differs", better=better)
    return replace(found, kind="no worse" if better and apart.low is not None else "undecided")


def _is_chance(level: LevelResult, base: LevelResult, metric: str, sign: int) -> bool:
    """Return whether the baseline's worst run has collapsed beside its others, and the level's of that seed has not.

    False with fewer than two others, or if these learn nothing.
    """
    worst = max(base.finite, key=lambda seed: sign * base.finite[seed])
    kept = [(run, figure) for run, figure in zip(base.runs, base.final, strict=True) if run.seed != worst]
    others = replace(base, runs=[run for run, _ in kept], final=[figure for _, figure in kept])
    if len(others.finite) < 2 or _collapsed(base, others, metric, sign) is None:
        return False
    ours = _collapsed(level, others, metric, sign)
    learns = (gained(others, metric, sign) or 1.0) > 0
    return learns and worst in level.finite and (ours is None or worst not in ours.seeds)


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
        improved = gained(base, metric, sign)
        if improved is not None:
            lost = COLLAPSED_SHARE * max(0.0, improved)
        else:
            lost = BY_LOGGED_ONCE * abs(statistics.mean(figures))
        by = max(COLLAPSED_RANGES * width, lost)
        bound = worst + by if by > 0 else None
    if bound is None:
        return None
    beyond = {seed: figure for seed, figure in level.finite.items() if sign * figure > bound}
    return Collapse([*beyond], [*beyond.values()], of_seeds) if beyond else None


def _bound_of_curve(base: LevelResult, sign: int) -> float | None:
    """Return the loss beyond which a run has collapsed, if the baseline has one seed.

    It is the worst loss of any step of the baseline, plus the range from its best to its worst loss. None if the
    baseline has fewer than `CURVE` losses, or if all are equal.
    """
    losses = [sign * loss for run in base.runs for loss in run.loss if math.isfinite(loss)]
    return 2 * max(losses) - min(losses) if len(losses) >= CURVE and max(losses) > min(losses) else None


def _lost(level: LevelResult, base: LevelResult | None, metric: str) -> list[Lost]:
    reasons: dict[tuple[str, int | None, bool, float | None, str], list[int]] = {}
    for run, figure in zip(level.runs, level.final, strict=True):
        if math.isfinite(figure):
            continue
        step = next((step for step, loss in enumerate(run.loss) if not math.isfinite(loss)), None)
        o0 = next((each for each in base.runs if each.seed == run.seed), run) if base is not None else run
        if run.seed in level.stopped:
            idle = left_out(run, o0)
            kind, step = ("left out batches", idle) if idle else ("stopped", run.steps)
        elif step is None or metric != LOSS:
            kind, step = ("not finite" if metric != LOSS and metric in run.logged else "missing"), None
        else:
            kind = "diverged"
        as_base = base is not None and level is not base and run.seed in set(base.seeds) - set(base.finite)
        caught = "" if kind == "diverged" else run.caught
        reasons.setdefault((kind, step, as_base, run.lost_eps, caught), []).append(run.seed)
    return [Lost(*reason, seeds) for reason, seeds in reasons.items()]


def _skips(level: LevelResult) -> Skips | None:
    several = [Skips(sum(run.skipped), run.steps, run.seed) for run in level.runs]
    much = any(n > steps / 2 or n > max(SKIPPED_STEPS, SKIPPED_SHARE * steps) for n, steps, _ in several)
    return max(several, key=lambda each: each.skipped / max(1, each.steps)) if much else None


def _fallen_scale(level: LevelResult) -> float | None:
    return min(
        (run.scale[-1] for run in level.runs if run.scale and run.scale[-1] < min(1.0, run.scale[0])), default=None
    )
