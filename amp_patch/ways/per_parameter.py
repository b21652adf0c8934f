"""Steps of an optimizer's own code on some of its parameters, and which classes of other packages that is right for.

Nobody but its author, or who has read it, knows that a class steps each parameter by itself. So a user registers it;
`initialize` tries the class on small parameters (trial.py), and refuses where a parameter by itself is stepped
differently.

Such a step often writes into its group (`group["step"] += 1`) or into the optimizer. Each portion begins with what was
there before the step, and what the portions have written, all of them the same, is written back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from amp_patch.support.generated_class import base_class
from amp_patch.training.step import Plain, plain_step, trusted_steps
from amp_patch.ways.partial_step import PartialStep, Written

Group = dict[str, Any]
OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])


# ----------------------------------------------------------------------------------------------------------------------
# Which classes


@dataclass(frozen=True)
class Registration:
    plain: Plain
    fp32_state: frozenset[str]


_registered: WeakKeyDictionary[type, Registration] = WeakKeyDictionary()


def register_per_parameter_optimizer(
    optimizer_class: OptimizerClass, *, fp32_state: Sequence[str] = ()
) -> OptimizerClass:
    """Say that a class of optimizers steps each parameter by itself, so that amp_patch may step a portion at a time.

    That is so where the step of a parameter takes its own weight, gradient and state, the settings of its group and a
    count of steps, but no number made of several parameters (a common norm, an estimated learning rate). With it the
    class has what torch's own have: with masters on a CPU its steps are made in portions, its gradients wait in low
    precision; with split masters a portion of masters is FP32 at a time; `optimizer_state="8bit"` and
    `gradient_release=True` are possible.

    `initialize` checks it on small parameters with the optimizer's settings. What no short trial shows is yours to
    know: a step that looks at several parameters only now and then, say.

    Args:
        optimizer_class: a subclass of torch.optim.Optimizer; its own subclasses are not registered by it.
        fp32_state: names of state tensors that stay FP32 under `optimizer_state="8bit"`, those that hold weights or
            their average, or a running maximum.

    Returns:
        `optimizer_class`: this is a decorator, too.

    Raises:
        TypeError: it is no such class, or `fp32_state` no sequence of names.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        is_class = isinstance(optimizer_class, type)
        came = repr(optimizer_class) if is_class else f"an object of {type(optimizer_class).__name__}"
        raise TypeError(
            f"register_per_parameter_optimizer: optimizer_class is {came}; wanted a subclass of "
            "torch.optim.Optimizer (the class, not one of its objects)"
        )
    if isinstance(fp32_state, str) or not all(isinstance(name, str) for name in fp32_state):
        raise TypeError(
            f"register_per_parameter_optimizer: fp32_state is {fp32_state!r}; wanted a list of names of state tensors, "
            'as ["z"]'
        )
    plain = _own_step(optimizer_class)
    _registered[optimizer_class] = Registration(plain, frozenset(fp32_state))
    trusted_steps.add(plain)
    return optimizer_class


def _own_step(base: Any) -> Plain:
    step: Plain = plain_step(base) or base.step  # before its first object is made torch's hooks are not around it
    return step


def is_registered(base: Any) -> bool:
    """Whether `base` is a registered class, with the step that it had then."""
    found = _registered.get(base)
    return found is not None and found.plain is _own_step(base)


def registration_of(base: Any) -> Registration | None:
    """What was said of `base`, where it is registered."""
    return _registered[base] if is_registered(base) else None


def fp32_state_of(base: Any) -> frozenset[str]:
    """The names of state tensors that a registered class has in FP32 always."""
    return _registered[base].fp32_state if is_registered(base) else frozenset()


# ----------------------------------------------------------------------------------------------------------------------
# A step


@contextmanager
def stepping(optimizer: Any, plain: Plain) -> Iterator[Callable[[Group, list[Tensor]], None]]:
    """One step in portions: gives what runs `plain` on some masters of a group.

    Raises:
        PortionsDisagreeError: two portions of a registered class have written different numbers into the group or the
            optimizer.
    """
    if not is_registered(base_class(optimizer)):
        yield lambda group, masters: plain(PartialStep(optimizer, [(group, masters)]).shell)
        return
    written = Written()

    def step_some(group: Group, masters: list[Tensor]) -> None:
        partial = PartialStep(optimizer, [(group, masters)])
        plain(partial.shell)
        written.note(partial)

    try:
        yield step_some
        for group in optimizer.param_groups:
            if not written.has(group):
                step_some(group, group["params"])  # without gradients
    finally:
        written.write_back(optimizer)
