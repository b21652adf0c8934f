"""A model at a level by hand: its weights, masters and buffers, and its forward with each cast written out.

Nothing of amp_patch is used here. reference_training.py trains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4  # of every activation: (rows, WIDTH)
HALF, BRAIN = torch.float16, torch.bfloat16

# ---------------------------------------------------------------------------------------------------------------------
# The model: a row of layers, as a module that anybody can train


class Times(nn.Module):
    """A module that multiplies elementwise by a parameter, which no op list names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Conv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 2, WIDTH // 2)).reshape(-1, WIDTH)


class Block(nn.Module):
    """A module with its own parameter and a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(5, WIDTH),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: Conv(2, 2, 3, padding=1),
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "times": Times,
    "block": Block,
    "alias": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}
PLAIN = ("relu", "tanh")  # without parameters


@dataclass(frozen=True)
class Plant:
    """A number that a hook writes into the gradient of a layer's output or first parameter, during backward."""

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
    """A model of the layers `kinds`. "tied" is the last linear layer again; "alias" is a new one with its weight."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.places = places(kinds)
        self.layers = nn.ModuleList()
        for index, kind in enumerate(kinds):
            self.layers.append(LAYERS[kind]() if self.places[index] == index else self.layers[self.places[index]])
            if kind == "alias":
                self.layers[index].weight = self.layers[last_linear(kinds, index)].weight
        self.plant: Plant | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            sow(self.plant, index, x)
        return x

    def first_weight_of(self, index: int) -> Tensor | None:
        return next(self.layers[index].parameters(), None)


def places(kinds: tuple[str, ...]) -> list[int]:
    """Return for each layer the index of the layer that owns its weights."""
    found: list[int] = []
    for index, kind in enumerate(kinds):
        found.append(last_linear(kinds, index) if kind == "tied" else index)
    return found


def last_linear(kinds: tuple[str, ...], before: int) -> int:
    return max(index for index in range(before) if kinds[index] == "linear")


def sow(plant: Plant | None, index: int, x: Tensor) -> None:
    if plant is not None and plant.layer == index and not plant.at_weight and x.requires_grad:
        x.register_hook(plant.hook)


@contextmanager
def sown(plant: Plant | None, models: list[Any]) -> Iterator[None]:
    """With the plant's hook on the weight of its layer, if that is where it goes."""
    weight = None if plant is None or not plant.at_weight else models[plant.model].first_weight_of(plant.layer)
    handle = weight.register_hook(plant.hook) if weight is not None and weight.requires_grad else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the levels


@dataclass(frozen=True)
class Level:
    """One training's types and scale.

    `casts_model`: weights and activations are `low`. `patches`: they are FP32, and products are made of `low` ones.
    """

    low: torch.dtype = HALF
    casts_model: bool = False
    patches: bool = False
    batch_norms_fp32: bool = True
    masters: bool | str = False  # or "split"
    scale: float | str = 1.0
    lowest: float = 2.0**-24
    highest: float = 2.0**24
    emulates: bool = False  # products of low-precision numbers are computed in FP32 and rounded once

    @property
    def scales(self) -> bool:
        return self.scale != 1.0


def level_of(options: dict[str, Any]) -> Level:
    """Return the `Level` that `initialize(**options)` must give."""
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
    return replace(level, emulates=options.get("cpu_half") == "emulate")


# ---------------------------------------------------------------------------------------------------------------------
# Forward


