"""What an unedited script exports of a model in training: torch gets a copy of it in FP32, of its own class.

`torch.jit.script` compiles a class by its source, which a model's weights in low precision do not suit, and
`torch.export` and `torch.package` write these weights down. What is exported before the training begins is as it was.
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
    """While it is installed torch exports FP32 copies in place of models in training, and of parts of them.

    Args:
        models: gives the models that are trained now at a level that changes something.
        plainly: a context in which the classes of modules are as the script has made them.
    """

    def __init__(
        self, models: Callable[[], list[nn.Module]], plainly: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._models = models
        self._plainly = plainly

    def install(self, patches: Patches) -> None:
        """Replace functions of torch, until `patches` are removed."""
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
        """`original`, whose argument at this `place`, or of this name, is what it exports."""

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
                # torch.jit looks names up in the frame that called it, which is one further away here.
                return original(self._copied(obj), optimize, _frames_up + 1, *args, **kwargs)

        return script

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return value
        trained = {id(param) for model in self._models() for param in model.parameters()}
        if any(id(param) in trained for param in value.parameters()):
            return fp32_copies.fp32_copy(value)
        return value
