"""Search for few modules that make a level as good as O0 if they are kept: the sets to try, and the result.

A module is kept if it computes in higher precision than the level: `keep_fp32`, or `keep_high` at O6 and O7. A trial
is a comparison of O0 and the level with one set of kept modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult, seeds_change_nothing
from amp_patch.comparison.plan import BASELINE, keep_variable, variables
from amp_patch.comparison.unjudged import OF_LEVEL
from amp_patch.comparison.verdict import gap_in_words
from amp_patch.diagnose import wording
from amp_patch.environment import named_level

Kept = tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A comparison of O0 and the level with some modules kept in higher precision.

    Attributes:
        kept: the names of these modules; all modules inside them are kept too.
        level: the level's figures and finding; None if O0 or the level has no figures.
        why: the reason why there are no figures, in words.
        without_base: whether it is O0 that has no figures.
        same_seeds: whether all seeds of O0 give the same losses, so that nothing can be decided.
    """

    kept: Kept
    level: LevelResult | None
    why: str = ""
    without_base: bool = False
    same_seeds: bool = False

    @property
    def passes(self) -> bool:
        """Whether the level has figures and is usable by its gap to O0, and no run failed or skipped too many steps."""
        return self.level is not None and self.level.finding.sound and self.level.finding.skips is None

    @property
    def hopeless(self) -> str:
        """If every other set of kept modules would fail like this trial's, the reason in words; "" if another may pass.

        Every other set fails if O0 itself has no figures, if the optimizer's eps is 0 in FP16, or if the results decide
        nothing.
        """
        if self.level is None:
            return self.why if self.without_base else ""
        found = self.level.finding
        lost = any(each.eps is not None for each in found.diverged)  # every module that is not kept divides by 0
        untold = found.unjudged not in ("", *OF_LEVEL) or self.same_seeds
        return self.level.verdict.reason if not self.passes and (lost or untold) else ""

    @property
    def text(self) -> str:
        """The result in words, without speed and memory."""
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
    """The state and the result of a search.

    Attributes:
        tried: the trials, in the order of their runs.
        answer: the last trial that passed, which has the fewest modules; None if no trial passed.
        complete: whether the search ended with every module of `answer` needed, as far as halving shows; False if the
            trials were used up.
        no_use: the reason why keeping modules cannot help; "" if keeping modules may help.
    """

    tried: list[Trial] = field(default_factory=list)
    answer: Trial | None = None
    complete: bool = False
    no_use: str = ""


def most_trials(modules: int) -> int:
    """Return the most trials of a search, including O0's own: 2 log2(modules) + 3."""
    return int(2 * math.log2(max(1, modules))) + 3


def trial_of(kept: Kept, comparison: Comparison) -> Trial:
    """Make a `Trial` from a finished comparison of O0 and the level with the modules `kept` in higher precision."""
    base = comparison.baseline
    others = [level for level in comparison.levels if level is not base]
    if base is None or base.level != BASELINE or len(others) != 1 or not others[0].runs:
        failed = "; ".join(level.verdict.text for level in comparison.levels if level.failed)
        without_base = base is None or base.level != BASELINE
        return Trial(kept, None, failed or comparison.why_nothing(), without_base)
    return Trial(kept, others[0], same_seeds=seeds_change_nothing(base))


