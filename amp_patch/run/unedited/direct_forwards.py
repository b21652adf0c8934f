"""Direct calls of `module.forward(x)`, which bypass `nn.Module.__call__`.

For example, layers that have an optimizer each are trained like this. A direct call is detected only for a module that
itself owns parameters of an optimizer: the `forward` of its class is wrapped. If a module owns none, its children are
called in the usual way and become the models.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support.generated_class import Generated, base_class
from amp_patch.support.patches import Patches

Outermost = Callable[[nn.Module, Callable[[], Any]], Any]


class DirectForwards:
    """Reports direct calls of `forward` while it is installed.

    Args:
        outermost: receives the module and its call, and runs the call. If no other module's call is running, it may
            begin a level first.
    """

    def __init__(self, outermost: Outermost) -> None:
        self._outermost = outermost
        # id of a module that has registered a parameter -> the module. Weak references to the parameters themselves
        # would make `torch.utils.swap_tensors` refuse them.
        self._owners = weakref.WeakValueDictionary[int, nn.Module]()
        # A class -> its own forward, and the wrapper that reports direct calls.
        self._wrapped: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self._patches = Patches()

    def install(self, patches: Patches) -> None:
        """Record each module that registers a parameter, for `watch`, until `patches` are removed."""
        self._patches = patches
        patches.set(nn.Module, "register_parameter", self._registering(nn.Module.register_parameter))
        patches.on_remove(self._wrapped.clear)

    def _registering(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def register_parameter(module: nn.Module, name: str, param: Tensor | None) -> None:
            original(module, name, param)
            if param is not None:
                self._owners[id(module)] = module

        return register_parameter

    def watch(self, params: Iterable[Tensor]) -> None:
        """Wrap `forward` in the class of each module that owns one of `params`, the parameters of an optimizer."""
        held = {id(param) for param in params}
        for module in list(self._owners.values()):
            if any(id(param) in held for param in module._parameters.values()):
                self._wrap(base_class(module))

    def _wrap(self, kind: type) -> None:
        owner = next((cls for cls in kind.__mro__ if "forward" in vars(cls)), nn.Module)
        if owner in self._wrapped or owner.__module__.partition(".")[0] == "torch":
            return
        original = vars(owner)["forward"]
        if not callable(original) or issubclass(kind, torch.jit.ScriptModule):
            return

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or isinstance(module, Generated):
                return original(module, *args, **kwargs)

            def call() -> Any:  # a level that begins in this call gives the module another forward
                given = isinstance(module, Generated)
                return type(module).forward(module, *args, **kwargs) if given else original(module, *args, **kwargs)

            return self._outermost(module, call)

        self._wrapped[owner] = original, forward
        self._patches.set(owner, "forward", forward)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the `forward` of the classes in the body: torch.jit compiles the function that it finds there."""
        wrapped = [*self._wrapped.items()]
        try:
            for owner, (original, _) in wrapped:
                owner.forward = original  # type: ignore[attr-defined]
            yield
        finally:
            for owner, (_, ours) in wrapped:
                owner.forward = ours  # type: ignore[attr-defined]
