"""Scripts for tests of `compare`."""

from __future__ import annotations

import os

import pytest
from paths import ROOT


@pytest.fixture(name="importable", autouse=True)
def importable_fixture(monkeypatch):
    """Make child processes import the package under test."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("AMP_PATCH_OPT_LEVEL", "AMP_PATCH_DTYPE", "AMP_PATCH_SEED"):
        monkeypatch.delenv(name, raising=False)
