"""One training for any optimizer at any level: by amp_patch, and by the optimizer alone on FP32 weights.

The loss is a sum of weights times given numbers, which are therefore the gradients, exact in each type. The optimizer
alone gets them from the test. After each of its steps the weights are rounded as the level stores them. Both must have
the same bits, in weights, masters, state and groups, after each of STEPS iterations, in which all happens that may:
micro-batches, clips, overflows, a schedule, frozen weights, edits of weights and masters, and a later group.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from coded_states import in_codes
from split_masters import high_half
from three_ways import rounds_as_torch
from torch import Tensor, nn
from torch_optimizers import MAKERS, VARIANTS, recipe
from training import backward

from amp_patch import amp, multi_tensor
from amp_patch.environment import named_level
from amp_patch.multi_tensor import backend
from amp_patch.optimizers import FusedAdam
from amp_patch.policy import OPT_LEVELS, Options, Policy, resolve

STEPS, RATE = 10, 0.0625
MOST = 128.0  # the largest scale, that keeps each gradient exact in FP16
LEVELS = [*OPT_LEVELS, "O5+split", "O5+stochastic"]
OWN_STEPS = [name for name, row in OPT_LEVELS.items() if not (row.master_weights or row.patch_torch_functions)]
CODED_LEVELS = ["O0+8bit", "O2+8bit", "O4+8bit", "O5+split+8bit", "O5+stochastic+8bit"]
rounds_alike = functools.cache(rounds_as_torch)
IN_ONE_PASS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class Each(torch.optim.Optimizer):
    """An optimizer of user code that steps each parameter separately, with a count of steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.direction(group, param), alpha=-group["lr"])
        return loss

    def direction(self, group: Any, param: Tensor) -> Tensor:
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        return average.lerp_(param.grad, 0.125).sign() / group["step"]


class Own(torch.optim.Adagrad):
    """A class of user code, which only its own `step` steps."""


