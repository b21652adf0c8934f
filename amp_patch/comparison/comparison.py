"""Comparison: trainings at several opt levels side by side, and what they say about each level, by a stated test."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from amp_patch.comparison import measures
from amp_patch.comparison.level_result import (
    SKIPPED_SHARE,
    SKIPPED_STEPS,
    LevelResult,
    failures_in_words,
    faults,
    is_smaller,
    level_dict,
    measured,
    seeds_change_nothing,
    skips_much,
    went_well,
)
from amp_patch.comparison.measures import LOSS, Ratio
from amp_patch.comparison.verdict import SIGNIFICANCE, Judge, more_seeds
from amp_patch.comparison.wording import listed, times
from amp_patch.recording.run import Run


@dataclass(frozen=True)
class Comparison:
    """Trainings at several levels, and what they say. What is computed from the runs is computed once, when asked for.

    How a level is judged is in `test`, in words; `measures` has the sums.

    Attributes:
        title: what was trained: the script's name.
        runs: in the order in which the levels were asked for.
        metric: "loss", or a name given to `amp.log`.
        maximize: whether more of the metric is better.
        asked_steps: how many steps each run should have trained, if that was said.
        machine: what it ran on, as `machine()` tells.

    Raises:
        ValueError: two runs of one level that went well have the same seed.
    """

    title: str
    runs: list[Run]
    metric: str = LOSS
    maximize: bool = False
    asked_steps: int | None = None
    machine: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for level in self._groups:
            twice = [seed for seed in level.seeds if level.seeds.count(seed) > 1]
            if twice:
                raise ValueError(
                    f"Comparison: runs has two of {level.name} with seed {twice[0]}; runs are paired by their seeds: "
                    "give each run of a level its own"
                )

    @cached_property
    def steps(self) -> int:
        """How many steps all runs that went well trained: the losses are compared over these."""
        return measures.common_steps([run for run in self.runs if went_well(run)])

    @cached_property
    def levels(self) -> list[LevelResult]:
        """In the order in which the runs name them."""
        levels = [measured(level, self._base) for level in self._groups]
        judge = Judge(self._same_level(levels, self._base), self.metric, self.maximize, self.comparable)
        return [replace(level, verdict=judge.verdict(level)) for level in levels]

    @cached_property
    def baseline(self) -> LevelResult | None:
        """O0 if it has figures, else the first level that does; None if none does."""
        return self._same_level(self.levels, self._base)

    @cached_property
    def comparable(self) -> bool:
        """Whether there are two levels with runs that went well, and figures of at least one of them."""
        return self._base is not None and sum(bool(level.runs) for level in self._groups) > 1

    @property
    def test(self) -> str:
        """How it was decided, in words."""
        base = self._base.name if self._base is not None else "the baseline"
        what = (
            f"the mean training loss over the last tenth of the {self.steps} steps that all runs trained"
            if self.metric == LOSS
            else f"the last value of {self.metric} that the run gave to amp.log"
        )
        better = "higher" if self.maximize else "lower"
        return " ".join(
            [
                f"The result of a run is {what}; {better} is better. Runs are paired by seed with {base}'s.",
                f"Within: the mean over the level's seeds that {base} has too lies between the lowest and the highest",
                f"result of {base}'s seeds; a difference smaller than this spread is not seen.",
                "Differs: it lies outside, and Student's paired t-test over the seeds (two-sided) rejects at",
                f"{SIGNIFICANCE:.0%} that there is no difference; each level is tested by itself.",
                "Undecided: it lies outside, and the test does not reject that, or there is only one seed.",
                "To lie outside on the better side is no reason against a level. One of which a run diverged (its",
                "result is missing or not finite) is not to be used; one of which a run skipped more than half of its",
                f"steps, or more than {SKIPPED_SHARE:.0%} and {SKIPPED_STEPS} of them, is not recommended.",
                "Times: the median step of each run, without the first tenth of the steps; the ratio is taken for each",
                "seed, and a level is faster only if it is with all of them (with one seed: if the quartiles of its",
                "step times are). O3, which keeps no FP32 weights, is recommended only where it is compared alone.",
            ]
        )

    @cached_property
    def recommended(self) -> LevelResult | None:
        """The level to use: the baseline where no other is better; None where there is nothing to compare."""
        base = self.baseline
        if base is None or not self.comparable:
            return None
        usable = [level for level in self._sound if not skips_much(level) and not self._unasked(level)]
        faster = [level for level in usable if level.speedup is not None and level.speedup.low > 1]
        if faster:
            return max(faster, key=lambda level: level.speedup or Ratio(0, 0, 0))
        as_fast = [
            level for level in usable if is_smaller(level, base) and (level.speedup is None or level.speedup.high >= 1)
        ]
        return min(as_fast, key=lambda level: level.memory or 1.0, default=base)

    @cached_property
    def summary(self) -> str:
        """What to use, and why, in one or two sentences."""
        base, best = self.baseline, self.recommended
        if base is None or best is None:
            return self._nothing_to_compare()
        if best is not base and best.speedup is not None and best.speedup.low > 1:
            return f"Use {best.name}: {best.verdict.text}."
        if best is not base:
            return f"Use {best.name} for its memory; none is faster than {base.name}: {best.verdict.text}."
        others = [level for level in self.levels if level is not base and level.runs]
        well = [level for level in self._sound if not skips_much(level)]
        usable = [level for level in well if not self._unasked(level)]
        smaller = [level for level in usable if is_smaller(level, base)]
        kinds = {
            kind: [level for level in others if level.verdict.kind == kind and not level.verdict.better]
            for kind in ("undecided", "differs")
        }
        undecided, timed = kinds["undecided"], [level for level in usable if level.speedup is not None]
        reasons = {
            "{} would do as well in less memory, but slower": smaller,
            "{} would do as well, but not faster, nor in much less memory": [
                level for level in timed if level not in smaller
            ],
            "{} would do as well, but how fast is not known": [level for level in usable if level not in timed],
            f"{{}} cannot be told from chance yet, {more_seeds(base)}": undecided,
            "{} keeps no FP32 weights, and is for whoever compares it alone": [
                level for level in well if level not in usable
            ],
            "{} skipped too many steps": [level for level in self._sound if skips_much(level)],
            "do not use {}": kinds["differs"],
            "{} failed with some seeds": [level for level in others if level.verdict.usable and faults(level)],
            "{} failed": [level for level in self.levels if not level.runs],
        }
        said = [text.format(listed([_promise(level) for level in found])) for text, found in reasons.items() if found]
        return f"Stay with {base.name}{' for now' if undecided else ''}: {'; '.join(said)}."

    @cached_property
    def notes(self) -> list[str]:
        """What the reader should know of the runs: what they noted, and where they are not alike."""
        notes: dict[str, list[str]] = {}
        well = [run for run in self.runs if went_well(run)]
        for run in well:
            if self.asked_steps is not None and run.steps < self.asked_steps:
                text = f"trained {run.steps} of the {self.asked_steps} steps asked for"
                notes.setdefault(text, []).append(_name(run))
            elif run.steps < max(each.steps for each in well):
                notes.setdefault(f"trained only {run.steps} steps", []).append(_name(run))
            for text in run.notes:
                notes.setdefault(text, []).append(_name(run))
        lines = [self._load_in_words] if "load" in self.machine else []
        lines += [f"{'all runs' if len(names) == len(well) else listed(names)}: {t}" for t, names in notes.items()]
        if self.metric == LOSS and len({run.steps for run in well}) > 1:
            lines.append(f"the losses are compared over the {self.steps} steps that all runs have in common")
        base = self._base
        if base is not None and base.level != "O0" and any(level.level == "O0" for level in self._groups):
            lines.append(f"O0 gave no results; the others are compared with {base.name}")
        if base is not None and seeds_change_nothing(base):
            lines.append(f"all seeds of {base.name} gave the same losses to the bit: they are one seed to the test")
        return lines

    @property
    def _load_in_words(self) -> str:
        """What other work on the machine does to the figures."""
        ranges = [level.speedup for level in self.levels if level.speedup is not None]
        apart = max((r.high / r.low - 1 for r in ranges if r.low > 0), default=0.0)
        sure = f"a level's speeds lie up to {apart:.0%} apart" if apart >= 0.005 else "the speeds may be off"
        return f"{self.machine['load']}: {sure}, the losses are not touched by it"

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for `run.dumps`."""
        return {
            "title": self.title,
            "metric": self.metric,
            "maximize": self.maximize,
            "asked_steps": self.asked_steps,
            "machine": self.machine,
            "comparable": self.comparable,
            "summary": self.summary,
            "test": self.test,
            "notes": self.notes,
            "baseline": self.baseline.name if self.baseline is not None else None,
            "levels": [level_dict(level) for level in self.levels],
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Comparison:
        """The comparison of which `to_dict` gave `values`; what is computed is computed again, from the runs."""
        given = {name: values[name] for name in ("title", "metric", "maximize", "asked_steps", "machine")}
        return cls(runs=[Run.from_dict(run) for run in values["runs"]], **given)

    @cached_property
    def _groups(self) -> list[LevelResult]:
        """The levels with their runs and figures. A run that failed before its dtype was known joins its level."""
        keys: dict[tuple[str, str | None], list[Run]] = {}
        of_level: dict[str, tuple[str, str | None]] = {}
        for run in sorted(self.runs, key=lambda run: run.dtype is None):
            key = (run.level, run.dtype)
            if run.dtype is None and not went_well(run):
                key = of_level.get(run.level, key)
            of_level.setdefault(run.level, key)
            keys.setdefault(key, []).append(run)
        order = {id(run): i for i, run in enumerate(self.runs)}
        groups = []
        for (level, dtype), runs in sorted(keys.items(), key=lambda each: min(order[id(run)] for run in each[1])):
            runs = sorted(runs, key=lambda run: run.seed)
            well = [run for run in runs if went_well(run)]
            final = [measures.final(run, self.metric, self.steps) for run in well]
            groups.append(LevelResult(level, dtype, well, [run for run in runs if not went_well(run)], final))
        return groups

    @cached_property
    def _sound(self) -> list[LevelResult]:
        """The levels beside the baseline against which nothing speaks but, perhaps, their skips."""
        others = [level for level in self.levels if level is not self.baseline and level.runs]
        return [level for level in others if level.verdict.usable and not faults(level)]

    def _unasked(self, level: LevelResult) -> bool:
        """Whether it is O3, which only whoever compares it with the baseline alone asks for."""
        base = self.baseline
        return level.level == "O3" and any(each.level not in ("O3", base and base.level) for each in self._groups)

    @cached_property
    def _base(self) -> LevelResult | None:
        with_figures = [level for level in self._groups if level.finite]
        return next((level for level in with_figures if level.level == "O0"), next(iter(with_figures), None))

    def _nothing_to_compare(self) -> str:
        if not self.runs:
            return "Nothing to compare: there is no run."
        failed = "".join(f" {level.name}: {failures_in_words(level)}." for level in self._groups if level.failed)
        well = [level for level in self._groups if level.runs]
        if not well:
            return f"Nothing to compare: no run went well.{failed}"
        if self._base is None and self.metric != LOSS and not any(self.metric in run.logged for run in self.runs):
            logged = sorted({name for run in self.runs for name in run.logged})
            known = f"they logged {listed(logged)}" if logged else f"call amp.log({self.metric}=...) in the script"
            if self.asked_steps is not None:
                known += f", within the {self.asked_steps} steps asked for"
            return f"Nothing to compare: no run gave {self.metric}; {known}.{failed}"
        if self._base is None:
            return f"Nothing to compare: all runs of {listed([level.name for level in well])} diverged.{failed}"
        return f"Nothing to compare {well[0].name} with: it is the only level with results.{failed}"

    @staticmethod
    def _same_level(levels: list[LevelResult], wanted: LevelResult | None) -> LevelResult | None:
        """The one of `levels` that has the level and the dtype of `wanted`; its other figures may be known by now."""
        if wanted is None:
            return None
        return next(each for each in levels if (each.level, each.dtype) == (wanted.level, wanted.dtype))


def _name(run: Run) -> str:
    return f"{run.level} seed {run.seed}"


def _promise(level: LevelResult) -> str:
    """The name, and of a level that may yet be recommended how much faster it is."""
    if level.verdict.kind != "undecided" or level.speedup is None or level.speedup.low <= 1:
        return level.name
    return f"{level.name} ({times(level.speedup.median)[0]}x faster)"
