"""Optimizers of torch and amp_patch, one for each way to step. Each eps is a number of FP16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

from amp_patch import optimizers
from amp_patch.apex.parallel.LARC import LARC

MAKERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, eps=1e-4),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "FusedAdam, capturable": lambda p: optimizers.FusedAdam(p, lr=1e-2, eps=1e-4, capturable=True),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=1e-2, eps=1e-4),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=1e-2, eps=1e-4),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=1e-2, eps=1e-4),
    "LARC": lambda p: LARC(optim.SGD(p, lr=0.05, momentum=0.9)),
}
