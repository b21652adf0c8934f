"""Which level to use, and why, as data and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amp_patch.lab.comparison import measures
from amp_patch.lab.comparison.level_result import LevelResult, saved_memory
from amp_patch.lab.comparison.measures import Ratio
from amp_patch.lab.comparison.plan import MIN_GAIN
from amp_patch.lab.comparison.verdict import UNJUDGED, memory_beside, more_seeds
from amp_patch.lab.wording import listed, ratio, times

# Why the baseline is recommended: a phrase for each reason against the other levels.
_OF_OTHERS = {
    "slower": "{} would do as well",
    "no gain": "{} would do as well, but not faster, nor in much less memory",
    "not clear": "{} would do as well, but may cost more time than it saves memory",
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

_OPEN = ("undecided", "unjudged")  # kinds of findings that may yet become others


@dataclass(frozen=True)
class Recommendation:
    """Of levels of which two at least can be compared.

    Attributes:
        level: the baseline where no other is better.
        because: "faster" or "smaller", of another level than the baseline; of the baseline the names in _OF_OTHERS ->
            the other levels of which this is so.
        sure: whether no level is undecided, or cannot be judged.
        min_gain: as of `recommend`.
    """

    level: LevelResult
    because: dict[str, list[LevelResult]]
    sure: bool
    min_gain: float = MIN_GAIN


def recommend(levels: Sequence[LevelResult], base: LevelResult, min_gain: float = MIN_GAIN) -> Recommendation:
    """The fastest sound level; where none is by much, the smallest that is as fast; else the baseline, and why not the
    others.

    Args:
        min_gain: the share of all memory (`saved_memory`) that a level must save to be recommended for it. One whose
            speed is not clear must save more than the share of time that it may cost.
    """
    others = [level for level in levels if level is not base and level.runs]
    sure = not any(level.finding.kind in _OPEN for level in levels if not level.emulated)
    sound = [level for level in others if level.finding.sound]
    well = [level for level in sound if level.finding.skips is None]
    # A level without FP32 weights (O3) is usable only where the user compares it alone with the baseline.
    asked = not any(not level.loses_updates and level.level != base.level for level in levels)
    usable = [level for level in well if (asked or not level.loses_updates) and not level.emulated]
    emulated = [level for level in well if level.emulated]
    untold = [level for level in emulated if level.finding.kind == "so far"]
    faster = [level for level in usable if level.speedup is not None and level.speedup.pace == "faster"]
    fastest = max(faster, key=lambda level: level.speedup or Ratio(0, 0, 0), default=base)
    if fastest.speedup is not None and fastest.speedup.gains_much:
        return Recommendation(fastest, {"faster": [fastest]}, sure, min_gain)
    smaller = [level for level in usable if saved_memory(level, base) > min_gain]
    unclear = [level for level in smaller if _may_cost(level) > saved_memory(level, base)]
    slower = [level for level in smaller if level.speedup is not None and level.speedup.pace == "slower"]
    as_fast = [level for level in smaller if level not in slower and level not in unclear]
    if as_fast:
        best = min(as_fast, key=lambda level: level.memory or 1.0)
        return Recommendation(best, {"smaller": [best]}, sure, min_gain)
    if faster:
        return Recommendation(fastest, {"faster": [fastest]}, sure, min_gain)
    timed = [level for level in usable if level.speedup is not None]
    because = {
        "slower": slower,
        "not clear": unclear,
        "no gain": [level for level in timed if level not in smaller],
        "not timed": [level for level in usable if level not in timed],
        "undecided": [level for level in others if level.finding.kind == "undecided" or level in untold],
        "unjudged": [level for level in others if level.finding.kind == "unjudged"],
        "no FP32 weights": [level for level in well if level not in usable and level not in emulated],
        "skips": [level for level in sound if level not in well],
        "differs": [level for level in others if level.finding.rejected],
        "failed with some": [level for level in others if level.finding.usable and level.finding.faults],
        "failed": [level for level in levels if not level.runs],
        "emulated": [level for level in emulated if level not in untold],
    }
    return Recommendation(base, {why: found for why, found in because.items() if found}, sure, min_gain)


def summary(found: Recommendation, base: LevelResult) -> str:
    """What to use, and why, in one or two sentences."""
    best = found.level
    as_fast = best.speedup is not None and best.speedup.pace in ("as fast", "faster")
    room = larger_batch(best, base) if "smaller" in found.because else ""
    also = f" {room}." if room else ""
    if "faster" in found.because or ("smaller" in found.because and as_fast):
        return f"Use {best.name}: {best.verdict.text}.{also}"
    if best is not base:
        return f"Use {best.name} for its memory; none is faster than {base.name}: {best.verdict.text}.{also}"
    for_now = "" if found.sure else " for now"
    return f"Stay with {base.name}{for_now}: {of_others(found, base)}."


def _may_cost(level: LevelResult) -> float:
    """The share of time that a level whose speed is not clear may cost, by its slowest pair; else 0."""
    unclear = level.speedup is not None and level.speedup.pace == "not clear"
    return 1 / level.speedup.low - 1 if unclear and level.speedup is not None else 0.0


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
    elif level.finding.kind in _OPEN and pace in ("faster", "as fast"):
        said = [f"{times(median)[0]}x faster"] if pace == "faster" else []
        said += [memory_beside(level)] if saved_memory(level, base) > min_gain else []
    return f"{level.name} ({', '.join(said)})" if said else level.name
