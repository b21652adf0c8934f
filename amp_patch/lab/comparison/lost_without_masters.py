"""Which updates weights without masters would lose, in words, and which rung of a level loses none."""

from __future__ import annotations

from collections.abc import Iterable

from amp_patch.environment import RUNGS, named_level
from amp_patch.lab.comparison.level_result import LevelResult
from amp_patch.lab.wording import listed, type_name, whole_percent
from amp_patch.policy import OPT_LEVELS, SPLIT

# Of less than this share of lost updates no advice is made: weights rounded to nearest have trained as FP32's do there,
# and worse from 0.59 on (docs/ladder.md, "How many updates are lost").
FEW = 0.25


def lost_by_weights(share: float | None) -> str:
    """ "its weights lose 89 % of their updates", of a level without masters; "" where they lose few."""
    return "" if share is None or share < FEW else f"its weights lose {whole_percent(share)} of their updates"


def by_script(base: LevelResult, levels: Iterable[LevelResult]) -> str:
    """ "your script loses 81 % of its updates: ...", of one whose weights come in low precision; "" where it loses few.

    The levels' FP32 values tell: its own weights have lost what they lost."""
    kind = next((run.weights_type for run in base.runs if run.weights_type), "")
    known = (level.lost_updates for level in levels if level.dtype == kind and level.lost_updates is not None)
    share = next(known, 0.0) if kind else 0.0
    if share < FEW:
        return ""
    lost = f"your script loses {whole_percent(share)} of its updates"
    return f"{lost}: its weights are {type_name(kind)} and have no masters"


def notes(levels: Iterable[LevelResult], by_script: str = "") -> list[str]:
    """For each low-precision type among the levels: what its weights would lose without masters, and what to take.

    Args:
        by_script: what the function of this name says.
    """
    found: dict[str, LevelResult] = {}
    for level in levels:
        if level.dtype is not None and level.lost_updates is not None:
            found.setdefault(level.dtype, level)
    said = [_note(dtype, level.lost_updates or 0.0) for dtype, level in found.items()]
    return [by_script, *said] if by_script else said


def _note(dtype: str, share: float) -> str:
    lost = f"without masters {whole_percent(share)} of the updates would be lost in {type_name(dtype)} weights"
    if share < FEW:
        return lost
    whole, same, by_chance = _safe(dtype)
    safe = f"take masters ({listed([whole, *same])})"
    return f"{lost}: {safe}" + (f", or rounding by chance ({listed(by_chance)})" if by_chance else "")


def with_masters(dtype: str) -> str:
    """The level of this type that has masters."""
    return next(
        name for name, each in OPT_LEVELS.items() if each.master_weights and str(each.dtype) == f"torch.{dtype}"
    )


def _safe(dtype: str) -> tuple[str, list[str], list[str]]:
    """The level with masters of this type, and its rungs: those with the same numbers, and those that are right on the
    mean."""
    level = with_masters(dtype)
    same: list[str] = []
    by_chance: list[str] = []
    for rung, (option, value) in RUNGS.items():
        if option == "master_weights":
            try:
                named_level(f"{level}+{rung}").policy()
            except ValueError:  # FP16 weights have no rungs
                continue
            (same if value == SPLIT else by_chance).append(f"{level}+{rung}")
    return level, same, by_chance
