"""The measurement of a level: how far one step is from FP32's, beyond the error that rounding alone explains.

The rules of a survey know kinds of lines. A measurement knows none: it makes the step at the level, in FP32, and as an
ideal run (`steps.py`), from the same weights and random states. An error is told if it is large, and several times the
ideal run's. An error that is told is confirmed first: with weights that are moved by two units of the type, a unit of a
ReLU or a route of experts that flipped by chance flips elsewhere.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_patch.diagnose.module_error import floats
from amp_patch.diagnose.survey import attribution
from amp_patch.diagnose.survey.attribution import Cause, Limit, share
from amp_patch.diagnose.survey.calls import line_of
from amp_patch.diagnose.survey.kinds import KINDS, Kind, Place
from amp_patch.diagnose.survey.steps import Case, Errors, Numbers, Steps, errors, offset

LARGE, TIMES = 0.05, 5.0  # an error above `LARGE` is told if it is more than `TIMES` the deserved error
COARSE, CHANCE = 0.2, 0.5  # deserved errors of the outputs, and of the gradients, above these are told as a note
_COARSE = (
    "targets in their own units: rounding the outputs once moves them by {share} of what the samples of the batch "
    "differ by, in every model; scale the targets, so that the outputs lie around 0"
)
_CHANCE = (
    "rounding each layer's output once moves the {of} by {share}: the step magnifies rounding errors, as a "
    "difference of two forwards does; only a training tells whether it matters"
)
_FAR = 10.0  # outputs this many times larger than what the samples differ by lie in units of their own
_KNOWN = 10.0  # seconds for the cause at a level that a rule has a line for
_STEPS = 40  # steps of the model for a level
_ROUNDED = 0.29  # the mean error of a number that is rounded once, in units of its type
_TRIALS = 2  # nearby weights that must show an error too
MEASURED = tuple(sorted(kind.levels[0] for kind in KINDS))  # a level of each kind


@dataclass
class Measured:
    """What one step at a level shows.

    Attributes:
        level: the level of the step.
        levels: the levels that compute such a step alike: "O2" and "O3".
        errors, deserved: the errors of the level's step, and of the ideal run.
        offset: the size of the outputs over what the samples of the batch differ by.
        told: the names of `Errors.by_name` with an error that is large, not deserved, and confirmed.
        cause: what the error comes from, if `told` is not empty and the search was not cut.
        raised: the error that the level's step raises, in words, where the FP32 step raises none; "" without one.
        line: the line of user code that raised it.
        failed: why nothing was measured, in words; "" if the step was measured.
        steps: the number of steps of the model that were made for this level.
    """

    level: str
    levels: tuple[str, ...]
    errors: Errors = field(default_factory=Errors)
    deserved: Errors = field(default_factory=Errors)
    offset: float = 1.0
    told: list[str] = field(default_factory=list)
    cause: Cause | None = None
    raised: str = ""
    line: Place | None = None
    failed: str = ""
    steps: int = 0

    @property
    def note(self) -> str:
        """A sentence about an error that is large and deserved; "" if there is none."""
        outputs, gradient = self.deserved.outputs, self.deserved.gradient
        if outputs > COARSE and self.offset > _FAR:
            return f"{self.level}: {_COARSE.format(share=share(outputs))}"
        if gradient > CHANCE:
            return f"{self.level}: {_CHANCE.format(of='gradients', share=share(gradient))}"
        return f"{self.level}: {_CHANCE.format(of='outputs', share=share(outputs))}" if outputs > COARSE else ""

    @property
    def worst(self) -> str:
        """The name in `told` with the largest error over the deserved one; "" if there is none."""
        errors, ideal = self.errors.by_name(), self.deserved.by_name()
        return max(self.told, key=lambda name: errors[name] / max(ideal.get(name, 0.0), 1e-6), default="")

    def __str__(self) -> str:
        """Return one sentence, with figures."""
        if self.failed:
            return f"{self.level} was not measured: {self.failed}"
        if self.raised:
            return f"{self.level}: the step raises {self.raised}"
        if not self.told:
            mine, ideal = share(self.errors.gradient), share(self.deserved.gradient)
            return f"{self.level}: gradients differ from FP32's by {mine}; rounding explains {ideal}"
        error, explained = self.errors.by_name()[self.worst], self.deserved.by_name().get(self.worst, 0.0)
        size = "is not finite" if math.isinf(error) else f"is {share(error)} off FP32's"
        return f"{self.level}: {_name(self.worst, self.errors)} {size}; rounding explains {share(explained)}"


def _name(name: str, found: Errors) -> str:
    if name == "output":
        return "the model's output"
    plain = name.removeprefix("model.")
    return f"the gradient of {plain}" if name in found.grads else f"the change of {plain}"


def measure(
    case: Case, levels: tuple[str, ...] = MEASURED, seconds: float = 120.0, known: Collection[str] = ()
) -> Iterator[Measured]:
    """Measure the step of a case at each of `levels`.

    Four levels take at most 16 steps of the model if nothing is suspected, and a level at most 40 with the search. Two
    copies of the model are in memory at a time, with their gradients. Syncs with the device.

    Args:
        case: the model in FP32, the loss and a batch.
        levels: names of levels. Levels that compute alike are measured once, and others than in `LEVELS` not at all.
        seconds: after this time no further level is measured, and no cause is searched.
        known: levels that a rule has a line for: their causes are searched for 10 seconds each.
    """
    kinds = sorted((kind.levels[0], kind) for kind in KINDS if not {*levels}.isdisjoint(kind.levels))
    end = time.monotonic() + seconds
    if not any(param.requires_grad for param in floats(list(case.model.parameters()))):
        yield from (Measured(level, kind.levels, failed="it has no trained parameters") for level, kind in kinds)
        return
    steps = Steps(case)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # the steps repeat what a training at the level would say once
        exact = deserved = again = None
        for level, kind in kinds:
            found = Measured(level, kind.levels)
            if time.monotonic() > end:
                found.failed = f"the time for measurements, {seconds:.0f} s, is over"
                yield found
                continue
            before = steps.count
            try:
                exact = exact or steps.exact()
                if deserved is None or deserved[0] is not kind.dtype:
                    deserved = kind.dtype, errors(steps.ideal(kind.dtype), exact)
            except Exception as error:  # a model that cannot be copied, or a step that cannot be repeated
                found.failed = _words(error)
                yield found
                continue
            found.deserved, found.offset = deserved[1], offset(exact.outputs)
            try:
                low = steps.at_level(level)
            except torch.OutOfMemoryError as error:
                found.failed = _words(error)
            except Exception as error:
                found.raised, found.line = _words(error), line_of(error)
            else:
                found.errors = errors(low, exact)
                if again is None and _is_large(found.errors):
                    again = errors(steps.exact(), exact)
                if again is not None and _is_large(again):
                    found.failed = f"two steps in FP32 differ by {share(max(again.by_name().values()))}"
                elif suspects := _suspects(found, kind):
                    latest = min(end, time.monotonic() + (_KNOWN if level in known else seconds))
                    _judge(found, steps, exact, kind, suspects, Limit(latest, before + _STEPS))
            found.steps = steps.count - before
            yield found


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _judge(found: Measured, steps: Steps, exact: Numbers, kind: Kind, suspects: set[str], limit: Limit) -> None:
    """Confirm the suspects, and search the cause of the worst one. A trial that raises refutes none of them."""
    found.told = sorted(suspects)
    with suppress(Exception):
        found.told = sorted(_confirmed(steps, found, kind, suspects))
        if found.told and limit.allows(steps):
            error = found.errors.by_name()[found.worst]
            found.cause = attribution.search(steps, exact, found.level, found.worst, error, limit)


def _is_large(found: Errors) -> bool:
    return max(found.by_name().values()) > LARGE


def _suspects(found: Measured, kind: Kind) -> set[str]:
    ideal, least = found.deserved.by_name(), torch.finfo(kind.dtype).eps
    # In the ideal run equal rows of an output are rounded alike, and differ as little as before.
    ideal["output"] = max(ideal["output"], _ROUNDED * least * found.offset)
    return {
        name
        for name, error in found.errors.by_name().items()
        if error > LARGE and error > TIMES * max(ideal.get(name, 0.0), least)
    }


def _confirmed(steps: Steps, found: Measured, kind: Kind, suspects: set[str]) -> set[str]:
    """Return the suspects that steps from nearby weights show too."""
    for trial in range(1, 1 + _TRIALS):
        near = steps.nearby(kind.dtype, trial)
        exact = near.exact()
        moved = Measured(
            found.level,
            found.levels,
            errors(near.at_level(found.level), exact),
            errors(near.ideal(kind.dtype), exact),
            offset(exact.outputs),
        )
        steps.count += near.count
        suspects &= _suspects(moved, kind)
        if not suspects:
            break
    return suspects


def as_dict(found: Measured) -> dict[str, Any]:
    """Return a measurement for JSON; an error that is not finite is None."""
    return {
        "levels": list(found.levels),
        "output": _finite(found.errors.outputs),
        "gradient": _finite(found.errors.gradient),
        "deserved_output": _finite(found.deserved.outputs),
        "deserved_gradient": _finite(found.deserved.gradient),
        "words": str(found).partition(": ")[2],
        "told": found.told,
        "cause": None if found.cause is None else str(found.cause),
        "failed": found.failed,
        "raised": found.raised,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
