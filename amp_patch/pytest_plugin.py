"""A pytest plugin with the fixture `amp_level`.

A conftest.py loads it by `pytest_plugins = ["amp_patch.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.notebook import assert_level


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("amp_margin", "margin of amp_level in per cent of O0's result (default 0.2)", default="0.2")


@pytest.fixture
def amp_level(request: pytest.FixtureRequest) -> Callable[..., Comparison]:
    """Return `amp_patch.assert_level`, with the ini option amp_margin as the default margin."""
    margin = float(request.config.getini("amp_margin"))

    def checked(build_fn: Callable[[], Any], level: str, **options: Any) -> Comparison:
        return assert_level(build_fn, level, **{"margin": margin, **options})

    return checked
