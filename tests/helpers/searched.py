"""Modules in which a test file's installations of casts look for torch's functions.

A process that has collected all tests has the modules of 400 files, of each package that one of them imports and of all
of torch. To search them all takes ten times as long as most tests, and to pass over most of them half as long as many.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from paths import TESTS

from amp_patch.support import held_names

FILES = {path.stem: path for path in TESTS.rglob("*.py")}
# Functions of the op lists and of masters are in these.
_OF_TORCH = re.compile(r"torch(\.[a-z]+|\.nn\.(functional|utils|attention.*|utils\.convert_parameters))?")
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)|import(?:orskip|_module)\(\"(\w+)", re.MULTILINE)


@contextmanager
def search_for(path: Path) -> Iterator[None]:
    """Leave the modules out that the test file `path` does not use."""
    never = held_names._NEVER
    held_names._NEVER = never | left_out(path, never)
    if "sys.modules" not in path.read_text():
        held_names.sys = Loaded()
    try:
        yield
    finally:
        held_names._NEVER, held_names.sys = never, sys


class Loaded:
    """What the search reads of `sys`: modules that it does not pass over, and those by which it knows users of torch.

    The names are found again when modules have come or gone. A test file that edits `sys.modules` has `sys` itself.
    """

    def __init__(self) -> None:
        self._count, self._names = 0, []

    @property
    def modules(self) -> dict[str, ModuleType]:
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            self._names = [name for name in sys.modules if _OF_TORCH.fullmatch(name) or not _is_passed_over(name)]
        return {name: sys.modules[name] for name in self._names if name in sys.modules}


def _is_passed_over(name: str) -> bool:
    return name.partition(".")[0] in held_names._NEVER


def left_out(path: Path, never: Iterable[str]) -> frozenset[str]:
    """Return the first names of loaded modules that the test file `path` does not use.

    These are the other files under tests/, unless `path` or a helper of it imports them, and all packages outside of
    `never`, unless `path` or a helper of it imports one of them.
    """
    used = _used(path)
    loaded = {name.partition(".")[0] for name in sys.modules} - FILES.keys() - {*never, "__main__"}
    return frozenset((FILES.keys() | (loaded if loaded.isdisjoint(used) else set())) - used)


@functools.cache
def _used(path: Path) -> set[str]:
    """Return the first names of the modules that `path` and the helpers behind its imports have."""
    found, waiting = {path.stem}, [path]
    while waiting:
        names = {name for pair in _IMPORT.findall(waiting.pop().read_text()) for name in pair if name}
        waiting += [FILES[name] for name in (names - found) & FILES.keys()]
        found |= names
    return found
