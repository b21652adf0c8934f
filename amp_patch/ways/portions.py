"""Runs the own step of optimizers that have no kernel (one_pass.py) on one cache-sized portion of parameters at a time.

A step makes several passes over its parameters, gradients and state. If these are larger than the cache, each pass
reads them from main memory. A portion fits in the cache, so unscaling, all passes of the step and rounding run there.

The optimizer's own code is not modified. It runs on a second object (`PartialStep`) with the optimizer's state, and one
group with the same settings and fewer parameters. Groups and gradients of the optimizer are not touched, so an
exception needs no restore. For portions stepped before the exception, the exit of `Step` copies the masters back to the
weights and clears the gradients.

Portions give the same numbers only if the class steps each parameter independently. This may change with a release of
torch. `BY_CLASS` lists the classes of torch.optim; a test compares portions with whole steps, for all settings and all
tested releases. A class of another package is stepped as a whole, because it may for example clip all gradients by one
norm, unless a user has registered it (per_parameter.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters.held_gradients import can_wait, room_for
from amp_patch.masters.master import Master
from amp_patch.masters.masters import PLAIN_TYPES, LinkList, has_gradient, materialize, round_into_weights, settle
from amp_patch.masters.record import Record
from amp_patch.policy import Policy
from amp_patch.support.blocks import without_grad
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import is_untouched
from amp_patch.training.joints import Strategy
from amp_patch.training.stash import Stash
from amp_patch.training.step import WHOLE, Plain, Step
from amp_patch.ways import per_parameter
from amp_patch.ways.one_pass import done

logger = logging.getLogger("amp_patch")

Group = dict[str, Any]

# Elements of a portion: 2 MB in FP32. Among 1, 2, 4 and 8 MB, 2 MB was the fastest for NAdam (foreach=True, one thread,
# a cache of 2 MB per core); for RMSprop all four took the same time.
PORTION = 2**19
Portion = tuple[Group, list[tuple[Tensor, Record]]]  # parameters of one group that have a gradient, with their records

_said: set[tuple[type, str]] = set()

# ----------------------------------------------------------------------------------------------------------------------
# Which optimizers may be stepped in portions

# Class of torch.optim -> why its step needs all parameters at once; None if portions give the same numbers.
BY_CLASS: dict[str, str | None] = {
    **dict.fromkeys(("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon")),
    **dict.fromkeys(("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")),
    "LBFGS": "one direction is made of all gradients",
    "SparseAdam": "it takes sparse gradients alone",
}

# If one of these is set, the group is stepped as a whole: torch's fused kernels make only one pass anyway, capturable
# steps are for GPUs, and the autograd graph of a differentiable step needs the gradients afterwards.
WHOLE_WITH = ("fused", "capturable", "differentiable")

# The first and the last release of torch that `BY_CLASS` is valid for. In a later release a step may combine several
# parameters.
RELEASES = ((2, 6), (2, 15))


def is_torchs(base: Any) -> bool:
    """Return whether `base` is a class of torch.optim, and its `step` has not been replaced."""
    return is_untouched(base.step) and getattr(torch.optim, base.__name__, None) is base


def reason_against(optimizer: Any, whole_with: Sequence[str] = WHOLE_WITH) -> str | None:
    """Return why the optimizer with its current settings is stepped as a whole; None if portions give the same numbers.

    Args:
        whole_with: names of settings that rule portions out if they are set.
    """
    base = base_class(optimizer)
    if not per_parameter.is_registered(base) and (reason := _reason_against_class(base)) is not None:
        return reason
    for group in optimizer.param_groups:
        for setting in whole_with:
            if group.get(setting):
                return f"{setting}=True"
        if any(map(_has_tensor, map(group.get, optimizer.defaults))):
            return "a setting is a tensor"
    return None


def _reason_against_class(base: Any) -> str | None:
    if not is_torchs(base):
        return (
            "its class is not one of torch.optim, nor registered as one that steps each parameter by itself (by "
            f"amp.register_per_parameter_optimizer, or AMP_PATCH_PER_PARAMETER={base.__name__} without an edit)"
        )
    first, last = RELEASES
    if not first <= tuple(map(int, torch.__version__.split(".")[:2])) <= last:
        known = "{}.{} to {}.{}".format(*first, *last)
        return f"torch {torch.__version__} is not in {known}, whose optimizers are known"
    return BY_CLASS.get(base.__name__, "its class is unknown")


def _has_tensor(setting: Any) -> bool:
    return isinstance(setting, Tensor) or (isinstance(setting, tuple | list) and any(map(_has_tensor, setting)))


def check_lbfgs(optimizer: Any, policy: Policy) -> None:
    """Raise ValueError if the optimizer is an LBFGS, and the policy checks gradients or has masters."""
    if isinstance(optimizer, torch.optim.LBFGS) and (policy.checks_gradients or policy.master_weights):
        raise ValueError(
            f"initialize: LBFGS evaluates the loss inside step(), which opt_level {policy.opt_level!r} cannot scale, "
            "check or gather; use it at O0, or at O4 (bfloat16 casts, no loss scaling), without skip_nonfinite"
        )


def is_sound(optimizer: Any) -> bool:
    """Return whether `optimizer` may be stepped in portions; if not, log the reason, once per class and reason."""
    reason = reason_against(optimizer)
    if reason is not None:
        _say(optimizer, reason)
    return reason is None


def _say(optimizer: Any, reason: str) -> None:
    base = base_class(optimizer)
    if (base, reason) not in _said:
        _said.add((base, reason))
        logger.info("%s steps all parameters at once, not in portions: %s", base.__name__, reason)


# ----------------------------------------------------------------------------------------------------------------------
# The step


class InPortions(Strategy):
    """A step that unscales, runs the optimizer's own step and rounds for one portion of parameters at a time."""

    devices: tuple[str, ...] = ("cpu",)  # the devices where portions are faster

    def suits_class(self, base: Any) -> bool:
        return True

    def knows(self, optimizer: Any, stash: Stash) -> bool:
        masters = stash.masters.links.masters
        if not masters or not can_wait() or any(master.device.type != "cpu" for master in masters):
            return False
        return is_sound(optimizer)

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        if not stash.masters.links or not stash.unobserved:
            return False
        if given:
            _say(optimizer, "step() was given a closure")
            return False
        return is_sound(optimizer)

    def run(self, step: Step, plain: Plain) -> Any:
        portions = list(_portions(step.optimizer, step.stash))
        masters = [record.master for _, portion in portions for _, record in portion]
        if not masters or not all(_is_dense(master, self.devices) for master in masters):
            return WHOLE.run(step, plain)  # portions are verified for dense gradients only
        _step_each(step, portions, plain)
        done(step)
        return None


