"""The plan of a comparison: its levels, seeds and steps, and the environment of each run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from amp_patch.diagnose.recording.run import LOW_TYPES, NATIVE, Run
from amp_patch.diagnose.wording import figure, short
from amp_patch.environment import DTYPE, KEEP_FP32, KEEP_HIGH, LEVEL, NONE_KEPT, named_level
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS

# The level that the other levels are compared with.
BASELINE = next(level for level, policy in OPT_LEVELS.items() if policy.changes_nothing)

# The default levels of a comparison. O3 shows the cost of having no FP32 weights, and O6 and O7 show the effect of FP8
# and FP4 on the numbers: they are compared only if the caller names them.
LEVELS = tuple(
    level for level, policy in OPT_LEVELS.items() if policy.keeps_fp32_weights and policy.product_format is None
)

# Default `min_gain`: the share of the baseline's memory that a level must save to be recommended for its memory.
MIN_GAIN = 0.05

# Default margin: a level counts as good if it is worse by at most this share of the baseline's result.
MARGIN = 0.002

SPEED, MEMORY = "speed", "memory"  # goals: what a level is recommended for, of those that are as good

# The rungs that are compared without being named, if the goal is MEMORY, and for a script with BF16 weights.
SMALL = ("O5+split", "O5+split+8bit")

SEEDS = 3  # default number of seeds
_MOST_SEEDS = 1000


def levels_for(goal: str, dtype: str | None, quick: bool) -> tuple[str, ...]:
    """Return the levels of a `compare` that names none.

    With `quick` they are the levels of FP16 if `dtype` is "float16"; else of BF16, without a loss scale.
    """
    wanted = f"torch.{dtype or 'bfloat16'}"
    levels = tuple(level for level in LEVELS if str(OPT_LEVELS[level].dtype) == wanted) if quick else LEVELS
    return (*levels, *SMALL) if goal == MEMORY and dtype != "float16" else levels


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison: each level is trained from each seed.

    Attributes:
        levels: levels from "O0" to "O7", with or without rungs ("O5+split"), each once, and at least one besides O0. If
            O0 is not named, it is added in front.
        seeds: the number of repetitions.
        steps: the number of optimizer steps after which a run ends; None if the script decides.
        dtype: "float16" or "bfloat16" for the levels O1 to O3; None if the script decides.
        metric: the figure that is compared: "loss", or a name given to `amp.log`.
        maximize: whether more of the metric is better.
        min_gain: the memory that a level must save to be recommended for its memory, in per cent of the baseline's.
        margin: a level counts as good if it is worse by at most this, in per cent of O0's result.
        keep: the modules that a module search keeps: in BF16 at levels with FP8 or FP4 products, in FP32 at others.
            None if this is no module search.
        goal: SPEED, or MEMORY for the smallest of the levels that are as good.
    """

    levels: tuple[str, ...] = LEVELS
    seeds: int = SEEDS
    steps: int | None = None
    dtype: str | None = None
    metric: str = "loss"
    maximize: bool = False
    min_gain: float = 100 * MIN_GAIN
    margin: float = 100 * MARGIN
    keep: tuple[str, ...] | None = None
    goal: str = SPEED

    def __post_init__(self) -> None:
        names = [str(dtype).removeprefix("torch.") for dtype in LOW_PRECISION]
        if self.dtype is not None and self.dtype not in names:
            raise ValueError(f"compare: dtype is {self.dtype!r}; wanted {' or '.join(names)}")
        try:
            named = [named_level(level) for level in self.levels]
            for each in named:
                each.policy(None if self.dtype is None else getattr(torch, self.dtype))
        except ValueError as error:
            raise ValueError(f"compare: {error}") from error
        object.__setattr__(self, "levels", tuple(map(str, named)))  # the dataclass is frozen
        twice = [level for level in self.levels if self.levels.count(level) > 1]
        if twice:
            raise ValueError(f"compare: {twice[0]} is in levels twice; give each once (seeds=N repeats them)")
        if not set(self.levels) - {BASELINE}:
            raise ValueError(f"compare: levels is {','.join(self.levels) or 'empty'}; wanted one beside O0, as O0,O2")
        if BASELINE not in self.levels:
            object.__setattr__(self, "levels", (BASELINE, *self.levels))
        if self.goal not in (SPEED, MEMORY):
            raise ValueError(f"compare: goal is {self.goal!r}; wanted {SPEED!r} or {MEMORY!r}")
        for name, value in ("seeds", self.seeds), ("steps", 1 if self.steps is None else self.steps):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"compare: {name} is {value!r}; wanted a positive integer")
        if not _is_number(self.min_gain) or not 0 <= self.min_gain < 100:
            raise ValueError(f"compare: min_gain is {self.min_gain!r}; wanted per cent of the memory, 0 to below 100")
        if not _is_number(self.margin) or not 0 < self.margin < 100:
            raise ValueError(f"compare: margin is {self.margin!r}; wanted per cent of O0's result, above 0, below 100")
        if self.seeds > _MOST_SEEDS:
            raise ValueError(f"compare: seeds is {self.seeds}; wanted at most {_MOST_SEEDS} repetitions")

    def runs(self) -> list[Run]:
        """Return the runs in order: all levels with seed 0, then with seed 1, and so on.

        A load on the machine that lasts for some time then slows all levels, not one.
        """
        return [Run(level, seed) for seed in range(self.seeds) for level in self.levels]

    def type_of(self, level: str) -> str | None:
        """Return the level's low-precision type in this plan; None at O0. A script may choose another for O1 to O3."""
        policy = OPT_LEVELS[named_level(level).level]
        if policy.changes_nothing:
            return None
        own = str(policy.dtype).removeprefix("torch.")
        return self.dtype if self.dtype is not None and own == "float16" else own

    def has_masters(self, dtype: str) -> bool:
        """Return whether a level of the plan has FP32 masters for weights of `dtype` ("bfloat16").

        True for "" and "float64": such weights need no such level.
        """
        kept = [level for level in self.levels if OPT_LEVELS[named_level(level).level].master_weights]
        return dtype not in LOW_TYPES or any(self.type_of(level) == dtype for level in kept)

    def environment(self, run: Run) -> dict[str, str]:
        """Return {environment variable: value} that sets the level and the seed of a run."""
        level = BASELINE if run.level == NATIVE else run.level
        environment = {LEVEL: level, "AMP_PATCH_SEED": str(run.seed)}
        if self.keep is not None and level != BASELINE:
            environment[keep_variable(level)] = ",".join(self.keep) or NONE_KEPT
        return environment if self.dtype is None else {**environment, DTYPE: self.dtype}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def variables(level: str, dtype: str | None = None) -> str:
    """Return the environment variables that run an unedited script at a level, in shell form."""
    return f"{LEVEL}={level} {DTYPE}={dtype}" if dtype else f"{LEVEL}={level}"


