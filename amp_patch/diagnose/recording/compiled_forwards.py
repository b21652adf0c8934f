"""Notification of recorders when a compiled model's forward begins: torch calls no hook before compiled code.

While a listener is registered, `OptimizedModule.__call__` (of `torch.compile(model)`), `Module.compile` and the
compiled calls that it stored are replaced by functions that notify the listener first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from amp_patch.support.forward_hook import CompiledForward, before_compiled
from amp_patch.support.patches import Installation, Patches

Listener = Callable[[nn.Module, Any, Any], None]  # called with the compiled model, and its arguments

_listeners: list[Listener] = []
_installation = Installation(of_process=True)  # uninstalled with the last listener
_patched: list[Any] = []  # holds Dynamo's module once that is patched


def add(listener: Listener) -> None:
    """Notify `listener` of the forwards of the compiled models that `watch` received."""
    with _installation.lock:
        _listeners.append(listener)


def remove(listener: Listener) -> None:
    """Stop notifying `listener`; after the last one, undo all replacements."""
    with _installation.lock:
        _listeners.remove(listener)
        if not _listeners:
            _installation.uninstall()


def watch(model: nn.Module) -> None:
    """Notify listeners of forwards of `model` once it is compiled, by `torch.compile` or its own `compile`."""
    _patch_dynamo()
    _replace_call(model)


def _patch_dynamo() -> None:
    # torch.optim imports torch._dynamo.eval_frame: while the module is missing no model is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or dynamo in _patched:
        return
    optimized, compile = dynamo.OptimizedModule, nn.Module.compile

    @functools.wraps(compile)
    def compile_and_watch(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile(self, *args, **kwargs)
        _replace_call(self)

    def replace(patches: Patches) -> None:
        patches.set(optimized, "__call__", before_compiled(optimized.__call__, _call_listeners))
        patches.set(nn.Module, "compile", compile_and_watch)
        patches.apply(lambda: _patched.append(dynamo), _patched.clear)

    _installation.add(replace)


def _replace_call(model: nn.Module) -> None:
    """Replace the compiled call that `model.compile()` has stored by one that notifies listeners first.

    The replacement ends when the last listener is removed.
    """
    compiled = model._compiled_call_impl
    if compiled is None or isinstance(compiled, CompiledForward):
        return
    ref = weakref.ref(model)

    def undo() -> None:
        model = ref()
        if model is not None and isinstance(found := model._compiled_call_impl, CompiledForward):
            model._compiled_call_impl = found.compiled

    ours = CompiledForward(model, compiled, _call_listeners)
    # Not by `patches.set`: it would keep the model alive until the last listener is removed.
    _installation.add(lambda patches: patches.apply(lambda: setattr(model, "_compiled_call_impl", ours), undo))


def _call_listeners(model: nn.Module, args: Any, kwargs: Any) -> None:
    for listener in tuple(_listeners):
        listener(model, args, kwargs)
