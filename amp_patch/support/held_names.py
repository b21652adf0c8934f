"""Replacement of functions in every place that references them: module names, defaults, closures, attributes."""

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

# Modules in which the last search found nothing: name -> (ids of the wanted functions, ids of the module's values).
_found_nothing: dict[str, tuple[frozenset[int], tuple[int, ...]]] = {}
_NEVER = frozenset((*sys.stdlib_module_names, "torch", "functorch", __name__.partition(".")[0])) - {"__main__"}


def replace_in_modules(patches: Patches, replaced: Replaced) -> None:
    """Replace the functions in every module that uses torch, until `patches` are removed.

    The search covers a module's names, the attributes of its classes, functools.partial objects, the defaults and
    closures of its functions and methods, and in each of these places the values of a dict. It does not cover keys of
    dicts, lists and tuples, because code tests functions by them (`if function in [...]`). If user code assigns to a
    replaced place, the removal leaves the user's value there.

    Modules of torch, of amp_patch and of Python's library are skipped. A lazily imported module is searched in its
    present state and not loaded. With a few large libraries a search takes a tenth of a second, and a notebook repeats
    it at each `initialize` after a `restore`. So a module in which nothing was found is skipped the next time if its
    names still have the same values.
    """
    wanted = frozenset(replaced)
    holder = _Holder(patches, replaced)
    modules = list(sys.modules.items())
    marks = replaced.keys() | {id(torch.Tensor), id(nn.Module)}
    marks |= {id(module) for name, module in modules if name.startswith("torch") and name[5:6] in ("", ".")}
    for name, module in modules:
        if name.partition(".")[0] in _NEVER or not issubclass(type(module), types.ModuleType):
            continue
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")  # `vars` would run a lazy import
        if marks.isdisjoint(map(id, list(names.values()))) or _is_passed_over(names):
            continue
        known = wanted, tuple(map(id, list(names.values())))
        if name != "__main__" and _found_nothing.get(name) == known:
            continue
        before = len(patches)
        holder.names(names)
        if len(patches) == before:
            _found_nothing[name] = known


def replace_in_attributes(modules: Iterable[nn.Module], replaced: Replaced) -> Patches:
    """Replace functions in the attributes of `modules`, and in dicts and lists among the attributes.

    `remove` of the result restores the functions.
    """
    patches = Patches()
    holder = _Holder(patches, replaced)
    for module in modules:
        holder.attributes(vars(module))
    return patches


class _Holder:
    """A search that replaces the functions in one object after another."""

    def __init__(self, patches: Patches, replaced: Replaced) -> None:
        self._patches, self._replaced = patches, replaced
        self._seen: dict[int, Any] = {}  # functions, partials and classes that were searched, by id

    def names(self, names: dict[str, Any]) -> None:
        """Search a module's names and the attributes of its classes."""
        for name, value in list(names.items()):
            self._item(names, name, value)
            # `isinstance` would read `__class__`, at which some proxy objects import or compute something.
            if issubclass(type(value), type) and vars(value).get("__module__") == names.get("__name__"):
                self._class(value)

    def attributes(self, attributes: dict[str, Any]) -> None:
        """Search an object's attributes, and the dicts and lists among them."""
        for name, value in list(attributes.items()):
            self._item(attributes, name, value)
            if type(value) is list:
                for index, item in enumerate(value):
                    if (new := self._instead(item)) is not item:
                        _put(self._patches, value, index, item, new)
                    self._inside(item)

    def _instead(self, value: Any) -> Any:
        if (found := self._replaced.get(id(value))) is not None:
            return found[1]
        if type(value) is staticmethod and (found := self._replaced.get(id(value.__func__))) is not None:
            return staticmethod(found[1])
        return value

    def _item(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        if (new := self._instead(value)) is not value:
            _put(self._patches, mapping, key, value, new)
            return
        self._inside(value)

    def _inside(self, value: Any) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._function(value)
        elif kind is functools.partial:
            self._partial(value)
        elif kind is staticmethod or kind is classmethod:
            self._inside(value.__func__)
        elif kind is property:
            self._inside(value.fget)
        elif kind in _DICTS:
            for key, item in list(value.items()):
                if (new := self._instead(item)) is not item:
                    _put(self._patches, value, key, item, new)
                elif type(item) not in _DICTS:
                    self._inside(item)

    def _class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        for name, value in list(vars(cls).items()):
            if (new := self._instead(value)) is not value:
                with suppress(AttributeError, TypeError):  # a metaclass may refuse the attribute
                    self._set_in_class(cls, name, value, new)
            else:
                self._inside(value)

    def _set_in_class(self, cls: type, name: str, before: Any, new: Any) -> None:
        def undo() -> None:
            if vars(cls).get(name) is new:
                setattr(cls, name, before)

        self._patches.apply(lambda: setattr(cls, name, new), undo)

    def _function(self, function: Any) -> None:
        if not (function.__defaults__ or function.__closure__ or function.__kwdefaults__):
            return  # quickly, because a process has about ten thousand functions, most without defaults and closure
        if id(function) in self._seen or _is_passed_over(function.__globals__):
            return
        self._seen[id(function)] = function
        defaults = function.__defaults__ or ()
        instead = tuple(map(self._instead, defaults))
        if any(new is not old for new, old in zip(instead, defaults, strict=True)):
            self._patches.set(function, "__defaults__", instead)
        for name, value in list((function.__kwdefaults__ or {}).items()):
            if (new := self._instead(value)) is not value:
                _put(self._patches, function.__kwdefaults__, name, value, new)
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if (new := self._instead(held)) is not held:
                self._patches.set_cell(cell, new)
            else:
                self._inside(held)

    def _partial(self, partial: Any) -> None:
        if id(partial) in self._seen:
            return
        self._seen[id(partial)] = partial
        function, *rest = before = partial.__reduce__()[2]
        if (new := self._instead(function)) is not function:
            # In place, because other objects may reference this partial.
            self._patches.apply(lambda: partial.__setstate__((new, *rest)), lambda: partial.__setstate__(before))
        else:
            self._inside(function)


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
