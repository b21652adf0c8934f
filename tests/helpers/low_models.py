"""Models that are in low precision at `initialize`, and a meter of the memory that this takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import LEVELS, iterate

from amp_patch.policy import OPT_LEVELS
from amp_patch.support import tree

HALVES = {"BF16": torch.bfloat16, "FP16": torch.float16}
CAST = {level: low for level in LEVELS if (low := OPT_LEVELS[level].cast_model_type) is not None}
every_half = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)


class LowNet(nn.Module):
    """A model with layers, a batch norm, a rotary table, a buffer, a frozen layer and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.table = Table()
        self.frozen = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.shared.weight
        self.leave = nn.Linear(16, 3)
        self.register_buffer("offset", torch.full((16,), 0.1))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(torch.relu(self.norm(self.enter(x)))) + self.offset
        return self.leave(self.again(torch.tanh(self.shared(self.frozen(x)))))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 3.0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.cos()


def net(half: torch.dtype) -> LowNet:
    torch.manual_seed(0)
    return LowNet().to(half)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    given = x.to(model.enter.weight.dtype) if type(model) is LowNet else x  # at O0 as in plain torch
    return (model(given).float() - x[:, :3].sin()).square().mean()


def iterate_low(model: nn.Module, optimizer: Any, steps: int = 12) -> list[float]:
    return iterate(optimizer, partial(loss_of, model), range(steps))


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that measures the most bytes that outputs of functions hold at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.before = {p.untyped_storage()._cdata for p in model.parameters()}
        self.known: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree.tensors([result]):
            if tensor.untyped_storage()._cdata in self.before:
                continue
            self.known[tensor.untyped_storage()._cdata] = torch.multiprocessing.reductions.StorageWeakRef(
                tensor.untyped_storage()
            )
        self.known = {key: ref for key, ref in self.known.items() if not ref.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.known.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return result


class Echo(nn.Linear):
    """A model that returns its input."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, t: Tensor) -> Tensor:
        return t

    def encode(self, t: Tensor) -> Tensor:
        return t
