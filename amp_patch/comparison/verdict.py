"""Comparison: trainings at several opt levels side by side, and what they say about each level, by a stated test."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from amp_patch.comparison import measures
from amp_patch.comparison.measures import LOSS, Ratio
from amp_patch.comparison.wording import apart, listed, tell_apart, times
from amp_patch.recording.run import Run

SIGNIFICANCE = 0.05
INTERRUPTED = "interrupted"  # an error that begins so is the user's Ctrl-C: no fault of the level
_SHORT = {"float16": "fp16", "bfloat16": "bf16"}
_ALIKE = 1.05  # "as fast as" is said within this ratio
# A level is not recommended if a run skipped more than half of its steps, or more than this share and this number: as
# many halvings take the largest dynamic scale, 2**24, to 1.
_SKIPPED_SHARE, _SKIPPED_STEPS = 0.1, 24
_LESS_MEMORY = 0.95  # a level is recommended for its memory only below this share of the baseline's


class Verdict(NamedTuple):
    """What is said of a level.

    Attributes:
        kind: "baseline"; "within" the baseline's spread; "differs" (`better`, or not to be used); "undecided", which
            may be chance; "failed", without a run that went well; "alone", with nothing to compare it with.
        text: a sentence without the level's name, without a full stop.
        better: whether the level lies outside of the baseline's spread on the better side.
    """

    kind: str
    text: str
    better: bool = False

    @property
    def usable(self) -> bool:
        """Whether nothing found speaks against the level's accuracy."""
        return self.kind in ("baseline", "within") or self.better


@dataclass(frozen=True)
class LevelResult:
    """The runs of one level. Ratios are to the baseline's, None where one of the two is not known.

    Attributes:
        level, dtype: "O2", "float16"; the dtype is None at O0.
        runs: those that went well, by seed.
        failed: the others.
        final: a figure for each of `runs`; NaN if the run diverged or has none.
        step_ms: milliseconds a step: the median over the runs of each one's median.
        speedup: how many times faster than the baseline; with one seed, the range is the step times' quartiles'.
        memory_ratio: of the runs' median peak memory, where that tells something of the training (`figures.peak`).
        bytes_ratio: of weights, masters, gradients and the optimizer's state.
        samples_per_second: the median over the runs.
        skips: how many steps each of `runs` skipped.
        scales: the loss scale at the end of each of `runs`.
    """

    level: str
    dtype: str | None
    runs: list[Run]
    failed: list[Run]
    final: list[float]
    step_ms: float | None = None
    speedup: Ratio | None = None
    memory_ratio: float | None = None
    bytes_ratio: float | None = None
    samples_per_second: float | None = None
    skips: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict("alone", ""))

    @property
    def name(self) -> str:
        """ "O2 fp16"."""
        return f"{self.level} {_SHORT.get(self.dtype, self.dtype)}" if self.dtype else self.level

    @property
    def memory(self) -> float | None:
        """`memory_ratio`, or where that is not known the ratio of the tensors alone."""
        return self.memory_ratio if self.memory_ratio is not None else self.bytes_ratio

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def finite(self) -> dict[int, float]:
        """Seed -> figure, of the runs that have one."""
        return {run.seed: figure for run, figure in zip(self.runs, self.final, strict=True) if math.isfinite(figure)}

    @property
    def mean(self) -> float | None:
        """Of the finite figures."""
        return statistics.mean(self.finite.values()) if self.finite else None