class Weight:
    """A parameter: what the model computes with, what the optimizer updates, and the gradients of the two.

    Attributes:
        value: the model's, a leaf. master: the optimizer's, FP32; `value` itself without masters.
        has_master: whether `master` is another tensor than `value`, and is in use.
        lacks_master: whether the weight was frozen when the optimizer got it, and was not trained since: then `master`
            is not in use yet.
        grad: unscaled, of the master.
        waiting: the sum of the scaled gradients of a delayed iteration, in the model's type. Of a weight that is its
            own master `grad` is in it, scaled again, except values that scaling makes infinite.
        low: of a split master its low 16 bits, signed; `value` is the high half.
        edited: whether the script has written into `value`, or `master`, and nothing has brought the other in step.
    """

    def __init__(self, initial: Tensor, dtype: torch.dtype, masters: bool | str, trains: bool) -> None:
        self.value = initial.detach().to(dtype).clone().requires_grad_(trains)
        self.master = self.value
        self.has_master = False
        self.waiting: Tensor | None = None
        self.grad: Tensor | None = None
        self.low: Tensor | None = None
        self.edited = ""
        if masters and dtype is not torch.float32:
            self.take_master(initial, split=masters == "split" and dtype is BRAIN)

    def take_master(self, initial: Tensor, split: bool) -> None:
        self.has_master, self.split = True, split
        self.master = initial.detach().float().clone().requires_grad_(self.value.requires_grad)
        if split:
            self.low = torch.zeros_like(self.value, dtype=torch.int16)
            self.publish()

    @property
    def lacks_master(self) -> bool:
        return not self.has_master and self.master is not self.value

    def put_off_master(self) -> None:
        """Use no master until `thaw`: a frozen weight needs none. The optimizer's state is that of `master` still."""
        self.has_master, self.low = False, None

    def thaw(self) -> None:
        """Use the master that was put off, if the weight is trained now."""
        if not self.lacks_master or not self.value.requires_grad:
            return
        self.has_master = True
        with torch.no_grad():
            self.master.copy_(self.value)
        self.low = torch.zeros_like(self.value, dtype=torch.int16) if self.split else None
        self.grad = None if self.grad is None else self.grad.float()

    @property
    def held(self) -> Tensor:
        """The tensor that `amp.master_params` has."""
        return self.master if self.has_master else self.value

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master into the weight."""
        self.edited = ""
        if self.low is not None:
            bits = self.master.where(~self.master.isnan(), math.nan).view(torch.int32)
            self.low = bits.to(torch.int16)
            self.value.copy_(((bits - self.low.int()) >> 16).to(torch.int16).view(BRAIN))
        elif self.has_master:
            self.value.copy_(self.master)

    @torch.no_grad()
    def settle(self) -> None:
        """Bring weight and master in step after edits: the master adopts those elements that are not its own, rounded.

        Of a split master the weight is a half, so that an edit is one of the master.
        """
        if self.edited == "master":
            self.publish()
        elif self.low is not None:
            self.master.copy_(joined(self.value, self.low))
        elif self.has_master:
            self.master.copy_(
                torch.where(self.master.to(self.value.dtype) == self.value, self.master, self.value.float())
            )
        self.edited = ""

    def fp32(self) -> Tensor:
        """Return the FP32 value that a checkpoint contains."""
        return self.held.detach().float().clone()


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join two halves to FP32. The low half is ignored if the high half is 0, or if the result would be a NaN."""
    bits = high.view(torch.int16).int() << 16
    whole = (bits + low.int()).view(torch.float32)
    return torch.where(whole.isnan() | (high == 0), bits.view(torch.float32), whole)