IN_PORTIONS = InPortions()


@without_grad
def _step_each(step: Step, portions: list[Portion], plain: Plain) -> None:
    # After edits by user code, also masters and weights in no portion are synced: they have no gradient.
    settle(step.links.without({record for _, portion in portions for _, record in portion}))
    waiting = step.stash.masters.waiting
    room = max(sum(room_for(record.master) for _, record in portion) for _, portion in portions)
    with per_parameter.stepping(step.optimizer, plain) as step_some:
        for group, portion in portions:
            masters = [record.master for _, record in portion]
            links = LinkList((param, record) for param, record in portion if param is not record.master)
            settle(links)
            try:
                if waiting is not None:
                    waiting.lend(links.records, room)
                step.writes = True  # until the first portion runs, written masters are user edits
                materialize(masters)
                step_some(group, masters)
            finally:
                for record in links.records:
                    record.lent = None
            round_into_weights(links)


def _portions(optimizer: Any, stash: Stash) -> Iterator[Portion]:
    """Yield portions, in order: up to `PORTION` elements, or one larger master."""
    held = stash.masters.of_some(optimizer.param_groups)
    pairs = zip(held.params, held.records, strict=True)
    for group in optimizer.param_groups:
        portion, size = list[tuple[Tensor, Record]](), 0
        for param, record in (next(pairs) for _ in group["params"]):
            if not has_gradient(record.master):
                continue
            count = record.master.numel()
            if portion and size + count > PORTION:
                yield group, portion
                portion, size = [], 0
            portion.append((param, record))
            size += count
        if portion:
            yield group, portion


def _is_dense(master: Tensor, devices: tuple[str, ...]) -> bool:
    """Tell whether `master` and its gradient (deferred or not) are plain dense tensors on a device of `devices`."""
    if type(master) not in PLAIN_TYPES or master.device.type not in devices:
        return False
    if isinstance(master, Master) and master.waits_alone():
        return True
    grad = master.grad
    return grad is not None and type(grad) in PLAIN_TYPES and grad.layout is torch.strided
