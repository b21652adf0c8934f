"""Notes on the updates that weights without masters lose, and on the levels and rungs that lose none.

A rung is a suffix of a level, such as O5+split, with which masters or optimizer state take fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from amp_patch.comparison.level_result import LevelResult
from amp_patch.diagnose.wording import listed, type_name, whole_percent
from amp_patch.environment import RUNGS
from amp_patch.policy import OPT_LEVELS, SPLIT

# Below this share of lost updates there is no advice: weights that were rounded to nearest then trained as well as FP32
# weights. From a share of 0.59 on they trained worse (docs/ladder.md, "How many updates are lost").
FEW = 0.25


def lost_by_weights(share: float | None) -> str:
    """Return "its weights lose 89 % of their updates" for a share of 0.89; "" for None or below FEW."""
    return "" if share is None or share < FEW else f"its weights lose {whole_percent(share)} of their updates"


def by_script(base: LevelResult, levels: Iterable[LevelResult]) -> str:
    """Return "your script loses 81 % of its updates: ...", if the script's own weights are in low precision.

    "" if they are FP32, or if the share is unknown or below FEW. The share is measured at a level with FP32 masters:
    the script's own weights cannot show it, because they do not contain the updates that they lost.
    """
    kind = next((run.weights_type for run in base.runs if run.weights_type), "")
    known = (level.lost_updates for level in levels if level.dtype == kind and level.lost_updates is not None)
    share = next(known, 0.0) if kind else 0.0
    if share < FEW:
        return ""
    lost = f"your script loses {whole_percent(share)} of its updates"
    return f"{lost}: its weights are {type_name(kind)} and have no masters"


def notes(levels: Iterable[LevelResult]) -> list[str]:
    """Return a line for each low-precision type of a level: the share of updates that weights without masters lose.

    If the share is at least FEW, the line also names the levels and rungs that lose none.
    """
    found: dict[str, LevelResult] = {}
    for level in levels:
        if level.dtype is not None and level.lost_updates is not None:
            found.setdefault(level.dtype, level)
    return [_note(dtype, level.lost_updates or 0.0) for dtype, level in found.items()]


def _note(dtype: str, share: float) -> str:
    lost = f"without masters {whole_percent(share)} of the updates would be lost in {type_name(dtype)} weights"
    if share < FEW:
        return lost
    level = with_masters(dtype)
    # FP16 weights have no rungs of masters.
    rungs = [*RUNGS.items()] if dtype == "bfloat16" else []
    named = [(f"{level}+{rung}", value) for rung, (option, value) in rungs if option == "master_weights"]
    same = [name for name, value in named if value == SPLIT]  # the numbers of masters, in fewer bytes
    stochastic = [name for name, value in named if value != SPLIT]  # keeps the updates on average
    safe = f"take masters ({listed([level, *same])})"
    return f"{lost}: {safe}" + (f", or stochastic rounding ({listed(stochastic)})" if stochastic else "")


def with_masters(dtype: str) -> str:
    """Return the name of the level with masters whose weights have this type: "O2" for "float16"."""
    return next(
        name for name, each in OPT_LEVELS.items() if each.master_weights and str(each.dtype) == f"torch.{dtype}"
    )
