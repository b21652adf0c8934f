"""What a comparison consists of: its plan, the random state that a run starts from, and how a run ended, in words."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from amp_patch.policy import LOW_PRECISION, OPT_LEVELS
from amp_patch.report.recorder import Recorder
from amp_patch.report.runs import Run
from amp_patch.support.patches import Patches

# The levels that one would train with, in both types; O3, which keeps no FP32 weights, shows what that costs.
LEVELS = ("O0", "O1", "O2", "O4", "O5")

_MOST_SEEDS = 1000
_STRIDE = 1_000_003  # between seeds: a prime, so that two seeds of a script (42 and 43) do not meet


@dataclass(frozen=True)
class Plan:
    """What to compare: each level from each seed.

    Attributes:
        levels: at least two of "O0" to "O5", each once.
        seeds: how many repetitions.
        steps: after how many optimizer steps a run ends; None lets it end by itself.
        dtype: "float16" or "bfloat16" for the levels O1 to O3; None leaves it to the script.
        metric: what is compared: "loss", or a name that is given to `amp.log`.
        maximize: whether more of it is better.
        inspect: look at exponents and errors with `amp.inspect`.
    """

    levels: tuple[str, ...] = LEVELS
    seeds: int = 1
    steps: int | None = None
    dtype: str | None = None
    metric: str = "loss"
    maximize: bool = False
    inspect: bool = False

    def __post_init__(self) -> None:
        unknown = [level for level in self.levels if level not in OPT_LEVELS]
        if unknown:
            raise ValueError(
                f"compare: level {unknown[0]!r} is none of {', '.join(OPT_LEVELS)} (the letter O, not zero)"
            )
        twice = [level for level in OPT_LEVELS if self.levels.count(level) > 1]
        if twice:
            raise ValueError(f"compare: {twice[0]} is in levels twice; give each once (seeds=N repeats them)")
        if len(self.levels) < 2:
            raise ValueError(f"compare: levels is {','.join(self.levels) or 'empty'}; wanted at least two, as O0,O2")
        for name, value in ("seeds", self.seeds), ("steps", self.steps):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"compare: {name} is {value!r}; wanted a positive integer")
        if self.seeds > _MOST_SEEDS:
            raise ValueError(f"compare: seeds is {self.seeds}; wanted at most {_MOST_SEEDS} repetitions")
        names = [str(dtype).removeprefix("torch.") for dtype in LOW_PRECISION]
        if self.dtype is not None and self.dtype not in names:
            raise ValueError(f"compare: dtype is {self.dtype!r}; wanted {' or '.join(names)}")

    def runs(self) -> list[Run]:
        """Those to be made, in order: every level of a seed, then the next seed: levels share the machine's moods."""
        return [Run(level, seed) for seed in range(self.seeds) for level in self.levels]

    def environment(self, run: Run) -> dict[str, str]:
        """What tells a run's `initialize` its level."""
        named = {"AMP_PATCH_OPT_LEVEL": run.level, "AMP_PATCH_SEED": str(run.seed)}
        return named if self.dtype is None else {**named, "AMP_PATCH_DTYPE": self.dtype}


@contextmanager
def seeded(seed: int, *, shift: bool = True) -> Iterator[None]:
    """Start Python's, numpy's and torch's random numbers where every run of this seed starts; put them back at the end.

    Seed n starts all three at 1,000,003 n, and with `shift` adds that to every whole number that the body gives to
    `torch.manual_seed`, `torch.cuda.manual_seed` and `manual_seed_all`, `random.seed` and `numpy.random.seed`: so the
    seeds that a script sets itself hold at seed 0, and another n is another training. Generators of a script's own
    stay: a split that they make must not move.
    """
    offset = _STRIDE * seed
    numpy = importlib.import_module("numpy") if importlib.util.find_spec("numpy") is not None else None
    found = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    found_on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    patches = Patches()
    try:
        random.seed(offset)
        torch.manual_seed(offset)
        if numpy is not None:
            numpy.random.seed(offset % 2**32)
        if offset and shift:
            _shift(patches, offset, numpy)
        yield
    finally:
        patches.remove()
        random.setstate(found[0])
        torch.set_rng_state(found[1])
        if numpy is not None:
            numpy.random.set_state(found[2])
        if found_on_cuda is not None:
            torch.cuda.set_rng_state_all(found_on_cuda)


