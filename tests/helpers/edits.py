"""Edits of weights, masters and gradients by user code, made in both trainings of a story."""

from __future__ import annotations

from typing import Any

import torch
from life import Life
from reference_model import Weight
from stories import Story
from torch import Tensor, nn
from training import check

from amp_patch import amp
from amp_patch.masters.masters import has_gradient

CARRIED = ("add", "mul", "lerp", "data mul")  # arithmetic on a weight, which acts on its master


class Edits:
    """The events of `Lives` that edit a training; a mixin."""

    story: Story
    now: Life

    def _taker(self, owner: int, param: Tensor) -> int:
        """Return an optimizer that accepts the parameter: Muon accepts matrices only."""
        if "Muon" not in self.story.optimizers:
            return owner
        return 0 if param.dim() == 2 else 1

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    def look(self) -> None:
        self.now.check(look=True)

    def clip(self, by: str, whose: str, most: float) -> None:
        life = self.now
        if life.waits:
            return
        if any(weight.grad is None and param.grad is not None for param, weight in life.pairs):
            return  # clipping takes what a step is done with for a gradient, as in torch
        if whose == "model":
            ours, theirs = list(life.model.parameters()), list(life.net.weights.values())
        else:
            ours, theirs = [m for m, _ in life.masters], [weight for _, weight in life.masters]
        grads = [weight.grad for weight in theirs if weight.grad is not None]
        if by == "value":
            if grads:  # torch wants some
                nn.utils.clip_grad_value_(ours, most)
                for grad in grads:
                    grad.clamp_(-most, most)
            return
        norm = nn.utils.clip_grad_norm_(ours, most)
        expected = torch.cat([grad.double().flatten() for grad in grads]).norm() if grads else torch.zeros(())
        if norm.dtype is torch.float32 and not expected > 1e18:  # whose square FP32 does not hold
            low = any(grad.dtype is not torch.float32 for grad in grads)  # whose own norms torch rounds
            torch.testing.assert_close(
                norm.double(), expected.double(), rtol=1e-2 if low else 1e-5, atol=1e-30, equal_nan=True
            )
        coefficient = (most / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(coefficient)

    def gradients(self, op: str, whose: str, seed: int) -> None:
        life = self.now
        if life.waits:
            return
        params = {id(weight): param for param, weight in life.pairs}
        master, weight = life.masters[seed % len(life.masters)]
        seen = whose == "model"
        holder = params[id(weight)] if seen else master
        if op == "none":
            holder.grad = weight.grad = None
            return
        if (weight.grad is not None) != has_gradient(master):
            raise AssertionError(f"a gradient of {holder.grad}, wanted {weight.grad}")
        if weight.grad is None or holder.grad is None:
            return
        assert seen or holder.grad.dtype is weight.grad.dtype
        check(holder.grad.to(weight.grad.dtype), weight.grad)
        dtype = holder.grad.dtype
        other = torch.randn(weight.grad.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        if op == "assign":
            holder.grad, weight.grad = other.clone(), other.to(weight.grad.dtype)
            return
        by_hand = weight.grad.to(dtype)
        for grad in (holder.grad, by_hand):
            write(grad, op, other)
        weight.grad = by_hand.to(weight.grad.dtype)

    # ------------------------------------------------------------------------------------------------------------------
    # Edits

    @torch.no_grad()
    def weights(self, op: str, seed: int) -> None:
        life = self.now
        if any(weight.edited == "master" for weight in life.net.weights.values()):
            return
        generator = torch.Generator().manual_seed(seed)
        names = list(life.params)
        chosen = names if op == "clamp" else [names[seed % len(names)]]
        if op == "child":
            chosen = self._load_child(seed, generator)
        for name in chosen:
            param, weight = life.params[name], life.net.weights[name]
            if op == "child":
                continue
            other = numbers(param.shape, generator)
            if op in CARRIED and weight.has_master:
                weight.settle()
                write(param.data if op == "data mul" else param, op.removeprefix("data "), other)
                write(weight.held, op.removeprefix("data "), other.to(param.dtype).float() if op == "lerp" else other)
                weight.publish()
                continue
            self._edit(param, weight, weight.value, op, other)
            weight.edited = "weight" if weight.has_master else ""

    def _load_child(self, seed: int, generator: torch.Generator) -> list[str]:
        """`load_state_dict` of a layer by itself; the names of the weights that it has written."""
        life = self.now
        layer = life.model.layers[seed % len(life.model.layers)]
        name_of = {id(param): name for name, param in life.params.items()}
        own = {key: numbers(param.shape, generator) for key, param in layer.named_parameters()}
        layer.load_state_dict({**layer.state_dict(), **own})
        for key, param in layer.named_parameters():
            weight = life.net.weights[name_of[id(param)]]
            weight.thaw()
            weight.held.copy_(own[key])
            weight.publish()
        return [name_of[id(param)] for param in layer.parameters()]

    @torch.no_grad()
    def masters(self, op: str, seed: int) -> None:
        life = self.now
        if any(weight.edited == "weight" for weight in life.net.weights.values()):
            return
        generator = torch.Generator().manual_seed(seed)
        pairs = life.masters
        for master, weight in pairs if op in ("clamp", "lerp") else [pairs[seed % len(pairs)]]:
            other = numbers(master.shape, generator).to(master.dtype)
            self._edit(master, weight, weight.held, op, other)
            weight.edited = "master" if weight.has_master else ""

    def _edit(self, tensor: Any, weight: Weight, by_hand: Tensor, op: str, other: Tensor) -> None:
        """Apply `op` to a parameter or a master, and to its counterpart in the training by hand."""
        if op == "data":
            tensor.data = other.to(tensor.dtype, copy=True)
            self._let_go(weight)
            by_hand.copy_(other)
            return
        for each in (tensor.data if op == "data mul" else tensor, by_hand):
            write(each, op.removeprefix("data "), other)

    def hold(self, seed: int) -> None:
        """Hold a tensor that shares the memory of each master, so that all masters stay materialized."""
        self.now.held = [(master.detach(), weight) for master, weight in self.now.masters]

    def _let_go(self, weight: Weight) -> None:
        self.now.held = [(tensor, other) for tensor, other in self.now.held if other is not weight]

    def freeze(self, seed: int) -> None:
        """Freeze or unfreeze the parameters of a layer other than the last."""
        life = self.now
        layers = life.model.layers
        name_of = {id(param): name for name, param in life.params.items()}
        for param in layers[seed % (len(layers) - 1)].parameters():
            param.requires_grad_(not param.requires_grad)
            weight = life.net.weights[name_of[id(param)]]
            weight.value.requires_grad_(param.requires_grad)

    def group(self, optimizer: int, lr: float, seed: int) -> None:
        """Add a group with weights of a layer that no optimizer has held."""
        life = self.now
        if not (free := life.unowned):
            return
        index = self._taker(optimizer % len(life.optimizers), free[seed % len(free)][0])
        if life.story.optimizers[index] == "Adagrad" and torch.__version__ < (2, 7):
            return  # which takes none there
        layer_of = {name: name.split(".")[1] for name in life.params}
        name_of = {id(param): name for name, param in life.params.items()}
        layer = layer_of[name_of[id(free[seed % len(free)][0])]]
        chosen = [
            (param, weight)
            for param, weight in free
            if layer_of[name_of[id(param)]] == layer and self._taker(index, param) == index
        ]
        life.optimizers[index].add_param_group({"params": [param for param, _ in chosen], "lr": lr})
        life.trainer.owners[index].add_group([weight for _, weight in chosen], lr, life.level)
        life.groups[index].append((lr, [name_of[id(param)] for param, _ in chosen]))

    def rates(self, by: str) -> None:
        life = self.now
        if by == "scheduler":
            for scheduler in (*life.schedulers, *life.their_schedulers):
                scheduler.step()
            return
        for optimizer in (*life.optimizers, *(owner.optimizer for owner in life.trainer.owners)):
            for group in optimizer.param_groups:
                group["lr"] *= 0.75

    def scale(self, value: float, seed: int = 0) -> None:
        life = self.now
        state = amp.state_dict(life.optimizers)
        amp.load_state_dict({**state, "loss_scaler0": {"loss_scale": value, "unskipped": 0}}, life.optimizers)
        life.trainer.scales[0].value, life.trainer.scales[0].unskipped = value, 0


def numbers(shape: Any, generator: torch.Generator) -> Tensor:
    """Return FP32 numbers. One is half way between two BF16 numbers, another between two FP16 numbers."""
    drawn = torch.randn(shape, generator=generator)
    flat = drawn.view(-1)
    places = torch.randint(flat.numel(), (2,), generator=generator)
    flat[places] = torch.tensor([1 + 2.0**-8, 1 + 2.0**-11]) * flat[places].sign()
    return drawn


def write(tensor: Tensor, op: str, other: Tensor) -> None:
    """Edit a tensor in place by an operation whose result torch rounds once."""
    match op:
        case "copy":
            tensor.copy_(other)
        case "add":
            tensor.add_(other)
        case "mul":
            tensor.mul_(0.5)
        case "clamp":
            tensor.clamp_(-0.25, 0.25)
        case "zero":
            tensor.zero_()
        case "prune":
            tensor.masked_fill_(other.abs() > 0.7, 0.0)
        case "lerp":
            tensor.lerp_(other.to(tensor.dtype), 0.125)
