"""Numbers and names, as a sentence has them."""

from __future__ import annotations

from collections.abc import Sequence


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
