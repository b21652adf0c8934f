"""The fused optimizers with their oracles and settings."""

from __future__ import annotations

import pytest
import reference_optimizers as reference
import torch
from torch import nn

from amp_patch.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

ORACLES = {
    FusedAdam: reference.adam,
    FusedSGD: reference.sgd,
    FusedLAMB: reference.lamb,
    FusedMixedPrecisionLamb: reference.lamb,
    FusedNovoGrad: reference.novograd,
    FusedAdagrad: reference.adagrad,
}
CASES = [
    (FusedAdam, {}),
    (FusedAdam, {"weight_decay": 0.1}),
    (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}),
    (FusedAdam, {"weight_decay": 0.1, "bias_correction": False}),
    (FusedAdam, {"bias_correction": False, "adam_w_mode": False, "eps": 1e-4, "betas": (0.8, 0.95)}),
    (FusedAdam, {"betas": (0.0, 0.9)}),
    (FusedSGD, {"lr": 0.05}),
    (FusedSGD, {"lr": 0.05, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedLAMB, {}),
    (FusedLAMB, {"adam_w_mode": False}),
    (FusedLAMB, {"grad_averaging": False}),
    (FusedLAMB, {"bias_correction": False}),
    (FusedLAMB, {"weight_decay": 0.0}),
    (FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True}),
    (FusedLAMB, {"max_grad_norm": 1e6}),
    (FusedLAMB, {"max_grad_norm": None}),
    (FusedMixedPrecisionLamb, {}),
    (FusedMixedPrecisionLamb, {"adam_w_mode": False, "grad_averaging": False}),
    (FusedMixedPrecisionLamb, {"bias_correction": False}),
    (FusedMixedPrecisionLamb, {"weight_decay": 0.0, "max_grad_norm": None}),
    (FusedNovoGrad, {}),
    (FusedNovoGrad, {"weight_decay": 0.1}),
    (FusedNovoGrad, {"weight_decay": 0.1, "reg_inside_moment": True}),
    (FusedNovoGrad, {"norm_type": 0, "betas": (0.95, 0.98)}),
    (FusedNovoGrad, {"init_zero": True}),
    (FusedNovoGrad, {"norm_type": 0, "init_zero": True, "bias_correction": False}),
    (FusedNovoGrad, {"grad_averaging": False, "bias_correction": False}),
    (FusedAdagrad, {}),
    (FusedAdagrad, {"weight_decay": 0.1}),
    (FusedAdagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}),
]
ids = [f"{make.__name__}-{'-'.join(f'{k}={v}' for k, v in flags.items())}" for make, flags in CASES]
cases = pytest.mark.parametrize(("make", "flags"), CASES, ids=ids)
every = pytest.mark.parametrize("make", list(ORACLES), ids=lambda make: make.__name__)
SHAPES = [(3, 5), (7,), (), (0,), (2, 3, 4, 5)]


def required(make):
    """Return required arguments of the class, and for SGD a momentum, so that it has state."""
    return {"lr": 0.05, "momentum": 0.9} if make is FusedSGD else {}


def parameters(dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]


def give_gradients(params, step, dtype=None):
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, dtype or p.dtype)


def run_steps(optimizer, params, steps=range(3)):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item() if a.numel() else 0.0
