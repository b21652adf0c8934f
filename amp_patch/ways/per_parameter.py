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

Group = dict[str, Any]
OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

NOT_SETTINGS = ("params",)
NOT_ATTRIBUTES = ("param_groups", "state")

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


def shell_of(optimizer: Any, group: Group, masters: list[Tensor]) -> Any:
    """An optimizer with the attributes and the state of `optimizer`, and of its groups `group` with these masters."""
    shell: Any = object.__new__(base_class(optimizer))
    vars(shell).update(vars(optimizer))
    shell.param_groups = [{**group, "params": masters}]
    return shell


class PortionsDisagreeError(RuntimeError):
    """Two portions of a step have written different numbers into the group or the optimizer."""


@contextmanager
def stepping(optimizer: Any, plain: Plain) -> Iterator[Callable[[Group, list[Tensor]], None]]:
    """One step in portions: gives what runs `plain` on some masters of a group.

    Raises:
        PortionsDisagreeError: two portions of a registered class have written different numbers into the group or the
            optimizer.
    """
    if not is_registered(base_class(optimizer)):
        yield lambda group, masters: plain(shell_of(optimizer, group, masters))
        return
    written = Written()

    def step_some(group: Group, masters: list[Tensor]) -> None:
        shell = shell_of(optimizer, group, masters)
        plain(shell)
        written.note(optimizer, [group], shell)

    try:
        yield step_some
        for group in optimizer.param_groups:
            if not written.has(group):
                step_some(group, group["params"])  # without gradients
    finally:
        written.write_back(optimizer)


class Written:
    """What shells have written into groups and attributes in one step: kept apart until all have begun with the same.

    False until a shell has stepped.
    """

    def __init__(self) -> None:
        self._attributes: dict[str, Any] | None = None
        self._settings: dict[int, Group] = {}  # by id(group)

    def __bool__(self) -> bool:
        return self._attributes is not None

    def has(self, group: Group) -> bool:
        """Whether a shell has stepped some of this group of the optimizer."""
        return id(group) in self._settings

    def note(self, optimizer: Any, groups: Sequence[Group], shell: Any) -> None:
        """Take note of what `shell` has written, whose groups are made of these of the optimizer.

        Raises:
            PortionsDisagreeError: another has written something else.
        """
        attributes = changed(vars(optimizer), vars(shell), NOT_ATTRIBUTES)
        self._refuse_if_different(optimizer, self._attributes, attributes, "optimizer")
        for group, after in zip(groups, shell.param_groups, strict=True):
            settings = changed(group, after, NOT_SETTINGS)
            self._refuse_if_different(optimizer, self._settings.get(id(group)), settings, "group")
            self._settings[id(group)] = settings
        self._attributes = attributes

    @staticmethod
    def _refuse_if_different(optimizer: Any, before: dict[str, Any] | None, now: dict[str, Any], where: str) -> None:
        if before is None or same(before, now):
            return
        name = next(name for name in [*before, *now] if not same(before.get(name), now.get(name)))
        kind = base_class(optimizer).__name__
        raise PortionsDisagreeError(
            f"{kind}.step: {kind} was registered by register_per_parameter_optimizer, but its step has left {name!r} "
            f"of the {where} at {before.get(name)} with some parameters and at {now.get(name)} with others: it does "
            "not step each parameter by itself. Some parameters are stepped: go back to a checkpoint, and leave the "
            "registration out"
        )

    def write_back(self, optimizer: Any) -> None:
        """Have the optimizer and its groups have what the shells have written."""
        for group in optimizer.param_groups:
            group.update(self._settings.get(id(group), {}))
        vars(optimizer).update(self._attributes or {})


def changed(before: dict[str, Any], after: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in without and not (name in before and before[name] is value)
    }


def same(one: Any, other: Any) -> bool:
    """Whether two nested containers of tensors and numbers are equal, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
