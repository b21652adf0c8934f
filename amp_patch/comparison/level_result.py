"""One level of a comparison: its runs, its figures relative to the baseline's, its finding and verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amp_patch.comparison import measures
from amp_patch.comparison.finding import Finding, Verdict
from amp_patch.comparison.measures import Ratio, median
from amp_patch.comparison.plan import BASELINE
from amp_patch.diagnose.lost_updates import share_lost
from amp_patch.diagnose.recording.run import LOW_TYPES, Run
from amp_patch.diagnose.wording import level_name, listed, type_name
from amp_patch.policy import OPT_LEVELS, Policy

# A run has left out batches if this share of its forwards, and more than two, led to no step, beyond those of O0.
LEFT_OUT = 0.05


@dataclass(frozen=True)
class LevelResult:
    """The runs of one level. A ratio is relative to the baseline; None if one of the two values is unknown.

    Attributes:
        level, dtype: for example "O2" (or "O5+split") and "float16"; the dtype is None at O0.
        runs: the successful runs, sorted by seed.
        failed: the failed runs.
        final: the result of each of `runs`; NaN if the run diverged, stopped or has none.
        stopped: the seeds of `runs` in which an error has prevented steps (`stopped_runs`).
        step_ms: milliseconds per step: the median over the runs of each run's median.
        speedup: the baseline's step time over the level's. With one seed, its range is from quartiles of step times.
        activations: bytes that a step saves for its backward: the median over the runs that know them.
        memory_bytes: the peak memory of the training (`measures.memory_bytes`): the median over the runs that know it.
        memory_ratio: the level's `memory_bytes` over the baseline's.
        bytes_ratio: the bytes of the level's weights, masters, gradients and optimizer state over the baseline's.
        skips: the number of skipped steps of each of `runs`.
        scales: the final loss scale of each run that has one.
        lost_updates: the share of updates that weights of this type (BF16 at O0) would lose without masters, measured
            on the runs' FP32 values, or on the baseline's if they have none. None if neither was measured.
        finding, verdict: the comparison with the baseline, as data and in words.
    """

    level: str
    dtype: str | None
    runs: list[Run]
    failed: list[Run]
    final: list[float]
    stopped: list[int] = field(default_factory=list)
    step_ms: float | None = None
    speedup: Ratio | None = None
    activations: float | None = None
    memory_bytes: float | None = None
    memory_ratio: float | None = None
    bytes_ratio: float | None = None
    skips: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    lost_updates: float | None = None
    finding: Finding = field(default_factory=lambda: Finding("alone"))
    verdict: Verdict = field(default_factory=lambda: Verdict("alone", ""))

    @property
    def name(self) -> str:
        """The level with its type: "O2 FP16", "O0", "O6+mxfp8"; "your script as it is" for its own mixed precision."""
        return self.level if self.emulated else level_name(self.level, self.dtype)

    @property
    def type_name(self) -> str:
        """The type as a reader knows it: "FP16"; "" at O0."""
        return type_name(self.dtype) if self.dtype else ""

    @property
    def own_weights(self) -> str:
        """ "BF16, no masters" or "FP64" if the script itself made such weights; "" otherwise, and at other levels."""
        made = next((run.weights_type for run in self.runs if run.weights_type), "")
        return type_name(made) + ", no masters" * (made in LOW_TYPES)

    @property
    def other_dtype(self) -> str | None:
        """The level's low-precision type, if it differs from the level's default type; else None."""
        policy = self._policy
        return self.dtype if policy is not None and self.dtype != str(policy.dtype).removeprefix("torch.") else None

    @property
    def loses_updates(self) -> bool:
        """Whether the level's weights lose small updates, as at O3."""
        return self._policy is not None and self._policy.loses_updates

    @property
    def emulated(self) -> bool:
        """Whether products are emulated (FP8, FP4): times and memory then say nothing about real FP8 hardware."""
        return self._policy is not None and self._policy.product_format is not None

    @property
    def _policy(self) -> Policy | None:
        """The level's policy; None for torch's own mixed precision."""
        return OPT_LEVELS.get(self.level.partition("+")[0])

    @property
    def memory(self) -> float | None:
        """`memory_ratio`; if that is unknown, the ratio of the tensors alone (`bytes_ratio`)."""
        return self.memory_ratio if self.memory_ratio is not None else self.bytes_ratio

    @property
    def seeds(self) -> list[int]:
        """The seeds of the successful runs."""
        return [run.seed for run in self.runs]

    @property
    def finite(self) -> dict[int, float]:
        """Seed -> result, for the runs whose result is finite."""
        return {run.seed: figure for run, figure in zip(self.runs, self.final, strict=True) if math.isfinite(figure)}

    @property
    def all_runs(self) -> list[Run]:
        """The successful runs, followed by the failed ones."""
        return [*self.runs, *self.failed]

    def with_reason(self, reason: str) -> LevelResult:
        """Return a copy of the level with `reason` at the end of its verdict; the level itself if `reason` is ""."""
        if not reason:
            return self
        text, short = (f"{each}; {reason}" if each else reason for each in (self.verdict.text, self.verdict.reason))
        return replace(self, verdict=self.verdict._replace(text=text, reason=short))

    @property
    def mean(self) -> float | None:
        """The mean of the finite results; None if there are none."""
        return statistics.mean(self.finite.values()) if self.finite else None


