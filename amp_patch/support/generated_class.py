"""Generated subclasses, which override methods of one instance (a model, an optimizer) without rebinding any method.

`give` makes a subclass of the instance's class and assigns it to `instance.__class__`, as torch's `fully_shard` does.
So `isinstance` holds. The subclass has the name and module of its base. A copy, pickled or not, is built as an instance
of the base, then receives the generated class. DataParallel's replicas get the class through `type(self)`. `take`
assigns the base class again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

# (mixin, base, key) -> class. Values are weak: a generated class lives as long as an instance.
_classes: WeakValueDictionary[tuple[type, type, tuple[str, ...]], type] = WeakValueDictionary()


class Generated:
    """Base of the mixins that `give` puts before a class; defines how an instance is copied and pickled."""

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

        # A generated class has no importable name: the pickle builds the base, then gives the class.
        function, args, *rest = reduced
        rebuild = (generated._amp_mixin, generated._amp_key, plain(function), tuple(map(plain, args)))
        return (needs_weights_only_false_or_save_fp32_copy, rebuild, *rest)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # `super().__init_subclass__` is not called: a registry of subclasses in the base would list our class too.
        pass

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        """Return {name: method} made for `base` and `key`, in addition to the mixin's own methods."""
        return {}


class _MixinFirst(type):
    """The metaclass of generated classes, or a base of their metaclass if the user's class has one.

    It gives a generated class the bases (user's class, mixin), in this order, and yet puts the mixin's methods first.
    Python accepts an assignment to `instance.__class__` only if the memory layout stays the same. The layout comes from
    the first base, so the user's class must be the first. (With a mixin first, `class Model(ABC, nn.Module)` would get
    another layout, because ABC has no `__dict__`.)
    """

    def mro(cls) -> list[type]:
        """Return the generated class, then the mixin's classes, then the base's."""
        if "_amp_base" not in vars(cls):  # a subclass that fully_shard or a parametrization made of a generated class
            return super().mro()
        bases: Any = cls.__bases__
        base, mixin = bases
        return [cls, *mixin.__mro__[:-1], *base.__mro__]  # without the mixin's `object`


def _new_class(base: type, mixin: type[Generated], names: dict[str, Any]) -> type:
    """Make a class with the bases `base` and `mixin`, without running code of the user's metaclass."""
    kind: Any = type(base)
    plain: Any = next(meta for meta in kind.__mro__ if meta.__module__ in ("abc", "builtins", "typing"))
    ordered = _MixinFirst if kind is type else type(kind.__name__, (_MixinFirst, kind), {"__module__": kind.__module__})
    bases = (base, mixin)
    generated: type = plain.__new__(ordered, base.__name__, bases, names)
    plain.__init__(generated, base.__name__, bases, names)
    return generated


def give(instance: Any, mixin: type[Generated], key: tuple[str, ...] = ()) -> None:
    """Assign `instance` the generated subclass for its class, `mixin` and `key`. Each such class is made only once."""
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
    """Restore the class that `instance` had before `give`."""
    generated = type(instance)
    if "_amp_base" not in vars(generated):
        raise RuntimeError(
            f"restore: the class of this {generated.__name__} was changed after initialize() (parametrizations and "
            "fully_shard do so) and stays, though everything else is undone; undo such a change before restore()"
        )
    object.__setattr__(instance, "__class__", generated._amp_base)


def base_class(instance: Any) -> type:
    """Return the user's class of `instance`, without the generated one."""
    return _generated(instance)._amp_base if isinstance(instance, Generated) else type(instance)


def key_of(instance: Generated) -> tuple[str, ...]:
    """Return the key that the class of `instance` was made with."""
    return instance._amp_key


def own_methods(base: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield name and function of each method that the user's classes add to torch.nn.Module, except `forward`."""
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


def subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """Yield `base` and all classes that are derived from it."""
    yield base
    for each in base.__subclasses__():
        yield from subclasses(each)


def _generated(instance: Any) -> Any:
    return next(cls for cls in type(instance).__mro__ if "_amp_base" in vars(cls))


def needs_weights_only_false_or_save_fp32_copy(
    mixin: type[Generated], key: tuple[str, ...], function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Rebuild a pickled instance.

    The function has this name because `torch.load(weights_only=True)` refuses the pickle with an error that prints it.
    amp_patch may not be imported there, so the name is the only place for advice. Declaring the function safe would not
    help, because the pickle also contains the policy and the masters.
    """
    instance = function(*args)
    give(instance, mixin, key)
    return instance


_rebuild = needs_weights_only_false_or_save_fp32_copy  # its name in pickles of amp_patch 0.3
