"""Each of torch's optimizers, in each form: for loops, `foreach`, `fused`, and `capturable` where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training import backward

# Arguments with which each one moves a 2x2 weight; LBFGS is refused under scaling (test_initialize.py).
OPTIMIZERS = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Muon": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "SparseAdam": {"lr": 0.1},
}
AVAILABLE = [name for name in OPTIMIZERS if hasattr(torch.optim, name)]
VARIANTS = [pytest.param(name, {}, id=name) for name in AVAILABLE] + [
    pytest.param(name, {flag: True}, id=f"{name}-{flag}")
    for flag, names in {
        "foreach": ("Adam", "SGD", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop", "Adagrad"),
        "fused": ("Adam", "AdamW", "SGD", "Adagrad"),
        "capturable": ("Adam",),
    }.items()
    for name in names
    if not (flag == "capturable" and not torch.cuda.is_available())
]

# Torch 2.11 warns once a process, in SparseAdam's step.
of_sparse_gradients = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def made(name: str, flags: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model of one 2x2 weight (an embedding for the optimizer of sparse gradients), and its optimizer."""
    torch.manual_seed(0)
    model = nn.Embedding(2, 2, sparse=True) if name == "SparseAdam" else nn.Linear(2, 2, bias=False)
    model.to("cuda" if flags.get("capturable") else "cpu")  # torch refuses these on a CPU
    return model, getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name], **flags)


def one_step(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    """An iteration, always the same one, whose gradients are exact in FP16; `factor`: of the loss."""
    inputs = torch.tensor([0, 1]) if isinstance(model, nn.Embedding) else torch.tensor([[0.5, -0.25], [0.25, 1.0]])
    device = model.weight.device
    optimizer.zero_grad()
    loss = (model(inputs.to(device)).float() * torch.tensor([[0.5, 0.25], [0.25, -0.5]], device=device)).sum() * factor
    backward(loss / 8, optimizer)
    optimizer.step()
