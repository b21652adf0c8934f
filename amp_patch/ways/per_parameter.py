"""The registry of other packages' optimizer classes that step each parameter independently, and their partial steps.

Whether a class steps each parameter independently is known only from its source, so users register it, and check it in
a test of their own (`amp_patch.testing`).

The step of a registered class may write into its group (`group["step"] += 1`) or into the optimizer. Each portion
begins with the values from before the step. All portions must write the same values, which are written back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from amp_patch import environment
from amp_patch.policy import Policy
from amp_patch.support.distributed import stateful
from amp_patch.support.generated_class import base_class
from amp_patch.support.tree import same
from amp_patch.training.step import Plain, plain_step, trusted_steps
from amp_patch.ways.partial_step import PartialStep, PortionsDisagreeError

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
    """Declare that an optimizer class steps each parameter independently, so that amp_patch may step it in portions.

    Register a class if the step of a parameter uses only its weight, gradient and state, the settings of its group and
    a count of steps. Do not register a class that uses a number computed from several parameters, for example a common
    norm or an estimated learning rate.

    A registered class gets the same treatment as torch's classes. With masters on a CPU, its steps run in portions and
    its gradients stay in low precision until then. With split masters, only one portion of masters is FP32 at a time.
    `optimizer_state="8bit"` is allowed.

    A class that combines parameters trains wrongly once it is registered. `check_per_parameter_optimizer` of
    `amp_patch.testing` finds most of these on small parameters: call it in a test.

    Args:
        optimizer_class: a subclass of torch.optim.Optimizer. Its subclasses are not registered with it.
        fp32_state: names of state tensors that stay FP32 under `optimizer_state="8bit"`. Name each that holds weights,
            an average of weights, or a running maximum.

    Returns:
        `optimizer_class`, so that this can be used as a decorator.

    Raises:
        TypeError: `optimizer_class` is no subclass of Optimizer, or `fp32_state` no sequence of names.
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


def register_asked(optimizer: Any, policy: Policy) -> None:
    """Register the class of `optimizer` if ``AMP_PATCH_PER_PARAMETER`` names it and `policy` has a use for it."""
    if not policy.master_weights and policy.optimizer_state is None:
        return
    optimizer = stateful(optimizer)
    base, named = base_class(optimizer), environment.per_parameter_optimizers()
    if base.__name__ in named and not is_registered(base) and isinstance(optimizer, torch.optim.Optimizer):
        register_per_parameter_optimizer(base, fp32_state=named[base.__name__])


def _own_step(base: Any) -> Plain:
    step: Plain = plain_step(base) or base.step  # torch wraps `step` when the first object is made
    return step


def is_registered(base: Any) -> bool:
    """Return whether `base` is registered, and its `step` has not been replaced since."""
    return registration_of(base) is not None


def registration_of(base: Any) -> Registration | None:
    """Return the Registration of `base`; None if it is not registered, or its `step` has been replaced since."""
    found = _registered.get(base)
    return found if found is not None and found.plain is _own_step(base) else None


# ----------------------------------------------------------------------------------------------------------------------
# A step


@contextmanager
def stepping(optimizer: Any, plain: Plain) -> Iterator[Callable[[Group, list[Tensor]], None]]:
    """Make one step in portions; yields a function that runs `plain` on some masters of a group.

    Raises:
        PortionsDisagreeError: two portions of a registered class have written different numbers into the group or the
            optimizer.
    """
    if not is_registered(base_class(optimizer)):
        yield lambda group, masters: plain(PartialStep(optimizer, [(group, masters)]).shell)
        return
    # (group, settings) and (attributes, attributes), until the end: each portion begins with the values from before.
    written: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def step_some(group: Group, masters: list[Tensor]) -> None:
        partial = PartialStep(optimizer, [(group, masters)])
        plain(partial.shell)
        for owner, entries in partial.written():
            earlier = next((known for its, known in written if its is owner), None)
            if earlier is None:
                written.append((owner, entries))
            elif not same(earlier, entries):
                _refuse(optimizer, "optimizer" if owner is vars(optimizer) else "group", earlier, entries)

    try:
        yield step_some
        for group in optimizer.param_groups:
            if all(owner is not group for owner, _ in written):
                step_some(group, group["params"])  # none has a gradient, but the class may count the step
    finally:
        for owner, entries in written:
            owner.update(entries)


def _refuse(optimizer: Any, where: str, before: dict[str, Any], now: dict[str, Any]) -> NoReturn:
    name = next(name for name in [*before, *now] if not same(before.get(name), now.get(name)))
    kind = base_class(optimizer).__name__
    raise PortionsDisagreeError(
        f"{kind}.step: {kind} was registered by register_per_parameter_optimizer, but its step has left {name!r} of "
        f"the {where} at {before.get(name)} with some parameters and at {now.get(name)} with others: it does not step "
        "each parameter by itself. Some parameters are stepped: go back to a checkpoint, and leave the registration out"
    )
