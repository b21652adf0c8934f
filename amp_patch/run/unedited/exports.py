"""Exports, by an unedited script, of a model in training.

Torch receives an FP32 copy of the model, of the script's own class, without the class that amp_patch generates.

Without this copy, `torch.jit.script` would compile the class's source, which does not expect low-precision weights, and
`torch.export` and `torch.package` would store these weights. A model that is exported before its training begins is
not copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from amp_patch.model import fp32_copies
from amp_patch.support.imports import when_imported
from amp_patch.support.patches import Patches


class Exports:
    """Replaces torch's export functions by ones that export FP32 copies of models in training, and of their children.

    Args:
        models: returns the models that are trained at a level now.
        plainly: returns a context in which the script's classes have their own `forward`, not the wrapper of
            `DirectForwards`: `torch.jit.script` compiles the function that it finds.
    """

    def __init__(
        self, models: Callable[[], list[nn.Module]], plainly: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._models = models
        self._plainly = plainly

    def install(self, patches: Patches) -> None:
        """Replace the export functions of torch, until `patches` are removed."""
        patches.set(torch.jit, "script", self._scripting(torch.jit.script))
        for owner, name, place, named in (
            (torch.jit, "trace", 0, "func"),
            (torch.export, "export", 0, "mod"),
            (torch.package.PackageExporter, "save_pickle", 3, "obj"),
        ):
            patches.set(owner, name, self._exporting(getattr(owner, name), place, named))
        active = [True]
        patches.on_remove(active.clear)

        def install_late(onnx: Any) -> None:
            if active:
                patches.set(onnx, "export", self._exporting(onnx.export, 0, "model"))

        when_imported("torch.onnx", install_late)

    def _exporting(self, original: Callable[..., Any], place: int, named: str) -> Callable[..., Any]:
        """Return a function that copies the module to export, and calls torch's `original` with the copy.

        The module is the argument at index `place`, or with the keyword `named`.
        """

        @functools.wraps(original)
        def export(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], self._copied(args[place]), *args[place + 1 :])
            elif named in kwargs:
                kwargs[named] = self._copied(kwargs[named])
            return original(*args, **kwargs)

        return export

    def _scripting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
            with self._plainly():
                # torch.jit looks names up in the frame of its caller: with this wrapper that is one frame further up.
                return original(self._copied(obj), optimize, _frames_up + 1, *args, **kwargs)

        return script

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return value
        trained = {id(param) for model in self._models() for param in model.parameters()}
        if any(id(param) in trained for param in value.parameters()):
            return fp32_copies.fp32_copy(value)
        return value
