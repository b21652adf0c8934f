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

from amp_patch.policy import LOW_PRECISION

BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_AT_ONCE = 1 << 16  # elements of a layer norm's input in FP32 at a time: 256 KiB stay in the L2 cache


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
    if not _is_low_on_cpu(given) or grad.dtype is not given.dtype or not any(wanted[1:]):
        result: tuple[Tensor | None, ...] = op(grad, given, shape, mean, deviation, weight, bias, wanted)
        return result
    size = math.prod(shape)
    with torch._C._AutoDispatchBelowAutograd():
        rows, wide = [each.reshape(-1, size) for each in (grad, given)], [mean.reshape(-1, 1), deviation.reshape(-1, 1)]
        parameters = [None if each is None else each.reshape(size).float() for each in (weight, bias)]
        of_input = torch.empty_like(rows[1]) if wanted[0] else None
        sums = [rows[1].new_zeros(size, dtype=torch.float32) for _ in range(2)]
        step = max(1, _AT_ONCE // size)
        for begin in range(0, len(rows[0]), step):
            part = [each[begin : begin + step].float() for each in (*rows, *wide)]
            first, *others = op(*part[:2], [size], *part[2:], *parameters, wanted)
            if of_input is not None:
                of_input[begin : begin + step] = first
            for total, added in zip(sums, others, strict=True):
                if added is not None:
                    total += added
        results = [None if of_input is None else of_input.reshape(given.shape)]
        for each, total, is_wanted in zip((weight, bias), sums, wanted[1:], strict=True):
            results.append(total.reshape(shape).to(each.dtype) if each is not None and is_wanted else None)
        return tuple(results)


def _is_low_on_cpu(value: Tensor) -> bool:
    return value.dtype in LOW_PRECISION and value.device.type == "cpu" and value.layout is torch.strided


SUMS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": _embedding_gradient,
    "_index_put_impl_": _add_at,
    "native_layer_norm_backward": _layer_norm_gradients,
}