def measured(level: LevelResult, base: LevelResult | None, by_cpu_time: bool) -> LevelResult:
    """Return a copy of the level with its step times, memory and skipped steps, and their ratios to the baseline.

    The speed is the ratio of step times, or with `by_cpu_time` of CPU times. Ratios stay None if `base` is None. For an
    emulated level, times and memory stay None too.
    """
    runs = level.runs
    step = median(median(measures.step_times(run)) for run in runs)
    found: dict[str, Any] = {
        "step_ms": None if step is None else 1000 * step,
        "skips": [sum(run.skipped) for run in runs],
        "scales": [run.scale[-1] for run in runs if run.scale],
        "activations": median(run.activations for run in runs),
        "memory_bytes": median(map(measures.memory_bytes, runs)),
    }
    found["lost_updates"] = _lost_updates(runs, level.dtype)
    if base is not None and not level.emulated:
        if found["lost_updates"] is None:
            found["lost_updates"] = _lost_updates(base.runs, level.dtype)
        found["speedup"] = measures.speedup(pairs_of(level, base), by_cpu_time)
        found["memory_ratio"] = _ratio(map(measures.memory_bytes, runs), map(measures.memory_bytes, base.runs))
        found["bytes_ratio"] = _ratio(map(measures.held_bytes, runs), map(measures.held_bytes, base.runs))
    if level.emulated:
        found |= dict.fromkeys(("step_ms", "activations", "memory_bytes", "lost_updates"))
    return replace(level, **found)


def _lost_updates(runs: Sequence[Run], dtype: str | None) -> float | None:
    return share_lost([updates for run in runs for updates in run.updates], dtype=dtype or "bfloat16")


def went_well(run: Run) -> bool:
    """Return whether the run ended without an error and recorded a loss or a metric."""
    return run.error is None and bool(run.loss or run.logged)


def failures(level: LevelResult, *, short: bool = False) -> list[str]:
    """List the errors of a level, each once, as "seeds: error". The text is the first run's, in full or shortened."""
    errors: dict[str, list[Run]] = {}
    for run in level.failed:
        errors.setdefault(run.error or "recorded no step", []).append(run)
    seeds = [seeds_in_words([run.seed for run in runs]) for runs in errors.values()]
    words = [runs[0].error_in_short if short else runs[0].error_in_full for runs in errors.values()]
    return [f"{who}: {error}" for who, error in zip(seeds, words, strict=True)]


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Format seeds: "seed 0", "seeds 0 and 2"."""
    return f"seed{'s' if len(seeds) > 1 else ''} {listed([str(seed) for seed in seeds])}"


def pairs_of(level: LevelResult, base: LevelResult) -> list[tuple[Run, Run]]:
    """Return (run of the baseline, run of the level) for each seed that both have a run of."""
    of_seed = {run.seed: run for run in base.runs}
    return [(of_seed[run.seed], run) for run in level.runs if run.seed in of_seed]


def left_out(run: Run, o0: Run) -> int:
    """Return how many forwards of `run` led to no step, beyond those of O0's run; 0 if they are few, or not known."""
    idle = round(run.forwards - run.steps * o0.forwards / o0.steps) if o0.steps and o0.forwards else 0
    return idle if idle > max(2, LEFT_OUT * run.forwards) else 0


