"""Each of torch's optimizers, in each form: for loops, `foreach`, `fused`, and `capturable` where there is a GPU."""

from __future__ import annotations

import pytest
import torch

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
