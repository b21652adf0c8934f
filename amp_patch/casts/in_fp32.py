"""Calls in FP32 of functions whose low-precision kernels give wrong results or sums (`normalize`, for example).

The functions `*_alone` are used while no casts act, mostly at levels that cast the model: there a tensor may be in low
precision too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import low_sums
from amp_patch.casts.state import is_plain_eager
from amp_patch.casts.upcast import check_version, rounded
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.tree import map_tensors

Alone = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# Called with the probabilities of each binary cross entropy, outside of compiled code; watch/ adds a check.
probability_checks: list[Callable[[Any], None]] = []


def direction(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `normalize` or `cosine_similarity` on FP32 operands; rows of zeros in FP16 operands get no gradient.

    The gradient of a row of zeros is the result's gradient times 1/eps (1e12 or 1e8), which is infinite in FP16. A row
    of zeros usually comes from a mask or padding, whose backward multiplies this gradient by 0. The product would be
    NaN at any loss scale; in FP32 training it is 0. So `masked_fill` cuts the rows of zeros from the graph.
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
    """Call `function` while no casts act. If all operands are FP16, which rounds eps to 0, compute by `direction`.

    The result has the type of the operands.
    """
    if _only_type((*args, *kwargs.values())) is not torch.float16:
        return function(*args, **kwargs)
    return rounded(direction(function, args, kwargs), torch.float16)


def inexact_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` while no casts act. If all operands have one low type, compute in FP32 and round to that type."""
    low = _only_type((*args, *kwargs.values()))
    if low not in LOW_PRECISION:
        return function(*args, **kwargs)
    wide, named = map_tensors(Tensor.float, (args, kwargs))
    return rounded(function(*wide, **named), low)


def cross_entropy_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `binary_cross_entropy` while no casts act, after the checks of its probabilities."""
    if not is_dynamo_compiling():
        look(args, kwargs)
    return function(*args, **kwargs)


def look(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call `probability_checks` for the arguments of a binary cross entropy."""
    for check in probability_checks:
        check(args[0] if args else kwargs.get("input"))


def rnn_alone(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a recurrent network's function. On a CPU its weights' gradients are added over time in FP32."""
    if not low_sums.in_use or is_dynamo_compiling() or not (torch.is_grad_enabled() and is_plain_eager()):
        return function(*args, **kwargs)
    added = [list(map(_added_in_fp32, value)) if isinstance(value, (list, tuple)) else value for value in args]
    return function(*added, **kwargs)


def _added_in_fp32(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor`, whose gradients autograd adds in FP32 and rounds once; others as they are.

    Autograd casts each gradient to the type that the tensor had when its node was made, before it adds them.
    """
    if tensor.device.type != "cpu" or tensor.dtype not in LOW_PRECISION or not tensor.requires_grad:
        return tensor
    version = tensor._version
    alias = tensor.float()
    alias.data = tensor.detach()
    alias.register_hook(lambda grad: check_version(tensor, version))  # an alias has a version of its own
    return alias


def _only_type(values: tuple[Any, ...]) -> torch.dtype | None:
    """Return the one type of all floating tensors in `values`; None if there are none or several types."""
    found = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return found.pop() if len(found) == 1 else None
