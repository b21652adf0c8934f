"""Advice on sizes of a model's matrix products that are slow on tensor cores, with the nearest faster sizes.

Source: NVIDIA, Deep Learning Performance Guide ("Tensor Core Requirements"): the sizes of a product should be multiples
of 8 for 16-bit numbers, and of 16 for 8-bit numbers. Since cuBLAS 11 and cuDNN 7.6.3 other sizes run on tensor cores
too, but slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from amp_patch.diagnose.wording import whole_percent

MULTIPLE = 8  # for 16-bit types
_LARGE, _OF_LARGE = 1024, 64  # a size from 1024 on (a vocabulary) can be padded to a multiple of 64 at little cost

# `advice` is given only for layers that reach these limits. Below the limit of
# - the share of the forward's multiply-adds, the gain would not be noticeable;
# - the size (the channels of an image, the classes of digits), the layer waits for memory, and padding costs more;
# - the number of multiply-adds, the launch of the kernel takes longer than the product.
_SHARE, _SMALLEST, _MULTIPLY_ADDS = 0.05, 32, 10**8
_SHARE_OF_ROWS = 0.5  # a number of rows is reported only if products with this share of all multiply-adds have it


class Product(NamedTuple):
    """A matrix product, or a convolution, in one call.

    Attributes:
        module: qualified name of the calling module; "" is the model itself.
        op: name of the torch function: "linear", "conv2d".
        sizes: (name, value) of each size that should be a multiple of 8: "in features", "out channels", "head size".
        multiply_adds: the number of multiply-adds of the call.
        low: whether the result was FP16 or BF16.
        rows: batch times tokens: the inner size of the product that gives the weight's gradient. 0 without a weight.
    """

    module: str
    op: str
    sizes: tuple[tuple[str, int], ...]
    multiply_adds: int
    low: bool = True
    rows: int = 0


@dataclass
class _Odd:
    """A size that is no multiple of 8, and the products that have it.

    Attributes:
        places: name of the size ("in features") -> the modules that have it.
        multiply_adds: the sum over the products that have it.
        times: each factor n for which n * size is a size of the model too: 3 for a joint query, key and value, 4 for
            the gates of an LSTM.
    """

    places: dict[str, list[str]] = field(default_factory=dict)
    multiply_adds: int = 0
    times: set[int] = field(default_factory=set)


def advice(products: Iterable[Product]) -> list[str]:
    """Return a line for each size that slows the model down on tensor cores, the costliest first.

    The lines name sizes of FP16 and BF16 products that are no multiples of 8, if the products have a noticeable share
    of all multiply-adds.
    """
    products = [*products]
    total = sum(product.multiply_adds for product in products)
    # A size -> the smallest size that divides it: if a width is padded, 3 times the width is padded too.
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
    """Return (name, value) of each size of `product` that is at least `_SMALLEST` and no multiple of 8.

    The list is empty if the product is not in low precision.
    """
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
    """Replace the numbers in a name by *, so that all layers of a stack have one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "the model itself"
