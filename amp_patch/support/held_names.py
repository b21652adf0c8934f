"""Replacement of functions in the places that store them: names of modules, attributes of classes and of modules."""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from amp_patch.support.patches import Patches

# id of a function -> (the function, its replacement). The reference keeps the id from being reused.
Replaced = Mapping[int, tuple[Any, Any]]

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_NEVER = frozenset((*sys.stdlib_module_names, "torch", "functorch", __name__.partition(".")[0])) - {"__main__"}


def replace_in_modules(patches: Patches, replaced: Replaced) -> None:
    """Replace the functions in every module that uses torch, until `patches` are removed.

    The search covers a module's names, the attributes of its classes, and in both places the values of a dict and
    the function of a `functools.partial`. It does not cover keys of dicts, lists and tuples, because code tests
    functions by them (`if function in [...]`), nor what a function has stored (defaults, closures). If user code
    assigns to a replaced place, the removal leaves the user's value there.

    Modules of torch, of amp_patch and of Python's library are skipped. A lazily imported module is searched in its
    present state and not loaded.
    """
    modules = list(sys.modules.items())
    marks = replaced.keys() | {id(torch.Tensor), id(nn.Module)}
    marks |= {id(module) for name, module in modules if name.startswith("torch") and name[5:6] in ("", ".")}
    for name, module in modules:
        if name.partition(".")[0] in _NEVER or not issubclass(type(module), types.ModuleType):
            continue
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")  # `vars` would run a lazy import
        if marks.isdisjoint(map(id, list(names.values()))) or _is_passed_over(names):
            continue
        for key, value in list(names.items()):
            _replace(patches, replaced, names, key, value)
            # `isinstance` would read `__class__`, at which some proxy objects import or compute something.
            if issubclass(type(value), type) and vars(value).get("__module__") == names.get("__name__"):
                _replace_in_class(patches, replaced, value)


def replace_in_attributes(modules: Iterable[nn.Module], replaced: Replaced) -> Patches:
    """Replace functions in the attributes of `modules`, and in dicts and lists among the attributes.

    `remove` of the result restores the functions.
    """
    patches = Patches()
    for attributes in map(vars, modules):
        for name, value in list(attributes.items()):
            _replace(patches, replaced, attributes, name, value)
            for index, item in enumerate(value) if type(value) is list else ():
                _replace(patches, replaced, value, index, item)
    return patches


def _instead(replaced: Replaced, value: Any) -> Any:
    """Return the replacement of `value`, a function or a staticmethod or partial of one; `value` itself without one."""
    if type(value) is functools.partial:
        inner = _instead(replaced, value.func)
        return value if inner is value.func else functools.partial(inner, *value.args, **value.keywords)
    function = value.__func__ if type(value) is staticmethod else value
    if (found := replaced.get(id(function))) is None:
        return value
    return found[1] if function is value else staticmethod(found[1])


def _replace(patches: Patches, replaced: Replaced, items: Any, key: Any, value: Any) -> None:
    """Replace the function `value`, which is `items[key]`; or if it is a dict, the functions among its values."""
    if (new := _instead(replaced, value)) is not value:
        _put(patches, items, key, value, new)
    elif type(value) in _DICTS:
        for inner, item in list(value.items()):
            if (new := _instead(replaced, item)) is not item:
                _put(patches, value, inner, item, new)


def _replace_in_class(patches: Patches, replaced: Replaced, cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if (new := _instead(replaced, value)) is value:
            _replace(patches, replaced, None, name, value)
            continue

        def undo(name: str = name, before: Any = value, new: Any = new) -> None:
            if vars(cls).get(name) is new:
                setattr(cls, name, before)

        with suppress(AttributeError, TypeError):  # a metaclass may refuse the attribute
            patches.apply(functools.partial(setattr, cls, name, new), undo)


def _is_passed_over(names: dict[str, Any]) -> bool:
    """Tell whether `names` belongs to a module of torch, amp_patch or Python, under any name in `sys.modules`."""
    return str(names.get("__name__")).partition(".")[0] in _NEVER


def _put(patches: Patches, items: MutableMapping[Any, Any] | list[Any], key: Any, before: Any, new: Any) -> None:
    """Assign `items[key] = new`; the removal of `patches` restores `before` if the value is still `new`."""

    def undo() -> None:
        try:
            still = items[key] is new
        except (KeyError, IndexError):
            return
        if still:
            items[key] = before

    patches.apply(lambda: items.__setitem__(key, new), undo)
