"""Who holds a function that is replaced: modules by `from torch import einsum`, defaults, closures, attributes."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from amp_patch.support.patches import Patches

# id of a function -> the function (held: the id stays its own), and what is to be held in its place.
Replaced = Mapping[int, tuple[Any, Any]]

# Of modules in which nothing was found: the name -> the functions that were looked for, and the names' values, by id.
_found_nothing: dict[str, tuple[frozenset[int], tuple[int, ...]]] = {}
_NEVER = frozenset((*sys.stdlib_module_names, "torch", "functorch", __name__.partition(".")[0])) - {"__main__"}


def replace_in_modules(patches: Patches, replaced: Replaced) -> None:
    """Replace the functions wherever a module that uses torch holds them, until `patches` are removed.

    That is in its names, the values of its dicts, the attributes of its classes, in functools.partial, and in the
    defaults and closures of its functions and methods. Whoever assigns to such a place meanwhile keeps what was
    assigned. Keys, lists and tuples stay: functions are compared by them. Modules of torch, of amp_patch and of
    Python's library are passed over; one that is imported lazily is not touched off, and has what it has by now. So are
    those that held nothing the last time, if their names are the same objects still: in a process with a few large
    libraries the search takes a tenth of a second, and a notebook makes it at each `initialize` after a `restore`.
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
    """Replace the functions in attributes of these modules, their dicts and lists; `remove` puts them back."""
    patches = Patches()
    holder = _Holder(patches, replaced)
    for module in modules:
        holder.attributes(vars(module))
    return patches


class _Holder:
    """Replaces the functions in one thing after another."""

    def __init__(self, patches: Patches, replaced: Replaced) -> None:
        self._patches, self._replaced = patches, replaced
        self._seen: dict[int, Any] = {}  # functions, partials and classes that are done, by id

    def names(self, names: dict[str, Any]) -> None:
        """A module's names, and what its classes have."""
        for name, value in list(names.items()):
            self._item(names, name, value)
            # Not isinstance: that asks proxies for their class, which some import or compute first.
            if issubclass(type(value), type) and vars(value).get("__module__") == names.get("__name__"):
                self._class(value)

    def attributes(self, attributes: dict[str, Any]) -> None:
        """An object's attributes, and its dicts and lists."""
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
        if type(value) is dict:
            for inner, item in list(value.items()):
                if (new := self._instead(item)) is not item:
                    _put(self._patches, value, inner, item, new)
                else:
                    self._inside(item)

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
            return  # most have none, and a process has some ten thousand
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
            # In place: others may hold this very object.
            self._patches.apply(lambda: partial.__setstate__((new, *rest)), lambda: partial.__setstate__(before))
        else:
            self._inside(function)


def _is_passed_over(names: dict[str, Any]) -> bool:
    """Whether these are the names of a module of torch's, ours or Python's, whatever `sys.modules` calls it."""
    return str(names.get("__name__")).partition(".")[0] in _NEVER


def _put(patches: Patches, items: MutableMapping[Any, Any] | list[Any], key: Any, before: Any, new: Any) -> None:
    """`items[key] = new` until `patches` are removed, unless something else was put there meanwhile."""

    def undo() -> None:
        try:
            still = items[key] is new
        except (KeyError, IndexError):
            return
        if still:
            items[key] = before

    patches.apply(lambda: items.__setitem__(key, new), undo)
