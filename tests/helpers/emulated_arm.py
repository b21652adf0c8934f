"""A plugin of pytest for `tests/arm.py`: tests that start a program are left out, and the run ends at a time.

Each result is appended to the file RESULTS as it comes, because a run may be cut: "passed tests/a/test_b.py::test_c".
"""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

RESULTS, UNTIL = "AMP_PATCH_ARM_RESULTS", "AMP_PATCH_ARM_UNTIL"  # environment: a file; seconds since 1970
STARTS = "starts a program"


def _left_out(*args: Any, **kwargs: Any) -> NoReturn:
    pytest.skip(STARTS)


@pytest.fixture(scope="session", autouse=True)
def without_programs() -> Iterator[None]:
    """Skip a test where it starts a program: the kernel of this machine cannot run one for ARM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", _left_out)
        patch.setattr(multiprocessing.util, "spawnv_passfds", _left_out)
        yield


def pytest_runtest_protocol(item: pytest.Item) -> None:
    if time.time() > float(os.environ[UNTIL]):
        item.session.shouldstop = "out of time"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcome = "left-out" if report.skipped and STARTS in str(report.longrepr) else report.outcome
        with Path(os.environ[RESULTS]).open("a") as results:
            results.write(f"{outcome} {report.nodeid}\n")
