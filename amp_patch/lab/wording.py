"""Numbers and names in words: every rule of how a number is written stands here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_TYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


def level_name(level: str, dtype: str | None) -> str:
    """ "O2 FP16", of "O2" and "float16"; "O0", which has no type."""
    return f"{level} {type_name(dtype)}" if dtype else level


def type_name(dtype: str) -> str:
    """ "FP16", of "float16"; other types by torch's name."""
    return _TYPES.get(dtype, dtype)


def metric_in_words(metric: str) -> str:
    """ "loss on held-out data", of held_out_loss; other names as they are."""
    return re.sub(r"held_out_(\w+)", r"\1 on held-out data", metric)


def part_name(part: str) -> str:
    """What a table calls one of `recording.run.PARTS`."""
    return "clipping, other" if part == "between" else part


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
        return two(abs(figure - base))
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
    if not base:
        return f"{result - base:+.2g}"
    percent = 100 * (result - base) / abs(base)
    return "<0.01 %" if abs(percent) < 0.01 else f"{percent:+{'.2f' if abs(percent) < 10 else '.0f'}} %"


def signed_percents(*shares: float) -> list[str]:
    """ "+0.12", "-3.4": shares in per cent, without the sign for it, with two digits or all before the point."""
    percents = [100 * each for each in shares]
    return [f"{each:+.0f}" if 9.95 <= abs(each) < 1e7 else signed(each) for each in percents]


def signed(value: float) -> str:
    """ "+0.0012", with two digits; "0"."""
    return f"{value:+.2g}" if value else "0"


def shortest_distinct(*values: float) -> list[str]:
    """Numbers with four significant digits, or up to nine where that tells more of them apart."""
    texts = [[digits(value, count) for value in values] for count in range(4, 10)]
    return max(texts, key=lambda each: len(set(each)))  # the first of the best


def two(value: float) -> str:
    """Up to two significant digits: an error, a probability, half of a range."""
    return f"{value:.2g}"


def figure(value: float) -> str:
    """Up to four significant digits: a loss, a metric, a rate."""
    return f"{value:.4g}"


def digits(value: float, count: int) -> str:
    """With so many significant digits, zeros too."""
    return f"{value:#.{count}g}".rstrip(".")


# What a terminal takes for commands (colours, cursor moves, titles), and characters that have no picture.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control_codes(text: str) -> str:
    """Text that a script printed, or an error's, as a terminal and a page can show it: tabs and lines stay."""
    return _CONTROL.sub("", text)


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def lacks(dtype: str, levels: Sequence[str]) -> str:
    """What it means for levels that compute in a type that this CPU has no arithmetic for."""
    what, s = type_name(dtype), "s" if len(levels) == 1 else ""
    does = f"{listed(levels)} compute{s} in FP32 and round{s} to {what}, at FP32's speed at best"
    return f"this CPU has no {what} arithmetic: {does}, and {'is' if s else 'are'} faster on one that has it"


def counted(number: int, what: str) -> str:
    """ "3 seeds", "1 seed"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def about(seconds: float) -> str:
    """ "about 6 minutes": a time that is known roughly."""
    if seconds < 10:
        return "under 10 seconds"
    if seconds < 95:
        return f"about {10 * round(seconds / 10)} seconds"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.{1 if seconds < 36000 else 0}f} hours"


def clock_time(seconds: float) -> str:
    """ "0.84 s", "41 s", "5 min 10 s", "2 h 5 min": a measured time."""
    if round(seconds) < 60:
        return f"{seconds:.{0 if seconds >= 10 else 1 if seconds >= 1 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h" + (f" {minutes} min" if minutes else "")


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
    """A share from 0 to 1, in a table; "0 %" and "100 %" are exact."""
    if share in (0, 1):
        return whole_percent(share)
    return "<0.1 %" if share < 0.001 else ">99 %" if share > 0.99 else f"{two(100 * share)} %"


def fine_percent(share: float) -> str:
    """A small share in a sentence: "0.4 %"."""
    return f"{100 * share:.1g} %" if share < 0.01 else f"{100 * share:.2g} %"


def whole_percent(share: float) -> str:
    """A share in a sentence, without digits behind the point; more than 1, too."""
    return f"{100 * share:.0f} %"


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
