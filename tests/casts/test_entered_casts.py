"""Regions of casts: entered, left in any order, by exceptions and interrupts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from casting import (
    FULL,
    HALF,
    OFF,
    clean_fixture,  # noqa: F401  the fixture `_clean`
    installed_fixture,  # noqa: F401  the fixture `installed`
    needs_install,
    o1,
)
from torch import Tensor
from training import run_in_thread

from amp_patch.apex.amp.handle import disable_casts
from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import install, regions, thread_state
from amp_patch.casts import state as casts_state
from amp_patch.policy import Policy


def entered() -> Policy | None:
    """The policy of this thread's innermost region that has one."""
    policies = (entry.region.policy for entry in reversed(thread_state.this_thread.stack))
    return next((policy for policy in policies if policy is not None), None)


@needs_install
def test_regions_and_the_default() -> None:
    outer, inner = o1(HALF), o1(torch.bfloat16)
    assert casts_state.current() is None and entered() is None
    casts_state.set_default(outer)
    assert casts_state.current() is outer and entered() is None
    with regions.region(inner):
        assert casts_state.current() is inner and entered() is inner
        with regions.region(OFF):
            assert casts_state.current() is None and entered() is OFF
            assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is FULL
        with casts_autocast.disable_casts():
            assert casts_state.current() is None and entered() is inner, "disable_casts is transparent"
        assert casts_state.current() is inner
    assert casts_state.current() is outer
    casts_state.set_default(OFF)
    assert casts_state.current() is None


@pytest.mark.parametrize(
    "make", [lambda: regions.region(o1()), casts_autocast.disable_casts, lambda: regions.process_wide_region(o1())]
)
def test_an_exception_restores(make: Callable[[], Any]) -> None:
    outer = o1(torch.bfloat16)
    casts_state.set_default(outer)
    with pytest.raises(KeyError), make():
        raise KeyError
    assert casts_state.current() is outer and run_in_thread(casts_state.current) is outer


def suspended_in(block: regions.region) -> Iterator[None]:
    """A generator that is suspended in `block`, and started."""

    def generator() -> Iterator[None]:
        with block:
            yield

    started = generator()
    next(started)
    return started


def test_regions_end_wherever_the_garbage_collector_finds_their_generators() -> None:
    def forget_one() -> None:
        cycle: list[Any] = [suspended_in(regions.process_wide_region(None))]
        cycle.append(cycle)

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # without it each collection below would look at all that other tests have imported and compiled
    try:
        for allocations in range(1, 120):
            gc.set_threshold(100_000)
            forget_one()
            with regions.process_wide_region(None), disable_casts():
                gc.set_threshold(allocations)
            gc.set_threshold(*thresholds)
            gc.collect()
            assert casts_state.outside(), allocations
            assert not thread_state.this_thread.uncastable_entries, allocations
            assert not casts_state.overrides, allocations
    finally:
        gc.set_threshold(*thresholds)


def test_a_generator_that_ends_on_another_thread_takes_its_region_away() -> None:
    suspended = suspended_in(regions.process_wide_region(o1(torch.bfloat16)))
    assert casts_state.current() is not None
    run_in_thread(suspended.close)
    assert not casts_state.overrides, "the process default is as before, at once"
    with regions.region(None):
        pass
    assert casts_state.outside(), "the thread's own share went with its next region"
    assert casts_state.current() is None


def test_everywhere_is_the_default_of_other_threads() -> None:
    policy, base = o1(), o1(torch.bfloat16)
    with regions.process_wide_region(policy):
        assert casts_state.current() is policy and entered() is policy
        assert run_in_thread(casts_state.current) is policy
        with regions.process_wide_region(OFF):
            assert run_in_thread(casts_state.current) is None and entered() is OFF
        assert run_in_thread(casts_state.current) is policy
        casts_state.set_default(base)  # initialize() in the body: holds from the end of it on
        assert run_in_thread(casts_state.current) is policy
    assert casts_state.current() is base and run_in_thread(casts_state.current) is base


@needs_install
def test_region_as_decorator() -> None:
    a = torch.ones(2, 2)

    class Model:
        @casts_autocast.autocast(dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    assert Model().forward(a).dtype is torch.bfloat16
    assert Model.forward.__name__ == "forward"

    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    for suspended in (coroutine, generator):
        with pytest.raises(TypeError, match=rf"autocast: .*{suspended.__name__} is async or a generator"):
            casts_autocast.autocast()(suspended)


def test_autocast_arguments() -> None:
    assert casts_autocast.autocast("cpu").policy.dtype is torch.get_autocast_dtype("cpu")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert casts_autocast.autocast().policy.dtype is torch.get_autocast_dtype(default)
    assert casts_autocast.autocast("cpu", HALF, True, False).policy.dtype is HALF
    with pytest.raises(ValueError, match="autocast: device_type is 'gpu'"):
        casts_autocast.autocast("gpu")
    for wrong in (3, True):
        with pytest.raises(TypeError, match=f"autocast: device_type is {wrong}"):
            casts_autocast.autocast(wrong)  # type: ignore[arg-type]
    with casts_autocast.autocast(enabled=False):
        assert not install.installed()
    for wrong in (FULL, torch.int8, "half"):
        with pytest.raises(ValueError, match=r"autocast: dtype is .*; wanted torch.float16 or torch.bfloat16"):
            casts_autocast.autocast(dtype=wrong)  # type: ignore[arg-type]
