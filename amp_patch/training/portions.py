"""Steps of torch's other optimizers, unmodified, on one cache-sized portion of the parameters after the other.

An optimizer makes pass after pass over all that it is given, and all of that goes through the memory each time. Given
the masters of a few parameters, it makes all its passes, and we unscale before it and round after it, in the cache.

The optimizer's own code is run on a copy of the optimizer's shell: the state is the optimizer's, and the one group of
the copy has the same settings and fewer parameters. Groups and gradients stay where they are, so that there is nothing
to put back after an exception. What was stepped when one comes `Step.leave` publishes and consumes.

This is sound where parameters are stepped each by itself. So it is done for classes of torch.optim itself alone, and
for these after a trial: a toy is stepped in portions and as a whole, and all must agree to the bit. A trial shows what
it meets; of another's class, which may clip all gradients by one norm once that is over 1000, it is no proof.
"""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters import split_master
from amp_patch.masters.half_gradients import can_wait, room_for
from amp_patch.masters.master import Master
from amp_patch.masters.masters import has_gradient, reconcile, round_into_weights
from amp_patch.masters.split_master import SplitMaster
from amp_patch.support.blocks import without_grad
from amp_patch.support.generated_class import base_class
from amp_patch.training.one_pass import done, is_untouched
from amp_patch.training.stash import Stash
from amp_patch.training.step import Plain, Step, Whole

logger = logging.getLogger("amp_patch")

Group = dict[str, Any]

# Elements: 2 MB in FP32. Of 1, 2, 4 and 8 MB this took the least time for NAdam (foreach=True, one thread, a cache of
# 2 MB a core); RMSprop took the same with all four.
PORTION = 2**19

_PLAIN_TYPES = (nn.Parameter, Master, SplitMaster, Tensor)

# By the class's step and the kind of a group why that takes the ordinary way; None where portions are sound.
_tried: dict[Any, str | None] = {}
_said: set[tuple[type, str]] = set()


# ----------------------------------------------------------------------------------------------------------------------
# The step


class InPortions(Whole):
    """The optimizer's own step on a few parameters at a time, between unscaling and rounding, in the cache."""

    def suits(self, optimizer: Any, stash: Stash, given: bool) -> bool:
        if stash.masters.waiting is None or not stash.masters.links.linked or not stash.unobserved:
            return False
        if given:
            _say(optimizer, "step() was given a closure")
            return False
        return _is_sound(optimizer)

    def run(self, step: Step, plain: Plain) -> Any:
        portions = list(_portions(step.optimizer))
        if not portions or not all(_is_dense(master) for _, masters in portions for master in masters):
            return super().run(step, plain)  # portions are known to be right for dense gradients alone
        _reconcile_others(step, portions)
        _step_each(step, portions, plain)
        done(step)
        return None


def suits(optimizer: Any, stash: Stash) -> bool:
    """Whether steps of `optimizer`, with its settings of now, go in portions; the log says why not."""
    linked = stash.masters.links.linked
    if not linked or not can_wait() or any(param.device.type != "cpu" for param, _ in linked):
        return False
    return _is_sound(optimizer)


IN_PORTIONS = InPortions()


@without_grad
def _reconcile_others(step: Step, portions: list[tuple[Group, list[Tensor]]]) -> None:
    stepped = {id(master) for _, masters in portions for master in masters}
    reconcile([pair for pair in step.linked if id(pair[1].master) not in stepped])


@without_grad
def _step_each(step: Step, portions: list[tuple[Group, list[Tensor]]], plain: Plain) -> None:
    masters_of = step.stash.masters
    waiting, link_of = masters_of.waiting, masters_of.by_master
    room = max(sum(map(room_for, masters)) for _, masters in portions)
    for group, masters in portions:
        pairs = [pair for master in masters if (pair := link_of.get(id(master))) is not None]
        reconcile(pairs)
        shell = _shell(step.optimizer, group, masters)
        try:
            if waiting is not None:
                waiting.lend(masters, room)
            step.writes = True  # until the first portion runs, written masters are user edits
            split_master.materialize(masters)
            plain(shell)
        finally:
            if waiting is not None:
                waiting.lent = {}
        round_into_weights(pairs)


def _portions(optimizer: Any) -> Iterator[tuple[Group, list[Tensor]]]:
    """The parameters that have a gradient, in their order: of one group, and together no larger than `PORTION`."""
    for group in optimizer.param_groups:
        masters: list[Tensor] = []
        size = 0
        for master in group["params"]:
            if not has_gradient(master):
                continue
            count = master.numel()
            if masters and size + count > PORTION:
                yield group, masters
                masters, size = [], 0
            masters.append(master)
            size += count
        if masters:
            yield group, masters


def _is_dense(master: Tensor) -> bool:
    """Whether master and gradient are plain tensors on the CPU; one that waits in low precision is."""
    if type(master) not in _PLAIN_TYPES or master.device.type != "cpu":
        return False
    if isinstance(master, Master) and master.waits_alone():
        return True
    grad = master.grad
    return grad is not None and type(grad) in _PLAIN_TYPES and grad.layout is torch.strided


def _shell(optimizer: Any, group: Group, masters: list[Tensor]) -> Any:
    """An optimizer with the attributes and the state of `optimizer`, and of its groups `group` with these masters."""
    shell: Any = object.__new__(base_class(optimizer))
    vars(shell).update(vars(optimizer))
    shell.param_groups = [{**group, "params": masters}]
    return shell


# ----------------------------------------------------------------------------------------------------------------------
# Whether that is sound


