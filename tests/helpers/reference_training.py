"""Mixed-precision training by hand: the contract, written out once more in plain torch.

Nothing of amp_patch is used here, save its norms. Weights, casts, scales and skips are those that its documents
promise; the stories (test_stories.py) hold amp_patch to them, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from reference_model import CastByHand, Level, Weight
from torch import Tensor


class Scale:
    """A dynamic loss scale: it halves at an overflow, doubles after `interval` clean passes, and stays in range."""

    def __init__(self, level: Level, interval: int) -> None:
        self.level, self.interval = level, interval
        self.moves = level.scale == "dynamic"
        self.value = min(max(2.0**16, level.lowest), level.highest) if self.moves else float(level.scale)
        self.unskipped = 0
        self.overflowed = False  # since the scale last moved

    def move(self) -> None:
        overflowed, self.overflowed = self.overflowed, False
        if not self.moves:
            return
        self.unskipped = 0 if overflowed else self.unskipped + 1
        if overflowed:
            self.value /= 2
        elif self.unskipped == self.interval:
            self.value, self.unskipped = self.value * 2, 0
        self.value = min(max(self.value, self.level.lowest), self.level.highest)


# ---------------------------------------------------------------------------------------------------------------------
# Backward and step


class Owner:
    """An optimizer of the training: torch's own on the masters, and the losses that overflowed since its last step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], groups: list[tuple[float, list[Weight]]]) -> None:
        self.weights = [weight for _, group in groups for weight in group]
        self.optimizer = make([{"params": [w.master for w in group], "lr": lr} for lr, group in groups])
        self.overflowed: set[int] = set()
        self.waits_for: int | None = None  # the loss whose gradients a delayed exit left scaled
        self.waits_at = 1.0  # the scale of these
        self.skipped = False

    def add_group(self, weights: list[Weight], lr: float, level: Level) -> None:
        """Do `add_param_group` with weights that no optimizer has held."""
        for weight in weights:
            grad, weight.grad = weight.grad, None
            if level.masters and weight.value.dtype is not torch.float32:
                weight.take_master(weight.value, split=level.masters == "split")
                if not weight.value.requires_grad and (grad is None or level.scales):
                    weight.put_off_master()
            if grad is None or level.scales:  # it may be scaled
                continue
            if self.waits_for is not None and not weight.has_master:
                weight.waiting = grad
            else:
                weight.grad = grad.to(weight.master.dtype)
        self.optimizer.add_param_group({"params": [weight.master for weight in weights], "lr": lr})
        self.weights += weights

    def zero_grad(self, set_to_none: bool) -> None:
        for weight in self.weights:
            there = weight.grad is not None or (weight.waiting is not None and not weight.has_master)
            weight.grad = torch.zeros_like(weight.held) if there and not set_to_none else None
            weight.waiting = None
        self.overflowed, self.waits_for = set(), None


