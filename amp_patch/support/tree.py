"""Walks over nested containers of tensors, which keep the types of containers and the identity of unchanged ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

TensorFn = Callable[[Tensor], Any]
ObjectFn = Callable[[Any], Any]


def map_tensors(fn: TensorFn, value: Any) -> Any:
    """Apply `fn` to every tensor in `value` and return a structure of the same types.

    The walk enters tuples (also named tuples, `torch.return_types` and `PackedSequence`), lists, dicts,
    `collections.UserDict`, dataclasses and their subclasses, at any depth. A changed container is copied, if possible
    without a call of its constructor. If `fn` returned every tensor of a container unchanged (`is`), the container
    itself is returned, so that a callee's edits reach the caller. In a `PackedSequence` only `data` is walked, because
    its other fields are an index. All other objects, modules included, are returned unchanged.
    """
    return _map(value, fn, lambda other: other)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, in the order of the walk of `map_tensors`."""
    return _noted(map_tensors, value)


def cast_floats(
    value: Any,
    dtype: torch.dtype,
    only: Collection[torch.dtype] | None = None,
    to: Callable[[Tensor, torch.dtype], Tensor] = lambda tensor, dtype: tensor.to(dtype),
) -> Any:
    """Cast the floating-point tensors in `value` to `dtype`, through autograd; `map_tensors` defines the walk.

    Integer, boolean and complex tensors are left alone. If `only` is given, so are floating-point tensors of other
    dtypes. A tensor that occurs twice is cast once, and both places reference the result. `to` casts a tensor.

    An object with a method `.to` that is no container, tensor or module (a user's batch class) is replaced by
    `object.to(dtype)`, as in Apex. If that raises TypeError, or if an object of a user's class holds tensors in
    attributes (PyTorch Geometric's `Data`, a `SimpleNamespace`), a copy with cast attributes replaces the object. An
    object that cannot be copied is left alone.
    """
    if isinstance(value, Tensor):  # the common case: no walk
        found = value.dtype
        if found is dtype or not found.is_floating_point or (only is not None and found not in only):
            return value
        return to(value, dtype)
    done: dict[int, Tensor] = {}  # keyed by id: `value` keeps the tensors alive

    def cast(tensor: Tensor) -> Tensor:
        found = tensor.dtype
        if found is dtype or not found.is_floating_point or (only is not None and found not in only):
            return tensor
        if is_dynamo_compiling():  # `id` would guard on this very tensor object
            return to(tensor, dtype)
        if id(tensor) not in done:
            done[id(tensor)] = to(tensor, dtype)
        return done[id(tensor)]

    def converted(other: Any) -> Any:
        if callable(getattr(other, "to", None)):
            try:
                return other.to(dtype)
            except TypeError:  # `.to` takes something else, for instance a device only
                pass
        return None

    return _map_attributes(value, cast, converted)


def batch_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, also those in attributes of objects of a user's class, as `cast_floats` finds."""
    return _noted(lambda note, value: _map_attributes(value, note, lambda other: None), value)