def _shift(patches: Patches, offset: int, numpy: Any) -> None:
    def shifted(original: Callable[..., Any], limit: int) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            args = tuple((x + offset) % limit if isinstance(x, int) else x for x in args)
            kwargs = {
                k: (x + offset) % limit if k != "version" and isinstance(x, int) else x for k, x in kwargs.items()
            }
            return original(*args, **kwargs)

        return seed

    # torch.manual_seed seeds CUDA through torch.cuda's function, whose seed is moved twice then: as good as once.
    torch_seed = shifted(torch.manual_seed, 2**64)
    patches.set(torch, "manual_seed", torch_seed)
    patches.set(torch.random, "manual_seed", torch_seed)
    for name in ("manual_seed", "manual_seed_all"):
        patches.set(torch.cuda, name, shifted(getattr(torch.cuda, name), 2**64))
    patches.set(random, "seed", shifted(random.seed, 2**64))
    if numpy is not None:
        patches.set(numpy.random, "seed", shifted(numpy.random.seed, 2**32))


def failure(recorder: Recorder, run: Run, error: BaseException | None) -> str | None:
    """Why a recorded training gave no figures, or ended early, in one line; None if it ended well.

    Args:
        recorder: that has seen it.
        run: what it recorded.
        error: what the script ended with, a SystemExit too.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):  # the recorder's Enough is one of these
        error = None
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted after {run.steps} steps"
    if isinstance(error, SystemExit):
        how = f"with status {error.code}" if isinstance(error.code, int) else f"saying {_one_line(str(error.code))}"
        return f"the script exited {how}"
    if error is not None:
        words = _one_line(traceback.format_exception_only(type(error), error)[-isinstance(error, SyntaxError)])
        return f"out of memory: {words}" if _is_out_of_memory(error) else words
    if not recorder.enabled:
        return (
            "the script never called amp.initialize (or with enabled=False only, or in a process that it started), so "
            "there is no level to set; call `model, optimizer = amp.initialize(model, optimizer)` after both are made"
        )
    if not recorder.losses:
        return (
            "the script never called amp.scale_loss, so there is no loss to compare; train with "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )
    if not run.steps:
        return "the script never called optimizer.step() on what it gave to amp.initialize: no step was recorded"
    return None


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 300, placeholder=" ...")


def _is_out_of_memory(error: BaseException) -> bool:
    # The allocator of the CPU raises a RuntimeError, in other words on each system.
    words = ("can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


def words(run: Run, asked_steps: int | None) -> str:
    """How a run went, in a line."""
    if run.error is not None:
        return f"{run.level} seed {run.seed}: failed: {run.error}"
    loss, ms = newest(run)
    of = f" of {asked_steps}" if asked_steps is not None else ""
    return f"{run.level} seed {run.seed}: " + "; ".join(
        [f"{run.steps}{of} steps, loss {loss}, {ms} ms a step", *run.notes]
    )


def newest(run: Run) -> tuple[str, str]:
    """The newest loss, and the median time of the newest steps in milliseconds."""
    if not run.steps:
        return "", ""
    times = [seconds for seconds in run.seconds[-20:] if not math.isnan(seconds)]  # NaN: that step was inspected
    return f"{run.loss[-1]:.4g}", f"{1000 * statistics.median(times):.3g}" if times else ""


def settle(run: Run, asked: Run) -> None:
    """Name a run by what was asked for, and note where the script did otherwise."""
    if run.level != asked.level:
        run.notes.append(f"asked for {asked.level}, the script trained at {run.level}")
    run.level, run.seed = asked.level, asked.seed
