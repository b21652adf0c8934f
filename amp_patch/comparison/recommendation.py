"""The recommendation of a level, and its reasons.

The standing of a level is one word or two on why it is recommended or not: "better", "faster", "failed", "no gain".
`standing` has an ordered list of rules; the name of the first rule that holds for the level is its standing. Headline,
card, summary and rows of a report use the standings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_patch.comparison.level_result import LevelResult, saved_memory
from amp_patch.comparison.measures import ALIKE, Ratio
from amp_patch.comparison.plan import MEMORY, MIN_GAIN, SPEED
from amp_patch.comparison.unjudged import SHORT, in_words
from amp_patch.comparison.verdict import memory_in_words, more_seeds, percent_of, speed_in_words
from amp_patch.diagnose.recording.run import NATIVE
from amp_patch.diagnose.wording import counted, fine_percent, listed, ratio, relative_size, signed

# Standings that recommend a level, the strongest first.
GAINS = ("better", "faster", "smaller", "a little faster")

_NO_GAIN = ("no gain", "not clear", "not timed")  # standings of levels that are as good

# Standing that is no gain -> its phrase in a recommendation of the baseline, in the order of the phrases.
_OF_OTHERS = {
    "slower": "{} {good}",
    "not clear": "{} {good}, but may cost more time than it saves memory",
    "no gain": "{} {good}, but not faster, nor in much less memory",
    "not timed": "{} {good}, but how fast is not known",
    "undecided": "{} cannot be judged yet, {more}",
    "unjudged": "whether {} would do as well its {what} does not say ({unjudged})",
    "no FP32 weights": "{} keeps no FP32 weights, and is for whoever compares it alone",
    "skips": "{} skipped too many steps",
    "differs": "do not use {}",
    "failed with some": "{} failed with some seeds",
    "failed": "{} failed",
    "emulated": "{} {good} in hardware that has it",
}
# `Finding.kind` of a level -> what it would do. Others are as good.
_GOOD = {"so far": "may do as well", "no worse": "did no worse"}


@dataclass(frozen=True)
class Recommendation:
    """The result of `recommend` for two or more levels.

    Attributes:
        level: the recommended level; the baseline if no other level gains anything.
        because: if a level other than the baseline is recommended, {its standing, one of GAINS: [the level]}. If the
            baseline is recommended, {a standing, one of _OF_OTHERS: the other levels with this standing}.
        sure: whether no level is "undecided" or "unjudged" (`Finding.kind`), emulated levels aside.
        so_far: whether the recommendation rests on one seed, which cannot tell chance from a difference.
        what: the name of the compared metric, for the texts.
        standings: (level, dtype) -> `standing`, for every level except the baseline.
        min_gain, goal: the arguments of `recommend`.
    """

    level: LevelResult
    because: dict[str, list[LevelResult]]
    sure: bool
    so_far: bool = False
    what: str = "loss"
    standings: dict[tuple[str, str | None], str] = field(default_factory=dict)
    min_gain: float = MIN_GAIN
    goal: str = SPEED

    def standing(self, level: LevelResult) -> str:
        """Return the standing of a level; "baseline" for the baseline."""
        return self.standings.get((level.level, level.dtype), "baseline")


def standing(
    level: LevelResult, base: LevelResult, *, alone: bool, min_gain: float, goal: str = SPEED, so_far: bool = False
) -> str:
    """Return the name of the first rule that holds for the level: objections come first, then gains.

    Args:
        alone: True if no level besides the baseline keeps FP32 weights or masters: a level without them (O3) can then
            have a gain. If False, such a level has the standing "no FP32 weights" instead of a gain.
        goal: MEMORY if saved memory is the first gain, whatever the speed.
        so_far: if the level has run with one seed, and is no worse than the margin allows, judge it by that seed. Then
            "better" is the last gain, because chance can cause it, and saved memory is a gain at an unclear speed too.
    """
    found, speed = level.finding, level.speedup
    so_far = so_far and found.promising
    seems_better = so_far and found.gap is not None and found.gap.sign * found.gap.mean < -found.gap.worse_from
    saves = saved_memory(level, base)
    is_smaller = saves > min_gain
    rules = (
        ("failed", not level.runs),
        ("differs", found.rejected),
        ("undecided", (found.kind == "undecided" and not so_far) or (level.emulated and found.kind == "so far")),
        ("unjudged", found.kind == "unjudged"),
        ("failed with some", bool(found.faults)),
        ("skips", found.skips is not None),
        ("emulated", level.emulated),
        ("no FP32 weights", level.loses_updates and not alone),
        ("smaller", is_smaller and goal == MEMORY),
        ("better", found.better),
        ("faster", speed is not None and speed.gains_much),
        ("slower", is_smaller and speed is not None and speed.pace == "slower"),
        ("not clear", is_smaller and not so_far and _may_cost(speed) > saves),
        ("smaller", is_smaller),
        ("a little faster", speed is not None and speed.pace == "faster"),
        ("better", seems_better),
        ("not timed", speed is None),
    )
    return next((name for name, holds in rules if holds), "no gain")


def recommend(
    levels: Sequence[LevelResult],
    base: LevelResult,
    min_gain: float = MIN_GAIN,
    what: str = "loss",
    goal: str = SPEED,
) -> Recommendation:
    """Recommend a level.

    The level with the strongest standing in GAINS is taken: a surely better result, then much more speed, then less
    memory, then a little more speed. If the goal is MEMORY, less memory comes first. If no level has such a standing,
    the standings are taken again with `so_far`. A level that has run with one seed, with a result that is not worse
    than the margin allows, is then judged by that seed. A better result is the weakest gain there, because chance can
    cause it. If no level gains then either, the baseline is recommended, with the first round's standings of the other
    levels. If the script's own mixed precision is as good, and the level to recommend is neither faster nor smaller
    than that, the script stays as it is.

    Args:
        min_gain: the share of memory (`saved_memory`) that a level must save to be recommended for its memory. A level
            with an unclear speed must save more than the share of time that it may cost.
        what: the name of the compared metric, for the texts.
        goal: SPEED or MEMORY.
    """
    alone = not any(not level.loses_updates and level.level != base.level for level in levels)
    others = [level for level in levels if level is not base]
    sure = not any(level.finding.kind in ("undecided", "unjudged") for level in levels if not level.emulated)
    told = [standing(level, base, alone=alone, min_gain=min_gain, goal=goal) for level in others]
    standings = {(level.level, level.dtype): name for level, name in zip(others, told, strict=True)}
    seen = [standing(level, base, alone=alone, min_gain=min_gain, goal=goal, so_far=True) for level in others]
    order = sorted(GAINS, key=lambda name: name != "smaller") if goal == MEMORY else GAINS
    for so_far, names, gains in ((False, told, order), (True, seen, sorted(order, key=lambda name: name == "better"))):
        named = [*zip(others, names, strict=True)]
        gain = next((name for name in gains if name in names), "")
        best = _best([level for level, name in named if name == gain], gain) if gain else base
        for level, name in named:
            as_good = level.level == NATIVE and name in (*GAINS, *_NO_GAIN)
            if as_good and not _gains_beside(best, level, min_gain):
                best, gain = level, name
        if gain:
            return Recommendation(best, {gain: [best]}, sure, so_far, what, standings, min_gain, goal)
    because = {name: [level for level, own in zip(others, told, strict=True) if own == name] for name in _OF_OTHERS}
    because = {name: found for name, found in because.items() if found}
    return Recommendation(base, because, sure, False, what, standings, min_gain, goal)


def _gains_beside(best: LevelResult, own: LevelResult, min_gain: float) -> bool:
    """Return whether `best` is better, faster or smaller than `own`, the script's own mixed precision."""
    faster = best.speedup and own.speedup and best.speedup.median > ALIKE * own.speedup.median
    return best.finding.better > own.finding.better or bool(faster) or saved_memory(best, own) > min_gain