def _noted(walk: Callable[[TensorFn, Any], Any], value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    walk(note, value)
    return found


def _map_attributes(value: Any, fn: TensorFn, converted: ObjectFn) -> Any:
    """Do `map_tensors`, also in the attributes of objects of a user's class that `converted` returns None for."""
    return _map(value, fn, functools.partial(_enter, fn, converted, []))


def _enter(fn: TensorFn, converted: ObjectFn, inside: list[Any], other: Any) -> Any:
    """Return `other`, no container, as `_map_attributes` maps it; `inside` has the objects that enclose it."""
    if isinstance(other, (nn.Module, type)):
        return other
    if (new := converted(other)) is not None:
        return new
    if is_dynamo_compiling() or not _has_attributes(other) or len(inside) == _DEEP or _is_among(other, inside):
        return other
    # No closure that calls itself: such a cycle would hold `fn`, and the tensors of its calls, until a collection.
    return _object(other, fn, functools.partial(_enter, fn, converted, [*inside, other]))


def edited_places(given: Any, passed: Any) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Yield pairs of dicts (of `given`, of its cast copy `passed`), so that the caller can copy a callee's edits back.

    If `given` is a dict, the one pair is `given` and `passed` themselves; dicts inside of `given` are not searched. If
    `given` is another object, the pairs are the `__dict__` of both, and the pairs of their attributes.
    """
    if isinstance(given, dict):
        yield given, passed
    elif not isinstance(given, (Tensor, tuple, list)) and type(given) is type(passed) and hasattr(given, "__dict__"):
        mine, copied = vars(given), vars(passed)
        yield mine, copied
        for name, value in list(mine.items()):
            if name in copied and copied[name] is not value and type(copied[name]) is type(value):
                yield from edited_places(value, copied[name])


def _map(value: Any, fn: TensorFn, other: ObjectFn) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        if isinstance(value, PackedSequence):
            data = _map(value.data, fn, other)
            return value if data is value.data else value._replace(data=data)
        items = []
        for item in value:
            items.append(_map(item, fn, other))
        if _same(items, value) if is_dynamo_compiling() else all(map(is_, items, value)):
            return value
        return _sequence(value, items)
    if isinstance(value, dict):
        return _dict(value, fn, other)
    if isinstance(value, UserDict):
        data = _map(value.data, fn, other)
        if data is value.data:
            return value
        result = copy.copy(value)
        result.data = data
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return _fields(value, value, fn, other)
    return other(value)


_DEEP = 3  # the most objects inside each other whose attributes are walked
# Packages whose objects are not walked, because they are not batches of a user's class.
_NO_BATCHES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "pandas", __name__.partition(".")[0])) - {
    "__main__",
    "argparse",
    "types",
}


def _has_attributes(value: Any) -> bool:
    """Tell whether `value` is an object of a user's class, whose attributes may be tensors."""
    cls = type(value)
    return (
        type(getattr(value, "__dict__", None)) is dict
        # All classes of the mro are tested: a class that was made by a call of ABCMeta has "abc" as its module.
        and any(each.__module__.partition(".")[0] not in _NO_BATCHES for each in cls.__mro__)
        and not issubclass(cls, (types.FunctionType, types.ModuleType, type))
    )


def _is_among(value: Any, values: list[Any]) -> bool:
    return any(value is each for each in values)


def _object(value: Any, fn: TensorFn, other: ObjectFn) -> Any:
    """Return `value`, or a copy of it with the attributes that `_map` changed."""
    attributes = vars(value)
    found = [(name, item, _map(item, fn, other)) for name, item in list(attributes.items())]
    changed = [(name, item, new) for name, item, new in found if new is not item]
    if not changed:
        return value
    try:
        result = copy.copy(value)
    except Exception:
        return value
    if result is value or type(getattr(result, "__dict__", None)) is not dict:
        return value
    for name, item, new in changed:
        own = vars(result).get(name)
        if own is not item and type(own) is type(new) is type(item) and _has_attributes(own):
            # `copy.copy` copied the attribute too. Keep that copy: PyTorch Geometric's stores reference their owner.
            vars(own).update((key, each) for key, each in vars(new).items() if each is not vars(item).get(key))
        else:
            vars(result)[name] = new
    return result


def _same(items: Iterable[Any], originals: Iterable[Any]) -> bool:
    # torch.compile does not trace `is` of tuples, and torch 2.6 compares the tensors of lists by `!=`.
    return all(map(_is_same, items, originals))


def _is_same(item: Any, original: Any) -> bool:
    return _same(item, original) if isinstance(original, (tuple, list)) else item is original


def _sequence(value: Any, items: list[Any]) -> Any:
    """Return `items` as a tuple or list of the type of `value`."""
    cls: Any = type(value)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if isinstance(value, list):
        clone = copy.copy(value)
        clone[:] = items
        return clone
    if hasattr(cls, "n_sequence_fields"):  # torch.return_types: built by their own constructor only
        return cls(items)
    clone = tuple.__new__(cls, items)  # a subclass's constructor may take other arguments
    if hasattr(value, "__dict__"):
        vars(clone).update(vars(value))
    return clone


def _dict(value: dict[Any, Any], fn: TensorFn, other: ObjectFn) -> Any:
    changed = {}
    for key, item in value.items():
        new = _map(item, fn, other)
        if new is not item:
            changed[key] = new
    if type(value) is dict:
        return {**value, **changed} if changed else value
    result, items = value, value.items()
    if changed:
        result = copy.copy(value)
        for key, new in changed.items():
            result[key] = new
    if dataclasses.is_dataclass(value):
        # A dict that is also a dataclass (the output classes of transformers) holds each value twice, as item and as
        # field. Most classes keep the two equal. For the others the field is set here.
        aliases = {id(item): result[key] for key, item in items}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            if id(item) in aliases and getattr(result, field.name) is not aliases[id(item)]:
                object.__setattr__(result, field.name, aliases[id(item)])
    return result


def _fields(value: Any, result: Any, fn: TensorFn, other: ObjectFn) -> Any:
    for field in dataclasses.fields(value):
        try:
            item = getattr(value, field.name)
        except AttributeError:  # a field with init=False that is not set yet
            continue
        new = _map(item, fn, other)
        if new is not item:
            if result is value:
                result = copy.copy(value)
            object.__setattr__(result, field.name, new)  # `object.__setattr__` works on frozen dataclasses too
    return result


def same(one: Any, other: Any) -> bool:
    """Return whether two nested containers of tensors and numbers are equal bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
