"""What the card of a report says: which level, how much faster, how much memory, why, and how sure that is."""

from __future__ import annotations

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult, failures_in_words, faults, seeds_change_nothing, skips_much
from amp_patch.comparison.verdict import ALIKE
from amp_patch.comparison.wording import relative_distance, shortest_distinct, signed_percent, times

_TYPES = {"float16": "FP16", "bfloat16": "BF16", None: "FP32"}


def headline(comparison: Comparison) -> str:
    """ "Use O5 (BF16)"."""
    best = comparison.recommended
    if best is None:
        return "Nothing to compare"
    if best is comparison.baseline:
        undecided = any(level.verdict.kind == "undecided" for level in comparison.levels)
        return f"Stay with {label(best)}{' for now' if undecided else ''}"
    return f"Use {label(best)}"


def name(level: LevelResult) -> str:
    """ "O5 BF16", "O0"."""
    return f"{level.level} {_TYPES.get(level.dtype, level.dtype)}" if level.dtype else level.level


def label(level: LevelResult) -> str:
    """ "O5 (BF16)"."""
    what = "the script's own mixed precision" if level.level == "native" else level.level
    return f"{what} ({_TYPES.get(level.dtype, level.dtype)})"


def gains(comparison: Comparison) -> str:
    """ "1.4x faster, 10 % less memory, same loss over 3 seeds"; "" where no level but the baseline is recommended."""
    best, base = comparison.recommended, comparison.baseline
    if best is None or base is None or best is base:
        return ""
    said = [speed_in_words(best), memory_in_words(best)]
    if best.speedup is None or best.speedup.low <= 1:
        said.reverse()  # it is recommended for its memory
    seeds = len([seed for seed in best.finite if seed in base.finite])
    what = "loss" if "loss" in comparison.metric else comparison.metric
    said.append(f"{'better' if best.verdict.better else 'same'} {what} over {_count(seeds, 'seed')}")
    words = ", ".join(filter(None, said))
    return words[:1].upper() + words[1:]


def speed_in_words(level: LevelResult) -> str:
    if level.speedup is None:
        return ""
    median, low, high = level.speedup
    if low <= 1 <= high:
        return "as fast" if low >= 1 / ALIKE and high <= ALIKE else "speed not clear"
    return f"{times(median)[0]}x faster" if median > 1 else f"{times(1 / median)[0]}x slower"


def memory_in_words(level: LevelResult) -> str:
    if level.memory is None:
        return ""
    percent = round(100 * (level.memory - 1))
    what = "memory" if level.memory_ratio is not None else "memory for weights and optimizer"
    return f"same {what}" if percent == 0 else f"{abs(percent)} % {'more' if percent > 0 else 'less'} {what}"


def what_memory(comparison: Comparison) -> str:
    """What the bars of memory are of."""
    known = all(level.memory_ratio is not None for level in comparison.levels if level.runs)
    return "shorter is less" if known else "shorter is less; some without activations"


def why(comparison: Comparison) -> str:
    """The one reason."""
    best, base = comparison.recommended, comparison.baseline
    if best is None or base is None or best is base:
        words = comparison.summary.partition(": ")[2]
        for level in comparison.levels:
            # The table has the errors.
            words = words.replace(f" {level.name}: {failures_in_words(level)}.", "").replace(level.name, name(level))
        return words[:1].upper() + words[1:]
    fast = best.speedup is not None and best.speedup.low > 1
    first = f"The {'fastest' if fast else 'smallest'} level that is as good as {base.name}"
    first += "" if fast else f"; none as good is faster than {base.name}"
    if _to_the_bit(best):
        return f"{first}: every loss is {base.name}'s, to the bit."
    low, high = min(base.finite.values()), max(base.finite.values())
    mean, low_, high_ = shortest_distinct(best.mean or 0.0, low, high)
    where = "better than" if best.verdict.better else "within"
    span = f"the range of {base.name}'s seeds ({low_} to {high_})"
    return f"{first}: its final {comparison.metric}, {mean}, is {where} {span}."


def how_sure(comparison: Comparison) -> str:
    """What the seeds and the machine let one say."""
    best, base = comparison.recommended, comparison.baseline
    if best is None or base is None:
        return ""
    said = []
    if seeds_change_nothing(base):
        said.append("The script does not use its seeds: they count as one.")
    elif len(base.finite) < 2:
        said.append("From one seed, so how the loss varies is not known: run three seeds or more.")
    if best is not base and best.speedup is not None:
        low, high = best.speedup.low, best.speedup.high
        each = f"with each of {len(best.runs)} seeds" if len(best.runs) > 1 else "in one run"
        span = f"{low:.2f}x to {high:.2f}x" if f"{low:.2f}" != f"{high:.2f}" else f"{low:.2f}x"
        said.append(f"{'Faster' if low > 1 else 'Its speed'} {each}: {span}.")
    if len(base.finite) > 1 and not seeds_change_nothing(base) and not _to_the_bit(best):
        low, high = min(base.finite.values()), max(base.finite.values())
        width = relative_distance(high, low).removesuffix(" above")
        said.append(f"{base.name}'s own seeds lie {width} apart in {comparison.metric}: less than that is not seen.")
        if best is not base and (pairs := [(best.finite[s], base.finite[s]) for s in best.finite if s in base.finite]):
            furthest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) / (abs(pair[1]) or 1))
            off = signed_percent(*furthest).replace("+", "").replace("-", "")
            where = f"where {base.name} does" if off == "equal" else f"at most {off} from {base.name}"
            said.append(f"With the same seed it ends {where}.")
    load = load_note(comparison)
    return " ".join([*said, *([f"{load[:1].upper()}{load[1:]}."] if load else [])])


def load_note(comparison: Comparison) -> str:
    """What other work took of the machine while it was timed; "" if nothing to speak of."""
    load = comparison.machine.get("load", "")
    return next((note for note in comparison.notes if load and note.startswith(load)), load)


def in_short(level: LevelResult, comparison: Comparison) -> str:
    """Of a level in two or three words: why it is, or is not, the one to use."""
    base, best = comparison.baseline, comparison.recommended
    if not level.runs:
        return "failed"
    if base is None or best is None:
        return ""
    verdict = level.verdict
    if level is best and level is not base:
        return "use this"
    if level is base:
        return "the baseline"
    if verdict.kind == "differs" and not verdict.better:
        return "do not use: " + ("diverged" if len(level.finite) < len(level.runs) else "worse")
    if verdict.kind == "undecided" and not verdict.better:
        return "undecided"
    if faults(level):
        return "failed with some seeds"
    if skips_much(level):
        return "skips too many steps"
    good = "better" if verdict.better and verdict.kind == "differs" else "as good"
    if level.speedup is None:
        return good
    if level.speedup.high < 1:
        return f"{good}, slower"
    if level.level == "O3" and level.speedup.low > 1:
        return f"{good}; no FP32 weights"
    return f"{good}, faster" if level.speedup.low > 1 else f"{good}, {speed_in_words(level)}"


def state(level: LevelResult, comparison: Comparison) -> str:
    """How a level is shown: "best", "base", "bad", "unsure" or "plain"."""
    if level is comparison.baseline:
        return "base"
    if level is comparison.recommended:
        return "best"
    if level.verdict.kind in ("differs", "failed") and not level.verdict.better:
        return "bad"
    return "unsure" if not level.verdict.usable or faults(level) or skips_much(level) else "plain"


def _to_the_bit(level: LevelResult) -> bool:
    return level.verdict.kind == "within" and "to the bit" in level.verdict.reason


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
