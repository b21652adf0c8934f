"""A check, on small parameters, that an optimizer's class has the same results in portions as in a whole step."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.ways.partial_step import PartialStep, same
from amp_patch.ways.trial import _give_gradients, wave

Group = dict[str, Any]

SHAPES = ((3, 5), (1,), (16,), (), (2, 3, 3), (33,), (7, 2))
MATRICES = ((3, 5), (1, 1), (16, 2), (2, 33), (7, 2))  # Muon takes nothing else


class Each(torch.optim.Optimizer):
    """An optimizer whose step updates each parameter separately."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.direction(group, param), alpha=-group["lr"])

    def direction(self, group: Any, param: Tensor) -> Tensor:
        return param.grad


@torch.no_grad()
def why_not_in_portions(base: Any, settings: Group) -> str | None:
    """Why toys of the class with these settings step otherwise in portions than as a whole; None if they do not."""
    random_before = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, portioned = _toy(base, settings), _toy(base, settings)
            plain = base.step.__wrapped__  # beneath the hooks, which torch puts around it when one is made
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
                        plain(PartialStep(portioned, [(part, params[start : start + 2])]).shell)
                if not _agree(whole, portioned):
                    return "a portion by itself is stepped differently"
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    finally:
        torch.set_rng_state(random_before[0])
        random.setstate(random_before[1])
    return None


def _toy(base: Any, settings: Group) -> Any:
    """Return a new optimizer of the class with small parameters, in two groups with these settings."""
    shapes = MATRICES if base.__name__ == "Muon" else SHAPES
    return base([{"params": _params(shapes, index)} for index in range(2)], **settings)


def _params(shapes: tuple[tuple[int, ...], ...], group: int) -> list[Tensor]:
    return [nn.Parameter(wave(shape, 0.37, index + 10.0 * group, torch.float32)) for index, shape in enumerate(shapes)]


def _of_groups(toy: Any) -> list[Group]:
    return [{name: value for name, value in group.items() if name != "params"} for group in toy.param_groups]


def _numbers_of(toy: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(toy).items() if name not in ("state", "param_groups")}


def _agree(one: Any, other: Any) -> bool:
    """Tell whether parameters and state are equal to the bit, and all state belongs to parameters."""
    both = [[param for group in toy.param_groups for param in group["params"]] for toy in (one, other)]
    states = [[toy.state.get(param, {}) for param in params] for toy, params in zip((one, other), both, strict=True)]
    if any(len(toy.state) > sum(map(bool, state)) for toy, state in zip((one, other), states, strict=True)):
        return False
    return same(both[0], both[1]) and same(states[0], states[1])
