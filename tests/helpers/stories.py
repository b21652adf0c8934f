"""Stories: random lives of a training, as programs of events, which two trainings live through side by side.

A story is a model, its optimizers, the options of `initialize`, and 10 to 40 events: backward passes, overflows, clips,
steps, edits, groups, copies, checkpoints. `lives.py` tells it to amp_patch and to a training by hand, and compares.
Here are the words, the draw of a story from a seed, and the shortest form of one that fails.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reference_model import PLAIN, Plant, places
from torch_optimizers import RECIPES

HELPERS = Path(__file__).parent
RATES = (0.125, 0.0625)  # of the two groups of an optimizer
# Patterns of warnings that stories deserve, because events are drawn without regard to their order.
DESERVED = (
    ".*gathered for this optimizer",
    "scale_loss. the loss depends on no parameter",  # all of them are frozen
    r"Detected call of `lr_scheduler.step\(\)`",
)
RESUMED_AT = ("O0", "O1", "O2", "O3", "O4", "O5", "split")


class Event(NamedTuple):
    """An event of a story: the name of a method of `lives.Lives`, and its arguments."""

    what: str
    how: dict[str, Any]


@dataclass(frozen=True)
class Story:
    """A random training as data: the model, the optimizers, the options of `initialize`, and the events.

    Attributes:
        owners: per layer an optimizer's number, "nobody", or "frozen", which the first optimizer has.
        kept: the layers that `keep_fp32` names.
        scheduled: whether the learning rates have schedulers, made "before" or "after" `initialize`; "".
    """

    options: dict[str, Any]
    kinds: tuple[str, ...]
    owners: tuple[int | str | None, ...]
    kept: tuple[int, ...]
    optimizers: tuple[str, ...]
    losses: int
    interval: int
    scheduled: str
    seed: int
    events: tuple[Event, ...]

    def script(self) -> str:
        """Return the story as Python code that runs it again."""
        events = "\n".join(f"        Event({event.what!r}, {event.how!r})," for event in self.events)
        fields = "\n".join(f"    {name}={value!r}," for name, value in vars(self).items() if name != "events")
        head = "from math import inf, nan\n\nimport torch\nfrom lives import tell\nfrom reference_model import Plant\n"
        head += "from stories import Event, Story\n\n"
        return f"{head}tell(Story(\n{fields}\n    events=(\n{events}\n    ),\n))"


def shortest(story: Story, fails: Callable[[Story], bool]) -> Story:
    """Return a shorter story that still fails. Events are removed many at a time first, then one by one."""
    size = len(story.events)
    while size:
        start = 0
        while start < len(story.events):
            shorter = replace(story, events=story.events[:start] + story.events[start + size :])
            if fails(shorter):
                story = shorter
            else:
                start += size
        size //= 2
    return story


def complaint(story: Story, tell: Callable[[Story], None]) -> str:
    """Return the error of the shortest story that fails at the same place, with its script; "" if the story passes."""

    def place(story: Story) -> tuple[type, str, int] | None:
        try:
            tell(story)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            *_, last = (frame for frame in frames if Path(frame.filename).parent == HELPERS)
            return type(error), last.name, last.lineno or 0
        return None

    if (first := place(story)) is None:
        return ""
    short = shortest(story, lambda shorter: place(shorter) == first)
    try:
        tell(short)
        return f"seed {story.seed}: failed once, at {first}, and not again"
    except Exception as error:
        return f"seed {story.seed}: {type(error).__name__}: {error}\n\n{short.script()}"


# ---------------------------------------------------------------------------------------------------------------------
# The draw


class Dice(random.Random):
    def once_in(self, count: int) -> bool:
        return self.randrange(count) == 0

    def power(self, lowest: int, highest: int) -> float:
        return 2.0 ** self.randint(lowest, highest)


def drawn(seed: int) -> Story:
    """Return the story of a seed, which is always the same."""
    dice = Dice(seed)
    options = options_of(
        dice, dice.choice(("O0", "O1", "O1", "O2", "O2", "O2", "O3", "O4", "O5", "O5", "split", "split"))
    )
    kinds = _kinds(dice)
    optimizers = tuple(dice.choices(list(RECIPES), k=dice.choice((1, 1, 2))))
    own = [i for i, kind in enumerate(kinds) if places(kinds)[i] == i and kind not in PLAIN]
    optimizers = optimizers[: len(own)]
    if "Muon" in optimizers:  # something has to take the vectors
        optimizers = ("Muon", dice.choice([name for name in RECIPES if name != "Muon"]))
    owners: dict[int, int | str] = {i: dice.choice((0, 0, 0, len(optimizers) - 1, "nobody", "frozen")) for i in own}
    for number, layer in enumerate(reversed(own)):
        if number < len(optimizers):
            owners[layer] = number
    losses = dice.choice((1, 1, 2))
    # A weight of two modules is kept by both or by none.
    kept = (
        [i for i in own if kinds[i] != "batch" and dice.once_in(2)] if dice.once_in(4) and "alias" not in kinds else []
    )
    return Story(
        options,
        kinds,
        tuple(owners.get(i) for i in range(len(kinds))),
        tuple(kept),
        optimizers,
        losses,
        dice.choice((1, 2, 3, 2000)),
        dice.choice(("", "before", "after")),
        seed,
        tuple(_events(dice, kinds, losses, len(optimizers))),
    )


def options_of(dice: Dice, level: str) -> dict[str, Any]:
    """Options of `initialize` for a level, or for O5 with "split" masters."""
    options: dict[str, Any] = {"opt_level": "O5" if level == "split" else level}
    if level == "split":
        options["master_weights"] = "split"
    options["cpu_half"] = dice.choice(("emulate", "native"))
    if level in ("O1", "O2", "O3") and dice.once_in(4):
        options["dtype"] = torch.bfloat16
    if dice.once_in(3):
        options["loss_scale"] = dice.choice(("dynamic", dice.power(-4, 14), 100.0))
    if dice.once_in(4):
        options["min_loss_scale"] = dice.power(-20, 10)
    if dice.once_in(4):
        options["max_loss_scale"] = dice.power(10, 20)
    if level in ("O2", "O3", "O5", "split") and dice.once_in(4):
        options["keep_batchnorm_fp32"] = dice.random() < 0.5
    if level in ("O2", "O3", "O5") and dice.once_in(8):
        options["master_weights"] = dice.random() < 0.5
    if level in ("O1", "O4") and dice.once_in(8):
        options["patch_torch_functions"] = False
    return options


def _kinds(dice: Dice) -> tuple[str, ...]:
    some = ("linear", "conv", "tied", "alias", "batch", "batch", "layer", "group", "times", "block", "block", *PLAIN)
    kinds = dice.choices(some, k=dice.randint(1, 5))
    if dice.once_in(4):
        kinds.insert(0, "embedding")
    kinds = ["linear" if k in ("tied", "alias") and "linear" not in kinds[:i] else k for i, k in enumerate(kinds)]
    return (*kinds, "linear")


def _events(dice: Dice, kinds: tuple[str, ...], losses: int, optimizers: int) -> Iterator[Event]:
    """Draw the events: iterations, with other events before, in and after them."""
    return itertools.islice(_endless(dice, kinds, losses, optimizers), dice.randint(10, 40))


def _endless(dice: Dice, kinds: tuple[str, ...], losses: int, optimizers: int) -> Iterator[Event]:
    storm = dice.choice((2, 4, 40))  # in how many backward passes there is one overflow
    while True:
        for _ in range(dice.choice((0, 0, 1, 2))):
            yield _other(dice)
        for number in range(last := dice.choice((1, 1, 1, 2, 3))):
            yield _backward(dice, kinds, losses, optimizers, storm, last=number == last - 1)
            if dice.once_in(4):
                yield _amidst(dice)
        if dice.once_in(2):
            yield _amidst(dice)
        if dice.once_in(12):
            continue  # no step: the gradients stay
        if dice.once_in(12):
            yield Event("zero_grad", {"by": "optimizer", "to_none": True})  # the step is skipped by hand
            continue
        guarded = dice.once_in(6)
        yield Event("step", {"which": _some(dice, optimizers), "guarded": guarded})
        if not dice.once_in(8):
            yield Event(
                "zero_grad",
                {"by": dice.choice(("optimizer", "optimizer", "model", "hand")), "to_none": dice.random() < 0.7},
            )


def _some(dice: Dice, count: int) -> tuple[int, ...]:
    return tuple(dice.sample(range(count), count)) if dice.random() < 0.7 else (dice.randrange(count),)


def _backward(dice: Dice, kinds: tuple[str, ...], losses: int, optimizers: int, storm: int, *, last: bool) -> Event:
    plant, factor = None, 1.0
    if dice.once_in(storm):
        value = dice.choice((math.inf, -math.inf, math.nan, 2.0**12, 1e30))
        plant = Plant(0, dice.randrange(len(kinds)), dice.random() < 0.5, dice.randrange(12), value)
    elif dice.once_in(2 * storm):
        factor = dice.choice((2.0**-10, 2.0**8, 2.0**14, math.inf, math.nan))
    how = {
        "loss": dice.randrange(losses),
        "targets": _some(dice, optimizers),
        "micro_batches": dice.choice((1, 1, 2, 3, 4)),
        "delays": dice.random() < 0.5,
        "waits": last and dice.once_in(6),
        "later": dice.once_in(8),
        "once_more": dice.once_in(6),
        "plant": plant,
        "factor": factor,
        "raises": dice.choice(("before", "after")) if dice.once_in(12) else "",
        "seed": dice.randrange(2**16),
    }
    return Event("backward", how)


def _amidst(dice: Dice) -> Event:
    """Draw the events between a backward and a step."""
    what = dice.choice(("clip", "clip", "gradients", "gradients", "look", "weights", "masters", "evaluate", "freeze"))
    return _event(dice, what)


def _other(dice: Dice) -> Event:
    some = "weights masters freeze group rates evaluate look scale hold export"
    some += " save save load load copy copy resume resume turn again"
    return _event(dice, dice.choice(some.split()))


def _event(dice: Dice, what: str) -> Event:
    how: dict[str, Any] = {"seed": dice.randrange(2**16)}
    match what:
        case "clip":
            how = {
                "by": dice.choice(("norm", "norm", "value")),
                "whose": dice.choice(("masters", "model")),
                "most": dice.choice((0.1, 1.0, 100.0)),
            }
        case "gradients":
            how |= {
                "op": dice.choice(("mul", "add", "assign", "none", "zero", "clamp")),
                "whose": dice.choice(("masters", "model")),
            }
        case "weights":
            how |= {"op": dice.choice(("copy", "clamp", "mul", "zero", "data", "data mul", "child", "prune"))}
        case "masters":
            how |= {"op": dice.choice(("copy", "clamp", "mul", "zero", "data", "data mul", "lerp"))}
        case "group":
            how |= {"optimizer": dice.randrange(2), "lr": dice.choice(RATES)}
        case "rates":
            how = {"by": dice.choice(("scheduler", "scheduler", "hand"))}
        case "look":
            how = {}
        case "scale":
            how = {"value": dice.power(-6, 16)}
        case "save":
            how = {"by": dice.choice(("memory", "file"))}
        case "copy":
            how = {
                "by": dice.choice(("deepcopy", "pickle", "file")),
                "go_on": dice.choice(("copy", "copy", "original")),
            }
        case "resume":
            how |= {"options": _options_or_none(dice), "load": dice.choice(("before", "after", "between"))}
        case "again":
            how |= {
                "options": _options_or_none(dice),
                "restore": dice.random() < 0.6,
                "keeps": dice.random() < 0.3,
                "steps": dice.random() < 0.5,
            }
    return Event(what, how)


def _options_or_none(dice: Dice) -> dict[str, Any] | None:
    return None if dice.random() < 0.6 else options_of(dice, dice.choice(RESUMED_AT))
