"""Formats of numbers and names in reports: all rules for writing a number are in this file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_TYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}


def level_name(level: str, dtype: str | None) -> str:
    """Return "O2 FP16" for "O2" and "float16", "O0" for "O0" and None, and words for a script's own mixed precision."""
    if level == "native":
        return "your script as it is"
    return f"{level} {type_name(dtype)}" if dtype else level


def type_name(dtype: str) -> str:
    """Return "FP16" for "float16". A type without a short name keeps torch's."""
    return _TYPES.get(dtype, dtype)


def metric_in_words(metric: str) -> str:
    """Return "loss on held-out data" for "held_out_loss". Other names are not changed."""
    return re.sub(r"held_out_(\w+)", r"\1 on held-out data", metric)


def times(*ratios: float) -> list[str]:
    """Format ratios above 1 with enough decimals to differ from 1, and with equally many decimals for each."""
    digits = 2 if min(ratios) < 2 else 1 if min(ratios) < 100 else 0
    return [f"{ratio:.{digits}f}" for ratio in ratios]


def relative_distance(figure: float, base: float) -> str:
    """Return the distance of a figure from a base, relative to the base: "0.3 % above", "equal to"."""
    if figure == base:
        return "equal to"
    return f"{relative_size(figure, base)} {'above' if figure > base else 'below'}"


def relative_size(figure: float, base: float) -> str:
    """Return the distance of a figure from a base, relative to the base and without its sign: "0.3 %"."""
    if base == 0:
        return two(abs(figure - base))
    percent = 100 * abs(figure / base - 1)
    return f"{percent:{'.0f' if 10 <= percent < 1e5 else '.2g'}} %"


def signed_percents(*shares: float) -> list[str]:
    """Format shares in per cent without the "%": "+0.12", "-3.4", "+250". From 9.95 on they are integers."""
    percents = [100 * each for each in shares]
    return [f"{each:+.0f}" if 9.95 <= abs(each) < 1e7 else signed(each) for each in percents]


def signed(value: float) -> str:
    """Format a number with its sign and two significant digits: "+0.0012"; 0 has no sign."""
    return f"{value:+.2g}" if value else "0"


def shortest_distinct(*values: float) -> list[str]:
    """Format numbers with four significant digits, or with up to nine if different numbers would look equal."""
    texts = [[digits(value, count) for value in values] for count in range(4, 10)]
    return max(texts, key=lambda each: len(set(each)))  # the first of the best has the fewest digits


def two(value: float) -> str:
    """Format an error, a probability or half of a range with up to two significant digits."""
    return f"{value:.2g}"


def figure(value: float) -> str:
    """Format a loss, a metric or a rate with up to four significant digits."""
    return f"{value:.4g}"


def digits(value: float, count: int) -> str:
    """Format a number with `count` significant digits, trailing zeros included."""
    return f"{value:#.{count}g}".rstrip(".")


# Escape sequences of terminals (colours, cursor moves, titles), and control characters.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control_codes(text: str) -> str:
    """Remove control codes from the text of a script or an error, which a page cannot show. Tabs and newlines stay."""
    return _CONTROL.sub("", text)


def listed(names: Sequence[str]) -> str:
    """Join names: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def lacks(dtype: str, levels: Sequence[str]) -> str:
    """Return a sentence for levels whose type `dtype` has no arithmetic on this CPU: how fast they are here."""
    kind, s = type_name(dtype), "s" if len(levels) == 1 else ""
    does = f"{listed(levels)} compute{s} in FP32 and round{s} to {kind}, at FP32's speed at best"
    return f"this CPU has no {kind} arithmetic: {does}, and {'is' if s else 'are'} faster on one that has it"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "3 seeds", "1 seed"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def about(seconds: float) -> str:
    """Format an estimated time: "about 6 minutes"."""
    if seconds < 10:
        return "under 10 seconds"
    if seconds < 95:
        return f"about {10 * round(seconds / 10)} seconds"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.{1 if seconds < 36000 else 0}f} hours"


def clock_time(seconds: float) -> str:
    """Format a measured time: "0.84 s", "41 s", "5 min 10 s", "2 h 5 min"."""
    if round(seconds) < 60:
        return f"{seconds:.{0 if seconds >= 10 else 1 if seconds >= 1 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h" + (f" {minutes} min" if minutes else "")


_UNITS = ("bytes", "KiB", "MiB", "GiB")


def sizes(counts: Sequence[float]) -> tuple[str, list[str]]:
    """Return (unit, texts) of numbers of bytes, in the unit that suits the largest: ("MiB", ["1.5", "0.25"])."""
    unit = _UNITS[min(3, int(math.log(max(1.0, *counts), 1024)))] if counts else _UNITS[0]
    return unit, [in_unit(count, unit) for count in counts]


def in_unit(count: float, unit: str) -> str:
    """Format a number of bytes in a unit that `sizes` chose, such as "MiB", without the unit."""
    return three(count / 1024 ** _UNITS.index(unit))


def three(value: float) -> str:
    """Format a number with three significant digits, or from 100 on as an integer with commas for thousands."""
    if 0 < value < 0.001:
        return "under 0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short(value: float | None) -> str:
    """Format a number with three significant digits, or from 100 to 1e6 as an integer; "" if it is None."""
    if value is None:
        return ""
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    """Format a ratio with two decimals, or from 100 on with three significant digits; "" if it is None."""
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Format a share from 0 to 1 for a table. Only an exact 0 is "0 %", and only an exact 1 "100 %"."""
    if share in (0, 1):
        return whole_percent(share)
    return "<0.1 %" if share < 0.001 else ">99 %" if share > 0.99 else f"{two(100 * share)} %"


def fine_percent(share: float) -> str:
    """Format a small share for a sentence: "0.4 %"."""
    return f"{100 * share:.1g} %" if share < 0.01 else f"{100 * share:.2g} %"


def whole_percent(share: float) -> str:
    """Format a share for a sentence without decimals: "37 %". It may exceed 1."""
    return f"{100 * share:.0f} %"


def power_in_ascii(scale: float) -> str:
    """Format a loss scale in ASCII; a power of two from 2^10 on is written as one: "2^16"."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 10 else f"{scale:.3g}"
