"""Numbers and names, as a sentence has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_patch.recording.run import PARTS

SIZES = {"weights": "weights", "masters": "masters", "gradients": "gradients", "state": "optimizer state"}
PARTS_IN_WORDS = {**{part: part for part in PARTS}, "between": "in between"}


def times(*ratios: float) -> list[str]:
    """Ratios above 1, with the digits that tell them from 1."""
    digits = 2 if min(ratios) < 1.1 else 1 if min(ratios) < 100 else 0
    return [f"{ratio:.{digits}f}" for ratio in ratios]


def apart(figure: float, base: float) -> str:
    """ "0.3 % above"."""
    side = "above" if figure > base else "below"
    if figure == base:
        return "equal to"
    if base == 0:
        return f"{abs(figure - base):.2g} {side}"
    percent = 100 * abs(figure / base - 1)
    return f"{percent:{'.0f' if 10 <= percent < 1e5 else '.2g'}} % {side}"


def tell_apart(*values: float) -> list[str]:
    """Numbers with four significant digits, or up to nine where that tells more of them apart."""
    texts = [[f"{value:#.{digits}g}".rstrip(".") for value in values] for digits in range(4, 10)]
    return max(texts, key=lambda each: len(set(each)))  # the first of the best


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def size(count: float) -> str:
    """Bytes in words: 1536 is "1.5 KiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, int(math.log(count, 1024)))
    return f"{count / 1024**power:.3g} {('KiB', 'MiB', 'GiB')[power - 1]}"


def percent(share: float) -> str:
    return "0 %" if share == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.2g} %" if share < 1 else "100 %"
