"""The relative error of a module's output against its output in FP32."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casts import regions
from amp_patch.support import tree
from amp_patch.support.devices import widest
from amp_patch.support.random_states import random_states, restored_random_states
from amp_patch.watch.questions import fp32_of


class _WithoutHooks(nn.Module):
    """A wrapper that calls the forward of a module without the hooks of that module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


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
    exact = _in_fp32(module, args, kwargs)
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


def _in_fp32(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor] | None:
    """Run the module's forward again in FP32, and return the floating tensors of its output.

    The arguments, parameters and buffers are FP32 copies; a parameter that has a master is replaced by the master. None
    if the module cannot be computed in FP32, or draws random numbers.
    """
    tensors: dict[str, Tensor] = {}
    for name, param in _WithoutHooks(module).named_parameters():
        tensors[name] = fp32_of(param).detach()
    tensors.update((name, buffer.clone()) for name, buffer in _WithoutHooks(module).named_buffers())
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    args, kwargs = tree.cast_floats((args, kwargs), torch.float32)
    attributes = dict(vars(module))
    vars(module).pop("_amp", None)  # with `_amp` the generated forward would cast the arguments to the level's type
    try:
        with restored_random_states() as before, regions.region(None):
            exact = floats(torch.func.functional_call(_WithoutHooks(module), tensors, args, kwargs))
            return exact if tree.same(before, random_states()) else None
    except Exception:  # for example: weight_norm's hook makes a weight in the parameters' type
        return None
    finally:
        vars(module).clear()
        vars(module).update(attributes)
