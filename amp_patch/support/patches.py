"""Patches: replacements of attributes, in torch mostly, that can be undone exactly.

`amp.restore` (frontend.py) undoes a training. It removes the installations of this file, and `restore` of
model/forward.py makes the models FP32 again, with the values of their masters.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, MutableMapping
from functools import partial
from types import CellType
from typing import Any

import torch

_MISSING = object()


class Patches:
    """An undo stack of replaced attributes.

    `set`, `set_cell` and `set_item` replace a value and store its undo. `remove` runs the undos, last first, so that
    two replacements of one name are undone correctly. Until then the object references the replaced values. It is not
    thread-safe: the owner serializes the calls.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Return the number of replacements in force."""
        return len(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` until `remove`.

        `owner` is a class, a module or any object with settable attributes. The old value is read from the owner's own
        `__dict__`. If the name is not in it (inherited, computed by `__getattr__`, or new), `remove` deletes the name.

        Raises:
            AttributeError, TypeError: `owner` refuses the attribute. Nothing has changed.
        """
        self._replace(_own_slot(owner, name), partial(setattr, owner, name), partial(delattr, owner, name), value)

    def set_cell(self, cell: CellType, value: Any) -> None:
        """Set a closure cell to `value` until `remove`: this redirects a variable that a function has captured."""
        try:
            found = cell.cell_contents
        except ValueError:  # an empty cell
            found = _MISSING
        self._replace(found, partial(setattr, cell, "cell_contents"), partial(delattr, cell, "cell_contents"), value)

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set `mapping[key]` to `value` until `remove`."""
        found = mapping.get(key, _MISSING)
        self._replace(found, partial(mapping.__setitem__, key), partial(mapping.__delitem__, key), value)

    def _replace(self, found: Any, put: Callable[[Any], Any], drop: Callable[[], Any], value: Any) -> None:
        """Call `put(value)` now; in `remove` call `put(found)`, or `drop` if nothing was found."""
        self.apply(partial(put, value), drop if found is _MISSING else partial(put, found))

    def remove(self) -> None:
        """Undo all replacements, last first.

        If an undo raises (user code has deleted the attribute), the others still run, and the first exception is raised
        at the end. The stack is empty afterwards.
        """
        failure: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def on_remove(self, undo: Callable[[], Any]) -> None:
        """Call `undo` in `remove`."""
        self._undo.append(undo)

    def apply(self, change: Callable[[], Any], undo: Callable[[], Any]) -> None:
        """Call `change` now, and `undo` in `remove`."""
        # The undo is stored first: an interrupt between the two lines must not leave a change without an undo.
        self._undo.append(undo)
        try:
            change()
        except BaseException:
            self._undo.pop()
            raise


def cell_of(function: Any) -> CellType | None:
    """Return the closure cell through which a decorated function calls its `__wrapped__`; None if there is none."""
    wrapped = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents is wrapped and wrapped is not None), None)


class Installation:
    """The replacements that one file of amp_patch makes in torch, for the whole process.

    They are made once and undone together. Any thread may call any method. `amp_patch.restore()` undoes all
    installations, except those with `of_process`, which only their own `uninstall` undoes.

    Attributes:
        lock: a re-entrant lock, held while something is replaced or restored.
        patches: the replacements in force. The caller must hold the lock to add to them.
        installed: whether an `install` or `add` is in force.
    """

    def __init__(self, of_process: bool = False) -> None:
        self.of_process = of_process
        self.lock = threading.RLock()
        self.patches = Patches()
        self.installed = False

    def install(self, change: Callable[[Patches], Any]) -> None:
        """Call `add(change)`, unless this installation is in force."""
        if not self.installed:
            with self.lock:
                if not self.installed:
                    self.add(change)

    def add(self, change: Callable[[Patches], Any]) -> None:
        """Call `change(patches)`, which makes replacements. If it raises, the whole installation is undone."""
        _cache_own_functions()
        with self.lock:
            _in_force[self] = None  # before `change`, so that `restore` also undoes an interrupted `change`
            try:
                change(self.patches)
                self.installed = True
            except BaseException:
                self.uninstall()
                raise

    def uninstall(self) -> None:
        """Undo all replacements, last first, as `Patches.remove` does. Without replacements this does nothing."""
        with self.lock:
            self.installed = False
            try:
                self.patches.remove()
            finally:
                _in_force.pop(self, None)


def _cache_own_functions() -> None:
    """Let torch cache its tables of its own functions, which must happen before they are replaced.

    It does so at the first `with torch.device(...)`, and when code with a tensor's subclass is first compiled. If the
    tables had our wrappers, the originals would ignore the device, and compiled code would ignore `__torch_function__`.
    """
    torch.overrides.get_overridable_functions()
    importlib.import_module("torch.utils._device")._device_constructors()


_in_force: dict[Installation, None] = {}  # in the order of `add`


def installations() -> list[Installation]:
    """Return the installations in force that are not `of_process`, newest first."""
    return [found for found in reversed(list(_in_force)) if not found.of_process]


class Attempts:
    """A sequence of undo steps, all of which run even if some raise: `finish` raises the first exception.

    A KeyboardInterrupt is raised at once.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def __call__(self, step: Callable[..., Any], *args: Any) -> None:
        """Run `step(*args)` and store its exception."""
        try:
            step(*args)
        except Exception as error:
            self.errors.append(error)

    def finish(self) -> None:
        """Raise the first stored exception, if there is one."""
        if self.errors:
            raise self.errors[0]


def _own_slot(owner: Any, name: str) -> Any:
    try:
        slots = vars(owner)
    except TypeError:  # no `__dict__`: an instance with slots
        return getattr(owner, name, _MISSING)
    if name not in slots and not isinstance(owner, type) and hasattr(getattr(type(owner), name, None), "__set__"):
        # A property or a slot of an instance: set and restored through its descriptor.
        return getattr(owner, name, _MISSING)
    return slots.get(name, _MISSING)


def is_untouched(step: Any) -> bool:
    """Tell whether `step`, of an optimizer's class, is from torch or amp_patch. False if other code has wrapped it."""
    layers = [step]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(inner)
    modules = [getattr(layer, "__globals__", {}).get("__name__", "") for layer in layers]
    return all(module.partition(".")[0] in ("torch", "amp_patch") for module in modules)
