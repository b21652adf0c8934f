"""Recognition of tensors with quantized values: integers, FP8, and the types of bitsandbytes and torchao.

Such a tensor is neither cast nor trained. The libraries are recognised by class names and not imported.
"""

from __future__ import annotations

from torch import Tensor, nn

_LIBRARIES = ("torchao", "bitsandbytes")
_CLASSES = ("Params4bit", "Int8Params")


def is_quantized(tensor: Tensor) -> bool:
    """Tell whether `tensor` is integer, bool or FP8, or of a class whose values only its library can read."""
    dtype = tensor.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
        return True
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    return any(
        kind.__name__ in _CLASSES or kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(tensor).__mro__
    )
