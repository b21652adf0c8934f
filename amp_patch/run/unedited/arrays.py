"""NumPy arrays in unedited scripts: an array of a low-precision output is FP32, as it is without a level."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch.support.patches import Patches


def install_arrays(patches: Patches, dtype: torch.dtype, applies: Callable[[], bool]) -> None:
    """Make `Tensor.numpy` return FP32 arrays for tensors of `dtype`, and `numpy.asarray` too, which calls it.

    NumPy has no bfloat16, and in an array of float16 the script's own sums would overflow. The array is a copy: a
    write to it does not change the tensor. A float16 tensor that the script itself has cast becomes an FP32 array too,
    since it cannot be distinguished from an output.

    Args:
        dtype: the low-precision type of the level.
        applies: returns whether the script is trained at a level now. If not, `Tensor.numpy` is torch's.
    """
    original = Tensor.numpy

    @functools.wraps(original)
    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        widened = tensor.float() if tensor.dtype is dtype and applies() else tensor
        return original(widened, *args, **kwargs)

    patches.set(Tensor, "numpy", numpy)
