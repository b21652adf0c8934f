"""What an unedited script makes NumPy arrays of: its outputs are FP32 there, as without a level."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch.support.patches import Patches


def install_arrays(patches: Patches, dtype: torch.dtype, applies: Callable[[], bool]) -> None:
    """Have `Tensor.numpy`, and `numpy.asarray`, which calls it, give FP32 arrays of tensors of `dtype`.

    NumPy has no bfloat16, and in an array of float16 a script's own sums would overflow. What is written into such an
    array does not reach the tensor. A float16 tensor that the script itself has cast gives FP32 too: nothing tells it
    from an output.

    Args:
        dtype: the low-precision type of the level.
        applies: whether the script is trained at a level now; where not, arrays are torch's.
    """
    original = Tensor.numpy

    @functools.wraps(original)
    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        widened = tensor.float() if tensor.dtype is dtype and applies() else tensor
        return original(widened, *args, **kwargs)

    patches.set(Tensor, "numpy", numpy)
