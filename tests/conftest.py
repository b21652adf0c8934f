"""Fixtures for every test file: the devices and types of this machine, and a check that a test leaves no state."""

from __future__ import annotations

import copy
import gc
import logging
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import wrapper_backends
from ranks import Ranks
from searched import search_for
from syncs import hear_the_notice

from amp_patch import amp, multi_tensor
from amp_patch.casts import install
from amp_patch.casts import state as casts_state
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.support import held_names
from amp_patch.ways import per_parameter

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Tests that need a GPU.
collect_ignore = [] if torch.cuda.is_available() else ["multi_tensor/test_cuda.py", "around/test_cuda_graphs.py"]

# Where the extension is there, what speaks of the casts runs on the wrappers in C and on those in Python.
WRAPPERS = ["python"] if cast_wrappers.backend() == "python" else ["cpp", "python"]

if torch.cuda.is_available():
    hear_the_notice()
    # Runs are compared to the bit, and FP32 with FP32: cuDNN has faster ways, which add up in any order and in TF32.
    # By torch's older name for the latter, which all releases know; the newer ones say so, once.
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = False

# Where the tests run in a shell's background, this signal is ignored, and the processes that they start inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models here are tiny: a second thread only waits for the first, twenty times as long where a core is busy.
torch.set_num_threads(1)


class FailuresAtOnce:
    """Print a failure at once, because a run that is killed has no summary."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = str(report.longrepr).strip().splitlines()[-1:]
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {' '.join(reason)}")


# Each installation of casts looks for torch's functions in all modules, hundreds of which the tests' tools bring.
TOOLS = "_pytest hypothesis joblib mpmath networkx numpy pytest rich scipy setuptools sklearn sympy xdist"
held_names._NEVER |= {*TOOLS.split()}


@pytest.fixture(scope="module", autouse=True)
def searched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Search the modules of this test file for torch's functions, and not the modules of other test files."""
    with search_for(request.path):
        yield


def pytest_collection_finish() -> None:
    # To each logger that does not propagate pytest adds its handlers three times a test. Torch has 55 of these, which
    # takes a fifth of a short test's time.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()  # imported modules and collected tests are no garbage, and each gc.collect() of a test looked at all


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if multi_tensor.backend() != "cpp":
        items[:] = [item for item in items if item.get_closest_marker("extension") is None]


@pytest.hookimpl(trylast=True)  # the terminal reporter is registered by then
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")  # of a worker of xdist there is none
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """`amp.register_per_parameter_optimizer` of one test alone."""
    monkeypatch.setattr(per_parameter, "_registered", copy.copy(per_parameter._registered))


@pytest.fixture(autouse=True)
def restored():
    """Torch's namespace is process-wide: whatever a test installed goes when it ends."""
    yield
    amp.restore()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch.compile before and after the test, so that tests do not share compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two ranks of one gloo group, shared by all tests."""
    with Ranks(2) as both:
        yield both


@pytest.fixture(params=WRAPPERS)
def wrappers(request: pytest.FixtureRequest) -> Iterator[str]:
    """The casts on one kind of wrapper: its name."""
    with wrapper_backends.use_backend(request.param):
        yield request.param


@pytest.fixture
def clean_casts(wrappers: str) -> Iterator[None]:
    """Casts on both kinds of wrapper, and nothing of them left behind."""
    try:
        yield
    finally:
        install.uninstall()
        casts_state.set_default(None)
        casts_state.drop_cache()
    assert casts_state.current() is None and casts_state.outside(), "a test left a region behind"


def original(wrapper: Any) -> Any:
    """Return the function that a wrapper of either kind calls in the end."""
    return getattr(wrapper, "__wrapped__", None) or wrapper.__self__.__wrapped__
