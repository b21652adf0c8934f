"""Advice on layer sizes, from one forward of each recorded model. Later steps run without hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amp_patch.diagnose import products, shapes
from amp_patch.diagnose.shapes import Product
from amp_patch.support.compiled import eager_only

DEVICES = ("cuda",)  # on CPUs such sizes saved from nothing to a fifth of a step, without a pattern (measured in 2024)


class SizeAdvice:
    """Hooks on the first forward of each model, removed after it.

    They read sizes and no values: they neither compute nor sync.

    Args:
        give: receives the lines of `shapes.advice`, if there are any, when the forward has ended.
    """

    def __init__(self, give: Callable[[list[str]], None]) -> None:
        self._give = give
        self._seen = weakref.WeakSet[nn.Module]()
        self._handles: list[Any] = []
        self._products: list[Product] = []

    def leave(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    @eager_only
    def forward_begins(self, model: nn.Module) -> None:
        """If this is the first forward of `model`, hook its modules until the forward ends.

        Do nothing if a hook would cost a recompilation, or while the forward of another model is hooked. Not called for
        compiled code.
        """
        if model in self._seen or self._handles:
            return
        modules = [*model.named_modules()]
        if any(_hooks_cost(module) for _, module in modules):
            self._seen.add(model)
            return
        self._products = []
        for name, module in modules:
            self._handles.append(module.register_forward_hook(self._noting(name)))
        self._handles.append(model.register_forward_hook(self._ending(weakref.ref(model)), always_call=True))

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():
                self._products += products.of_module(name, module, args, output)

        return note

    def _ending(self, model: weakref.ref[nn.Module]) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, output: Any) -> None:
            if module is model():  # the replicas of DataParallel share their hooks
                self.leave()
                if self._products:  # if there are none, an exception has ended the forward: the next one is hooked
                    self._seen.add(module)
                if lines := shapes.advice(self._products):
                    self._give(lines)

        return end


def _hooks_cost(module: nn.Module) -> bool:
    """Tell whether a hook on this module would make torch recompile it, or would be refused by torch."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    return compiled or isinstance(module, torch.jit.ScriptModule)