class CastByHand:
    """A `Stack` at a level: its weights by name, and its forward with each cast written out."""

    def __init__(self, stack: Stack, level: Level, kept: frozenset[int], has_master: Callable[[str], bool]) -> None:
        self.kinds, self.places, self.level, self.kept = stack.kinds, stack.places, level, kept
        self.training = True
        types = {i: self._type_of(i) for i in range(len(self.kinds))}
        self.weights = {
            name: Weight(p, types[int(name.split(".")[1])], has_master(name) and level.masters, p.requires_grad)
            for name, p in stack.named_parameters()
        }
        self.buffers = {
            name: b.clone().to(types[int(name.split(".")[1])]) if b.is_floating_point() else b.clone()
            for name, b in stack.named_buffers()
        }
        self.exact = {name: b.clone() for name, b in stack.named_buffers()}  # before they were cast

    def _type_of(self, index: int) -> torch.dtype:
        stays = self.places[index] in self.kept or (self.kinds[index] == "batch" and self.level.batch_norms_fp32)
        return self.level.low if self.level.casts_model and not stays else torch.float32

    def __call__(self, x: Tensor, plant: Plant | None) -> Tensor:
        level = self.level
        casts: dict[str, Tensor] = {}  # a weight is cast once in a forward, and its gradients meet in the cast
        given = x
        if level.casts_model and x.is_floating_point():
            x = x.to(level.low)
        exact = None  # x before the rounding, if a module in FP32 has made it
        for index in range(len(self.kinds)):
            if level.casts_model and index == 0 and self._type_of(0) is torch.float32:
                exact = self._kept(0, given)  # a module in FP32 gets the model's input unrounded
            elif self.places[index] in self.kept:
                exact = self._kept(index, x if exact is None else exact)
            else:
                x, exact = self._layer(index, x, casts), None
            sow(plant, index, x if exact is None else exact)
            if exact is not None:
                x = exact.to(level.low) if level.casts_model else exact
        return x if not level.casts_model else x.float() if exact is None else exact

    def first_weight_of(self, index: int) -> Tensor | None:
        if self.kinds[index] in PLAIN:
            return None
        return self._weight(index, "gain" if self.kinds[index] == "block" else "weight")

    def fp32_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of a checkpoint: exact FP32 values, unless a write has changed the rounded buffer."""
        return {
            name: torch.where(self.exact[name].to(low.dtype) == low, self.exact[name], low.to(self.exact[name].dtype))
            for name, low in self.buffers.items()
        }

    def _kept(self, index: int, x: Tensor) -> Tensor:
        if x.is_floating_point() and (self.level.casts_model or self.level.patches):
            x = x.float()
        return self._plain(index, x)

    def _weight(self, index: int, name: str = "weight") -> Tensor:
        return self.weights[self._name(index, name)].value

    def _name(self, index: int, name: str) -> str:
        shared = self.kinds[index] == "alias" and name == "weight"
        return f"layers.{last_linear(self.kinds, index) if shared else self.places[index]}.{name}"

    def _layer(self, index: int, x: Tensor, casts: dict[str, Tensor]) -> Tensor:
        kind, level = self.kinds[index], self.level
        if kind == "block":
            return self._product(index, F.linear, x, casts, "inner.") * self._weight(index, "gain")
        if kind in ("linear", "tied", "alias", "conv"):
            return self._product(index, F.linear if kind != "conv" else convolve, x, casts)
        if kind in ("layer", "group"):
            operands = [x, self._weight(index), self._weight(index, "bias")]
            norm = layer_norm if kind == "layer" else group_norm
            if level.patches:
                return norm(x.float(), *operands[1:])
            if kind == "group" and level.emulates and x.dtype is level.low:
                operands[1:] = (operand.float() for operand in operands[1:])
            return norm(*operands)
        return self._plain(index, x)

    def _product(
        self, index: int, product: Callable[..., Tensor], x: Tensor, casts: dict[str, Tensor], prefix: str = ""
    ) -> Tensor:
        names = [self._name(index, prefix + name) for name in ("weight", "bias")]
        operands = [x, *(self.weights[name].value for name in names)]
        if self.level.patches:
            for name in names:
                if name not in casts:
                    casts[name] = self.weights[name].value.to(self.level.low)
            operands = [x.to(self.level.low), *(casts[name] for name in names)]
        return self._emulated(product, *operands)

    def _emulated(self, function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        if self.level.emulates and all(operand.dtype is self.level.low for operand in operands):
            return function(*(operand.float() for operand in operands)).to(self.level.low)
        return function(*operands)

    def _plain(self, index: int, x: Tensor) -> Tensor:
        kind = self.kinds[index]
        if kind == "relu":
            return torch.relu(x)
        if kind == "tanh":
            return torch.tanh(x)
        if kind == "block":
            return F.linear(x, self._weight(index, "inner.weight"), self._weight(index, "inner.bias")) * self._weight(
                index, "gain"
            )
        weight = self._weight(index)
        if kind == "times":
            return x * weight
        if kind == "embedding":
            return F.embedding(x, weight)
        bias = self._weight(index, "bias")
        if kind == "batch":
            prefix = f"layers.{self.places[index]}."
            if self.training:
                self.buffers[prefix + "num_batches_tracked"] += 1
            mean, variance = self.buffers[prefix + "running_mean"], self.buffers[prefix + "running_var"]
            if not (self.level.emulates and x.dtype is self.level.low is weight.dtype):
                return F.batch_norm(x, mean, variance, weight, bias, self.training, 0.1, 1e-5)
            statistics = mean.float(), variance.float()
            result = F.batch_norm(x, *statistics, weight.float(), bias.float(), self.training, 0.1, 1e-5)
            mean.copy_(statistics[0])
            variance.copy_(statistics[1])
            return result
        functions = {"conv": convolve, "layer": layer_norm, "group": group_norm}
        return functions.get(kind, F.linear)(x, weight, bias)


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x.reshape(-1, 2, WIDTH // 2), weight, bias, padding=1).reshape(-1, WIDTH)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 2, weight, bias)
