"""Devices without FP64: a mode in which the CPU is one, and trainings of every level, rung and kind of optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_optimizers import MAKERS

from amp_patch import amp
from amp_patch.support.devices import widest

# Level -> options of `initialize`. Each rung is in one of them.
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {},
    **{level: {"opt_level": level} for level in ("O1", "O2", "O3", "O4", "O5", "O6", "O7")},
    "O2+8bit": {"opt_level": "O2", "optimizer_state": "8bit"},
    "O5+split": {"opt_level": "O5", "master_weights": "split"},
    "O5+stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "O5+split+8bit": {"opt_level": "O5", "master_weights": "split", "optimizer_state": "8bit"},
    "O6+mxfp8": {"opt_level": "O6", "dtype": "mxfp8"},
}
# State in eight bits is refused for optimizers that take the state of all parameters in FP32 at once.
TAKE_8BIT = ("SGD", "SGD, foreach", "Adam", "AdamW, fused", "Adagrad", "FusedSGD", "FusedAdam", "LARC")
CASES = [(level, name) for level in LEVELS for name in MAKERS if "8bit" not in level or name in TAKE_8BIT]


class WithoutFP64(TorchDispatchMode):
    """Refuses each operator that takes or makes an FP64 tensor on a CPU, with the error of Apple's devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.dtype is torch.float64 for t in tree_leaves((args, kwargs, result))):
            raise TypeError(f"{func} of float64, which this device does not have")
        return result


@contextmanager
def cpu_without_fp64() -> Iterator[None]:
    """Make the CPU a device without FP64 in this thread."""
    widest.cache_clear()
    try:
        with WithoutFP64():
            yield
    finally:
        widest.cache_clear()


class Net(nn.Module):
    """An embedding, two kinds of norm and three products."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()
        )
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def losses(level: str, name: str, device: str = "cpu") -> list[float]:
    """Train for five steps with clipping, the third of which overflows (not at O0); return the loss of each."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = MAKERS[name](model.parameters())
    options = {"opt_level": "O0"} if level == "O0" else {**LEVELS[level], "loss_scale": "dynamic"}
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    made = []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        tokens, classes = (torch.randint(most, (6,), generator=generator).to(device) for most in (7, 5))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), classes)
        if step == 2 and level != "O0":
            loss = loss * torch.inf
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        made.append(loss.item())
    amp.state_dict(), model.state_dict(), optimizer.state_dict()
    amp.restore()
    return made
