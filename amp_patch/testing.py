"""Checks for the tests of classes that users register with amp_patch."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support.generated_class import base_class
from amp_patch.support.random_states import random_states, restored_random_states
from amp_patch.support.tree import same
from amp_patch.training.step import Plain
from amp_patch.ways.partial_step import NOT_SETTINGS, PortionsDisagreeError, changed, new_of_class
from amp_patch.ways.per_parameter import Registration, registration_of, stepping

Shape = tuple[int, ...]

STEPS = 12  # some optimizers do more every 5 or 10 steps, for example Lookahead's merge
_DIFFERENT = "it steps a parameter by itself differently from the same among others; leave the registration out"
SHIFT = 64.0  # added to the weights of one toy: a state that holds weights is then shifted too


def check_per_parameter_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that a registered optimizer class steps each parameter independently; call it in a test of the class::

        amp.register_per_parameter_optimizer(Lion)
        check_per_parameter_optimizer(Lion(model.parameters(), lr=1e-4, weight_decay=0.1))

    Toy optimizers with the settings of `optimizer` step small FP64 parameters twelve times, together and one by one:
    all numbers must agree to the bit. State that holds weights must be named in `fp32_state` of the registration. The
    check is short: it misses a step that combines parameters once in 1,000 steps.

    Args:
        optimizer: an object of the class. It is not changed, and neither are the states of random generators.

    Raises:
        ValueError: the class is not registered (`register_per_parameter_optimizer`).
        AssertionError: the class must not be registered, or not with this `fp32_state`; the message has the reason.
    """
    base = base_class(optimizer)
    if (found := registration_of(base)) is None:
        raise ValueError(
            f"check_per_parameter_optimizer: optimizer is a {base.__name__}, a class that is not registered; call "
            f"amp.register_per_parameter_optimizer({base.__name__}) first"
        )
    if (reason := _reason_against(optimizer, found)) is not None:
        raise AssertionError(f"{base.__name__}, registered by register_per_parameter_optimizer: {reason}")


@torch.no_grad()
def _reason_against(optimizer: Any, found: Registration) -> str | None:
    try:
        with warnings.catch_warnings(), restored_random_states() as before:
            warnings.simplefilter("ignore")
            whole, portioned = toy_of(optimizer), toy_of(optimizer)
            # Weights of the pair differ by SHIFT; weight decay in gradients would make all states depend on weights.
            pair = [toy_of(optimizer, weight_decay=0.0), toy_of(optimizer, SHIFT, weight_decay=0.0)]
            for step in range(STEPS):
                for toy in (whole, portioned, *pair):
                    _give_gradients(toy, step)
                    _step_toy(toy, found.plain, by_itself=toy is portioned)
                if not same(random_states(), before):
                    return "it draws random numbers, which portions would draw more of; leave the registration out"
                if not _agree(whole, portioned):
                    return _DIFFERENT
    except PortionsDisagreeError:
        return _DIFFERENT
    except Exception as error:  # the class's own code may raise anything
        return f"its step fails ({type(error).__name__}: {error}); mend that, or leave the registration out"
    names = list(dict.fromkeys(name for state in whole.state.values() for name in state))
    if unknown := found.fp32_state - set(names):
        return f"its state has no {sorted(unknown)[0]!r}, which fp32_state names; it has {', '.join(names) or 'none'}"
    held = [name for name in names if name not in found.fp32_state and _holds_weights(pair, name)]
    if held:
        return (
            f"its state {held[0]!r} holds weights, which eight bits are too few for; register it with "
            f"fp32_state={[*sorted(found.fp32_state), *held]}"
        )
    return None


def _small_shapes(params: Sequence[Tensor]) -> list[Shape]:
    """Return two to five shapes for toy parameters, with the numbers of dimensions that `params` have."""
    shapes = list(dict.fromkeys(tuple(param.shape) for param in params))
    chosen = [tuple(min(size, 3 + place) for size in shape) for place, shape in enumerate(shapes[:5])]
    return chosen * 2 if len(chosen) == 1 else chosen


