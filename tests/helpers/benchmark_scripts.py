"""Scripts of benchmarks/, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from paths import BENCHMARKS


def load(name: str) -> ModuleType:
    """Import `benchmarks/name.py` as a new module that can import the scripts in its folder."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    return module
