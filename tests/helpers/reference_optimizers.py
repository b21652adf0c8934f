"""The optimizers of Apex one parameter at a time, from the papers: what the fused ones are compared with.

Each step takes lists of parameters, gradients and states (dicts, empty at first), and the number of the step from 1.
It computes in the type of the parameters and writes parameters and states in place.
"""

from __future__ import annotations

import math

import torch


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