@dataclass(frozen=True)
class Comparison:
    """Trainings at several levels, and what they say. What is computed from the runs is computed once, when asked for.

    How a level is judged is in `test`, in words; `figures` has the sums.

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
        return measures.common_steps([run for run in self.runs if _went_well(run)])

    @cached_property
    def levels(self) -> list[LevelResult]:
        """In the order in which the runs name them."""
        base = self._base
        measured = [self._measured(level, base) for level in self._groups]
        if base is None:
            return [replace(level, verdict=self._without_baseline(level)) for level in measured]
        base = next(level for level in measured if (level.level, level.dtype) == (base.level, base.dtype))
        return [replace(level, verdict=self._judged(level, base)) for level in measured]

    @cached_property
    def baseline(self) -> LevelResult | None:
        """O0 if it has figures, else the first level that does; None if none does."""
        if self._base is None:
            return None
        return next(each for each in self.levels if (each.level, each.dtype) == (self._base.level, self._base.dtype))

    @cached_property
    def comparable(self) -> bool:
        """Whether there are two levels with runs that went well, and figures of at least one of them."""
        return self._base is not None and sum(bool(level.runs) for level in self._groups) > 1

    @cached_property
    def figure(self) -> str:
        """What the metric is called in a sentence."""
        return f"final {self.metric}"

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
                f"The figure of a run is {what}; {better} is better. Runs are paired by seed with {base}'s.",
                f"Within: the mean over the level's seeds that {base} has too lies between the lowest and the highest",
                f"figure of {base}'s seeds; a difference smaller than this spread is not seen.",
                "Differs: it lies outside, and Student's paired t-test over the seeds (two-sided) rejects at",
                f"{SIGNIFICANCE:.0%} that there is no difference; each level is tested by itself.",
                "Undecided: it lies outside, and the test does not reject that, or there is only one seed.",
                "To lie outside on the better side is no reason against a level. One of which a run diverged (its",
                "figure is missing or not finite) is not to be used; one of which a run skipped more than half of its",
                f"steps, or more than {_SKIPPED_SHARE:.0%} and {_SKIPPED_STEPS} of them, is not recommended.",
                "Times: the median step of each run, without the first tenth of the steps; the ratio is taken for each",
                "seed, and a level is faster only if it is with all of them (with one seed: if the quartiles of its",
                "step times are).",
            ]
        )

    @cached_property
    def summary(self) -> str:
        """What to use, and why, in one or two sentences."""
        base = self.baseline
        if base is None or not self.comparable:
            return self._nothing_to_compare()
        others = [level for level in self.levels if level is not base and level.runs]
        sound = [level for level in others if level.verdict.usable and not _faults(level)]
        usable = [level for level in sound if not _skips_much(level)]
        faster = [level for level in usable if level.speedup is not None and level.speedup.low > 1]
        if faster:
            best = max(faster, key=lambda level: level.speedup or Ratio(0, 0, 0))
            return f"Use {best.name}: {best.verdict.text}."
        smaller = [level for level in usable if _is_smaller(level, base)]
        as_fast = [level for level in smaller if level.speedup is None or level.speedup.high >= 1]
        if as_fast:
            best = min(as_fast, key=lambda level: level.memory or 1.0)
            return f"Use {best.name} for its memory; none is faster than {base.name}: {best.verdict.text}."
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
            f"{{}} cannot be told from chance yet, {self._more_seeds(base)}": undecided,
            "{} skipped too many steps": [level for level in sound if _skips_much(level)],
            "do not use {}": kinds["differs"],
            "{} failed with some seeds": [level for level in others if level.verdict.usable and _faults(level)],
            "{} failed": [level for level in self.levels if not level.runs],
        }
        said = [text.format(listed([_promise(level) for level in found])) for text, found in reasons.items() if found]
        return f"Stay with {base.name}{' for now' if undecided else ''}: {'; '.join(said)}."

    @cached_property
    def notes(self) -> list[str]:
        """What the reader should know of the runs: what they noted, and where they are not alike."""
        notes: dict[str, list[str]] = {}
        well = [run for run in self.runs if _went_well(run)]
        for run in well:
            if self.asked_steps is not None and run.steps < self.asked_steps:
                text = f"trained {run.steps} of the {self.asked_steps} steps asked for"
                notes.setdefault(text, []).append(_name(run))
            elif run.steps < max(each.steps for each in well):
                notes.setdefault(f"trained only {run.steps} steps", []).append(_name(run))
            for text in run.notes:
                notes.setdefault(text, []).append(_name(run))
        lines = [f"{'all runs' if len(names) == len(well) else listed(names)}: {t}" for t, names in notes.items()]
        if self.metric == LOSS and len({run.steps for run in well}) > 1:
            lines.append(f"the losses are compared over the {self.steps} steps that all runs have in common")
        base = self._base
        if base is not None and base.level != "O0" and any(level.level == "O0" for level in self._groups):
            lines.append(f"O0 gave no figures; the others are compared with {base.name}")
        if base is not None and _seeds_change_nothing(base):
            lines.append(f"all seeds of {base.name} gave the same losses to the bit: they are one seed to the test")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for `runs.dumps`."""
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
            "levels": [_level_dict(level) for level in self.levels],
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
            if run.dtype is None and not _went_well(run):
                key = of_level.get(run.level, key)
            of_level.setdefault(run.level, key)
            keys.setdefault(key, []).append(run)
        order = {id(run): i for i, run in enumerate(self.runs)}
        groups = []
        for (level, dtype), runs in sorted(keys.items(), key=lambda each: min(order[id(run)] for run in each[1])):
            runs = sorted(runs, key=lambda run: run.seed)
            well = [run for run in runs if _went_well(run)]
            final = [measures.final(run, self.metric, self.steps) for run in well]
            groups.append(LevelResult(level, dtype, well, [run for run in runs if not _went_well(run)], final))
        return groups

    @cached_property
    def _base(self) -> LevelResult | None:
        with_figures = [level for level in self._groups if level.finite]
        return next((level for level in with_figures if level.level == "O0"), next(iter(with_figures), None))

    def _measured(self, level: LevelResult, base: LevelResult | None) -> LevelResult:
        runs = level.runs
        medians = [statistics.median(seconds) for run in runs if (seconds := measures.step_times(run))]
        rates = [rate for run in runs if (rate := measures.samples_per_second(run)) is not None]
        found: dict[str, Any] = {
            "step_ms": 1000 * statistics.median(medians) if medians else None,
            "samples_per_second": statistics.median(rates) if rates else None,
            "skips": [sum(run.skipped) for run in runs],
            "scales": [run.scale[-1] for run in runs if run.scale],
        }
        if base is not None:
            of_seed = {run.seed: run for run in base.runs}
            pairs = [(of_seed[run.seed], run) for run in runs if run.seed in of_seed]
            found["speedup"] = measures.speedup(pairs)
            found["memory_ratio"] = _ratio(
                [peak for run in runs if (peak := measures.peak(run)) is not None],
                [peak for run in base.runs if (peak := measures.peak(run)) is not None],
            )
            found["bytes_ratio"] = _ratio(map(measures.held_bytes, runs), map(measures.held_bytes, base.runs))
        return replace(level, **found)

    def _without_baseline(self, level: LevelResult) -> Verdict:
        if not level.runs:
            return Verdict("failed", _failures(level))
        return Verdict("alone", "; ".join(self._diverged(level, None)))

    def _judged(self, level: LevelResult, base: LevelResult) -> Verdict:
        if not level.runs:
            return Verdict("failed", _failures(level))
        kind, accuracy, better = self._accuracy(level, base)
        parts = [accuracy] if level is base else [_speed(level, base), accuracy]
        parts += [_skipped(level)]
        if kind == "differs" and not better:
            parts = ["do not use: " + accuracy, _skipped(level), _speed(level, base)]
        if level.failed:
            parts.append(_failures(level))
        if kind == "baseline" and not self.comparable:
            kind = "alone"
        return Verdict(kind, "; ".join(part for part in parts if part), better)

    def _accuracy(self, level: LevelResult, base: LevelResult) -> tuple[str, str, bool]:
        """The kind of the verdict, its reason, and whether it is better than the baseline."""
        spread = list(base.finite.values())
        diverged = self._diverged(level, base)
        if level is base:
            text, low, high = tell_apart(statistics.mean(spread), min(spread), max(spread))
            over = f" over {len(spread)} seeds ({low} to {high})" if len(spread) > 1 else ""
            return "baseline", "; ".join([f"{self.figure} {text}{over}", *diverged]), False
        if diverged:
            return "differs", "; ".join(diverged), False
        seeds = [seed for seed in level.finite if seed in base.finite]
        if not seeds:
            return "undecided", f"no seed of it has a figure of {base.name}'s to compare with", False
        ours, theirs = [level.finite[seed] for seed in seeds], [base.finite[seed] for seed in seeds]
        of_seed = {run.seed: run for run in base.runs}
        if ours == theirs and all(_same(run, of_seed[run.seed]) for run in level.runs if run.seed in seeds):
            same = f"every loss the same as {base.name}'s, to the bit"
            return "within", f"{self.figure} {tell_apart(statistics.mean(ours))[0]}, {same}", False
        mean, base_mean = statistics.mean(ours), statistics.mean(theirs)
        better = (mean > base_mean) is self.maximize and mean != base_mean
        distance = apart(mean, base_mean)
        if len(spread) < 2 or _seeds_change_nothing(base):
            what = "the seeds change nothing" if len(spread) > 1 else "one seed"
            return (
                "undecided",
                f"{what}: {self.figure} {distance} {base.name}'s; {self._more_seeds(base)} to judge it",
                False,
            )
        text, low, high = tell_apart(mean, min(spread), max(spread))
        its_spread = f"the spread of {base.name}'s {len(spread)} seeds ({low} to {high})"
        if min(spread) <= mean <= max(spread):
            return "within", f"{self.figure} {text} within {its_spread}", False
        if len(seeds) < 2:
            return "undecided", f"{self.figure} {text} outside {its_spread}, with one seed; run more seeds", False
        p = measures.paired_t_test(ours, theirs)
        word = ", better: " if better else ", "
        of_base = tell_apart(base_mean)[0]
        difference = f"{self.figure} {text}{word}{distance} {base.name}'s {of_base}, outside {its_spread}"
        found = f"paired t-test p {'< 0.001' if p < 0.001 else f'= {p:.2g}'}"
        if p < SIGNIFICANCE:
            return "differs", f"{difference}, {found}", better
        more = "" if better else "; run more seeds"
        return "undecided", f"{difference}, which may be chance ({found}){more}", better

    def _more_seeds(self, base: LevelResult) -> str:
        if _seeds_change_nothing(base):
            return "let the script use the seeds"
        return "run more seeds" if len(base.finite) > 2 else "run three seeds or more"

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
            reasons.setdefault((what, after), []).append(run.seed)
        return [f"{what} with {_seeds(seeds)}{after}" for (what, after), seeds in reasons.items()]

    def _nothing_to_compare(self) -> str:
        if not self.runs:
            return "Nothing to compare: there is no run."
        failed = "".join(f" {level.name}: {_failures(level)}." for level in self._groups if level.failed)
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
        return f"Nothing to compare {well[0].name} with: it is the only level with figures.{failed}"


