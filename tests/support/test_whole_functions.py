"""Ctrl-C while a function runs that it must not interrupt."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from amp_patch import amp
from amp_patch.casts import regions
from amp_patch.support import interrupts
from amp_patch.support.interrupts import WholeFirst, hold_sigint, interruptible, sigint_handler, whole


@pytest.fixture(autouse=True)
def handler_fixture() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    amp.restore()
    signal.signal(signal.SIGINT, before)


def ctrl_c(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)


def wait(seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


done: list[str] = []


@whole
def inner(times: int) -> None:
    ctrl_c(times)
    wait(0.05)
    done.append("inner")


@whole
def outer(times: int = 1) -> None:
    inner(times)
    wait(0.05)
    done.append("outer")


def test_ctrl_c_waits_for_the_end_of_the_outermost_whole_function():
    hold_sigint()
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        outer()
        wait()
    assert done == ["inner", "outer"]
    wait(0.03)  # it came once


def test_a_second_ctrl_c_interrupts_at_once():
    hold_sigint()
    done.clear()
    with pytest.raises(KeyboardInterrupt):
        outer(2)
    assert done == []
    wait(0.03)  # the first does not come again


def test_user_code_in_a_whole_function_is_interrupted():
    @interruptible
    def closure() -> None:
        ctrl_c()
        wait()

    @whole
    def step() -> None:
        closure()

    hold_sigint()
    with pytest.raises(KeyboardInterrupt):
        step()


def test_a_handler_of_user_code_is_called_afterwards_and_is_back_after_restore():
    calls: list[int] = []

    def handler(number: int, frame: Any) -> None:
        calls.append(number)
        assert frame.f_code is wait.__code__

    signal.signal(signal.SIGINT, handler)
    hold_sigint()
    done.clear()
    outer()
    assert done == ["inner", "outer"] and calls == []
    wait(0.2)
    assert calls == [signal.SIGINT]
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is handler


def test_regions_take_the_place_before_a_handler_that_was_set_later():
    """As a notebook sets one in each cell."""
    for _ in range(3):
        with regions.region(None):
            found = sigint_handler()
            assert isinstance(found, WholeFirst) and found.before is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


needs_asyncio_handler = pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio sets no handler before 3.11")


async def saves(in_task: bool) -> str:
    """Enter a region, send SIGINT, and return "saved" if the task is cancelled."""
    try:
        if in_task:
            hold_sigint()
        ctrl_c()
        for _ in range(1000):
            await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        return "saved"
    return "not cancelled"


@needs_asyncio_handler
@pytest.mark.parametrize("before", [True, False], ids=["region before", "no region before"])
@pytest.mark.parametrize("in_task", [True, False], ids=["region in the task", "no region in the task"])
def test_ctrl_c_cancels_the_task_of_asyncio_run(before, in_task):
    if before:
        hold_sigint()
    for _ in range(2):
        assert asyncio.run(saves(in_task)) == "saved"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_asyncio_handler
def test_ctrl_c_in_a_whole_function_of_a_task_cancels_it_after_the_function():
    async def main() -> list[str]:
        hold_sigint()
        done.clear()
        try:
            outer()
            await asyncio.sleep(0.5)
        except asyncio.CancelledError:
            done.append("cancelled")
        return done

    assert asyncio.run(main()) == ["inner", "outer", "cancelled"]


@needs_asyncio_handler
def test_restore_in_a_task_leaves_the_handler_of_asyncio():
    async def main() -> str:
        hold_sigint()
        amp.restore()
        assert "_on_sigint" in str(signal.getsignal(signal.SIGINT))
        return await saves(False)

    assert asyncio.run(main()) == "saved"


def test_handlers_are_read_and_set_as_if_ours_were_not_there():
    functions = signal.getsignal, signal.signal
    hold_sigint()
    assert signal.signal(signal.SIGINT, ctrl_c) is signal.default_int_handler
    hold_sigint()
    assert signal.getsignal(signal.SIGINT) is ctrl_c
    assert type(sigint_handler()) is WholeFirst
    with pytest.raises(TypeError):
        signal.signal(signal.SIGINT, "no handler")
    assert signal.signal(signal.SIGINT, signal.SIG_IGN) is ctrl_c
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert (signal.getsignal, signal.signal) == functions


def test_restore_leaves_a_handler_that_user_code_has_set_around_ours():
    hold_sigint()
    ours = sigint_handler()

    def around(number: int, frame: Any) -> None:
        ours(number, frame)

    signal.signal(signal.SIGINT, around)
    hold_sigint()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
        wait()
    amp.restore()
    assert signal.getsignal(signal.SIGINT) is around


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_an_ignored_signal_stays_ignored_and_one_that_ends_the_process_ends_it(handler):
    signal.signal(signal.SIGINT, handler)
    with regions.region(None):
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_set_no_handler():
    thread = threading.Thread(target=hold_sigint)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupts.sigint_handler() is signal.default_int_handler
