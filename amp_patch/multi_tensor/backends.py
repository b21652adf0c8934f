"""What runs the kernels: the extension `amp_patch._C`, or plain torch, and why."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

BACKENDS = ("cpp", "torch")


def _load() -> tuple[ModuleType | None, str]:
    """The extension `amp_patch._C`, or None; and the reason, in a line."""
    try:
        noted = importlib.import_module("amp_patch._build").REASON  # by setup.py, where something went wrong
    except ImportError:
        noted = ""
    try:
        extension = importlib.import_module("amp_patch._C")
    except ImportError as error:
        if noted:
            return None, f"amp_patch._C is absent: {noted}"
        # A build for another torch or Python fails here with the loader's words.
        return None, f"amp_patch._C cannot be imported: {error}; build it with `pip install --no-build-isolation .`"
    built = f"amp_patch._C is built for {', '.join(extension.devices)}"
    return extension, f"{built}; {noted}" if noted else built


_C, _reason = _load()
_forced = os.environ.get("AMP_PATCH_BACKEND", "")  # "": the extension if there is one
if _forced not in ("", *BACKENDS):
    raise ValueError(f"AMP_PATCH_BACKEND={_forced!r} is none of {', '.join(BACKENDS)}: correct it or unset it")
if _forced == "cpp" and _C is None:
    raise ImportError(f"AMP_PATCH_BACKEND=cpp, but {_reason}")


def extension() -> ModuleType | None:
    """The extension ``amp_patch._C``; None where it is absent or turned off, and ``backend()`` is ``"torch"``."""
    return None if _forced == "torch" else _C


def backend() -> str:
    """``"cpp"`` or ``"torch"``: what runs the kernels, where the extension is built for the tensors' device."""
    return "torch" if extension() is None else "cpp"


def backend_reason() -> str:
    """One line: why ``backend()`` is what it is."""
    return "AMP_PATCH_BACKEND or use_backend() asks for torch" if _C is not None and _forced == "torch" else _reason


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the kernels on ``"cpp"`` or ``"torch"`` inside the block, in all threads. For tests and benchmarks."""
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"use_backend: {name!r} is none of {', '.join(BACKENDS)}")
    if name == "cpp" and _C is None:
        raise RuntimeError(f"use_backend: {_reason}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
