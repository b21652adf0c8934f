"""Notification of a recorder when a forward of a trained model begins, eager or compiled.

Torch calls no hook before compiled code. While a listener is registered, `OptimizedModule.__call__` (of
`torch.compile(model)`), `Module.compile` and the compiled calls that it stored are replaced by functions that notify
the listener first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from amp_patch.support.forward_hook import CompiledForward, ForwardHook, before_compiled
from amp_patch.support.patches import Installation, Patches

Listener = Callable[[nn.Module, Any, Any], None]  # called with the compiled model, and its arguments

_listeners: list[Listener] = []
_installation = Installation(of_process=True)  # uninstalled with the last listener
_patched: list[Any] = []  # holds Dynamo's module once that is patched


class ForwardHooks:
    """Hooks before the forwards of models, registered until `remove`.

    Args:
        begins: called before a forward, with the model and its arguments.
    """

    def __init__(self, begins: Listener) -> None:
        self._begins = begins
        self._handles: list[Any] = []
        self._hooked = weakref.WeakSet[nn.Module]()
        with _installation.lock:
            _listeners.append(self._compiled_begins)

    def add(self, models: Iterable[nn.Module]) -> None:
        """Register a hook on each of these models, unless this object has registered one on it already."""
        for model in models:
            _patch_dynamo()
            _replace_call(model)
            if model not in self._hooked:
                self._hooked.add(model)
                self._handles.append(model.register_forward_pre_hook(ForwardHook(self._begins), with_kwargs=True))

    def remove(self) -> None:
        """Remove all hooks, and with the last listener undo all replacements."""
        with _installation.lock:
            _listeners.remove(self._compiled_begins)
            if not _listeners:
                _installation.uninstall()
        for handle in self._handles:
            handle.remove()

    def _compiled_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Call `begins` for the call of a compiled model, if it is a hooked model or contains one; else do nothing.

        Around a hooked model may be DistributedDataParallel, or a module with the loss.
        """
        if (trained := next((m for m in model.modules() if m in self._hooked), None)) is not None:
            self._begins(trained, args, kwargs)


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
