"""Callbacks that run when other code imports a given module, so that amp_patch need not import it."""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Callable
from typing import Any

Then = Callable[[types.ModuleType], object]

_waiting: dict[str, list[Then]] = {}  # name of a module that is not imported yet -> callbacks


def when_imported(name: str, then: Then) -> None:
    """Call `then(module)` when the module `name` is imported: now, if it is already.

    If the module is not imported yet, `then` runs after the module's code and before the `import` statement returns, so
    that `from ... import` sees its changes. The import raises the exceptions of `then`. Registering imports nothing,
    and the same `then` is registered once.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return
    waiting = _waiting.setdefault(name, [])
    if then not in waiting:
        waiting.append(then)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that makes loaders of registered modules run the callbacks after `exec_module`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec that any other finder has for a registered module, with the loader wrapped; else None."""
        if name not in _waiting:
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (spec for find in others if find is not None and (spec := find(name, path, target)) is not None)
        spec = next(found, None)
        loader: Any = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            for then in _waiting.pop(module.__name__, ()):
                then(module)
            if not _waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec


_finder = _Finder()
