"""Notification of a recorder when a forward of a trained model begins, eager or compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from amp_patch.diagnose.recording import compiled_forwards
from amp_patch.support.forward_hook import ForwardHook


class ForwardHooks:
    """Hooks before the forwards of models, registered until `remove`.

    Args:
        begins: called before a forward, with the model and its arguments.
    """

    def __init__(self, begins: Callable[[nn.Module, Any, Any], None]) -> None:
        self._begins = begins
        self._handles: list[Any] = []
        self._hooked: list[weakref.ref[nn.Module]] = []
        # A compiled model -> the hooked model that it is or has inside; None where it has none.
        self._hooked_inside = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]()
        compiled_forwards.add(self._compiled_begins)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Register a hook on each of these models, unless this object has registered one on it already."""
        for model in models:
            compiled_forwards.watch(model)
            if not self._is_hooked(model):
                self._hooked.append(weakref.ref(model))
                self._hooked_inside.clear()
                hook = ForwardHook(self._begins)
                self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks."""
        compiled_forwards.remove(self._compiled_begins)
        for handle in self._handles:
            handle.remove()

    def _is_hooked(self, model: nn.Module) -> bool:
        return any(ref() is model for ref in self._hooked)

    def _compiled_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Call `begins` for the call of a compiled model, if it is a hooked model or contains one; else do nothing."""
        if model not in self._hooked_inside:
            # `model` may be hooked itself, or be around a hooked one: DistributedDataParallel, a module with the loss.
            self._hooked_inside[model] = next((weakref.ref(m) for m in model.modules() if self._is_hooked(m)), None)
        ref = self._hooked_inside[model]
        if ref is not None and (trained := ref()) is not None:
            self._begins(trained, args, kwargs)