def _best(levels: Sequence[LevelResult], gain: str) -> LevelResult:
    """Return the best of `levels`, which all have the standing `gain`, one of GAINS.

    It is the level with the least memory: for "faster" and "a little faster" of those about as fast as the fastest, for
    "better" of those whose result is within the margin of the best result.
    """
    if gain == "smaller":
        return min(levels, key=_size)
    if gain != "better":
        fastest = max(level.speedup or Ratio(0, 0, 0) for level in levels).median
        return min((level for level in levels if level.speedup and ALIKE * level.speedup.median >= fastest), key=_size)
    gaps = {id(level): level.finding.gap for level in levels}
    worse = {name: gap.sign * gap.level for name, gap in gaps.items() if gap is not None}
    margin = max((gap.margin for gap in gaps.values() if gap is not None), default=0.0)
    return min((level for level in levels if worse[id(level)] <= min(worse.values()) + margin), key=_size)


def _size(level: LevelResult) -> float:
    return level.memory or 1.0


def summary(found: Recommendation, base: LevelResult) -> str:
    """Return the recommendation and its reason in one or two sentences."""
    named = f"{verb(found, base)} {found.level.name}"
    if found.level is not base:
        return f"{named}: {gains(found)}."
    few = all(level.finding.unjudged == SHORT for levels in found.because.values() for level in levels)
    why = "" if few else f": {of_others(found, base)}"  # a note says how few steps they are
    return f"{named}{'' if found.sure else ' for now'}{why}."


