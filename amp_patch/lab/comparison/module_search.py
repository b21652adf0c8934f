"""Which modules must be kept in a higher precision for a level to be as good: which sets to try, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_patch.environment import named_level
from amp_patch.lab import wording
from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.comparison.level_result import LevelResult, seeds_change_nothing
from amp_patch.lab.comparison.plan import BASELINE, keep_variable, variables
from amp_patch.lab.comparison.verdict import gap_in_words
from amp_patch.policy import OPT_LEVELS

Kept = tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """The level with some modules kept, beside O0.

    Attributes:
        kept: their names; what is inside of them is kept too.
        level: its figures and finding; None where O0, or the level, has none.
        why: in words, why there are none.
        without_base: whether O0 is what has none.
        same_seeds: whether O0's seeds give the same losses, so that nothing can be told.
    """

    kept: Kept
    level: LevelResult | None
    why: str = ""
    without_base: bool = False
    same_seeds: bool = False

    @property
    def passes(self) -> bool:
        """Whether nothing speaks against the level: by its gap to O0, failed runs and skips."""
        return self.level is not None and self.level.finding.sound and self.level.finding.skips is None

    @property
    def hopeless(self) -> str:
        """The reason for which it fails, and would with other modules kept; "" where others may pass."""
        if self.level is None:
            return self.why if self.without_base else ""
        found = self.level.finding
        lost = any(each.eps is not None for each in found.diverged)  # each part that is not kept divides by 0
        untold = found.kind == "unjudged" or self.same_seeds
        return self.level.verdict.reason if not self.passes and (lost or untold) else ""

    @property
    def text(self) -> str:
        """What came out, in words: without speed and memory."""
        if self.level is None:
            return self.why
        found, reason = self.level.finding, self.level.verdict.reason
        if found.gap is None or found.diverged or found.collapsed or found.faults or found.to_the_bit:
            return reason
        name = {"within": "as good", "so far": "as good so far"}.get(found.kind, found.kind)
        if found.kind == "differs":
            name = "better" if found.better else "worse"
        skips = reason.rpartition("; ")[2] if found.skips is not None else ""
        return "; ".join(filter(None, [f"{name}, {gap_in_words(found.gap, BASELINE)}", skips]))


@dataclass
class Found:
    """What a search has tried, in that order, and found.

    Attributes:
        answer: the last trial that passed, with the fewest modules; None where none passed.
        complete: whether each module of `answer` is needed, as far as halving tells; else the trials were used up.
        no_use: why no module that is kept would help; "" where that is not known.
    """

    tried: list[Trial] = field(default_factory=list)
    answer: Trial | None = None
    complete: bool = False
    no_use: str = ""


def most_trials(modules: int) -> int:
    """How many a search makes at most, O0's own among them: 2 log2(modules) + 3."""
    return int(2 * math.log2(max(1, modules))) + 3


def trial_of(kept: Kept, comparison: Comparison) -> Trial:
    """Of a comparison of O0 and the level."""
    base = comparison.baseline
    others = [level for level in comparison.levels if level is not base]
    if base is None or base.level != BASELINE or len(others) != 1 or not others[0].runs:
        failed = "; ".join(level.verdict.text for level in comparison.levels if level.failed)
        without_base = base is None or base.level != BASELINE
        return Trial(kept, None, failed or comparison.why_nothing(), without_base)
    return Trial(kept, others[0], same_seeds=seeds_change_nothing(base))


def search(trial: Callable[[Kept], Trial], modules: Callable[[], Sequence[str]], most: int | None = None) -> Found:
    """Find few modules that, kept, make the level pass.

    Args:
        trial: trains the level with these modules kept, or has done so.
        modules: the names of those that can be kept, each behind those inside it; asked after the first trial.
        most: trials, O0's among them, in place of `most_trials`.

    With a set that passes, larger sets are taken to pass too. So the smallest number of modules, counted from the
    front, that makes the level pass is found by halving, and the last of them is needed. If it does not pass alone,
    the next one is sought in the same way among those in front of it.

    It ends at a trial that is `hopeless`. An answer that keeps every module is none: that is no longer the level.
    """
    found, outcomes = Found(), dict[Kept, bool]()
    allowed = math.inf

    def passes(names: Sequence[str]) -> bool:
        kept = outermost(names)
        if kept not in outcomes:
            if len(found.tried) + 1 >= allowed:  # O0's own is one
                raise _UsedUp
            found.tried.append(trial(kept))
            found.no_use = found.tried[-1].hopeless
            if found.no_use:
                raise _UsedUp
            outcomes[kept] = found.tried[-1].passes
            if outcomes[kept]:  # a part of every set that has passed before
                found.answer = found.tried[-1]
        return outcomes[kept]

    try:
        if passes(()):
            found.complete = True
            return found
        candidates, needed = list(modules()), list[str]()
        allowed = most_trials(len(candidates)) if most is None else most
        while candidates:
            low, high = 0, len(candidates)  # so many fail, so many pass, or have not been tried
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if passes([*candidates[:middle], *needed]) else (middle, high)
            before, last = candidates[: high - 1], candidates[high - 1]
            needed.append(last)
            if passes(needed):
                found.complete = True
                break
            if found.answer is None and not passes([*before, *needed]):  # that all of them pass was not tried
                break
            candidates = before
    except _UsedUp:
        pass
    if found.answer is not None and found.answer.kept and found.answer.kept == outermost(modules()):
        found.no_use = "it takes every module kept, which leaves nothing at the level"
        found.answer = None
    return found