def keep_variable(level: str) -> str:
    """Return the name of the environment variable that lists the modules to keep in higher precision at a level.

    It is AMP_PATCH_KEEP_FP32, or at O6 and O7 AMP_PATCH_KEEP_HIGH.
    """
    return KEEP_FP32 if OPT_LEVELS[named_level(level).level].product_format is None else KEEP_HIGH


def progress_line(run: Run, asked_steps: int | None) -> str:
    """Format the line that is printed after a run: its error, or its steps, loss, time and notes."""
    if run.error is not None:
        return f"{run.name}: failed: {run.error_in_full}"
    loss, ms = newest_figures(run)
    of = f" of {asked_steps}" if asked_steps is not None else ""
    return f"{run.name}: " + "; ".join([f"{run.steps}{of} steps, loss {loss}, {ms} ms a step", *run.notes])


def newest_figures(run: Run) -> tuple[str, str]:
    """Return (latest loss, median milliseconds of the last 20 steps) as texts; "" for an unknown figure."""
    if not run.steps:
        return "", ""
    times = [seconds for seconds in run.seconds[-20:] if not math.isnan(seconds)]  # NaN: a measured step
    return figure(run.loss[-1]), short(1000 * statistics.median(times)) if times else ""


def name_as_asked(run: Run, asked: Run) -> None:
    """Give `run` the level and seed of `asked`, the run as planned. Add a note if the script chose another level."""
    if run.level != asked.level and asked.level != NATIVE:
        run.notes.append(f"asked for {asked.level}, the script trained at {run.level}")
    run.level, run.seed = asked.level, asked.seed
