"""The optimizers of Apex one parameter at a time, from the papers, and the cases that ours are compared in."""

from __future__ import annotations

import math

import pytest
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


def zeros(state, name, like):
    return state.setdefault(name, torch.zeros_like(like))


def corrections(betas, t, on):
    return [1 - beta**t if on else 1.0 for beta in betas]


def adam(
    params,
    grads,
    states,
    t,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    adam_w_mode=True,
    weight_decay=0.0,
):
    c1, c2 = corrections(betas, t, bias_correction)
    for p, g, state in zip(params, grads, states, strict=True):
        m, v = zeros(state, "exp_avg", p), zeros(state, "exp_avg_sq", p)
        if not adam_w_mode:
            g = g + weight_decay * p
        m.copy_(betas[0] * m + (1 - betas[0]) * g)
        v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
        update = (m / c1) / ((v / c2).sqrt() + eps)
        if adam_w_mode:
            update = update + weight_decay * p
        p.sub_(lr * update)


def sgd(
    params,
    grads,
    states,
    t,
    lr,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    wd_after_momentum=False,
):
    for p, g, state in zip(params, grads, states, strict=True):
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = g.clone()
            else:
                state["momentum_buffer"].mul_(momentum).add_(g, alpha=1 - dampening)
            buffer = state["momentum_buffer"]
            g = g + momentum * buffer if nesterov else buffer
        if wd_after_momentum:
            g = g + weight_decay * p
        p.sub_(lr * g)


def adagrad(params, grads, states, t, lr=1e-2, eps=1e-10, weight_decay=0.0, adagrad_w_mode=False):
    for p, g, state in zip(params, grads, states, strict=True):
        h = zeros(state, "sum", p)
        if weight_decay and not adagrad_w_mode:
            g = g.add(p, alpha=weight_decay)
        h.addcmul_(g, g)
        update = g / (h.sqrt() + eps)
        if weight_decay and adagrad_w_mode:
            update.add_(p, alpha=weight_decay)
        p.add_(update, alpha=-lr)


def lamb(
    params,
    grads,
    states,
    t,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    c1, c2 = corrections(betas, t, bias_correction)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    clip = norm / max_grad_norm if max_grad_norm is not None and norm > max_grad_norm else torch.ones_like(norm)
    for p, g, state in zip(params, grads, states, strict=True):
        m, v = zeros(state, "exp_avg", p), zeros(state, "exp_avg_sq", p)
        g = g / clip
        if weight_decay and not adam_w_mode:
            g = g.add(p, alpha=weight_decay)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0] if grad_averaging else 1.0)
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        update = (m / c1) / ((v / c2).sqrt() + eps)
        if weight_decay and adam_w_mode:
            update.add_(p, alpha=weight_decay)
        rate = torch.full_like(norm, lr)
        if weight_decay or use_nvlamb:
            of_p, of_update = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
            if of_p != 0 and of_update != 0:
                rate = lr * (of_p / of_update)
        p.sub_(update * rate)


def novograd(
    params,
    grads,
    states,
    t,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    reg_inside_moment=False,
    grad_averaging=True,
    norm_type=2,
    init_zero=False,
):
    c1, c2 = corrections(betas, t, bias_correction)
    a, b = betas[1], 1 - betas[1]
    for p, g, state in zip(params, grads, states, strict=True):
        norm = torch.linalg.vector_norm(g) if norm_type == 2 else g.abs().max()
        before = state.get("norm", torch.zeros_like(norm) if init_zero else norm)
        norm = (a * before**2 + b * norm**2).sqrt() if norm_type == 2 else a * before + b * norm
        state["norm"] = norm
        denominator = norm / math.sqrt(c2) + eps
        m = zeros(state, "exp_avg", p)
        if reg_inside_moment:
            g = g / denominator
            if weight_decay:
                g.add_(p, alpha=weight_decay)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0] if grad_averaging else 1.0)
        update = m / c1
        if not reg_inside_moment:
            update = update / denominator
            if weight_decay:
                update.add_(p, alpha=weight_decay)
        p.add_(update, alpha=-lr)


ORACLES = {
    FusedAdam: adam,
    FusedSGD: sgd,
    FusedLAMB: lamb,
    FusedMixedPrecisionLamb: lamb,
    FusedNovoGrad: novograd,
    FusedAdagrad: adagrad,
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
