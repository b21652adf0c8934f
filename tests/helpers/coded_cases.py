"""Tensors in eight bits for tests of the codec and of steps, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

MAPS = [torch.int8, torch.uint8]
SIZES = [0, 1, 7, 255, 256, 257, 512, 5000]


def encoded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.full_like(values, 77, dtype=dtype)
    scales = torch.full((-(-values.numel() // 256),), math.nan, device=values.device)
    mt.multi_tensor_encode([values], [codes], [scales])
    return codes, scales


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.full_like(codes, math.nan, dtype=torch.float32)
    mt.multi_tensor_decode([codes], [values], [scales])
    return values


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of twelve decades."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-9, 3, (size,), generator=generator)
    return values if dtype is torch.int8 else values.abs()


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32:
        return torch.equal(a, b)
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SGD = {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": True}
FORMS = ["whole", "published", "split", "stochastic"]


def params_of(form: str, values: list[Tensor]) -> tuple[list[Tensor], dict[str, object]]:
    """What is stepped, and what the kernel is given beside."""
    if form == "stochastic":
        return [value.bfloat16() for value in values], {"seed": 3, "draws": list(range(len(values)))}
    if form == "whole":
        return [value.clone() for value in values], {}
    low = [value.bfloat16() for value in values]
    if form == "published":
        return [value.clone() for value in values], {"low": low}
    halves = [torch.empty_like(value, dtype=torch.int16) for value in values]
    mt.multi_tensor_split(values, low, halves)
    return halves, {"low": low}


STATE_SIZES = [3000, 17, 40_000]  # of what `stepped` steps
OF_KERNEL = {"adam": [torch.int8, torch.uint8], "amsgrad": [torch.int8, torch.uint8], "sgd": [torch.int8]}


def states(dtype: torch.dtype, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    return [encoded(drawn(size, dtype, seed).to(device), dtype) for seed, size in enumerate(STATE_SIZES)]


def stepped(form: str, kernel: str, coded: bool, device: str = "cpu", **more: object) -> list[list[Tensor]]:
    """After a step on codes, or on FP32 states that are decoded before and encoded afterwards.

    The last state of the second tensor is FP32 in both. The gradient of the third begins at an odd address.
    """
    generator = torch.Generator().manual_seed(1)
    values, grads = ([torch.randn(size, generator=generator).to(device) for size in STATE_SIZES] for _ in range(2))
    grads = [grad.bfloat16() for grad in grads]
    grads[2] = torch.cat([grads[0][:1], grads[2]])[1:]
    params, options = params_of(form, values)
    kept = [states(dtype, device) for dtype in OF_KERNEL[kernel]]
    if coded:
        lists = [[codes for codes, _ in state] for state in kept]
        options["scales"] = [[scales for _, scales in state] for state in kept]
        lists[-1][1] = decoded(*kept[-1][1])
        options["scales"][-1][1] = torch.empty(0, device=device)
    else:
        lists = [[decoded(*state) for state in of_name] for of_name in kept]
    largest = [value.abs() for value in values] if kernel == "amsgrad" else None
    if kernel == "sgd":
        mt.multi_tensor_sgd(grads, params, *lists, **SGD, **options, **more)
    else:
        steps = [torch.tensor(4.0, device=device) for _ in params]
        mt.multi_tensor_adam(grads, params, *lists, largest, steps, **ADAM, **options, **more)
    if not coded:
        for state, tensors in zip(kept, lists, strict=True):
            for i, tensor in enumerate(tensors):
                if (state is kept[-1]) and i == 1:
                    continue
                mt.multi_tensor_encode([tensor], [state[i][0]], [state[i][1]])
    kept[-1][1] = (lists[-1][1], torch.empty(0, device=device))
    coded_states = [[t for pair in of_name for t in pair] for of_name in kept]
    return [params, options.get("low", []), largest or [], *coded_states]
