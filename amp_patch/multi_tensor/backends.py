"""The choice between the extension `amp_patch._C` and plain torch, and `run`, which calls a kernel by that choice."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from amp_patch.multi_tensor.checks import Contract
from amp_patch.support.blocks import without_grad

BACKENDS = ("cpp", "torch")
_BUILD = "build it with `pip install --no-build-isolation .`"


def _load() -> tuple[ModuleType | None, str]:
    """Import the extension `amp_patch._C`. Return (extension, its devices and what it lacks), or (None, the reason)."""
    lacks, built_with = _build_notes()
    if built_with and _minor(built_with) != _minor(torch.__version__):
        # No trial import: a build for another torch may import without a missing symbol and read a wrong object layout.
        return None, (
            f"amp_patch._C was built with torch {built_with}, and this is torch {torch.__version__}: install the wheel "
            f"for this torch, or {_BUILD}"
        )
    try:
        extension = importlib.import_module("amp_patch._C")
    except ImportError as error:
        if lacks:
            return None, f"amp_patch._C is absent: {lacks}"
        # `error` has the loader's words about a build for another Python, C++ library or CUDA.
        return None, f"amp_patch._C cannot be imported: {error}; {_BUILD}"
    built = f"amp_patch._C is built for {', '.join(extension.devices)}"
    return extension, f"{built}; {lacks}" if lacks else built


def _build_notes() -> tuple[str, str]:
    """Return (reason, torch version) from `_build.py`, which setup.py writes; each is "" if unknown.

    The reason says why the extension is incomplete or absent. The version is that of the torch that the extension was
    built for. A clone without a build has no `_build.py`, and older builds wrote no `TORCH`.
    """
    try:
        build = importlib.import_module("amp_patch._build")
    except ImportError:
        return "", ""
    return build.REASON, getattr(build, "TORCH", "")


def _minor(version: str) -> list[str]:
    """Return the first two numbers of a version: an extension built with 2.13.0 loads in 2.13.1, not in 2.14.0."""
    return version.split(".")[:2]


_C, _reason = _load()
_forced = os.environ.get("AMP_PATCH_BACKEND", "")  # "": the extension where it can be imported
if _forced not in ("", *BACKENDS):
    raise ValueError(f"AMP_PATCH_BACKEND={_forced!r} is none of {', '.join(BACKENDS)}: correct it or unset it")
if _forced == "cpp" and _C is None:
    raise ImportError(f"AMP_PATCH_BACKEND=cpp, but {_reason}")
if _forced == "" and _C is None and _build_notes()[1]:  # an extension was built, and cannot be used
    warnings.warn(f"amp_patch runs on plain torch: {_reason}", RuntimeWarning, stacklevel=2)


# The extension if it runs the kernels; None if plain torch does. `use_backend` sets it for all threads, so each call
# must read it again.
active: Any = None if _forced == "torch" else _C


def extension() -> ModuleType | None:
    """Return the extension ``amp_patch._C``; None if it is absent or turned off (``backend()`` is ``"torch"``)."""
    return active


def backend() -> str:
    """Return ``"cpp"`` or ``"torch"``, the backend for devices that the extension is built for; others use torch."""
    return "torch" if active is None else "cpp"


def backend_reason() -> str:
    """Return the reason for the present ``backend()``, in one line."""
    return "AMP_PATCH_BACKEND or use_backend() asks for torch" if _C is not None and active is None else _reason


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the kernels on ``"cpp"`` or ``"torch"`` inside the block, in all threads. For tests and benchmarks."""
    global active
    if name not in BACKENDS:
        raise ValueError(f"use_backend: {name!r} is none of {', '.join(BACKENDS)}")
    if name == "cpp" and _C is None:
        raise RuntimeError(f"use_backend: {_reason}")
    before, active = active, _C if name == "cpp" else None
    try:
        yield
    finally:
        active = before


def run(contract: Contract, in_torch: Callable[..., Any], lists: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Call the extension's kernel if it is built for the tensors' device; otherwise call `in_torch`.

    The kernel and `in_torch` take the lists, then the arguments.

    Raises:
        ValueError, TypeError: the call breaks the contract. Nothing was written.
    """
    kernels = active
    if kernels is None:
        contract.check(lists, arguments)
        return _plainly(in_torch, *lists, *arguments)
    try:
        return getattr(kernels, contract.op)(*lists, *arguments)
    # Refused and TypeError come before the first write. pybind11 raises TypeError: an argument is no tensor or number.
    except (kernels.Refused, TypeError):
        device = contract.check(lists, arguments)
        if device.type in kernels.devices:
            raise
    return _plainly(in_torch, *lists, *arguments)


@without_grad
def _plainly(in_torch: Callable[..., Any], *arguments: Any) -> Any:
    return in_torch(*arguments)