class _UsedUp(Exception):
    """There is no trial left, or none that would tell more."""


def outermost(names: Sequence[str]) -> Kept:
    """Without the names of modules inside others of them; each once, in order."""
    every = set(names)
    return tuple(
        name
        for name in dict.fromkeys(names)
        if not any(name[:end] in every for end, letter in enumerate(name) if letter == ".")
    )


def line(number: int, each: Trial) -> str:
    """What is printed of a trial."""
    kept = "nothing kept" if not each.kept else f"kept {_named(each.kept)}"
    return f"trial {number}: {kept}: {'passes' if each.passes else 'fails'}: {each.text}"


def _named(names: Kept, most: int = 6) -> str:
    """All of few; of more how many, the first and the last, by which halving's sets differ."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{len(names)} modules ({', '.join(names[:2])}, ... {', '.join(names[-3:])})"


def argument(level: str) -> str:
    """The argument of `initialize` that names what is kept: "keep_fp32", or "keep_high" at O6 and O7."""
    return "keep_fp32" if OPT_LEVELS[named_level(level).level].product_format is None else "keep_high"


def report(level: str, found: Found, command: str) -> list[str]:
    """The end of what is printed: what to paste, the gap with and without, and what it costs in memory."""
    first, answer = found.tried[0], found.answer
    if found.no_use:
        return [f"{level}: no module that is kept makes it as good as {BASELINE}: {found.no_use}."]
    if answer is None:
        return [f"{level}: nothing is found to keep that would make it as good as {BASELINE}: {first.text}."]
    if not answer.kept:
        return [f"{level} is as good as it is, nothing has to be kept: {answer.text}."]
    lines = [f"{name:8}{each.text}{_memory(each)}" for name, each in (("without", first), ("with", answer))]
    lines += [_costs(first, answer)]
    if first.level is not None and first.level.finding.kind == "undecided":
        lines.append("That it is worse without is not shown: with more --seeds it may be as good, with nothing kept.")
    if not found.complete:
        lines.append("The trials were used up; fewer modules may do: --resume with more --trials goes on.")
    keep = f"{argument(level)}={list(answer.kept)!r}".replace("'", '"')
    other = None if answer.level is None else answer.level.other_dtype
    paste = f"amp.initialize(model, optimizer, {named_level(level).arguments(other)}, {keep})"
    lines += ["To use it in the script:", f"    {paste}", "To use it without an edit:"]
    asked = f"{variables(level, other)} {keep_variable(level)}={','.join(answer.kept)}"
    return [*filter(None, lines), f"    {asked} python -m amp_patch run {command}"]


def _memory(each: Trial) -> str:
    if each.level is None or each.level.memory is None:
        return ""
    return f"; {wording.ratio(each.level.memory)} of {BASELINE}'s memory"


def _costs(first: Trial, answer: Trial) -> str:
    """What the kept modules add; "" where it is not known."""
    sizes = [each.level.memory_bytes if each.level is not None else None for each in (first, answer)]
    if sizes[0] is None or sizes[1] is None:
        return ""
    unit, (cost, whole) = wording.sizes([abs(sizes[1] - sizes[0]), sizes[1]])
    what = "more" if sizes[1] >= sizes[0] else "less"
    return f"It takes {cost} {unit} {what} than without, {whole} {unit} in all."


def to_dict(level: str, found: Found) -> dict[str, Any]:
    """For search.json."""

    def told(each: Trial) -> dict[str, Any]:
        has = each.level
        return {
            "kept": list(each.kept),
            "passes": each.passes,
            "text": each.text,
            "kind": has.finding.kind if has is not None else "failed",
            "gap": has.finding.gap.to_dict() if has is not None and has.finding.gap is not None else None,
            "memory_bytes": has.memory_bytes if has is not None else None,
            "memory_ratio": has.memory if has is not None else None,
        }

    answer = found.answer
    return {
        "level": level,
        "argument": argument(level),
        "kept": list(answer.kept) if answer is not None else None,
        "complete": found.complete,
        "no_use": found.no_use,
        "trials": [told(each) for each in found.tried],
    }
