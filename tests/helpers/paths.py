"""Paths in the repository, and modules of benchmarks/."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"diagnose", "run", "comparison"}  # the folders of amp_patch that stand above the training
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"


def benchmark_fixture(name: str) -> Any:
    """Return a fixture: the module `name` of benchmarks/, which can import its neighbours while tests of a file run."""

    @pytest.fixture(scope="module")
    def module() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(BENCHMARKS)
            yield importlib.import_module(name)

    return module
