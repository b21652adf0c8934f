"""The `Comparison` of trainings at several opt levels: their figures, and a finding for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from amp_patch.comparison import lost_without_masters, measures, named_lines
from amp_patch.comparison.judge import judge
from amp_patch.comparison.level_result import (
    LevelResult,
    level_dict,
    measured,
    seeds_change_nothing,
    stopped_runs,
    went_well,
)
from amp_patch.comparison.measures import LOSS
from amp_patch.comparison.plan import BASELINE, MARGIN, MIN_GAIN, SPEED
from amp_patch.comparison.recommendation import Recommendation, recommend, summary
from amp_patch.comparison.unjudged import FEW_STEPS, LEAST_STEPS, Terms
from amp_patch.comparison.verdict import cost, failures_in_words, verdict
from amp_patch.diagnose.recording.run import INTERRUPTED, NATIVE, Run, check_types
from amp_patch.diagnose.wording import counted, fine_percent, lacks, listed, metric_in_words, type_name, whole_percent


@dataclass(frozen=True)
class Comparison:
    """Trainings at several levels, with the figures and findings of each level.

    Figures are computed from the runs once, at the first access. docs/compare.md says how a level is judged; `measures`
    has the formulas.

    Attributes:
        title: the name of the script or function that was trained.
        runs: the runs, in the order of the levels that were asked for.
        metric: "loss", or a name given to `amp.log`.
        maximize: whether more of the metric is better; True for a loss that the script's optimizer maximizes.
        asked_steps: the number of steps that the caller asked of each run; None if the script decided.
        machine: the hardware and versions, as `machine()` returns them.
        again: the shell arguments of the `compare` that made the comparison, without levels and seeds; "" if no
            command made it.
        asked_runs: the number of runs that the caller asked for; None if that is not known.
        min_gain: the share of the baseline's memory that a level must save to be recommended for its memory.
        margin: a level counts as good if it is worse by at most this share of the baseline's result.
        command: the arguments of `python -m amp_patch run` for the same training; "" if it was no script.
        folder: the report's folder, as `compare --resume` takes it; "" if no command made the comparison.
        goal: SPEED, or MEMORY if saved memory counts more than speed.
        agreement: the differences of the levels' log-probabilities from O0's, in words; "" if they are unknown.
        survey: the survey of the first step, which names the lines that break a level; None if there was none.

    Raises:
        ValueError: two runs of one level that went well have the same seed.
    """

    title: str
    runs: list[Run]
    metric: str = LOSS
    maximize: bool = False
    asked_steps: int | None = None
    machine: dict[str, str] = field(default_factory=dict)
    again: str = ""
    asked_runs: int | None = None
    command: str = ""
    min_gain: float = MIN_GAIN
    margin: float = MARGIN
    folder: str = ""
    survey: named_lines.Survey | None = None
    goal: str = SPEED
    agreement: str = ""

    def __post_init__(self) -> None:
        if self.metric == LOSS and any(run.maximized == "all" for run in self.runs):
            object.__setattr__(self, "maximize", True)  # the dataclass is frozen
        for level in self._groups:
            twice = [seed for seed in level.seeds if level.seeds.count(seed) > 1]
            if twice:
                raise ValueError(
                    f"Comparison: runs has two of {level.name} with seed {twice[0]}; runs are paired by their seeds: "
                    "give each run of a level its own"
                )

    @property
    def cut(self) -> int:
        """How many of the requested runs (`asked_runs`) are missing or were interrupted; 0 if `asked_runs` is None."""
        ended = sum(run.error_kind != INTERRUPTED for run in self.runs)
        return 0 if self.asked_runs is None else max(0, self.asked_runs - ended)

    @cached_property
    def steps(self) -> int:
        """The number of steps that all successful runs have in common: losses are compared over these.

        Runs whose last loss is not finite, and stopped ones, do not shorten it.
        """
        well = [run for run in self.runs if went_well(run)]
        finite = [run for run in well if run.loss and math.isfinite(run.loss[-1])]
        whole = [run.steps for run in finite if id(run) not in self._stopped]
        return min(whole or [run.steps for run in well], default=0)

    @cached_property
    def levels(self) -> list[LevelResult]:
        """The levels with their figures and findings, in the order of the runs."""
        crowded = measures.is_crowded(self.runs)
        levels = [measured(level, self._base, crowded) for level in self._groups]
        base = self._same_level(levels, self._base)
        terms = Terms(self.metric, self.maximize, self.margin, self.steps)
        found = [judge(level, base, terms, self.comparable) for level in levels]
        levels = [
            replace(level, finding=each, verdict=verdict(level, base, each, self.metric))
            for level, each in zip(levels, found, strict=True)
        ]
        return [level.with_reason(named_lines.beside(self.survey, level)) for level in levels]

    @property
    def unexplained(self) -> list[LevelResult]:
        """The levels that ended badly, for a reason that a survey may find. Empty if O0 has no figures."""
        if self.baseline is None or self.baseline.level != BASELINE:
            return []
        return [level for level in self.levels if named_lines.ended_badly(level)]

    @cached_property
    def baseline(self) -> LevelResult | None:
        """O0 if it has figures, else the first level that has figures; None if no level has."""
        return self._same_level(self.levels, self._base)

    @cached_property
    def comparable(self) -> bool:
        """Whether two levels or more have successful runs, and at least one level has figures."""
        return self._base is not None and sum(bool(level.runs) for level in self._groups) > 1

    @cached_property
    def recommendation(self) -> Recommendation | None:
        """The recommended level with its reasons; None if there is nothing to compare."""
        base = self.baseline
        return (
            None
            if base is None or not self.comparable
            else recommend(self.levels, base, self.min_gain, self.metric_in_words, self.goal)
        )

    @property
    def seeds_to_tell(self) -> int | None:
        """The estimated number of seeds, in all, that would decide the levels that the recommendation depends on.

        None if these levels are decided already, or if no number is known for one of them.
        """
        found = self.recommendation
        if found is None:
            return None
        so_far = [found.level] if found.level.finding.kind == "so far" else []
        gaps = [level.finding.gap for level in so_far or found.because.get("undecided", [])]
        more = [gap.seeds + gap.more_seeds for gap in gaps if gap is not None and gap.more_seeds is not None]
        return max(more) if more and len(more) == len(gaps) else None

    @property
    def recommended(self) -> LevelResult | None:
        """The level to use: the baseline if no other is better; None if there is nothing to compare."""
        return None if self.recommendation is None else self.recommendation.level

    @cached_property
    def summary(self) -> str:
        """The level to use and the reason, in one or two sentences, followed by the notes that limit them."""
        if self.baseline is not None and self.recommendation is not None:
            words = summary(self.recommendation, self.baseline)
            notes = [note for note in (self.losing_note, self.kernels_note, self.few_steps_note) if note]
            told = [self.beside_script] if self.beside_script else []
            return " ".join([words, *told, *(f"{note[0].upper()}{note[1:]}." for note in notes)])
        failed = "".join(f" {level.name}: {failures_in_words(level)}." for level in self._groups if level.failed)
        if self.only is not None:
            return f"Only {self.only.name} has results: there is nothing to compare it with.{failed}"
        what = f" {self.baseline.name} with" if self.baseline is not None else ""
        why = self.why_nothing()
        return f"Nothing to compare{what}: {why}" + failed * (not why.startswith("all "))

    @property
    def only(self) -> LevelResult | None:
        """If a single level has successful runs, and has figures, that level; else None."""
        return self.baseline if sum(bool(level.runs) for level in self._groups) == 1 else None

    @property
    def few_steps_note(self) -> str:
        """A warning that fewer than FEW_STEPS steps decide little, without a full stop; "" if the runs are longer."""
        if not self.comparable or self.steps >= FEW_STEPS:
            return ""
        what = "nothing" if self.steps < LEAST_STEPS else "little"
        decide = "decides" if self.steps == 1 else "decide"
        return f"{counted(self.steps, 'step')} {decide} {what}: train for at least {FEW_STEPS}"

    @property
    def metric_in_words(self) -> str:
        """The metric as a reader would name it: "loss on held-out data"."""
        return metric_in_words(self.metric)

    @property
    def losing_note(self) -> str:
        """A warning, without a full stop, that the script's own low-precision weights lose many of their updates.

        "" if the script's weights are FP32, or if few updates are lost or their number is unknown.
        """
        return "" if self.baseline is None else lost_without_masters.by_script(self.baseline, self.levels)

    @property
    def kernels_note(self) -> str:
        """A warning that the speedups are misleading, because the script itself is slow on this CPU; else "".

        The script is slow if its own weights have a low-precision type for which the CPU has no arithmetic. A level is
        then faster only because it avoids torch's slow kernels.
        """
        base = self._base
        runs = [run for run in base.runs if run.weights_type and run.device == "cpu"] if base is not None else []
        slow = next((run.weights_type for run in runs if run.weights_type in self.machine.get("lacks", "").split()), "")
        if base is None or not slow:
            return ""
        kernels = f"torch's own {type_name(slow)} kernels, which are slow on this CPU"
        return (
            f"{base.name} runs {kernels}: what a level is faster by is that, and not what it gains on another machine"
        )

    @property
    def beside_script(self) -> str:
        """The speed and memory of the recommended level beside the script's own mixed precision, as a sentence.

        "" if the script has none of its own, or if that is recommended.
        """
        own = next((level for level in self.levels if level.level == NATIVE and level.runs), None)
        best = self.recommended
        if own is None or best is None or best is own:
            return ""
        beside = cost(measured(best, own, measures.is_crowded(self.runs)))
        return f"{best.name} beside {own.name}: {beside}." if beside else ""

    def why_nothing(self) -> str:
        """Return the reason why there is nothing to compare, with a full stop."""
        if not self.runs:
            return "there is no run."
        well = [level for level in self._groups if level.runs]
        if not well and len({(run.error, run.error_where) for run in self.runs}) == 1 < len(self.runs):
            return f"all {len(self.runs)} runs failed: {self.runs[0].error_in_full}."
        if not well:
            return "no run went well."
        if self._base is None and self.metric != LOSS and not any(self.metric in run.logged for run in self.runs):
            logged = sorted({name for run in self.runs for name in run.logged})
            known = f"they logged {listed(logged)}" if logged else f"call amp.log({self.metric}=...) in the script"
            if self.asked_steps is not None:
                known += f", within the {self.asked_steps} steps asked for"
            return f"no run gave {self.metric}; {known}."
        if self._base is None:
            found = "diverged" if self.metric == LOSS else f"gave no finite {self.metric}"
            return f"all runs of {listed([level.name for level in well])} {found}."
        return "it is the only level with results."

    @cached_property
    def notes(self) -> list[str]:
        """Lines of text: notes that the runs recorded, and facts that limit the comparison, as missing runs or load."""
        notes: dict[str, list[str]] = {}
        well = [run for run in self.runs if went_well(run)]
        for run in well:
            if self.asked_steps is not None and run.steps < self.asked_steps:
                text = f"trained {run.steps} of the {self.asked_steps} steps asked for"
                notes.setdefault(text, []).append(run.name)
            elif run.steps < max(each.steps for each in well) and id(run) not in self._stopped:
                notes.setdefault(f"trained only {run.steps} steps", []).append(run.name)
            for text in run.notes:
                notes.setdefault(text, []).append(run.name)
        lines = [note for note in (self.load_note, self.lack_note) if note]
        if self.cut:
            ended = (self.asked_runs or 0) - self.cut
            lines.append(f"{ended} of {self.asked_runs} runs have ended; the others were cut")
        lines += [f"{'all runs' if len(names) == len(well) else listed(names)}: {t}" for t, names in notes.items()]
        if self.metric == LOSS and len({run.steps for run in well if id(run) not in self._stopped}) > 1:
            lines.append(f"the losses are compared over the {self.steps} steps that all runs have in common")
        lines += self._rounded_losses
        lines += [note for note in (self.kernels_note, self.losing_note) if note]
        lines += lost_without_masters.notes(self.levels)
        base = self._base
        if base is not None and base.level != BASELINE and any(level.level == BASELINE for level in self._groups):
            lines.append(f"{BASELINE} gave no results; the others are compared with {base.name}")
        if said := named_lines.note(self.survey, self.levels):
            lines.append(said)
        if base is not None and seeds_change_nothing(base):
            lines.append(f"all seeds of {base.name} gave the same losses to the bit: they are one seed to the test")
        return lines

    @property
    def _rounded_losses(self) -> list[str]:
        """A line of text for each level whose losses were recorded in a low-precision type.

        It has the type, and the distance of adjacent numbers of that type near the mean loss, in per cent of the loss:
        smaller differences are invisible.
        """
        lines = []
        for level in self._groups:
            dtype = measures.loss_type(level.runs)
            if dtype is not None and self.metric == LOSS and level.mean:
                step = fine_percent(measures.loss_step(level.runs, level.mean) / abs(level.mean))
                lines.append(f"{level.name}'s losses were recorded in {type_name(dtype)}: steps of {step}")
        return lines

    @property
    def processor(self) -> str:
        """The name of the GPU if all runs trained on one, else of the CPU; "" if it is unknown."""
        name = self.machine.get("gpu" if self.on_gpu else "cpu", "")
        return "" if name == "none" else name

    @property
    def on_gpu(self) -> bool:
        """Whether all runs with a known device trained on another one than the CPU."""
        devices = {run.device for run in self.runs if run.device}
        return bool(devices) and "cpu" not in devices

    @property
    def lack_note(self) -> str:
        """A warning, without a full stop, that this CPU has no arithmetic for the type of some levels; else ""."""
        levels: dict[str, list[str]] = {}
        for level in self._groups:
            if level.runs and level.dtype is not None and all(run.device == "cpu" for run in level.runs):
                levels.setdefault(level.dtype, []).append(level.level)
        lacking = self.machine.get("lacks", "").split()
        return "; ".join(lacks(dtype, names) for dtype, names in levels.items() if dtype in lacking)

    @cached_property
    def load_note(self) -> str:
        """A warning that other work on the machine has disturbed the measured speeds; "" if that work took little."""
        if "load" not in self.machine:
            return ""
        ranges = [level.speedup for level in self.levels if level.speedup is not None]
        width = max((r.high / r.low - 1 for r in ranges if r.low > 0), default=0.0)
        by = f" by up to {whole_percent(width)}" if width >= 0.005 else ""
        sure = f"the speeds may be wrong{by}; compare again while nothing else runs"
        if measures.is_crowded(self.runs):
            sure = "speeds are ratios of CPU times"
        return f"{self.machine['load']}: {sure}. Losses and memory are right"

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, for `run.dumps`."""
        figures = ("comparable", "summary", "notes")
        return {
            **{name: getattr(self, name) for name in (*_fields(), *figures)},
            "baseline": self.baseline.name if self.baseline is not None else None,
            "levels": [level_dict(level) for level in self.levels],
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Comparison:
        """Load a comparison from the result of `to_dict`. All figures are computed from its runs again."""
        given = {name: values[name] for name in _fields() if name in values}  # old reports lack some
        check_types(cls, given)
        return cls(runs=[Run.from_dict(run) for run in values["runs"]], **given)

    @cached_property
    def _groups(self) -> list[LevelResult]:
        """The levels with their runs and results, without figures and findings.

        A run that failed before its dtype was known counts for the dtype of the level's other runs.
        """
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
            stopped = [run.seed for run in well if id(run) in self._stopped]
            final = [math.nan if r.seed in stopped else measures.final(r, self.metric, self.steps) for r in well]
            groups.append(LevelResult(level, dtype, well, [run for run in runs if not went_well(run)], final, stopped))
        return groups

    @cached_property
    def _stopped(self) -> set[int]:
        """The ids of the stopped runs."""
        return {*map(id, stopped_runs(self.runs))}

    @cached_property
    def _base(self) -> LevelResult | None:
        with_figures = [level for level in self._groups if level.finite]
        return next((level for level in with_figures if level.level == BASELINE), next(iter(with_figures), None))

    @staticmethod
    def _same_level(levels: list[LevelResult], wanted: LevelResult | None) -> LevelResult | None:
        """Return the element of `levels` with the level and dtype of `wanted`; None if `wanted` is None.

        `wanted` has no figures yet (`_groups`); the element of `levels` has them.
        """
        if wanted is None:
            return None
        return next(each for each in levels if (each.level, each.dtype) == (wanted.level, wanted.dtype))


def _fields() -> list[str]:
    """Return the names of the fields of a `Comparison`, except its runs."""
    return [each.name for each in fields(Comparison) if each.name != "runs"]
