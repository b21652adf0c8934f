"""Mixed-precision training by hand: the contract, written out once more in plain torch.

Nothing of amp_patch is used here. Weights, casts, scales and skips are those that its documents promise; the
storms (test_storms.py) hold amp_patch to them, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import multi_tensor

WIDTH = 4  # of every activation: (rows, WIDTH)
HALF, BRAIN = torch.float16, torch.bfloat16

# ---------------------------------------------------------------------------------------------------------------------
# The model: a row of layers, as a module that anybody can train


class Times(nn.Module):
    """A product with a parameter: no function that any list names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Conv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 2, WIDTH // 2)).reshape(-1, WIDTH)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(5, WIDTH),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: Conv(2, 2, 3, padding=1),
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "times": Times,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
PLAIN = ("relu", "tanh")  # without parameters


@dataclass(frozen=True)
class Plant:
    """A number put into the gradient of a layer's output, or of its first parameter, on the way back."""

    model: int
    layer: int
    at_weight: bool
    element: int
    value: float

    def hook(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        planted = torch.tensor(self.value).to(grad.dtype)  # torch 2.6 refuses a number that FP16 lacks
        grad.view(-1)[self.element % grad.numel()] = planted
        return grad


class Stack(nn.Module):
    """The layers `kinds`; "tied" is the last linear layer before it, once more."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.places = places(kinds)
        self.layers = nn.ModuleList()
        for index, kind in enumerate(kinds):
            self.layers.append(LAYERS[kind]() if self.places[index] == index else self.layers[self.places[index]])
        self.plant: Plant | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            sow(self.plant, index, x)
        return x

    def first_weight_of(self, index: int) -> Tensor | None:
        return next(self.layers[index].parameters(), None)


def places(kinds: tuple[str, ...]) -> list[int]:
    """Per layer the index of the one that has its weights."""
    found: list[int] = []
    for index, kind in enumerate(kinds):
        linears = [i for i in range(index) if kinds[i] == "linear"]
        found.append(linears[-1] if kind == "tied" else index)
    return found


def sow(plant: Plant | None, index: int, x: Tensor) -> None:
    if plant is not None and plant.layer == index and not plant.at_weight and x.requires_grad:
        x.register_hook(plant.hook)


# ---------------------------------------------------------------------------------------------------------------------
# What the levels are


@dataclass(frozen=True)
class Level:
    """One training's types and scale.

    `casts_model`: weights and activations are `low`. `patches`: they are FP32, and products are made of `low` ones.
    """

    low: torch.dtype = HALF
    casts_model: bool = False
    patches: bool = False
    batch_norms_fp32: bool = True
    masters: bool = False
    scale: float | str = 1.0
    lowest: float = 2.0**-24
    highest: float = 2.0**24
    emulates: bool = False  # products of FP16 numbers are computed in FP32 and rounded once

    @property
    def scales(self) -> bool:
        return self.scale != 1.0


def level_of(options: dict[str, Any]) -> Level:
    """What `initialize(**options)` is to do."""
    name = options["opt_level"]
    level = {
        "O0": Level(),
        "O1": Level(patches=True, scale="dynamic"),
        "O2": Level(casts_model=True, masters=True, scale="dynamic"),
        "O3": Level(casts_model=True, batch_norms_fp32=False),
        "O4": Level(BRAIN, patches=True),
        "O5": Level(BRAIN, casts_model=True, masters=True),
    }[name]
    if options.get("dtype") is BRAIN:
        level = replace(level, low=BRAIN, scale=1.0)
    ours = {
        "keep_batchnorm_fp32": "batch_norms_fp32",
        "master_weights": "masters",
        "loss_scale": "scale",
        "patch_torch_functions": "patches",
        "min_loss_scale": "lowest",
        "max_loss_scale": "highest",
    }
    level = replace(level, **{ours[key]: value for key, value in options.items() if key in ours and value is not None})
    if "min_loss_scale" not in options:
        level = replace(level, lowest=min(level.lowest, level.highest))
    return replace(level, emulates=level.low is HALF and options.get("cpu_fp16") == "emulate")


class Scale:
    """The automaton: halve at an overflow, double after `interval` clean backward passes, stay in range."""

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
# Forward


def clip_grad_norm(masters: list[Tensor], of_low_precision: list[bool], max_norm: float) -> None:
    """torch's, with norms as our kernel sums them, those of masters first, where a master has a gradient."""
    kinds = [
        [m.grad for m, low in zip(masters, of_low_precision, strict=True) if low is kind] for kind in (True, False)
    ]
    there = [[grad for grad in grads if grad is not None] for grads in kinds]
    if not there[0]:
        nn.utils.clip_grad_norm_(masters, max_norm)
        return
    norms = [multi_tensor.multi_tensor_l2norm(grads, per_tensor=True)[1] for grads in there if grads]
    nn.utils.clip_grads_with_norm_(masters, max_norm, torch.linalg.vector_norm(torch.cat(norms)))


class Weight:
    """A parameter: what the model computes with, what the optimizer updates, and the gradients of the two.

    Attributes:
        value: the model's, a leaf. master: the optimizer's, FP32; `value` itself without masters.
        grad: unscaled, of the master.
        waiting: the sum of the scaled gradients of a delayed iteration, in the model's type. Of a weight that is its
            own master `grad` is in it, scaled again, save what that would make infinite.
    """

    def __init__(self, initial: Tensor, dtype: torch.dtype, has_master: bool, trains: bool) -> None:
        self.value = initial.detach().to(dtype).clone().requires_grad_(trains)
        self.has_master = has_master and dtype is not torch.float32
        self.master = initial.detach().float().clone().requires_grad_(trains) if self.has_master else self.value
        self.waiting: Tensor | None = None
        self.grad: Tensor | None = None

    def publish(self) -> None:
        if self.has_master:
            with torch.no_grad():
                self.value.copy_(self.master)


class Net:
    """A `Stack` at a level: its weights by name, and its forward with each cast written out."""

    def __init__(self, stack: Stack, level: Level, kept: frozenset[int], has_master: Callable[[str], bool]) -> None:
        self.kinds, self.places, self.level, self.kept = stack.kinds, stack.places, level, kept
        types = {i: self._type_of(i) for i in range(len(self.kinds))}
        self.weights = {
            name: Weight(p, types[int(name.split(".")[1])], level.masters and has_master(name), p.requires_grad)
            for name, p in stack.named_parameters()
        }
        self.buffers = {
            name: b.clone().to(types[int(name.split(".")[1])]) if b.is_floating_point() else b.clone()
            for name, b in stack.named_buffers()
        }

    def _type_of(self, index: int) -> torch.dtype:
        stays = self.places[index] in self.kept or (self.kinds[index] == "batch" and self.level.batch_norms_fp32)
        return self.level.low if self.level.casts_model and not stays else torch.float32

    def __call__(self, x: Tensor, plant: Plant | None) -> Tensor:
        level = self.level
        casts: dict[str, Tensor] = {}  # a weight is cast once in a forward, and its gradients meet in the cast
        if level.casts_model and x.is_floating_point():
            x = x.to(level.low)
        for index in range(len(self.kinds)):
            x = self._kept(index, x) if self.places[index] in self.kept else self._layer(index, x, casts)
            sow(plant, index, x)
        return x.float() if level.casts_model else x

    def first_weight_of(self, index: int) -> Tensor | None:
        weight = self.weights.get(f"layers.{self.places[index]}.weight")
        return None if weight is None else weight.value

    def _kept(self, index: int, x: Tensor) -> Tensor:
        if x.is_floating_point() and (self.level.casts_model or self.level.patches):
            x = x.float()
        y = self._plain(index, x)
        return y.to(self.level.low) if self.level.casts_model else y

    def _weight(self, index: int, name: str = "weight") -> Tensor:
        return self.weights[f"layers.{self.places[index]}.{name}"].value

    def _layer(self, index: int, x: Tensor, casts: dict[str, Tensor]) -> Tensor:
        kind, level = self.kinds[index], self.level
        if kind in ("linear", "tied", "conv"):
            names = [f"layers.{self.places[index]}.{name}" for name in ("weight", "bias")]
            operands = [x, *(self.weights[name].value for name in names)]
            if level.patches:
                for name in names:
                    if name not in casts:
                        casts[name] = self.weights[name].value.to(level.low)
                operands = [x.to(level.low), *(casts[name] for name in names)]
            product = F.linear if kind != "conv" else convolve
            return self._emulated(product, *operands)
        if kind in ("layer", "group"):
            operands = [x, self._weight(index), self._weight(index, "bias")]
            norm = layer_norm if kind == "layer" else group_norm
            if level.patches:
                return norm(x.float(), *operands[1:])
            return self._emulated(norm, *operands) if kind == "group" else norm(*operands)
        return self._plain(index, x)

    def _emulated(self, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        if self.level.emulates and all(operand.dtype is HALF for operand in operands):
            return function(*(operand.float() for operand in operands)).half()
        return function(*operands)

    def _plain(self, index: int, x: Tensor) -> Tensor:
        kind = self.kinds[index]
        if kind == "relu":
            return torch.relu(x)
        if kind == "tanh":
            return torch.tanh(x)
        weight = self._weight(index)
        if kind == "times":
            return x * weight
        if kind == "embedding":
            return F.embedding(x, weight)
        bias = self._weight(index, "bias")
        if kind == "batch":
            prefix = f"layers.{self.places[index]}."
            self.buffers[prefix + "num_batches_tracked"] += 1
            mean, variance = self.buffers[prefix + "running_mean"], self.buffers[prefix + "running_var"]
            return F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
        functions = {"linear": F.linear, "tied": F.linear, "conv": convolve, "layer": layer_norm, "group": group_norm}
        return functions[kind](x, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x.reshape(-1, 2, WIDTH // 2), weight, bias, padding=1).reshape(-1, WIDTH)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 2, weight, bias)


# ---------------------------------------------------------------------------------------------------------------------
# Backward and step


class Owner:
    """An optimizer of the training: torch's own on the masters, and the losses that overflowed since its last step."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], groups: list[tuple[float, list[Weight]]]) -> None:
        self.weights = [weight for _, group in groups for weight in group]
        self.optimizer = make([{"params": [w.master for w in group], "lr": lr} for lr, group in groups])
        self.overflowed: set[int] = set()
        self.waits_for: int | None = None  # the loss whose gradients a delayed exit left scaled
        self.skipped = False

    def zero_grad(self, set_to_none: bool) -> None:
        for weight in self.weights:
            there = weight.grad is not None or (weight.waiting is not None and not weight.has_master)
            weight.grad = torch.zeros_like(weight.master) if there and not set_to_none else None
            weight.waiting = None
        self.overflowed, self.waits_for = set(), None


class Trainer:
    """Backward passes and steps.

    A loss's gradients are unscaled, checked by themselves, and then added to what is there. An overflow among those of
    one loss moves that loss's scale, once between two steps, and every optimizer of its call skips its next step.
    """

    def __init__(self, level: Level, nets: list[Net], owners: list[Owner], scales: list[Scale]) -> None:
        self.level, self.nets, self.owners, self.scales = level, nets, owners, scales
        self.weights = [weight for net in nets for weight in net.weights.values()]

    def backward(self, loss: Tensor, loss_id: int, targets: list[Owner], *, delay: bool, later: bool) -> None:
        """`scale_loss(loss, targets, loss_id, delay_unscale=delay, delay_overflow_check=later)`."""
        scale = self.scales[loss_id]
        ours = [weight for owner in targets for weight in owner.weights]
        self._begin(targets)
        for weight, grad in self._gradients(loss, loss_id):
            if not any(weight is other for other in ours):
                self._pass_by(weight, grad, loss_id)
                continue
            if delay and weight.waiting is None and not weight.has_master and weight.grad is not None:
                weight.waiting, weight.grad = self._scaled_again(weight.grad, scale.value)
            if grad is not None:
                weight.waiting = grad if weight.waiting is None else weight.waiting + grad
        for owner in targets:
            owner.waits_for = loss_id
        if not delay:
            self._take(targets, loss_id)
        if not (delay or later):
            scale.move()

    def fail(self, loss: Tensor, loss_id: int, targets: list[Owner], *, after: bool) -> None:
        """An exception leaves the body, before or `after` its backward: only what waits has that backward's share."""
        self._begin(targets)
        for weight, grad in self._gradients(loss, loss_id) if after else ():
            if not any(weight is other for owner in targets for other in owner.weights):
                self._pass_by(weight, grad, loss_id)
            elif grad is not None and weight.waiting is not None:
                weight.waiting = weight.waiting + grad
            elif grad is not None and not self.level.scales and not weight.has_master and weight.grad is not None:
                weight.grad = weight.grad + grad  # nothing is taken away where nothing is scaled

    def _begin(self, targets: list[Owner]) -> None:
        for owner in targets:
            if owner.waits_for is None and all(weight.grad is None for weight in owner.weights):
                owner.overflowed.clear()  # of gradients that were thrown away

    def _gradients(self, loss: Tensor, loss_id: int) -> list[tuple[Weight, Tensor | None]]:
        """What backward of the scaled loss alone brings each of the models' weights."""
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
        """A gradient for a parameter whose optimizer has no part in this loss."""
        if grad is None or weight.has_master:
            return  # the next `scale_loss` of its own optimizer begins without it
        bad = self._add(weight, grad, loss_id)
        for owner in self.owners:
            if bad and any(weight is other for other in owner.weights):
                owner.overflowed.add(loss_id)

    def _add(self, weight: Weight, grad: Tensor, loss_id: int) -> bool:
        """Unscale a gradient and add it to the weight's, in FP32, rounded once; whether it overflowed."""
        new = grad.float() * (1 / self.scales[loss_id].value if self.level.scales else 1.0)
        total = (new if weight.grad is None else new + weight.grad.float()).to(weight.master.dtype)
        fault = ~new.isfinite() | (~total.isfinite() & (weight.grad is None or weight.grad.isfinite()))
        weight.grad = total
        return self.level.scales and bool(fault.any())

    def _take(self, targets: list[Owner], loss_id: int) -> None:
        """What waits, scaled, becomes the gradients of the next step."""
        found = False
        for weight in (weight for owner in targets for weight in owner.weights):
            if weight.waiting is not None:
                found = self._add(weight, weight.waiting, loss_id) or found
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
            self._take([owner], loss_id)
            self.scales[loss_id].move()
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

    def clip(self, weights: list[Weight], clip: Callable[[list[Tensor]], Any]) -> None:
        """Call a function of torch's that writes into the gradients of parameters."""
        for weight in weights:
            weight.master.grad = weight.grad
        clip([weight.master for weight in weights])
        for weight in weights:
            weight.grad, weight.master.grad = weight.master.grad, None


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let parameters that begin now have a momentum of 0 where others have one already.

    torch's fused SGD raises TypeError for a list of some that have one and some that have none. Without dampening 0
    times 0 and a gradient is what a first step makes.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            states = [(param, optimizer.state[param]) for param in group["params"] if param.grad is not None]
            if any(state.get("momentum_buffer") is not None for _, state in states):
                for param, state in states:
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(param)