def machine() -> dict[str, str]:
    """What this process runs on. Asks CUDA for its devices' names, which starts it where there is one."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
        "gpu": ", ".join(devices) or "none",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _went_well(run: Run) -> bool:
    return run.error is None and bool(run.loss or run.logged)


def _name(run: Run) -> str:
    return f"{run.level} seed {run.seed}"


def _failures(level: LevelResult) -> str:
    errors: dict[str, list[int]] = {}
    for run in level.failed:
        errors.setdefault(run.error or "recorded no step", []).append(run.seed)
    return "; ".join(f"failed with {_seeds(seeds)}: {error}" for error, seeds in errors.items())


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed([str(seed) for seed in seeds])}"


def _faults(level: LevelResult) -> list[Run]:
    """The runs that failed by themselves."""
    return [run for run in level.failed if not (run.error or "").startswith(INTERRUPTED)]


def _seeds_change_nothing(base: LevelResult) -> bool:
    """Whether its runs, two or more, are one run."""
    return len(base.runs) > 1 and len(set(base.final)) == 1 and all(_same(run, base.runs[0]) for run in base.runs)


def _same(run: Run, other: Run) -> bool:
    """Whether all losses are finite, and the same to the bit."""
    return bool(run.loss) and run.loss == other.loss and all(map(math.isfinite, run.loss))


def _skips_much(level: LevelResult) -> bool:
    """Whether a run of the level skipped more steps than a dynamic loss scale does that looks for its height."""
    pairs = [(sum(run.skipped), run.steps) for run in level.runs]
    return any(n > steps / 2 or n > max(_SKIPPED_STEPS, _SKIPPED_SHARE * steps) for n, steps in pairs)


def _skipped(level: LevelResult) -> str:
    """What a reader has to know of the skips and of the loss scale, if anything."""
    words = []
    if _skips_much(level):
        worst = max(level.runs, key=lambda run: sum(run.skipped) / max(1, run.steps))
        words.append(f"{sum(worst.skipped)} of {worst.steps} steps were skipped with seed {worst.seed}")
    fallen = [run.scale[-1] for run in level.runs if run.scale and run.scale[-1] < min(1.0, run.scale[0])]
    if fallen:
        words.append(f"the loss scale fell to {min(fallen):.2g}")
    return ", ".join(words)


def _ratio(ours: Iterable[int], theirs: Iterable[int]) -> float | None:
    ours, theirs = list(ours), list(theirs)
    return statistics.median(ours) / median if ours and theirs and (median := statistics.median(theirs)) > 0 else None


def _is_smaller(level: LevelResult, base: LevelResult) -> bool:
    """Whether all runs peaked below all of the baseline's, by more than a little; where none is known, the tensors."""
    peaks, of_base = ([peak for run in each.runs if (peak := measures.peak(run)) is not None] for each in (level, base))
    if peaks and of_base:
        return max(peaks) < _LESS_MEMORY * min(of_base)
    if any(run.peak_memory is not None for run in (*level.runs, *base.runs)):
        return False  # what the tensors save is lost in what the process takes
    return level.bytes_ratio is not None and level.bytes_ratio < _LESS_MEMORY


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
            alike = low >= 1 / _ALIKE and high <= _ALIKE
            what = "as fast as" if alike else "not clearly faster or slower than"
            parts.append(f"{what} {base.name} ({how}{low:.2f}x to {high:.2f}x)")
    memory = level.memory
    if memory is not None:
        what = "memory" if level.memory_ratio is not None else "bytes of weights, gradients and state"
        same, part = abs(memory - 1) < 0.005, "of" if memory < 1 else "times"
        parts.append(f"the same {what}" if same else f"{memory:.2f} {part} its {what}")
    return ", ".join(parts)


def _promise(level: LevelResult) -> str:
    """The name, and of a level that may yet be recommended how much faster it is."""
    if level.verdict.kind != "undecided" or level.speedup is None or level.speedup.low <= 1:
        return level.name
    return f"{level.name} ({times(level.speedup.median)[0]}x faster)"


def _level_dict(level: LevelResult) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in vars(level).items()
        if name not in ("runs", "failed", "speedup", "verdict")  # the runs are told elsewhere
    }
    return {
        **plain,
        "name": level.name,
        "seeds": level.seeds,
        "failed_seeds": [run.seed for run in level.failed],
        "speedup": level.speedup._asdict() if level.speedup else None,
        "verdict": level.verdict._asdict(),
    }
