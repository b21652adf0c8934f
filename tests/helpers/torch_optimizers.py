"""Tables of optimizers: each of torch's in each form, and one for each way to step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from training import backward

from amp_patch import optimizers
from amp_patch.apex.parallel.LARC import LARC

# By class its settings wherever a test steps it: an eps that FP16 can hold, for O3, and what takes another way through
# the step than torch's default. LBFGS is refused under scaling (test_initialize.py).
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "t0": 2.0},
    "Adadelta": {"lr": 0.5, "eps": 1e-4, "maximize": True},
    "Adafactor": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "eps": 1e-4, "lr_decay": 0.01},
    "Adam": {"lr": 0.1, "eps": 1e-4},
    "AdamW": {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.1},
    "Adamax": {"lr": 0.1, "eps": 1e-4},
    "Muon": {"lr": 0.1},
    "NAdam": {"lr": 0.1, "eps": 1e-4, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.1, "eps": 1e-4},
    "RMSprop": {"lr": 0.01, "eps": 1e-4, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "SparseAdam": {"lr": 0.1, "eps": 1e-4},
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

# Optimizers of the stories, in this order: name -> the class, and its settings. The fused SGD has no
# momentum: torch's kernel begins one in FP16 with the old contents of the memory.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"momentum": 0, "weight_decay": 0}),
    "momentum": ("SGD", {"nesterov": True}),
    "SGD foreach": ("SGD", {"weight_decay": 0, "maximize": True, "foreach": True}),
    "SGD fused": ("SGD", {"momentum": 0, "fused": True}),
    "Adam": ("Adam", {}),
    "Adam foreach": ("Adam", {"amsgrad": True, "foreach": True}),
    "AdamW": ("AdamW", {}),
    "AdamW fused": ("AdamW", {"amsgrad": True, "fused": True}),
    "NAdam": ("NAdam", {}),
    "NAdam foreach": ("NAdam", {"foreach": True}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop foreach": ("RMSprop", {"foreach": True}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "Adadelta": ("Adadelta", {}),
    "Rprop": ("Rprop", {}),
    "ASGD": ("ASGD", {}),
    "Adamax": ("Adamax", {}),
    "Adafactor": ("Adafactor", {}),
    "Muon": ("Muon", {}),  # of matrices alone
}

# Torch 2.11 warns once a process, in SparseAdam's step.
of_sparse_gradients = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


def recipe(kind: str, **settings: Any) -> partial[Any]:
    """The class with its settings, and with these; the learning rate is torch's, or that of a group."""
    given = {name: value for name, value in OPTIMIZERS[kind].items() if name != "lr"}
    return partial(getattr(torch.optim, kind), **{**given, **settings})


RECIPES = {name: recipe(kind, **other) for name, (kind, other) in FORMS.items() if kind in AVAILABLE}


def made(name: str, flags: dict[str, Any], device: str = "cpu") -> tuple[nn.Module, Any]:
    """A model of one 2x2 weight (an embedding for the optimizer of sparse gradients), and its optimizer."""
    torch.manual_seed(0)
    model = nn.Embedding(2, 2, sparse=True) if name == "SparseAdam" else nn.Linear(2, 2, bias=False)
    model.to("cuda" if flags.get("capturable") else device)  # torch refuses these on a CPU
    return model, getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name], **flags)


def one_step(model: nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    """An iteration, always the same one, whose gradients are exact in FP16; `factor`: of the loss."""
    inputs = torch.tensor([0, 1]) if isinstance(model, nn.Embedding) else torch.tensor([[0.5, -0.25], [0.25, 1.0]])
    device = model.weight.device
    optimizer.zero_grad()
    loss = (model(inputs.to(device)).float() * torch.tensor([[0.5, 0.25], [0.25, -0.5]], device=device)).sum() * factor
    backward(loss / 8, optimizer)
    optimizer.step()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=1e-2, eps=1e-4),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=1e-2, eps=1e-4),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=1e-2, eps=1e-4),
    "LARC": lambda p: LARC(optim.SGD(p, lr=0.05, momentum=0.9)),
}
