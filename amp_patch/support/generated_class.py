"""Generated subclasses: behaviour added to one instance of somebody else's class, with no method rebound.

An instance is given a class that inherits from its own, as torch's `fully_shard` does. `isinstance` holds, name and
module are the base's, deepcopy and pickle work (a copy is built as the base and given the generated class again),
DataParallel's replicas get it through `type(self)`, and `restore` is one assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

# (mixin, base, key) -> class. Values are weak: a generated class lives as long as an instance.
_classes: WeakValueDictionary[tuple[type, type, tuple[str, ...]], type] = WeakValueDictionary()


class Generated:
    """Root of the mixins that `give` puts before a class; knows how such an instance is copied and pickled."""

    _amp_base: type
    _amp_mixin: type
    _amp_key: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        generated = _generated(self)

        def plain(value: Any) -> Any:
            return generated._amp_base if value is generated else value

        # A generated class has no importable name: build the base, then give the class again.
        function, args, *rest = reduced
        rebuild = (generated._amp_mixin, generated._amp_key, plain(function), tuple(map(plain, args)))
        return (needs_weights_only_false_or_save_fp32_copy, rebuild, *rest)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # `super().__init_subclass__` is not called: a base's registry of subclasses is for the user's own.
        pass

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        """Methods made for this base and key, beside those that the mixin defines."""
        return {}


class _MixinFirst(type):
    """The metaclass of generated classes, or an ancestor of theirs where the base has one of its own.

    `instance.__class__` accepts a class of the same memory layout alone, and the layout comes from the first base,
    which must be the instance's class. (`class Model(ABC, nn.Module)` has another layout than a class that begins with
    a mixin: ABC has no `__dict__`.) `mro` has the mixin's methods found first all the same.
    """

    def mro(cls) -> list[type]:
        """The generated class, the mixin's, then the base's."""
        if "_amp_base" not in vars(cls):  # a subclass that fully_shard or a parametrization made of a generated class
            return super().mro()
        bases: Any = cls.__bases__
        base, mixin = bases
        return [cls, *mixin.__mro__[:-1], *base.__mro__]  # without the mixin's `object`


def _new_class(base: type, mixin: type[Generated], names: dict[str, Any]) -> type:
    """A class of these bases, of the metaclass of `base`; the code of a user's metaclass is not called."""
    kind: Any = type(base)
    plain: Any = next(meta for meta in kind.__mro__ if meta.__module__ in ("abc", "builtins", "typing"))
    ordered = _MixinFirst if kind is type else type(kind.__name__, (_MixinFirst, kind), {"__module__": kind.__module__})
    bases = (base, mixin)
    generated: type = plain.__new__(ordered, base.__name__, bases, names)
    plain.__init__(generated, base.__name__, bases, names)
    return generated


def give(instance: Any, mixin: type[Generated], key: tuple[str, ...] = ()) -> None:
    """Give `instance` the generated subclass of its class for `mixin` and `key`, made once per class."""
    base = type(instance)
    generated = _classes.get((mixin, base, key))
    if generated is None:
        names = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "_amp_base": base,
            "_amp_mixin": mixin,
            "_amp_key": key,
        }
        generated = _new_class(base, mixin, {**mixin._amp_overrides(base, key), **names})
        _classes[mixin, base, key] = generated
    object.__setattr__(instance, "__class__", generated)


def take(instance: Any) -> None:
    """Give `instance` its own class back."""
    generated = type(instance)
    if "_amp_base" not in vars(generated):
        raise RuntimeError(
            f"restore: the class of this {generated.__name__} was changed after initialize() (parametrizations and "
            "fully_shard do so) and stays, though everything else is undone; undo such a change before restore()"
        )
    object.__setattr__(instance, "__class__", generated._amp_base)


def base_class(instance: Any) -> type:
    """The class of `instance` without ours."""
    return _generated(instance)._amp_base if isinstance(instance, Generated) else type(instance)


def key_of(instance: Generated) -> tuple[str, ...]:
    """The key that the class of `instance` was made with."""
    return instance._amp_key


def own_methods(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The plain methods that the user's classes add to torch.nn.Module's, `forward` aside."""
    seen = set(dir(nn.Module)) | {"forward"}
    for cls in base.__mro__:
        if cls.__module__.startswith("torch.") or cls is object:
            continue
        for name, value in vars(cls).items():
            if name in seen or (name.startswith("__") and name.endswith("__")):
                continue
            seen.add(name)
            if callable(value) and hasattr(value, "__get__") and hasattr(value, "__code__"):
                yield name, value


def _generated(instance: Any) -> Any:
    return next(cls for cls in type(instance).__mro__ if "_amp_base" in vars(cls))


def needs_weights_only_false_or_save_fp32_copy(
    mixin: type[Generated], key: tuple[str, ...], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Rebuild a pickled instance. torch.load(weights_only=True) refuses such a pickle with the name of this function.

    The error is torch's, raised where amp_patch may not even be imported: the name alone can say there what to do. No
    list of safe globals would do, since the policy and the masters in the pickle are objects of ours too.
    """
    instance = function(*args)
    give(instance, mixin, key)
    return instance


_rebuild = needs_weights_only_false_or_save_fp32_copy  # its name in pickles of amp_patch 0.3
