"""The relative error of a module's output against its output in FP32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casts import regions
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.support import tree
from amp_patch.support.devices import widest
from amp_patch.support.random_states import random_states, restored_random_states


def floats(value: Any) -> list[Tensor]:
    """Return the real floating tensors in a value, nested containers included."""
    return [t for t in tree.tensors(value) if t.is_floating_point() and t.layout is torch.strided and not t.is_nested]


def is_random(module: nn.Module) -> bool:
    """Return whether the module's attributes `p` or `dropout` say that it drops numbers at random."""
    rates = (getattr(module, name, 0.0) for name in ("p", "dropout"))
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


@torch.no_grad()
def relative_error(module: nn.Module, args: Any, kwargs: Any, outputs: list[Tensor]) -> Tensor | None:
    """Return the relative error of `outputs` against the FP32 outputs for the same arguments. Does not sync.

    The module's state does not change. Elements that are not finite in FP32 are ignored.

    Returns:
        FP64, shape [2]: the error; and 1 if an FP32 output is too large for the type of `outputs`, else 0. None if the
        module draws random numbers, or cannot be computed in FP32.
    """
    exact = in_fp32(module, args, kwargs)
    if exact is None or [a.shape for a in outputs] != [b.shape for b in exact]:
        return None
    return distance(outputs, exact)


def distance(tensors: list[Tensor], exact: list[Tensor]) -> Tensor:
    """Return the relative error of all `tensors` together, as `relative_error` does. Shapes are equal."""
    apart, size, too_large = [], [], []
    for output, wanted in zip(tensors, exact, strict=True):
        wanted = wanted.to(output.device)
        finite = wanted.isfinite()
        wanted = torch.where(finite, wanted, 0)
        difference = torch.where(finite, output.float() - wanted, 0)
        wide = widest(output.device)
        apart.append(torch.linalg.vector_norm(difference, dtype=wide))
        size.append(torch.linalg.vector_norm(wanted, dtype=wide))
        too_large.append((~wanted.to(output.dtype).isfinite()).any())
    difference = torch.stack(apart).norm()
    error = torch.where(difference == 0, 0.0, difference / torch.stack(size).norm()).nan_to_num(
        math.inf, posinf=math.inf
    )
    return torch.stack([error, torch.stack(too_large).any().to(error)])


@torch.no_grad()
def in_fp32(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Run the module's forward again in FP32, and return the floating tensors of its output.

    An FP32 copy of the module runs, without hooks. None if it cannot be made or run, or draws random numbers.
    """
    try:
        with restored_random_states() as before, regions.region(None):
            copy = fp32_copy(module)
            for each in copy.modules():
                vars(each)["_forward_hooks"].clear()
                vars(each)["_forward_pre_hooks"].clear()
            args, kwargs = tree.cast_floats((args, kwargs), torch.float32)
            exact = floats(copy(*args, **kwargs))
            return exact if tree.same(before, random_states()) else None
    except Exception:  # for example: a module that cannot be copied, or weight_norm's weight, which a hook makes
        return None
