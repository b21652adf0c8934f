"""Averages of the weights (EMA) inside the module that a script calls, as in timm's train.py: they stay FP32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from amp_patch.watch.averages import averages_in


def kept_averages(
    models: list[nn.Module], trained: Iterable[Tensor], say: Callable[[str], None]
) -> Callable[[str, nn.Module], bool]:
    """Return the function for `initialize(keep_fp32=...)`, which decides for each module whether it stays FP32.

    It returns True for a module that averages `trained` weights. `say` is called with a message for each average.
    """
    kept = averages_in(models, {id(param) for param in trained})
    for name in kept.values():
        say(f"{name!r} stays FP32: it is built like a trained module, and no optimizer trains its weights")
    return lambda _, module: module in kept