def search(
    trial: Callable[[Kept], Trial],
    modules: Callable[[], Sequence[str]],
    most: int | None = None,
    named: Callable[[], Sequence[str]] = list,
) -> Found:
    """Find few modules that make the level pass if they are kept.

    Args:
        trial: trains the level with the given modules kept, or loads the result of such a training.
        modules: returns the names of the modules that can be kept, each after the modules inside it. Called after the
            first trial.
        most: the most trials, including O0's; None for `most_trials`, and one more if `named` has modules.
        named: returns the names of the modules to try first: a survey names lines in their forwards. Called after
            `modules`.

    If the trial that keeps the modules of `named` passes, only these modules are searched further. If that trial fails,
    `named` has no further effect.

    The search assumes that if a set passes, every larger set passes too. Halving finds the shortest prefix of the list
    that passes together with the modules already known to be needed. The last module of that prefix is needed. If the
    needed modules do not pass alone, halving finds the next needed module among the modules before the last one found.

    The search ends at a `hopeless` trial. A result that keeps every module is no answer, since no module would be at
    the level.
    """
    found, outcomes = Found(), dict[frozenset[str], bool]()
    allowed = math.inf

    def passes(names: Sequence[str]) -> bool:
        kept = outermost(names)
        if (key := frozenset(kept)) not in outcomes:
            if len(found.tried) + 1 >= allowed:  # + 1 for O0's own trial
                raise _UsedUp
            found.tried.append(trial(kept))
            found.no_use = found.tried[-1].hopeless
            if found.no_use:
                raise _UsedUp
            outcomes[key] = found.tried[-1].passes
            if outcomes[key]:  # a subset of every set that passed before
                found.answer = found.tried[-1]
        return outcomes[key]

    try:
        if passes(()):
            found.complete = True
            return found
        candidates, needed = list(modules()), list[str]()
        wanted = {*named()}
        first = [name for name in candidates if name in wanted]
        tries_first = outermost(first) not in ((), outermost(candidates))
        allowed = most_trials(len(candidates)) + tries_first if most is None else most
        if tries_first and passes(first):
            candidates = first
        while candidates:
            low, high = 0, len(candidates)  # a prefix of `low` modules fails; one of `high` passes or is untried
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if passes([*candidates[:middle], *needed]) else (middle, high)
            before, last = candidates[: high - 1], candidates[high - 1]
            needed.append(last)
            if passes(needed):
                found.complete = True
                break
            if found.answer is None and not passes([*before, *needed]):  # the whole list was assumed to pass
                break
            candidates = before
    except _UsedUp:
        pass
    if found.answer is not None and found.answer.kept and found.answer.kept == outermost(modules()):
        found.no_use = "all modules would have to be kept, which leaves none at the level"
        found.answer = None
    return found


class _UsedUp(Exception):
    """Signal that no trial is left, or that another trial cannot change the answer."""


def outermost(names: Sequence[str]) -> Kept:
    """Drop duplicates, and modules that are inside other modules of the list. The order stays."""
    every = set(names)
    return tuple(
        name
        for name in dict.fromkeys(names)
        if not any(name[:end] in every for end, letter in enumerate(name) if letter == ".")
    )


def line(number: int, each: Trial) -> str:
    """Format the line that is printed for a trial."""
    kept = "nothing kept" if not each.kept else f"kept {_named(each.kept)}"
    return f"trial {number}: {kept}: {'passes' if each.passes else 'fails'}: {each.text}"


def _named(names: Kept, most: int = 6) -> str:
    """Return the names as text, up to `most`. A longer list becomes its length, its first two and last three names.

    The last names are shown, because the sets that a search tries differ at their end.
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{len(names)} modules ({', '.join(names[:2])}, ... {', '.join(names[-3:])})"


def argument(level: str) -> str:
    """Return the argument of `initialize` that lists kept modules: "keep_fp32", or "keep_high" at O6 and O7."""
    return keep_variable(level).removeprefix("AMP_PATCH_").lower()


def report(level: str, found: Found, command: str) -> list[str]:
    """Return the lines that end `search`: the gaps without and with kept modules, the memory, the code to paste."""
    first, answer = found.tried[0], found.answer
    if found.no_use:
        return [f"{level}: keeping modules does not make it as good as {BASELINE}: {found.no_use}."]
    if answer is None:
        return [f"{level}: no modules were found that make it as good as {BASELINE} if kept: {first.text}."]
    if not answer.kept:
        return [f"{level} is as good as {BASELINE} with nothing kept: {answer.text}."]
    lines = [f"{name:8}{each.text}{_memory(each)}" for name, each in (("without", first), ("with", answer))]
    if first.level is not None and first.level.finding.kind == "undecided":
        lines.append("That it is worse with nothing kept is not shown: it may be as good with more --seeds.")
    if not found.complete:
        lines.append("The trials were used up; fewer modules may be enough: continue with --resume and more --trials.")
    keep = f"{argument(level)}={list(answer.kept)!r}".replace("'", '"')
    other = None if answer.level is None else answer.level.other_dtype
    paste = f"amp.initialize(model, optimizer, {named_level(level).arguments(other)}, {keep})"
    lines += ["To use it in the script:", f"    {paste}", "To use it without an edit:"]
    asked = f"{variables(level, other)} {keep_variable(level)}={','.join(answer.kept)}"
    return [*lines, f"    {asked} python -m amp_patch run {command}"]


def _memory(each: Trial) -> str:
    if each.level is None or each.level.memory is None:
        return ""
    return f"; {wording.ratio(each.level.memory)} of {BASELINE}'s memory"
