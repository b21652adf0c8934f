"""Property tests: hypothesis draws a few examples in `make test`, and many in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paths import ROOT

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed (it comes with the extra `dev`)")
from hypothesis import HealthCheck, given, settings  # noqa: E402

# Hypothesis writes its tables to the disk; it keeps no examples (database=None).
hypothesis.configuration.set_hypothesis_home_dir(ROOT / "build" / "hypothesis")


def hunt(examples: int, many: int | None = None, fresh: bool = True, **strategies: Any) -> Callable[[Any], Any]:
    """Return a property as two tests: a few fixed examples, and a slow test of `many` (ten times as many).

    The many are new in each run if `fresh`, which prints how to draw a failing one again; else always the same.
    """

    def decorate(test: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
        def property_test(slow: bool) -> None:
            how_many: dict[str, Any] = {"max_examples": examples, "derandomize": True}
            if slow:
                how_many = {"max_examples": many or 10 * examples, "derandomize": not fresh, "print_blob": fresh}
            # Shrinking and time are no concern of the verdict; a busy machine would make flaky tests of them.
            unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
            settings(database=None, **unhurried, **how_many)(given(**strategies)(test))()

        property_test.__doc__ = test.__doc__
        for mark in getattr(test, "pytestmark", ()):
            property_test = getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(property_test)
        return property_test

    return decorate