def toy_of(optimizer: Any, shift: float = 0.0, **instead: Any) -> Any:
    """Return an optimizer of the same class and settings, whose groups have a few small FP64 parameters.

    In FP64 a number computed from several parameters changes the last bits, where FP32 might round it away.

    Args:
        shift: added to all weights.
        instead: values for settings of the groups; a setting that a group does not have is ignored.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    memo = {id(param): param for param in params}  # without this memo, deepcopy would copy the model for each toy
    toy: Any = new_of_class(optimizer)
    of_torch = vars(torch.optim.SGD([nn.Parameter(wave((1,), 1.0, 0.0))]))  # empty dicts of hooks, among others
    own = {name: value for name, value in vars(optimizer).items() if name not in of_torch or name == "defaults"}
    own = {name: value for name, value in own.items() if name != "step" and not name.startswith("_amp_")}
    vars(toy).update(of_torch | {name: copy.deepcopy(value, memo) for name, value in own.items()})
    toy.state = defaultdict(dict)
    toy.param_groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {name: copy.deepcopy(value, memo) for name, value in group.items() if name not in NOT_SETTINGS}
        settings |= {name: value for name, value in instead.items() if name in settings}
        shapes = _small_shapes(group["params"])
        small = [nn.Parameter(wave(shape, 0.37, place + 10.0 * index) + shift) for place, shape in enumerate(shapes)]
        toy.param_groups.append({**settings, "params": small})
    return toy


def wave(shape: Shape, pace: float, start: float, dtype: torch.dtype = torch.float64) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype, device="cpu").mul_(pace).add_(start).sin_().reshape(shape)


def _give_gradients(toy: Any, step: int) -> None:
    """Give the toy new gradients of many magnitudes. In step 1 the second parameter of each group has none."""
    for index, group in enumerate(toy.param_groups):
        for place, param in enumerate(group["params"]):
            grad = wave(tuple(param.shape), 1.7, place + 3.0 * step + index, param.dtype)
            grad *= 10.0 ** (place % 5 + 2 * (step % 4) - 4)
            param.grad = None if place == step == 1 else grad


def _step_toy(toy: Any, plain: Plain, by_itself: bool) -> None:
    if not by_itself:
        plain(toy)
        return
    with stepping(toy, plain) as step_some:
        for group in toy.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    step_some(group, [param])


def _agree(one: Any, other: Any) -> bool:
    """Return whether the parameters, states, settings and numeric attributes of two toys are equal bit for bit."""
    return same(_numbers_of(one), _numbers_of(other))


def _numbers_of(toy: Any) -> list[Any]:
    params = params_of(toy)
    beside = len(toy.state) - sum(param in toy.state for param in params)
    simple = {name: value for name, value in vars(toy).items() if isinstance(value, Tensor | int | float | str)}
    settings = [changed({}, group, NOT_SETTINGS) for group in toy.param_groups]
    return [params, [toy.state.get(param, {}) for param in params], beside, settings, simple]


def params_of(toy: Any) -> list[Tensor]:
    return [param for group in toy.param_groups for param in group["params"]]


def _holds_weights(pair: Sequence[Any], name: str) -> bool:
    """Return whether state `name` follows the weights, which differ by `SHIFT` between the two toys.

    A slow average has moved by a small part of `SHIFT`, but by the same part in every element.
    """
    pairs = zip(*(_tensors(toy, name) for toy in pair), strict=True)
    moves = [(after - before).abs() for before, after in pairs if before.is_floating_point() and before.numel()]
    return any(
        move.max() > SHIFT / 2 or (move.min() > SHIFT / 2000 and move.min() > 0.99 * move.max()) for move in moves
    )


def _tensors(toy: Any, name: str) -> Iterator[Tensor]:
    for group in toy.param_groups:
        for param in group["params"]:
            value = toy.state.get(param, {}).get(name)
            if isinstance(value, Tensor) and value.shape == param.shape:
                yield value
