"""Functions whose low-precision forms are wrong at any level, run in FP32: where O1's casts act, and where none do."""

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
    """`normalize` or `cosine_similarity` of FP32 operands. FP16's rows of zeros get a gradient of zero.

    The gradient of a row of zeros is 1/eps times the result's, 1e12 times or 1e8 times: infinite in FP16. In FP32 the
    zeros behind it (a mask, padding, the inputs) multiply it by 0, and infinity times 0 is NaN, at any loss scale.
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
        if isinstance(dim, int) and dims > 0:  # of the broadcast operands
            own = dim % dims - dims + value.dim()
        if not isinstance(own, int) or own >= 0:
            zero = zero.all(own, keepdim=True)
        return value.float().masked_fill(zero, 0.0)

    return function(*map(raised, args), **{name: raised(value) for name, value in kwargs.items()})


def direction_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `direction` where no casts act, of FP16: it rounds eps to 0. The result is FP16."""
    if _only_type((*args, *kwargs.values())) is not torch.float16:
        return function(*args, **kwargs)
    return rounded(direction(function, args, kwargs), torch.float16)


def inexact_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function where no casts act: in FP32, with a result of the low-precision type that came in."""
    low = _only_type((*args, *kwargs.values()))
    if low not in LOW_PRECISION:
        return function(*args, **kwargs)
    wide, named = map_tensors(Tensor.float, (args, kwargs))
    return rounded(function(*wide, **named), low)


def cross_entropy_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`binary_cross_entropy` where no casts act; warns of probabilities that low precision has rounded to 0 or 1."""
    if not is_dynamo_compiling():
        look(args[0] if args else kwargs.get("input"))
    return function(*args, **kwargs)


def _only_type(values: tuple[Any, ...]) -> torch.dtype | None:
    """The type that all floating tensors among `values` have; None for none or several."""
    found = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return found.pop() if len(found) == 1 else None
