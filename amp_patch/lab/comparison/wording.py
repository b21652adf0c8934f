"""Numbers and names in words: every rule of how a number is written stands here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_patch.lab.recording.run import PARTS

SIZES = {
    "weights": "weights",
    "masters": "masters",
    "gradients": "gradients",
    "state": "optimizer state",
    "activations": "activations",
}
_TYPES = {"float16": "FP16", "bfloat16": "BF16", None: "FP32"}
PARTS_IN_WORDS = {**{part: part for part in PARTS}, "between": "clipping, other"}


def level_name(level: str, dtype: str | None) -> str:
    """ "O2 fp16", of "O2" and "float16"; "O0", which has no type."""
    return f"{level} {type_name(dtype).lower()}" if dtype else level


def type_name(dtype: str | None) -> str:
    """ "FP16"."""
    return _TYPES.get(dtype) or str(dtype)


def times(*ratios: float) -> list[str]:
    """Ratios above 1, with the digits that tell them from 1."""
    digits = 2 if min(ratios) < 2 else 1 if min(ratios) < 100 else 0
    return [f"{ratio:.{digits}f}" for ratio in ratios]


def relative_distance(figure: float, base: float) -> str:
    """ "0.3 % above"."""
    if figure == base:
        return "equal to"
    return f"{relative_size(figure, base)} {'above' if figure > base else 'below'}"


def relative_size(figure: float, base: float) -> str:
    """ "0.3 %": how far the figure is from the base."""
    if base == 0:
        return f"{abs(figure - base):.2g}"
    percent = 100 * abs(figure / base - 1)
    return f"{percent:{'.0f' if 10 <= percent < 1e5 else '.2g'}} %"


def signed_percent(result: float | None, base: float | None) -> str:
    """ "+0.30 %", in a column: how far a mean is from the baseline's; "" where one of them is not known."""
    if result is None or base is None:
        return ""
    if result == base:
        return "equal"
    if base and abs(result - base) > 9.99 * abs(base):
        return ">+999 %" if result > base else "<-999 %"
    return _percent_of(result - base, base, "+")


def unsigned_percent(result: float, base: float) -> str:
    """ "0.30 %", in a sentence."""
    return ">999 %" if base and abs(result - base) > 9.99 * abs(base) else _percent_of(abs(result - base), base, "")


def _percent_of(difference: float, base: float, sign: str) -> str:
    if not base:
        return f"{difference:{sign}.2g}"
    percent = 100 * difference / abs(base)
    return "<0.01 %" if abs(percent) < 0.01 else f"{percent:{sign}{'.2f' if abs(percent) < 10 else '.0f'}} %"


def shortest_distinct(*values: float) -> list[str]:
    """Numbers with four significant digits, or up to nine where that tells more of them apart."""
    texts = [[digits(value, count) for value in values] for count in range(4, 10)]
    return max(texts, key=lambda each: len(set(each)))  # the first of the best


def figure(value: float) -> str:
    """Up to four significant digits: a loss, a metric, a rate."""
    return f"{value:.4g}"


def digits(value: float, count: int) -> str:
    """With so many significant digits, zeros too."""
    return f"{value:#.{count}g}".rstrip(".")


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


_UNITS = ("bytes", "KiB", "MiB", "GiB")


def sizes(counts: Sequence[float]) -> tuple[str, list[str]]:
    """Bytes in the largest unit that fits: ("MiB", ["1.5", "0.25"])."""
    unit = _UNITS[min(3, int(math.log(max(1.0, *counts), 1024)))] if counts else _UNITS[0]
    return unit, [in_unit(count, unit) for count in counts]


def in_unit(count: float, unit: str) -> str:
    """Bytes in one of the units of `sizes`."""
    return three(count / 1024 ** _UNITS.index(unit))


def three(value: float) -> str:
    """Three digits, or all before the point."""
    if 0 < value < 0.001:
        return "under 0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short(value: float | None) -> str:
    """Three digits, or all before the point, without commas; "" where it is not known."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """Two digits behind the point, or three where there are many before it; "" where it is not known."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share from 0 to 1, in a table."""
    return "0 %" if share == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.2g} %" if share < 1 else "100 %"


def power(scale: float) -> str:
    """A loss scale: powers of two as such."""
    exact = scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5
    return f"2{raised(math.frexp(scale)[1] - 1)}" if exact and scale != 1 else f"{scale:g}"


def power_in_ascii(scale: float) -> str:
    """A loss scale: large powers of two as such."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 10 else f"{scale:.3g}"


def raised(exponent: int) -> str:
    """The number in superscript digits."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
