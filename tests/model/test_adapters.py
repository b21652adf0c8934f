"""Adapters (LoRA) over a frozen base: the base costs nothing, the adapters train as the level says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from low_models import CAST
from torch import nn
from training import LEVELS, SGD, backward

from amp_patch import amp
from amp_patch.masters.masters import master_of

TYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}


class Adapted(nn.Module):
    """A layer like peft's LoRA: a frozen linear layer, and two small matrices, which may have another type."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.up(self.down(x.to(self.down.weight.dtype))).to(result.dtype)


def net(base: torch.dtype, adapters: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Linear(16, 3)]
    model = nn.Sequential(*[Adapted(layer.to(base), adapters) for layer in layers])
    return nn.Sequential(model[0], nn.Tanh(), model[1])


def losses_of(model: nn.Module, optimizer: Any, steps: int = 30) -> list[float]:
    losses = []
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    given = x.to(model[0].base.weight.dtype) if type(model) is nn.Sequential else x  # at O0 as in plain torch
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(given).float() - x[:, :3].sin()).square().mean()
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


@crossed(
    {"level": LEVELS, "base": list(TYPES), "adapters": ["FP32", "BF16"]},
    pytest.mark.parametrize("everything", [False, True], ids=["adapters alone", "all in the optimizer"]),
)
def test_adapters_train_over_a_frozen_base(level, base, adapters, everything):
    model = net(TYPES[base], TYPES[adapters])
    before = {name: p.dtype for name, p in model.named_parameters()}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    places, values = [p.data_ptr() for p in frozen], [p.detach().clone() for p in frozen]
    model, optimizer = amp.initialize(
        model, SGD(model.parameters() if everything else trained), opt_level=level, verbosity=0
    )
    if base != "FP32":
        assert all(master_of(p) is None for p in frozen)
        if CAST.get(level) in (None, TYPES[base]):
            assert [p.data_ptr() for p in frozen] == places
    masters = {id(p): master_of(p) for p in trained}
    if level in ("O2", "O5"):
        assert all(master is not None and master.dtype is torch.float32 for master in masters.values())
    if level in ("O1", "O4"):
        assert {p.dtype for p in trained} == {torch.float32}
    losses = losses_of(model, optimizer)
    assert losses[-1] < 0.9 * losses[0]
    amp.restore()
    assert {name: p.dtype for name, p in model.named_parameters()} == before
    if CAST.get(level) in (None, TYPES[base]):
        assert all(map(torch.equal, frozen, values))
