"""Functions whose low-precision kernels are wrong at any level: they run in FP32, also while no casts act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts.saturated import look
from amp_patch.casts.upcast import rounded
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.tree import map_tensors

Alone = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def direction(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `normalize` or `cosine_similarity` on FP32 operands. Rows of zeros in FP16 get a gradient of zero.

    The gradient of a row of zeros is 1/eps (1e12 or 1e8) times the result's gradient, which is infinite in FP16. The
    backward behind such a row (a mask, padding, the inputs) multiplies the gradient by 0. In FP32 the product is 0, in
    FP16 it is NaN at any loss scale.
    """
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    dims = 0
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() > dims:
            dims = value.dim()

    def raised(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in LOW_PRECISION:
            return value
        if value.dtype is not torch.float16:
            return value.float()
        zero, own = value == 0, dim
        if isinstance(dim, int) and dims > 0:  # `dim` counts the dimensions after broadcasting
            own = dim % dims - dims + value.dim()
        if not isinstance(own, int) or own >= 0:
            zero = zero.all(own, keepdim=True)
        return value.float().masked_fill(zero, 0.0)

    return function(*map(raised, args), **{name: raised(value) for name, value in kwargs.items()})


def direction_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `direction` while no casts act if all operands are FP16, which rounds eps to 0. The result is FP16."""
    if _only_type((*args, *kwargs.values())) is not torch.float16:
        return function(*args, **kwargs)
    return rounded(direction(function, args, kwargs), torch.float16)


def inexact_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` while no casts act: compute in FP32, and round to the operands' low-precision type."""
    low = _only_type((*args, *kwargs.values()))
    if low not in LOW_PRECISION:
        return function(*args, **kwargs)
    wide, named = map_tensors(Tensor.float, (args, kwargs))
    return rounded(function(*wide, **named), low)


def cross_entropy_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `binary_cross_entropy` while no casts act.

    Warn if low precision has rounded probabilities to 0 or 1.
    """
    if not is_dynamo_compiling():
        look(args[0] if args else kwargs.get("input"))
    return function(*args, **kwargs)


def _only_type(values: tuple[Any, ...]) -> torch.dtype | None:
    """Return the one type of all floating tensors in `values`; None if there are none or several types."""
    found = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return found.pop() if len(found) == 1 else None
