"""What is compared: levels, seeds, steps; and whether a script can be."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from amp_patch.environment import DTYPE, KEEP_FP32, KEEP_HIGH, LEVEL, NONE_KEPT, RUNG_VARIABLES, named_level
from amp_patch.lab.recording.run import NATIVE, Run
from amp_patch.lab.wording import figure, short
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS

# The level that the others are compared with.
BASELINE = next(level for level, policy in OPT_LEVELS.items() if policy.changes_nothing)

# Compared unless others are asked for. O3 shows what it costs to keep no FP32 weights, O6 and O7 what FP8 and FP4 do to
# the numbers: they are asked for.
LEVELS = tuple(
    level for level, policy in OPT_LEVELS.items() if policy.keeps_fp32_weights and policy.product_format is None
)

# The level of FP8 and FP4 by which a script's weights stay as they are.
EMULATED = next(level for level, policy in OPT_LEVELS.items() if policy.product_format is not None)

# The share of the memory that a level must save to be recommended for it, unless another is asked for.
MIN_GAIN = 0.05

# The share of the baseline's result by which a level may be worse and is as good, unless another is asked for.
MARGIN = 0.002

SEEDS = 3  # unless others are asked for
_MOST_SEEDS = 1000


def quick_levels(dtype: str | None) -> tuple[str, ...]:
    """The likeliest two: those of FP16 if it is asked for, else BF16's, which wants no loss scale."""
    wanted = f"torch.{dtype or 'bfloat16'}"
    return tuple(level for level in LEVELS if str(OPT_LEVELS[level].dtype) == wanted)


@dataclass(frozen=True)
class Plan:
    """What to compare: each level from each seed.

    Attributes:
        levels: of "O0" to "O7", with rungs or without ("O5+split"), each once, and one at least beside O0, which comes
            first where it is not named.
        seeds: how many repetitions.
        steps: after how many optimizer steps a run ends; None lets it end by itself.
        dtype: "float16" or "bfloat16" for the levels O1 to O3; None leaves it to the script.
        metric: what is compared: "loss", or a name that is given to `amp.log`.
        maximize: whether more of it is better.
        min_gain: what a level must save of the memory to be recommended for it, in per cent.
        margin: by how much a level may be worse and is as good, in per cent of O0's result.
        inspect: look at exponents and errors with `amp.inspect`.
        keep: in a search the modules that the levels keep: in FP32, or where the products of others are FP8 or FP4 in
            BF16; None outside of one.
    """

    levels: tuple[str, ...] = LEVELS
    seeds: int = SEEDS
    steps: int | None = None
    dtype: str | None = None
    metric: str = "loss"
    maximize: bool = False
    inspect: bool = False
    min_gain: float = 100 * MIN_GAIN
    margin: float = 100 * MARGIN
    keep: tuple[str, ...] | None = None

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
        for name, value in ("seeds", self.seeds), ("steps", self.steps):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"compare: {name} is {value!r}; wanted a positive integer")
        if isinstance(self.min_gain, bool) or not 0 <= self.min_gain < 100:
            raise ValueError(f"compare: min_gain is {self.min_gain!r}; wanted per cent of the memory, 0 to below 100")
        if isinstance(self.margin, bool) or not 0 < self.margin < 100:
            raise ValueError(f"compare: margin is {self.margin!r}; wanted per cent of O0's result, above 0, below 100")
        if self.seeds > _MOST_SEEDS:
            raise ValueError(f"compare: seeds is {self.seeds}; wanted at most {_MOST_SEEDS} repetitions")

    def runs(self) -> list[Run]:
        """Those to be made, in order: every level of a seed, then the next seed: levels share the machine's moods."""
        return [Run(level, seed) for seed in range(self.seeds) for level in self.levels]

    def type_of(self, level: str) -> str | None:
        """The level's low-precision type, as far as the plan knows: a script may give O1 to O3 another."""
        policy = OPT_LEVELS[named_level(level).level]
        if policy.changes_nothing:
            return None
        own = str(policy.dtype).removeprefix("torch.")
        return self.dtype if self.dtype is not None and own == "float16" else own

    def has_masters(self, dtype: str) -> bool:
        """Whether a level keeps FP32 masters of weights of this type; True of "", which needs none."""
        kept = [level for level in self.levels if OPT_LEVELS[named_level(level).level].master_weights]
        return not dtype or any(self.type_of(level) == dtype for level in kept)

    def environment(self, run: Run) -> dict[str, str]:
        """What tells a run's `initialize` its level."""
        level = BASELINE if run.level == NATIVE else run.level
        environment = {LEVEL: level, "AMP_PATCH_SEED": str(run.seed)}
        if any(named_level(each).options for each in self.levels):
            environment.update(dict.fromkeys(RUNG_VARIABLES, ""))  # the names say it, of each level its own
        if self.keep is not None and level != BASELINE:
            environment[keep_variable(level)] = ",".join(self.keep) or NONE_KEPT
        return environment if self.dtype is None else {**environment, DTYPE: self.dtype}


def variables(level: str, dtype: str | None = None) -> str:
    """Those of the environment that take a script to a level as it is, as a shell has them."""
    return f"{LEVEL}={level} {DTYPE}={dtype}" if dtype else f"{LEVEL}={level}"


def keep_variable(level: str) -> str:
    """The environment variable that names the modules which a level keeps: AMP_PATCH_KEEP_FP32, or at O6 and O7
    AMP_PATCH_KEEP_HIGH."""
    return KEEP_FP32 if OPT_LEVELS[named_level(level).level].product_format is None else KEEP_HIGH


def progress_line(run: Run, asked_steps: int | None) -> str:
    """How a run went, in a line."""
    if run.error is not None:
        return f"{run.level} seed {run.seed}: failed: {run.error_in_full}"
    loss, ms = newest_figures(run)
    of = f" of {asked_steps}" if asked_steps is not None else ""
    return f"{run.level} seed {run.seed}: " + "; ".join(
        [f"{run.steps}{of} steps, loss {loss}, {ms} ms a step", *run.notes]
    )


def newest_figures(run: Run) -> tuple[str, str]:
    """The newest loss, and the median time of the newest steps in milliseconds."""
    if not run.steps:
        return "", ""
    times = [seconds for seconds in run.seconds[-20:] if not math.isnan(seconds)]  # NaN: an inspected step
    return figure(run.loss[-1]), short(1000 * statistics.median(times)) if times else ""


def name_as_asked(run: Run, asked: Run) -> None:
    """Give `run` the level and the seed of `asked`, and note it if the script trained at another level."""
    if run.level != asked.level and asked.level != NATIVE:
        run.notes.append(f"asked for {asked.level}, the script trained at {run.level}")
    run.level, run.seed = asked.level, asked.seed
