"""Sums that torch's CPU kernels make in FP16 or BF16, in FP32 and rounded once.

In BF16, 256 and 1 are 256. So the gradient of a token that occurs 1,000 times in a batch, or of a bias of a layer norm
over 4,096 rows, loses a part of its size without a message. `cpu_half.py` registers these kernels, at `BackendSelect`.
Torch's other CPU kernels (`sum`, `gather`, `scatter_add`, the gradients of products) add in FP32.
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

_PLACES = (torch.int32, torch.int64)
in_use = False  # the kernels are registered
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _below(name: str, keys: Any) -> Callable[..., Any]:
    """Return torch's own kernel of an op of aten."""
    return functools.partial(getattr(torch.ops.aten, name).default.redispatch, keys & BELOW)


def _embedding_gradient(keys: Any, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, *rest: Any) -> Tensor:
    """Return the gradient of an embedding's weight, [rows, n], in the type of `grad`.

    If there are more rows than indices, only the rows that occur are summed: FP32 memory for all rows costs more time.
    """
    op = _below("embedding_dense_backward", keys)
    if not _is_low_on_cpu(grad):
        return op(grad, indices, rows, padding_idx, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        if rows <= indices.numel():
            return op(grad.float(), indices, rows, padding_idx, *rest).to(grad.dtype)
        occurring, places = indices.unique(return_inverse=True)
        sums = op(grad.float(), places.to(indices.dtype), len(occurring), -1, *rest)
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
    """Do `target[indices] += values` in place, or `=`: the gradient of `x[indices]` is made so, from zeros."""
    op = _below("_index_put_impl_", keys)
    may_repeat = any(index is not None and index.dtype in _PLACES for index in indices)  # masks do not
    if not (accumulate and may_repeat and values.dtype is target.dtype and _is_low_on_cpu(target)):
        return op(target, indices, values, accumulate, unsafe)
    with torch._C._AutoDispatchBelowAutograd():
        return target.copy_(op(target.float(), indices, values.float(), True, unsafe))


def _coalesced(keys: Any, sparse: Tensor) -> Tensor:
    """Return `sparse` with the values of equal indices added up."""
    op = _below("_coalesce", keys)
    if sparse.dtype not in LOW_PRECISION or sparse.device.type != "cpu":
        return op(sparse)
    with torch._C._AutoDispatchBelowAutograd():
        return op(sparse.float()).to(sparse.dtype)


def _dense(keys: Any, sparse: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    """Return `sparse.to_dense()`, for which torch adds the values of equal indices one by one."""
    if sparse.layout is torch.sparse_coo and not sparse.is_coalesced():
        sparse = _coalesced(keys, sparse)
    return _below("_to_dense", keys)(sparse, dtype, masked_grad)


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
    op = _below("native_layer_norm_backward", keys)
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


def _norm(name: str, activations: int) -> Callable[..., Any]:
    """Return a kernel of a batch or group norm, or of its backward, with FP32 parameters beside low `activations`.

    For parameters in the low type torch saves the mean in that type. Then the weight's gradient adds up this rounding.
    """

    def kernel(keys: Any, *args: Any) -> Any:
        op = _below(name, keys)
        low = args[0].dtype
        is_low = [isinstance(value, Tensor) and value.dtype is low for value in args]
        if not _is_low_on_cpu(args[0]) or not all(is_low[:activations]) or not any(is_low[activations:]):
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            wide = [
                value.float() if index >= activations and is_low[index] else value for index, value in enumerate(args)
            ]
            results = op(*wide)
            if activations == 2:
                return tuple(value if value is None else value.to(low) for value in results)
            for index in (3, 4):  # the running statistics, which a batch norm in training writes
                if is_low[index] and args[5]:
                    args[index].copy_(wide[index])
            return results

    return kernel


def _is_low_on_cpu(value: Tensor) -> bool:
    return value.dtype in LOW_PRECISION and value.device.type == "cpu" and value.layout is torch.strided


SUMS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": _embedding_gradient,
    "_index_put_impl_": _add_at,
    "_coalesce": _coalesced,
    "_to_dense": _dense,
    "native_layer_norm_backward": _layer_norm_gradients,
    **{name: _norm(name, 1) for name in ("native_batch_norm", "native_group_norm")},
    **{name: _norm(name, 2) for name in ("native_batch_norm_backward", "native_group_norm_backward")},
}

# Ops that compute in FP32 as they are, if their operands are cast. Each either adds without FP32 on a CPU, or computes
# coordinates (grid_sampler), counts (index_reduce) or products (prod) without it.
ADDERS = """
    index_add index_add_ index_add.out index_reduce index_reduce_ index_reduce.out put_ addbmm addbmm_ addbmm.out
    prod prod.dim_int prod.int_out histc histc.out segment_reduce _segment_reduce_backward col2im unfold_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
    _embedding_bag_dense_backward
"""
