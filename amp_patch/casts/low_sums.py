"""Sums that torch's CPU kernels make in FP16 or BF16, in FP32 and rounded once, as torch's CUDA kernels make them.

In BF16, 256 and 1 are 256. So the gradient of a token that occurs 1,000 times in a batch, or of a bias of a layer norm
over 4,096 rows, loses a part of its size without a message. `cpu_half.py` registers these kernels, at `BackendSelect`.
Torch's other CPU kernels (`sum`, `index_select`, `gather`, the gradients of products and of group norms) add in FP32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.policy import LOW_PRECISION

BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _embedding_gradient(
    keys: Any, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Return the gradient of an embedding's weight, [rows, n], in the type of `grad`.

    If there are more rows than indices, only the rows that occur are summed: FP32 memory for all rows costs more time.
    """

    def summed(grad: Tensor, indices: Tensor, rows: int, padding_idx: int) -> Tensor:
        op = torch.ops.aten.embedding_dense_backward.default
        return op.redispatch(keys & BELOW, grad, indices, rows, padding_idx, scale_grad_by_freq)

    if not _is_low_on_cpu(grad):
        return summed(grad, indices, rows, padding_idx)
    with torch._C._AutoDispatchBelowAutograd():
        if rows <= indices.numel():
            return summed(grad.float(), indices, rows, padding_idx).to(grad.dtype)
        occurring, places = indices.unique(return_inverse=True)
        sums = summed(grad.float(), places, len(occurring), -1)
        result = grad.new_zeros(rows, sums.shape[1]).index_copy_(0, occurring.long(), sums.to(grad.dtype))
        if padding_idx >= 0:
            result[padding_idx] = 0
        return result


def _add_at(
    keys: Any,
    target: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Do `target[indices] += values` in place, or `=`: the gradient of `x[indices]` is made so, from zeros.

    Sums of fewer values than `target` has elements are left to torch: FP32 memory for all elements costs more time.
    """
    op = functools.partial(torch.ops.aten._index_put_impl_.default.redispatch, keys & BELOW)
    is_sum = accumulate and values.dtype is target.dtype and target.numel() <= values.numel()
    if not is_sum or not _is_low_on_cpu(target):
        return op(target, indices, values, accumulate, unsafe)
    with torch._C._AutoDispatchBelowAutograd():
        return target.copy_(op(target.float(), indices, values.float(), accumulate, unsafe))


def _layer_norm_gradients(
    keys: Any,
    grad: Tensor,
    given: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a layer norm's input, weight and bias, each in its type; None for those not `wanted`.

    `mean` and `deviation` (its inverse) are the forward's results, one for each row of `given`.
    """
    op = functools.partial(torch.ops.aten.native_layer_norm_backward.default.redispatch, keys & BELOW)
    is_sum = any(wanted[1:]) and grad.dtype is given.dtype and given.numel() > 0
    own = [wanted[0], False, False] if is_sum and _is_low_on_cpu(given) else wanted
    results: list[Tensor | None] = list(op(grad, given, shape, mean, deviation, weight, bias, own))
    if own is wanted:
        return tuple(results)
    with torch._C._AutoDispatchBelowAutograd():
        kernels = multi_tensor.extension()
        summed = _norm_sums if kernels is None else kernels.layer_norm_sums
        sums = summed(grad, given, mean, deviation, math.prod(shape))
        for index, parameter in enumerate((weight, bias), 1):
            if parameter is not None and wanted[index]:
                results[index] = sums[index - 1].reshape(shape).to(parameter.dtype)
    return tuple(results)


def _norm_sums(grad: Tensor, given: Tensor, mean: Tensor, deviation: Tensor, n: int) -> Tensor:
    """Return the FP32 gradients [2, n] of weight and bias for rows of n; csrc/kernels/cpu.cpp in plain torch."""
    grad = grad.float().reshape(-1, n)
    normalized = given.float().reshape(-1, n).sub(mean.reshape(-1, 1)).mul_(deviation.reshape(-1, 1))
    return torch.stack([normalized.mul_(grad).sum(0), grad.sum(0)])


def _is_low_on_cpu(value: Tensor) -> bool:
    return value.dtype in LOW_PRECISION and value.device.type == "cpu" and value.layout is torch.strided


SUMS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": _embedding_gradient,
    "_index_put_impl_": _add_at,
    "native_layer_norm_backward": _layer_norm_gradients,
}