class Trainer:
    """The backward passes and steps of a training by hand.

    A loss's gradients are unscaled, checked alone, and then added to earlier gradients. An overflow among those of
    one loss moves that loss's scale, once between two steps, and every optimizer of its call skips its next step.
    """

    def __init__(self, level: Level, nets: list[CastByHand], owners: list[Owner], scales: list[Scale]) -> None:
        self.level, self.nets, self.owners, self.scales = level, nets, owners, scales
        self.weights = [weight for net in nets for weight in net.weights.values()]
        self.lost = False  # whether a gradient of a weight that no optimizer holds has overflowed

    def backward(self, loss: Tensor, loss_id: int, targets: list[Owner], *, delay: bool, later: bool) -> None:
        """Do `scale_loss(loss, targets, loss_id, delay_unscale=delay, delay_overflow_check=later)` and its backward."""
        scale = self.scales[loss_id]
        ours = [weight for owner in targets for weight in owner.weights]
        self._begin(targets, loss_id)
        for weight, grad in self._gradients(loss, loss_id):
            if not any(weight is other for other in ours):
                self._pass_by(weight, grad, loss_id)
                continue
            if delay and weight.waiting is None and not weight.has_master and weight.grad is not None:
                weight.waiting, weight.grad = self._scaled_again(weight.grad, scale.value)
            if grad is not None:
                weight.waiting = grad if weight.waiting is None else weight.waiting + grad
        self._clear_lost()
        for owner in targets:
            owner.waits_for, owner.waits_at = loss_id, scale.value
        if not delay:
            self._take(targets, loss_id, scale.value)
        if not (delay or later):
            scale.move()

    def fail(self, loss: Tensor, loss_id: int, targets: list[Owner], *, after: bool) -> None:
        """An exception leaves the body, before or `after` its backward: only what waits has that backward's share."""
        self._begin(targets, loss_id)
        for weight, grad in self._gradients(loss, loss_id) if after else ():
            if not any(weight is other for owner in targets for other in owner.weights):
                self._pass_by(weight, grad, loss_id)
            elif grad is not None and weight.waiting is not None:
                weight.waiting = weight.waiting + grad
            elif grad is not None and not self.level.scales and not weight.has_master and weight.grad is not None:
                weight.grad = weight.grad + grad  # without scaling nothing is set aside
        self._clear_lost()

    def _begin(self, targets: list[Owner], loss_id: int) -> None:
        scale = self.scales[loss_id].value
        for owner in targets:
            for weight in owner.weights:
                weight.thaw()
            if owner.waits_for is not None:  # deferred gradients are scaled as this backward's will be
                factor = torch.tensor(scale, dtype=torch.float64) / owner.waits_at
                for weight in owner.weights:
                    if weight.waiting is not None and factor != 1 and self.level.scales:
                        weight.waiting = (weight.waiting.float() * factor.float()).to(weight.waiting.dtype)
                owner.waits_for, owner.waits_at = loss_id, scale
            if owner.waits_for is None and all(weight.grad is None for weight in owner.weights):
                owner.overflowed.clear()  # gradients that were dropped

    def _gradients(self, loss: Tensor, loss_id: int) -> list[tuple[Weight, Tensor | None]]:
        """Return the gradient of each of the models' weights from the scaled loss alone."""
        for weight in self.weights:
            weight.value.grad = None
        (loss * self.scales[loss_id].value if self.level.scales else loss).backward(retain_graph=True)
        return [(weight, weight.value.grad) for weight in self.weights]

    def _scaled_again(self, grad: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """A gradient as part of one that waits, and what of it no scaled gradient can hold."""
        if not self.level.scales:
            return grad, None
        scaled = grad * scale
        return torch.where(scaled.isfinite(), scaled, 0.0), torch.where(scaled.isfinite(), 0.0, grad)

    def _pass_by(self, weight: Weight, grad: Tensor | None, loss_id: int) -> None:
        """Add a gradient to a bystander: a parameter whose optimizer was not given to `scale_loss`."""
        if grad is None or weight.has_master:
            return  # the next `scale_loss` of its own optimizer begins without it
        bad = self._add(weight, grad, self.scales[loss_id].value)
        holders = [owner for owner in self.owners if any(weight is other for other in owner.weights)]
        for owner in holders if bad else ():
            owner.overflowed.add(loss_id)
        if bad and not holders:
            self.lost = True

    def _clear_lost(self) -> None:
        """After an overflow, clear the gradients of weights that no optimizer holds, because no step clears them."""
        held = {id(weight) for owner in self.owners for weight in owner.weights}
        for weight in self.weights if self.lost else ():
            if id(weight) not in held and weight.grad is not None:
                weight.grad = torch.zeros_like(weight.grad)
        self.lost = False

    def _add(self, weight: Weight, grad: Tensor, scale: float) -> bool:
        """Unscale a gradient and add it to the weight's, in FP32, rounded once; whether it overflowed."""
        new = grad.float() * (1 / scale if self.level.scales else 1.0)
        total = (new if weight.grad is None else new + weight.grad.float()).to(weight.held.dtype)
        fault = ~new.isfinite() | (~total.isfinite() & (weight.grad is None or weight.grad.isfinite()))
        weight.grad = total
        return self.level.scales and bool(fault.any())

    def _take(self, targets: list[Owner], loss_id: int, scale: float) -> None:
        """Unscale the waiting gradients into the gradients of the next step."""
        found = False
        for weight in (weight for owner in targets for weight in owner.weights):
            if weight.waiting is not None:
                found = self._add(weight, weight.waiting, scale) or found
                weight.waiting = None
        if found and not any(loss_id in owner.overflowed for owner in targets):
            self.scales[loss_id].overflowed = True
        for owner in targets:
            owner.waits_for = None
            if found:
                owner.overflowed.add(loss_id)

    def step(self, owner: Owner) -> None:
        if owner.waits_for is not None:
            loss_id = owner.waits_for
            self._take([owner], loss_id, owner.waits_at)
            self.scales[loss_id].move()
        for weight in owner.weights:
            weight.settle()
        owner.skipped = bool(owner.overflowed)
        if not owner.skipped:
            for weight in owner.weights:
                weight.master.grad = weight.grad
            _begin_momentum(owner.optimizer)
            owner.optimizer.step()
            for weight in owner.weights:
                weight.master.grad = None
                weight.publish()
        for weight in owner.weights:
            if weight.has_master:
                weight.grad = None
        owner.overflowed.clear()

    def copied(self) -> Trainer:
        """What a deepcopy, or a pickle, of models and optimizers is: without gradients, as torch's are."""
        twin = copy.deepcopy(self)
        for weight in twin.weights:
            weight.grad = weight.value.grad = weight.waiting = None
        return twin

    def clip(self, weights: list[Weight], clip: Callable[[list[Tensor]], Any]) -> None:
        """Call a torch function that writes into the gradients of parameters."""
        for weight in weights:
            weight.master.grad = weight.grad
        clip([weight.master for weight in weights])
        for weight in weights:
            weight.grad, weight.master.grad = weight.master.grad, None


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that have no momentum yet a momentum of 0, if other parameters have one.

    torch's fused SGD raises TypeError for a list of some that have one and some that have none. Without dampening 0
    times 0 and a gradient is what a first step makes.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            states = [(param, optimizer.state[param]) for param in group["params"] if param.grad is not None]
            if any(state.get("momentum_buffer") is not None for _, state in states):
                for param, state in states:
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.full_like(param, -0.0)
