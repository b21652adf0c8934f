"""A block in which O1's casts use wrappers in C++ or in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amp_patch import multi_tensor
from amp_patch.casts.install import installed, uninstall
from amp_patch.casts.state import PythonState, state, use_state
from amp_patch.casts.wrappers import backend


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use wrappers of the backend "cpp" or "python" inside the block, in all threads. No casts may be installed."""
    assert not installed()
    before, extension = state(), multi_tensor.extension()
    if name != backend():
        use_state(PythonState() if extension is None or name == "python" else extension.casts)
    try:
        yield
    finally:
        uninstall()
        if state() is not before:
            use_state(before)