def verb(found: Recommendation, base: LevelResult) -> str:
    """Return the first words of the advice: "Use", "Keep", "So far", "Stay with".

    They are "Go back to" if the baseline is recommended, and the script has mixed precision of its own.
    """
    if found.level is not base:
        return "So far" if found.so_far else "Keep" if found.level.level == NATIVE else "Use"
    return "Go back to" if any(level == NATIVE for level, _ in found.standings) else "Stay with"


def gains(found: Recommendation) -> str:
    """Return "1.4x faster, 10 % less memory, same loss over 3 seeds", with the reason of the recommendation first."""
    best = found.level
    cost = [speed_in_words(best), memory_in_words(best)]
    if "smaller" in found.because:
        cost.reverse()
    seeds = best.finding.gap.seeds if best.finding.gap is not None else 0
    loss = _loss_in_words(found) + (" with one seed" if seeds == 1 else f" over {counted(seeds, 'seed')}")
    return ", ".join(filter(None, [loss, *cost] if "better" in found.because else [*cost, loss]))


def _loss_in_words(found: Recommendation) -> str:
    """Return "same loss within 0.2 %", or if the recommendation rests on one seed "loss +0.0007 %"."""
    of, what, gap = found.level.finding, found.what, found.level.finding.gap
    if found.so_far and gap is not None and gap.mean:
        return f"{what} {percent_of(gap) or signed(gap.mean)}"
    if of.better and gap is not None and gap.base:
        return f"{relative_size(gap.level, gap.base)} better {what}"
    if of.better or of.kind == "no worse":
        return f"{'better' if of.better else 'no worse'} {what}"
    if of.kind == "so far":
        return f"same {what} so far"
    share = gap.share(gap.margin) if gap is not None and gap.told == "as good" else None
    return f"same {what}" + ("" if share is None or of.to_the_bit else f" within {fine_percent(share)}")


def _may_cost(speed: Ratio | None) -> float:
    """Return how much longer a step may take than the baseline's, as a share: 0.05 is 5 % longer.

    If the speed is "not clear" (`Ratio.pace`), the slowest seed gives the share. Otherwise it is 0.
    """
    return 1 / speed.low - 1 if speed is not None and speed.pace == "not clear" else 0.0


def of_others(found: Recommendation, base: LevelResult) -> str:
    """Return why the baseline is recommended: the other levels, grouped by their standings, without a full stop."""
    said: dict[str, list[str]] = {}  # a phrase -> the levels that it fits
    for why, levels in found.because.items():
        for level in levels:
            phrase = _OF_OTHERS[why].format(
                "{}",
                good=_GOOD.get(level.finding.kind, "would do as well"),
                more=more_seeds(base, levels),
                what=found.what,
                unjudged="; ".join(in_words(level.finding.unjudged, level, base)) if why == "unjudged" else "",
            )
            said.setdefault(phrase, []).append(_with_promise(level, base, why, found))
    return "; ".join(phrase.replace("{}", listed(names), 1) for phrase, names in said.items())


def _with_promise(level: LevelResult, base: LevelResult, why: str, found: Recommendation) -> str:
    """Return the level's name, with its gains and costs in brackets if they matter for its standing `why`.

    They do for a smaller level whose speed is lower or not clear, and for an undecided or unjudged one.
    """
    speed, gap, said = level.speedup, level.finding.gap, []
    if why == "slower" and speed is not None:
        said = [memory_in_words(level), f"but {speed_in_words(level)}"]
    elif why == "not clear" and speed is not None:
        said = [memory_in_words(level), f"{ratio(speed.low)}x to {ratio(speed.high)}x of its speed"]
    elif why in ("undecided", "unjudged") and not level.emulated:
        said = [speed_in_words(level)] if speed is not None and speed.pace in ("faster", "slower") else []
        said += [memory_in_words(level)] if saved_memory(level, base) > found.min_gain else []
        if why == "undecided" and gap is not None and gap.low is None:
            said += [f"{found.what} {percent_of(gap) or signed(gap.mean)}"]
    return f"{level.name} ({', '.join(said)})" if said else level.name
