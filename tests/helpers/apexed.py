"""Fixtures in which `import apex` finds amp_patch's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import amp_patch.apex as shim
from amp_patch.casts import install

LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(name="amp")
def apex_amp() -> Iterator[Any]:
    """`from apex import amp`, with a fresh state object; nothing called apex and nothing registered afterwards."""
    before = {name for name in sys.modules if name.partition(".")[0] in ("apex", "amp_C", "apex_C")}
    assert not before
    shim.install()
    module = importlib.import_module("apex.amp")
    known, registered = dict(vars(module._amp_state)), dict(install._registered)
    try:
        yield module
    finally:
        vars(module._amp_state).clear()
        vars(module._amp_state).update(known)
        install.uninstall()
        install._registered.clear()
        install._registered.update(registered)
        shim.uninstall()
