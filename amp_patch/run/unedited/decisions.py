"""Decisions for a script: arrays of outputs, banned functions and averages of weights are FP32, as without a level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.casts.rules import banned_subscribers
from amp_patch.run.unedited.refusal import where
from amp_patch.support.patches import Patches
from amp_patch.watch.averages import averages_in


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


def report_banned_calls(patches: Patches, say: Callable[[str], None]) -> None:
    """Call `say` once for each banned function (binary_cross_entropy) that runs in FP32, until `patches` are removed.

    The logarithms of low-precision probabilities overflow. A script that calls `initialize` gets an error for such a
    call, unless it passes `allow_banned=True`.
    """
    seen: set[str] = set()

    def runs(name: str) -> None:
        if name not in seen:
            seen.add(name)
            say(
                f"{name} runs in FP32{where()}, and so does torch.sigmoid, since logarithms of low-precision "
                "probabilities overflow; a script that calls initialize gets the same with allow_banned=True, and "
                "without it an error for low-precision probabilities"
            )

    patches.apply(lambda: banned_subscribers.append(runs), lambda: banned_subscribers.remove(runs))


def kept_averages(
    models: list[nn.Module], trained: Iterable[Tensor], say: Callable[[str], None]
) -> Callable[[str, nn.Module], bool]:
    """Return the function for `initialize(keep_fp32=...)`, which decides for each module whether it stays FP32.

    It returns True for a module that averages `trained` weights (EMA) inside the module that the script calls, as in
    timm's train.py. `say` is called with a message for each average.
    """
    kept = averages_in(models, {id(param) for param in trained})
    for name in kept.values():
        say(f"{name!r} stays FP32: it is built like a trained module, and no optimizer trains its weights")
    return lambda _, module: module in kept
