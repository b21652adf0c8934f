"""Replace attributes and put back exactly what was there."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from types import CellType
from typing import Any

_MISSING = object()


class Patches:
    """An undo stack of replaced attributes.

    `set` and `set_cell` replace something and remember how to undo it; `remove` undoes everything, last first, so that
    two replacements of one name come apart in the right order. The object holds whatever it replaced until then. Not
    thread-safe: its owner serialises the calls.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """How many replacements are in force."""
        return len(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Make `owner.name` be `value` until `remove`.

        `owner` is a class, a module or any object that takes attributes. The slot is read from the owner's own
        `__dict__`: a name that the owner only inherits, or answers through `__getattr__`, is deleted again by
        `remove`, not shadowed by a copy. A name that does not exist yet is deleted too.

        Raises:
            AttributeError, TypeError: the owner does not take the attribute; nothing has changed then.
        """
        found = _own_slot(owner, name)

        def undo() -> None:
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

        self.apply(lambda: setattr(owner, name, value), undo)

    def set_cell(self, cell: CellType, value: Any) -> None:
        """Make a closure's cell hold `value` until `remove`: redirects what a function captured from around it."""
        try:
            found = cell.cell_contents
        except ValueError:  # an empty cell
            found = _MISSING

        def fill(content: Any) -> None:
            if content is _MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = content

        self.apply(lambda: fill(value), lambda: fill(found))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Make `mapping[key]` be `value` until `remove`."""
        found = mapping.get(key, _MISSING)

        def undo() -> None:
            if found is _MISSING:
                del mapping[key]
            else:
                mapping[key] = found

        self.apply(lambda: mapping.__setitem__(key, value), undo)

    def remove(self) -> None:
        """Undo everything, last first.

        An undo that fails (somebody deleted the attribute meanwhile) does not keep the others from running; the first
        failure is raised at the end. The stack is empty afterwards in any case.
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
        # The undo goes in first: an interrupt between the two lines must not leave a change that nobody can undo.
        self._undo.append(undo)
        try:
            change()
        except BaseException:
            self._undo.pop()
            raise


def cell_of(function: Any) -> CellType | None:
    """The cell of a decorated function's closure that holds what it decorates, its `__wrapped__`; None without one."""
    wrapped = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents is wrapped and wrapped is not None), None)


class Installation:
    """What one file of amp_patch replaces in torch for the whole process: once, and undone as a whole.

    Any thread may call any method. An installation in force is known to `installations`, by which
    `amp_patch.restore()` undoes it, unless it is `of_process`: then only its own `uninstall` does.

    Attributes:
        lock: held while something is replaced or put back; the thread that holds it may take it again.
        patches: what is replaced now. Whoever adds to it holds the lock.
        installed: whether an `install` or `add` is in force.
    """

    def __init__(self, of_process: bool = False) -> None:
        self.of_process = of_process
        self.lock = threading.RLock()
        self.patches = Patches()
        self.installed = False

    def install(self, change: Callable[[Patches], Any]) -> None:
        """`add(change)`, unless something is installed already."""
        if not self.installed:
            with self.lock:
                if not self.installed:
                    self.add(change)

    def add(self, change: Callable[[Patches], Any]) -> None:
        """Call `change(patches)`, which replaces things. If it raises, all of this installation is undone."""
        with self.lock:
            _in_force[self] = None  # before `change`: `restore` must find what an interrupted `change` did
            try:
                change(self.patches)
                self.installed = True
            except BaseException:
                self.uninstall()
                raise

    def uninstall(self) -> None:
        """Undo everything, last first, as `Patches.remove`. Does nothing where nothing is installed."""
        with self.lock:
            self.installed = False
            try:
                self.patches.remove()
            finally:
                _in_force.pop(self, None)


_in_force: dict[Installation, None] = {}  # in the order of `add`


def installations() -> list[Installation]:
    """The installations in force that are not `of_process`, newest first."""
    return [found for found in reversed(list(_in_force)) if not found.of_process]


class Attempts:
    """Steps of a way back: one that fails does not keep the next from being taken; `finish` raises the first failure.

    An interrupt goes through at once.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def __call__(self, step: Callable[..., Any], *args: Any) -> None:
        """`step(*args)`."""
        try:
            step(*args)
        except Exception as error:
            self.errors.append(error)

    def finish(self) -> None:
        """Raise what failed first, if anything did."""
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
