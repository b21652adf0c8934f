"""Code of other packages that tests `p.grad is not None` between backward and the next `zero_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from torch import Tensor, nn
from training import backward

from amp_patch import amp

LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1", "loss_scale": 4.0},
    "O2": {"opt_level": "O2", "loss_scale": 4.0},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
    "stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
}
every_level = pytest.mark.parametrize("level", LEVELS)


def start_integers(level: str, rank: int = 0) -> tuple[nn.Module, Any]:
    """Two layers whose gradients are small integers, so that all types hold them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_((torch.arange(param.numel()).reshape(param.shape) % 3 + index + rank) / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    return amp.initialize(model, optimizer, verbosity=0, **LEVELS[level])


def backward_ones(model: nn.Module, optimizer: Any) -> None:
    backward(model(torch.ones(2, 4)).float().sum() / 2, optimizer)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().float().clone() for param in model.parameters()]


@crossed({"foreach": [None, False, True]}, every_level, meet=1)
def test_torchs_clipping_in_two_calls(level, foreach):
    model, optimizer = start_integers(level)
    backward_ones(model, optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm, foreach=foreach)
    clipped = torch.cat([param.grad.float().flatten() for param in amp.master_params(optimizer)])
    assert float(torch.linalg.vector_norm(clipped)) == pytest.approx(0.5, rel=2**-7)


@pytest.mark.parametrize("level", ["O2", "O5", "split", "stochastic"])
def test_no_step_takes_the_gradients_of_the_last_one(level):
    """After a step, gradients can be read until they are cleared. A value written into them is used by no step."""
    model, optimizer = start_integers(level)
    backward_ones(model, optimizer)
    optimizer.step()
    before = weights(model)
    for param in model.parameters():
        param.grad.fill_(100.0)
    optimizer.step()
    assert all(map(torch.equal, weights(model), before))
    plain, other = start_integers(level)
    for _ in range(2):
        other.zero_grad()
        backward_ones(plain, other)
        other.step()
    backward_ones(model, optimizer)
    optimizer.step()
    assert all(map(torch.equal, weights(model), weights(plain)))
