"""Which level to use, and why, by one ordered list of rules: `standing`. Headline, card, summary and rows read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amp_patch.lab.comparison import measures
from amp_patch.lab.comparison.level_result import LevelResult, saved_memory
from amp_patch.lab.comparison.measures import Ratio
from amp_patch.lab.comparison.plan import MIN_GAIN
from amp_patch.lab.comparison.verdict import UNJUDGED, memory_beside, more_seeds
from amp_patch.lab.wording import listed, ratio, times

# Standings for which a level is recommended, the strongest first.
GAINS = ("better", "faster", "smaller", "a little faster")

# Why the baseline is recommended: a phrase for each other standing, in the order of the phrases.
_OF_OTHERS = {
    "slower": "{} would do as well",
    "not clear": "{} would do as well, but may cost more time than it saves memory",
    "no gain": "{} would do as well, but not faster, nor in much less memory",
    "not timed": "{} would do as well, but how fast is not known",
    "undecided": "{} cannot be judged yet, {more}",
    "unjudged": "whether {} would do as well its loss does not say ({unjudged})",
    "no FP32 weights": "{} keeps no FP32 weights, and is for whoever compares it alone",
    "skips": "{} skipped too many steps",
    "differs": "do not use {}",
    "failed with some": "{} failed with some seeds",
    "failed": "{} failed",
    "emulated": "{} would do as well in hardware that has it",
}


@dataclass(frozen=True)
class Recommendation:
    """Of levels of which two at least can be compared.

    Attributes:
        level: the baseline where no other is better.
        because: standing -> the levels that it is the reason of: one of GAINS with the level; of the baseline the names
            in _OF_OTHERS -> the other levels of which this is so.
        sure: whether no level is undecided, or cannot be judged.
        standings: (level, dtype) -> `standing`, of each but the baseline.
        min_gain: as of `recommend`.
    """

    level: LevelResult
    because: dict[str, list[LevelResult]]
    sure: bool
    standings: dict[tuple[str, str | None], str] = field(default_factory=dict)
    min_gain: float = MIN_GAIN

    def standing(self, level: LevelResult) -> str:
        """Of one of the levels; "baseline" of that."""
        return self.standings.get((level.level, level.dtype), "baseline")


def standing(level: LevelResult, base: LevelResult, *, alone: bool, min_gain: float) -> str:
    """The first rule that holds: what speaks against the level, then what it gains.

    Args:
        alone: whether no level but the baseline keeps FP32 weights: one without them (O3) is usable only then.
    """
    found, speed = level.finding, level.speedup
    saves = saved_memory(level, base)
    is_smaller = saves > min_gain
    rules = (
        ("failed", not level.runs),
        ("differs", found.rejected),
        ("undecided", found.kind == "undecided" or (level.emulated and found.kind == "so far")),
        ("unjudged", found.kind == "unjudged"),
        ("failed with some", bool(found.faults)),
        ("skips", found.skips is not None),
        ("emulated", level.emulated),
        ("no FP32 weights", level.loses_updates and not alone),
        ("better", found.better),
        ("faster", speed is not None and speed.gains_much),
        ("slower", is_smaller and speed is not None and speed.pace == "slower"),
        ("not clear", is_smaller and _may_cost(speed) > saves),
        ("smaller", is_smaller),
        ("a little faster", speed is not None and speed.pace == "faster"),
        ("not timed", speed is None),
    )
    return next((name for name, holds in rules if holds), "no gain")


def recommend(levels: Sequence[LevelResult], base: LevelResult, min_gain: float = MIN_GAIN) -> Recommendation:
    """The level whose result is surely better; else the fastest sound one; where none is by much, the smallest that is
    as fast; else the baseline, and why not the others.

    Args:
        min_gain: the share of all memory (`saved_memory`) that a level must save to be recommended for it. One whose
            speed is not clear must save more than the share of time that it may cost.
    """
    alone = not any(not level.loses_updates and level.level != base.level for level in levels)
    groups: dict[str, list[LevelResult]] = {}
    standings: dict[tuple[str, str | None], str] = {}
    for level in levels:
        if level is not base:
            name = standing(level, base, alone=alone, min_gain=min_gain)
            standings[level.level, level.dtype] = name
            groups.setdefault(name, []).append(level)
    sure = not any(level.finding.kind in ("undecided", "unjudged") for level in levels if not level.emulated)
    gain = next((name for name in GAINS if name in groups), None)
    if gain is not None:
        best = _best(groups[gain], gain)
        return Recommendation(best, {gain: [best]}, sure, standings, min_gain)
    because = {name: groups[name] for name in _OF_OTHERS if name in groups}
    return Recommendation(base, because, sure, standings, min_gain)


def _best(levels: Sequence[LevelResult], gain: str) -> LevelResult:
    """Of levels with the same gain: of better results that lie within the margin of the best the smallest."""
    if gain == "smaller":
        return min(levels, key=_size)
    if gain != "better":
        return max(levels, key=lambda level: level.speedup or Ratio(0, 0, 0))
    gaps = {id(level): level.finding.gap for level in levels}
    worse = {name: gap.sign * gap.level for name, gap in gaps.items() if gap is not None}
    margin = max((gap.margin for gap in gaps.values() if gap is not None), default=0.0)
    return min((level for level in levels if worse[id(level)] <= min(worse.values()) + margin), key=_size)


def _size(level: LevelResult) -> float:
    return level.memory or 1.0


def summary(found: Recommendation, base: LevelResult) -> str:
    """What to use, and why, in one or two sentences."""
    best = found.level
    as_fast = best.speedup is not None and best.speedup.pace in ("as fast", "faster")
    room = larger_batch(best, base) if "smaller" in found.because else ""
    also = f" {room}." if room else ""
    if "smaller" in found.because and not as_fast:
        return f"Use {best.name} for its memory; none is faster than {base.name}: {best.verdict.text}.{also}"
    if best is not base:
        return f"Use {best.name}: {best.verdict.text}.{also}"
    for_now = "" if found.sure else " for now"
    return f"Stay with {base.name}{for_now}: {of_others(found, base)}."


def _may_cost(speed: Ratio | None) -> float:
    """The share of time that a level whose speed is not clear may cost, by its slowest pair; else 0."""
    return 1 / speed.low - 1 if speed is not None and speed.pace == "not clear" else 0.0


def larger_batch(level: LevelResult, base: LevelResult) -> str:
    """ "In the memory that O0 takes at batch 16, it has a batch of 29"; "" where nothing tells."""
    batch = measures.batch_in_memory_of(level.runs, base.runs)
    if batch is None:
        return ""
    before, now = batch
    return f"In the memory that {base.name} takes at batch {before}, {level.level} takes a batch of some {now}"


def of_others(found: Recommendation, base: LevelResult) -> str:
    """Why the baseline is the one to use, without a full stop."""

    return "; ".join(
        _OF_OTHERS[why].format(
            listed([_with_promise(level, base, why, found.min_gain) for level in levels]),
            more=more_seeds(base, levels),
            unjudged=UNJUDGED,
        )
        for why, levels in found.because.items()
    )


def _with_promise(level: LevelResult, base: LevelResult, why: str, min_gain: float) -> str:
    """The name, and what the level would win: where its memory costs time, or where it may yet be recommended."""
    pace = level.speedup.pace if level.speedup is not None else ""
    median = level.speedup.median if level.speedup is not None else 1.0
    said = []
    if why == "slower":
        said = [memory_beside(level), f"but {times(1 / median)[0]}x slower"]
    elif why == "not clear" and level.speedup is not None:
        said = [memory_beside(level), f"{ratio(level.speedup.low)}x to {ratio(level.speedup.high)}x of its speed"]
    elif why in ("undecided", "unjudged") and pace in ("faster", "as fast"):
        said = [f"{times(median)[0]}x faster"] if pace == "faster" else []
        said += [memory_beside(level)] if saved_memory(level, base) > min_gain else []
    return f"{level.name} ({', '.join(said)})" if said else level.name
