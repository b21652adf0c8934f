"""Which tensors hold quantized values: integers, FP8, and what bitsandbytes and torchao make. None is cast or trained.

Those libraries are recognised by the names of their classes: neither is imported.
"""

from __future__ import annotations

from torch import Tensor, nn

_LIBRARIES = ("torchao", "bitsandbytes")
_CLASSES = ("Params4bit", "Int8Params")


def is_quantized(tensor: Tensor) -> bool:
    """Whether `tensor` has values that only its library can read, or too few bits to be cast: integers, bool, FP8."""
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        return True
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    return any(
        kind.__name__ in _CLASSES or kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(tensor).__mro__
    )
