"""FP32 copies of models, for EMA, export or evaluation. The casts of the process do not act in them.

Outside of models the casts of the newest O1 training act in every call, so they would act in an FP32 copy too. While
such casts are installed, the modules of the copy get a generated class whose methods enter a region without casts. At
other times they have their plain classes.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import parametrize

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.masters.masters import links_of, master_of, settle
from amp_patch.model import forward as model_forward
from amp_patch.support import generated_class
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Installation

Module = TypeVar("Module", bound=nn.Module)

_NEWOBJ: Any = copyreg.__newobj__  # type: ignore[attr-defined]
_copies: WeakSet[nn.Module] = WeakSet()
_installation = Installation()


def fp32_copy(model: Module) -> Module:
    """Return an FP32 deep copy of `model` without any trace of amp_patch, for EMA, export or evaluation.

    Weights have the values of their masters; weights without a master are upcast. Buffers have their values from before
    the cast, if nothing has written them since.

    The casts of an O1 or O4 training act in all calls outside of models, but not in the copy: the copy and its parts
    run, trace and export in FP32. (One exception: if user code calls a layer of torch inside the copy directly, the
    casts act in that call.) While such a training lives, the copy, its parts and their deepcopies have generated
    classes. Pickles always contain the plain classes. Regions that the caller enters around the copy, `amp.autocast` or
    the forward of a model, act in it as in any module.
    """
    settle(links_of(set(model.parameters())))
    plain = copy.deepcopy(model)
    _unshield(plain)
    model_forward.to_plain_fp32(plain)
    with torch.no_grad():
        # `model` may be a submodule of a training's model. Only the whole model gives its copies FP32 values.
        for copied, param in zip(plain.parameters(), model.parameters(), strict=True):
            master = master_of(param)
            if master is not None:
                copied.copy_(master)
    hold_casts_off(plain)
    return plain


def hold_casts_off(model: nn.Module) -> None:
    """Run `model`, which belongs to no training, without the casts of O1 trainings, like a result of `fp32_copy`."""
    _copies.add(model)
    if casts_state.default() is not None:
        shield()


class FP32Copy(Generated):
    """The methods of a module in an FP32 copy, run without casts unless the caller is in a region that casts."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        methods = {name: _without_casts(name, function) for name, function in generated_class.own_methods(base)}
        return {**methods, "forward": _without_casts("forward", base.forward)}  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        # A pickle of the plain class, because amp_patch may be missing at the load.
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


def shield() -> None:
    """Give all FP32 copies generated classes, until `restore`: the casts of O1 trainings do not act in them."""
    _installation.install(lambda patches: patches.on_remove(_unshield_all))
    for plain in list(_copies):
        for module in plain.modules():
            if module is plain or not _is_known_by_its_class(module):
                _give(module)


def _unshield_all() -> None:
    for plain in list(_copies):
        _unshield(plain)


def _unshield(plain: nn.Module) -> None:
    """Give the modules in an FP32 copy their own classes back."""
    for module in plain.modules():
        if isinstance(module, FP32Copy) and "_amp_base" in vars(type(module)):
            generated_class.take(module)


def _is_known_by_its_class(module: nn.Module) -> bool:
    """Tell whether tools test for the class of `module`: True for torch's layers, parametrized and scripted modules."""
    own = type(module).__module__.partition(".")[0] == "torch" and next(module.children(), None) is None
    return own or parametrize.is_parametrized(module) or isinstance(module, torch.jit.ScriptModule)


def _give(module: Any) -> None:
    if not isinstance(module, Generated):  # a Generated module belongs to a training
        generated_class.give(module, FP32Copy)


def _without_casts(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if regions.is_suspended(function):
        return function  # the code that waits for it would run in the region too

    @functools.wraps(function)
    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._amp_base, name)
        if is_dynamo_compiling() or casts_state.outside():
            with regions.region(None):
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return plain
