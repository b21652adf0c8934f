"""What is said of each level, by the test that `Comparison.test` puts in words."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from amp_patch.comparison import measures
from amp_patch.comparison.level_result import (
    LevelResult,
    Verdict,
    failures_in_words,
    same_losses,
    seeds_change_nothing,
    seeds_in_words,
    skips_in_words,
)
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.wording import relative_distance, shortest_distinct, times

SIGNIFICANCE = 0.05
ALIKE = 1.05  # "as fast as" is said within this ratio


@dataclass(frozen=True)
class Judge:
    """Gives the verdict on each level of a comparison.

    Attributes:
        base: the level that the others are compared with; None if no level has figures.
        metric, maximize: of the comparison.
        comparable: whether there is anything to compare: two levels with runs that went well, figures of one of them.
    """

    base: LevelResult | None
    metric: str
    maximize: bool
    comparable: bool

    @property
    def figure(self) -> str:
        """What the metric is called in a sentence."""
        return f"final {self.metric}"

    def verdict(self, level: LevelResult) -> Verdict:
        if not level.runs:
            return Verdict("failed", failures_in_words(level), reason=failures_in_words(level))
        if self.base is None:
            text = "; ".join(self._diverged(level, None))
            return Verdict("alone", text, reason=text)
        return self._beside(level, self.base)

    def _beside(self, level: LevelResult, base: LevelResult) -> Verdict:
        kind, accuracy, better = self._accuracy(level, base)
        cost = "" if level is base else _speed(level, base)
        loss = [accuracy, skips_in_words(level)]
        failed = failures_in_words(level) if level.failed else ""
        if kind == "differs" and not better:
            parts = ["do not use: " + accuracy, loss[1], cost, failed]
        else:
            parts = [cost, *loss, failed]
        if kind == "baseline" and not self.comparable:
            kind = "alone"
        short = accuracy
        if level is base:
            short = "; ".join(self._diverged(level, base))
        elif kind == "within" and accuracy.endswith("to the bit"):
            short = f"every loss as {base.name}'s, to the bit"
        elif kind == "within":
            short = ""
        reason = [short, skips_in_words(level), failed]
        text, said = ("; ".join(part for part in each if part) for each in (parts, reason))
        return Verdict(kind, text, better, said)

    def _accuracy(self, level: LevelResult, base: LevelResult) -> tuple[str, str, bool]:
        """The kind of the verdict, its reason, and whether it is better than the baseline."""
        spread = list(base.finite.values())
        diverged = self._diverged(level, base)
        if level is base:
            text, low, high = shortest_distinct(statistics.mean(spread), min(spread), max(spread))
            over = f" over {len(spread)} seeds ({low} to {high})" if len(spread) > 1 else ""
            return "baseline", "; ".join([f"{self.figure} {text}{over}", *diverged]), False
        if diverged:
            return "differs", "; ".join(diverged), False
        seeds = [seed for seed in level.finite if seed in base.finite]
        if not seeds:
            return "undecided", f"no seed of it has a result of {base.name}'s to compare with", False
        ours, theirs = [level.finite[seed] for seed in seeds], [base.finite[seed] for seed in seeds]
        of_seed = {run.seed: run for run in base.runs}
        if ours == theirs and all(same_losses(run, of_seed[run.seed]) for run in level.runs if run.seed in seeds):
            same = f"every loss the same as {base.name}'s, to the bit"
            return "within", f"{self.figure} {shortest_distinct(statistics.mean(ours))[0]}, {same}", False
        mean, base_mean = statistics.mean(ours), statistics.mean(theirs)
        better = (mean > base_mean) is self.maximize and mean != base_mean
        distance = relative_distance(mean, base_mean)
        if len(spread) < 2 or seeds_change_nothing(base):
            what = "the seeds change nothing" if len(spread) > 1 else "one seed"
            return (
                "undecided",
                f"{what}: {self.figure} {distance} {base.name}'s; {more_seeds(base)} to judge it",
                False,
            )
        text, low, high = shortest_distinct(mean, min(spread), max(spread))
        its_spread = f"the spread of {base.name}'s {len(spread)} seeds ({low} to {high})"
        if min(spread) <= mean <= max(spread):
            return "within", f"{self.figure} {text} within {its_spread}", False
        if len(seeds) < 2:
            return "undecided", f"{self.figure} {text} outside {its_spread}, with one seed; run more seeds", False
        p = measures.paired_t_test(ours, theirs)
        word = ", better: " if better else ", "
        of_base = shortest_distinct(base_mean)[0]
        difference = f"{self.figure} {text}{word}{distance} {base.name}'s {of_base}, outside {its_spread}"
        found = f"paired t-test p {'< 0.001' if p < 0.001 else f'= {p:.2g}'}"
        if p < SIGNIFICANCE:
            return "differs", f"{difference}, {found}", better
        more = "" if better else "; run more seeds"
        return "undecided", f"{difference}, which may be chance ({found}){more}", better

    def _diverged(self, level: LevelResult, base: LevelResult | None) -> list[str]:
        """Why runs of a level have no figure, in words."""
        reasons: dict[tuple[str, str], list[int]] = {}
        for run, figure in zip(level.runs, level.final, strict=True):
            if math.isfinite(figure):
                continue
            step = next((step for step, loss in enumerate(run.loss) if not math.isfinite(loss)), None)
            after = ""
            if step is not None and self.metric == LOSS:
                what, after = "diverged", f" at step {step}"
            elif self.metric != LOSS and self.metric in run.logged:
                what = f"{self.metric} was not finite"
            else:
                what = f"gave no {self.metric}"
            if base is not None and level is not base and run.seed in set(base.seeds) - set(base.finite):
                after += f", as {base.name} did"
            if run.lost_eps is not None:
                after += f": its optimizer's eps {run.lost_eps:g} is 0 in FP16; take eps=1e-4 or more, or O2"
            reasons.setdefault((what, after), []).append(run.seed)
        return [f"{what} with {seeds_in_words(seeds)}{after}" for (what, after), seeds in reasons.items()]


def more_seeds(base: LevelResult) -> str:
    """What to do where the seeds that there are do not decide."""
    if seeds_change_nothing(base):
        return "let the script use the seeds"
    return "run more seeds" if len(base.finite) > 2 else "run three seeds or more"


def _speed(level: LevelResult, base: LevelResult) -> str:
    parts = []
    if level.speedup is not None:
        median, low, high = level.speedup
        how = "one run, " if len(set(level.seeds) & set(base.seeds)) == 1 else ""
        if low > 1:
            middle, least, most = times(median, low, high)
            parts.append(f"{middle}x faster than {base.name} ({how}{least} to {most})")
        elif high < 1:
            middle, least, most = times(1 / median, 1 / high, 1 / low)
            parts.append(f"{middle}x slower than {base.name} ({how}{least} to {most})")
        else:
            alike = low >= 1 / ALIKE and high <= ALIKE
            what = "as fast as" if alike else "not clearly faster or slower than"
            parts.append(f"{what} {base.name} ({how}{low:.2f}x to {high:.2f}x)")
    memory = level.memory
    if memory is not None:
        what = "memory" if level.memory_ratio is not None else "bytes of weights, gradients and state"
        same, part = abs(memory - 1) < 0.005, "of" if memory < 1 else "times"
        parts.append(f"the same {what}" if same else f"{memory:.2f} {part} its {what}")
    return ", ".join(parts)