# name -> a function that makes the optimizer of given groups. `registered` is what a test has to register before.
KINDS: dict[str, Callable[..., Any]] = {
    **{f"torch's {case.id}": recipe(case.values[0], lr=RATE, **case.values[1]) for case in VARIANTS},
    "torch's SGD, dampening": recipe("SGD", lr=RATE, dampening=0.5, maximize=True),
    "torch's SGD, Nesterov": recipe("SGD", lr=torch.tensor(RATE), nesterov=True),
    "torch's Adam, amsgrad": recipe("Adam", lr=RATE, amsgrad=True, maximize=True),
    "torch's RMSprop, not centered": recipe("RMSprop", lr=RATE, centered=False, foreach=False),
    "torch's Adam, betas that are tensors": recipe(
        "Adam", betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    **{name: make for name, make in MAKERS.items() if "Fused" in name or name == "LARC"},
    "FusedAdam, L2": partial(FusedAdam, lr=RATE, eps=1e-4, weight_decay=0.125, adam_w_mode=False),
    "FusedAdam, no bias correction": partial(FusedAdam, lr=torch.tensor(RATE), eps=1e-4, bias_correction=False),
    "user code's": partial(Own, eps=1e-4),
    "registered": Each,
}
ONE_OF_EACH_WAY = (
    "torch's SGD",
    "torch's AdamW",
    "FusedAdam, L2",
    "torch's NAdam-foreach",
    "torch's RMSprop",
    "user code's",
)
CODED = (
    "torch's SGD, Nesterov",
    "torch's AdamW",
    "torch's Adam, amsgrad",
    "FusedAdam, L2",
    "FusedSGD",
    "torch's NAdam",
    "torch's RMSprop, not centered",
    "registered",
)
RELEASED = (
    "torch's SGD",
    "torch's Adam, amsgrad",
    "torch's AdamW-fused",
    "torch's NAdam",
    "torch's RMSprop, not centered",
)


class Term(nn.Module):
    """A weight, and its products with given numbers."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.weight * numbers.to(self.weight.dtype)).float().sum()


class Kept(Term):
    """A weight that stays FP32."""


class Rows(nn.Embedding):
    """A table whose gradient is sparse."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape, sparse=True)

    def forward(self, numbers: Tensor) -> Tensor:
        rows = torch.arange(0, len(numbers), 2, device=numbers.device)
        return (super().forward(rows) * numbers[::2].to(self.weight.dtype)).float().sum()


class Net(nn.Module):
    """A weight that is large enough for codes, one that stays FP32, small and empty ones, and one that comes later."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        if "SparseAdam" in kind:
            terms = [Rows(5, 3), Rows(2, 2), Rows(4, 3)]
        else:  # Muon takes matrices alone
            others = [Term(1, 11)] if "Muon" in kind else [Term(11), *[Term(0, 2)] * ("Adafactor" not in kind)]
            terms = [Term(72, 64), Kept(7, 3), *others, Term(3, 5)]
        self.terms = nn.ModuleList(terms)
        with torch.no_grad():
            terms[0].weight[0, 0] = 1 + 2.0**-8  # half way between two BF16 numbers

    def forward(self, numbers: list[Tensor]) -> Tensor:
        return sum(term(each) for term, each in zip(self.terms, numbers, strict=False))


def numbers_of(net: Net, step: int) -> list[Tensor]:
    """Return the gradients of a step: multiples of 1/8 up to 1."""
    generator = torch.Generator().manual_seed(step)
    draws = [torch.randint(-8, 9, term.weight.shape, generator=generator) / 8 for term in net.terms]
    return [each.to(term.weight.device) for each, term in zip(draws, net.terms, strict=True)]


class Alone:
    """The optimizer on the weights that it updates, and what the model has of these by `policy`."""

    def __init__(self, net: Net, kind: str, policy: Policy) -> None:
        make = copy.deepcopy(KINDS[kind])
        self.policy, self.steps = policy, [0] * len(net.terms)
        masters = bool(policy.master_weights)
        low = policy.cast_model_type if not masters else torch.float32
        self.held = [nn.Parameter(term.weight.detach().to(low or torch.float32, copy=True)) for term in net.terms]
        self.is_low = [policy.cast_model_type is not None and not isinstance(term, Kept) for term in net.terms]
        if policy.master_weights == "stochastic":  # to nearest at first
            self.store([weight.detach().to(policy.cast_model_type) for weight in self.held])
        optimizer = made(make, self.held[:-1])
        reads_all = masters or policy.patch_torch_functions or policy.optimizer_state is not None
        is_known = type(getattr(optimizer, "optim", optimizer)) in IN_ONE_PASS and "that are tensors" not in kind
        self.rounds_alike = True
        if reads_all and is_known and backend() == "cpp":
            self.rounds_alike = rounds_alike(net.terms[0].weight.device.type)
            for settings in (optimizer.defaults, *optimizer.param_groups):  # as the kernels round
                settings |= {"foreach": False, "fused": True}
        self.optimizer = optimizer

    def store(self, low: list[Tensor]) -> None:
        for weight, value, is_low in zip(self.held, low, self.is_low, strict=True):
            if is_low:
                weight.data.copy_(value)

    def step(self) -> None:
        self.optimizer.step()
        stepped = [weight.grad is not None for weight in self.held]
        if self.policy.master_weights == "stochastic":
            for number, weight in enumerate(self.held):
                if stepped[number] and self.is_low[number]:
                    low = torch.empty_like(weight, dtype=torch.bfloat16)
                    draw = number << 40 | self.steps[number]
                    multi_tensor.multi_tensor_stochastic_round([weight.detach()], [low], 0, [draw])
                    weight.data.copy_(low)
        self.steps = [count + each for count, each in zip(self.steps, stepped, strict=True)]
        if self.policy.optimizer_state == "8bit":
            for weight in self.held:
                for name, value in self.optimizer.state.get(weight, {}).items():
                    if isinstance(value, Tensor) and value.shape == weight.shape and name != "max_exp_avg_sq":
                        self.optimizer.state[weight][name] = in_codes(value)

    def weights(self) -> list[Tensor]:
        """Return what the model has."""
        low = (
            high_half
            if self.policy.master_weights == "split"
            else lambda weight: weight.to(self.policy.cast_model_type)
        )
        return [
            low(weight.detach()) if is_low else weight.detach()
            for weight, is_low in zip(self.held, self.is_low, strict=True)
        ]


def made(make: Callable[..., Any], params: list[nn.Parameter]) -> Any:
    """Return the optimizer with two groups."""
    return make([{"params": params[:1]}, {"params": params[1:]}])


def assert_trains_as_alone(kind: str, level: str, device: str = "cpu", **more: Any) -> None:
    """Train by amp_patch and by the optimizer alone, and raise at the first step after which they differ.

    Args:
        kind: a name of KINDS.
        level: with or without rungs, as "O5+split".
        more: options of `initialize`.
    """
    named, make, net = named_level(level), KINDS[kind], Net(kind).to(device)
    policy = resolve(named.level, Options(**named.options))
    alone = Alone(net, kind, policy)
    if not alone.rounds_alike and (policy.optimizer_state or policy.master_weights == "stochastic"):
        pytest.skip("torch's fused kernels round otherwise on this machine")
    compare = functools.partial(assert_same, exact=alone.rounds_alike)
    params = [term.weight for term in net.terms]
    options = {"keep_fp32": Kept} if policy.master_weights and isinstance(net.terms[1], Kept) else {}
    options |= {"max_loss_scale": MOST} if policy.loss_scale == "dynamic" else {}
    optimizer = made(copy.deepcopy(make), params[:-1])
    net, optimizer = amp.initialize(
        net, optimizer, opt_level=named.level, verbosity=0, **named.options, **options, **more
    )
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in (optimizer, alone.optimizer)]
    compare(params, alone.weights(), "weights at first")
    for step in range(STEPS):
        if step == 6 and adds_groups(alone.optimizer):
            with torch.no_grad():
                alone.held[-1].copy_(params[-1])
            for each, param in ((optimizer, params[-1]), (alone.optimizer, alone.held[-1])):
                each.add_param_group({"params": [param], "lr": RATE / 2})
        iterate(net, optimizer, alone, step, in_backward="gradient_release" in more)
        for schedule in schedules:
            schedule.step()
        held = [weight for group in alone.optimizer.param_groups for weight in group["params"]]
        compare([*amp.master_params(optimizer)], held, f"masters after step {step}")
        compare(params[: len(held)], alone.weights()[: len(held)], f"weights after step {step}")
        mine, theirs = optimizer.state_dict(), alone.optimizer.state_dict()
        for one, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
            compare(settings(one), settings(other), f"group after step {step}")
        compare(mine["state"], theirs["state"], f"state after step {step}")
    amp.restore()


def iterate(net: Net, optimizer: Any, alone: Alone, step: int, in_backward: bool) -> None:
    """Make one step of both. A step in backward has no micro-batches, clips, overflows or edits before it."""
    numbers = numbers_of(net, step)[: sum(len(group["params"]) for group in optimizer.param_groups)]
    net.terms[0].weight.requires_grad_(step != 4)
    overflows = step == 3 and alone.policy.loss_scale == "dynamic"
    bodies = 2 if step % 4 == 1 and not in_backward else 1
    if in_backward:
        edit(net, optimizer, alone, step)
    for _ in range(bodies):
        backward(net(numbers) * (math.inf if overflows else 1.0), optimizer)
    for weight, number, term in zip(alone.held, numbers, net.terms, strict=False):
        if term.weight.requires_grad:
            weight.grad = gradient_of(term, bodies * number).to(weight.dtype)
    if not in_backward:
        edit(net, optimizer, alone, step)
    if step == 2 and not in_backward:  # by value: the 2-norm is summed in another order
        for params in (amp.master_params(optimizer), alone.held):
            dense = [p for p in params if p.grad is not None and not p.grad.is_sparse]
            if dense:
                nn.utils.clip_grad_value_(dense, 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not overflows:
        with amp.disable_casts():  # which O1 and O4 have installed in all of the process
            alone.step()
    alone.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def edit(net: Net, optimizer: Any, alone: Alone, step: int) -> None:
    """Set a part of a weight to 0, and halve a master."""
    if step == 5:
        for weight in (net.terms[0].weight, alone.held[0]):
            weight.data[0] = 0
    if step == 7:
        for weight in (next(amp.master_params(optimizer)), alone.held[0]):
            weight.mul_(0.5)


def gradient_of(term: Any, number: Tensor) -> Tensor:
    if not isinstance(term, Rows):
        return number
    rows = torch.arange(0, len(number), 2, device=number.device)
    return torch.sparse_coo_tensor(rows[None], number[::2], number.shape, is_coalesced=True)


def adds_groups(optimizer: Any) -> bool:
    """Tell whether the class can step parameters that are added later; torch 2.6's Adagrad raises a KeyError."""
    return not (isinstance(optimizer, torch.optim.Adagrad) and torch.__version__.startswith("2.6."))


def settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "foreach", "fused", "initial_lr")}


def assert_same(ours: Any, theirs: Any, where: str, exact: bool) -> None:
    """Assert equal bits, or equality within the rounding of BF16."""
    bits = {"rtol": 0, "atol": 0} if exact else {"rtol": 2.0**-6, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **bits, msg=lambda text: f"{where}: {text}")
