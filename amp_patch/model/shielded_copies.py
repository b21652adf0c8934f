"""FP32 copies of models are shielded from the casts of the process.

Outside of models the casts of the newest O1 training act in whatever is called, and would act in such a copy. While
there are such casts, the copy's modules have a generated class whose methods enter a region without casts. At other
times they have their plain classes.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.support import generated_class
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Installation

_NEWOBJ: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_copies: WeakSet[nn.Module] = WeakSet()
_installation = Installation()


class FP32Copy(Generated):
    """The methods of a module in an FP32 copy: no casts, unless the caller is in a region of its own that casts."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        methods = {name: _without_casts(name, function) for name, function in generated_class.own_methods(base)}
        return {**methods, "forward": _without_casts("forward", base.forward)}  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        # A pickle of the plain class: amp_patch may be missing where the pickle is loaded.
        _, (_, _, function, args), *rest = reduced
        if function is _NEWOBJ:  # pickle refuses `__newobj__` of another class than the instance's
            function = args[0].__new__
        return (function, args, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(super(), "__deepcopy__", None)
        reconstruct: Any = copy._reconstruct  # type: ignore[attr-defined]
        twin = reconstruct(self, memo, *self.__reduce_ex__(4)) if own is None else own(memo)
        _give(twin)
        _copies.add(twin)
        return twin

    def __prepare_scriptable__(self) -> Any:
        # torch.jit.script calls this for the object to compile: a module of the plain class.
        base: Any = self._amp_base
        twin = base.__new__(base)
        vars(twin).update(vars(self))
        vars(twin)["_modules"] = dict(vars(self)["_modules"])
        prepare = getattr(twin, "__prepare_scriptable__", None)
        return twin if prepare is None else prepare()


def note(plain: nn.Module, shielded: bool) -> None:
    """Remember `plain` as an FP32 copy, and shield it if there are casts to hold off now (`shielded`)."""
    _copies.add(plain)
    if shielded:
        shield()


def shield() -> None:
    """Hold the casts of the process off all FP32 copies, until `restore`."""
    _installation.install(lambda patches: patches.on_remove(_unshield))
    for plain in list(_copies):
        for module in plain.modules():
            if module is plain or not _is_known_by_its_class(module):
                _give(module)


def _unshield() -> None:
    """Give all FP32 copies their plain classes back."""
    for plain in list(_copies):
        for module in plain.modules():
            if isinstance(module, FP32Copy) and "_amp_base" in vars(type(module)):
                generated_class.take(module)


def _is_known_by_its_class(module: nn.Module) -> bool:
    """Whether tools look for this very class: torch's own layers (quantization, torch.fx), parametrized, scripted."""
    own = type(module).__module__.partition(".")[0] == "torch" and next(module.children(), None) is None
    return own or parametrize.is_parametrized(module) or isinstance(module, torch.jit.ScriptModule)


def _give(module: Any) -> None:
    if not isinstance(module, Generated):  # a Generated module belongs to a training
        generated_class.give(module, FP32Copy)


def _without_casts(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return function  # other tasks of the coroutine's thread would run in a region
    if inspect.isgeneratorfunction(function):
        return regions.region(None)(function)

    @functools.wraps(function)
    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._amp_base, name)
        if is_dynamo_compiling() or casts_state.outside():
            with regions.region(None):
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return plain
