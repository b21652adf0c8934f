"""Which sizes of a model keep its products off the fast way of tensor cores, and what sizes would not.

Source: NVIDIA, Deep Learning Performance Guide ("Tensor Core Requirements"): with 16-bit numbers the sizes of a product
best are multiples of 8, with 8-bit ones of 16. Since cuBLAS 11 and cuDNN 7.6.3 others run on tensor cores too, slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_patch.lab.wording import whole_percent

MULTIPLE = 8  # for 16-bit types; for FP8, in which no level computes, 16
_LARGE, _OF_LARGE = 1024, 64  # sizes from 1024 on (a vocabulary): padding to a multiple of 64 costs little

# `advice` leaves out sizes below these. A smaller share of the forward: the gain would not show. A smaller size (the
# channels of an image, the classes of digits): the layer waits for memory, and padding would cost more. Fewer
# multiply-adds: the launch takes longer than the product.
_SHARE, _SMALLEST, _MULTIPLY_ADDS = 0.05, 32, 10**8
_SHARE_OF_ROWS = 0.5  # most layers have the rows of the batch; a number of rows that few have is not the batch


class Product(NamedTuple):
    """The matrix product of one call of a layer, or convolution.

    Attributes:
        module: qualified name of the module that calls; "" is the model itself.
        op: name of torch's function: "linear", "conv2d".
        sizes: (what it is, how large) of the sizes that count: "in features", "out channels", "head size".
        multiply_adds: how many there are.
        low: whether it ran in FP16 or BF16.
        rows: batch times tokens, over which the gradient of a weight adds up; 0 where there is no such weight.
    """

    module: str
    op: str
    sizes: tuple[tuple[str, int], ...]
    multiply_adds: int
    low: bool = True
    rows: int = 0


@dataclass
class _Odd:
    """A size that is no multiple of 8.

    Attributes:
        places: what the size is ("in features") -> the modules that have it.
        multiply_adds: of the products that have it, each once.
        times: the multiples of the size that are sizes too, with nothing left over: heads, gates.
    """

    places: dict[str, list[str]] = field(default_factory=dict)
    multiply_adds: int = 0
    times: set[int] = field(default_factory=set)


def advice(products: Iterable[Product]) -> list[str]:
    """A line for each size that would better be another one, the costliest first; none where nothing is to be gained.

    Named are sizes of products in FP16 or BF16 that are no multiples of 8, with a real share of all multiply-adds.
    """
    products = [*products]
    total = sum(product.multiply_adds for product in products)
    # A size -> the smallest one of which it is a small multiple: padding a width pads 3 times the width too.
    roots: dict[int, int] = {}
    for size in sorted({size for product in products for _, size in _odd_sizes(product)}):
        roots[size] = next((root for root in roots if size % root == 0 and size // root <= _OF_LARGE), size)
    odd: dict[int, _Odd] = {}
    for product in products:
        for root in {roots[size] for _, size in _odd_sizes(product)}:
            odd.setdefault(root, _Odd()).multiply_adds += product.multiply_adds
        for what, size in _odd_sizes(product):
            found, name = odd[roots[size]], _pattern(product.module)
            found.times.add(size // roots[size])
            names = found.places.setdefault(what, [])
            names += [name] if name not in names else []
    named = [size for size in odd if odd[size].multiply_adds > max(_SHARE * total, _MULTIPLY_ADDS)]
    named.sort(key=lambda size: -odd[size].multiply_adds)
    return [_line(size, odd[size], total) for size in named] + _lines_of_rows(products, total)


def _odd_sizes(product: Product) -> list[tuple[str, int]]:
    """The sizes that are no multiples of 8, each with what it is."""
    return [(what, s) for what, s in product.sizes if product.low and s % MULTIPLE and s >= _SMALLEST]


def _line(size: int, found: _Odd, total: int) -> str:
    wanted = _next(size, MULTIPLE)
    better = f", or {_next(size, _OF_LARGE)} (a multiple of {_OF_LARGE})" if size >= _LARGE else ""
    also = f" (and {', '.join(str(size * times) for times in sorted(found.times - {1}))})" if found.times - {1} else ""
    where = "; ".join(f"{what} of {', '.join(names)}" for what, names in found.places.items())
    share = f"{whole_percent(found.multiply_adds / total)} of the multiply-adds"
    return f"{size}{also} is no multiple of {MULTIPLE}: {where}; {share}. Pad it to {wanted}{better}"


def _lines_of_rows(products: list[Product], total: int) -> list[str]:
    odd: dict[int, int] = {}
    for product in products:
        if product.low and product.rows % MULTIPLE and product.rows >= _SMALLEST:
            odd[product.rows] = odd.get(product.rows, 0) + product.multiply_adds
    least = max(_SHARE_OF_ROWS * total, _MULTIPLY_ADDS)
    return [
        f"{rows} rows (batch times tokens) is no multiple of {MULTIPLE}: {whole_percent(found / total)} of the "
        f"multiply-adds. Take a batch or a length that makes it one: {_next(rows, MULTIPLE)}"
        for rows, found in odd.items()
        if found > least
    ]


def _next(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pattern(name: str) -> str:
    """The name with * for the numbers in it: the layers of a stack have one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "the model itself"