def _is_sound(optimizer: Any) -> bool:
    """Whether its class and the settings of its groups are known to be; the log says why not."""
    reason = None if is_torchs(base_class(optimizer)) else "its class is not one of torch.optim"
    for group in optimizer.param_groups:
        reason = reason or _reason_against(optimizer, group)
    if reason is not None:
        _say(optimizer, reason)
    return reason is None


def _say(optimizer: Any, reason: str) -> None:
    """Say once per class and reason why an optimizer takes the ordinary way."""
    base = base_class(optimizer)
    if (base, reason) not in _said:
        _said.add((base, reason))
        logger.info("%s steps all parameters at once, not in portions: %s", base.__name__, reason)


def is_torchs(base: type) -> bool:
    """Whether `base` is a class of torch.optim, whose `step` nobody has replaced."""
    return getattr(torch.optim, base.__name__, None) is base and is_untouched(base)


def _reason_against(optimizer: Any, group: Group) -> str | None:
    """Why groups like this one cannot be stepped in portions."""
    for setting in ("fused", "capturable", "differentiable"):
        if group.get(setting):
            return f"{setting}=True"
    base: Any = base_class(optimizer)
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    key = (base.step, tuple((name, _kind(value)) for name, value in settings.items()))
    if key not in _tried:
        _tried[key] = _trial(optimizer, settings, base.step.__wrapped__)
    return _tried[key]


def _kind(value: Any) -> Any:
    """What a setting has in common with others that need no trial of their own: numbers but for being 0."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):
        return int, value == 0
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    return type(value)


# What the toys have: one optimizer takes parameters of any shape, another matrices alone.
_SHAPES = (((3, 5), (1,), (16,), (), (2, 3, 3), (33,), (7, 2)), ((3, 5), (1, 1), (16, 2), (2, 33), (7, 2)))


@without_grad
def _trial(optimizer: Any, settings: Group, plain: Plain) -> str | None:
    """Why a toy of the optimizer's class with these settings does not step in portions as it does as a whole.

    What else a script keeps in its groups (a name, a scheduler's `initial_lr`) the toy lacks: who reads it fails.
    """
    values = [each for value in settings.values() for each in (value if isinstance(value, tuple | list) else [value])]
    if any(isinstance(value, Tensor) for value in values):
        return "a setting is a tensor"
    random_before = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, portioned = _toy(optimizer, settings), _toy(optimizer, settings)
            calls: list[Any] = []
            whole.register_step_pre_hook(lambda *call: calls.append(call))
            attributes, of_groups = _numbers_of(whole), _of_groups(whole)
            for step in range(4):
                _give_gradients(whole, step)
                _give_gradients(portioned, step)
                plain(whole)
                if not torch.equal(torch.get_rng_state(), random_before[0]) or random.getstate() != random_before[1]:
                    return "it draws random numbers"
                if calls:
                    return "its step calls hooks inside"
                if _of_groups(whole) != of_groups:
                    return "it keeps numbers in its groups"
                if _numbers_of(whole) != attributes:
                    return "it keeps numbers of its own"
                for part in portioned.param_groups:
                    params = [param for param in part["params"] if param.grad is not None]
                    for start in range(0, len(params), 2):
                        plain(_shell(portioned, part, params[start : start + 2]))
                if not _agree(whole, portioned):
                    return "a portion by itself is stepped differently"
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    finally:
        torch.set_rng_state(random_before[0])
        random.setstate(random_before[1])
    return None


def _toy(optimizer: Any, settings: Group) -> Any:
    """A fresh optimizer of the class with small parameters, in two groups with these settings."""
    base: Any = base_class(optimizer)
    taken = inspect.signature(base).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
    *others, matrices = _SHAPES
    for shapes in others:
        try:
            return base([{**settings, "params": _params(shapes, index)} for index in range(2)], **defaults)
        except ValueError:  # torch's Muon
            break
    return base([{**settings, "params": _params(matrices, index)} for index in range(2)], **defaults)


def _params(shapes: tuple[tuple[int, ...], ...], group: int) -> list[Tensor]:
    return [nn.Parameter(_wave(shape, 0.37, index + 10.0 * group)) for index, shape in enumerate(shapes)]


def _wave(shape: tuple[int, ...], pace: float, start: float) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32, device="cpu").mul_(pace).add_(start).sin_().reshape(shape)


def _give_gradients(toy: Any, step: int) -> None:
    """New gradients, small and large; one parameter of each group has none in one of the steps."""
    for index, group in enumerate(toy.param_groups):
        for place, param in enumerate(group["params"]):
            grad = _wave(tuple(param.shape), 1.7, place + 3.0 * step + index) * 10.0 ** (place % 5 + 2 * step - 4)
            param.grad = None if place == step == 1 else grad


def _of_groups(toy: Any) -> list[Group]:
    return [{name: value for name, value in group.items() if name != "params"} for group in toy.param_groups]


def _numbers_of(toy: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(toy).items() if name not in ("state", "param_groups")}


def _agree(one: Any, other: Any) -> bool:
    """Whether parameters and state are equal to the bit, and the state is all of parameters."""
    both = [[param for group in toy.param_groups for param in group["params"]] for toy in (one, other)]
    states = [[toy.state.get(param, {}) for param in params] for toy, params in zip((one, other), both, strict=True)]
    if any(len(toy.state) > sum(map(bool, state)) for toy, state in zip((one, other), states, strict=True)):
        return False
    return _equal(both[0], both[1]) and _equal(states[0], states[1])


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