def stopped_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs in which an error has prevented steps that O0's run of their seed made.

    The script has caught the error. If it trains on, the run has left out batches (`left_out`): it has fewer steps than
    O0's, or the log names an error. If it ends, the error shows in the log, or as a forward without a step; or all
    seeds stop, where O0's all make the same number of steps. Otherwise the training may end by itself, by early
    stopping.
    """
    of_level: dict[str, list[Run]] = {}
    for run in filter(went_well, runs):
        of_level.setdefault(run.level, []).append(run)
    whole = {run.seed: run for run in of_level.get(BASELINE, [])}
    fixed = len(whole) > 1 and len({run.steps for run in whole.values()}) == 1
    found = []
    for same in of_level.values():
        paired = [run for run in same if run.seed in whole and run.loss and math.isfinite(run.loss[-1])]
        each = fixed and all(run.steps < whole[run.seed].steps for run in paired)
        for run in paired:
            o0 = whole[run.seed]
            fewer, idle = run.steps < o0.steps, left_out(run, o0)
            ended = each or idle or run.caught or (run.unfinished and not o0.unfinished)
            found += [run] if (fewer and ended) or (idle and run.caught) else []
    return found


def same_losses(run: Run, other: Run) -> bool:
    """Return whether all losses of the two runs are finite and equal to the bit."""
    return bool(run.loss) and run.loss == other.loss and all(map(math.isfinite, run.loss))


def seeds_change_nothing(base: LevelResult) -> bool:
    """Return whether all seeds gave the same losses to the bit, so that the script does not use its seeds.

    False with one run.
    """
    return len(base.runs) > 1 and len(set(base.final)) == 1 and all(same_losses(run, base.runs[0]) for run in base.runs)


def has_no_spread(base: LevelResult) -> bool:
    """Return whether the baseline does not show how far chance moves a result: it has one seed, or equal results."""
    return len(base.finite) < 2 or seeds_change_nothing(base)


def saved_memory(level: LevelResult, base: LevelResult) -> float:
    """Return the share of the baseline's memory that the level saves at least: 0.3 is 30 % less.

    It is (smallest of the baseline's runs - largest of the level's runs) / largest of the baseline's runs, of
    `measures.memory_bytes`: negative if any run of the level takes more. If the memory of a run is unknown, it is
    1 - `bytes_ratio`, of the tensors between steps; if that is unknown too, 0.
    """
    sizes = [[measures.memory_bytes(run) for run in each.runs] for each in (level, base)]
    ours, theirs = ([size for size in each if size is not None] for each in sizes)
    if sizes != [ours, theirs] or not ours:
        return 0.0 if level.bytes_ratio is None else 1 - level.bytes_ratio
    return (min(theirs) - max(ours)) / max(theirs) if max(theirs) else 0.0


def level_dict(level: LevelResult) -> dict[str, Any]:
    """Return the entry of a level in `Comparison.to_dict`."""
    plain = {
        name: value
        for name, value in vars(level).items()
        if name not in ("runs", "failed", "speedup", "finding", "verdict")  # `Comparison.to_dict` lists the runs
    }
    return {
        **plain,
        "name": level.name,
        "seeds": level.seeds,
        "failed_seeds": [run.seed for run in level.failed],
        "speedup": level.speedup._asdict() if level.speedup else None,
        "gap": level.finding.gap.to_dict() if level.finding.gap else None,
        "verdict": level.verdict._asdict(),
    }


def _ratio(ours: Iterable[int | None], theirs: Iterable[int | None]) -> float | None:
    """Return median(ours) / median(theirs), over the sizes that are not None; None if a median is unknown or 0."""
    one, other = median(ours), median(theirs)
    return one / other if one is not None and other else None
