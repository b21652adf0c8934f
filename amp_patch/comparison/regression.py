"""Regressions: what has become worse from an earlier comparison of a training to a new one."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from amp_patch.comparison import measures
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.gap import CONFIDENCE, Gap
from amp_patch.comparison.level_result import LevelResult, failures, same_losses
from amp_patch.comparison.unjudged import CONSTANT, in_words
from amp_patch.diagnose.recording.run import Run
from amp_patch.diagnose.wording import percent, signed_percents

SKIPPED = 0.01  # a level regresses if it skips a share of the steps that is larger by more than this
FALLEN = 8.0  # a level regresses if its loss scale ends lower by this factor

# Bytes of a run -> whether fewer are a regression too: fewer masters, or a layer more in FP16, lose precision.
_BYTES = {"weights": True, "masters": True, "state": True, "gradients": False, "activations": False}


class Regression(NamedTuple):
    """A level that is worse than in the earlier comparison, and by how much, in words."""

    level: str
    what: str


class Answers(NamedTuple):
    """What is known of the levels since an earlier comparison.

    Attributes:
        worse: the regressions.
        undecided: levels of whose gap the seeds decide nothing, with the growth in words.
        missing: levels whose results were not compared, with the reason.
        as_good: the names of the other levels.
    """

    worse: list[Regression]
    undecided: list[Regression]
    missing: list[Regression]
    as_good: list[str]


def regressions(before: Comparison, now: Comparison) -> list[Regression]:
    """Return what has become worse since `before`, by more than the margin of `now`.

    A level regresses if it fails, diverges or collapses and did not before; if it was as good and is not to be used
    now; if its gap to the baseline has grown by more than the margin, by Student's interval of the differences at the
    same seeds; if its weights, masters or optimizer state have another size, or its gradients or activations a larger
    one; if it skips 1 % more of its steps; or if its loss scale ends at an eighth of its earlier one or lower. Times
    are not compared. With one seed gaps are not compared.
    """
    pairs = _pairs(before, now)
    return [Regression(one.level, what) for one, other in pairs for what in _of_level(one, other, before, now)]


def answers(before: Comparison, now: Comparison, named: str = "") -> Answers:
    """Return the answer for each level except the baseline; `named` is the name of the earlier comparison.

    Results are compared by the growth of the gap at the same seeds. Results of one seed are compared if every run of
    the level and the baseline has the losses, to the bit, and the metric of the earlier run with its level and seed.
    """
    found = Answers(regressions(before, now), [], [], [])
    regressed = {each.level for each in found.worse}
    known = {(run.level, run.seed): run for run in before.runs}
    pairs = {level.level: (level, later) for level, later in _pairs(before, now)}
    for later in now.levels:
        name = later.level
        if name in regressed or later is now.baseline:
            continue
        if name not in pairs:
            found.missing.append(Regression(name, f"not in {named}"))
            continue
        growth = _growth(pairs[name][0], later, before, now)
        runs = [*later.all_runs, *(now.baseline.runs if now.baseline is not None else [])]
        earlier = [known.get((run.level, run.seed), Run("")) for run in runs]
        same = all(same_losses(*each) for each in zip(runs, earlier, strict=True))
        why = later.finding.unjudged
        if why and (why == CONSTANT or not same):
            found.missing.append(Regression(name, "; ".join(in_words(why, later, now.baseline or later))))
        elif same and [run.logged.get(now.metric) for run in runs] == [run.logged.get(now.metric) for run in earlier]:
            found.as_good.append(name)
        elif growth is None:
            found.missing.append(Regression(name, "one seed says nothing of its gap; compare three seeds or more"))
        elif growth.told is None:
            grown = f"its gap has grown by {signed_percents(growth.mean)[0]} %"
            found.undecided.append(Regression(name, f"after {growth.seeds} seeds: {grown}"))
        else:
            found.as_good.append(name)
    return found


def are_decided(before: Comparison, now: Comparison) -> bool:
    """Return whether further seeds would change no level's answer: the test of `amp.assert_level`, on growths of gaps.

    A level is decided if it has regressed, if Student's interval of the growth of its gap is within the margin, or if
    its losses are the earlier ones. Levels that the earlier comparison lacks do not count.
    """
    found, trained = answers(before, now), {level.level for level in before.levels}
    return not (found.undecided or any(each.level in trained for each in found.missing))


def _pairs(before: Comparison, now: Comparison) -> list[tuple[LevelResult, LevelResult | None]]:
    later = {level.level: level for level in reversed(now.levels)}
    return [(level, later.get(level.level)) for level in before.levels if level.runs]


def _of_level(level: LevelResult, later: LevelResult | None, before: Comparison, now: Comparison) -> list[str]:
    if later is None:
        return ["the level was not trained"]
    if not later.runs:
        return [f"failed: {each}" for each in failures(later, short=True)]
    found = []
    if later.dtype != level.dtype:
        found.append(f"its type is {later.dtype}, and was {level.dtype}")
    for seed in sorted((set(level.finite) - set(later.finite)) & {run.seed for run in now.runs}):
        found.append(f"seed {seed} has no finite result")
    growth = _growth(level, later, before, now)
    if growth is not None and now.baseline is not None and growth.told == "worse":
        gap, earlier = signed_percents(growth.level), signed_percents(growth.base)
        found.append(f"its gap to {now.baseline.level} is {gap[0]} %, and was {earlier[0]} % before")
    for name, either_way in _BYTES.items():
        one, other = (measures.median(getattr(run, name) for run in each.runs) for each in (level, later))
        if one is None or other is None:
            continue
        if (abs(other - one) if either_way else other - one) > now.margin * one:
            called = "optimizer state" if name == "state" else name
            found.append(f"{called}: {other:,.0f} bytes, and {one:,.0f} before")
    one, other = (sum(each.skips) / max(1, sum(run.steps for run in each.runs)) for each in (level, later))
    if other - one > SKIPPED:
        found.append(f"{percent(other)} of the steps were skipped, and {percent(one)} before")
    scales = [measures.median(each.scales) for each in (level, later)]
    if scales[0] and scales[1] and scales[1] <= scales[0] / FALLEN:
        found.append(f"its loss scale ended at {scales[1]:g}, and at {scales[0]:g} before")
    was, is_now = level.finding, later.finding
    if not found and ((is_now.collapsed and not was.collapsed) or (is_now.rejected and was.usable)):
        found.append(f"do not use it: {later.verdict.reason}")
    return found


def _growth(level: LevelResult, later: LevelResult, before: Comparison, now: Comparison) -> Gap | None:
    """Return the growth of the gap to the baseline, as a share of its result.

    None with fewer than two equal seeds, or if the level is not judged.
    """
    base = now.baseline
    if before.baseline is None or base is None or level.level == base.level or later.finding.unjudged:
        return None
    earlier, gaps = _gaps(level, before.baseline), _gaps(later, base)
    grown = [gaps[seed] - earlier[seed] for seed in earlier if seed in gaps]
    if len(grown) < 2:
        return None
    half = measures.half_width(measures.spread(grown), len(grown), CONFIDENCE)
    mean, was, found = (statistics.mean(each) for each in (grown, earlier.values(), gaps.values()))
    sign, margin = -1 if now.maximize else 1, now.margin
    return Gap(found, was, len(grown), mean, mean - half, mean + half, sign, margin, worse_from=margin)


def _gaps(level: LevelResult, base: LevelResult) -> dict[int, float]:
    """Return {seed: difference of the results of the level and the baseline, as a share of the baseline's mean}."""
    unit = abs(base.mean or 1.0)
    return {seed: (result - base.finite[seed]) / unit for seed, result in level.finite.items() if seed in base.finite}
