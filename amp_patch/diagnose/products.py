"""The matrix products in a call of a torch function: their sizes and multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from amp_patch.diagnose.shapes import Product
from amp_patch.policy import LOW_PRECISION

_Sizes = tuple[tuple[str, int], ...]
_Found = tuple[_Sizes, int, int]  # sizes, multiply-adds, rows


def of_call(module: str, op: str, args: Any, kwargs: Any, result: Any) -> list[Product]:
    """Return the matrix products in one call of the torch function `op`; an empty list if it computes none.

    `module` is the name of the calling module, `result` what the call returned.
    """
    find = _FUNCTIONS.get(op.strip("_"))
    first = result[0] if isinstance(result, tuple) and result else result
    if find is None or not isinstance(first, Tensor):
        return []
    try:
        found = [*find(first, *args, **kwargs)]
    except (TypeError, IndexError, AttributeError):  # arguments in a form that `find` does not accept
        return []
    return _products(module, op, first, found)


def _products(module: str, op: str, result: Tensor, found: list[_Found]) -> list[Product]:
    low = result.dtype in LOW_PRECISION
    return [Product(module, op, sizes, count, low, rows) for sizes, count, rows in found]


def _layer(into: int, out: int, rows: int) -> _Found:
    return (("in features", into), ("out features", out)), rows * into * out, rows


def _linear(result: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Iterator[_Found]:
    out, into = weight.shape if weight.dim() == 2 else (1, *weight.shape)
    yield _layer(into, out, x.numel() // max(into, 1))


def _matmul(result: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> Iterator[_Found]:
    if a.dim() < 2 or b.dim() < 2:  # a vector: not a product of two matrices
        return
    into, out = a.shape[-1], b.shape[-1]
    yield (("inner size", into), ("columns", out)), result.numel() * into, 0


def _grouped(result: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> Iterator[_Found]:
    if a.dim() == b.dim() == 2:  # the inner sizes are in the tensor `offs`: reading it would sync
        return
    yield from _matmul(result, a, b)


def _added(result: Tensor, _: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> Iterator[_Found]:
    yield from _matmul(result, a, b)


def _convolution(
    result: Tensor, x: Tensor, weight: Tensor, *rest: Any, groups: int | None = None, transposed: bool = False, **_: Any
) -> Iterator[_Found]:
    if groups is None:  # `rest` is bias, stride, padding, dilation (or output_padding, if transposed), groups
        groups = rest[4] if len(rest) > 4 else 1
    out, into = weight.shape[0] // groups, weight.shape[1]
    if transposed:
        into, out = weight.shape[0] // groups, weight.shape[1]
    of_group = " of a group" if groups > 1 else ""
    count = (x if transposed else result).numel() * math.prod(weight.shape[1:])
    yield ((f"in channels{of_group}", into), (f"out channels{of_group}", out)), count, 0


def _attention(result: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Iterator[_Found]:
    head, of_value = query.shape[-1], value.shape[-1]
    sizes = tuple(dict.fromkeys((("head size", head), ("head size", of_value))))
    yield sizes, query.numel() // max(head, 1) * key.shape[-2] * (head + of_value), 0


def _multi_head(
    result: Tensor, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *_: Any, **__: Any
) -> Iterator[_Found]:
    for given in (query, key, value):
        into = given.shape[-1]
        yield _layer(into, width, given.numel() // max(into, 1))
    rows = query.numel() // max(query.shape[-1], 1)
    yield (("head size", width // heads),), 2 * rows * key.shape[0] * width, 0
    yield _layer(width, width, rows)


def _recurrent(result: Tensor, x: Tensor, _: Any, weights: Any, *__: Any, **___: Any) -> Iterator[_Found]:
    flat = [w for each in weights for w in (each if isinstance(each, list | tuple) else [each])]
    steps = x.numel() // max(x.shape[-1], 1)
    for weight in (w for w in flat if w.dim() == 2):
        yield _layer(weight.shape[1], weight.shape[0], steps)


_FUNCTIONS: dict[str, Callable[..., Iterator[_Found]]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    "grouped_mm": _grouped,
    "rmatmul": lambda result, a, b: _matmul(result, b, a),
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **{f"conv_transpose{dims}d": partial(_convolution, transposed=True) for dims in (1, 2, 3)},
    **dict.fromkeys(("scaled_dot_product_attention", "flex_attention_hop"), _attention),
    "multi_head_attention_forward": _multi_head,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}
