"""Modules in which a test file's installations of casts look for torch's functions.

A process that has collected all tests has the modules of 400 files and of each package that one of them imports. To
search them all takes ten times as long as most tests.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paths import TESTS

from amp_patch.support import held_names

FILES = {path.stem: path for path in TESTS.rglob("*.py")}
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)|import(?:orskip|_module)\(\"(\w+)", re.MULTILINE)


@contextmanager
def search_for(path: Path) -> Iterator[None]:
    """Leave the modules out that the test file `path` does not use."""
    never = held_names._NEVER
    held_names._NEVER = never | left_out(path, never)
    try:
        yield
    finally:
        held_names._NEVER = never


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
